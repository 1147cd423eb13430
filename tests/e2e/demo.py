"""`make demo`: a real vLLM engine forgets what it computed, and gets it back from kvxfer.

Four questions about this repository, each after the same long text from it, go to a real model:
computed, found in the engine's own prefix cache, and, after that cache was reset, found in the host
memory that kvxfer keeps.
"""

import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvxfer.bench.engine import EngineConfig, EngineDiedError, EngineProcess, Generation
from tests.e2e import models, text

NUM_PROMPTS = 4
SHARED_TOKENS = 19 * 128
TOKENS_PER_BLOCK = 128
MAX_TOKENS = 16
CAPACITY = "1GiB"
NATIVE_BFLOAT16 = ("avx512_bf16", "amx_bf16", "bf16")

CONNECTOR = {
    "spec_name": "KVXferOffloadingSpec",
    "spec_module_path": "kvxfer.integrations.vllm",
    "backend": f"host://?capacity={CAPACITY}",
}


def main() -> int:
    """Run the demo; 1 when a token differs or a hit is missing."""
    console = Console()
    folder = models.make("smollm2", text.REPOSITORY / models.DEFAULT_DIRECTORY)
    prompts = text.prompts(folder / "tokenizer.json", NUM_PROMPTS, shared_tokens=SHARED_TOKENS)
    dtype = "bfloat16" if _has_native_bfloat16() else "float32"
    console.print(
        f"SmolLM2-135M-Instruct in {dtype} on vLLM, {NUM_PROMPTS} prompts that share "
        f"{SHARED_TOKENS} tokens of this repository's text, host pool of {CAPACITY}"
    )
    try:
        runs, external_hits = _run(folder, dtype, prompts, console)
    except EngineDiedError as exc:
        console.print(f"[red]{exc}")
        return 1
    console.print(_table(runs))
    problems = _problems(runs, external_hits)
    for problem in problems:
        console.print(f"[red]{problem}")
    if not problems:
        console.print(
            f"Every token is identical; kvxfer gave back {external_hits:.0f} tokens to "
            f"{len(prompts)} prompts, all that they share."
        )
    return 1 if problems else 0


def _run(
    folder: Path, dtype: str, prompts: Sequence[Sequence[int]], console: Console
) -> tuple[dict[str, list[Generation]], float]:
    """Each way of getting to the first token, and the tokens that came from kvxfer."""
    config = EngineConfig(model=str(folder), dtype=dtype, connector=CONNECTOR)
    runs: dict[str, list[Generation]] = {}
    columns = (
        TextColumn("{task.description:<13}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        starting = progress.add_task("starting vLLM", total=1)
        with EngineProcess(config) as engine:
            engine.generate([prompts[0][:300]], max_tokens=2, read_cache=False)  # warms up
            engine.reset(connector=True)
            progress.advance(starting)
            for name, read_cache, forget in (
                ("computed", False, False),
                ("device hit", True, False),
                ("kvxfer hit", True, True),
            ):
                task = progress.add_task(name, total=len(prompts))
                runs[name] = []
                for prompt in prompts:
                    if forget and not engine.reset():
                        raise EngineDiedError("the device cache cannot be reset", engine.log())
                    runs[name] += engine.generate(
                        [prompt], max_tokens=MAX_TOKENS, read_cache=read_cache
                    )
                    progress.advance(task)
                engine.settle()
            external_hits = engine.metrics()["vllm:external_prefix_cache_hits"]
    return runs, external_hits


def _table(runs: dict[str, list[Generation]]) -> Table:
    table = Table(title="Time to first token, median")
    table.add_column("prompt is")
    for heading in ("time", "speed-up", "tokens cached", "output identical"):
        table.add_column(heading, justify="right")
    truth = runs["computed"]
    computed_s = statistics.median(one.first_token_s for one in truth)
    for name, generations in runs.items():
        seconds = statistics.median(one.first_token_s for one in generations)
        cached = {one.cached_tokens for one in generations}
        table.add_row(
            name,
            f"{seconds * 1e3:.0f} ms",
            f"{computed_s / seconds:.1f} x",
            " to ".join(str(count) for count in sorted({min(cached), max(cached)})),
            "yes" if _tokens(generations) == _tokens(truth) else "NO",
        )
    return table


def _problems(runs: dict[str, list[Generation]], external_hits: float) -> list[str]:
    whole_blocks = SHARED_TOKENS // TOKENS_PER_BLOCK * TOKENS_PER_BLOCK
    problems = []
    if external_hits < whole_blocks * NUM_PROMPTS:
        problems.append(f"kvxfer gave back {external_hits:.0f} tokens only")
    for name, generations in runs.items():
        if _tokens(generations) != _tokens(runs["computed"]):
            problems.append(f"{name}: the tokens differ from those that were computed")
        if name != "computed" and min(one.cached_tokens for one in generations) < whole_blocks:
            problems.append(f"{name}: fewer than {whole_blocks} tokens came from the cache")
    return problems


def _tokens(generations: Sequence[Generation]) -> list[list[int]]:
    return [one.token_ids for one in generations]


def _has_native_bfloat16() -> bool:
    """Whether the CPU computes in bfloat16; others emulate it, several times slower."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith(("flags", "Features")):
            return not set(NATIVE_BFLOAT16).isdisjoint(line.split())
    return False


if __name__ == "__main__":
    sys.exit(main())
