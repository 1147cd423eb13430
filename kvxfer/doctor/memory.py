"""Checks of host memory: what is available, /dev/shm, and huge pages."""

import os
import re
from pathlib import Path

from kvxfer.backends.host.available_memory import AvailableMemory
from kvxfer.backends.host.control_groups import read_or_empty
from kvxfer.backends.host.segment import SHARED_MEMORY
from kvxfer.doctor.finding import Check, Examined, Finding
from kvxfer.storage.staging_memory import DEFAULT_STAGING_BYTES
from kvxfer.units import format_size

ROOT = Path("/")
HUGE_PAGES = "sys/kernel/mm/transparent_hugepage/enabled"

GIB = 1 << 30

LEAST_GIB = 16
"""Size of /dev/shm that is proposed where it is not known how much is needed."""

CONTAINER_DEFAULT_BYTES = 64 << 20
"""Size of /dev/shm in a container of which nothing else was said.

Source: https://docs.docker.com/reference/cli/docker/container/run/, `--shm-size`.
"""


def check_memory(needed_bytes: int = 0, *, root: Path = ROOT) -> Finding:
    """Check that the memory that is asked for is available, within all control groups.

    Args:
        needed_bytes: Bytes that are asked for; 0 where it is not known.
        root: Folder that has `proc` and `sys`.
    """
    at = Examined(Check.MEMORY, "control groups")
    available = AvailableMemory.read(root)
    shown = f"{format_size(available.num_bytes)} available by {available.limit}"
    if max(needed_bytes, DEFAULT_STAGING_BYTES) <= available.num_bytes:
        return at.ok(shown)
    needed = max(needed_bytes, DEFAULT_STAGING_BYTES)
    return at.error(
        f"{shown}, {format_size(needed)} needed",
        why="Host memory is reserved when it is opened: an engine that asks for more does not "
        "start.",
        mend=f"capacity={_fitting(available.num_bytes)}, or a larger limit in {available.limit}",
    )


def check_shared_memory(needed_bytes: int = 0, *, folder: Path = SHARED_MEMORY) -> Finding:
    """Check that /dev/shm has room for the host memory of an engine.

    Args:
        needed_bytes: Bytes that are asked for; 0 where it is not known.
        folder: The folder of shared memory.
    """
    at = Examined(Check.SHARED_MEMORY, str(folder))
    why = (
        "Under vLLM, host:// and the tiers below it keep blocks in shared memory: an engine whose "
        "capacity is larger than what is free does not start."
    )
    try:
        found = os.statvfs(folder)
    except OSError as exc:
        return at.error(f"{folder}: {exc.strerror}", why=why, mend=_enlarge(needed_bytes))
    size, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    shown = f"{format_size(free)} of {format_size(size)} free"
    mend = _enlarge(size - free + needed_bytes)
    if needed_bytes > free:
        return at.warning(f"{shown}, {format_size(needed_bytes)} needed", why=why, mend=mend)
    if size <= CONTAINER_DEFAULT_BYTES:
        return at.warning(f"{shown}: the default of a container", why=why, mend=mend)
    return at.ok(shown)


def check_huge_pages(root: Path = ROOT) -> Finding:
    """Check that memory may be in huge pages."""
    at = Examined(Check.HUGE_PAGES, "kernel")
    text = read_or_empty(root / HUGE_PAGES)
    chosen = re.search(r"\[(\w+)\]", text)
    if chosen is None:
        return at.ok("this kernel has none")
    if chosen[1] != "never":
        return at.ok(f"{chosen[1]}")
    return at.warning(
        f"/{HUGE_PAGES} is never",
        why="The page table of host memory is 512 times as long: copying, hashing and sending are "
        "slower.",
        mend=f"echo madvise > /{HUGE_PAGES}",
    )


def _enlarge(num_bytes: int) -> str:
    """Say how /dev/shm gets room for some bytes."""
    size = f"{max(num_bytes // GIB + 1, LEAST_GIB)}g"
    return f"docker run --shm-size={size} ...  # or: mount -o remount,size={size} /dev/shm"


def _fitting(num_bytes: int) -> str:
    """Format the largest capacity that fits, as a URL has it."""
    return f"{num_bytes >> 20}MiB"
