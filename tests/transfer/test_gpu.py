"""Transfers of caches on a GPU while the engine is computing."""

from pathlib import Path

import pytest
import torch

import kvxfer
from benchmarks.copy_cuda import run

NUM_BLOCKS = 64
KEYS = [kvxfer.make_block_key(bytes([i]), 0) for i in range(20)]


def make_caches() -> tuple[dict[str, torch.Tensor], kvxfer.CanonicalKVCaches]:
    shape = (NUM_BLOCKS, 2, 16, 8, 128)
    tensors = {f"layers.{i}": torch.rand(shape, device="cuda").bfloat16() for i in range(4)}
    spec = kvxfer.FullAttentionSpec(
        tokens_per_block=16, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16
    )
    groups = (kvxfer.KVCacheGroup(spec, tuple(tensors)),)
    config = kvxfer.KVCacheConfig(num_blocks=NUM_BLOCKS, groups=groups)
    return tensors, kvxfer.canonicalize(tensors, config)


@pytest.mark.gpu
@pytest.mark.parametrize("medium", ["host", "file"])
@pytest.mark.parametrize("methods", ["to_device=0,to_host=0", "to_device=1GiB,to_host=1GiB"])
async def test_blocks_come_back_into_other_blocks(
    tmp_path: Path, medium: str, methods: str
) -> None:
    tensors, caches = make_caches()
    url = (
        f"host://?capacity=64MiB&methods={methods}"
        if medium == "host"
        else f"file://{tmp_path}?capacity=64MiB"
    )
    namespace = kvxfer.Namespace(model="model", revision="1", dtype="bfloat16")
    async with kvxfer.connect(url, caches, namespace=namespace) as engine:
        ids = torch.randperm(NUM_BLOCKS).tolist()
        for tensor in tensors.values():  # still being computed when the store begins
            for _ in range(50):
                tensor.mul_(0.99)
        stored = await engine.store(KEYS, [ids[:20]])
        before = {name: tensor.clone() for name, tensor in tensors.items()}
        loaded = await engine.load(KEYS, [ids[20:40]])
        assert all(outcome.done for outcome in stored + loaded)
    for name, tensor in tensors.items():
        expected = before[name]
        expected[ids[20:40]] = expected[ids[:20]]
        assert torch.equal(tensor, expected)


@pytest.mark.gpu
def test_every_row_of_the_benchmark_can_be_measured() -> None:
    rows = run(quick=True, num_bytes=8 << 20)
    assert any(row.case == "matrix products during copies, against without" for row in rows)
    assert any("kernel against batch" in row.case for row in rows)
