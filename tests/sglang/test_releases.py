"""Releases of SGLang: settings that one adds, renames or lacks are never silently ignored."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from sglang.srt import runtime_context
from sglang.srt.arg_groups.arg_utils import namespace_of, record_fields
from sglang.srt.environ import envs
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.server_args import ServerArgs

from kvxfer.engine_side.harmless_words import KERNEL_ENDINGS
from kvxfer.errors import UnsupportedEngineError
from kvxfer.integrations.sglang import KVXferStorage, identity, interface
from tests.integrations.test_plugs import NAME, grown, install_plugin
from tests.sglang.pools import attention_pool
from tests.sglang.storages import extra_config, opened, storage_config

PLACES = namespace_of(ServerArgs)
DEFAULTS = {each.name: each.default for each in record_fields(ServerArgs)}
OF_DRAFT = [name for name, place in PLACES.items() if place == "spec"]
COUNTING = {
    "model_path", "load_format", "model_loader_extra_config", "trust_remote_code", "context_length",
    "is_embedding", "revision", "model_impl", "model_config_parser", "json_model_override_args",
    "dtype", "quantization", "quantization_param_path", "kv_cache_dtype", "modelopt_quant",
    "modelopt_checkpoint_restore_path", "quantize_and_serve", "rl_quant_profile",
    "custom_weight_loader", "decrypted_config_file", "decrypted_draft_config_file",
    "checkpoint_engine_wait_weights_before_ready", "qsa_indexer_dtype", "weight_version",
    "kt_weight_path", "kt_method", "kt_num_gpu_experts", "kt_max_deferred_experts_per_token",
    "dllm_algorithm", "dllm_algorithm_config", "dllm_fdfo", "forward_hooks", "rl_on_policy_target",
    "enable_tf32_matmul", "enable_quant_communications", "triton_attention_reduce_in_fp32",
    "enable_deepseek_v4_fp4_indexer", "prefill_kv_cache_dequant_dtype", "enable_amd_monokernel",
    "enable_nvidia_megakernel", "enable_encoder_swa_bounded_replay", "mamba_ssm_dtype",
    "enable_decoder_swa_bounded_replay", "enable_mamba_cache_stochastic_rounding", "enable_mis",
    "mamba_cache_philox_rounds", "enable_int8_mamba_checkpoint", "enable_linear_replayssm",
    "linear_replayssm_cache_len", "enable_linear_replayssm_spec", "enable_w4a4_mxfp4_megamoe",
    "enable_megamoe_for_layernorm_sp", "flashinfer_mxfp4_moe_precision", "hisparse_config",
    "deepep_dispatcher_output_dtype", "flashinfer_a2a_dispatch_type", "enable_hisparse",
    "disable_flashinfer_cutlass_moe_fp4_allgather", "enforce_shared_experts_fusion",
    "lora_strict_loading", "lora_use_virtual_experts", "experts_shared_outer_loras",
    "mm_process_config", "trust_mm_content_hashes", "enable_mm_global_cache", "msprobe_dump_config",
    "disable_fast_image_processor", "enable_prefix_mm_cache",
    "enable_precise_embedding_interpolation", "debug_tensor_dump_layers",
    "debug_tensor_dump_input_file", "enable_deterministic_inference",
}  # fmt: skip
"""Settings that change the bytes of pages at equal tokens, or that nobody knows to change none."""
KERNELS = [
    *("attention_backend", "dsa_prefill_backend", "dsv4_prefill_backend", "moe_runner_backend"),
    "ep_dispatch_algorithm",
]
PROPOSING = {
    "speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens",
    "speculative_accept_threshold_single", "speculative_accept_threshold_acc",
    "speculative_use_rejection_sampling", "speculative_use_block_verification",
    "speculative_attention_mode", "speculative_boundary_reduction", "speculative_skip_dp_mlp_sync",
    "speculative_adaptive", "speculative_adaptive_config", "spec_trace_dir",
    "speculative_dspark_align_verify_tokens_to_graph_tier",
    "_speculative_draft_quantization_explicitly_set",
}  # fmt: skip
NOT_IN_EVERY_RELEASE = {
    "qsa_indexer_dtype", "prefill_kv_cache_dequant_dtype", "speculative_draft_sink_size",
    "speculative_enable_w4a4_mxfp4_megamoe", "speculative_skip_dp_mlp_sync",
    "speculative_use_block_verification", "speculative_boundary_reduction",
}  # fmt: skip
"""Settings that some of the releases from 0.5.20 to 0.5.23 lack."""


def hash_of_settings() -> str:
    config = storage_config(extra_config("host://?capacity=64MiB"))
    return identity.page_namespace(config, "1", ["kv"], []).config_hash


@contextmanager
def published(**settings: Any) -> Iterator[None]:
    """Publish the settings of an engine, as SGLang does, with these among them."""
    with runtime_context.get_context().override_server_args(**settings):
        yield


def other_than(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, int | float) else "another"


@pytest.fixture(scope="module")
def plain() -> str:
    with published():
        return hash_of_settings()


def test_every_setting_counts_but_those_that_change_no_byte(plain: str) -> None:
    counting = set()
    for name in PLACES.keys() - {*OF_DRAFT, *KERNELS}:
        is_kernel = name.endswith(KERNEL_ENDINGS)
        with published(**{name: "fa3" if is_kernel else other_than(DEFAULTS[name])}):
            counting |= {name} if hash_of_settings() != plain else set()
    assert counting == COUNTING & PLACES.keys()


@pytest.mark.parametrize("name", OF_DRAFT)
def test_every_setting_of_a_draft_counts_where_there_is_one_but_those_of_proposals(
    name: str, plain: str
) -> None:
    drafting = {"speculative_algorithm": "EAGLE"}
    is_drafting = name == "speculative_algorithm"
    changed = {name: "NGRAM" if is_drafting else other_than(DEFAULTS[name])}
    with published(**drafting):
        before = hash_of_settings()
    with published(**(drafting | changed)):
        assert (hash_of_settings() == before) == (name in PROPOSING)
    if not is_drafting:
        with published(**changed):
            assert hash_of_settings() == plain


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_counts_unless_it_is_known_to_round_nothing(name: str, plain: str) -> None:
    """Dispatch to redundant experts is one, too; `fake` chooses experts at random."""
    for kernel, counts in {"fa3": 0, "static": 0, "flashmla_sparse_q8": 1, "fake": 1}.items():
        with published(**{name: kernel}):
            assert (hash_of_settings() != plain) == counts, kernel


OF_BYTES = re.compile(
    r"BF16|F16|FP\d|INT\d|Q8|[AW]\d[AW]|QUANT|DTYPE|LAYOUT|PRECISION|COMPRESS|EXPERTS|WEIGHT|MODEL|FIX"
    r"|PERTURB|REVERT|SIMULATE|THRESHOLD|TOPK|IMAGE|RESAMPLE|ROPE|SOFTMAX|DETERMINISTIC|INVARIANT"
)
"""Parts of names of variables that may change bytes."""
OF_NO_BYTES = """
    BLACKWELL_OVERLAP_SHARED_EXPERTS_OUTSIDE_SBO CHUNKED_PREFIX_CACHE_THRESHOLD
    DETERMINISTIC_NCCL_NCHANNELS DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX
    DSPARK_DEBUG_CONFIDENCE_PREFIX_SCHEDULER DSV41_ENGRAM_HOST_TABLE_LAYOUT
    ENABLE_DSA_Q8KV8_QPREP_OVERLAP ENABLE_REQUEST_DECOMPRESSION OPT_FP8_WO_A_GEMM
    OPT_USE_MINIMAX_DECODE_TOPK_RADIX OPT_USE_TOPK_V2 SCHEDULER_RECV_SKIPPER_WEIGHT_DECODE
    SCHEDULER_RECV_SKIPPER_WEIGHT_DEFAULT SCHEDULER_RECV_SKIPPER_WEIGHT_NONE
    SCHEDULER_RECV_SKIPPER_WEIGHT_TARGET_VERIFY SORT_WEIGHT_FILES TRACE_ASYNC_FLUSH_THRESHOLD
    TRITON_SLOW_COMPILE_THRESHOLD_SECS USE_ROCM_AITER_ROPE_BACKEND USE_TRITON_W8A8_FP8_KERNEL
    WEIGHT_CACHE_READY_TEMPLATE WEIGHT_CACHE_SOCKET_TEMPLATE
