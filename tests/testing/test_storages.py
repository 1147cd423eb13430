"""The table of docs/testing.md: storages do what it says of them."""

import asyncio
import re
from pathlib import Path

import pytest

from examples.storages.probes import PROBES, Probe, killed, probe, two_writers
from examples.storages.storages import Storage, find_storages

PAGE = Path(__file__).parents[2] / "docs" / "testing.md"
STORAGES = find_storages()
SLOW = [pytest.mark.exhaustive, pytest.mark.timeout(300)]


def table() -> dict[tuple[str, str], str]:
    """Read the table: what it says of a probe and a storage."""
    rows = [line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines() if "|" in line]
    head = next(row for row in rows if any("HiCacheFile" in cell for cell in row))
    names = [re.sub(r" [\d.]+$", "", cell.strip("| ")) for cell in head]
    return {
        (row[0], name): cell.strip()
        for row in rows
        for name, cell in zip(names, row[1:], strict=False)
    }


@pytest.mark.timeout(60)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("storage", STORAGES, ids=lambda each: each.name)
@pytest.mark.parametrize(
    "each",
    [
        pytest.param(each, id=each.what, marks=SLOW if each.run in {killed, two_writers} else [])
        for each in PROBES
    ],
)
def test_the_table_says_what_a_storage_does(storage: Storage, each: Probe, tmp_path: Path) -> None:
    found = asyncio.run(probe(storage, each, tmp_path / "store"))
    assert found == table()[each.what, storage.name]


def test_the_table_has_every_probe_and_storage() -> None:
    said = table()
    assert {each.what for each in PROBES} <= {what for what, _ in said}
    assert {each.name for each in STORAGES} <= {name for _, name in said}
