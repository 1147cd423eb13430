"""Traces of requests: which blocks each prompt consists of, in Mooncake's format."""

import itertools
import os
import select
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvxfer.errors import KVXferError
from kvxfer.settings import problem_of
from kvxfer.telemetry.trace_recorder import TraceLine

MAX_LINE_BYTES = 256 << 20
PIPE_TIMEOUT_S = 30.0


class TraceError(KVXferError, ValueError):
    """Trace that cannot be replayed; the error names it, and the line if one is to blame."""

    def __init__(self, source: str, problem: str) -> None:
        self.source = source
        self.problem = problem
        super().__init__(f"{source}: {problem}")


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """Requests in the order of their arrival, with all their blocks in one array.

    Attributes:
        name: Name for people: its file, or how it was made.
        tokens_per_block: Tokens of a block.
        timestamps_ms: float64 `(num_requests,)`, ascending.
        input_lengths: int64 `(num_requests,)`, tokens of each prompt.
        block_ids: int64 `(num_references,)`, 0 to `num_unique` - 1, numbered as they first occur.
        bounds: int64 `(num_requests + 1,)`; request r has `block_ids[bounds[r]:bounds[r + 1]]`.
    """

    name: str
    tokens_per_block: int
    timestamps_ms: NDArray[np.float64]
    input_lengths: NDArray[np.int64]
    block_ids: NDArray[np.int64]
    bounds: NDArray[np.int64]

    @property
    def num_requests(self) -> int:
        """Number of requests."""
        return len(self.timestamps_ms)

    @property
    def num_references(self) -> int:
        """Blocks of all requests together."""
        return len(self.block_ids)

    @property
    def num_unique(self) -> int:
        """Different blocks."""
        return int(self.block_ids.max()) + 1

    @property
    def duration_s(self) -> float:
        """Seconds from the first request to the last."""
        return float(self.timestamps_ms[-1] - self.timestamps_ms[0]) / 1000

    def requests(self) -> Iterator[list[int]]:
        """Iterate over the blocks of each request."""
        bounds = self.bounds.tolist()
        for start, stop in pairwise(bounds):
            yield self.block_ids[start:stop].tolist()


def read_trace(path: Path, *, tokens_per_block: int | None = None) -> Trace:
    """Read a trace, a `TraceLine` in each line; `tokens_per_block` overrides that of the lines."""
    decoder = msgspec.json.Decoder(TraceLine)
    lines: list[TraceLine] = []
    numbers: list[int] = []
    with open(path, "rb", opener=_open_readable) as file:
        for number in itertools.count(1):
            text = file.readline(MAX_LINE_BYTES + 1)
            if not text:
                break
            if text.isspace():
                continue
            if len(text) > MAX_LINE_BYTES:
                problem = f"more than {MAX_LINE_BYTES >> 20} MiB; expected a request"
                raise TraceError(f"{path}, line {number}", problem)
            try:
                lines.append(decoder.decode(text))
            except msgspec.MsgspecError as exc:
                raise TraceError(f"{path}, line {number}", _problem(text, exc)) from exc
            except (ValueError, RecursionError) as exc:  # not UTF-8, or nested too deeply
                raise TraceError(f"{path}, line {number}", str(exc)) from exc
            numbers.append(number)
    return make_trace(str(path), lines, tokens_per_block=tokens_per_block, line_numbers=numbers)


def _open_readable(path: str, flags: int) -> int:
    """Open a file; wait for the first bytes of a pipe, but at most `PIPE_TIMEOUT_S`."""
    opened = os.open(path, flags | os.O_NONBLOCK)
    if stat.S_ISFIFO(os.fstat(opened).st_mode):
        poll = select.poll()
        poll.register(opened, select.POLLIN)
        if not poll.poll(1000 * PIPE_TIMEOUT_S):
            os.close(opened)
            raise TraceError(path, f"nothing was written to the pipe for {PIPE_TIMEOUT_S:g} s")
    os.set_blocking(opened, True)
    return opened


