"""The page about storages says what `python -m examples.storages` finds."""

from functools import partial

import pytest

from examples.storages.injection import CALLERS, INJECTIONS, Injection
from examples.storages.probes import PROBES, Probe, in_folder
from examples.storages.storages import Storage, find_storages
from tests.testing import storages_page as page

STORAGES = find_storages()
pytestmark = page.MARKS


@pytest.mark.slow
@pytest.mark.parametrize("storage", STORAGES, ids=lambda each: each.name)
@page.EACH_PROBE
def test_the_table_says_what_a_storage_does(storage: Storage, each: Probe) -> None:
    said = page.table(of="HiCacheFile")
    assert (
        in_folder(partial(each.run, storage))
        == said[each.what, f"{storage.name} {storage.version}"]
    )


@pytest.mark.slow
@pytest.mark.parametrize("storage", STORAGES, ids=lambda each: each.name)
@page.EACH_INJECTION
def test_the_table_says_what_a_caller_sees_of_injected_faults(
    storage: Storage, each: Injection
) -> None:
    page.require_told_of_faults(each, storage)


def test_the_tables_have_every_probe_fault_and_storage() -> None:
    said = page.table(of="HiCacheFile")
    assert {what for what, _ in said} == {each.what for each in PROBES}
    names = {name for _, name in said}
    assert {f"{each.name} {each.version}" for each in STORAGES} <= names
    assert len(names) == 4
    of_faults = page.table(of="with a deadline")
    assert set(of_faults) == {(each.what, caller) for each in INJECTIONS for caller in CALLERS}


@pytest.mark.slow
def test_the_lines_say_what_the_conformance_suite_finds() -> None:
    lines = page.printed("conformance")
    assert sum(not line.startswith(" ") for line in lines) == len(STORAGES)
    assert "\n".join(lines) in page.TEXT
