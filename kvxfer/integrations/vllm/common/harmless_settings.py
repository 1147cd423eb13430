"""Settings of vLLM, and variables, that change no byte of a cache at equal tokens."""

import re

SETTINGS = {
    "engine": ("", """
        additional_config attention_config aux_output_config cache_config compilation_config
        device_config diffusion_config ec_manager_config ec_transfer_config engram_config
        kernel_config kv_events_config kv_transfer_config load_config lora_config mamba_config
        model_config observability_config optimization_level performance_mode profiler_config
        quant_config reasoning_config speculative_config structured_outputs_config watchdog_config
        weight_transfer_config
    """),
    "model": ("model_config", """
        allow_deprecated_quantization allowed_local_media_path allowed_media_domains code_revision
        config_format convert disable_cascade_attn disable_sliding_window dtype
        enable_cumem_allocator enable_prompt_embeds generation_config hf_config hf_config_path
        hf_overrides hf_text_config hf_token io_processor_plugin is_submodel_config
        logits_processors max_model_len model model_class_overrides model_impl model_weights
        multimodal_config override_generation_config pooler_config quantization quantization_config
        renderer_num_workers revision runner seed served_model_name spec_target_max_model_len
        trust_remote_code use_fp64_gumbel word_embeddings_untied_by_checkpoint
    """),
    "cache": ("cache_config", """
        _block_size_resolved block_size cache_dtype cache_hit_alignment_tokens calculate_kv_scales
        effective_attention_block_size enable_mamba_shared_prefix_checkpoint enable_prefix_caching
        hash_block_size is_attention_free kv_cache_dtype_skip_layers kv_cache_layout
        kv_cache_max_concurrency kv_cache_size_tokens kv_sharing_fast_prefill mamba_block_size
        mamba_cache_dtype mamba_cache_mode mamba_page_size_padded mamba_ssm_cache_dtype
        prefix_caching_hash_algo prefix_match_unit replayssm_buffer_len skip_page_size_padded
        sliding_window swa_bounded_replay use_kda_recoverssm use_replayssm user_specified_block_size
        user_specified_mamba_block_size
    """),
    "images": ("model_config.multimodal_config", """
        allow_missing_mm_embeddings enable_mm_embeds interleave_mm_strings language_model_only
        limit_per_prompt mm_encoder_attn_backend mm_encoder_fp8_scale_save_margin
        mm_encoder_fp8_scale_save_path mm_encoder_only mm_hasher_algorithm mm_processor_cache_gb
        mm_processor_cache_type mm_shm_cache_max_object_size_mb
    """),
    "recurrent states": ("mamba_config", "backend ssu_algorithm"),
    "attention": ("attention_config", """
        backend backend_per_kind flash_attn_version flex_attn_block_m flex_attn_block_n
        flex_attn_kv_block_size flex_attn_q_block_size minimax_m3_msa_decode_backend
        mla_prefill_backend sparse_mla_force_mqa sparse_mla_prefill_workspace_factor
        tokenspeed_mla_min_split_kv use_cudnn_prefill use_prefill_decode_attention
        use_trtllm_attention use_trtllm_ragged_deepseek_prefill
    """),
    "kernels": ("kernel_config", ""),
    "parallelism": ("parallel_config", """
        all2all_backend assigned_physical_gpu_ids disable_custom_all_reduce
        distributed_executor_backend enable_ep_weight_filter enable_fault_tolerance enable_hc_sp
        enable_shm_tensor_arena expert_placement_strategy fault_tolerance_config is_moe_model
        placement_group ubatch_size world_size
    """),
    "compiler": ("compilation_config", """
        backend cache_dir compilation_time custom_ops debug_dump_path decoder_replay_trim_threshold
        disabled_custom_ops dynamic_shapes_config enabled_custom_ops encoder_compilation_time
        fast_moe_cold_start inductor_passes ir_enable_torch_wrap local_cache_dir mode pass_config
        splitting_ops static_all_moe_layers static_forward_context traced_files
    """),
    "compiler passes": ("compilation_config.pass_config", """
        eliminate_noops enable_qk_norm_rope_fusion enable_sp fuse_act_quant fuse_attn_quant
        fuse_gemm_comms fuse_mla_dual_rms_norm fuse_norm_quant fuse_qk_norm_rope_kvcache
        fuse_rope_kvcache fuse_rope_kvcache_cat_mla rope_kvcache_fusion_max_token_num
        sp_min_token_num
    """),
    "draft": ("speculative_config", """
        attention_backend code_revision disable_eagle_block_drop disable_lookahead_block_hashes
        disable_padded_drafter_batch draft_lm_head_quantization draft_load_config draft_model_config
        draft_sample_method dspark_draft_topk fly_entropy_threshold fly_entropy_top_k
        fly_window_size index_share_for_mtp_iteration kv_cache_dtype max_model_len method model
        num_speculative_tokens num_speculative_tokens_per_batch_size prompt_lookup_max
        prompt_lookup_min quantization rejection_sample_method revision target_model_config
        use_local_argmax_reduction xpress_topc
    """),
}  # fmt: skip
"""Configurations of vLLM 0.26 to 0.33, by the name in an identity: the place, and the fields that
change no byte, but for rounding, or that an identity has by themselves. Any other field counts,
unless its name has a harmless word or its value is a known kernel: it may be of a later release."""
OF_KNOWN_ORDER = re.sub(r"\b(backend(_per_kind)?|use_prefill\w+)\b", "", SETTINGS["attention"][1])
"""Harmless fields of attention, without those that choose a backend, which may order a page."""
OF_LOADING = frozenset({
    "concurrency", "device", "distributed", "download_dir", "enable_multithread_load",
    "enable_weights_track", "load_format", "memory_limit", "num_threads", "pt_load_map_location",
    "safetensors_load_strategy", "safetensors_prefetch_block_size",
    "safetensors_prefetch_num_threads", "use_tqdm_on_load",
})  # fmt: skip
"""Harmless settings of vLLM's `LoadConfig` and of its loaders: how weights are read. Any other may
decide which weights are read: it may skip files, or name tensors that are stored elsewhere."""

