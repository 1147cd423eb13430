"""Layers of a model: the shapes of their keys and values, and the models that are refused."""

import inspect
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kvxfer.errors import InvalidArgumentError
from kvxfer.integrations.transformers.interface import (
    CACHE_ARGUMENT,
    WHOLE_LAYERS,
    DynamicCache,
    DynamicLayer,
    GenerationMixin,
    Past,
)
from kvxfer.integrations.transformers.module_state import draws_at_random

CHANGING_ROPES = ("dynamic", "longrope")
"""Rotary embeddings whose angles depend on the length of the whole sequence, not yet known.

Source: `transformers/modeling_rope_utils.py`, `dynamic_rope_update`.
"""

WINDOW_MASKS = (
    "create_masks_for_generate",
    "create_sliding_window_causal_mask",
    "sliding_window_causal_mask_function",
)
"""Mask functions that implement a window; the modules of a model import one of them.

Source: `transformers/masking_utils.py`.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """Shape of the keys and values of one layer, `(1, num_kv_heads, num_tokens, width)`."""

    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    dtype: torch.dtype
    device: torch.device


def find_layers(model: Any) -> tuple[LayerShape, ...]:
    """Find the shapes of a model's layers, or refuse the model; runs it on one token, twice."""
    config, kind = getattr(model, "config", None), type(model).__name__
    if config is None or not hasattr(model, "generate"):
        raise InvalidArgumentError("model", kind, "a model with generate()")
    for reason, expected in _obstacles(model, config):
        raise InvalidArgumentError("model", f"{kind}, {reason}", expected)
    if on_meta := [name for name, tensor in model.named_parameters() if tensor.is_meta]:
        raise InvalidArgumentError("model", f"{on_meta[0]} on meta", "all weights in memory")
    if any(map(draws_at_random, model.modules())):
        found = f"{kind}, in training, where dropout is random"
        raise InvalidArgumentError("model", found, "a model in eval()")
    token = torch.zeros((1, 1), dtype=torch.long, device=model.device)
    owners = [each for each in model.modules() if isinstance(each, GenerationMixin)] or [model]
    takes_positions = "position_ids" in inspect.signature(owners[0].forward).parameters
    given, past, placed = {"input_ids": token, "use_cache": True}, DynamicCache(), DynamicCache()
    try:
        with torch.inference_mode(), torch.autocast(token.device.type, enabled=False):
            model(**given, **{CACHE_ARGUMENT: past})
            if takes_positions:  # positions as those of `generate()`
                model(**given, position_ids=token, **{CACHE_ARGUMENT: placed})
    except Exception as exc:
        wanted = "a model that runs on tokens alone"
        raise InvalidArgumentError("model", f"{kind}, which fails: {exc!r}", wanted) from exc
    if (num_tokens := past.get_seq_length()) != 1:
        found = f"{kind}, {num_tokens} tokens in the cache for one of the prompt"
        raise InvalidArgumentError("model", found, "keys and values of only the prompt's tokens")
    for ours, theirs in zip(past.layers, placed.layers, strict=False):
        if not torch.equal(ours.keys, theirs.keys):
            found = f"{kind}, other keys with the positions of generate() than without"
            raise InvalidArgumentError("model", found, "the same from the same tokens")
    layers = enumerate(past.layers)
    return tuple(_shape_of(layer, f"{kind}, layer {at}", "model") for at, layer in layers)


def count_tokens(past: Past, layers: tuple[LayerShape, ...]) -> int:
    """Count the tokens whose keys and values a cache of the model has, the same in every layer."""
    if not isinstance(past, DynamicCache):
        raise InvalidArgumentError("past", type(past).__name__, "a DynamicCache, as load() returns")
    if not past.layers:
        return 0
    found = tuple(_shape_of(layer, f"layer {at}", "past") for at, layer in enumerate(past.layers))
    if found != layers:
        at = next((n for n, (a, b) in enumerate(zip(found, layers, strict=False)) if a != b), None)
        what = f"{len(found)} layers" if at is None else f"layer {at}: {found[at]}"
        wanted = f"{len(layers)} layers" if at is None else str(layers[at])
        raise InvalidArgumentError("past", what, f"{wanted}, as the model has")
    counts = {part.shape[2] for layer in past.layers for part in (layer.keys, layer.values)}
    if len(counts) > 1:
        raise InvalidArgumentError("past", f"{sorted(counts)} tokens", "as many in every layer")
    return int(counts.pop())


