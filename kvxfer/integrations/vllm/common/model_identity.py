"""Identity of a model under vLLM: everything that changes its cache's values at equal tokens."""

import enum
import json
import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import partial, reduce
from pathlib import Path
from typing import Any

from kvxfer.engine_side.harmless_words import counting_environment, default_of, may_change_bytes
from kvxfer.engine_side.weight_files import (
    OF_NO_VALUE,
    config_facts,
    find_weights_revision,
    hash_facts,
    hash_text,
)
from kvxfer.errors import InvalidArgumentError
from kvxfer.integrations.vllm.common.harmless_settings import (
    OF_ENVIRONMENT,
    OF_KNOWN_ORDER,
    OF_LOADING,
    SETTINGS,
)
from kvxfer.storage.keys import Namespace

HARMLESS_FILES = re.compile(
    r"config\.json|(added_tokens|chat_template|generation_config|merges|special_tokens_map|tokenizer"
    r"|vocab)[^.]*\.json|.*\.index\.json"
)
"""Files beside the weights that change no value at equal tokens, or that are read elsewhere."""

OF_PARTS = "audio_model_id", "text_model_id"
"""Fields of a configuration, Ultravox's, that name checkpoints whose weights vLLM loads, too.

Source: `secondary_weights` of vllm/model_executor/models; all others are of the same repository.
"""


def identify_model(vllm_config: Any, *, model: str = "", dtype: str = "") -> Namespace:
    """Identify the model of an engine, in terms that are the same in every release of vLLM.

    The namespace lacks the fields that depend on the layout of blocks.
    """
    require_telling_keys(vllm_config)
    loaded, cache = vllm_config.model_config, vllm_config.cache_config
    facts = _describe(vllm_config) | {
        "engine": _describe_use(loaded),
        "cache": [str(cache.cache_dtype), str(cache.mamba_cache_mode)],
        "attention": _counting_settings(vllm_config, "attention_config", OF_KNOWN_ORDER),
        "load_format": str(getattr(vllm_config.load_config, "load_format", "auto")),
    }
    if draft := draft_of(vllm_config):
        facts["draft engine"] = _describe_use(draft)
    revision = _name_weights(vllm_config) + _name_overrides(loaded)
    return _namespace(vllm_config, model, dtype, revision, facts)


def _namespace(
    vllm_config: Any, model: str, dtype: str, revision: str, facts: Mapping[str, Any]
) -> Namespace:
    weights, cache = vllm_config.model_config.quantization, vllm_config.cache_config.cache_dtype
    return Namespace(
        model=model,
        revision=revision,
        dtype=dtype,
        quantization=f"weights {weights}, cache {cache}",
        config_hash=hash_facts(facts),
    )


def require_telling_keys(vllm_config: Any) -> None:
    """Refuse an engine whose adapters, cache scales or images vLLM's keys do not identify."""
    require_no_adapters(vllm_config)
    require_known_scales(vllm_config.cache_config)
    images: Any = getattr(vllm_config.model_config, "multimodal_config", None)
    has_images = images is not None and not getattr(images, "language_model_only", False)
    if has_images and not names_images(vllm_config):
        rule = "more than 0, or prefix caching: without both, vLLM's keys only number images"
        raise InvalidArgumentError("mm_processor_cache_gb", images.mm_processor_cache_gb, rule)


def names_images(vllm_config: Any) -> bool:
    """Whether vLLM names images by their content; without any cache, it numbers them instead.

    Source: `_process_mm_uuids` of vllm/renderers/base.py.
    """
    images = getattr(vllm_config.model_config, "multimodal_config", None)
    has_cache = getattr(images, "mm_processor_cache_gb", 0)
    return bool(has_cache or vllm_config.cache_config.enable_prefix_caching)


def require_no_adapters(vllm_config: Any) -> None:
    """Refuse an engine with adapters: offloading gets vLLM's keys, but no request to name one."""
    if vllm_config.lora_config is not None:
        rule = "False: vLLM's keys name the folder of a LoRA adapter, not its weights"
        raise InvalidArgumentError("enable_lora", value=True, expected=rule)


def require_known_scales(cache_config: Any) -> None:
    """Refuse a quantized cache whose scales each engine computes from its first prompt."""
    if getattr(cache_config, "calculate_kv_scales", False):
        rule = "False: each engine computes its own scales, so no other can use its pages"
        raise InvalidArgumentError("calculate_kv_scales", value=True, expected=rule)


def _name_overrides(model: Any) -> str:
    """Name the overrides that make an engine compute something else than its checkpoint says.

    They belong to the revision, since other engines cannot compute vLLM's `config_hash`.
    """
    given = getattr(model, "hf_overrides", None) or {}
    facts = [_place_of(given) if callable(given) else given, bool(model.disable_sliding_window)]
    return "" if facts == [{}, False] else f" overridden {hash_facts(facts)}"


