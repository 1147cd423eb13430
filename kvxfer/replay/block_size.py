"""Sizes of blocks: the bytes that a model keeps for a token, and the blocks that fit in a tier."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvxfer.backends.file import FileConfig
from kvxfer.backends.file.config import require_room
from kvxfer.backends.host import HostConfig, PoolShape
from kvxfer.backends.object import ObjectConfig
from kvxfer.checks import require_positive
from kvxfer.connect import BackendChoice, backend_choices, parse_backend
from kvxfer.errors import InvalidArgumentError
from kvxfer.named_files import read_named_file
from kvxfer.replay.simulation import TierPlan
from kvxfer.settings import shown
from kvxfer.storage.keys import GroupIdentity, Namespace

_OTHER_LAYERS = re.compile(
    "mamba|^ssm_|hybrid|attn_(layer|type)|full_attn|layers?_block_type|block_types|attention_chunk"
)
"""Settings that reveal layers without full attention in configurations without `layer_types`."""

_BYTES_OF_DTYPES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}


def bytes_per_token(model: Path) -> int:
    """Compute the bytes of a token's keys and values, of all layers, from a model's `config.json`.

    Raises:
        InvalidArgumentError: The file is not a model's configuration, or not all layers have full
            attention: then the bytes do not grow evenly with the prompt.
    """
    path = model / "config.json" if model.is_dir() else model
    try:
        config = msgspec.json.decode(read_named_file(path).data)
        return _bytes_per_token(path, config)
    except InvalidArgumentError:
        raise
    except (ValueError, TypeError, AttributeError, ArithmeticError, RecursionError) as exc:
        raise InvalidArgumentError("model", str(path), f"a model's config.json; {exc}") from exc


def _bytes_per_token(path: Path, config: Any) -> int:
    if not isinstance(config, dict):
        raise InvalidArgumentError("model", str(path), "a model's config.json")
    dtype = config.get("dtype") or config.get("torch_dtype")
    config = config | (config.get("text_config") or {})
    dtype = config.get("dtype") or config.get("torch_dtype") or dtype
    kinds = set(config.get("layer_types") or ()) - {"full_attention"}
    if "layer_types" not in config:
        kinds |= {name for name, value in config.items() if value and _OTHER_LAYERS.search(name)}
        is_sliding = config.get("sliding_window") and config.get("use_sliding_window", True)
        kinds |= {"a sliding window"} if is_sliding else set()
    if others := ", ".join(sorted(kinds)):
        rule = f"full attention in all layers, not {others}; else give --bytes-per-token"
        raise InvalidArgumentError("model", str(path), rule)
    if dtype not in _BYTES_OF_DTYPES:
        rule = f"one of {', '.join(_BYTES_OF_DTYPES)}; else give --bytes-per-token"
        raise InvalidArgumentError(f"dtype in {path}", dtype, rule)
    return _values_per_token(path, config) * _BYTES_OF_DTYPES[dtype]


def plan_tiers(
    backend: BackendChoice | Sequence[BackendChoice], block_size_bytes: int
) -> list[TierPlan]:
    """Plan the tiers of a `backend` list: how many blocks fit in each."""
    return [_plan_tier(choice, block_size_bytes) for choice in backend_choices(backend)]


def _plan_tier(choice: BackendChoice, block_size_bytes: int) -> TierPlan:
    _, config = parse_backend(choice)
    if isinstance(config, HostConfig):
        shape = PoolShape.fit(
            capacity_bytes=config.capacity, num_parts=1, part_size_bytes=block_size_bytes
        )
        return TierPlan("host", config.eviction, shape.num_slots)
    if isinstance(config, FileConfig):
        group = GroupIdentity(page_sizes_bytes=(block_size_bytes,))
        num_bytes = require_room(config, Namespace(model="kvxfer replay", groups=(group,)))
        return TierPlan("file", config.eviction, config.capacity // num_bytes)
    if isinstance(config, ObjectConfig):
        return TierPlan("object", "none", 0)
    wanted = "a host://, file://, s3://, gs:// or az:// tier"
    raise InvalidArgumentError("backend", shown(choice), wanted)


def _values_per_token(path: Path, config: Mapping[str, Any]) -> int:
    """Count the numbers that a model keeps for a token: keys and values, or latents."""

    def number(*names: str) -> int:
        for name in names:
            value = config.get(name)
            if isinstance(value, int):
                return require_positive(f"{name} in {path}", value)
        raise InvalidArgumentError(f"{names[0]} in {path}", None, "a number")

    num_layers = number("num_hidden_layers")
    if config.get("kv_lora_rank") is not None:
        return num_layers * (number("kv_lora_rank") + number("qk_rope_head_dim"))
    num_kv_heads = number("num_key_value_heads", "num_attention_heads")
    if config.get("head_dim") is None:
        config = {**config, "head_dim": number("hidden_size") // number("num_attention_heads")}
    return num_layers * 2 * num_kv_heads * number("head_dim")
