"""Groups: the KV-cache groups of a model, and whether and how they can be handed over."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvxfer.integrations.vllm.common.release import installed_version
from kvxfer.integrations.vllm.common.worker_pages import GroupPages, describe_pages, layer_kernels
from kvxfer.integrations.vllm.prefill_decode.interface import transfer_groups
from kvxfer.kvcache.canonical import CanonicalKVCaches
from kvxfer.kvcache.portable import CacheDescription, GroupDescription, WorkerShard

STATES = "MambaSpec"
"""Kind of groups that keep states of recurrent layers: Mamba, linear attention."""

KINDS = (
    *("FullAttentionSpec", "MLAAttentionSpec", "SlidingWindowSpec", "SlidingWindowMLASpec"),
    STATES,
)
"""Kinds of groups that can be handed over: names of vLLM's classes. A subclass is of another kind:
it may keep other blocks, or keep them for longer or shorter."""


@dataclass(frozen=True, slots=True)
class Groups:
    """KV-cache groups that can be handed over."""

    tokens_per_block: tuple[int, ...]  # of all workers together
    # Tokens that a group needs, before the last one of a prompt, to compute that last one. None for
    # all: such a group also keeps every block of a request until the request is finished.
    windows: tuple[int | None, ...]
    has_states: tuple[bool, ...]  # whether a block is the state after its last computed token

    @classmethod
    def of(cls, kv_cache_config: Any, num_token_shares: int) -> "Groups":
        """Read the groups of a `vllm.v1.kv_cache_interface.KVCacheConfig`."""
        specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        return cls(
            tokens_per_block=tuple(spec.block_size * num_token_shares for spec in specs),
            windows=tuple(_window(spec) for spec in specs),
            has_states=tuple(map(_has_states, specs)),
        )

    @property
    def num_last_tokens(self) -> int:
        """Tokens at the end of a prompt that P leaves to D: one if a group does not keep all.

        D computes the last token of a prompt, and needs the states before that token and the first
        token of its window. Once P has computed the last token, P's states are those after it, and
        vLLM has freed the blocks that no later token needs.
        """
        return int(any(window is not None for window in self.windows))


def why_not(kv_cache_config: Any, num_token_shares: int) -> str:
    """Say why the caches of a model cannot be handed over; empty if they can."""
    groups = kv_cache_config.kv_cache_groups
    if not groups:
        return "the model has no KV cache"
    for index, group in enumerate(groups):
        layers = _layers(group.kv_cache_spec)
        for spec in layers:
            if type(spec).__name__ not in KINDS:
                return f"group {index} is a {type(spec).__name__}, not one of {', '.join(KINDS)}"
        # vLLM has had such groups, and this attribute, since 0.32.
        if num_token_shares > 1 and not getattr(group.kv_cache_spec, "dcp_sharded", True):
            return f"group {index} is whole on workers that divide the tokens of other groups"
        if len({_window(spec) for spec in layers}) > 1:
            return f"the layers of group {index} have different windows"
        if any(getattr(spec, "num_speculative_blocks", 0) for spec in layers):
            return f"group {index} keeps states of speculative tokens"
    if len(transfer_groups(kv_cache_config)) < len(groups):
        return "vLLM excludes some groups from the hand-over"
    return ""


def fails_by_block(kv_cache_config: Any) -> bool:
    """Whether vLLM can keep the blocks of a load before the first bad one.

    Not with several groups: vLLM ends an engine whose connector lists bad blocks of these. Nor with
    windows: the window of the shorter prompt has blocks that were not loaded.
    """
    groups = kv_cache_config.kv_cache_groups
    return len(groups) == 1 and _window(groups[0].kv_cache_spec) is None


def describe_worker(
    caches: CanonicalKVCaches, kv_cache_config: Any, vllm_config: Any
) -> CacheDescription:
    """Describe the caches of this worker for other engines."""
    parallel = vllm_config.parallel_config
    groups = kv_cache_config.kv_cache_groups
    layers = [(group.layer_names, group.kv_cache_spec.block_size) for group in groups]
    pages = describe_pages(caches, layers, vllm_config, with_states=True)
    shard = WorkerShard(
        num_kv_heads=pages.num_kv_heads,
        rank=parallel.rank % parallel.tensor_parallel_size,
        tp_size=parallel.tensor_parallel_size,
        dcp_size=getattr(parallel, "decode_context_parallel_size", 1),
        interleave_tokens=pages.interleave_tokens,
    )
    return CacheDescription(
        shard=shard,
        groups=tuple(
            _describe(each, group, shard.num_token_shares, vllm_config)
            for each, group in zip(pages.groups, groups, strict=True)
        ),
    )


def _layers(spec: Any) -> Sequence[Any]:
    """List the specs of a group's layers, or the single spec of all layers."""
    each = getattr(spec, "kv_cache_specs", None)
    return list(each.values()) if each else [spec]


def _window(spec: Any) -> int | None:
    """Return a group's element of `Groups.windows`; 1 if the group keeps states."""
    first = _layers(spec)[0]
    if _has_states(spec):
        return 1
    window = first.sliding_window if type(first).__name__.startswith("SlidingWindow") else None
    return None if window is None else int(window) - 1


def _has_states(spec: Any) -> bool:
    return type(_layers(spec)[0]).__name__ == STATES


def _describe(
    pages: GroupPages, group: Any, num_token_shares: int, vllm_config: Any
) -> GroupDescription:
    opaque, spec = "", group.kv_cache_spec
    if not pages.boxes:  # only equal workers of the same release may read it
        layout = getattr(vllm_config.cache_config, "kv_cache_layout", None)
        release = f"vLLM {installed_version()}; layout {layout}"
        kernels = layer_kernels(group.layer_names, vllm_config)
        opaque = f"{release}; {spec!r}; {kernels}; {pages.reason}"
    return GroupDescription(
        tokens_per_block=spec.block_size * num_token_shares,
        payload_size_bytes=pages.payload_size_bytes,
        boxes=pages.boxes,
        opaque=opaque,
        has_states=_has_states(spec),
    )