"""
"""Variables of 0.5.20 to 0.5.23 with such a part that change no byte, but for rounding."""


def test_a_variable_that_may_change_bytes_counts(
    plain: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A variable with such a name that a release adds is to be looked at."""
    harmless, names = set(), {each for each in dir(envs) if OF_BYTES.search(each)}
    for name in names:
        default = getattr(envs, name).default
        is_on = default() if callable(default) else default
        with monkeypatch.context() as patch, published():
            patch.setenv(name, "0" if is_on is True else "7" if is_on == 1 else "1")
            harmless |= {name} if hash_of_settings() == plain else set()
    known = {name for name in names if name.removeprefix("SGLANG_") in OF_NO_BYTES.split()}
    assert harmless == known


@pytest.mark.parametrize(
    ("name", "value", "counts"),
    [
        ("SGLANG_OF_A_LATER_RELEASE", "1", True),
        ("SGL_OF_A_LATER_RELEASE", "1", False),  # which SGLang renames as it is imported
        ("SGLANG_MINIMAX_M3_INDEX_TOPK_FREQ", "4", True),
        ("SGLANG_MINIMAX_M3_INDEX_TOPK_FREQ", "1", False),
        ("SGLANG_MAMBA_SSM_DTYPE", "float16", True),
        ("SGLANG_DSV4_FP4_EXPERTS", "true", False),
        ("SGLANG_DSV4_FP4_EXPERTS", "no", True),
        ("SGLANG_EXTERNAL_MODEL_PACKAGE", "mine", True),
        ("SGLANG_KV_CANARY_PERTURB_REAL_KV_USED_PROB", "0.5", True),
        ("SGLANG_ENABLE_MTP_BOUNDARY_KV_FIX", "0", True),
        ("SGLANG_QK_RMSNORM_TORCH", "1", True),  # which is read outside of `environ`
        ("ROCM_QUICK_REDUCE_QUANTIZATION", "INT4", True),
        ("NVIDIA_TF32_OVERRIDE", "1", True),
        ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "1", True),
        ("VIDEO_MAX_PIXELS", "1000000", True),
        ("DEEP_NORMAL_MODE_USE_INT8_QUANT", "1", True),
        ("SGLANG_RUN_ID", "run-4711", False),  # which SGLang sets
        ("SGLANG_ENABLE_TORCH_COMPILE", "0", False),
        ("SGLANG_HOST_IP", "10.0.0.7", False),
        ("SGLANG_ZBAL_BOOTSTRAP_URL", "tcp://10.0.0.7:4711", False),
        ("SGLANG_LLAMA_FP8_SERVICE_HOST", "10.0.0.7", False),  # which Kubernetes sets
        ("SGLANG_CACHE_DIR", "/mnt/node-7", False),
        ("SGLANG_USE_AITER", "1", False),
        ("AITER_ASM_DIR", "/opt/aiter/asm/", False),  # which AITER sets as it is imported
        ("VLLM_OF_A_LATER_RELEASE", "1", False),
    ],
)
def test_a_variable_counts_unless_it_has_its_default_or_changes_no_byte(
    plain: str, name: str, value: str, monkeypatch: pytest.MonkeyPatch, *, counts: bool
) -> None:
    """The engines of a fleet differ in addresses, folders and process ids."""
    monkeypatch.setenv(name, value)
    with published():
        assert (hash_of_settings() != plain) == counts


