"""`kvxfer ls`: its table, and the same as JSON."""

import json
import os
import time
from pathlib import Path

import pytest

from kvxfer.cli import main
from tests.cli.stores import FILE_BYTES, NUM_BLOCKS, Store


def test_the_table_has_a_line_per_namespace_and_a_total(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    namespaces = [store.fill(), store.fill(model="another", num_blocks=2)]
    for key, days in zip(store.keys, (3, 1), strict=False):
        used = time.time() - days * 86400 - 60
        os.utime(store.path(namespaces[1], key), (used, used))
    os.truncate(store.path(namespaces[0], store.keys[0]), 9000)
    main(["fsck", str(store.root), "--repair"])
    capsys.readouterr()
    assert main(["ls", str(store.root)]) == 0
    header, *lines, total = capsys.readouterr().out.splitlines()
    assert header.split() == (
        "NAMESPACE MODEL DTYPE INTEGRITY BLOCKS SIZE OLDEST USE NEWEST USE BAD".split()  # noqa: SIM905
    )
    by_fingerprint = {line.split()[0]: line for line in lines}
    assert list(by_fingerprint) == sorted(space.fingerprint for space in namespaces)
    other = by_fingerprint[namespaces[1].fingerprint].split()
    assert other[1:5] == ["another", "fast", "2", "24.0"]
    assert other[5:] == ["KiB", "3", "d", "ago", "1", "d", "ago", "0"]
    ours = by_fingerprint[namespaces[0].fingerprint].split()
    assert ours[1:6] == ["example/model", "fast", "7", "84.0", "KiB"]
    assert ours[-1] == "1"
    assert total.split()[:5] == ["total:", "2", "9", "108.0", "KiB"]


def test_json_is_a_list_of_objects(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    namespace = store.fill()
    began = time.time()
    assert main(["ls", str(store.root), "--json"]) == 0
    (usage,) = json.loads(capsys.readouterr().out)
    assert usage["fingerprint"] == namespace.fingerprint
    assert usage["namespace"]["model"] == "example/model"
    assert usage["integrity"] == ["fast"]
    assert usage["num_blocks"] == NUM_BLOCKS
    assert usage["num_bytes"] == NUM_BLOCKS * FILE_BYTES == store.counted_bytes
    assert usage["num_quarantined"] == usage["quarantined_bytes"] == 0
    assert 0 <= began - usage["newest_use"] <= began - usage["oldest_use"] < 60


def test_keys_are_those_that_a_lookup_finds(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    namespaces = [store.fill(), store.fill(model="another", num_blocks=2)]
    os.truncate(store.path(namespaces[0], store.keys[0]), 9000)
    main(["fsck", str(store.root), "--repair"])
    capsys.readouterr()
    assert main(["ls", str(store.root), "--keys"]) == 0
    kept = [(namespaces[0], store.keys[1:NUM_BLOCKS]), (namespaces[1], store.keys[:2])]
    assert sorted(capsys.readouterr().out.splitlines()) == sorted(
        f"{namespace.fingerprint} {key.hex()}" for namespace, keys in kept for key in keys
    )


def test_a_model_cannot_give_orders_to_the_terminal(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    store.fill(model="\x1b[2Jmodel\nother", num_blocks=1)
    assert main(["ls", str(store.root)]) == 0
    assert "  \\x1b[2Jmodel\\nother  " in capsys.readouterr().out


@pytest.mark.parametrize("names", [[], ["notes.txt"], ["d41d8cd98f00b204e9800998ecf8427e/a.txt"]])
def test_a_folder_that_holds_no_store_is_misuse(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], names: list[str]
) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("mine")
    for arguments in ([], ["--json"]):
        assert main(["ls", str(tmp_path), *arguments]) == 2
        printed = capsys.readouterr()
        assert not printed.out
        assert printed.err.startswith(f"kvxfer ls: path is '{tmp_path}'; expected the root of a st")
