"""An engine's settings, variables and plug-ins: which of them may change bytes of a cache."""

import os
import re
from collections.abc import Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import xxhash

from kvxfer.engine_side.weight_files import hash_facts

WORDS = frozenset({
    "accept", "adaptive", "addr", "alive", "allreduce", "aot", "api", "ar", "asr", "assets",
    "autotune", "backup", "blocks", "broadcaster", "bucket", "buckets", "build", "canary",
    "checksum", "chunked", "compaction", "compile", "constrained", "coredump", "cp", "cudagraph",
    "dbo", "dcp", "decoding", "decoupled", "delayer", "disagg", "disaggregation", "dp", "eager",
    "elastic", "endpoint", "eplb", "eviction", "exa", "fetch", "flexkv", "gc", "graph", "grpc",
    "hicache", "host", "http2", "instance", "interval", "ip", "ipc", "linker", "lmcache", "log",
    "logging", "logit", "logprobs", "memory", "metric", "metrics", "mmap", "mooncake", "nccl",
    "nic", "nnodes", "numa", "nvtx", "offload", "offloading", "ollama", "otlp", "outlines",
    "overlap", "p2p", "padding", "parallel", "pdmux", "port", "pp", "precompiled", "prefetch",
    "priority", "profiling", "radix", "rank", "ratio", "ray", "recorder", "request", "requests",
    "return", "root", "rust", "sampler", "sampling", "schedule", "scheduler", "server", "session",
    "sidecar", "sleep", "ssl", "streaming", "symm", "synthetic", "template", "thinking", "threads",
    "timeout", "tokenizer", "tool", "tp", "trace", "urls", "usage", "warmup", "warmups",
    "watermark", "worker", "xla", "zmq",
})  # fmt: skip
"""Words of ports, clients, logs, schedules, parallelism, host memory, other caches, samplers, and
proposals of a draft model."""
COUNTING = re.compile(r"quant|dtype|precision|rounding|perturb|(fp|int|_w)\d")
"""Parts of names that count in spite of such a word, as a data type of host memory."""
KERNEL_ENDINGS = "_backend", "_backend_per_quant", "_dispatch_algorithm"
"""Endings of settings whose values in `KERNELS` are harmless; the dispatch `fake` draws experts."""
PRECISION = re.compile(
    r"(dnnl|onednn)_default_fpmath_mode|hipblaslt_allow_tf32|nvidia_tf32_override"
    r"|triton_f32_default"
)
"""Variables by which libraries below an engine compute float32 products with fewer bits."""
LIBRARIES = re.compile(
    r"(aiter|deep_normal_mode|fla|flashinfer_nvfp4|minimax|rocm_quick|xhs)_.*|bias_prep_only"
    rf"|torch_allow_tf32_cublas_override|video_max_pixels|{PRECISION.pattern}"
)
"""Variables that engines, or their kernels and libraries, read under a name of their own."""
PLUGINS = {
    "sglang": ("sglang.srt.platforms", "sglang.srt.plugins"),
    "vllm": ("vllm.general_plugins", "vllm.platform_plugins"),
}
"""Groups of plug-ins, which may replace an engine's models and kernels."""
OF_SERVICES = re.compile(r"\w+_(service_(host|port\w*)|port(_\d+_\w+)?)")
"""Variables that Kubernetes makes of a service, such as `vllm-llama-fp8`."""

