"""Identity of pages under SGLang: what changes their bytes and is not in SGLang's keys."""

import re
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from kvxfer import runtime
from kvxfer.engine_side.adapter_files import digest_adapter
from kvxfer.engine_side.harmless_words import counting_environment, default_of, may_change_bytes
from kvxfer.engine_side.weight_files import hash_facts
from kvxfer.integrations.sglang.interface import (
    HiCacheStorageConfig,
    PublishedSetting,
    has_default,
    loaded_weights,
    published_settings,
)
from kvxfer.storage.keys import Namespace

FORMAT = 1
"""Version of what the plug stores under a key."""

MODEL, DRAFT = "model", "spec"
"""SGLang's groups that every release has; settings of `spec` count only with a draft model."""

NAMED = frozenset({
    "weight_version", "revision", "json_model_override_args", "model_impl", "dtype", "quantization",
    "quantization_param_path", "kv_cache_dtype", "context_length", "load_format",
})  # fmt: skip
"""Settings that count even with the release's default: another release may have another default."""

HARMLESS = frozenset({
    "_speculative_draft_quantization_explicitly_set", "allow_auto_truncate",
    "allowed_media_domains", "aux_hidden_state_capture", "base_gpu_id", "batch_notify_size",
    "boundary_reduction", "c128_page_size", "crash_dump_folder", "custom_sigquit_handler",
    "debug_tensor_dump_output_folder", "deepep_config", "deepep_mode", "deepep_v2_mode",
    "delete_ckpt_after_loading", "device", "disable_custom_all_reduce",
    "disable_shared_experts_fusion", "download_dir", "dsa_triton_union", "dwdp_size",
    "enable_broadcast_mm_inputs_process", "enable_cache_report", "enable_dsa_cache_layer_split",
    "enable_dsa_fused_indexer", "enable_dynamic_chunking", "enable_fp32_lm_head",
    "enable_fused_moe_sum_all_reduce", "enable_fused_qk_norm_rope", "enable_hierarchical_cache",
    "enable_kv_cache_sharding", "enable_layernorm_sp", "enable_lean_attention", "enable_lora",
    "enable_mixed_chunk", "enable_mscclpp", "enable_multimodal", "enable_page_major_kv_layout",
    "enable_paged_experts", "enable_pd_role_switch", "enable_response_store",
    "enable_scattered_sconv", "enable_waterfill", "encoder_only", "encoder_transfer_backend",
    "ep_join_mode", "ep_num_redundant_experts", "ep_size", "expert_balancedness_report_mode",
    "file_storage_path", "flashinfer_mla_disable_ragged", "fuseep_mode", "gpu_id_step",
    "grammar_backend", "init_expert_location", "int8_mamba_ckpt_size", "keep_mm_feature_on_device",
    "kt_cpuinfer", "kt_threadpool_count", "kv_events_config", "language_model_only",
    "language_only", "load_balance_method", "lora_backend", "lora_drain_wait_threshold",
    "lora_paths", "lora_target_modules", "mamba_max_states_per_path", "max_ep_size",
    "max_loaded_loras", "max_lora_chunk_size", "max_loras_per_batch", "max_mamba_cache_size",
    "max_prefill_tokens", "max_total_tokens", "media_url_max_file_size_mb", "mem_fraction_static",
    "min_free_slots_delay", "mm_attention_backend", "mm_feature_transport",
    "mm_global_cache_backend", "mm_preprocess_cache_size_mb", "modelexpress_config",
    "modelopt_checkpoint_save_path", "modelopt_export_path", "num_continuous_decode_steps",
    "num_reserved_decode_tokens", "optimistic_prefill_attempts", "page_size",
    "paged_experts_num_resident", "prefill_only_disable_kv_cache", "random_seed",
    "reasoning_parser", "retraction_policy", "served_model_name", "show_time_cost", "sm_group_num",
    "speculative_attention_mode", "speculative_boundary_reduction", "speculative_eagle_topk",
    "speculative_num_draft_tokens", "speculative_num_steps", "speculative_use_block_verification",
    "startup_weight_load_mode", "stat_loggers", "swa_prefix_tails",
    "tbo_token_distribution_threshold", "triton_attention_num_kv_splits",
    "triton_attention_split_tile_size", "weight_cache_mode", "weight_cache_socket",
    "weight_loader_drop_cache_after_load",
})  # fmt: skip
"""Settings that do not change the bytes of a page at equal tokens, or that its key or mapping has.
`revision` names the weights themselves, whichever way they get to the engine. Any other setting
counts, as does one that a later release adds, unless it has that release's default."""

