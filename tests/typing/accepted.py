"""Calls and types of the public interface that mypy must accept; never run."""

from collections.abc import Sequence
from concurrent.futures import Future
from typing import assert_type

import numpy as np
import torch

import kvxfer
from kvxfer.kvcache import CanonicalKVCacheRef, KVCacheSpec
from kvxfer.storage import group_of
from kvxfer.testing import BackendTests
from kvxfer.transfer import JobId


def caches_are_canonical(
    kv_caches: dict[str, torch.Tensor], states: dict[str, list[torch.Tensor]]
) -> kvxfer.CanonicalKVCaches:
    spec = kvxfer.FullAttentionSpec(
        tokens_per_block=16, num_kv_heads=8, head_dim=64, dtype=torch.bfloat16
    )
    assert_type(spec.page_size_bytes, int)
    merged = KVCacheSpec.merge([spec, spec])
    assert_type(merged, KVCacheSpec)
    config = kvxfer.KVCacheConfig(num_blocks=8, groups=(kvxfer.KVCacheGroup(spec, ("layer",)),))
    caches = kvxfer.canonicalize(kv_caches, config)
    assert_type(caches, kvxfer.CanonicalKVCaches)
    assert_type(
        kvxfer.canonicalize(states, config, layouts={"layer": "block token dim"}),
        kvxfer.CanonicalKVCaches,
    )
    assert_type(caches.tensors[0].tensor, torch.Tensor)
    assert_type(caches.group_data_refs, Sequence[Sequence[CanonicalKVCacheRef]])
    return caches


def keys_are_not_just_bytes(content_hash: bytes) -> kvxfer.BlockKey:
    key = kvxfer.make_block_key(content_hash, 0)
    assert_type(key, kvxfer.BlockKey)
    assert_type(group_of(key), int)
    return key


async def transfers_end_in_outcomes(
    caches: kvxfer.CanonicalKVCaches, keys: list[kvxfer.BlockKey]
) -> None:
    namespace = kvxfer.Namespace(model="m")
    assert_type(namespace.fingerprint, str)
    async with kvxfer.connect("host://?capacity=1MiB", caches, namespace=namespace) as engine:
        assert_type(engine, kvxfer.TransferEngine)
        assert_type(await engine.lookup(keys), list[bool])
        outcomes = await engine.store(keys, [[1, 2], np.arange(3)])
        assert_type(outcomes, list[kvxfer.Outcome])
        assert_type(outcomes[0].status, kvxfer.Status)
        assert_type(await engine.load(keys, [(1, 2)], timeout_s=1.5), list[kvxfer.Outcome])
    mapping = {"type": "host", "capacity": "1MiB"}
    assert_type(kvxfer.connect(mapping, caches, namespace=namespace), kvxfer.TransferEngine)
    tiers = kvxfer.connect(["host://?capacity=1MiB", mapping], caches, namespace=namespace)
    assert_type(tiers, kvxfer.TransferEngine)


def polling_gives_finished_jobs(engine: kvxfer.TransferEngine, keys: list[kvxfer.BlockKey]) -> None:
    job_id = engine.submit_store(keys, [[1]])
    assert_type(job_id, JobId)
    assert_type(engine.wait([job_id], timeout_s=1.0), list[kvxfer.FinishedJob])
    assert_type(engine.submit_lookup(keys), Future[list[bool]])
    with engine as entered:
        assert_type(entered, kvxfer.TransferEngine)
    assert_type(engine.get_finished(), list[kvxfer.FinishedJob])


def modules_below_are_attributes() -> None:
    assert_type(kvxfer.engine_side.NULL_BLOCK_ID, int)
    assert_type(kvxfer.errors.BlockIdError(0, 9, 8).group, int)
    assert_type(kvxfer.lending.Fetched, type[kvxfer.lending.Fetched])


class TestsOfABackend(BackendTests):
    async def make_backend(self, namespace: kvxfer.Namespace) -> kvxfer.Backend:
        raise NotImplementedError
