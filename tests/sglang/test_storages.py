"""What is written of SGLang's own storage is found; of the others, see tests/testing."""

from functools import partial

import pytest

from examples.storages.injection import CALLERS, INJECTIONS, Injection
from examples.storages.probes import PROBES, Probe, in_folder, killed, two_writers
from examples.storages.storages import find_storages
from tests.sglang.releases import NEWEST
from tests.testing.storages_page import TEXT, printed, table

STORAGE = next(each for each in find_storages() if "SGLang" in each.name)
SLOW = [pytest.mark.exhaustive, pytest.mark.timeout(300)]

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning"),
]


@pytest.mark.parametrize(
    "each",
    [
        pytest.param(each, id=each.what, marks=SLOW if each.run in {killed, two_writers} else [])
        for each in PROBES
    ],
)
def test_the_table_says_what_the_storage_does(each: Probe) -> None:
    said = table(of="HiCacheFile")[each.what, f"{STORAGE.name} {NEWEST}"]
    assert in_folder(partial(each.run, STORAGE)) == said


@pytest.mark.parametrize("each", INJECTIONS, ids=lambda each: each.what)
def test_the_table_says_what_a_caller_sees_of_injected_faults(each: Injection) -> None:
    said = table(of="with a deadline")
    for caller, timeout_s in CALLERS.items():
        run = partial(each.run, STORAGE, timeout_s=timeout_s)
        assert in_folder(run) == said[each.what, caller]


def test_the_lines_say_what_the_conformance_suite_finds() -> None:
    lines = printed("conformance")
    assert any("HiCacheFile" in line for line in lines)
    assert "\n".join(lines) in TEXT