def _describe(vllm_config: Any) -> dict[str, Any]:
    """Collect what changes the values of a model's cache, as its checkpoint and its user state it.

    So engines of different releases, which add different defaults, agree.
    """
    from vllm.platforms import current_platform

    model, cache = vllm_config.model_config, vllm_config.cache_config
    overrides = getattr(model, "hf_overrides", None) or {}
    facts = _describe_length(model) | {
        "config": _read_config(model),
        "overrides": str(overrides),
        "skipped": sorted(map(str, getattr(cache, "kv_cache_dtype_skip_layers", ()))),
        "states": [str(cache.mamba_cache_dtype), str(cache.mamba_ssm_cache_dtype)],
        "sliding_window_off": bool(model.disable_sliding_window),
    }
    if callable(overrides):  # its effect on the configuration; its text has a memory address
        facts["overrides"] = [_name_overrides(model), config_facts(model.hf_config)]
    draft = draft_of(vllm_config)
    dtype = getattr(vllm_config.speculative_config, "kv_cache_dtype", None) if draft else None
    kinds = {cache.cache_dtype, dtype, model.quantization, getattr(draft, "quantization", None)}
    settings: dict[str, Any] = {
        name: _counting_settings(vllm_config, *each)
        for name, each in SETTINGS.items()
        if draft or name != "draft"
    }
    settings |= {
        "additional": getattr(vllm_config, "additional_config", None),
        "quantization": _changed_settings(model.quantization_config),
        "classes": model.model_class_overrides,
        "worker": getattr(vllm_config.parallel_config, "worker_extension_cls", ""),
        "own code": _name_own_code(vllm_config),
        "code": getattr(model, "code_revision", None),
        "replayed states": getattr(cache, "use_replayssm", False) and cache.replayssm_buffer_len,
        "whole windows": not getattr(cache, "swa_bounded_replay", True),
        "weights": _describe_loading(vllm_config.load_config).get("load_format"),
        "variables": counting_environment("vllm", OF_ENVIRONMENT),
        "8-bit floats": not kinds <= {"auto", None} and current_platform.is_fp8_fnuz(),  # MI300
    }
    if draft:
        config = _read_config(draft)
        given = getattr(vllm_config.speculative_config, "draft_load_config", None)
        settings |= {
            "draft weights": _describe_loading(given or vllm_config.load_config),
            "draft quantization": "quantization_config" not in config and draft.quantization,
            "draft code": getattr(draft, "code_revision", None),
            "draft length": _describe_length(draft),
        }
        facts["draft"] = [find_revision(draft), config, *([dtype] if dtype else [])]
    facts |= {f"settings of {name}": made for name, made in settings.items() if made}
    return facts


def _name_own_code(vllm_config: Any) -> list[str]:
    """Name a worker and a compiler's backend and passes that are not vLLM's.

    Other settings of parallelism and of the compiler choose among kernels, divide the work, or are
    in the shapes of pages. vLLM adds `inductor_passes` to the compiler's configuration.
    """
    compiler = getattr(vllm_config, "compilation_config", None)
    worker = getattr(vllm_config.parallel_config, "worker_cls", "")
    passes = filter(callable, getattr(compiler, "inductor_compile_config", {}).values())
    called = (getattr(each, "callable", each) for each in passes)
    places = map(_place_of, (worker, getattr(compiler, "backend", ""), *called))
    return [each for each in places if "." in each and not each.startswith("vllm.")]


def _place_of(code: Any) -> str:
    """Name code by its place, since its text has a memory address; return a text as it is."""
    if isinstance(code, str):
        return code
    if isinstance(code, partial):
        return f"{_place_of(code.func)} {code.args} {code.keywords}"
    if hasattr(code, "__qualname__"):
        return f"{code.__module__}.{code.__qualname__}"
    return f"{_place_of(type(code))} {code.uuid() if hasattr(code, 'uuid') else vars(code)}"


def _describe_use(model: Any) -> dict[str, Any]:
    """Collect how an engine uses a checkpoint, and hashes of other files that it may read there."""
    return _describe_length(model) | {
        "dtype": str(model.dtype),
        "quantization": [str(model.quantization), _changed_settings(model.quantization_config)],
        "implementation": [str(model.model_impl), str(model.model_class_overrides)],
        "sliding_window_off": bool(model.disable_sliding_window),
        "files": {
            file.name: hash_text(file.read_text(errors="surrogateescape"))
            for file in Path(_config_source(model)).glob("*.json")
            if not HARMLESS_FILES.fullmatch(file.name)
        },
    }


def _describe_length(model: Any) -> dict[str, Any]:
    """Describe what the context length decides: factors of a long RoPE, scales of Llama 4."""
    # The first checkpoints of Phi-3 call this kind of RoPE `su`, which transformers renames.
    text = json.dumps([_read_config(model), model.hf_config.to_dict()], default=str)
    facts = {"max_model_len": model.max_model_len} if "longrope" in text else {}
    if "attn_temperature_tuning" in text:  # see `Llama4ForCausalLM.__init__` of vLLM
        generation = model.try_get_generation_config() | model.override_generation_config
        if generation.get("attn_temperature_tuning", model.max_model_len > 32768):
            facts["attn_temperature_tuning"] = True
    return facts


