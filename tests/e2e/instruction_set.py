"""A plug-in of vLLM's that lets its CPU attention use less of the processor, or another kernel.

vLLM asks the processor itself (`torch.cpu`), whatever `ONEDNN_MAX_CPU_ISA` and
`ATEN_CPU_CAPABILITY` say: no setting of its own takes another instruction set.
"""

import os
from pathlib import Path
from typing import Any

from tests.e2e import block_outermost

VARIABLE = "KVXFER_TEST_INSTRUCTION_SET"


def declare() -> None:
    """Let vLLM choose the instruction set that the environment names."""
    from vllm.v1.attention.backends import cpu_attn

    def choose(
        dtype: Any, block_size: int, head_size: int | None = None, kv_cache_dtype: str | None = None
    ) -> str:
        return os.environ[VARIABLE]

    cpu_attn._get_attn_isa = choose


def settings(directory: Path, instruction_set: str) -> dict[str, Any]:
    """What an engine is started with, whose plug-in is written to `directory`."""
    block_outermost.install(directory, name="kvxfer-test-instruction-set", module=__name__)
    return {"python_path": [directory], "environment": {VARIABLE: instruction_set}}