def make_trace(
    name: str,
    lines: list[TraceLine],
    *,
    tokens_per_block: int | None = None,
    line_numbers: list[int] | None = None,
) -> Trace:
    """Make a trace of requests, in the order of their timestamps.

    `tokens_per_block` overrides that of the lines. Errors name lines by `line_numbers`, or count
    them from 1.
    """
    if not any(line.hash_ids for line in lines):
        raise TraceError(name, "no request has a block in `hash_ids`")
    numbers = np.arange(1, len(lines) + 1) if line_numbers is None else np.array(line_numbers)
    sizes = np.array([line.tokens_per_block for line in lines], np.int64)
    if tokens_per_block is None and len(np.unique(sizes)) > 1:
        at = int((sizes != sizes[0]).argmax())
        problem = f"tokens_per_block is {sizes[at]}; expected {sizes[0]} as in the lines before"
        raise TraceError(f"{name}, line {numbers[at]}", problem)
    timestamps = np.array([line.timestamp for line in lines], np.float64)
    order = np.argsort(timestamps, kind="stable")
    lines = [lines[index] for index in order.tolist()]
    lengths = np.array([len(line.hash_ids) for line in lines], np.int64)
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    ids = np.fromiter(
        (block for line in lines for block in line.hash_ids), np.int64, count=int(bounds[-1])
    )
    trace = Trace(
        name=name,
        tokens_per_block=tokens_per_block or int(sizes[0]),
        timestamps_ms=timestamps[order],
        input_lengths=np.array([line.input_length for line in lines], np.int64),
        block_ids=_number_by_occurrence(ids),
        bounds=bounds,
    )
    _check(trace, ids, numbers[order])
    return trace


def previous_references(trace: Trace) -> NDArray[np.int64]:
    """Find, for each reference, the previous one to the same block; -1 for the first one."""
    order = np.argsort(trace.block_ids, kind="stable")
    same = trace.block_ids[order[1:]] == trace.block_ids[order[:-1]]
    previous = np.full(len(order), -1, np.int64)
    previous[order[1:][same]] = order[:-1][same]
    return previous


def known_heads(trace: Trace, previous: NDArray[np.int64]) -> NDArray[np.int64]:
    """Count the known blocks at the head of each prompt, given `previous_references`."""
    new = np.append(np.flatnonzero(previous < 0), trace.num_references)
    begins, ends = trace.bounds[:-1], trace.bounds[1:]
    heads: NDArray[np.int64] = np.minimum(new[np.searchsorted(new, begins)], ends) - begins
    return heads


def count_ceiling(trace: Trace) -> int:
    """Count the hits of a cache that never evicts: known blocks at the head of each prompt."""
    return int(known_heads(trace, previous_references(trace)).sum())


def _number_by_occurrence(ids: NDArray[np.int64]) -> NDArray[np.int64]:
    _, first, inverse = np.unique(ids, return_index=True, return_inverse=True)
    rank = np.empty(len(first), np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    return rank[inverse]


def _check(trace: Trace, ids: NDArray[np.int64], numbers: NDArray[np.int64]) -> None:
    lengths = np.diff(trace.bounds)
    begin = np.repeat(trace.bounds[:-1], lengths)
    repeated = previous_references(trace) >= begin
    if repeated.any():
        at = int(repeated.argmax())
        request = int(np.searchsorted(trace.bounds, at, side="right")) - 1
        problem = f"hash_ids has {ids[at]} twice; expected each block of a prompt once"
        raise TraceError(f"{trace.name}, line {numbers[request]}", problem)
    fewest = trace.input_lengths // trace.tokens_per_block
    most = -(-trace.input_lengths // trace.tokens_per_block)
    wrong = (lengths < fewest) | (lengths > most)
    if wrong.any():
        at = int(wrong.argmax())
        problem = (
            f"input_length is {trace.input_lengths[at]}, and hash_ids has {lengths[at]} blocks; "
            f"expected {fewest[at]} or {most[at]} of {trace.tokens_per_block} tokens"
        )
        raise TraceError(f"{trace.name}, line {numbers[at]}", problem)


def _problem(text: bytes, error: msgspec.MsgspecError) -> str:
    """Name the field, and its value, that make a line invalid."""
    if not isinstance(error, msgspec.ValidationError):
        return str(error).replace("Input", "input")
    try:
        value: Any = msgspec.json.decode(text)
    except (ValueError, RecursionError):  # the rest of the line is broken, too
        value = None
    return problem_of(error, value, TraceLine)
