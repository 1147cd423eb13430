"""Identity of pages under SGLang: what changes their bytes and is not in SGLang's keys."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from kvxfer.engine_side.adapter_files import digest_adapter
from kvxfer.engine_side.weight_files import hash_facts
from kvxfer.integrations.sglang.interface import (
    HiCacheStorageConfig,
    PublishedSetting,
    published_settings,
)
from kvxfer.storage.keys import Namespace

FORMAT = 1
"""Version of what the plug stores under a key."""

MODEL, DRAFT = "model", "spec"
"""SGLang's groups whose settings count, except harmless ones; `spec` only with a draft model. One
that a later release adds or renames counts, too, unless it has that release's default."""

NAMED = frozenset({
    "weight_version", "revision", "json_model_override_args", "model_impl", "dtype", "quantization",
    "quantization_param_path", "kv_cache_dtype", "context_length", "load_format",
})  # fmt: skip
"""Settings that count even with the release's default: another release may have another default."""

LOADING = frozenset({
    "startup_weight_load_mode", "weight_loader_disable_mmap", "weight_loader_prefetch_checkpoints",
    "weight_loader_prefetch_num_threads", "weight_loader_drop_cache_after_load",
    "remote_instance_weight_loader_seed_instance_ip",
    "remote_instance_weight_loader_seed_instance_service_port",
    "remote_instance_weight_loader_send_weights_group_ports",
    "remote_instance_weight_loader_backend",
    "remote_instance_weight_loader_start_seed_via_transfer_engine", "engine_info_bootstrap_port",
    "modelexpress_config", "download_dir", "model_checksum", "delete_ckpt_after_loading",
    "modelopt_checkpoint_save_path", "modelopt_export_path", "weight_cache_mode",
    "weight_cache_socket", "weight_cache_timeout", "kt_cpuinfer", "kt_threadpool_count",
})  # fmt: skip
"""Harmless settings: how weights get to the engine, and which processors compute. `revision` names
the weights themselves."""

PROPOSING = frozenset({
    "speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens",
    "speculative_accept_threshold_single", "speculative_accept_threshold_acc",
    "speculative_use_rejection_sampling", "speculative_use_block_verification",
    "speculative_attention_mode", "speculative_draft_attention_backend",
    "speculative_dsa_topk_backend", "speculative_moe_runner_backend",
    "speculative_moe_a2a_backend", "speculative_boundary_reduction",
    "speculative_skip_dp_mlp_sync", "speculative_adaptive", "speculative_adaptive_config",
    "spec_trace_dir", "_speculative_draft_quantization_explicitly_set",
})  # fmt: skip
"""Harmless settings of draft models: how many tokens are proposed, which are accepted, kernels."""

LOSSY_WORDS = frozenset({
    "quant", "quantization", "quantize", "dtype", "precision", "rounding", "philox", "fp4", "fp6",
    "fp8", "int4", "int8", "mxfp4", "mxfp6", "mxfp8", "nvfp4", "w4a4", "w4a8", "w4a16", "w8a8",
    "tf32", "kt", "dllm", "hooks", "interpolation",
})  # fmt: skip
"""Words in the names of settings of other groups that change weights or states: quantization,
products in TF32, experts with other weights (`kt`), diffusion (`dllm`), hooks, image embeddings.
Names of kernels do not count: their results differ only in the order of additions."""

DESCRIBED = frozenset({
    # What mappings and shapes describe, or the namespace names.
    "tp_rank", "tp_size", "tp_lcm_size", "pp_rank", "pp_size", "attn_cp_rank", "attn_cp_size",
    "dp_rank", "dcp_rank", "dcp_size", "logical_page_size", "is_mla_model", "model_name",
    # How SGLang's own storages lay out pages, and settings of storages.
    "is_page_first_layout", "should_split_heads", "enable_storage_metrics", "extra_config",
})  # fmt: skip
"""Fields of `HiCacheStorageConfig` that do not count. One that a later release adds counts, unless
it has that release's default."""

KERNEL = "_backend"
LOSSY_KERNELS = frozenset({"flashmla_sparse_q8"})
"""Kernels that do count: they compute attention in FP8, whatever the data type.

Source: `_validate_flashmla_sparse_q8_backend` of SGLang."""
ADAPTERS = "lora_paths"
"""Setting with the adapters that an engine was started with: SGLang's keys have their name and
path. Keys of an adapter that is loaded later have a random id."""


def started_adapters() -> list[tuple[str, str]]:
    """Digest the adapters that the engine was started with, by their names.

    Call it while the engine starts: later, the files may be those of another training run.

    Raises:
        UnsupportedEngineError: This release exposes its settings differently.
        InvalidArgumentError: An adapter is not a folder with readable files.
    """
    settings = published_settings(MODEL, DRAFT)
    started = next((each.value for each in settings if each.name == ADAPTERS), None) or ()
    return sorted((str(each.lora_name), digest_adapter(each.lora_path)) for each in started)


def page_namespace(
    config: HiCacheStorageConfig,
    revision: str,
    pools: Sequence[str],
    adapters: Sequence[tuple[str, str]],
) -> Namespace:
    """Make the namespace of the pages of some host pools, without groups.

    SGLang's keys are hashes of the tokens up to the end of a page, with the salt and the adapter of
    the request. Shapes, data types and layers of a page come with the groups. Each pipeline rank
    has layers of its own, and each context-parallel rank a part of every page's bytes, so these
    ranks are named here; mappings describe how tensor parallelism divides a page. The pools are
    named, too: a draft model may have layers of the same shape.

    Raises:
        UnsupportedEngineError: This release exposes its settings differently.
    """
    facts: dict[str, Any] = {
        "format": FORMAT,
        "pools": list(pools),
        "settings": _counting(published_settings(MODEL, DRAFT)),
        "adapters": list(adapters),
    }
    facts |= {
        each.name: getattr(config, each.name)
        for each in fields(config)
        if each.name not in DESCRIBED and getattr(config, each.name) != each.default
    }
    for size, rank in (("pp_size", "pp_rank"), ("attn_cp_size", "attn_cp_rank")):
        if getattr(config, size) > 1:
            facts[size] = [getattr(config, size), getattr(config, rank)]
    return Namespace(
        model=config.model_name or "",
        revision=revision,
        config_hash=hash_facts(facts),
    )


def _counting(settings: Sequence[PublishedSetting]) -> dict[str, Any]:
    """Choose the settings that change the values of a cache for equal tokens."""
    drafting = any(
        each.group == DRAFT and each.name == "speculative_algorithm" and each.value
        for each in settings
    )
    return {
        f"{each.group}.{each.name}": each.value
        for each in settings
        if each.name in NAMED or (not each.is_default and _counts(each, drafting=drafting))
    }


def _counts(setting: PublishedSetting, *, drafting: bool) -> bool:
    if setting.name in LOADING | PROPOSING:
        return False
    if setting.group in {MODEL, DRAFT}:
        return drafting or setting.group == MODEL
    if setting.name.endswith(KERNEL):
        return str(setting.value) in LOSSY_KERNELS
    return not LOSSY_WORDS.isdisjoint(setting.name.split("_"))
