"""This release reads and writes the same data on disk and on the wire as earlier releases."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvxfer.backends.file import Integrity
from kvxfer.backends.pool import messages as pool
from kvxfer.storage import Namespace, Status
from kvxfer.telemetry.journal import list_files
from tests.golden import golden_set
from tests.golden.golden_set import CONVERSATIONS, INTEGRITIES, OF_OBJECTS, SETS, values_of

NUM_BLOCKS = 4


@pytest.fixture(params=SETS, ids=lambda folder: folder.name)
def golden(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Copy the set of a release, since its use changes it."""
    folder = tmp_path / "set"
    shutil.copytree(request.param, folder)
    return folder


@pytest.fixture
def records(golden: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((golden / golden_set.RECORDS).read_text())
    return found


def assert_keeps(now: Any, then: Any) -> None:
    """Check that values are unchanged, except for those that were added since."""
    if isinstance(then, dict):
        assert now.keys() >= then.keys()
        for name, value in then.items():
            assert_keeps(now[name], value)
    elif isinstance(then, list):
        assert len(now) >= len(then)
        for ours, theirs in zip(now, then, strict=False):
            assert_keeps(ours, theirs)
    else:
        assert now == then


@pytest.mark.parametrize("integrity", INTEGRITIES)
async def test_blocks_of_files_are_loaded(golden: Path, integrity: Integrity) -> None:
    async with golden_set.open_folder(golden / integrity.value, integrity) as backend:
        assert await golden_set.load_all(backend) == [Status.DONE] * NUM_BLOCKS


@pytest.mark.parametrize("integrity", OF_OBJECTS)
async def test_blocks_of_objects_are_loaded(golden: Path, integrity: Integrity) -> None:
    bucket = golden_set.read_bucket(golden / f"{integrity.value}-objects")
    async with golden_set.open_bucket(bucket, golden / "bucket", integrity) as backend:
        assert await golden_set.load_all(backend) == [Status.DONE] * NUM_BLOCKS


def assert_reads(messages: Sequence[Any], then: Sequence[dict[str, Any]]) -> None:
    for message, told in zip(messages, then, strict=True):
        assert type(message).__name__ == told["name"]
        assert_keeps(values_of(message), told["values"])


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_frames_of_peers_are_understood(records: dict[str, Any], name: str) -> None:
    assert_reads(golden_set.read_frames(records, name), records["nixl"][name])


def test_messages_of_host_pools_are_understood(records: dict[str, Any]) -> None:
    if records["pool"]["version"] != pool.PROTOCOL_VERSION:
        pytest.skip("pools and engines of two versions refuse each other")
    assert_reads(golden_set.read_pool(records), records["pool"]["messages"])


def test_namespaces_and_keys_are_found_again(records: dict[str, Any]) -> None:
    for fingerprint, values in records["namespaces"].items():
        assert msgspec.convert(values, Namespace).fingerprint == fingerprint
    assert golden_set.prompt_keys() == records["prompt_keys"]


def test_descriptions_of_caches_and_announcements_are_understood(records: dict[str, Any]) -> None:
    assert_reads([golden_set.read_description(records)], records["description"])
    assert_reads([golden_set.read_announcement(records)], records["announcement"])


def test_a_journal_is_read(golden: Path) -> None:
    [file] = list_files(golden / "journal")
    told = [values_of(each) for each in (file.began, *file.records())]
    expected = [values_of(each) for each in golden_set.JOURNALED]
    assert_keeps(told, expected)
    assert len(told) == len(expected)


def test_what_is_written_under_a_version_is_what_was_written_under_it(
    golden: Path, records: dict[str, Any], tmp_path: Path
) -> None:
    """A change of the format needs another version; the salts of sealed blocks differ."""
    golden_set.write_set(tmp_path / "now", tmp_path)
    for path in golden.rglob("*"):
        name = path.relative_to(golden)
        is_block = path.suffix == ".safetensors" or "objects" in name.parts[0]
        if is_block and not name.parts[0].startswith("sealed") and path.is_file():
            assert path.read_bytes() == (tmp_path / "now" / name).read_bytes(), name
    now = json.loads((tmp_path / "now" / golden_set.RECORDS).read_text())
    for part, told in records.items():
        is_other = isinstance(told, dict) and told.get("version") != now[part].get("version")
        assert is_other or told == now[part], f"{part} is written in another way"


def test_every_message_has_a_sample() -> None:
    legal = {name: each for name, (each, _) in CONVERSATIONS.items()}
    for name, samples in golden_set.samples().items():
        union = legal.get(name, golden_set.OF_POOL)
        assert {type(each) for each in samples} == golden_set.classes_of(union)
