"""Ledger and claims: damage to their files costs a recount, and no block."""

import errno
import os
import random
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from kvxfer.backends.file import FoundBlock, read_count
from kvxfer.backends.file.folders import Ledger
from kvxfer.backends.file.folders import ledger as ledger_module
from kvxfer.errors import BackendUnavailableError
from kvxfer.storage.backend import Status
from kvxfer.storage.keys import BlockKey
from kvxfer.testing import BlockMemory
from tests.backends.file_store import (
    bytes_on_disk,
    counted_bytes,
    flip_bit,
    hashed_keys,
    load_verified,
    one_page_memory,
    open_store,
    store,
)

Damage = Callable[[Path], None]
NUM_STORED = 30
MOST = (1 << 64) - 1


def test_a_ledger_that_somebody_keeps_locked_is_an_error_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_module, "LOCK_TIMEOUT_S", 0.1)
    with closing(Ledger(tmp_path)) as ours, closing(Ledger(tmp_path)) as theirs:
        late = pytest.raises(TimeoutError, match="another process has had")
        with theirs.locked(), late, ours.locked():
            pass
        late = pytest.raises(TimeoutError, match="another thread has had")
        with ours.locked(), ThreadPoolExecutor(1) as threads, late:
            threads.submit(ours.recount_blocks, []).result()
        ours.recount_blocks([])


def write(data: bytes) -> Damage:
    return lambda path: _overwrite(path, data)


def _overwrite(path: Path, data: bytes) -> None:
    """Write in place: processes keep the same file open."""
    with path.open("r+b") as file:
        file.write(data)


def cut(num_bytes: int) -> Damage:
    return lambda path: os.truncate(path, num_bytes)


def flip(bit: int) -> Damage:
    return lambda path: flip_bit(path, bit)


def damages(num_bytes: int) -> list[Damage]:
    """Damages: every bit of the leading bytes flipped, every length, noise of any length."""
    rng = random.Random(num_bytes)
    return [
        *(flip(bit) for bit in range(8 * num_bytes)),
        *(cut(length) for length in range(num_bytes)),
        *(write(rng.randbytes(rng.randrange(1, 40 << 10))) for _ in range(50)),
        *OLD_FORMATS,
        cut(1 << 40),
    ]


def some_damages(num_bytes: int) -> list[Damage]:
    rng = random.Random(num_bytes)
    return [*rng.sample(damages(num_bytes), 20), *OLD_FORMATS, cut(1 << 40)]


OLD_FORMATS = [
    write(struct.pack("<8sQQ", b"kvxfer01", 0, MOST)),
    write(struct.pack("<8sQQ", b"kvxfer01", MOST, 0)),
    write(struct.pack("<QI", MOST, 3) + b"\xc1\xc1\xc1"),
]


class Stored:
    """Store of blocks that take a small part of its capacity, with its invariants."""

    def __init__(self, root: Path) -> None:
        self.memory = one_page_memory()
        self.key, *self.keys = hashed_keys(NUM_STORED + 1)
        self.backend = open_store(root, self.memory.namespace())

    async def fill(self) -> None:
        await self.backend.wait_indexed()
        outcomes = await store(self.backend, self.keys, self.memory.describe(0, range(NUM_STORED)))
        assert all(outcome.done for outcome in outcomes)

    async def require_all(self) -> None:
        """Store another block, and find and load all of them."""
        (outcome,) = await store(self.backend, [self.key], self.memory.describe(0, [40]))
        assert outcome.done, outcome
        assert await self.backend.lookup([self.key, *self.keys]) == [True] * (NUM_STORED + 1)
        target = self.memory.describe(0, [41])
        assert await load_verified(self.backend, [self.key], target) == [Status.DONE]
        await self.backend.delete([self.key])


