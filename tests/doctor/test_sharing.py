"""Sharing: of two engines, stores or descriptions, every field that differs, with both values."""

import contextlib
import os
from pathlib import Path

import msgspec
import pytest

from kvxfer.doctor import Check, Finding, Severity, compare, is_comparable
from kvxfer.errors import InvalidArgumentError
from kvxfer.storage.keys import Namespace
from tests.cli import peers
from tests.cli.peers import ServeProcess, serving
from tests.cli.stores import Store
from tests.doctor.test_machine import is_complete
from tests.storage.test_keys import GROUP, NAMESPACE, OTHER_GROUP_VALUES

TIMEOUT_S = 20.0


def write(path: Path, namespace: Namespace) -> str:
    path.write_bytes(msgspec.json.encode(namespace.fields()))
    return str(path)


def find(*arguments: str) -> list[Finding]:
    findings = compare(arguments, timeout_s=TIMEOUT_S)
    assert all(map(is_complete, findings))
    return findings


def one(*arguments: str) -> Finding:
    (finding,) = find(*arguments)
    return finding


@pytest.mark.parametrize("field", OTHER_GROUP_VALUES)
def test_each_field_of_a_group_that_differs_is_named(tmp_path: Path, field: str) -> None:
    group = msgspec.structs.replace(GROUP, **{field: OTHER_GROUP_VALUES[field]})
    other = msgspec.structs.replace(NAMESPACE, groups=(group,))
    findings = find(write(tmp_path / "a.json", NAMESPACE), write(tmp_path / "b.json", other))
    assert findings
    assert all(each.subject.startswith(f"groups[0].{field}") for each in findings)


def test_equal_descriptions_share(tmp_path: Path) -> None:
    finding = one(write(tmp_path / "a.json", NAMESPACE), write(tmp_path / "b.json", NAMESPACE))
    assert finding.severity is Severity.OK
    assert NAMESPACE.fingerprint in finding.found


def test_a_store_is_compared_by_its_namespace_that_is_nearest(tmp_path: Path) -> None:
    store, other = Store(tmp_path / "store"), Store(tmp_path / "other")
    first, second = store.fill(num_blocks=1), store.fill(model="another", num_blocks=1)
    third = other.fill(model="another", num_blocks=1)
    assert second == third
    url = f"file://{store.root}"
    assert one(url, str(other.root)).severity is Severity.OK
    finding = one(f"{store.root}/{first.fingerprint}", f"file://{other.root}")
    assert finding.subject == "model"
    assert "'example/model' in" in finding.found
    assert "'another' in" in finding.found
    near = msgspec.structs.replace(first, revision="later")
    finding = one(url, write(tmp_path / "near.json", near))
    assert finding.subject == "revision"
    assert f"{url}/{first.fingerprint}" in finding.found


@pytest.mark.processes
def test_peers_are_compared_with_each_other_and_with_descriptions(tmp_path: Path) -> None:
    ours, theirs = peers.namespace(), peers.namespace("example/other")
    files = [
        write(tmp_path / f"{each.model.replace('/', '-')}.json", each) for each in (ours, theirs)
    ]

    def serve(file: str) -> contextlib.AbstractContextManager[ServeProcess]:
        return serving("--capacity", "1MiB", "--namespace", file)

    with serve(files[0]) as first, serve(files[0]) as same, serve(files[1]) as other:
        urls = [f"nixl://{peer.endpoint}" for peer in (first, same, other)]
        assert one(urls[0], urls[1]).severity is Severity.OK
        assert one(urls[0], files[0]).severity is Severity.OK
        for finding in (one(urls[0], urls[2]), one(urls[0], files[1])):
            assert (finding.subject, finding.severity) == ("model", Severity.ERROR)
            assert f"'example/model' in {urls[0]}, 'example/other' in " in finding.found
    finding = one(urls[0], files[0])
    assert (finding.check, finding.severity) == (Check.PEER, Severity.ERROR)


def test_a_path_that_hangs_is_a_finding_within_its_deadline(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    (finding,) = compare([str(pipe), str(pipe)], timeout_s=0.02)
    assert (finding.check, finding.severity) == (Check.SHARING, Severity.ERROR)
    assert "does not answer within" in finding.found
    writer = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
    pipe.unlink()  # so that its reader ends, and does not begin again
    os.close(writer)


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("nixl://node:7000", True),
        ("nixl://node:7000?secret_file=/etc/secret", True),
        ("nixl://node-1:7000,node-2:7000", False),
        ("nixl://?listen=127.0.0.1:0", False),
        ("file:///var/cache/kv", True),
        ("file:///var/cache/kv?capacity=1GiB", False),
        ("/var/cache/kv", True),
        ("namespace.json", True),
        ("host://?capacity=1GiB", False),
        ("nixl://[", False),
        ("file:///var/cache\n/kv", False),
    ],
)
def test_what_has_a_namespace_and_is_no_tier_is_comparable(argument: str, expected: bool) -> None:  # noqa: FBT001 - a parameter of the test
    assert is_comparable(argument) is expected


@pytest.mark.parametrize("name", ["gone.json", "text.json", "empty"])
def test_what_has_no_namespace_is_refused_by_name(tmp_path: Path, name: str) -> None:
    (tmp_path / "text.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    ours = write(tmp_path / "a.json", NAMESPACE)
    with pytest.raises(InvalidArgumentError, match=name):
        compare([ours, str(tmp_path / name)], timeout_s=TIMEOUT_S)
