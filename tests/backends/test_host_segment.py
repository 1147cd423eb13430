"""Shared memory is seen by every process, owned by one, and left behind by none."""

import multiprocessing
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from kvxfer.backends.host import segment as segment_module
from kvxfer.backends.host.segment import SHARED_MEMORY, SharedSegment
from kvxfer.errors import (
    BackendUnavailableError,
    CapacityError,
    InvalidArgumentError,
)
from tests.backends.processes import start

SIZE = 1 << 16

pytestmark = pytest.mark.processes


def map_segment(name: str, folder: Path, told: Connection) -> None:
    segment_module.SHARED_MEMORY = folder
    with closing(SharedSegment(name, b"header", SIZE)) as segment:
        segment.memory[5000] += 1
        told.send("ready")
        told.recv()


def create_for_ever(name: str, folder: Path, told: Connection) -> None:
    """Stop in the middle of the creation of a segment."""

    def reserve(fd: int, num_bytes: int) -> None:
        told.send("ready")
        told.recv()

    segment_module.SHARED_MEMORY = folder
    segment_module._reserve = reserve
    SharedSegment(name, b"header", SIZE)


@pytest.fixture
def name(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Name of a segment, in a folder of our own: others clean up the common one."""
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as folder:
        monkeypatch.setattr(segment_module, "SHARED_MEMORY", Path(folder))
        yield "test"
        assert not path_of("test").exists()


def path_of(name: str) -> Path:
    return segment_module.SHARED_MEMORY / f"kvxfer-{name}"


@contextmanager
def child_with(
    name: str, work: Callable[..., None] = map_segment
) -> Iterator[tuple[BaseProcess, Connection]]:
    told, its_end = multiprocessing.Pipe()
    child = start(work, name, segment_module.SHARED_MEMORY, its_end)
    try:
        assert told.recv() == "ready"
        yield child, told
    finally:
        child.kill()
        child.join()


def test_two_processes_see_the_same_bytes_and_the_last_one_removes_them(name: str) -> None:
    segment = SharedSegment(name, b"header", SIZE)
    segment.memory[5000] = 41
    with child_with(name) as (child, told):
        assert segment.memory[5000] == 42
        segment.close()
        assert path_of(name).exists()
        told.send("end")
        child.join()
        assert child.exitcode == 0


def test_what_a_killed_process_left_is_replaced_by_zeroed_memory_or_removed_by_the_next_one(
    name: str,
) -> None:
    with child_with(name):
        pass
    assert path_of(name).exists()
    segment = SharedSegment(name, b"another header", 2 * SIZE)
    assert len(segment.memory) == 2 * SIZE
    assert segment.memory[5000] == 0
    assert path_of(name).stat().st_mode & 0o777 == 0o600
    with child_with("killed"):
        pass
    SharedSegment("other", b"header", SIZE).close()
    assert not path_of("killed").exists()
    assert path_of(name).exists(), "it is used"
    segment.close()


@pytest.mark.parametrize(
    ("header", "size", "shown"),
    [(b"other", SIZE, "other"), (b"head", SIZE, "head.;"), (b"header", 2 * SIZE, str(2 * SIZE))],
)
def test_a_process_that_expects_something_else_is_refused_with_both_values(
    name: str, header: bytes, size: int, shown: str
) -> None:
    segment = SharedSegment(name, b"header", SIZE)
    with pytest.raises(InvalidArgumentError, match=shown) as info:
        SharedSegment(name, header, size)
    assert "header" in str(info.value)
    segment.close()


def test_a_process_that_stops_while_it_creates_is_waited_for_until_a_deadline_or_its_death(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segment_module, "CREATION_TIMEOUT_S", 0.2)
    with (
        child_with(name, create_for_ever),
        pytest.raises(BackendUnavailableError, match=f"{path_of(name)}: another process"),
    ):
        SharedSegment(name, b"header", SIZE)
    SharedSegment(name, b"header", SIZE).close()


@pytest.mark.parametrize("bad", ["../escape", "a/b", "a b", "x\n"])
def test_a_name_cannot_leave_the_folder(bad: str) -> None:
    with pytest.raises(InvalidArgumentError):
        SharedSegment(bad, b"header", SIZE)


def test_memory_that_is_not_there_is_refused_and_nothing_is_left(name: str) -> None:
    with pytest.raises(CapacityError) as info:
        SharedSegment(name, b"header", 1 << 50)
    assert info.value.needed_bytes == 1 << 50
    assert 0 < info.value.available_bytes < 1 << 50
