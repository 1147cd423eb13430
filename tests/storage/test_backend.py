"""Backend interface: the parts that all backends share."""

import numpy as np
import pytest

from kvxfer.backends.file import FileBackend
from kvxfer.backends.object import ObjectBackend
from kvxfer.errors import (
    DuplicateError,
    InvalidArgumentError,
    LengthMismatchError,
)
from kvxfer.storage.backend import (
    DONE,
    MISSING,
    Outcome,
    Purgeable,
    Status,
    can_purge_all,
    require_batch,
)
from kvxfer.storage.keys import BlockKey, make_block_key
from kvxfer.testing import BlockMemory, DictBackend

A, B, C = (make_block_key(name, 0) for name in (b"a", b"b", b"c"))
MEMORY = BlockMemory([[8]], num_blocks=4)


def test_only_a_done_block_is_done() -> None:
    assert {status for status in Status if Outcome(status).done} == {Status.DONE}
    assert DONE.done
    assert not MISSING.done


def test_memory_is_safe_unless_somebody_says_otherwise() -> None:
    assert all(Outcome(status).memory_safe for status in Status)


def test_a_batch_with_one_key_per_block_is_accepted() -> None:
    require_batch([A, B, C], MEMORY.describe(0, [3, 0, 1]))
    require_batch([A, B, C])


def test_an_empty_batch_is_refused() -> None:
    none = MEMORY.describe(0, [0]).take(np.zeros(0, np.int64))
    with pytest.raises(InvalidArgumentError, match="at least one key"):
        require_batch([], none)


@pytest.mark.parametrize("block_ids", [[0], [0, 1, 2]])
def test_keys_and_blocks_that_differ_in_number_are_refused(block_ids: list[int]) -> None:
    with pytest.raises(LengthMismatchError) as caught:
        require_batch([A, B], MEMORY.describe(0, block_ids))
    assert (caught.value.num_keys, caught.value.num_blocks) == (2, len(block_ids))


def test_a_key_that_appears_twice_is_refused_by_name() -> None:
    with pytest.raises(DuplicateError) as caught:
        require_batch([A, B, A])
    assert caught.value.value == A


def test_what_is_no_key_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"keys\[1\] is b'ab'"):
        require_batch([A, BlockKey(b"ab")])


class CountedKey(bytes):
    """Key that counts how often keys are hashed and compared."""

    steps = 0

    def __hash__(self) -> int:
        CountedKey.steps += 1
        return super().__hash__()

    def __eq__(self, other: object) -> bool:
        CountedKey.steps += 1
        return super().__eq__(other)


@pytest.mark.parametrize("num_keys", [100, 1000])
def test_a_duplicate_is_found_in_steps_as_many_as_there_are_keys(num_keys: int) -> None:
    keys = [BlockKey(CountedKey(make_block_key(b"%d" % n, 0))) for n in range(num_keys)]
    keys.append(BlockKey(CountedKey(keys[-1])))
    CountedKey.steps = 0
    with pytest.raises(DuplicateError) as caught:
        require_batch(keys)
    assert CountedKey.steps < 10 * num_keys
    assert caught.value.value == keys[-1]


def test_what_has_no_order_or_no_length_is_no_batch() -> None:
    for keys in (iter([A]), {A}, {A: 0}, A, None, 1):
        with pytest.raises(InvalidArgumentError, match="keys is"):
            require_batch(keys)  # type: ignore[arg-type]


def test_object_storage_is_never_purged_of_the_blocks_of_everybody() -> None:
    assert issubclass(ObjectBackend, Purgeable)
    assert not can_purge_all(ObjectBackend)
    assert can_purge_all(FileBackend)
    assert not can_purge_all(DictBackend)


async def test_leaving_the_context_closes_the_backend_also_after_an_error() -> None:
    closed = []

    class Closing(DictBackend):
        async def aclose(self) -> None:
            closed.append(True)

    async def fail() -> None:
        async with Closing(None, MEMORY.namespace()) as backend:
            assert isinstance(backend, Closing)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail()
    assert closed == [True]
