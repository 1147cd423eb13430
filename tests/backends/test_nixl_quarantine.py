"""Quarantine of memory that a transfer may touch after its deadline, with agents that stall."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from kvxfer.backends.host import HostBackend, HostConfig
from kvxfer.backends.nixl import NixlBackend
from kvxfer.backends.nixl import client as client_module
from kvxfer.backends.nixl import exchange as exchange_module
from kvxfer.backends.nixl.client import Client
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.storage.backend import Outcome, Status
from kvxfer.storage.keys import BlockKey
from kvxfer.testing import DictBackend, FakeNixlAgent
from kvxfer.testing.conformance.suite import make_keys, store_generated
from kvxfer.testing.payloads import read_payloads, write_payloads
from kvxfer.tiering.tiered_backend import TieredBackend
from kvxfer.units import ByteSize
from tests.backends.nixl_pair import KEYS, MEMORY, open_pair

LATE_S = 1.0
LIMIT_S = 15.0


@pytest.mark.slow
@pytest.mark.parametrize("attached", [True, False])
async def test_what_is_late_is_not_safe_until_it_is_over(*, attached: bool) -> None:
    async with open_pair(attached=attached, timeout_s=LATE_S) as pair:
        agent = pair.stalled
        agent.hold()
        target = pair.memory.describe(0, [8, 9])
        outcomes = await pair.client.load(KEYS[:2], target)
        assert [(each.status, each.memory_safe) for each in outcomes] == [
            (Status.TIMED_OUT, not attached)  # the late read is into staging memory
        ] * 2
        assert pair.client.num_quarantined_bytes == target.num_bytes
        draining = asyncio.create_task(pair.client.drain())
        await asyncio.sleep(0)
        assert not draining.done()
        agent.release()
        await draining
        assert pair.client.num_quarantined_bytes == 0
        canaries = [b"\x5a" * len(payload) for payload in pair.payloads[:2]]
        write_payloads(target, canaries)
        elsewhere = pair.memory.describe(0, [10, 11])
        outcomes = await pair.client.load(KEYS[:2], elsewhere)
        assert [each.status for each in outcomes] == [Status.DONE] * 2
        assert read_payloads(elsewhere) == pair.payloads[:2]
        assert read_payloads(target) == canaries, "a late write"


async def test_a_store_that_is_late_is_not_stored_and_leaves_its_memory_alone() -> None:
    async with open_pair(timeout_s=LATE_S) as pair:
        agent = pair.holder_agents[-1]
        agent.hold()
        source = pair.memory.describe(0, [8])
        new = make_keys(1, first=50)
        [outcome] = await pair.client.store(new, source)
        assert (outcome.status, outcome.memory_safe) == (Status.TIMED_OUT, True)
        assert pair.client.num_quarantined_bytes == 0
        agent.release()
        assert await pair.client.lookup(new) == [False], "a cancelled store was stored"


async def test_a_cancelled_load_that_stalls_is_for_drain_to_wait_for() -> None:
    async with open_pair() as pair:
        agent = pair.stalled
        agent.hold()
        load = asyncio.create_task(pair.client.load(KEYS[:1], pair.memory.describe(0, [8])))
        await agent.until_held()
        load.cancel()
        with pytest.raises(asyncio.CancelledError):
            await load
        assert pair.client.num_quarantined_bytes > 0
        agent.release()
        await pair.client.drain()
        assert pair.client.num_quarantined_bytes == 0


async def test_past_its_budget_the_quarantine_costs_a_new_agent(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with open_pair(quarantine=ByteSize(1), timeout_s=LATE_S) as pair:
        pair.client_agents[-1].hold()
        [outcome] = await pair.client.load(KEYS[:1], pair.memory.describe(0, [8]))
        assert outcome.status is Status.TIMED_OUT
        assert "restarting NIXL" in caplog.text
        await pair.client.drain()
        assert pair.client.num_quarantined_bytes == 0
        target = pair.memory.describe(0, [9])
        [outcome] = await pair.client.load(KEYS[:1], target)
        assert outcome.done
        assert read_payloads(target) == pair.payloads[:1]
        assert len(pair.client_agents) == 2


class StuckAgent(FakeNixlAgent):
    """Agent whose end ends no read, as long as the test does not let it."""

    may_end = asyncio.Event()

    async def aclose(self) -> None:
        if self.in_flight:
            await self.may_end.wait()
        await super().aclose()


async def test_an_agent_that_does_not_end_keeps_no_later_call_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(exchange_module, "RESTART_S", 0.05)
    monkeypatch.setattr(StuckAgent, "may_end", asyncio.Event())
    options: dict[str, Any] = {"quarantine": ByteSize(1), "timeout_s": LATE_S}
    async with open_pair(agent=StuckAgent, **options) as pair, asyncio.timeout(LIMIT_S):
        pair.stalled.hold()
        late, next_one = pair.memory.describe(0, [8]), pair.memory.describe(0, [9])
        [outcome] = await pair.client.load(KEYS[:1], late)
        assert (outcome.status, outcome.memory_safe) == (Status.TIMED_OUT, False)
        [outcome] = await pair.client.load(KEYS[:1], next_one)
        assert outcome.done
        assert read_payloads(next_one) == pair.payloads[:1]
        assert pair.client.num_quarantined_bytes == late.num_bytes
        StuckAgent.may_end.set()
        await pair.client.drain()
        assert pair.client.num_quarantined_bytes == 0


class LandingMeanwhile(DictBackend):
    """Backend that lets a late transfer land between a load and the use of its bytes."""

    agent: FakeNixlAgent
    client: NixlBackend

    async def load(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        outcomes = await super().load(keys, blocks)
        self.agent.release()
        await self.client.drain()
        return outcomes


async def test_a_cancelled_lookup_in_tiers_passes_on_no_buffer_that_a_read_may_change() -> None:
    async with open_pair(timeout_s=10.0) as pair:
        namespace, (other,) = pair.memory.namespace(), make_keys(1, first=50)
        host = HostBackend(HostConfig(capacity=ByteSize(1 << 20)), namespace)
        client, third = pair.open_client(), LandingMeanwhile(None, namespace)
        [expected] = await store_generated(third, [other], pair.memory.describe(0, [5]))
        async with TieredBackend([host, client, third], namespace) as tiers:
            assert await tiers.lookup(KEYS[1:2]) == [True]  # it is connected
            third.client, third.agent = client, pair.stalled
            third.agent.hold()
            lookup = asyncio.create_task(tiers.lookup(KEYS[:1]))
            await third.agent.until_held()
            lookup.cancel()
            with pytest.raises(asyncio.CancelledError):
                await lookup
            assert await tiers.lookup([other]) == [True]
            target = pair.memory.describe(0, [9])
            [outcome] = await tiers.load([other], target)
            assert outcome.done
            assert read_payloads(target) == [expected]


async def test_a_piece_that_fails_as_nothing_should_gives_away_no_memory_of_the_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(client_module, "PIECE_BYTES", sum(MEMORY[0]))
    monkeypatch.setattr(client_module, "STAGED_BYTES", sum(MEMORY[0]))
    async with open_pair(timeout_s=1.0) as pair:
        honest = Client._read

        async def read(self: Client, *args: Any) -> list[Outcome]:
            if args[1] == KEYS[:1]:
                await pair.stalled.until_held()
                raise MemoryError
            return await honest(self, *args)

        monkeypatch.setattr(Client, "_read", read)
        pair.stalled.hold()
        outcomes = await pair.client.load(KEYS[:2], pair.memory.describe(0, [8, 9]))
        assert [each.status for each in outcomes] == [Status.FAILED, Status.TIMED_OUT]
        assert [each.memory_safe for each in outcomes] == [True, False]
        assert "MemoryError" in caplog.text
        pair.stalled.release()
