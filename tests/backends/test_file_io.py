"""The engines of the file backend move the same bytes and report the same failures."""

import contextlib
import errno
import mmap
import os
import stat
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from kvxfer.backends.file.io import (
    FileIO,
    IOVector,
    NamedFile,
    NewFile,
    Result,
    UringFileIO,
    open_engine,
)
from kvxfer.backends.file.io.file_io import MAX_FILES
from kvxfer.backends.file.io.ring import FSYNC, RENAMEAT, WRITEV, Ring
from kvxfer.runtime import Disk
from tests.backends.file_store import ENGINES, has_uring, open_descriptors, temporary_folder

PAGE = 4096
IOV_MAX = 1024


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Iterator[FileIO]:
    with contextlib.closing(open_engine(request.param)) as file_io:
        yield file_io


@pytest.fixture(params=["ext4", "tmpfs"])
def folder(request: pytest.FixtureRequest) -> Iterator[Path]:
    with temporary_folder(request.param) as folder:
        yield folder


class Memory:
    def __init__(self, num_bytes: int) -> None:
        self.bytes: NDArray[np.uint8] = np.frombuffer(mmap.mmap(-1, num_bytes), np.uint8)

    def fill(self, seed: int = 0) -> "Memory":
        self.bytes[:] = np.random.default_rng(seed).integers(1, 256, len(self.bytes), np.uint8)
        return self

    def vector(self, *pieces: tuple[int, int]) -> IOVector:
        vector = np.array(pieces, np.uint64).reshape(-1, 2)
        vector[:, 0] += np.uint64(self.bytes.ctypes.data)
        return vector

    def gather(self, *pieces: tuple[int, int]) -> bytes:
        return b"".join(self.bytes[start : start + length].tobytes() for start, length in pieces)


def errors(results: Sequence[Result]) -> list[int | None]:
    return [result.errno if isinstance(result, OSError) else None for result in results]


@pytest.fixture
def folder_fd(folder: Path) -> Iterator[int]:
    before, fd = open_descriptors(), os.open(folder, os.O_RDONLY)
    yield fd
    os.close(fd)
    assert open_descriptors() == before, "an engine has closed all files"


@pytest.mark.parametrize("num_pieces", [1, 7, IOV_MAX + 1, 3 * IOV_MAX])
def test_scattered_pieces_are_written_and_read_in_order_and_nothing_between_them_is_touched(
    engine: FileIO, folder: Path, num_pieces: int
) -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 700, num_pieces)
    starts = np.cumsum(lengths + rng.integers(0, 50, num_pieces)) - lengths
    order = rng.permutation(num_pieces)
    pieces = list(zip(starts[order].tolist(), lengths[order].tolist(), strict=True))
    num_bytes = int(starts[-1] + lengths[-1])
    source, target = Memory(num_bytes).fill(), Memory(num_bytes)
    fd = os.open(folder / "file", os.O_RDWR | os.O_CREAT)
    assert engine.write(fd, source.vector(*pieces)) == lengths.sum()
    assert (folder / "file").read_bytes() == source.gather(*pieces)
    assert engine.read(fd, target.vector(*pieces)) == lengths.sum()
    os.close(fd)
    assert target.gather(*pieces) == source.gather(*pieces)
    assert np.count_nonzero(target.bytes) == lengths.sum()


