"""Identity of a model under vLLM: what changes the values of its cache at equal tokens."""

import json
from pathlib import Path
from typing import Any

import msgspec

from kvxfer.engine_side.weight_files import VOLATILE_FIELDS, find_weights_revision, hash_text
from kvxfer.errors import InvalidArgumentError
from kvxfer.storage.keys import Namespace


class ModelIdentity(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Identity of a model, beyond `OffloadingConfig`: properties that change the cache's values.

    Attributes:
        revision: Revision of the weights, and the hash of what overrides their configuration.
        quantization: Quantization of weights and cache.
        config_hash: XXH3 of all other properties that change values: configuration of the model
            (RoPE, windows), attention backend, draft model.
    """

    revision: str
    quantization: str = ""
    config_hash: str = ""


def identify_model(vllm_config: Any) -> ModelIdentity:
    """Identify the model of an engine.

    Args:
        vllm_config: A `vllm.config.VllmConfig`.

    Raises:
        InvalidArgumentError: The revision of the weights is unknown, or adapters are loaded.
    """
    require_no_adapters(vllm_config)
    model, cache = vllm_config.model_config, vllm_config.cache_config
    facts = _describe(model) | {
        "cache": [
            str(cache.cache_dtype),
            list(cache.kv_cache_dtype_skip_layers),
            str(cache.mamba_cache_dtype),
            str(cache.mamba_ssm_cache_dtype),
            str(cache.mamba_cache_mode),
        ],
        "attention": str(vllm_config.attention_config),
        "load_format": str(vllm_config.load_config.load_format),
    }
    if draft := draft_of(vllm_config):
        facts["draft"] = [find_revision(draft), _describe(draft)]
    return ModelIdentity(
        revision=find_revision(model) + _name_overrides(model),
        quantization=f"weights {model.quantization}, cache {cache.cache_dtype}",
        config_hash=hash_text(json.dumps(facts, sort_keys=True, default=str)),
    )


def require_no_adapters(vllm_config: Any) -> None:
    """Check that an engine has no adapters: vLLM gives offloading its own keys, and no requests.

    Raises:
        InvalidArgumentError: LoRA is enabled.
    """
    if vllm_config.lora_config is not None:
        rule = "False: keys of LoRA's pages name an adapter's folder, and not its weights"
        raise InvalidArgumentError("enable_lora", value=True, expected=rule)


def _name_overrides(model: Any) -> str:
    """Name what an engine computes otherwise than the configuration of the checkpoint says.

    It is a part of the revision, which readers that are not vLLM compare: they cannot compute the
    hash of vLLM's configuration.
    """
    given = getattr(model, "hf_overrides", None) or {}
    if callable(given):
        given = f"{given.__module__}.{given.__qualname__}"
    facts = [given, bool(model.disable_sliding_window)]
    if facts == [{}, False]:
        return ""
    return f" overridden {hash_text(json.dumps(facts, sort_keys=True, default=str))}"


def _describe(model: Any) -> dict[str, Any]:
    """Collect the parts of a model's configuration that change its values."""
    config = {
        name: value
        for name, value in model.hf_config.to_dict().items()
        if name not in VOLATILE_FIELDS
    }
    facts = {
        "config": config,
        "dtype": str(model.dtype),
        "quantization": [str(model.quantization), str(model.quantization_config)],
        "implementation": [str(model.model_impl), str(model.model_class_overrides)],
        "sliding_window_off": bool(model.disable_sliding_window),
    }
    if "longrope" in json.dumps(config, default=str):
        facts["max_model_len"] = model.max_model_len  # long or short factors depend on it
    return facts


def find_revision(model: Any) -> str:
    """Find the revision of the weights, see `find_weights_revision`.

    Raises:
        InvalidArgumentError: It is unknown.
    """
    path = str(model.model_weights or model.model)
    commit = getattr(model.hf_config, "_commit_hash", None) or ""
    revision = find_weights_revision(path, revision=model.revision or "", commit=commit)
    if not revision:
        rule = f"a revision of the weights at {path!r}, which has no commit or weight file"
        raise InvalidArgumentError("revision", revision, rule)
    return revision


def handover_namespace(vllm_config: Any, revision: str = "") -> Namespace:
    """Make the namespace in which engines hand pages over: of one model, whatever its engines.

    It has neither paths nor vLLM's release nor what the engine derives from the checkpoint, so that
    engines of different releases, on different machines, can share it.

    Args:
        vllm_config: A `vllm.config.VllmConfig`.
        revision: Revision of the weights, in place of the one that is found.

    Raises:
        InvalidArgumentError: The revision of the weights is unknown.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    facts = {
        "config": _read_config(model),
        "overrides": str(getattr(model, "hf_overrides", None) or {}),
        "skipped": sorted(map(str, getattr(cache, "kv_cache_dtype_skip_layers", ()))),
        "states": [str(cache.mamba_cache_dtype), str(cache.mamba_ssm_cache_dtype)],
        "sliding_window_off": bool(model.disable_sliding_window),
    }
    if "longrope" in json.dumps(facts, default=str):
        facts["max_model_len"] = model.max_model_len
    if draft := draft_of(vllm_config):
        facts["draft"] = [find_revision(draft), _read_config(draft)]
    return Namespace(
        model=" ".join(getattr(model.hf_config, "architectures", None) or ()),
        revision=revision or find_revision(model),
        dtype=str(model.dtype),
        quantization=f"weights {model.quantization}, cache {cache.cache_dtype}",
        config_hash=hash_text(json.dumps(facts, sort_keys=True, default=str)),
    )


def draft_of(vllm_config: Any) -> Any:
    """Find the draft model; None without one.

    vLLM names the model itself where tokens are guessed from those before them.
    """
    speculative = getattr(vllm_config, "speculative_config", None)
    draft = getattr(speculative, "draft_model_config", None)
    return None if draft is getattr(speculative, "target_model_config", None) else draft


def _read_config(model: Any) -> dict[str, Any]:
    """Read the configuration of a checkpoint as its makers wrote it.

    Engines of different releases add different defaults to it.
    """
    path = Path(model.model) / "config.json"
    config = json.loads(path.read_text()) if path.is_file() else model.hf_config.to_diff_dict()
    dtypes = ("torch_dtype", "dtype")  # a field of its own in the namespace
    return {key: value for key, value in config.items() if key not in (*VOLATILE_FIELDS, *dtypes)}
