"""`make demo`: a real vLLM engine forgets what it computed, and gets it back from kvxfer.

Four questions about this repository, each after the same long text from it, go to a real model:
computed, found in the engine's own prefix cache, and, after a reset of that cache, found in
kvxfer's host memory. Then the engine is restarted, and the first question is found in kvxfer's
files. `tests.e2e.oracle` says which results must be equal.
"""

import contextlib
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.e2e import audit, models, oracle, text
from tests.e2e.demo_console import Step, conclude, parse, show_steps
from tests.e2e.engine_process import (
    REPOSITORY,
    TOKENS_PER_BLOCK,
    EngineConfig,
    EngineDiedError,
    EngineProcess,
    Generation,
)

NUM_PROMPTS = 4
NUM_BLOCKS = 19
MAX_TOKENS = 8
CAPACITY = "1GiB"
FILE_CAPACITY = "4GiB"
FILES = REPOSITORY / "build" / "demo"
HITS = "vllm:external_prefix_cache_hits"

NEXT = """
What to try next:
  your own model   vllm serve MODEL --kv-transfer-config ... (docs/vllm.md has it)
  the files        .venv/bin/kvxfer ls {files}
  sharing blocks   .venv/bin/kvxfer serve --listen 127.0.0.1:7000 --capacity 4GiB
"""