@pytest.mark.parametrize("group", ["sglang.srt.plugins", "sglang.srt.platforms"])
def test_plug_ins_that_sglang_loads_count(
    plain: str, group: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_plugin(tmp_path, group)
    monkeypatch.syspath_prepend(tmp_path)
    with published():
        found = {plain, hash_of_settings()}
        monkeypatch.setenv("SGLANG_PLUGINS", "another, one")
        found.add(hash_of_settings())
    assert len(found) == 3


@dataclass
class LaterConfig(HiCacheStorageConfig):  # type: ignore[misc]
    """Configuration of a later release, with a new kind of rank."""

    sparse_rank: int = 0
    sparse_groups: list[int] = field(default_factory=list)


def test_what_a_later_release_knows_of_an_engine_counts(plain: str) -> None:
    known = vars(storage_config(extra_config("host://?capacity=64MiB")))
    hashes = set[str]()
    with published():
        for rank in (0, 1):
            config = LaterConfig(**known, sparse_rank=rank)
            hashes.add(identity.page_namespace(config, "1", ["kv"], []).config_hash)
    assert plain in hashes
    assert len(hashes) == 2


def test_a_setting_that_a_release_lacks_is_one_that_nobody_has_asked_for(plain: str) -> None:
    """So that engines of releases before and after it share."""
    lacking = {name: place for name, place in PLACES.items() if name not in NOT_IN_EVERY_RELEASE}
    with published(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(interface, "namespace_of", lambda _: lacking)
        assert hash_of_settings() == plain


@contextmanager
def release_with(places: Mapping[str, str], **settings: Any) -> Iterator[None]:
    """Pretend to be a release with these settings in these groups, all [] by default."""
    declared = msgspec.defstruct("LaterArgs", [(name, Any, []) for name in places])
    declared._NS_BY_FIELD = dict(places)  # type: ignore[attr-defined]
    bags = {group: SimpleNamespace() for group in places.values()}
    for name, place in places.items():
        setattr(bags[place], name, settings.get(name, []))
    context = SimpleNamespace(server_args=declared(), config_bag=bags.__getitem__)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime_context, "get_context", lambda: context)
        yield


@pytest.mark.parametrize("dtype", ["dtype", "type"])
@pytest.mark.parametrize(
    ("name", "place"),
    [("int3_profile", "observability"), ("profile", "model"), ("hicache_kv_dtype", "memory")],
)
def test_an_unknown_setting_of_a_later_release_counts(name: str, place: str, dtype: str) -> None:
    """So does one with a harmless word in its name, if another word says that it rounds."""
    known = {dtype: "model", "speculative_algorithm": "spec"}
    values: tuple[object, ...] = ([], "coarse", "fine")
    hashes = set()
    for value in values:
        with release_with(known | {name: place}, **{name: value}):
            hashes.add(hash_of_settings())
    assert len(hashes) == 3
    with release_with(known):
        assert hash_of_settings() in hashes, "nobody has asked for it"


def test_a_release_with_other_groups_of_settings_is_refused_and_stores_nothing() -> None:
    sentence = r"^sglang \S+ is not supported \(its settings have no group model\); supported: 0\.5"
    with (
        release_with({"dtype": "weights", "speculative_algorithm": "spec"}),
        pytest.raises(UnsupportedEngineError, match=sentence),
        opened(attention_pool("page_first"), extra_config("host://?capacity=64MiB")),
    ):
        pass


def test_a_release_that_wants_more_of_a_storage_is_refused() -> None:
    sentence = rf"^sglang \S+ is not supported \(its HiCacheStorage requires {NAME}\); supported: 0"
    config = storage_config(extra_config("host://?capacity=64MiB"))
    with grown(KVXferStorage), pytest.raises(UnsupportedEngineError, match=sentence):
        KVXferStorage(config, {})
