"""Process with an engine of SGLang: answers prompts, and says which tokens came from where.

Reads one JSON object per line: `{"prompts": [[1, 2, ...], ...], "flush": true}`; answers with one:
`{"tokens": [...], "storage": [...]}`. Started with the arguments of the engine as JSON.
"""

import json
import sys
import time
from typing import Any

import tests.sglang.cpu_shim  # noqa: F401 - before SGLang

from sglang.srt.entrypoints.engine import Engine  # isort: skip

FIXED: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "random_seed": 0, "log_level": "warning",
    "attention_backend": "torch_native", "sampling_backend": "pytorch", "grammar_backend": "none",
    "skip_tokenizer_init": True, "disable_overlap_schedule": True, "disable_cuda_graph": True,
    "page_size": 16, "max_total_tokens": 4096, "max_running_requests": 2, "context_length": 2048,
    "enable_hierarchical_cache": True, "hicache_ratio": 2.0, "hicache_io_backend": "direct",
    "hicache_mem_layout": "page_first_direct", "hicache_write_policy": "write_through",
    "hicache_storage_prefetch_policy": "wait_complete",
}  # fmt: skip
FLUSH_S = 30.0


def flush_cache(engine: Engine) -> None:
    """Empty the caches in memory, which SGLang refuses as long as pages are being stored."""
    deadline = time.monotonic() + FLUSH_S
    while not engine.flush_cache().success:
        if time.monotonic() >= deadline:
            raise TimeoutError(f"SGLang has refused to flush its cache for {FLUSH_S:g} s")
        time.sleep(0.1)


def main() -> None:
    asked = json.loads(sys.argv[1])
    engine = Engine(**(FIXED | asked))
    try:
        print("READY", flush=True)
        for line in sys.stdin:
            request = json.loads(line)
            if request.get("flush"):
                flush_cache(engine)
            outputs = engine.generate(
                input_ids=request["prompts"],
                sampling_params={"temperature": 0, "max_new_tokens": request["new_tokens"]},
            )
            details = [each["meta_info"].get("cached_tokens_details") or {} for each in outputs]
            answer = {
                "tokens": [each["output_ids"] for each in outputs],
                "storage": [each.get("storage", 0) for each in details],
                "cached": [each["meta_info"]["cached_tokens"] for each in outputs],
            }
            print("ANSWER " + json.dumps(answer), flush=True)
    finally:
        engine.shutdown()


if __name__ == "__main__":
    main()
