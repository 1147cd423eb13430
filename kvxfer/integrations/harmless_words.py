"""Words by which a setting or variable of an engine says that it changes no byte of a cache."""

import re

WORDS = frozenset({
    "accept", "adaptive", "addr", "alive", "allreduce", "aot", "api", "ar", "asr", "assets",
    "autotune", "backup", "boundary", "bucket", "buckets", "build", "canary", "checksum", "chunked",
    "compile", "constrained", "cp", "cudagraph", "dcp", "decoupled", "delayer", "disaggregation",
    "dp", "elastic", "endpoint", "eplb", "eviction", "fetch", "flexkv", "gc", "graph", "grpc",
    "hicache", "host", "http2", "instance", "interval", "ip", "linker", "lmcache", "log", "logging",
    "logit", "memory", "metric", "metrics", "mmap", "nccl", "nic", "nnodes", "offload", "otlp",
    "outlines", "overlap", "p2p", "padding", "pdmux", "port", "pp", "precompiled", "prefetch",
    "priority", "profiling", "radix", "ratio", "ray", "recorder", "request", "requests", "return",
    "root", "rust", "sampler", "sampling", "schedule", "server", "sidecar", "ssl", "streaming",
    "symm", "template", "thinking", "threads", "timeout", "tokenizer", "tool", "tp", "trace",
    "urls", "usage", "warmup", "warmups", "watermark", "worker", "xla",
})  # fmt: skip
"""Words of ports, clients, logs, schedules, parallelism, host memory, other caches, samplers, and
proposals of a draft model; also in all variables that Kubernetes makes of a service `vllm-a`."""
ROUNDING = re.compile(r"quant|dtype|precision|rounding|(fp|int|_w)\d")
"""Parts of names of settings that count in spite of such a word, as a data type of host memory."""


def has_harmless_word(name: str) -> bool:
    """Whether the lower-case name of a setting says that it changes no byte at equal tokens."""
    return not WORDS.isdisjoint(name.split("_")) and not ROUNDING.search(name)
