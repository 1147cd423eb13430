"""Interface of transformers: the only module that imports its caches, and checks how they work."""

import inspect
from typing import Any, TypeAlias

import torch
import transformers

from kvxfer.errors import UnsupportedEngineError

SUPPORTED = "5.16 to 5.24"

try:
    from transformers import DynamicCache, GenerationConfig, GenerationMixin
    from transformers import PreTrainedConfig as Config
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
except ImportError as exc:
    release = str(transformers.__version__)
    raise UnsupportedEngineError("transformers", release, SUPPORTED, str(exc)) from exc

Past: TypeAlias = Any
"""A `DynamicCache`, which is not typed."""

_PARAMETERS = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
CACHE_ARGUMENT = "past_key_values" if "past_key_values" in _PARAMETERS else "cache"
"""Argument of a model and of its `generate()` for the cache: `cache` from 5.24 on."""

WHOLE_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer)
"""Layers whose keys and values a `DynamicCache()` without a configuration keeps whole: the model's
masks implement the window."""

GENERATION_FIELDS = frozenset(
    name for name in vars(GenerationConfig()) if name[0] != "_" and name != "transformers_version"
)
"""Settings of `generate()` that this release knows."""


def require_interface() -> None:
    """Check that caches work as they are used here, whatever the release's version number."""
    detail = "DynamicCache does not continue from the keys and values that its layers were given"
    tokens = torch.arange(2.0, device="cpu").reshape(1, 1, 2, 1)
    try:
        past = DynamicCache(config=None)
        give_layer(past, 0, tokens, tokens)
        num_tokens, twice = past.get_seq_length(), torch.cat([tokens, tokens], dim=2)
        grown = past.update(tokens, tokens, 0)
        if num_tokens == 2 and all(torch.equal(each, twice) for each in grown):
            return
    except (AttributeError, TypeError) as exc:
        detail = f"DynamicCache: {exc}"
    raise UnsupportedEngineError("transformers", str(transformers.__version__), SUPPORTED, detail)


def give_layer(past: Past, at: int, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Give the next layer of an empty cache its keys and values; `update` alone would copy them.

    They are `(1, num_kv_heads, num_tokens, head_dim)`; the cache keeps these tensors.
    """
    past.update(keys[:, :, :0], values[:, :, :0], at)
    past.layers[at].keys, past.layers[at].values = keys, values


def registered_functions(name: str) -> list[Any]:
    """List the functions, of attention, masks or experts, that are registered under a name."""
    places = (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS, ALL_EXPERTS_FUNCTIONS)
    return [each[name] for each in places if name in each]
