"""Console of the demos: their options, the steps that they show, and how they end."""

import argparse
import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tests.e2e import oracle

NATIVE_BFLOAT16 = ("avx512_bf16", "amx_bf16", "bf16")

Step = Callable[[str, int], Callable[[], None]]
"""Show the beginning of a step with a number of parts; call the result after each part."""


def parse(
    name: str, text: str | None, plants: Sequence[str], arguments: Sequence[str] | None
) -> argparse.Namespace:
    """Parse the options of a demo: what the model computes in, and which fault is planted."""
    parser = argparse.ArgumentParser(prog=name, description=text)
    altered = f"alter a byte: of a {' or a '.join(plants)}; the demo has to fail"
    parser.add_argument("--plant", choices=plants, help=altered)
    parser.add_argument(
        "--dtype",
        choices=sorted(oracle.LOGPROB_TOLERANCE),
        default="bfloat16" if _has_native_bfloat16() else "float32",
        help="what the model computes in; bfloat16 by default where the processor has it",
    )
    return parser.parse_args(arguments)


def conclude(
    console: Console,
    table: Table,
    problems: Sequence[str],
    conclusion: Callable[[], str],
    what_next: str,
) -> int:
    """Show the result; return the exit status, 1 with problems."""
    console.print(table)
    for problem in problems:
        console.print(f"[red]{problem}")
    if not problems:
        console.print(conclusion())
        console.print(what_next, soft_wrap=True, highlight=False)
    return int(bool(problems))


@contextlib.contextmanager
def show_steps(console: Console) -> Iterator[Step]:
    """Show a bar for each step on a terminal, and a line elsewhere."""
    columns = TextColumn("{task.description:<45}"), BarColumn(None), MofNCompleteColumn()
    with Progress(
        *columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal
    ) as progress:

        def step(description: str, total: int) -> Callable[[], None]:
            if not console.is_terminal:
                console.print(f"{description} ...")
            task = progress.add_task(description, total=total)
            return lambda: progress.advance(task)

        yield step


def _has_native_bfloat16() -> bool:
    """Whether the CPU computes in bfloat16; others emulate it, several times slower."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith(("flags", "Features")):
            return not set(NATIVE_BFLOAT16).isdisjoint(line.split())
    return False
