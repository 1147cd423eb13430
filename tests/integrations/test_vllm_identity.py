"""Namespaces of vLLM engines: files are shared only where equal tokens have equal values."""

import enum
import json
import os
from collections.abc import Callable
from dataclasses import field, fields, make_dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm.v1.kv_offload.base", reason="needs vLLM")

import vllm.platforms
from packaging.version import Version
from vllm.compilation.passes.inductor_pass import InductorPass
from vllm.config import (
    AttentionConfig,
    CompilationConfig,
    KernelConfig,
    LoadConfig,
    MambaConfig,
    ModelConfig,
    MultiModalConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.envs import environment_variables

from kvxfer.backends.file import BlockTree
from kvxfer.engine_side.harmless_words import default_of
from kvxfer.errors import InvalidArgumentError
from kvxfer.integrations.vllm import KVXferOffloadingSpec, KVXferTier
from kvxfer.integrations.vllm.common.harmless_settings import SETTINGS
from kvxfer.integrations.vllm.common.model_identity import (
    chosen_order,
    handover_namespace,
    identify_model,
)
from kvxfer.integrations.vllm.common.release import installed_version
from kvxfer.integrations.vllm.offloading import interface
from kvxfer.integrations.vllm.offloading.rows import row_namespace
from kvxfer.storage.keys import Namespace
from kvxfer.testing import BlockMemory
from tests.integrations.test_plugs import install_plugin
from tests.integrations.test_vllm import SECOND_GROUP_ID, as_vllm_caches, make_config

Change = Callable[[Any], None]
HOST = "host://?capacity=1MiB"

has_tier = pytest.mark.skipif(
    "transfer_bytes" not in {each.name for each in fields(interface.JobResult)},
    reason="this vLLM has no interface for KVXferTier",
)


class HFConfig:
    def __init__(self) -> None:
        self.fields: dict[str, Any] = {
            "_name_or_path": "/somewhere",
            "transformers_version": "5.0",
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        }

    def to_dict(self) -> dict[str, Any]:
        return dict(self.fields)

    to_diff_dict = to_dict


def make_model(path: str) -> SimpleNamespace:
    return SimpleNamespace(
        model=path,
        model_weights="",
        revision=None,
        dtype="float32",
        quantization=None,
        quantization_config=None,
        model_impl="auto",
        model_class_overrides=None,
        disable_sliding_window=False,
        max_model_len=4096,
        get_total_num_kv_heads=lambda: 2,
        hf_config=HFConfig(),
    )


@pytest.fixture
def vllm_config(tmp_path: Path) -> Any:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    return SimpleNamespace(
        lora_config=None,
        speculative_config=None,
        model_config=make_model(str(tmp_path)),
        cache_config=SimpleNamespace(
            cache_dtype="auto",
            kv_cache_dtype_skip_layers=[],
            mamba_cache_dtype="auto",
            mamba_ssm_cache_dtype="auto",
            mamba_cache_mode="none",
        ),
        attention_config=AttentionConfig(),
        parallel_config=SimpleNamespace(),
        load_config=LoadConfig(),
    )


def changes_to(path: str, value: Any) -> Change:
    *parents, name = path.split(".")

    def change(config: Any) -> None:
        for parent in parents:
            config = getattr(config, parent)
        setattr(config, name, value)

    return change


def count_images(config: Any) -> None:
    """Make vLLM name images by a counter that starts over in each engine."""
    config.cache_config.enable_prefix_caching = False
    config.model_config.multimodal_config = MultiModalConfig(mm_processor_cache_gb=0)


def draft(path: str) -> Change:
    def change(config: Any) -> None:
        model = make_model(path)
        model.revision = "draft"
        config.speculative_config = with_defaults(SpeculativeConfig, draft_model_config=model)

    return change


def test_a_configuration_that_is_no_file_counts_as_vllm_reads_it(vllm_config: Any) -> None:
    before = identify_model(vllm_config)
    vllm_config.model_config.hf_config.fields["rope_parameters"] = {"rope_theta": 500000.0}
    assert identify_model(vllm_config) != before


IMAGES = MultiModalConfig(mm_processor_kwargs={"do_normalize": False})
STATES = MambaConfig()
STATES.enable_stochastic_rounding = True  # which a constructor refuses without a GPU


def test_weights_their_code_and_quantization_or_a_commit_are_the_revision(vllm_config: Any) -> None:
    model, revisions = vllm_config.model_config, {identify_model(vllm_config).revision}
    for name in ("modeling_own.py", "hf_quant_config.json", "quantize_config.json"):
        Path(model.model, name).write_text("")
        revisions.add(identify_model(vllm_config).revision)
    weights = Path(model.model, "model.safetensors")
    for content in (b"weights", b"other weights"):  # touched, and written anew
        weights.write_bytes(content)
        os.utime(weights, ns=(1, 1))
        revisions.add(identify_model(vllm_config).revision)
    assert len(revisions) == 6
    model.model, model.revision, model.hf_config._commit_hash = "example/model", "main", "c0ffee"
    assert identify_model(vllm_config).revision == "c0ffee"


def test_weights_of_a_part_in_a_folder_of_its_own_are_in_the_revision(vllm_config: Any) -> None:
    """As Kimi-Audio has them; a folder without a configuration is of another format."""
    revisions = []
    for name in ("original/model.pth", "whisper/model.safetensors", "whisper/config.json"):
        file = Path(vllm_config.model_config.model, name)
        file.parent.mkdir(exist_ok=True)
        file.write_text("{}")
        revisions.append(identify_model(vllm_config).revision)
    assert len(set(revisions)) == 2
    assert revisions[0] == revisions[1]


def test_the_weights_of_a_model_that_a_configuration_names_are_in_the_revision(
    vllm_config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Ultravox names a language model, whose weights vLLM loads at no revision."""
    plain, found = identify_model(vllm_config).revision, set()
    fields = vllm_config.model_config.hf_config.fields
    fields |= {"audio_model_id": None, "text_model_id": "example/language"}
    cached = "huggingface_hub.try_to_load_from_cache"
    for commit in ("c0ffee", "decade"):
        path = str(tmp_path / "snapshots" / commit / "config.json")
        monkeypatch.setattr(cached, lambda *_, path=path, **__: path)
        found |= {identify_model(vllm_config).revision, handover_namespace(vllm_config).revision}
    assert len(found) == 2
    assert all(each.startswith(f"{plain} with ") for each in found)
    monkeypatch.setattr(cached, lambda *_, **__: None)
    assert handover_namespace(vllm_config, "r").revision == "r"
    with pytest.raises(InvalidArgumentError, match="text_model_id is 'example/language'"):
        identify_model(vllm_config)


def test_a_revision_says_that_its_configuration_was_overridden(vllm_config: Any) -> None:
    plain, model = identify_model(vllm_config).revision, vllm_config.model_config
    revisions = {plain}
    for overrides in ({"rope_theta": 50.0}, {"rope_theta": 60.0}, changes_to):
        model.hf_overrides = overrides
        found = identify_model(vllm_config).revision
        assert found.startswith(f"{plain} overridden ")
        assert identify_model(vllm_config).revision == found
        revisions.add(found)
    assert len(revisions) == 4
    model.hf_overrides = {}
    assert identify_model(vllm_config).revision == plain


class Kernel(enum.Enum):
    """Make a choice of kernels, whose value is where a release has their module."""

    FLEX = "release.one"


class OtherKernel(enum.Enum):
    FLASH = "release.two"


Attention = make_dataclass(
    "Attention",
    [("kernel", Kernel | None, None), ("skips", list[int], field(default_factory=list))],
)
LaterAttention = make_dataclass("Attention", [("splits", int, 32)], bases=(Attention,))


def replay_states(config: Any) -> None:
    config.cache_config.use_replayssm, config.cache_config.replayssm_buffer_len = True, 16


def write_config(vllm_config: Any, **more: Any) -> Path:
    file = Path(vllm_config.model_config.model, "config.json")
    made = {"architectures": ["LlamaForCausalLM"], "rope_theta": 10000.0, "torch_dtype": "float32"}
    file.write_text(json.dumps(made | {"transformers_version": "5.0"} | more))
    return file


IN_BOTH = [
    changes_to("model_config.multimodal_config", IMAGES),
    changes_to("model_config.multimodal_config", MultiModalConfig(media_io_kwargs={"a": {}})),
    changes_to("mamba_config", STATES),
    changes_to("additional_config", {"kernel": "lossy"}),
    changes_to("attention_config", AttentionConfig(use_prefill_query_quantization=True)),
    changes_to("model_config.quantization_config", {"linear": "fp8"}),
    changes_to("model_config.model_class_overrides", {"A": "b:C"}),
    changes_to("load_config.load_format", "dummy"),
    changes_to("model_config.code_revision", "other"),
    changes_to("parallel_config.worker_extension_cls", "own.Extension"),
    changes_to("parallel_config.worker_cls", "own.Worker"),
    changes_to("compilation_config", CompilationConfig(backend="own.compile")),
    changes_to("compilation_config", CompilationConfig(inductor_passes={"a": "json.dumps"})),
    replay_states,
    changes_to("cache_config.swa_bounded_replay", False),
]
IN_FILES = [
    draft("a"),
    *(changes_to(f"model_config.{each}", "a") for each in ("revision", "dtype", "quantization")),
    changes_to("model_config.disable_sliding_window", True),
    changes_to("cache_config.cache_dtype", "fp8_e5m2"),
    changes_to("cache_config.mamba_ssm_cache_dtype", "float32"),
    lambda config: write_config(config, rope_theta=500000.0),
    lambda config: Path(config.model_config.model, "more.json").write_bytes(b"\xff"),
    changes_to("attention_config.kernel", Kernel.FLEX),
    changes_to("attention_config.skips", [1]),
    changes_to("model_config.hf_overrides", {"rope_theta": 5.0}),
    changes_to("load_config", LoadConfig(ignore_patterns=["model-2*"])),
    changes_to("load_config", LoadConfig(model_loader_extra_config={"tensorizer_uri": "s3://a"})),
]
READS_IN_THREADS = LoadConfig(model_loader_extra_config={"num_threads": 8}, use_tqdm_on_load=False)


@pytest.mark.parametrize("change", [*IN_FILES, *IN_BOTH])
def test_a_checkpoint_or_settings_that_differ_have_another_identity(
    vllm_config: Any, change: Change
) -> None:
    write_config(vllm_config)
    vllm_config.attention_config = Attention()
    before = identify_model(vllm_config), handover_namespace(vllm_config, "r")
    (Path(vllm_config.model_config.model) / "tokenizer_config.json").write_text("{}")
    assert identify_model(vllm_config) == before[0]
    change(vllm_config)
    found = identify_model(vllm_config)
    assert found != before[0]
    assert change not in IN_BOTH or handover_namespace(vllm_config, "r") != before[1]
    assert found.revision.partition(" overridden")[0] == handover_namespace(vllm_config).revision


COUNTED = {
    "engine": "additional_config cache_config lora_config model_config speculative_config",
    "model": """
        code_revision config_format disable_sliding_window dtype hf_config hf_config_path
        hf_overrides model model_class_overrides model_impl model_weights quantization
        quantization_config revision
    """,
    "cache": """
        cache_dtype kv_cache_dtype_skip_layers mamba_cache_dtype mamba_cache_mode
        mamba_ssm_cache_dtype use_replayssm
    """,
    "images": """
        media_io_kwargs mm_device_do_normalize mm_encoder_attn_dtype mm_encoder_fp8_scale_path
        mm_processor_kwargs video_pruning_method video_pruning_rate
    """,
    "recurrent states": "enable_stochastic_rounding stochastic_rounding_philox_rounds",
    "attention": """
        disable_flashinfer_q_quantization hisparse_config indexer_kv_dtype indexer_sparse_logits
        use_non_causal use_prefill_query_quantization
    """,
    "kernels": "linear_backend linear_backend_per_quant moe_backend sparse_indexer_topk_backend",
    "parallelism": "worker_extension_cls",
    "compiler": "inductor_compile_config",
    "compiler passes": "",
    "draft": "draft_model_config kv_cache_dtype moe_backend use_heterogeneous_vocab",
}
"""Settings of vLLM 0.32 that change bytes if they are `another`, or that nobody knows to change
none, by the name of their configuration in an identity."""


def with_defaults(kind: type, **given: Any) -> Any:
    """Make a configuration of vLLM without its checks, which look for a model and a GPU."""
    made: Any = object.__new__(kind)
    for name, value in ({each.name: default_of(each) for each in fields(kind)} | given).items():
        object.__setattr__(made, name, value)
    return made


@pytest.fixture
def real_config(vllm_config: Any) -> Any:
    """Make an engine's configuration of vLLM's own classes, with a draft model."""
    write_config(vllm_config)
    model = vars(vllm_config.model_config)
    speculative = with_defaults(
        SpeculativeConfig, draft_model_config=with_defaults(ModelConfig, **model)
    )
    loaded = with_defaults(ModelConfig, **model, multimodal_config=MultiModalConfig())
    return with_defaults(VllmConfig, model_config=loaded, speculative_config=speculative)


def owner_of(name: str, config: Any) -> tuple[Any, str, Any]:
    """Find the configuration that has this name in an identity: its owner, name and value."""
    owner, last, value = SimpleNamespace(config=config), "config", config
    for each in SETTINGS[name][0].split(".") if SETTINGS[name][0] else ():
        owner, last, value = value, each, getattr(value, each)
    return owner, last, value


@pytest.mark.skipif(Version(installed_version()) < Version("0.32"), reason="an older release")
@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_of_vllm_counts_but_those_that_change_no_byte(
    real_config: Any, name: str
) -> None:
    def identities() -> list[Namespace]:  # that of files also has the backend of attention
        files = [] if name == "attention" else [identify_model(real_config)]
        return [*files, handover_namespace(real_config)]

    counting, before = set(), identities()
    *_, config = owner_of(name, real_config)
    for each in fields(config):
        value = getattr(config, each.name)
        object.__setattr__(config, each.name, "another")
        try:
            is_same = identities() == before
        except (AttributeError, InvalidArgumentError):  # it is read, and has to be of its own kind
            is_same = False
        object.__setattr__(config, each.name, value)
        counting |= set() if is_same else {each.name}
    assert counting == {*COUNTED[name].split()} & {each.name for each in fields(config)}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_that_a_later_release_of_vllm_adds_counts_unless_it_has_its_default(
    real_config: Any, name: str
) -> None:
    before = identify_model(real_config), handover_namespace(real_config, "r")
    owner, last, config = owner_of(name, real_config)
    later = make_dataclass("Later", [("added", int, 0)], bases=(type(config),))
    for value in (0, 1):
        made = with_defaults(later, **vars(config), added=value)
        object.__setattr__(owner, last, made)
        whole = made if name == "engine" else real_config
        found = identify_model(whole), handover_namespace(whole, "r")
        assert [now == then for now, then in zip(found, before, strict=True)] == [not value] * 2


def test_the_type_of_a_draft_cache_is_in_the_identity(vllm_config: Any) -> None:
    draft(vllm_config.model_config.model)(vllm_config)
    before = identify_model(vllm_config), handover_namespace(vllm_config, "r")
    vllm_config.speculative_config.kv_cache_dtype = None
    assert (identify_model(vllm_config), handover_namespace(vllm_config, "r")) == before
    vllm_config.speculative_config.kv_cache_dtype = "fp8_e5m2"
    assert identify_model(vllm_config) != before[0]
    assert handover_namespace(vllm_config, "r") != before[1]


COUNTED_VARIABLES = """
    B12X_MOE_FP4_FORCE_A16 BATCH_INVARIANT BEAM_ALWAYS_CONSTRAIN_OUTPUT
    BLOCKSCALE_FP8_GEMM_FLASHINFER CPU_CI_ENV CPU_INT4_W4A8 DEEPEPLL_NVFP4_DISPATCH
    DEEPEP_V2_ALLOW_MULTIPLE_REDUCTION DISABLED_KERNELS
    DISABLE_DSV4_MEGAMOE_SHARED_EXPERT_FUSION FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE
    FLOAT32_MATMUL_PRECISION HUMMING_INPUT_QUANT_CONFIG HUMMING_ONLINE_QUANT_CONFIG
    HUMMING_USE_F16_ACCUM KIMI_K3_AUX_ATTN_RES_STREAM MARLIN_INPUT_DTYPE MEDIA_CONNECTOR
    MOE_ROUTING_SIMULATION_STRATEGY MOE_USE_DEEP_GEMM MXFP4_EMULATION_DEQUANT_AT_LOAD
    MXFP8_EMULATION_DEQUANT_AT_LOAD ROCM_AITER_MEGA_MOE_FUSE_SHARED_EXPERTS
    ROCM_FP8_MFMA_PAGE_ATTN ROCM_MUSE_MOE_ONLINE_QUANT ROCM_MUSE_MOE_REDUCE_DTYPE
    ROCM_QUICK_REDUCE_CAST_BF16_TO_FP16 ROCM_QUICK_REDUCE_MAX_SIZE_BYTES_MB
    ROCM_QUICK_REDUCE_MIN_SIZE_BYTES_MB ROCM_QUICK_REDUCE_QUANTIZATION
    ROCM_QUICK_REDUCE_QUANTIZATION_MIN_SIZE_KB ROCM_SHUFFLE_KV_CACHE_LAYOUT
    ROCM_USE_AITER_FP4BMM ROCM_USE_AITER_FP4_ASM_GEMM ROCM_USE_AITER_FP8BMM
    ROCM_USE_AITER_FUSION_SHARED_EXPERTS ROCM_USE_AITER_MOE_A4W4_DSV4 ROCM_USE_AITER_MOE_SITUV2
    SSM_CONV_STATE_LAYOUT TEST_FORCE_LOAD_FORMAT TPU_USING_PATHWAYS USE_DEEP_GEMM
    USE_DEEP_GEMM_E8M0 USE_FLASHINFER_MOE_INT4 USE_HW_AGNOSTIC USE_MODELSCOPE
    VIDEO_LOADER_BACKEND XPU_INC_WNA16_BACKEND
"""
"""Variables of vLLM 0.32 and 0.33 that change bytes, or that nobody knows to change none."""


@pytest.mark.skipif(Version(installed_version()) < Version("0.32"), reason="an older release")
def test_every_variable_of_vllm_counts_but_those_that_change_no_byte(
    vllm_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    counting, names = set(), {each for each in environment_variables if each.startswith("VLLM_")}
    for name in names:
        monkeypatch.delenv(name, raising=False)
    plain = identify_model(vllm_config), handover_namespace(vllm_config, "r")
    for name in names:
        with monkeypatch.context() as patch:
            patch.setenv(name, "another")
            namespaces = identify_model(vllm_config), handover_namespace(vllm_config, "r")
        assert (namespaces[0] == plain[0]) == (namespaces[1] == plain[1])
        counting |= {name} if namespaces != plain else set()
    assert counting == {f"VLLM_{name}" for name in COUNTED_VARIABLES.split()} & names


@pytest.mark.parametrize(
    ("name", "value", "counts"),
    [
        ("VLLM_OF_A_LATER_RELEASE", "1", True),
        ("VLLM_MAX_NUM_FRAMES", "8", True),
        ("FLA_TRIL_PRECISION", "tf32", True),
        ("FLA_USE_TMA", "1", False),
        ("TRITON_F32_DEFAULT", "ieee", True),
        ("NVIDIA_TF32_OVERRIDE", "1", True),
        ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "1", False),  # which vLLM overrides
        ("DNNL_DEFAULT_FPMATH_MODE", "BF16", True),
        ("TRITON_CACHE_DIR", "/node/7", False),
        ("XHS_VIDEO_JPEG_QUALITY", "50", True),
        ("MINIMAX_KVFP4", "1", True),
        ("AITER_BF16_FP8_MOE_BOUND", "256", True),
        ("AITER_BF16_FP8_MOE_BOUND", "0", False),  # which vLLM sets
        ("AITER_SITUV2_A4W4", "1", False),  # which vLLM sets by a variable that counts
        ("AITER_JIT_DIR", "/node/7", False),
        ("AITER_ASM_DIR", "/opt/aiter/asm/", False),  # which AITER sets as it is imported
        ("VLLM_SSM_CONV_STATE_LAYOUT", "DS", True),
        ("VLLM_SSM_CONV_STATE_LAYOUT", "SD", False),
        ("VLLM_USE_DEEP_GEMM_E8M0", "0", True),
        ("VLLM_USE_DEEP_GEMM_E8M0", "1", False),
        ("VLLM_DIST_IDENT", "pid-4711", False),  # which vLLM sets
        ("VLLM_LLAMA_SERVICE_HOST", "10.0.0.7", False),  # and these, Kubernetes
        ("VLLM_LLAMA_PORT_8000_TCP_PROTO", "tcp", False),
        ("VLLM_LLAMA_FP8_SERVICE_HOST", "10.0.0.7", False),
        ("VLLM_LLAMA_W4A16_SERVICE_PORT_HTTP", "8000", False),
        ("VLLM_LLAMA_INT4_PORT_8000_TCP_ADDR", "10.0.0.7", False),
    ],
)
def test_a_variable_counts_unless_it_is_known_to_change_no_byte(
    vllm_config: Any, name: str, value: str, monkeypatch: pytest.MonkeyPatch, *, counts: bool
) -> None:
    """The engines of a fleet differ in addresses and process ids."""
    monkeypatch.delenv(name, raising=False)
    before = identify_model(vllm_config), handover_namespace(vllm_config, "r")
    monkeypatch.setenv(name, value)
    assert (identify_model(vllm_config) != before[0]) == counts
    assert (handover_namespace(vllm_config, "r") != before[1]) == counts


@pytest.mark.parametrize("group", ["vllm.general_plugins", "vllm.platform_plugins"])
def test_plug_ins_that_vllm_loads_are_in_the_identity(
    vllm_config: Any, group: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hashes() -> tuple[str, str]:
        namespaces = identify_model(vllm_config), handover_namespace(vllm_config, "r")
        return namespaces[0].config_hash, namespaces[1].config_hash

    found = [hashes()]
    for version in ("1", "2"):
        folder = tmp_path / version
        folder.mkdir()
        install_plugin(folder, group, version=version)
        monkeypatch.syspath_prepend(folder)
        found.append(hashes())
        assert "theirs" in chosen_order(vllm_config)
    assert [len(set(each)) for each in zip(*found, strict=True)] == [3, 3]
    for choice in ("", "faster", "kvxfer, faster", "kvxfer,faster"):  # the spaced one is not loaded
        monkeypatch.setenv("VLLM_PLUGINS", choice)
        found.append(hashes())
    assert [len(set(each)) for each in zip(*found, strict=True)] == [7, 7]


@pytest.mark.parametrize(
    ("source", "counts"),
    [
        ({"url": "file:///src/theirs", "dir_info": {"editable": True}}, True),
        ({"url": "file:///src/theirs", "dir_info": {}}, True),
        ({"url": "https://example.org/theirs.git", "vcs_info": {"vcs": "git"}}, False),
        (None, False),
    ],
)
@pytest.mark.parametrize("file", ["theirs.py", "theirs/ops.py", "theirs/kernels/fast.cu"])
def test_a_plug_in_installed_from_a_folder_counts_by_its_files(
    vllm_config: Any,
    source: dict[str, Any] | None,
    file: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    counts: bool,
) -> None:
    """Its code may change at one version; its folder and what Python caches there do not count."""
    found = []
    for folder, code in (("a", "one"), ("b", "one"), ("c", "two")):
        place = tmp_path / folder
        (place / file).parent.mkdir(parents=True)
        (place / file).write_text(code)
        with monkeypatch.context() as patch:
            install_plugin(place, "vllm.general_plugins", source=source)
            patch.syspath_prepend(place)
            found.append(identify_model(vllm_config))
            cached = (place / file).parent / "__pycache__" / "ops.pyc"
            cached.parent.mkdir()
            cached.write_text(folder)
            assert identify_model(vllm_config) == found[-1]
    assert found[0] == found[1]
    assert (found[0] != found[2]) == counts


def test_plug_ins_of_vllm_and_of_kvxfer_do_not_count(
    vllm_config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = identify_model(vllm_config)
    for package in ("vllm", "kvxfer"):
        install_plugin(tmp_path, "vllm.general_plugins", package=package)
    monkeypatch.syspath_prepend(tmp_path)
    assert identify_model(vllm_config) == before
    monkeypatch.setenv("VLLM_PLUGINS", "kvxfer")
    assert identify_model(vllm_config) == before


@pytest.mark.parametrize(
    "default",
    [
        "VLLM_FLOAT32_MATMUL_PRECISION=highest",
        *(
            f"VLLM_{name}=1"
            for name in ("USE_DEEP_GEMM", "MOE_USE_DEEP_GEMM", "USE_DEEP_GEMM_E8M0")
        ),
    ],
)
def test_a_variable_with_its_default_does_not_count(
    vllm_config: Any, default: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, _, value = default.partition("=")
    monkeypatch.delenv(name, raising=False)
    before = identify_model(vllm_config), environment_variables[name]()
    monkeypatch.setenv(name, value)
    assert (identify_model(vllm_config), environment_variables[name]()) == before


@pytest.mark.parametrize(
    ("change", "counts"),
    [
        (changes_to("speculative_config.draft_load_config", LoadConfig(load_format="dummy")), True),
        (
            changes_to("speculative_config.draft_load_config", LoadConfig(ignore_patterns=["2*"])),
            True,
        ),
        (changes_to("speculative_config.draft_load_config", READS_IN_THREADS), False),
        (changes_to("speculative_config.draft_model_config.quantization", "fp8"), True),
        (changes_to("speculative_config.draft_model_config.code_revision", "other"), True),
        (changes_to("speculative_config.draft_model_config.max_model_len", 1024), True),
        (changes_to("speculative_config.num_speculative_tokens", 7), False),
    ],
)
def test_whatever_changes_what_a_draft_computes_is_in_the_identity(
    vllm_config: Any, change: Change, *, counts: bool
) -> None:
    draft(vllm_config.model_config.model)(vllm_config)
    config = vllm_config.speculative_config.draft_model_config.hf_config
    config.fields["rope_scaling"] = {"type": "longrope"}
    before = identify_model(vllm_config), handover_namespace(vllm_config, "r")
    change(vllm_config)
    assert (identify_model(vllm_config) != before[0]) == counts
    assert (handover_namespace(vllm_config, "r") != before[1]) == counts


@pytest.mark.parametrize(
    ("setting", "value", "counts"),
    [
        ("moe_backend", "marlin", False),
        ("moe_backend", "flashinfer_moe_ep_cutedsl", True),  # requantizes weights
        ("moe_backend", "of_a_later_release", True),
        ("linear_backend", "cutlass", False),
        ("linear_backend", "emulation", True),
        ("linear_backend_per_quant", {"nvfp4": "marlin", "fp8": "cutlass"}, False),
        ("linear_backend_per_quant", {"nvfp4": "emulation"}, True),
        ("enable_flashinfer_autotune", True, False),
        ("sparse_indexer_topk_backend", "torch", False),
    ],
)
def test_kernels_count_unless_they_compute_with_the_weights_of_the_checkpoint(
    vllm_config: Any, setting: str, value: Any, *, counts: bool
) -> None:
    vllm_config.kernel_config = KernelConfig()
    draft(vllm_config.model_config.model)(vllm_config)
    changed = vllm_config.speculative_config, "moe_backend"
    for owner, name in ((vllm_config.kernel_config, setting), *[changed] * (setting == changed[1])):
        before = identify_model(vllm_config), handover_namespace(vllm_config, "r")
        object.__setattr__(owner, name, value)
        assert (identify_model(vllm_config) != before[0]) == counts
        assert (handover_namespace(vllm_config, "r") != before[1]) == counts


@pytest.mark.parametrize(
    ("cache_dtype", "draft_dtype", "num_found"),
    [("auto", None, 1), ("fp8", None, 2), ("auto", "auto", 1), ("auto", "fp8", 2)],
)
def test_the_8_bit_floats_of_a_platform_are_in_the_identity(
    vllm_config: Any,
    cache_dtype: str,
    draft_dtype: str | None,
    num_found: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those of an MI300 are half the numbers that the same bytes are on other GPUs."""
    vllm_config.cache_config.cache_dtype = cache_dtype
    draft(vllm_config.model_config.model)(vllm_config)
    vllm_config.speculative_config.kv_cache_dtype = draft_dtype
    files, handed_over = set[str](), set[str]()
    for is_fnuz in (False, True):
        gpu = SimpleNamespace(is_fp8_fnuz=lambda is_fnuz=is_fnuz: is_fnuz)
        monkeypatch.setattr(vllm.platforms, "current_platform", gpu, raising=False)
        files.add(identify_model(vllm_config).fingerprint)
        handed_over.add(handover_namespace(vllm_config, "r").fingerprint)
    assert len(files) == len(handed_over) == num_found


@pytest.mark.parametrize("make", [lambda: lambda config: config, lambda: partial(repr)])
def test_a_function_that_overrides_is_named_by_what_it_makes(
    vllm_config: Any, make: Callable[[], Any]
) -> None:
    """Both for files and for hand-over: its place in memory is another one in each process."""
    write_config(vllm_config)
    found = set()
    for theta in (5.0, 5.0, 6.0):
        vllm_config.model_config.hf_overrides = make()  # of one name, three in memory
        vllm_config.model_config.hf_config.fields["rope_theta"] = theta
        hashes = identify_model(vllm_config), handover_namespace(vllm_config, "r")
        found.add(tuple(each.config_hash for each in hashes))
    assert len({each[0] for each in found}) == len({each[1] for each in found}) == 2


class OwnPass(InductorPass):  # type: ignore[misc]
    """Pass over the compiler's graphs, which vLLM identifies by the source of its class."""

    def __call__(self, graph: object) -> None: ...


class OwnCode:
    """Object that a compiler calls."""

    def __init__(self, amount: int) -> None:
        self.amount = amount

    def __call__(self, graph: object) -> None: ...


def test_every_pass_of_the_compiler_that_is_not_of_vllm_counts(vllm_config: Any) -> None:
    """Whether it is a function, a part of one, or an object, which have no name of their own."""
    made: list[Callable[[], Any]] = [
        lambda: json.dumps,
        lambda: partial(json.dumps, indent=1),
        lambda: partial(json.dumps, indent=2),
        lambda: partial(json.loads, indent=2),
        OwnPass,
        lambda: OwnCode(1),
        lambda: OwnCode(2),
    ]
    found = [(identify_model(vllm_config), handover_namespace(vllm_config, "r"))] * 2
    for make in (each for each in made for _ in range(2)):
        config = CompilationConfig(inductor_compile_config={"own": make()})
        vllm_config.compilation_config = config
        found.append((identify_model(vllm_config), handover_namespace(vllm_config, "r")))
    assert found[::2] == found[1::2]
    for of in zip(*found[::2], strict=True):
        assert len({each.config_hash for each in of}) == 1 + len(made)


def test_a_configuration_from_another_place_counts_and_names_no_weights(
    vllm_config: Any, tmp_path: Path
) -> None:
    file = write_config(vllm_config)
    plain = handover_namespace(vllm_config, "r")
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(file.read_text().replace("10000.0", "5.0"))
    model = vllm_config.model_config
    model.hf_config_path = str(other)
    assert handover_namespace(vllm_config, "r").config_hash != plain.config_hash
    model.model, model.hf_config._commit_hash = "example/model", "of the configuration"
    with pytest.raises(InvalidArgumentError, match="revision"):
        identify_model(vllm_config)


@pytest.mark.parametrize("kind", ["longrope", "su"])
@pytest.mark.parametrize("has_file", [True, False])
def test_context_length_matters_with_long_rope(
    vllm_config: Any, kind: str, *, has_file: bool
) -> None:
    if has_file:
        write_config(vllm_config, rope_scaling={"type": kind})
    vllm_config.model_config.hf_config.fields["rope_scaling"] = {"type": "longrope"}
    found = set()
    for max_model_len in (1024, 4096):
        vllm_config.model_config.max_model_len = max_model_len
        found |= {identify_model(vllm_config).config_hash}
        found |= {handover_namespace(vllm_config, "r").config_hash}
    assert len(found) == 4


@pytest.mark.parametrize(
    ("max_model_len", "chosen", "is_tuned"),
    [(32768, {}, False), (32769, {}, True), (4096, {"attn_temperature_tuning": True}, True)],
)
def test_a_temperature_of_attention_that_vllm_decides_is_in_the_identity(
    vllm_config: Any, max_model_len: int, chosen: dict[str, Any], *, is_tuned: bool
) -> None:
    """Llama 4 scales its queries by length only in engines that take long prompts."""
    write_config(vllm_config)
    model = vllm_config.model_config
    model.hf_config.fields["text_config"] = {"attn_temperature_tuning": True}
    model.try_get_generation_config = lambda: {"temperature": 0.6}
    model.override_generation_config = {}
    plain = identify_model(vllm_config), handover_namespace(vllm_config, "r")
    model.max_model_len, model.override_generation_config = max_model_len, chosen
    assert (identify_model(vllm_config) != plain[0]) == is_tuned
    assert (handover_namespace(vllm_config, "r") != plain[1]) == is_tuned


def test_namespaces_of_a_hand_over_are_those_of_earlier_releases(vllm_config: Any) -> None:
    """Engines are upgraded one by one, and hand prompts to each other meanwhile."""
    write_config(vllm_config)
    assert handover_namespace(vllm_config, "r").fingerprint == "c96e10892717b5507120e59fc18aa1a4"
    vllm_config.model_config.hf_overrides = {"rope_theta": 5.0}
    assert handover_namespace(vllm_config, "r").fingerprint == "27cdf60f6aaa41dbb186e09e9920cfc0"


def size_caches(config: Any) -> None:
    config.model_config.multimodal_config = MultiModalConfig(mm_processor_cache_gb=1)
    config.mamba_config = MambaConfig()


def guess_without_a_draft_model(config: Any) -> None:
    model = config.model_config
    config.speculative_config = SimpleNamespace(
        method="ngram", draft_model_config=model, target_model_config=model
    )


def lie_elsewhere(config: Any) -> None:
    fields = config.model_config.hf_config.fields
    fields |= {"_name_or_path": "elsewhere", "transformers_version": "6.0"}


def count_no_images(config: Any) -> None:
    count_images(config)
    config.model_config.multimodal_config.language_model_only = True


def be_read_by_another_release(config: Any) -> None:
    """Let another release read the checkpoint, with other names for its settings."""
    config.model_config.hf_config.fields |= {"added_later": 1, "rope_parameters": {"a": 2}}
    config.attention_config = LaterAttention()


@pytest.mark.parametrize(
    ("change", "has_file", "in_both"),
    [
        (size_caches, True, True),
        (changes_to("load_config", READS_IN_THREADS), True, True),
        (guess_without_a_draft_model, True, True),
        (lie_elsewhere, False, False),
        (changes_to("cache_config.enable_prefix_caching", False), False, False),
        (count_no_images, False, False),
        (changes_to("model_config.max_model_len", 1024), False, False),
        (be_read_by_another_release, True, False),
    ],
)
def test_what_changes_no_bytes_changes_no_identity(
    vllm_config: Any, change: Change, *, has_file: bool, in_both: bool
) -> None:
    vllm_config.attention_config = Attention()
    if has_file:
        write_config(vllm_config)
    before = identify_model(vllm_config), handover_namespace(vllm_config, "r")
    change(vllm_config)
    assert identify_model(vllm_config) == before[0]
    assert not in_both or handover_namespace(vllm_config, "r") == before[1]


def test_kernels_of_attention_do_not_count_but_a_backend_counts_in_files(vllm_config: Any) -> None:
    """The backend may order a page in a way of its own; engines compare that in a hand-over."""
    before = identify_model(vllm_config), handover_namespace(vllm_config, "r")
    division = "indexer_tp_shard_min_rows", "minimax_m3_indexer_cp"  # of the work, from 0.33 on
    newer = make_dataclass("AttentionConfig", [(name, int, field(default=0)) for name in division])
    for chosen, counts in (
        (AttentionConfig(flash_attn_version=2), False),
        (AttentionConfig(flash_attn_max_num_splits_for_cuda_graph=8), False),
        (newer(1, 1), False),
        (AttentionConfig(backend="FLASHINFER"), True),
    ):
        vllm_config.attention_config = chosen
        assert (identify_model(vllm_config) != before[0]) == counts
        assert handover_namespace(vllm_config, "r") == before[1]


SCALES = changes_to("cache_config.calculate_kv_scales", True), "calculate_kv_scales is True"
LORA = changes_to("lora_config", object()), "enable_lora is True"
IMAGES_BY_COUNT = count_images, "mm_processor_cache_gb is 0"


def open_tier(revision: str = "commit") -> None:
    spec = KVXferOffloadingSpec(make_config(backend=[HOST]))
    tier = {"backend": HOST, "revision": revision}
    KVXferTier(spec, np.zeros((4, 4096), np.int8).data, "KVXferTier", **tier)


def start_worker(config: Any = make_config(backend=[HOST])) -> Any:  # noqa: B008 - with host memory alone
    memory = BlockMemory([[100, 28], [128]], num_blocks=32, blocks_per_chunk=2)
    return KVXferOffloadingSpec(config).get_worker(as_vllm_caches(memory))


def test_what_cannot_be_told_apart_is_refused(vllm_config: Any) -> None:
    SCALES[0](vllm_config)
    with pytest.raises(InvalidArgumentError, match=SCALES[1]):
        handover_namespace(vllm_config, "r")
    vllm_config.cache_config.calculate_kv_scales = False
    vllm_config.model_config.model = "example/model"
    with pytest.raises(InvalidArgumentError, match="revision"):
        identify_model(vllm_config)


@pytest.mark.parametrize("told", [lambda config: config, lambda _: None], ids=["said", "unsaid"])
@pytest.mark.parametrize(
    ("begin", "refused"),
    [
        *(
            pytest.param(open_tier, each, marks=has_tier)
            for each in (SCALES, LORA, IMAGES_BY_COUNT)
        ),
        (start_worker, LORA),
    ],
)
def test_an_engine_whose_keys_do_not_tell_all_does_not_start(
    vllm_config: Any,
    begin: Callable[[], object],
    refused: tuple[Change, str],
    told: Callable[[Any], Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whether vLLM provides the configuration or a caller passes it."""
    change, named = refused
    change(vllm_config)
    monkeypatch.setattr(interface, "get_current_vllm_config_or_none", lambda: told(vllm_config))
    with pytest.raises(InvalidArgumentError, match=named):
        begin()


def open_rows(folder: Path) -> None:
    """Open a tier of files in a folder, and close it."""
    spec, rows = KVXferOffloadingSpec(make_config(backend=[HOST])), np.zeros((4, 4096), np.int8)
    url = f"file://{folder}/store?capacity=1MiB&min_free=1MiB"
    KVXferTier(spec, rows.data, "KVXferTier", backend=url, revision="r").shutdown()


def num_namespaces(folder: Path) -> int:
    return len(list(BlockTree(folder / "store").namespaces()))


@has_tier
def test_rows_of_an_attention_backend_that_was_asked_for_are_in_a_namespace_of_their_own(
    vllm_config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one name of a layout, B12X and FlashAttention order a page in two ways."""
    monkeypatch.setattr(interface, "get_current_vllm_config_or_none", lambda: vllm_config)
    for kernel in (None, None, *Kernel, *OtherKernel):
        vllm_config.attention_config = SimpleNamespace(backend=kernel)
        open_rows(tmp_path)
    assert num_namespaces(tmp_path) == 3


@has_tier
@pytest.mark.parametrize("has_config", [True, False])
def test_rows_that_a_variable_orders_are_in_a_namespace_of_their_own(
    vllm_config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, has_config: bool
) -> None:
    """Whether a state of a convolution has its dimension first is in no configuration."""
    found = vllm_config if has_config else None
    monkeypatch.setattr(interface, "get_current_vllm_config_or_none", lambda: found)
    for layout in ("SD", "DS"):
        monkeypatch.setenv("VLLM_SSM_CONV_STATE_LAYOUT", layout)
        open_rows(tmp_path)
    assert num_namespaces(tmp_path) == 2


@has_tier
def test_rows_do_not_depend_on_the_order_in_which_variables_were_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interface, "get_current_vllm_config_or_none", lambda: None)
    for variables in (["VLLM_USE_MODELSCOPE", "VLLM_MEDIA_CONNECTOR"],) * 2:
        for name in variables:
            monkeypatch.setenv(name, "some")
        open_rows(tmp_path)
        for name in variables:
            monkeypatch.delenv(name)
        variables.reverse()
    assert num_namespaces(tmp_path) == 1


@has_tier
def test_a_tier_by_url_needs_the_revision_of_the_model() -> None:
    with pytest.raises(InvalidArgumentError, match="revision"):
        open_tier(revision="")


def test_rows_of_other_shapes_or_parallel_sizes_are_in_other_namespaces() -> None:
    named = partial(row_namespace, model=Namespace(model="", revision="r"), row_size_bytes=4096)
    one = named(make_config())
    unused = [()] * (SECOND_GROUP_ID - 1)
    assert [group.layer_names for group in one.groups] == [("a",), *unused, ("b",)]
    assert {one.chunk_size_bytes(group) for group in range(len(one.groups))} == {4096}
    shared = replace(make_config(), parallel=replace(make_config().parallel, dcp_size=2))
    others = [
        named(make_config(), row_size_bytes=8192),
        named(make_config(world_size=2)),
        named(make_config(), model=Namespace(model="", revision="s")),
        named(shared),
        named(shared, interleave_tokens=2),
    ]
    assert len({each.fingerprint for each in [one, *others]}) == 6
    assert named(make_config(), interleave_tokens=2) == one


def test_a_vllm_that_does_not_say_what_its_model_is_gets_no_files() -> None:
    config = make_config(backend=[HOST] * 2)
    with pytest.raises(InvalidArgumentError, match="its model's configuration"):
        start_worker(config)
    with pytest.raises(InvalidArgumentError, match="workers that published"):
        KVXferOffloadingSpec(config).get_manager()