KERNELS = frozenset({
    "aiter", "aiter_triton_mxfp4_bf16", "ascend", "ascend_fuseep", "ascend_tp", "auto", "b12x",
    "batched_triton", "compressed", "conch", "cooperative", "cutedsl", "cutedsl_mla", "cutlass",
    "deep_gemm", "deep_gemm_mega_moe", "deep_select", "deepep", "deepep_v2", "deepgemm", "dsa",
    "dsv4", "dynamic", "exllama", "fa3", "fa4", "fbgemm", "flashinfer", "flashinfer_b12x",
    "flashinfer_cudnn", "flashinfer_cutedsl", "flashinfer_cutlass", "flashinfer_deepgemm",
    "flashinfer_moe_ep_mega_deep_gemm", "flashinfer_mxfp4", "flashinfer_sparse_mla",
    "flashinfer_trtllm", "flashinfer_trtllm_routed", "flashkda", "flashmla", "flashmla_auto",
    "flashmla_kv", "flashmla_mega", "flashmla_sparse", "flex_attention", "flydsl", "gemv", "helion",
    "hpc", "hpc_ops", "humming", "intel_amx", "intel_xpu", "lora_cutedsl", "lora_marlin",
    "lora_triton", "lp", "machete", "marlin", "mooncake", "mori", "nixl", "None", "none", "nsa",
    "nv_cutedsl", "nvidia_kda", "per_row", "persistent", "pplx", "ptx_kda", "qsa", "rdna3",
    "sgl-kernel", "static", "tilelang", "tokenspeed_mla", "torch", "torch_native", "triton",
    "triton_kernel", "triton_sparse_mla", "triton_unfused", "trtllm", "trtllm_mha", "trtllm_mla",
    "wave", "xpu", "xpu_woq",
})  # fmt: skip
"""Kernels that compute with a checkpoint's own weights. They differ in the order of additions, and
in the type of activations that they can take: in FP4, CUTLASS rounds them, and Marlin does not.
That follows the GPU, too, under `auto`; engines on several GPUs share, and vLLM promises equal bits
to no two of them. Others count: `flashmla_sparse_q8` rounds in FP8 what the cache has in 16 bits,
and `flashinfer_moe_ep_cutedsl` of vLLM quantizes the weights once more."""


def has_harmless_word(name: str) -> bool:
    """Whether the lower-case name of a setting says that it changes no byte at equal tokens."""
    return not WORDS.isdisjoint(name.split("_")) and not COUNTING.search(name)


def may_change_bytes(setting: str, value: Any) -> bool:
    """Whether a setting counts: neither its name nor its value, a kernel, is known as harmless."""
    chosen = value.values() if isinstance(value, Mapping) else [value]
    is_known_kernel = setting.endswith(KERNEL_ENDINGS) and KERNELS.issuperset(map(str, chosen))
    return not (is_known_kernel or has_harmless_word(setting))


def default_of(field: Any) -> Any:
    """Return the default of a field of a dataclass, of pydantic's too, or of a struct."""
    made = field.default_factory() if callable(field.default_factory) else field.default
    return made.get_default(call_default_factory=True) if hasattr(made, "get_default") else made


def counting_environment(engine: str, harmless: re.Pattern[str]) -> dict[str, str]:
    """Find the variables, and the plug-ins of others with their versions, that may change bytes.

    `harmless` matches variables of any release that do not: the lower-case name without the
    engine's, `=`, the value.
    """
    found = dict(_plugins_of_others(engine))
    for name, value in os.environ.items():
        short = name.lower().removeprefix(f"{engine}_")
        is_read = short != name.lower() or LIBRARIES.fullmatch(short)
        is_harmless = has_harmless_word(short) or OF_SERVICES.fullmatch(short)
        if is_read and not is_harmless and not harmless.fullmatch(f"{short}={value}"):
            found[name] = value
    return dict(sorted(found.items()))


def _plugins_of_others(engine: str) -> Iterator[tuple[str, str]]:
    """List those that are installed, and the user's choice, which each engine reads in its way."""
    for each in (each for group in PLUGINS[engine] for each in entry_points(group=group)):
        if not re.match(rf"(kvxfer|{engine})\b", each.value):
            yield f"{each.group} {each.name}", f"{each.value} {_release_of(each)}"
            chosen = f"{engine.upper()}_PLUGINS"
            yield chosen, repr(os.environ.get(chosen))


def _release_of(plugin: EntryPoint) -> str:
    """Name the code of a plug-in by its version, and by its files if it comes from a folder.

    Source: https://packaging.python.org/specifications/direct-url
    """
    installed = plugin.dist
    version = str(installed and installed.version)
    if not installed or "dir_info" not in (installed.read_text("direct_url.json") or ""):
        return version
    spec = find_spec(plugin.module.partition(".")[0])
    places = map(Path, spec.submodule_search_locations or [spec.origin or ""]) if spec else ()
    files = (
        (str(file.relative_to(place)), xxhash.xxh3_128_hexdigest(file.read_bytes()))
        for place in places
        for file in (place, *place.rglob("*"))
        if file.is_file() and file.parent.name != "__pycache__"
    )
    return f"{version} {hash_facts(sorted(files))}"
