"""StagingMemory: bounded, and aligned for O_DIRECT."""

import asyncio
import contextlib
from collections.abc import Sequence

import numpy as np
import pytest

from kvxfer.errors import ClosedError, DeviceLostError
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.storage import calls as calls_module
from kvxfer.storage.backend import DONE, Outcome, Status
from kvxfer.storage.calls import Move
from kvxfer.storage.keys import BlockKey
from kvxfer.storage.staging_memory import Share, StagingMemory
from kvxfer.testing.conformance.suite import make_keys, yield_to_loop
from kvxfer.testing.payloads import read_payloads, write_payloads


async def quiet_at_once() -> None:
    """No transfer outlives its call."""


@pytest.mark.parametrize("max_bytes", [1, 4096, 100_000, 1 << 20])
@pytest.mark.parametrize("largest", [1, 4096, 4097, 70_000])
def test_the_bound_is_kept_unless_two_blocks_need_more(max_bytes: int, largest: int) -> None:
    staging = StagingMemory(max_bytes, largest, quiet_at_once)
    assert staging.num_fitting([largest]) == 1
    padded = -(-largest // 4096) * 4096
    assert staging.num_buffers >= 2
    assert staging.num_buffers * staging.buffer_bytes <= max(max_bytes, 2 * padded)


async def test_every_block_is_aligned_and_apart_from_the_others() -> None:
    staging = StagingMemory(1 << 20, 4096, quiet_at_once)
    sizes = [1, 4096, 4097, 100]
    assert staging.num_fitting([*sizes, 1 << 20]) == 4
    async with staging.hold(sizes, [0, 7, 0, 4096]) as staged:
        blocks = staged.blocks
        payloads = [bytes([index]) * size for index, size in enumerate(sizes)]
        write_payloads(blocks, payloads)
        assert read_payloads(blocks) == payloads
        assert not (blocks.addresses % np.uint64(4096)).any()
        assert blocks.payload_starts.tolist() == [0, 7, 0, 4096]


async def test_who_comes_when_all_buffers_are_in_use_waits_for_one() -> None:
    staging = StagingMemory(1, 4096, quiet_at_once)
    entered = asyncio.Event()

    async def work() -> None:
        async with staging.hold([4096], [0]):
            entered.set()

    async with staging.hold([1], [0]):
        async with staging.hold([1], [0]):
            task = asyncio.create_task(work())
            await yield_to_loop(5)
            assert not entered.is_set()
        await task


async def test_of_those_who_wait_the_lowest_priority_comes_first_and_then_the_longest() -> None:
    staging = StagingMemory(1, 4096, quiet_at_once)
    order: list[str] = []

    async def work(name: str, priority: int) -> None:
        async with staging.hold([1], [0], priority=priority):
            order.append(name)

    async with staging.hold([1], [0]), asyncio.TaskGroup() as tasks, staging.hold([1], [0]):
        for name, priority in (("store", 1), ("load", 0), ("store 2", 1), ("load 2", 0)):
            tasks.create_task(work(name, priority))
        await yield_to_loop(3)
    assert order == ["load", "load 2", "store", "store 2"]


@pytest.mark.parametrize("is_handed_over", [False, True])
async def test_a_buffer_is_not_lost_with_who_waited_for_it(*, is_handed_over: bool) -> None:
    staging = StagingMemory(1, 4096, quiet_at_once)

    async def work() -> None:
        async with staging.hold([1], [0]):
            raise AssertionError

    async with staging.hold([1], [0]):
        async with staging.hold([1], [0]):
            task = asyncio.create_task(work())
            await yield_to_loop(3)
            if not is_handed_over:
                task.cancel()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with staging.hold([1], [0]):
            pass
    assert len(staging._idle) == 2


async def test_who_waits_for_buffers_that_are_withdrawn_learns_it_and_who_has_one_keeps_it() -> (
    None
):
    staging = StagingMemory(1, 4096, quiet_at_once)

    async def work() -> None:
        async with staging.hold([1], [0]):
            raise AssertionError

    async with staging.hold([1], [0]) as held, staging.hold([1], [0]):
        tasks = [asyncio.create_task(work()) for _ in range(3)]
        await yield_to_loop(3)
        tasks[0].cancel()
        staging.withdraw()
        tasks[1].cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(result) for result in results] == [
            asyncio.CancelledError,
            asyncio.CancelledError,
            ClosedError,
        ]
        write_payloads(held.blocks, [b"x"])
    with pytest.raises(ClosedError):
        await work()


def test_buffers_that_one_event_loop_waited_for_serve_the_next_one() -> None:
    staging = StagingMemory(1, 4096, quiet_at_once)

    async def work() -> None:
        async with staging.hold([1], [0]):
            await asyncio.sleep(0)

    async def crowd() -> None:
        await asyncio.gather(*(work() for _ in range(5)))

    asyncio.run(crowd())
    asyncio.run(crowd())


class Gate:
    """Future that `drain` waits for."""

    def __init__(self) -> None:
        self.opened = asyncio.Event()
        self.num_waited = 0

    async def drain(self) -> None:
        self.num_waited += 1
        await self.opened.wait()


