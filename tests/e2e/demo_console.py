"""Console of the demos: their common option, and the steps that they show."""

import argparse
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tests.e2e import oracle

NATIVE_BFLOAT16 = ("avx512_bf16", "amx_bf16", "bf16")

Step = Callable[[str, int], Callable[[], None]]
"""Show the beginning of a step of so many parts; what it returns is called after each part."""


def add_dtype(parser: argparse.ArgumentParser) -> None:
    """Add the data type of the model to the options of a demo."""
    parser.add_argument(
        "--dtype",
        choices=sorted(oracle.LOGPROB_TOLERANCE),
        default="bfloat16" if _has_native_bfloat16() else "float32",
        help="what the model computes in; bfloat16 by default where the processor has it",
    )


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