@pytest.mark.parametrize("durable", [False, True])
@pytest.mark.parametrize("padding", [0, 7])
def test_whole_files_get_their_names_and_the_others_leave_nothing(
    engine: FileIO, folder: Path, folder_fd: int, *, durable: bool, padding: int
) -> None:
    num_files, size = MAX_FILES, 1000
    memory = Memory(PAGE * num_files).fill()
    for _ in range(3):  # a failure must leave nothing in the engine that affects later calls
        for path in folder.iterdir():
            path.unlink()
        (folder / "0").symlink_to("1")  # not a file, so it is replaced
        (folder / "2").write_bytes(b"old")
        sizes = [size - padding] * num_files
        files = [
            NewFile(folder_fd, b"%d.tmp" % i, b"%d" % i, memory.vector((PAGE * i, size)), sizes[i])
            for i in range(num_files)
        ]
        files[3] = files[3]._replace(name=b"no folder/3")
        files[4] = files[4]._replace(vector=np.array([[1 << 40, size]], np.uint64))
        results = engine.write_named(files, 0, durable=durable)
        assert errors(results[:5]) == [None, None, errno.EEXIST, errno.ENOENT, errno.EFAULT]
        assert results[:2] + results[5:] == sizes[3:]
        there = {path.name: path.read_bytes() for path in folder.iterdir()}
        assert there.pop("2") == b"old"
        assert there == {
            str(index): memory.gather((PAGE * index, size - padding))
            for index in range(num_files)
            if index not in (2, 3, 4)
        }
        assert (folder / "0").lstat().st_mode == stat.S_IFREG | 0o600


@pytest.mark.skipif(not has_uring(), reason="needs io_uring")
@pytest.mark.parametrize("durable", [False, True])
def test_what_has_to_survive_is_on_the_disk_before_it_has_its_name_in_a_ring_and_without(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, durable: bool
) -> None:
    done: list[int] = []
    synced: list[int] = []
    run, memory, folder_fd = Ring.run, Memory(PAGE).fill(), os.open(tmp_path, os.O_RDONLY)

    def run_noted(ring: Ring, steps: NDArray[np.void]) -> NDArray[np.int32]:
        done.extend(steps["opcode"].tolist())
        return run(ring, steps)

    monkeypatch.setattr(Ring, "run", run_noted)
    monkeypatch.setattr(Disk, "fsync", staticmethod(synced.append))
    (tmp_path / "1").symlink_to("0")  # which a ring does not replace
    files = [
        NewFile(folder_fd, b"%d.tmp" % i, b"%d" % i, memory.vector((0, 16)), 16) for i in range(2)
    ]
    with contextlib.closing(UringFileIO()) as engine:
        assert engine.write_named(files, 0, durable=durable) == [16, 16]
    os.close(folder_fd)
    steps = [each for each in done if each in (WRITEV, FSYNC, RENAMEAT)]
    assert steps == [WRITEV, *[FSYNC] * durable, RENAMEAT] * 2
    assert len(synced) == durable


@pytest.mark.skipif(not has_uring(), reason="needs io_uring")
def test_where_no_more_rings_can_be_had_plain_calls_take_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "no more descriptors")

    engine, memory = UringFileIO(), Memory(PAGE).fill()
    stored, vector = memory.gather((0, 16)), memory.vector((0, 16))
    monkeypatch.setattr(mmap, "mmap", refuse)
    assert type(open_engine("auto")) is FileIO
    folder_fd = os.open(tmp_path, os.O_RDONLY)
    new = NewFile(folder_fd, b"new.tmp", b"new", vector, 16)
    named = NamedFile(folder_fd, b"new", vector)
    with ThreadPoolExecutor(1) as other_thread:
        made = other_thread.submit(engine.write_named, [new], 0, durable=False)
        assert made.result() == [16]
        memory.bytes[:] = 0
        read = other_thread.submit(engine.read_named, [named], os.O_RDONLY)
        assert read.result() == [16]
    assert (tmp_path / "new").read_bytes() == memory.gather((0, 16)) == stored
    os.close(folder_fd)
    engine.close()


@pytest.mark.skipif(not has_uring(), reason="needs io_uring")
def test_a_kernel_that_cannot_cut_files_in_a_ring_writes_those_with_padding_by_plain_calls(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("kvxfer.backends.file.io.uring.FTRUNCATE", 255)  # of no kernel
    memory, folder_fd = Memory(PAGE).fill(), os.open(tmp_path, os.O_RDONLY)
    new = NewFile(folder_fd, b"new.tmp", b"new", memory.vector((0, 16)), 9)
    with contextlib.closing(UringFileIO()) as engine:
        assert engine.write_named([new], 0, durable=False) == [9]
    os.close(folder_fd)
    assert (tmp_path / "new").read_bytes() == memory.gather((0, 9))
