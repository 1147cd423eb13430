"""`make demo`: a real vLLM engine forgets what it computed, and gets it back from kvxfer.

Four questions about this repository, each after the same long text from it, go to a real model:
computed, found in the engine's own prefix cache, and, after that cache was reset, found in the host
memory that kvxfer keeps. Then the engine is stopped and started again, and the first question is
found in the files that kvxfer keeps.
"""

import contextlib
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
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
FILE_CAPACITY = "4GiB"
HITS = "vllm:external_prefix_cache_hits"
AFTER_RESTART = "after restart"
NATIVE_BFLOAT16 = ("avx512_bf16", "amx_bf16", "bf16")


def main() -> int:
    """Run the demo; 1 when a token differs or a hit is missing."""
    console = Console()
    folder = models.make("smollm2", text.REPOSITORY / models.DEFAULT_DIRECTORY)
    prompts = text.prompts(folder / "tokenizer.json", NUM_PROMPTS, shared_tokens=SHARED_TOKENS)
    dtype = "bfloat16" if _has_native_bfloat16() else "float32"
    console.print(
        f"SmolLM2-135M-Instruct in {dtype} on vLLM, {NUM_PROMPTS} prompts that share "
        f"{SHARED_TOKENS} tokens of this repository's text, host pool of {CAPACITY}, files below"
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
    runs: dict[str, list[Generation]] = {}
    columns = (
        TextColumn("{task.description:<13}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with (
        tempfile.TemporaryDirectory(prefix="kvxfer-demo-") as files,
        Progress(*columns, console=console) as progress,
    ):
        config = _engine_config(folder, dtype, files)
        with _started(config, "starting vLLM", prompts[0], progress) as engine:
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
            external_hits = engine.metrics()[HITS]
        with _started(config, "once more", prompts[0], progress) as engine:
            task = progress.add_task(AFTER_RESTART, total=1)
            runs[AFTER_RESTART] = engine.generate(prompts[:1], max_tokens=MAX_TOKENS)
            progress.advance(task)
    return runs, external_hits


def _engine_config(folder: Path, dtype: str, files: str) -> EngineConfig:
    connector = {
        "spec_name": "KVXferOffloadingSpec",
        "spec_module_path": "kvxfer.integrations.vllm",
        "backend": [f"host://?capacity={CAPACITY}", f"file://{files}?capacity={FILE_CAPACITY}"],
    }
    return EngineConfig(model=str(folder), dtype=dtype, connector=connector)


@contextlib.contextmanager
def _started(
    config: EngineConfig, description: str, prompt: Sequence[int], progress: Progress
) -> Iterator[EngineProcess]:
    """Start an engine and warm it up, with tokens that are no prefix of any prompt."""
    task = progress.add_task(description, total=1)
    with EngineProcess(config) as engine:
        engine.generate([prompt[299::-1]], max_tokens=2, read_cache=False)
        progress.advance(task)
        yield engine


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
            "yes" if _tokens(generations) == _tokens(truth[: len(generations)]) else "NO",
        )
    return table


def _problems(runs: dict[str, list[Generation]], external_hits: float) -> list[str]:
    whole_blocks = SHARED_TOKENS // TOKENS_PER_BLOCK * TOKENS_PER_BLOCK
    problems = []
    if external_hits < whole_blocks * NUM_PROMPTS:
        problems.append(f"kvxfer gave back {external_hits:.0f} tokens only")
    for name, generations in runs.items():
        if _tokens(generations) != _tokens(runs["computed"][: len(generations)]):
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