def _shape_of(layer: Any, name: str, argument: str) -> LayerShape:
    if type(layer) is not DynamicLayer:
        wanted = "a cache that keeps every token, DynamicCache() without a configuration"
        raise InvalidArgumentError(argument, f"{name}: {type(layer).__name__}", wanted)
    keys, values = layer.keys, layer.values
    if not isinstance(keys, torch.Tensor) or keys.ndim != 4 or values.ndim != 4:
        raise InvalidArgumentError(argument, f"{name}: no keys", "keys and values of every token")
    if keys.dtype != values.dtype:
        found = f"{name}: keys in {keys.dtype}, values in {values.dtype}"
        raise InvalidArgumentError(argument, found, "one data type, as without autocast")
    if keys.shape[0] != 1:
        found = f"{name}: {keys.shape[0]} sequences"
        raise InvalidArgumentError(argument, found, "one sequence, without beams")
    return LayerShape(
        num_kv_heads=keys.shape[1],
        head_dim=keys.shape[3],
        head_dim_v=values.shape[3],
        dtype=keys.dtype,
        device=keys.device,
    )


def _obstacles(model: Any, config: Any) -> Iterator[tuple[str, str]]:
    """List the properties of a model that rule out reuse of a prefix, and what is expected."""
    if getattr(config, "is_encoder_decoder", False):
        yield "an encoder-decoder model", "a decoder-only model"
        return
    text = config.get_text_config(decoder=True)
    is_bidirectional = getattr(text, "use_bidirectional_attention", None) in {True, "all"}
    if is_bidirectional or any(map(_attends_to_later_tokens, model.modules())):
        yield "attention to later tokens", "attention to earlier tokens only"
    if getattr(text, "attention_type", None) == "block_sparse":  # for prompts that are long enough
        yield "attention to blocks, even later ones", "attention to earlier tokens only"
    for kind in _rope_types(getattr(text, "rope_parameters", None)):
        if any(each in kind for each in CHANGING_ROPES):
            yield f"rotary embedding {kind!r}", "positions that do not depend on later tokens"
    wanted = "full or sliding-window attention in every layer"
    layers = DynamicCache(config=config).layers  # as transformers would make it
    for at, layer in enumerate(layers):
        if type(layer) not in WHOLE_LAYERS:
            yield f"layer {at}: {type(layer).__name__}", wanted
    kinds = getattr(text, "layer_types", None) or ()
    if "chunked_attention" in kinds:
        yield f"layer {kinds.index('chunked_attention')}: chunked attention", wanted
    windows = [at for at, layer in enumerate(layers) if type(layer) is not DynamicLayer]
    modules = {type(module).__module__ for module in model.modules()}
    masks = (hasattr(sys.modules.get(name), mask) for name in modules for mask in WINDOW_MASKS)
    if windows and not any(masks):  # else masks implement them, and a cache may keep every token
        yield f"layer {windows[0]}: a window that only its cache implements", wanted


def _attends_to_later_tokens(module: Any) -> bool:
    """Whether a module keeps keys and values of a layer that also attends to later tokens.

    Source: `transformers/models/bert/modeling_bert.py`, and all models that are derived from it.
    """
    is_cached = isinstance(getattr(module, "layer_idx", None), int)  # not in vision towers
    return is_cached and getattr(module, "is_decoder", None) is False


def _rope_types(parameters: Any) -> Iterator[str]:
    """List the kinds of rotary embedding, which may differ from layer to layer."""
    if isinstance(parameters, Mapping):
        yield str(parameters.get("rope_type", ""))
        for value in parameters.values():
            yield from _rope_types(value)
