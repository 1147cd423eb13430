"""Blocks of a host backend that threads move while an event loop does."""

import asyncio
import random
import sys
import threading
from collections.abc import Iterator, Sequence

import pytest

from kvxfer.backends.host import HostBackend, HostConfig
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.storage.backend import Outcome, Status
from kvxfer.storage.lending import BlockParts
from kvxfer.testing import BlockMemory
from kvxfer.testing.conformance.suite import make_keys, statuses
from kvxfer.testing.payloads import make_payload, read_payloads, write_payloads
from kvxfer.units import ByteSize
from tests.backends.test_host import capacity_for
from tests.examples import examples

SIZE = 20_000
KEYS = make_keys(8)
NUM_SLOTS = 5
NUM_ROUNDS = examples(800).max_examples


def open_backend(memory: BlockMemory) -> HostBackend:
    capacity = ByteSize(capacity_for(memory.namespace(), NUM_SLOTS))
    return HostBackend(HostConfig(capacity=capacity), memory.namespace())


def filled(memory: BlockMemory, rng: random.Random) -> tuple[list[int], list[bytes]]:
    """Choose keys, and write their payloads to the leading blocks."""
    chosen = rng.sample(range(len(KEYS)), 3)
    payloads = [make_payload(KEYS[index], SIZE) for index in chosen]
    write_payloads(memory.describe(0, range(3)), payloads)
    return chosen, payloads


@pytest.fixture
def _restless() -> Iterator[None]:
    """Let threads take turns much more often than they do."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


def require_right(
    outcomes: Sequence[Outcome], target: Descriptors, payloads: Sequence[bytes]
) -> None:
    for outcome, found, payload in zip(outcomes, read_payloads(target), payloads, strict=True):
        assert outcome.status in (Status.DONE, Status.MISSING), outcome
        assert not outcome.done or found == payload, "a wrong byte"


@pytest.mark.property
@pytest.mark.usefixtures("_restless")
@pytest.mark.timeout(300)
async def test_every_block_is_right_whoever_moves_it() -> None:
    backend = open_backend(BlockMemory([[SIZE]], num_blocks=8))
    errors: list[BaseException] = []

    def move_here(seed: int) -> None:
        rng, memory = random.Random(seed), BlockMemory([[SIZE]], num_blocks=8)
        try:
            for _ in range(NUM_ROUNDS):
                chosen, payloads = filled(memory, rng)
                keys, target = [KEYS[index] for index in chosen], memory.describe(0, [4, 5, 6])
                if rng.random() < 0.5:
                    begun = backend.begin_store(keys, memory.describe(0, range(3)))
                    assert begun is None or set(statuses(begun.wait())) <= {
                        Status.DONE,
                        Status.FAILED,
                    }
                    continue
                loading = backend.begin_load(keys, target)
                assert loading is not None
                require_right(loading.wait(), target, payloads)
        except BaseException as exc:  # noqa: BLE001 - raised below
            errors.append(exc)

    threads = [threading.Thread(target=move_here, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    rng, memory = random.Random(9), BlockMemory([[SIZE]], num_blocks=8)
    async with backend:
        while any(thread.is_alive() for thread in threads):
            chosen, payloads = filled(memory, rng)
            keys, target = [KEYS[index] for index in chosen], memory.describe(0, [4, 5, 6])
            await asyncio.gather(
                backend.store(keys, memory.describe(0, range(3))), backend.lookup(KEYS)
            )
            loaded = await backend.load(keys, target)
            require_right(loaded, target, payloads)
            async with backend.lend(BlockParts(keys, [0] * 3, [SIZE] * 3)) as loan:
                await asyncio.sleep(0)
                lent = [at for at, outcome in enumerate(loan.outcomes) if outcome.done]
                if loan.blocks is not None:
                    assert read_payloads(loan.blocks) == [payloads[at] for at in lent]
            await backend.delete(keys[:1])
        for thread in threads:
            thread.join()
        assert not errors, errors
        assert backend._index.num_evictable == len(backend._index), "a block stays pinned"
        assert backend._index.num_free_slots + len(backend._index) == NUM_SLOTS


async def test_a_store_does_not_wait_on_the_thread_for_one_of_the_same_key() -> None:
    memory = BlockMemory([[SIZE]], num_blocks=2)
    async with open_backend(memory) as backend:
        blocks = memory.describe(0, [0])
        async with backend.make_room(BlockParts(KEYS[:1], [0], [SIZE])):
            assert backend.begin_store(KEYS[:1], blocks) is None
        begun = backend.begin_store(KEYS[:1], blocks)
        assert begun is not None
        assert statuses(begun.wait()) == [Status.DONE]
