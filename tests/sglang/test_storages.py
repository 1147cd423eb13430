"""The page about storages is right about SGLang's own; for the others, see tests/testing."""

from functools import partial

from examples.storages.injection import Injection
from examples.storages.probes import Probe, in_folder
from examples.storages.storages import find_storages
from tests.sglang.releases import NEWEST
from tests.testing import storages_page as page

STORAGE = next(each for each in find_storages() if "SGLang" in each.name)
pytestmark = page.MARKS


@page.EACH_PROBE
def test_the_table_says_what_the_storage_does(each: Probe) -> None:
    said = page.table(of="HiCacheFile")[each.what, f"{STORAGE.name} {NEWEST}"]
    assert in_folder(partial(each.run, STORAGE)) == said


@page.EACH_INJECTION
def test_the_table_says_what_a_caller_sees_of_injected_faults(each: Injection) -> None:
    page.require_told_of_faults(each, STORAGE)


def test_the_lines_say_what_the_conformance_suite_finds() -> None:
    lines = page.printed("conformance")
    assert any("HiCacheFile" in line for line in lines)
    assert "\n".join(lines) in page.TEXT