OF_ENVIRONMENT = re.compile(
    r"""(
    aiter_((asm|jit)_dir|rebuild|rocm_arch) | allow_overwrite_longer_context_len
    | cache_(dir|hit_rate_window_seconds) | clip_max_new_tokens_estimation | cpu_workers
    | dg_cache_dir | distributed_init_method_override | embedding_pool_size_mb
    | encoder_(dispatch_min_items|mm_(load_workers|receiver_mode)|preproc_workers)
    | flashinfer_(moe_fused_finalize|workspace_size) | hugepage_size | io_workers
    | is_in_ci(_amd)? | jit_(cache_(debug|dir|keep)|deepgemm_precompile)
    | logprob_chunk_size | lora_((dense|moe)_)?config_dir
    | max_(batch_reqs_per_http_req|new_tokens_limit|think_tokens)
    | mm_(buffer_size_mb|feature_cache_mb|load_max_retries) | moe_config_dir
    | mori_(num_workers|post_batch_size|qp_per_transfer|send_aux_rdma|transfer_shards|wait_poll_ms)
    | one_visible_device_per_process | opt_(fp8_wo_a_gemm|use_topk_v2) | plugins
    | qwen4_ple_file_dir | retract_decode_steps | run_id | set_cpu_affinity
    | skip_sgl_kernel_version_check | sort_weight_files | torch_profiler_dir
    | use_(aiter|cpu_engine|custom_triton_kernel_cache) | vlm_cache_size_mb | zbal_bootstrap_url
    )=.*""",
    re.VERBOSE | re.DOTALL,
)
"""Harmless variables: paths, processes, limits, schedules, and kernels that SGLang itself chooses
by the GPU; `plugins` counts with plug-ins of others alone. Any other counts unless it has the
release's default, as do those of other kernels.

Source: sglang/srt/environ.py, and other modules of SGLang.
"""

DESCRIBED = frozenset({
    # What mappings and shapes describe, or the namespace names.
    "tp_rank", "tp_size", "tp_lcm_size", "pp_rank", "pp_size", "attn_cp_rank", "attn_cp_size",
    "dp_rank", "dcp_rank", "dcp_size", "logical_page_size", "is_mla_model", "model_name",
    # How SGLang's own storages lay out pages, and settings of storages.
    "is_page_first_layout", "should_split_heads", "enable_storage_metrics", "extra_config",
})  # fmt: skip
"""Fields of `HiCacheStorageConfig` that do not count. One that a later release adds counts, unless
it has that release's default."""

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
    named, too: a draft model may have layers of the same shape. Weights that a live update loaded
    without a version have no name, so this call alone makes the namespace of their pages.

    Raises:
        UnsupportedEngineError: This release exposes its settings differently.
    """
    facts: dict[str, Any] = {
        "format": FORMAT,
        "pools": list(pools),
        "settings": _counting(published_settings(MODEL, DRAFT)),
        "adapters": list(adapters),
    }
    if loaded_weights()[1]:
        facts["weights"] = str(runtime.unique_id())
    found = counting_environment("sglang", OF_ENVIRONMENT)
    if changed := {name: value for name, value in found.items() if not has_default(name)}:
        facts["environment"] = changed
    facts |= {
        each.name: getattr(config, each.name)
        for each in fields(config)
        if each.name not in DESCRIBED and getattr(config, each.name) != default_of(each)
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
    drafting = any(each.value for each in settings if each.name == "speculative_algorithm")
    return {
        f"{each.group}.{each.name}": each.value
        for each in settings
        if each.name in NAMED or (not each.is_default and _counts(each, drafting=drafting))
    }


def _counts(setting: PublishedSetting, *, drafting: bool) -> bool:
    if setting.name in HARMLESS or (setting.group == DRAFT and not drafting):
        return False
    return may_change_bytes(setting.name, setting.value)