OF_ENVIRONMENT = re.compile(
    r"""(
    aiter_((asm|jit)_dir|rebuild|rocm_arch)
    | allow_(insecure_serialization|long_max_model_len|runtime_lora_updating)
    | cohere2_attn_moe_dual_stream_token_threshold | compute_nans_in_logits
    | cpu_(attn_split_kv|kvcache_space|moe_prepack|num_of_reserved_cpu) | cuda_compatibility_path
    | cudart_so_path | debug_(dump_path|workspace)
    | deepep_(buffer_size_mb|high_throughput_force_intra_node|low_latency_use_mnnvl)
    | deepep_v2_allow_hybrid_mode | disable_(pynccl|shared_experts_stream) | dist_ident
    | distributed_use_split_group | do_not_track | enable_(cuda_compatibility|gemm_rs|hpc_ops)
    | enable_(fla_packed_recurrent_decode|inductor_coordinate_descent_tuning|pregrad_passes)
    | enable_(startup_plan|v1_multiprocessing) | fastsafetensors_queue_size
    | fla_(ci_env|compiler_mode|use_tma) | flashinfer_workspace_buffer_size | gdn_decode_kernel
    | gpt_oss_harmony_system_instructions | gpu_sync_check | has_flashinfer_cubin
    | humming_moe_gemm_type | image_tag | (kimi_k3|step5)_shard_sp_shared_expert | kv_cache_layout
    | kv_events_use_int_block_hashes | lora_(disable_pdl|resolver_(cache_dir|hf_repo_list))
    | lora_enable_dual_stream | main_cuda_version | marlin_use_atomic_add
    | max_((num_)?bad_words(_total_tokens)?|completion_prompts|embed_decode_bytes|image_pixels)
    | max_(media_download_size_mb|n_sequences|stop_strings|tokens_per_expert_fp4_moe)
    | max_audio_(clip_filesize_mb|decode_(bytes|duration_s)|preprocess_workers)
    | media_(cache(_max_size_mb|_ttl_hours)?|loading_thread_count|url_allow_redirects) | mla_disable
    | mm_hasher_algorithm | model_redirect_path | mq_max_chunk_bytes_mb
    | msgpack_zero_copy_threshold | (multi|shared_experts)_stream_(gemm_)?token_threshold
    | object_storage_shm_buffer_name | pattern_match_debug | plugins | process_name_prefix
    | rocm_(aiter_moe_dispatch_policy|fp8_padding|mono_decode|sleep_mem_chunk_size|use_skinny_gemm)
    | rocm_use_aiter(_(linear(_hipbmm)?|mha|mla|moe|rmsnorm|unified_attention))?
    | replicate_embed | rocm_use_aiter_triton_(gemm|rope|sparse_mla) | rpc_base_path
    | skip_(model_name_validation|version_suffix) | sparse_indexer_max_logits_mb | system_start_date
    | target_device | torch_allow_tf32_cublas_override | triton_(force_first_config|use_td)
    | use_(bytecode_hook|deep_gemm_tma_aligned_scales|experimental_parser_context|fastokens)
    | use_(fused_moe_grouped_topk|layername|oink_ops|spinloop_ext|tma|triton_awq|v2_model_runner)
    | tuned_config_folder | v1_output_proc_chunk_size | weight_offloading_disable_uva
    | xgrammar_cache_mb | xpu_force_n_contig_weight | zentorch_weight_prepack
    )=.* | aiter_bf16_fp8_moe_bound=0 | aiter_situv2_a[48]w4=1 | float32_matmul_precision=highest
    | (moe_)?use_deep_gemm(_e8m0)?=1 | ssm_conv_state_layout=SD""",
    re.VERBOSE | re.DOTALL,
)
"""Harmless variables of vLLM and its linear attention: paths, processes, devices, limits, texts and
kernels; `plugins`, which counts with plug-ins of others alone; one of torch, which vLLM overrides;
and some with one value, a default, which vLLM may set. The list of vLLM's own cache of compiled
graphs is another one: it lacks ranks and ports, but has hubs and samplers of videos.

Source: `compile_factors` of vllm/envs.py.
"""
