"""Host pool under caches on a GPU: copies straight to its slots and back, without staging."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch

import kvxfer
from kvxfer.backends.host import HostPool, PoolShape, SlotMover, slot_key
from kvxfer.copy_engine.devices import DeviceCopyEngine
from kvxfer.transfer import PolledEngine
from tests.backends.pool_servers import running_pool
from tests.cuda.engine_caches import EngineCaches
from tests.cuda.simulated_gpu import SimulatedGpu

NAMESPACE = kvxfer.Namespace(model="model", revision="1", dtype="bfloat16")
KEYS = [kvxfer.make_block_key(bytes([i]), 0) for i in range(20)]


@pytest.fixture(autouse=True)
def compute_stream(gpu: SimulatedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch without CUDA has no current stream; the device has one without a name."""

    class Stream:
        cuda_stream = 0

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())


async def test_the_host_pool_of_another_process_is_pinned_and_copied_to_without_staging(
    gpu: SimulatedGpu, tmp_path: Path
) -> None:
    engine_caches = EngineCaches(gpu)
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


async def test_a_pool_that_cannot_be_pinned_works_all_the_same(
    gpu: SimulatedGpu, caplog: pytest.LogCaptureFixture
) -> None:
    gpu.set("bytes_that_may_be_registered", 4096)
    engine_caches = EngineCaches(gpu)
    before, batches = engine_caches.blocks, gpu.get("num_batches")
    async with kvxfer.connect(
        "host://?capacity=4MiB", engine_caches.caches, namespace=NAMESPACE
    ) as engine:
        assert all(outcome.done for outcome in await engine.store(KEYS, [range(20)]))
        assert all(outcome.done for outcome in await engine.load(KEYS, [range(20, 40)]))
    assert np.array_equal(engine_caches.blocks[:, 20:40], before[:, :20])
    assert gpu.get("num_batches") == batches  # for the driver alone to copy, one by one
    assert "cannot be pinned" in caplog.text


@pytest.mark.timeout(15)
async def test_a_device_that_is_lost_in_the_middle_leaves_memory_unsafe(gpu: SimulatedGpu) -> None:
    engine_caches = EngineCaches(gpu)
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


def test_workers_of_one_engine_share_a_pool_across_devices(gpu: SimulatedGpu) -> None:
    workers = [EngineCaches(gpu, device_index=index) for index in (0, 1)]
    before = [worker.blocks for worker in workers]
    page_bytes = before[0].shape[2] * len(before[0])
    shape = PoolShape.fit(capacity_bytes=8 << 20, num_parts=2, part_size_bytes=page_bytes)
    for part, worker in enumerate(workers):
        pool = HostPool(shape, NAMESPACE, DeviceCopyEngine())
        engine = PolledEngine(worker.caches, SlotMover(pool, part=part))
        keys = [slot_key(key, slot, 0) for slot, key in enumerate(KEYS)]
        assert engine.wait([engine.submit_store(keys, [range(20)])], timeout_s=10)
        assert engine.wait([engine.submit_load(keys, [range(20, 40)])], timeout_s=10)
        assert [job.done for job in engine.get_finished()] == [True, True]
        engine.close()
        assert np.array_equal(worker.blocks[:, 20:40], before[part][:, :20])
