"""Blocks of a GPU go straight to slots and peers, and back, where backends reach its memory."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

import kvxfer
from kvxfer.backends.nixl import NixlBackend, NixlConfig
from kvxfer.backends.nixl.agents import TransferAgent
from kvxfer.connect import complete_namespace
from kvxfer.testing import FakeNixlAgent
from kvxfer.transfer.engine import TransferEngine
from kvxfer.units import ByteSize
from tests.backends.device_agent_contract import DeviceAgentContract, DevicePeer, LocalDevicePeer
from tests.backends.pool_servers import running_pool
from tests.cuda import engine_caches
from tests.cuda.engine_caches import NAMESPACE, EngineCaches
from tests.cuda.gpu import Gpu
from tests.cuda.simulated_gpu import SimulatedGpu

KEYS = engine_caches.KEYS[:20]


class TestFakeNixlAgentOfGpu(DeviceAgentContract):
    def make_agent(self) -> TransferAgent:
        return FakeNixlAgent()

    async def peers(self, gpu: Gpu) -> AsyncIterator[DevicePeer]:
        agent = FakeNixlAgent()
        yield LocalDevicePeer(agent, gpu)
        await agent.aclose()


async def test_the_host_pool_of_another_process_is_pinned_and_copied_to_without_staging(
    gpu: SimulatedGpu, engine_caches: EngineCaches, tmp_path: Path
) -> None:
    before, batches = engine_caches.blocks, gpu.get("num_batches")
    path = tmp_path / "pool.sock"
    with running_pool(path, capacity="4MiB"):
        async with kvxfer.connect(
            f"pool://{path}", engine_caches.caches, namespace=NAMESPACE
        ) as engine:
            assert gpu.get("registered_bytes") > 0
            stored = await engine.store(KEYS, [range(20)])
            loaded = await engine.load(KEYS, [range(20, 40)])
            assert all(outcome.done for outcome in stored + loaded)
    assert np.array_equal(engine_caches.blocks[:, 20:40], before[:, :20])
    assert gpu.get("num_batches") > batches
    assert gpu.get("registered_bytes") == 0


@pytest.mark.timeout(15)
async def test_a_device_that_is_lost_in_the_middle_leaves_memory_unsafe(
    gpu: SimulatedGpu, engine_caches: EngineCaches
) -> None:
    async with kvxfer.connect(
        "host://?capacity=4MiB", engine_caches.caches, namespace=NAMESPACE
    ) as engine:
        batches = gpu.get("num_batches")
        gpu.set("paused", 1)
        store = asyncio.create_task(engine.store(KEYS, [range(20)]))
        await asyncio.to_thread(gpu.wait_for_more, "num_batches", batches)
        gpu.set("lost", 0)
        for outcome in await store:
            assert outcome.status is kvxfer.Status.FAILED
            assert not outcome.memory_safe
        gpu.set("paused", 0)
        await engine.drain()
        assert await engine.lookup(KEYS) == [False] * 20


@pytest.mark.parametrize("is_looked_up", [False, True])
async def test_fenced_blocks_go_straight_from_and_to_a_gpu(
    engine_caches: EngineCaches, *, is_looked_up: bool
) -> None:
    caches = engine_caches
    namespace = complete_namespace(NAMESPACE, caches.caches, 1)
    config = NixlConfig(listen="127.0.0.1:0", capacity=ByteSize(8 << 20))
    async with NixlBackend(config, namespace, make_agent=FakeNixlAgent) as holder:
        await holder.start()
        assert holder.server is not None
        address = str(holder.server.endpoint)
        config = NixlConfig(address=address, transport="nixl", integrity="fenced")
        client = NixlBackend(config, namespace, make_agent=FakeNixlAgent)
        async with TransferEngine(caches.caches, client) as engine:
            assert engine.backend is client, "blocks pass through staging buffers"
            expected = caches.blocks.copy()
            stored = await engine.store(KEYS, [range(20)])
            if is_looked_up:
                assert await engine.lookup(KEYS) == [True] * 20
            loaded = await engine.load(KEYS, [range(30, 50)])
            assert all(outcome.done for outcome in stored + loaded)
    expected[:, 30:50] = expected[:, :20]
    assert np.array_equal(caches.blocks, expected)
