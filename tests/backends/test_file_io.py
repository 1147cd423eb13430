"""The engines of the file backend move the same bytes and report the same failures."""

import errno
import mmap
import os
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
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
    PosixFileIO,
    Result,
    UringFileIO,
    open_engine,
)
from kvxfer.backends.host.segment import SHARED_MEMORY
from tests.backends.file_store import has_uring

PAGE = 4096
IOV_MAX = 1024

OpenFile = Callable[..., int]


@pytest.fixture(params=["posix", "uring"])
def engine(request: pytest.FixtureRequest) -> Iterator[FileIO]:
    try:
        file_io: FileIO = PosixFileIO() if request.param == "posix" else UringFileIO()
    except OSError as exc:
        pytest.skip(str(exc))
    yield file_io
    file_io.close()


@pytest.fixture(params=["disk", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    if request.param == "disk":
        yield tmp_path
    else:
        with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as path:
            yield Path(path)


@pytest.fixture
def open_file(folder: Path) -> Iterator[OpenFile]:
    """Function that opens a new file with some content; all are closed at the end."""
    fds: list[int] = []

    def open_new(content: bytes = b"", flags: int = os.O_RDWR) -> int:
        path = folder / f"file{len(fds)}"
        path.write_bytes(content)
        fds.append(os.open(path, flags))
        return fds[-1]

    yield open_new
    for fd in fds:
        os.close(fd)


class Memory:
    """Page-aligned memory, all zeros at first, and pieces of it."""

    def __init__(self, num_bytes: int) -> None:
        self.bytes: NDArray[np.uint8] = np.frombuffer(mmap.mmap(-1, num_bytes), np.uint8)

    def fill(self, seed: int = 0) -> "Memory":
        self.bytes[:] = np.random.default_rng(seed).integers(1, 256, len(self.bytes), np.uint8)
        return self

    def vector(self, *pieces: tuple[int, int]) -> IOVector:
        """Make a vector of pieces from their offsets and lengths."""
        vector = np.array(pieces, np.uint64).reshape(-1, 2)
        vector[:, 0] += np.uint64(self.bytes.ctypes.data)
        return vector

    def gather(self, *pieces: tuple[int, int]) -> bytes:
        return b"".join(self.bytes[start : start + length].tobytes() for start, length in pieces)


def scattered(num_pieces: int, seed: int = 0) -> tuple[list[tuple[int, int]], int]:
    """Draw pieces of odd lengths at odd places, in no order, and the memory that they need."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 700, num_pieces)
    starts = np.cumsum(lengths + rng.integers(0, 50, num_pieces)) - lengths
    order = rng.permutation(num_pieces)
    pieces = list(zip(starts[order].tolist(), lengths[order].tolist(), strict=True))
    return pieces, int(starts[-1] + lengths[-1])


def content(fd: int) -> bytes:
    return os.pread(fd, os.fstat(fd).st_size, 0)


def errors(results: Sequence[Result]) -> list[int | None]:
    return [result.errno if isinstance(result, OSError) else None for result in results]


@pytest.mark.parametrize("num_pieces", [1, 7, IOV_MAX + 1, 3 * IOV_MAX])
def test_scattered_pieces_are_written_in_order(
    engine: FileIO, open_file: OpenFile, num_pieces: int
) -> None:
    pieces, num_bytes = scattered(num_pieces)
    memory, fd = Memory(num_bytes).fill(), open_file()
    expected = memory.gather(*pieces)
    assert engine.write([fd], [memory.vector(*pieces)]) == [len(expected)]
    assert content(fd) == expected


@pytest.mark.parametrize("num_pieces", [1, 7, IOV_MAX + 1, 3 * IOV_MAX])
def test_scattered_pieces_are_read_in_order_and_nothing_between_them_is_touched(
    engine: FileIO, open_file: OpenFile, num_pieces: int
) -> None:
    pieces, num_bytes = scattered(num_pieces)
    source, memory = Memory(num_bytes).fill(), Memory(num_bytes)
    fd = open_file(source.gather(*pieces))
    assert engine.read([fd], [memory.vector(*pieces)]) == [sum(length for _, length in pieces)]
    expected = np.zeros(num_bytes, np.uint8)
    for start, length in pieces:
        expected[start : start + length] = source.bytes[start : start + length]
    assert (memory.bytes == expected).all()


@pytest.mark.parametrize("size", [0, 1, 9, 100, PAGE])
def test_a_short_file_is_read_to_its_end_and_says_how_much_that_was(
    engine: FileIO, open_file: OpenFile, size: int
) -> None:
    source, memory = Memory(PAGE).fill(), Memory(4 * PAGE)
    fds = [open_file(source.bytes[:size].tobytes()), open_file(b"whole")]
    pieces = [(0, 10), (10, PAGE), (10 + PAGE, 20)]
    results = engine.read(fds, [memory.vector(*pieces), memory.vector((3 * PAGE, 5))])
    assert results == [size, 5]
    assert (memory.bytes[:size] == source.bytes[:size]).all()
    assert not memory.bytes[size : 3 * PAGE].any()
    assert memory.gather((3 * PAGE, 5)) == b"whole"


def test_named_files_are_opened_read_and_closed(engine: FileIO, folder: Path) -> None:
    num_files, before = 2 * engine.files_per_call + 3, num_fds()
    memory, folder_fd = Memory(PAGE * num_files), os.open(folder, os.O_RDONLY)
    for index in range(num_files):
        if index != 1:
            (folder / str(index)).write_bytes(b"%d" % index * 10)
    try:
        files = [NamedFile(folder_fd, b"%d" % index) for index in range(num_files)]
        vectors = [memory.vector((PAGE * index, PAGE)) for index in range(num_files)]
        results = engine.read_named(files, vectors, os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(folder_fd)
    sizes: list[Result] = [len(str(index)) * 10 for index in range(num_files)]
    assert errors(results)[:3] == [None, errno.ENOENT, None]
    assert [*results[:1], *results[2:]] == [*sizes[:1], *sizes[2:]]
    assert memory.gather((2 * PAGE, 10)) == b"2" * 10
    assert not memory.bytes[PAGE : 2 * PAGE].any()
    assert num_fds() == before


@pytest.fixture
def folder_fd(folder: Path) -> Iterator[int]:
    fd = os.open(folder, os.O_RDONLY)
    yield fd
    os.close(fd)


def new_files(folder_fd: int, num_files: int) -> list[NewFile]:
    return [NewFile(folder_fd, b"%d.tmp" % index, b"%d" % index) for index in range(num_files)]


@pytest.mark.parametrize("durable", [False, True])
@pytest.mark.parametrize("padding", [0, 7])
def test_new_files_get_their_names_when_they_are_whole_and_all_are_closed(
    engine: FileIO, folder: Path, folder_fd: int, *, durable: bool, padding: int
) -> None:
    num_files, size = 2 * engine.files_per_call + 3, 1000
    memory, before = Memory(PAGE * num_files).fill(), num_fds()
    (folder / "0").symlink_to("1")  # no file: replaced
    vectors = [memory.vector((PAGE * index, size)) for index in range(num_files)]
    results = engine.write_named(
        new_files(folder_fd, num_files),
        vectors,
        [size - padding] * num_files,
        0,
        durable=durable,
    )
    assert results == [size - padding] * num_files
    assert sorted(path.name for path in folder.iterdir()) == sorted(map(str, range(num_files)))
    for index in range(num_files):
        path = folder / str(index)
        assert path.read_bytes() == memory.gather((PAGE * index, size - padding))
        assert path.lstat().st_mode == stat.S_IFREG | 0o600
    assert num_fds() == before


def test_a_file_that_is_there_already_is_left_alone(
    engine: FileIO, folder: Path, folder_fd: int
) -> None:
    memory = Memory(PAGE).fill()
    (folder / "1").write_bytes(b"old")
    for _ in range(2):
        vectors = [memory.vector((0, 10))] * 3
        files = new_files(folder_fd, 3)
        results = engine.write_named(files, vectors, [10] * 3, 0, durable=False)
        assert errors(results)[1] == errno.EEXIST
        assert sorted(path.name for path in folder.iterdir()) == ["0", "1", "2"]
        assert (folder / "1").read_bytes() == b"old"
        assert (folder / "2").read_bytes() == memory.gather((0, 10))
        for name in "02":
            (folder / name).unlink()


@pytest.mark.parametrize("num_calls", [1, 5])
def test_a_new_file_that_cannot_be_written_fails_alone_and_leaves_nothing(
    engine: FileIO, folder: Path, folder_fd: int, num_calls: int
) -> None:
    memory, before = Memory(PAGE).fill(), num_fds()
    nowhere = np.array([[1 << 40, 10]], np.uint64)
    for _ in range(num_calls):  # whatever a failure leaves in the engine is in nobody's way
        for path in folder.iterdir():
            path.unlink()
        files = new_files(folder_fd, 4)
        files[2] = files[2]._replace(name=b"no folder/2")
        vectors = [memory.vector((0, 10)), nowhere, *[memory.vector((20, 10))] * 2]
        results = engine.write_named(files, vectors, [10] * 4, 0, durable=False)
        assert errors(results) == [None, errno.EFAULT, errno.ENOENT, None]
        assert sorted(path.name for path in folder.iterdir()) == ["0", "3"]
        assert (folder / "3").read_bytes() == memory.gather((20, 10))
    assert num_fds() == before


def test_a_new_file_that_fits_on_the_disk_in_part_is_not_named(
    engine: FileIO, small_tmpfs: Path
) -> None:
    memory, folder_fd = Memory(2 << 20).fill(), os.open(small_tmpfs, os.O_RDONLY)
    free_bytes = shutil.disk_usage(small_tmpfs).free
    try:
        vectors = [memory.vector((0, 64 << 10)), memory.vector((0, 2 << 20))]
        sizes = [64 << 10, 2 << 20]
        results = engine.write_named(new_files(folder_fd, 2), vectors, sizes, 0, durable=False)
    finally:
        os.close(folder_fd)
    assert results[0] == 64 << 10
    assert errors(results)[1] in {errno.ENOSPC, errno.EIO}
    assert [path.name for path in small_tmpfs.iterdir()] == ["0"]
    deadline = time.monotonic() + 10  # the kernel lets go of a slot's file soon after it says so
    while shutil.disk_usage(small_tmpfs).free != free_bytes - (64 << 10):
        assert time.monotonic() < deadline, "it is open still"
        time.sleep(0.01)


@pytest.mark.parametrize("size", [0, 100, PAGE, 3 * PAGE, 3 * PAGE + 1, 4 * PAGE - 1])
def test_o_direct_reads_padded_tails_of_files_of_any_size(
    engine: FileIO, tmp_path: Path, size: int
) -> None:
    source, memory = Memory(4 * PAGE).fill(), Memory(6 * PAGE)
    path = tmp_path / "file"
    path.write_bytes(source.bytes[:size].tobytes())
    fd = open_or_skip(path, os.O_RDONLY | os.O_DIRECT)
    pieces = [(5 * PAGE, PAGE), (0, 2 * PAGE), (3 * PAGE, PAGE)]
    try:
        results = engine.read([fd], [memory.vector(*pieces)])
    finally:
        os.close(fd)
    assert results == [size]
    assert memory.gather(*pieces)[:size] == source.gather((0, size))
    assert not memory.bytes[4 * PAGE : 5 * PAGE].any()


def open_or_skip(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags, 0o600)
    except OSError as exc:
        pytest.skip(f"the file system of {path} has no O_DIRECT: {exc}")


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system with room for a mebibyte."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "kvxfer-test", str(tmp_path)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs: {mounted.stderr.decode().strip()}")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def num_fds() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.skipif(not has_uring(), reason="needs io_uring")
def test_where_no_more_rings_can_be_had_plain_calls_take_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "no more descriptors")

    engine = UringFileIO()
    monkeypatch.setattr(mmap, "mmap", refuse)
    memory = np.frombuffer(bytearray(b"blocks in files "), np.uint8)
    vector = np.array([[memory.ctypes.data, len(memory)]], np.uint64)
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    folder_fd = os.open(tmp_path, os.O_RDONLY)
    with ThreadPoolExecutor(1) as other_thread:
        assert other_thread.submit(engine.write, [fd], [vector]).result() == [16]
        stored = memory.tobytes()
        memory[:] = 0
        named = NamedFile(folder_fd, b"file")
        read = other_thread.submit(engine.read_named, [named], [vector], os.O_RDONLY)
        assert read.result() == [16]
        new = NewFile(folder_fd, b"new.tmp", b"new")
        made = other_thread.submit(engine.write_named, [new], [vector], [16], 0, durable=False)
        assert made.result() == [16]
    assert (tmp_path / "new").read_bytes() == stored
    assert memory.tobytes() == stored
    for each in (fd, folder_fd):
        os.close(each)
    engine.close()


def test_where_io_uring_is_forbidden_plain_calls_are_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(mmap, "mmap", refuse)
    assert type(open_engine("auto")) is PosixFileIO
