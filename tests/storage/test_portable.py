"""Portable pages: stored by workers of one shape, loaded by workers of another."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, patch

import msgspec
import numpy as np
import pytest
import torch
from safetensors import safe_open

from kvxfer import (
    CanonicalKVCaches,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    MambaSpec,
    MLASpec,
    SlidingWindowSpec,
    Status,
    WorkerShard,
    canonicalize,
    connect,
    make_block_key,
    map_caches,
)
from kvxfer.backends.host import HostBackend, HostConfig
from kvxfer.errors import BackendUnavailableError, ClosedError, InvalidArgumentError
from kvxfer.kvcache import AttentionSpec, KVQuantization, PageMapping
from kvxfer.kvcache.describer import BlockDescriber
from kvxfer.storage import BlockKey
from kvxfer.storage.backend import Purgeable
from kvxfer.storage.portable_backend import PortableBackend, portable_namespace
from kvxfer.transfer import TransferEngine
from kvxfer.units import ByteSize
from tests.storage.portable_workers import (
    DIM,
    HEADS,
    KEYS,
    NAMESPACE,
    PAGE,
    Worker,
    make_engine,
    make_values,
    make_worker,
)


def file_url(folder: Path) -> str:
    return f"file://{folder}?capacity=64MiB&min_free=1MiB"


def block_files(root: Path) -> list[Path]:
    return sorted(root.rglob("*.safetensors"))


async def store(workers: Sequence[Worker], url: str, values: torch.Tensor) -> None:
    for worker in workers:
        worker.fill(values)
        async with worker.connect(url) as engine:
            outcomes = await engine.store(KEYS, [range(worker.num_blocks)])
            assert all(outcome.done for outcome in outcomes)


@pytest.mark.parametrize(
    ("writer", "reader"),
    [
        (("block kv token head dim", 2, 16), ("block kv head token dim", 1, 32)),
        (("block kv head token dim", 1, 8), ("kv block token head dim", 4, 16)),
        (("block token kv head dim", 8, 64), ("block head token kv dim", 2, 8)),
    ],
)
async def test_files_serve_another_parallelism_block_size_and_layout(
    writer: tuple[str, int, int], reader: tuple[str, int, int], tmp_path: Path
) -> None:
    url, values = file_url(tmp_path), make_values()
    layout, tp_size, tokens = writer
    await store(make_engine(layout, tp_size=tp_size, tokens_per_block=tokens), url, values)
    layout, tp_size, tokens = reader
    for worker in make_engine(layout, tp_size=tp_size, tokens_per_block=tokens):
        async with worker.connect(url) as engine:
            assert await engine.lookup(KEYS) == [True] * len(KEYS)
            outcomes = await engine.load(KEYS, [range(worker.num_blocks)])
            assert all(outcome.done for outcome in outcomes)
        assert torch.equal(worker.values, worker.part(values))


async def test_a_folder_has_one_copy_of_every_head_and_names_keys_and_values(
    tmp_path: Path,
) -> None:
    values = make_values()
    workers = make_engine("block kv token head dim", tp_size=8, tokens_per_block=16)
    await store(workers, file_url(tmp_path), values)
    found: dict[str, int] = {}
    for file in block_files(tmp_path):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                tensor = opened.get_tensor(name)
                assert tensor.shape == (1, PAGE, DIM)
                layer, part = int(name.split(".")[1]), "kv".index(name.split(".")[2])
                pages = values[layer, part].reshape(-1, PAGE, DIM)
                assert any(torch.equal(tensor[0], page) for page in pages)
                found[name] = found.get(name, 0) + 1
    expected = {f"layers.{layer}.{part}": len(KEYS) * HEADS for layer in (0, 1) for part in "kv"}
    assert found == expected


async def test_the_last_block_may_have_fewer_pages_than_it_could(tmp_path: Path) -> None:
    (worker,) = make_engine("block kv head token dim", tp_size=1, tokens_per_block=32)
    worker.fill(make_values())
    async with worker.connect(file_url(tmp_path)) as engine:
        outcomes = await engine.store(KEYS[:3], [[0, 1]])
        assert [outcome.done for outcome in outcomes] == [True] * 3
        assert await engine.lookup(KEYS) == [True, True, True, False]
        with pytest.raises(InvalidArgumentError, match="num_pages"):
            await engine.store(KEYS[:2], [[0, 1]])


def test_namespaces_agree_across_what_a_mapping_bridges_and_differ_in_the_rest() -> None:
    first = make_worker("block kv token head dim", rank=1, tp_size=2, tokens_per_block=16)
    other = make_worker("kv block head token dim", rank=0, tp_size=4, tokens_per_block=64)
    ours = portable_namespace(
        msgspec.structs.replace(NAMESPACE, instruction_set="avx2"), first.mappings
    )
    theirs = portable_namespace(
        msgspec.structs.replace(NAMESPACE, parallel={"tp": 4}), other.mappings
    )
    assert ours.fingerprint == theirs.fingerprint
    ours.require_same(theirs)
    revised = portable_namespace(msgspec.structs.replace(NAMESPACE, revision="2"), first.mappings)
    assert revised.fingerprint != ours.fingerprint


async def test_pages_of_layers_with_another_window_are_not_found(tmp_path: Path) -> None:
    """What the first layer attends to is in the keys and values of the second."""
    worker = make_worker("block kv head token dim", rank=0, tp_size=1, tokens_per_block=16)
    worker.fill(make_values())
    (full,) = worker.caches.group_specs
    assert isinstance(full, FullAttentionSpec)
    kept: Any = {each.name: getattr(full, each.name) for each in dataclasses.fields(AttentionSpec)}
    windows = [
        dataclasses.replace(full, sliding_window=32),
        SlidingWindowSpec(**kept, sliding_window=32),
        dataclasses.replace(full, sliding_window=64),
        dataclasses.replace(full, attention_chunk_tokens=32),
        full,
    ]
    found = []
    for spec in windows:
        async with connect(
            file_url(tmp_path),
            dataclasses.replace(worker.caches, group_specs=[spec]),
            namespace=NAMESPACE,
            mappings=worker.mappings,
        ) as engine:
            found.append((await engine.lookup(KEYS))[0])
            await engine.store(KEYS, [range(worker.num_blocks)])
    assert found == [False, True, False, False, False]


def test_namespaces_say_of_every_tensor_how_it_is_ordered() -> None:
    spec = MambaSpec(tokens_per_block=8, shapes=((4, 4),) * 3, dtypes=(torch.float16,) * 3)
    states = [torch.zeros(3, 4, 4, dtype=torch.float16) for _ in range(3)]
    config = KVCacheConfig(3, (KVCacheGroup(spec, ("layers.0",)),))
    caches = canonicalize({"layers.0": states}, config)
    first, second = (
        portable_namespace(
            NAMESPACE, map_caches(caches, WorkerShard(num_kv_heads=1), state_heads=heads)
        )
        for heads in (("s1", None, "s1"), ("s1", None, None))
    )
    assert first.fingerprint != second.fingerprint


def test_pages_have_each_kind_of_8_bit_floats_that_engines_cache() -> None:
    kinds = [
        getattr(torch, f"float8_{each}") for each in ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz")
    ]
    fingerprints = set()
    for dtype in kinds:
        kv_cache = torch.zeros(3, 2, 16, 4, 32, dtype=dtype)
        spec: dict[str, Any] = {"num_kv_heads": 4, "head_dim": 32, "dtype": dtype}
        config = KVCacheConfig.uniform(3, ["a"], tokens_per_block=16, **spec)
        mappings = map_caches(canonicalize({"a": kv_cache}, config), WorkerShard(num_kv_heads=4))
        fingerprints.add(portable_namespace(NAMESPACE, mappings).fingerprint)
    assert len(fingerprints) == len(kinds)


@pytest.mark.parametrize("opaque", ["", "engine 1"])
def test_namespaces_say_how_elements_are_scaled(opaque: str) -> None:
    kv_cache = torch.zeros(3, 2, 16, 4, 32, dtype=torch.float8_e4m3fn)
    tokens = 24 if opaque else 16  # of pages: no blocks of 16 tokens make up 24
    spec: dict[str, Any] = {"num_kv_heads": 4, "head_dim": 32, "dtype": kv_cache.dtype}
    fingerprints = set()
    for scaling in (KVQuantization.NONE, KVQuantization.PER_TENSOR):
        config = KVCacheConfig.uniform(3, ["a"], tokens_per_block=16, **spec, quantization=scaling)
        caches = canonicalize({"a": kv_cache}, config)
        mappings = map_caches(
            caches, WorkerShard(num_kv_heads=4), tokens_per_page=tokens, opaque=opaque
        )
        assert (mappings[0].page.shards[0][0].axes == ("byte",)) is bool(opaque)
        fingerprints.add(portable_namespace(NAMESPACE, mappings).fingerprint)
    assert len(fingerprints) == 2


def worker_over_host() -> tuple[Worker, HostBackend]:
    (worker,) = make_engine("block kv head token dim", tp_size=1, tokens_per_block=16)
    worker.fill(make_values())
    namespace = portable_namespace(NAMESPACE, worker.mappings)
    return worker, HostBackend(HostConfig(capacity=ByteSize(1 << 20)), namespace)


async def test_a_page_is_not_done_when_one_of_its_shards_is_not() -> None:
    worker, inner = worker_over_host()
    backend = PortableBackend(inner, worker.mappings)
    engine = TransferEngine(worker.caches, backend, mappings=worker.mappings)
    async with engine:
        assert all(o.done for o in await engine.store(KEYS, [range(worker.num_blocks)]))
        content_hash = KEYS[1][:-4]
        assert await inner.delete([make_block_key(content_hash, 2)]) == [True]
        assert await engine.lookup(KEYS) == [True, False, True, True]
        outcomes = await engine.load(KEYS, [range(worker.num_blocks)])
        expected = [Status.DONE, Status.MISSING, Status.DONE, Status.DONE]
        assert [outcome.status for outcome in outcomes] == expected
        none = AsyncMock(return_value=[])
        with patch.multiple(inner, load=none, lookup=none):
            outcomes = await engine.load(KEYS, [range(worker.num_blocks)])
            assert {outcome.status for outcome in outcomes} == {Status.FAILED}
            with pytest.raises(BackendUnavailableError, match="0 answers"):
                await engine.lookup(KEYS)
        content_hash = KEYS[2][:-4]
        first, *_ = worker.mappings[0].shards
        assert await inner.delete([make_block_key(content_hash, first)]) == [True]
        inner.pin(in_use := [make_block_key(KEYS[3][:-4], first)])
        assert await backend.delete(KEYS) == [True] * 3 + [False]
        assert await backend.delete_or_keep(KEYS) == (set(), {*KEYS[3:]})
        inner.unpin(in_use)
        assert await backend.delete(KEYS) == [False] * 3 + [True]
        assert await engine.lookup(KEYS) == [False] * len(KEYS)


async def test_pages_that_nobody_names_have_no_retention() -> None:
    worker, inner = worker_over_host()
    async with PortableBackend(inner, worker.mappings) as backend:
        assert backend.retentions([]) == []


async def test_a_purge_takes_every_shard_of_the_pages_of_a_prefix() -> None:
    worker, inner = worker_over_host()
    pages = BlockDescriber(worker.caches, mappings=worker.mappings).describe(0, range(2))
    salted = [BlockKey(b"salt" + key) for key in KEYS[:2]]
    async with PortableBackend(inner, worker.mappings) as backend:
        for keys in (KEYS[:2], salted):
            assert all(outcome.done for outcome in await backend.store(keys, pages))
        moved = dataclasses.replace(pages, block_offsets=pages.block_offsets + np.array([0, 1, 0]))
        with pytest.raises(InvalidArgumentError, match="shards of"):
            await backend.store(KEYS[:2], moved)
        purgeable = backend.provide(Purgeable)
        assert purgeable is not None
        await purgeable.purge(b"salt")
        assert await backend.lookup([*KEYS[:2], *salted]) == [True, True, False, False]
        left = inner._index.keys()
        assert not any(key.startswith(b"salt") for key in left)


def latents_of(rank: int) -> tuple[CanonicalKVCaches, tuple[PageMapping, ...]]:
    spec = MLASpec(tokens_per_block=16, head_dim=DIM, dtype=torch.float16)
    config = KVCacheConfig(4, (KVCacheGroup(spec, ("layers.7",)),))
    caches = canonicalize({"layers.7": torch.ones(4, 16, DIM, dtype=torch.float16)}, config)
    shard = WorkerShard(num_kv_heads=1, rank=rank, tp_size=2)
    return caches, map_caches(caches, shard)


async def test_latents_are_stored_once_whoever_holds_them(tmp_path: Path) -> None:
    url = file_url(tmp_path)
    for rank in range(2):
        caches, mappings = latents_of(rank)
        async with connect(url, caches, namespace=NAMESPACE, mappings=mappings) as engine:
            assert all(outcome.done for outcome in await engine.store(KEYS, [range(4)]))
            stored = len(block_files(tmp_path))
            assert 0 < stored < 4 if rank == 0 else stored == 4
    with safe_open(block_files(tmp_path)[0], framework="pt") as opened:
        assert torch.equal(opened.get_tensor("layers.7.latent"), torch.ones(16, DIM).half())


async def test_latents_that_no_other_worker_can_find_are_all_stored() -> None:
    for rank in range(2):
        caches, mappings = latents_of(rank)
        url = "host://?capacity=1MiB"
        async with connect(url, caches, namespace=NAMESPACE, mappings=mappings) as engine:
            assert all(outcome.done for outcome in await engine.store(KEYS, [range(4)]))
            assert await engine.lookup(KEYS) == [True] * 4


async def test_a_closed_backend_also_refuses_pages_that_another_worker_stores() -> None:
    caches, mappings = latents_of(0)
    pages = BlockDescriber(caches, mappings=mappings).describe(0, range(len(KEYS)))
    inner = HostBackend(
        HostConfig(capacity=ByteSize(1 << 20)), portable_namespace(NAMESPACE, mappings)
    )
    async with PortableBackend(inner, mappings) as backend:
        pass
    for index, key in enumerate(KEYS):
        with pytest.raises(ClosedError):
            await backend.store([key], pages.select(index, index + 1))
