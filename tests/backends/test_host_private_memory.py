"""Private memory: reserved at once, zeroed, in huge pages, and not inherited by forks."""

import re
from pathlib import Path

import pytest

from kvxfer.backends.host.available_memory import AvailableMemory
from kvxfer.backends.host.mapped_memory import PrivateMemory
from kvxfer.errors import CapacityError

SIZE = 8 << 20
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def mapping_of(memory: PrivateMemory) -> dict[str, str]:
    """Read the kernel's data of the mapping. Source: proc_pid_smaps(5)."""
    address, fields = memory.region.address, dict[str, str]()
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= address < int(found[2], 16)
        elif inside:
            name, _, value = line.partition(":")
            fields[name] = value.strip()
    return fields


def kib(value: str) -> int:
    return int(value.removesuffix(" kB"))


def test_it_is_zeroed_and_there_before_anyone_touches_it() -> None:
    memory = PrivateMemory(SIZE)
    assert kib(mapping_of(memory)["Rss"]) >= SIZE >> 10
    assert memory.memory.shape == (SIZE,)
    assert not memory.memory.any()
    memory.close()


@pytest.mark.skipif(
    not HUGE_PAGES.exists() or "[never]" in HUGE_PAGES.read_text(),
    reason="this system has no transparent huge pages",
)
def test_it_is_in_huge_pages() -> None:
    memory = PrivateMemory(SIZE)
    assert kib(mapping_of(memory)["AnonHugePages"]) > 0
    memory.close()


def test_a_forked_process_does_not_get_it() -> None:
    memory = PrivateMemory(SIZE)
    assert "dc" in mapping_of(memory)["VmFlags"].split()
    memory.close()


def test_memory_that_is_not_there_is_refused_with_what_there_is() -> None:
    with pytest.raises(CapacityError) as info:
        PrivateMemory(1 << 50)
    assert info.value.needed_bytes == 1 << 50
    assert 0 < info.value.available_bytes < 1 << 50


def test_no_more_is_taken_than_the_system_says_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    little = AvailableMemory(SIZE - 1, "/sys/fs/cgroup/memory.max")
    monkeypatch.setattr(AvailableMemory, "read", lambda: little)
    with pytest.raises(CapacityError, match=rf"{little.limit}.* {SIZE - 1} are available"):
        PrivateMemory(SIZE)
