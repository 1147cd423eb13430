"""Worker caches: the description of a vLLM worker's KV caches for other engines."""

from typing import Any

from kvxfer.errors import InvalidArgumentError
from kvxfer.integrations.vllm.common.release import installed_version
from kvxfer.integrations.vllm.common.worker_pages import (
    GroupLayers,
    GroupPages,
    describe_pages,
    layer_kernels,
)
from kvxfer.integrations.vllm.prefill_decode.groups import has_states
from kvxfer.kvcache.canonical import CanonicalKVCaches
from kvxfer.kvcache.portable import CacheDescription, GroupDescription, WorkerShard


def describe_worker(
    caches: CanonicalKVCaches, kv_cache_config: Any, vllm_config: Any
) -> CacheDescription:
    """Describe the caches of this worker.

    Args:
        caches: The caches, from `canonicalize`.
        kv_cache_config: A `vllm.v1.kv_cache_interface.KVCacheConfig`.
        vllm_config: A `vllm.config.VllmConfig`.

    Raises:
        InvalidArgumentError: There are more workers than divide the KV heads evenly.
    """
    parallel = vllm_config.parallel_config
    groups = kv_cache_config.kv_cache_groups
    layers = [GroupLayers(group.layer_names, group.kv_cache_spec.block_size) for group in groups]
    pages = describe_pages(caches, layers, vllm_config, with_states=True)
    shard = WorkerShard(
        num_kv_heads=pages.num_kv_heads,
        rank=parallel.rank % parallel.tensor_parallel_size,
        tp_size=parallel.tensor_parallel_size,
        dcp_size=getattr(parallel, "decode_context_parallel_size", 1),
        interleave_tokens=pages.interleave_tokens,
    )
    if not pages.groups:
        raise InvalidArgumentError("kv_cache_config", kv_cache_config, "at least one group")
    return CacheDescription(
        shard=shard,
        groups=tuple(
            _describe(each, group, shard.num_token_shares, vllm_config)
            for each, group in zip(pages.groups, groups, strict=True)
        ),
    )


def _describe(
    pages: GroupPages, group: Any, num_token_shares: int, vllm_config: Any
) -> GroupDescription:
    opaque, spec = "", group.kv_cache_spec
    if not pages.boxes:  # to be read by equal workers of the same release only
        layout = getattr(vllm_config.cache_config, "kv_cache_layout", None)
        parts = (f"vLLM {installed_version()}", f"layout {layout}", repr(spec))
        kernels = layer_kernels(group.layer_names, vllm_config)
        opaque = "; ".join((*parts, kernels, pages.reason))
    return GroupDescription(
        tokens_per_block=spec.block_size * num_token_shares,
        payload_size_bytes=pages.payload_size_bytes,
        boxes=pages.boxes,
        opaque=opaque,
        has_states=has_states(spec),
    )