def chosen_order(vllm_config: Any) -> str:
    """Name what may order a page, if any: attention backends, variables and plug-ins."""
    config = getattr(vllm_config, "attention_config", None)
    chosen = [getattr(config, each, None) for each in ("backend", "backend_per_kind")]
    facts: list[Any] = _changed_settings(chosen) if any(chosen) else []
    facts += filter(None, [counting_environment("vllm", OF_ENVIRONMENT)])
    return json.dumps(facts, default=str) if facts else ""


def _changed_settings(value: Any, others: frozenset[str] = frozenset()) -> Any:
    """Describe settings by those, at any depth, that differ from their release's defaults.

    Otherwise, a setting that the next release adds would look like another model. `others` are left
    out.
    """
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, Mapping):
        return {str(name): _changed_settings(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_changed_settings(each) for each in value]
    if isinstance(value, (set, frozenset)):
        return sorted(map(str, value))
    if not is_dataclass(value):
        return value
    return {
        each.name: _changed_settings(made)
        for each in fields(value)
        if each.name not in others and (made := getattr(value, each.name)) != default_of(each)
    }


def _counting_settings(vllm_config: Any, place: str, harmless: str) -> dict[str, Any]:
    """Describe the settings of one configuration that may change bytes."""
    parts = place.split(".") if place else ()
    config = reduce(lambda config, part: getattr(config, part, None), parts, vllm_config)
    made = _changed_settings(config, frozenset(harmless.split())) if is_dataclass(config) else {}
    return {name: value for name, value in made.items() if may_change_bytes(name, value)}


def _describe_loading(load_config: Any) -> dict[str, Any]:
    """Collect the settings that load other weights than those of the checkpoint."""
    made = _changed_settings(load_config) if is_dataclass(load_config) else {}
    made |= made.pop("model_loader_extra_config", {})
    return {name: each for name, each in made.items() if name not in OF_LOADING or each == "dummy"}


def _name_weights(vllm_config: Any) -> str:
    """Name the weights of an engine: the revision, and settings that load others in their place."""
    made = _describe_loading(vllm_config.load_config)
    loaded = f" loaded {hash_facts(made)}" if made else ""
    return find_revision(vllm_config.model_config) + loaded


def find_revision(model: Any) -> str:
    """Find the revision of the weights, see `find_weights_revision`; refuse unknown weights."""
    path = str(model.model_weights or model.model)
    is_own = _config_source(model) == str(model.model)  # else its commit is another repository's
    commit = (is_own and getattr(model.hf_config, "_commit_hash", None)) or ""
    revision = find_weights_revision(path, revision=model.revision or "", commit=commit)
    if not revision:
        rule = f"a revision of the weights at {path!r}, which has no commit or weight file"
        raise InvalidArgumentError("revision", revision, rule)
    config = model.hf_config.to_dict()
    parts = {name: _name_part(name, config[name]) for name in OF_PARTS if config.get(name)}
    return revision + (f" with {hash_facts(parts)}" if parts else "")


def _name_part(setting: str, place: str) -> str:
    """Name the weights of another checkpoint, which vLLM loads at no revision, by its commit."""
    from huggingface_hub import try_to_load_from_cache

    cached = None if Path(place).exists() else try_to_load_from_cache(place, "config.json")
    commit = Path(cached).parent.name if isinstance(cached, str) else ""
    if revision := find_weights_revision(place, commit=commit):
        return revision
    rule = "a folder with weights, or in the cache of Hugging Face: else they have no name"
    raise InvalidArgumentError(setting, place, rule)


def handover_namespace(vllm_config: Any, revision: str = "") -> Namespace:
    """Build the namespace in which engines hand pages over, which depends on the model alone.

    Engines of different releases, on different machines, share it. A given `revision` replaces the
    one that would be found.
    """
    model = vllm_config.model_config
    require_known_scales(vllm_config.cache_config)
    revision, facts = revision or _name_weights(vllm_config), _describe(vllm_config)
    architectures = " ".join(getattr(model.hf_config, "architectures", None) or ())
    return _namespace(vllm_config, architectures, str(model.dtype), revision, facts)


def draft_of(vllm_config: Any) -> Any:
    """Find the draft model; None without one, or if vLLM names the model itself as its draft."""
    speculative = getattr(vllm_config, "speculative_config", None)
    draft = getattr(speculative, "draft_model_config", None)
    return None if draft is getattr(speculative, "target_model_config", None) else draft


def _read_config(model: Any) -> dict[str, Any]:
    """Read the configuration of a checkpoint as its authors wrote it, if its file is found."""
    from huggingface_hub import try_to_load_from_cache

    place, commit = Path(_config_source(model)), getattr(model.hf_config, "_commit_hash", None)
    file = place / "config.json"
    if commit and not place.exists():
        cached = try_to_load_from_cache(str(place), file.name, revision=commit)
        file = Path(cached) if isinstance(cached, str) else file
    is_found = str(getattr(model, "config_format", "auto")) in {"auto", "hf"} and file.is_file()
    config = json.loads(file.read_text()) if is_found else model.hf_config.to_diff_dict()
    return {key: value for key, value in config.items() if key not in OF_NO_VALUE}


def _config_source(model: Any) -> str:
    return str(getattr(model, "hf_config_path", None) or model.model)