def test_a_damaged_count_is_no_count(tmp_path: Path) -> None:
    with closing(Ledger(tmp_path)) as ledger:
        with ledger.locked():
            ledger.end_recount(ledger.begin_recount(), 12345 << 20)
            ledger.reserve(8192)
        path = tmp_path / "usage.ledger"
        whole = path.read_bytes()
        for damage in damages(len(whole)):
            damage(path)
            with ledger.locked():
                assert not ledger.known or ledger.used == (12345 << 20) + 8192
            os.truncate(path, len(whole))
            _overwrite(path, whole)


def test_a_count_that_is_lost_during_a_walk_is_not_too_low(tmp_path: Path) -> None:
    with closing(Ledger(tmp_path)) as ours, closing(Ledger(tmp_path)) as theirs:
        ours.recount_blocks([])

        def store(num_bytes: int) -> None:
            with theirs.locked():
                assert theirs.known
                theirs.reserve(num_bytes)
            theirs.settle(num_bytes)

        def walk_and_lose() -> Iterator[FoundBlock]:
            yield FoundBlock("0" * 32, "00", BlockKey(bytes(36)), 4096, 0.0)
            store(1 << 20)  # behind the walk
            os.truncate(tmp_path / "usage.ledger", 0)

        store(1 << 30)
        ours.recount_blocks(walk_and_lose())
        assert read_count(tmp_path) is None


async def test_no_damage_to_the_count_evicts_or_raises(tmp_path: Path) -> None:
    stored = Stored(tmp_path)
    path = tmp_path / "usage.ledger"
    async with stored.backend:
        await stored.fill()
        whole = path.stat().st_size
        for damage in some_damages(whole):
            damage(path)
            await stored.require_all()
            assert counted_bytes(tmp_path) == bytes_on_disk(tmp_path)
            os.truncate(path, whole)
    async with open_store(tmp_path, stored.memory.namespace()) as backend:  # after a restart
        assert await backend.lookup(stored.keys) == [True] * NUM_STORED


def make_link(path: Path) -> None:
    (path.parent / "theirs").write_bytes(b"precious")
    path.symlink_to("theirs")


def make_hard_link(path: Path) -> None:
    (path.parent / "theirs").write_bytes(b"precious")
    path.hardlink_to(path.parent / "theirs")


@pytest.mark.parametrize("make", [make_link, make_hard_link, os.mkfifo, os.mkdir])
def test_a_count_that_is_no_file_of_its_own_is_refused_and_left_alone(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    path = tmp_path / "usage.ledger"
    make(path)
    memory = BlockMemory([[4096]], num_blocks=1)
    with pytest.raises(BackendUnavailableError, match=r"usage\.ledger .* regular file of one name"):
        open_store(tmp_path, memory.namespace())
    assert path.is_symlink() or path.is_dir() or path.is_fifo() or path.read_bytes() == b"precious"
    if (tmp_path / "theirs").exists():
        assert (tmp_path / "theirs").read_bytes() == b"precious"
    with pytest.raises(OSError, match="regular file") as raised:
        Ledger(tmp_path)
    assert raised.value.errno == errno.EINVAL


async def test_the_count_can_be_read_without_a_change(tmp_path: Path) -> None:
    memory, root = one_page_memory(4), tmp_path / "store"
    assert read_count(root) is None
    async with open_store(root, memory.namespace()) as backend:
        await store(backend, hashed_keys(4), memory.describe(0, list(range(4))))
    names = sorted(path.name for path in root.iterdir())
    assert read_count(root) == counted_bytes(root) == bytes_on_disk(root) > 0
    assert sorted(path.name for path in root.iterdir()) == names
    flip_bit(root / "usage.ledger", 9)
    assert read_count(root) is None


async def test_a_damaged_claim_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(Ledger(tmp_path)) as ours, closing(Ledger(tmp_path)) as theirs:
        with theirs.locked():
            theirs.reserve(8192)
        assert ours.reserved_by_others() == 8192
        flip_bit(tmp_path / f"{theirs.owner}.claim", 8 * 15)
        assert [ours.reserved_by_others() for _ in range(3)] == [0, 0, 0]
        (record,) = caplog.records
        assert theirs.owner in record.getMessage()