async def end_well(keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
    return [DONE] * len(keys)


async def end_unsafe(keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
    return [Outcome(Status.TIMED_OUT, memory_safe=False)] * len(keys)


async def be_cancelled(keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
    raise asyncio.CancelledError


async def lose_the_device(keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
    raise DeviceLostError(0, "cuEventQuery", "CUDA_ERROR_ECC_UNCORRECTABLE")


async def use(staging: StagingMemory, *moves: Move) -> int:
    """Hold a buffer for one key and move it; return where it is."""
    address = 0
    with contextlib.suppress(asyncio.CancelledError):
        async with staging.hold([1], [0]) as staged:
            address = int(staged.blocks.addresses[0])
            for move in moves:
                await staged.move(move, make_keys(1), staged.blocks)
    return address


@pytest.mark.parametrize(
    "moves",
    [[end_unsafe], [be_cancelled], [lose_the_device], [end_unsafe, end_well]],
    ids=["outcome", "cancellation", "device", "then well"],
)
async def test_a_buffer_that_is_not_quiet_is_not_used_again_before_it_is(moves: list[Move]) -> None:
    gate = Gate()
    staging = StagingMemory(1, 4096, gate.drain)
    kept = await use(staging, *moves)
    assert kept not in [await use(staging, end_well) for _ in range(3)]
    gate.opened.set()
    await staging.aclose()
    async with staging.hold([1], [0]) as one, staging.hold([1], [0]) as other:
        assert kept in {int(each.blocks.addresses[0]) for each in (one, other)}


@pytest.mark.parametrize("error", [asyncio.CancelledError, ZeroDivisionError])
async def test_who_ends_by_an_error_may_have_left_something_in_the_buffer(
    error: type[BaseException],
) -> None:
    gate = Gate()
    staging = StagingMemory(1, 4096, gate.drain)
    kept = 0
    with contextlib.suppress(error):
        async with staging.hold([1], [0]) as staged:
            kept = int(staged.blocks.addresses[0])
            raise error
    assert kept not in [await use(staging) for _ in range(3)]
    gate.opened.set()
    await staging.aclose()


async def test_a_quiet_buffer_is_not_drained() -> None:
    gate = Gate()
    staging = StagingMemory(1, 4096, gate.drain)
    assert await use(staging, end_well, end_well) == await use(staging, end_well)
    assert gate.num_waited == 0


async def test_a_buffer_waits_only_for_those_that_touched_it() -> None:
    gates = [asyncio.Event(), asyncio.Event()]
    staging = StagingMemory(1, 4096, quiet_at_once)

    async def leave(keys: Sequence[BlockKey], _: Descriptors) -> list[Outcome]:
        return [Outcome(Status.FAILED, memory_safe=False)] * len(keys)

    for gate in gates:
        async with staging.hold([1], [0]) as staged:
            await staged.move(leave, make_keys(1), staged.blocks, drain=gate.wait)
    assert staging.unsafe_bytes == 2 * 4096
    gates[1].set()
    async with staging.hold([1], [0]):
        await yield_to_loop(1)
        assert staging.unsafe_bytes == 4096
    gates[0].set()
    await staging.aclose()


async def test_a_buffer_that_does_not_come_back_is_waited_for_no_longer_than_asked() -> None:
    staging, share = StagingMemory(1, 4096, quiet_at_once), Share(1)
    async with staging.hold([1], [0], share=share):
        with pytest.raises(TimeoutError):
            async with staging.hold([1], [0], share=share, timeout_s=0.01):
                pytest.fail("a buffer beyond the share")
        async with staging.hold([1], [0]):
            with pytest.raises(TimeoutError):
                async with staging.hold([1], [0], timeout_s=0.01):
                    pytest.fail("a third buffer of two")
    for _ in range(3):
        async with staging.hold([1], [0], share=share, timeout_s=0.01):
            pass


async def test_a_share_is_spent_while_all_its_buffers_are_drained() -> None:
    gate, share = asyncio.Event(), Share(1)
    staging = StagingMemory(1, 4096, gate.wait)
    async with staging.hold([1], [0], share=share) as staged:
        spent = [share.is_spent]  # it is in use, and comes back
        staged.disturb()
    await yield_to_loop(1)
    spent.append(share.is_spent)
    gate.set()
    await staging.aclose()
    assert [*spent, share.is_spent] == [False, True, False]


async def test_a_buffer_comes_back_when_a_drain_that_raised_succeeds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(calls_module, "FIRST_DRAIN_PAUSE_S", 0.001)
    errors = [ConnectionError(), ConnectionError()]

    async def drain() -> None:
        if errors:
            raise errors.pop()

    staging = StagingMemory(1, 4096, drain)
    used = {await use(staging, end_unsafe) for _ in range(2)}
    async with staging.hold([1], [0], timeout_s=10.0) as staged:
        assert staged.blocks.addresses[0] in used


async def test_a_buffer_that_cannot_be_drained_is_never_used_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def fail() -> None:
        raise ConnectionError

    staging = StagingMemory(1, 4096, fail)
    lost = await use(staging, end_unsafe)
    await staging.aclose()
    assert lost not in [await use(staging, end_well) for _ in range(3)]
    assert "4096 bytes is lost" in caplog.text


async def test_all_buffers_are_in_one_region() -> None:
    staging = StagingMemory(1 << 20, 4096, quiet_at_once)
    async with staging.hold([1], [0]) as one, staging.hold([1], [0]) as other:
        for staged in (one, other):
            offset = int(staged.blocks.addresses[0]) - staging.region.address
            assert 0 <= offset <= staging.region.num_bytes - staging.buffer_bytes
