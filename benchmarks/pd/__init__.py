"""Benchmark `make bench NAME=pd`: prompts handed from prefill to decode engines."""

from benchmarks.pd.engines import measure_engines
from benchmarks.pd.moves import measure_moves
from benchmarks.report import BenchRow
from benchmarks.vllm.model import find_model


def run(*, quick: bool) -> list[BenchRow]:
    """Measure hand-overs of blocks between two processes and, unless `quick`, between real engines.

    The model of the engines is that of `make bench NAME=vllm`; see `find_model`.

    Raises:
        FileNotFoundError: There is no model.
        EngineDiedError: An engine did not start, or failed.
        RuntimeError: Blocks or prompts did not arrive, or the other process failed.
    """
    if quick:
        return measure_moves(rounds=3)
    model = find_model()
    return measure_moves(rounds=15) + measure_engines(model, rounds=5)
