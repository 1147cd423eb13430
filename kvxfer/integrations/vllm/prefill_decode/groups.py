"""Groups: the KV-cache groups of a model, and whether they can be handed over."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvxfer.integrations.vllm.prefill_decode.interface import HAS_TRANSFER_RESULTS, transfer_groups

STATES = "MambaSpec"
"""Kind of groups that keep states of recurrent layers: Mamba, linear attention."""

KINDS = (
    *("FullAttentionSpec", "MLAAttentionSpec", "SlidingWindowSpec", "SlidingWindowMLASpec"),
    STATES,
)
"""Kinds of groups that can be handed over: classes of vLLM, by name. One that is derived from them
may keep other blocks, or keep them for another time."""


@dataclass(frozen=True, slots=True)
class Groups:
    """KV-cache groups that can be handed over.

    Attributes:
        tokens_per_block: Tokens of a block of each group, over all workers.
        windows: Tokens before the last one of a prompt that each group needs to compute that one;
            None for all. Such a group also keeps every block of a request until it is finished.
        has_states: Whether a block of each group is a state: that of the last of its tokens that
            are computed.
    """

    tokens_per_block: tuple[int, ...]
    windows: tuple[int | None, ...]
    has_states: tuple[bool, ...]

    @classmethod
    def of(cls, kv_cache_config: Any, num_token_shares: int) -> "Groups":
        """Read the groups of a `vllm.v1.kv_cache_interface.KVCacheConfig`."""
        specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        return cls(
            tokens_per_block=tuple(spec.block_size * num_token_shares for spec in specs),
            windows=tuple(_window(spec) for spec in specs),
            has_states=tuple(map(has_states, specs)),
        )

    @property
    def num_last_tokens(self) -> int:
        """Tokens at the end of a prompt that P leaves to D: one where a group does not keep all.

        D computes the last token of a prompt, and needs the states from before it, and the first
        token of its window. When P has computed it, its states are those after it, and vLLM has
        freed the blocks that no later token needs.
        """
        return int(any(window is not None for window in self.windows))


def why_not(kv_cache_config: Any) -> str:
    """Say why the caches of a model cannot be handed over; empty where they can."""
    groups = kv_cache_config.kv_cache_groups
    if not groups:
        return "the model has no KV cache"
    for index, group in enumerate(groups):
        layers = _layers(group.kv_cache_spec)
        for spec in layers:
            if type(spec).__name__ not in KINDS:
                return f"group {index} is a {type(spec).__name__}, none of {', '.join(KINDS)}"
        if len({_window(spec) for spec in layers}) > 1:
            return f"the layers of group {index} have several windows"
        if any(getattr(spec, "num_speculative_blocks", 0) for spec in layers):
            return f"group {index} keeps states of tokens that are speculated on"
    if len(transfer_groups(kv_cache_config)) < len(groups):
        return "vLLM wants some of its groups not to be handed over"
    return ""


def can_report_failures(kv_cache_config: Any) -> bool:
    """Whether vLLM lets a load fail; before 0.30 only by block."""
    return HAS_TRANSFER_RESULTS or fails_by_block(kv_cache_config)


def fails_by_block(kv_cache_config: Any) -> bool:
    """Whether vLLM can keep the blocks before the first bad one of a load.

    Not of several groups: it ends an engine whose connector lists blocks of those. Nor of windows:
    blocks that the window of the whole prompt leaves out are in that of its beginning.
    """
    groups = kv_cache_config.kv_cache_groups
    return len(groups) == 1 and _window(groups[0].kv_cache_spec) is None


def _layers(spec: Any) -> Sequence[Any]:
    """List the specs of a group's layers, or the one of all."""
    each = getattr(spec, "kv_cache_specs", None)
    return list(each.values()) if each else [spec]


def _window(spec: Any) -> int | None:
    """Return `Groups.windows` of a group; 1 where it keeps states."""
    first = _layers(spec)[0]
    if has_states(spec):
        return 1
    window = first.sliding_window if type(first).__name__.startswith("SlidingWindow") else None
    return None if window is None else int(window) - 1


def has_states(spec: Any) -> bool:
    """Whether the blocks of a group are states."""
    return type(_layers(spec)[0]).__name__ == STATES
