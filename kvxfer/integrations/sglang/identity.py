"""Identity of pages under SGLang: what changes their bytes and is not in SGLang's keys."""

import json
from collections.abc import Sequence
from typing import Any

import xxhash

from kvxfer.integrations.sglang.interface import HiCacheStorageConfig, published
from kvxfer.storage.keys import Namespace

FORMAT = 1
"""Version of what the plug stores under a key."""

MODEL_FIELDS = (
    "revision", "json_model_override_args", "model_impl", "dtype", "quantization",
    "quantization_param_path", "kv_cache_dtype", "context_length", "load_format",
)  # fmt: skip
DRAFT_FIELDS = (
    "speculative_algorithm", "speculative_draft_model_path", "speculative_draft_model_revision",
    "speculative_draft_model_quantization", "speculative_draft_kv_cache_dtype",
)  # fmt: skip
"""Settings of an engine that change the values of its cache at equal tokens: RoPE by overrides and
by the length of the context, scales of a quantized cache, a draft model whose layers are stored
with the others."""


def page_namespace(config: HiCacheStorageConfig, revision: str, pools: Sequence[str]) -> Namespace:
    """Make the namespace of the pages of some host pools, without groups.

    SGLang's keys are hashes of the tokens up to the end of a page, with the salt and the adapter of
    the request. Shapes, data types and layers of a page come with the groups. Ranks of a pipeline
    have layers of their own, and ranks of context parallelism a part of each page's bytes, so
    they are named here; what tensor parallelism divides the mappings describe. So are the pools: a
    draft model may have layers of the same shape.
    """
    facts: dict[str, Any] = {
        "format": FORMAT,
        "pools": list(pools),
        "model": published("model", *MODEL_FIELDS),
        "draft": published("spec", *DRAFT_FIELDS),
    }
    for size, rank in (("pp_size", "pp_rank"), ("attn_cp_size", "attn_cp_rank")):
        if getattr(config, size) > 1:
            facts[size] = [getattr(config, size), getattr(config, rank)]
    text = json.dumps(facts, sort_keys=True, default=str)
    return Namespace(
        model=config.model_name or "",
        revision=revision,
        config_hash=xxhash.xxh3_128_hexdigest(text.encode()),
    )
