"""What is written of storages is what `python -m examples.storages` finds."""

from functools import partial

import pytest

from examples.storages.injection import CALLERS, INJECTIONS, Injection
from examples.storages.probes import PROBES, Probe, in_folder, killed, two_writers
from examples.storages.storages import Storage, find_storages
from tests.testing.storages_page import TEXT, printed, table

STORAGES = find_storages()
SLOW = [pytest.mark.exhaustive, pytest.mark.timeout(300)]

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning"),
]


@pytest.mark.slow
@pytest.mark.parametrize("storage", STORAGES, ids=lambda each: each.name)
@pytest.mark.parametrize(
    "each",
    [
        pytest.param(each, id=each.what, marks=SLOW if each.run in {killed, two_writers} else [])
        for each in PROBES
    ],
)
def test_the_table_says_what_a_storage_does(storage: Storage, each: Probe) -> None:
    said = table(of="HiCacheFile")
    assert (
        in_folder(partial(each.run, storage))
        == said[each.what, f"{storage.name} {storage.version}"]
    )


@pytest.mark.slow
@pytest.mark.parametrize("storage", STORAGES, ids=lambda each: each.name)
@pytest.mark.parametrize("each", INJECTIONS, ids=lambda each: each.what)
def test_the_table_says_what_a_caller_sees_of_injected_faults(
    storage: Storage, each: Injection
) -> None:
    said = table(of="with a deadline")
    for caller, timeout_s in CALLERS.items():
        run = partial(each.run, storage, timeout_s=timeout_s)
        assert in_folder(run) == said[each.what, caller]


def test_the_tables_have_every_probe_fault_and_storage() -> None:
    said = table(of="HiCacheFile")
    assert {what for what, _ in said} == {each.what for each in PROBES}
    names = {name for _, name in said}
    assert {f"{each.name} {each.version}" for each in STORAGES} <= names
    assert len(names) == 4
    of_faults = table(of="with a deadline")
    assert set(of_faults) == {(each.what, caller) for each in INJECTIONS for caller in CALLERS}


@pytest.mark.slow
def test_the_lines_say_what_the_conformance_suite_finds() -> None:
    lines = printed("conformance")
    assert sum(not line.startswith(" ") for line in lines) == len(STORAGES)
    assert "\n".join(lines) in TEXT