@dataclass(frozen=True, slots=True)
class Runs:
    """Outputs of the prompts, and how many tokens the engine got from kvxfer."""

    reference: oracle.Reference
    memory_hits: list[Generation]
    file_hits: list[Generation]
    reference_tokens: float
    memory_tokens: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; 1 when an output differs or a hit is missing."""
    options = parse("make demo", __doc__, ["page", "file"], arguments)
    console = Console()
    folder = models.make("smollm2")
    prompts = text.prompts(
        folder / "tokenizer.json", NUM_PROMPTS, shared_tokens=NUM_BLOCKS * TOKENS_PER_BLOCK
    )
    console.print(
        "A vLLM engine forgets what it computed, and kvxfer gives it back.\n\n"
        f"The model is SmolLM2-135M-Instruct, on this CPU in {options.dtype}. {NUM_PROMPTS} "
        "prompts ask about this repository, each after the same "
        f"{NUM_BLOCKS * TOKENS_PER_BLOCK} tokens of its text. kvxfer keeps these as {NUM_BLOCKS} "
        "blocks, in host memory and in files.\n"
    )
    try:
        with show_steps(console) as step:
            runs = _run(folder, options.dtype, options.plant, prompts, step)
    except EngineDiedError as exc:
        console.print(f"[red]{exc}")
        return 1
    problems = list(_problems(runs, options.dtype))
    what_next = NEXT.format(files=os.path.relpath(FILES))
    return conclude(
        console, _table(runs), problems, lambda: _conclusion(runs, options.dtype), what_next
    )


def _run(
    folder: Path, dtype: str, plant: str | None, prompts: Sequence[Sequence[int]], step: Step
) -> Runs:
    """Run the prompts in each way: computed, from the device, and from kvxfer."""
    shutil.rmtree(FILES, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="kvxfer-demo-") as audited:
        config = _engine_config(folder, dtype, Path(audited) if plant == "page" else None)
        with _started(config, step("start vLLM with kvxfer", 1), prompts[0]) as engine:
            advance = step("compute the prompts, and hit vLLM's own cache", 2 * NUM_PROMPTS)
            reference = oracle.run_reference(
                engine, prompts, max_tokens=MAX_TOKENS, advance=advance
            )
            engine.settle()
            reference_tokens = engine.metrics().get(HITS, 0)
            advance = step("reset that cache, and hit kvxfer's memory", NUM_PROMPTS)
            memory_hits = []
            for prompt in prompts:
                if not engine.reset():
                    raise EngineDiedError("the engine's cache cannot be reset", engine.log())
                memory_hits += engine.generate([prompt], max_tokens=MAX_TOKENS)
                advance()
            memory_tokens = engine.metrics().get(HITS, 0) - reference_tokens
        if plant == "file":
            audit.flip_a_bit(next(FILES.rglob("*.safetensors")))
        with _started(config, step("stop vLLM, and start it again", 1), prompts[0]) as engine:
            advance = step("hit kvxfer's files", 1)
            file_hits = engine.generate(prompts[:1], max_tokens=MAX_TOKENS)
            advance()
    return Runs(reference, memory_hits, file_hits, reference_tokens, memory_tokens)


def _engine_config(folder: Path, dtype: str, audited: Path | None) -> EngineConfig:
    """Configure an engine; if it is audited, a byte of each load is altered."""
    connector = {
        "spec_name": "KVXferOffloadingSpec",
        "spec_module_path": "kvxfer.integrations.vllm",
        "backend": [f"host://?capacity={CAPACITY}", f"file://{FILES}?capacity={FILE_CAPACITY}"],
    }
    engine: dict[str, Any] = {"model": str(folder), "dtype": dtype, "block_size": TOKENS_PER_BLOCK}
    if audited is None:
        return EngineConfig(connector=connector, **engine)
    environment = audit.environment(audited, [audit.Hook.FLIP_LOADED_BIT])
    return EngineConfig(connector=connector | audit.SPEC, environment=environment, **engine)


@contextlib.contextmanager
def _started(
    config: EngineConfig, advance: Callable[[], None], prompt: Sequence[int]
) -> Iterator[EngineProcess]:
    """Start an engine and warm it up, with other tokens and fewer than a block has."""
    with EngineProcess(config) as engine:
        engine.generate([prompt[TOKENS_PER_BLOCK - 9 :: -1]], max_tokens=2, read_cache=False)
        advance()
        yield engine


def _table(runs: Runs) -> Table:
    table = Table(title=f"Time to first token, median of {len(runs.memory_hits)} prompts")
    table.add_column("blocks are")
    for heading in ("time", "speed-up", "cached", "output"):
        table.add_column(heading, justify="right")
    computed, device_hits = runs.reference.computed, runs.reference.device_hits
    computed_s = statistics.median(one.first_token_s for one in computed)
    same_tokens = len(computed) - _num_rounded(runs)
    for name, generations, output in (
        ("computed", computed, ""),
        ("in vLLM's cache", device_hits, f"{same_tokens} of {len(computed)} as computed"),
        ("in kvxfer's memory", runs.memory_hits, _verdict(runs, runs.memory_hits)),
        ("in kvxfer's files", runs.file_hits, _verdict(runs, runs.file_hits)),
    ):
        seconds = statistics.median(one.first_token_s for one in generations)
        cached = {one.cached_tokens for one in generations}
        table.add_row(
            name,
            f"{seconds * 1e3:.0f} ms",
            f"{computed_s / seconds:.1f} x",
            " to ".join(str(count) for count in sorted({min(cached), max(cached)})),
            output,
        )
    return table


def _verdict(runs: Runs, hits: Sequence[Generation]) -> str:
    return "DIFFERENT" if any(_hit_differences(runs, hits)) else "equal to the bit"


def _hit_differences(runs: Runs, hits: Sequence[Generation]) -> Iterator[str]:
    for hit, device_hit in zip(hits, runs.reference.device_hits, strict=False):
        if difference := oracle.hit_difference(hit, device_hit):
            yield difference


def _problems(runs: Runs, dtype: str) -> Iterator[str]:
    computed, device_hits = runs.reference.computed, runs.reference.device_hits
    whole_blocks = NUM_BLOCKS * TOKENS_PER_BLOCK
    if any(one.cached_tokens for one in computed):
        yield "computed: tokens came from a cache"
    if runs.reference_tokens or any(one.cached_tokens != whole_blocks for one in device_hits):
        yield f"vLLM's cache: it did not give the {whole_blocks} tokens that all prompts share"
    for hit, truth in zip(device_hits, computed, strict=True):
        if difference := oracle.rounding_difference(hit, truth, dtype=dtype):
            yield f"vLLM's cache: {difference}"
    for name, hits in ("memory", runs.memory_hits), ("files", runs.file_hits):
        for difference in _hit_differences(runs, hits):
            yield f"kvxfer's {name}: {difference}"
    if runs.memory_tokens != whole_blocks * len(runs.memory_hits):
        yield f"kvxfer's memory: it gave back {runs.memory_tokens:.0f} tokens"


def _conclusion(runs: Runs, dtype: str) -> str:
    lines = (
        f"kvxfer gave back {runs.memory_tokens:.0f} tokens from memory and "
        f"{runs.file_hits[0].cached_tokens} from files. Every output token and its log-probability "
        "equals that of a hit in vLLM's own cache, to the last bit.\n"
    )
    if dtype in oracle.EXACT_TOKENS:
        return lines + f"In {dtype} every output token is also the one that was computed."
    return lines + (
        "After a hit vLLM computes the rest of a prompt only, in other shapes than a whole one, "
        f"and {dtype} rounds otherwise in other shapes. So a hit, also one in vLLM's own cache, "
        "may continue with other tokens than were computed: here it did for "
        f"{_num_rounded(runs)} of {len(runs.reference.computed)} prompts."
    )


def _num_rounded(runs: Runs) -> int:
    """Number of prompts whose device hit gave other tokens than were computed."""
    pairs = zip(runs.reference.device_hits, runs.reference.computed, strict=True)
    return sum(hit.token_ids != truth.token_ids for hit, truth in pairs)


if __name__ == "__main__":
    sys.exit(main())
