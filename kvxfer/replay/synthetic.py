"""Synthetic traces: chats, agents and retrieval, made of a seed and a few sizes."""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from kvxfer.checks import require_integer
from kvxfer.replay.trace import Trace, TraceError, make_trace
from kvxfer.replay.workload import WORKLOADS, Agentic, MultiTurn, Rag, Workload
from kvxfer.telemetry.trace_recorder import TraceLine

MAX_BLOCKS = 50_000_000
"""Most blocks of all prompts together, some gigabytes of this process."""


def make_synthetic(workload: Workload, *, seed: int = 0, tokens_per_block: int = 64) -> Trace:
    """Make a synthetic trace; the same arguments give the same trace.

    Only whole blocks have numbers, as in engines: the tokens behind the last one are computed.

    Args:
        workload: Kind and sizes.
        seed: Seed of what is random.
        tokens_per_block: Tokens of a block.

    Raises:
        InvalidArgumentError: The seed is negative.
        TraceError: The prompts are too short for a block, or have more than `MAX_BLOCKS`.
    """
    seed = require_integer("seed", seed)
    kind = next(name for name, each in WORKLOADS.items() if isinstance(workload, each))
    name = f"synthetic {kind}, seed {seed}"
    source = np.random.default_rng(seed)
    blocks = _Blocks(tokens_per_block)
    try:
        requests = _requests(workload, source, blocks)
        lines = [_line(request, blocks) for request in requests]
    except _TooManyBlocksError as exc:
        problem = f"more than {MAX_BLOCKS:,} blocks; expected fewer or shorter prompts"
        raise TraceError(name, problem) from exc
    return make_trace(name, lines)


class _TooManyBlocksError(Exception):
    """More blocks than a trace may have."""


@dataclass(frozen=True, slots=True)
class _Prompt:
    """Prompt as a chain of blocks, and what is behind the last whole one.

    Attributes:
        blocks: Number of each whole block.
        tail: Pieces of text behind them: `(text, first token, tokens)`.
        num_tokens: Tokens in all.
    """

    blocks: tuple[int, ...] = ()
    tail: tuple[tuple[int, int, int], ...] = ()
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class _Request:
    arrival_s: float
    prompt: _Prompt
    output_tokens: int


@dataclass(slots=True)
class _Blocks:
    """Numbers of blocks: equal ones for equal texts up to their end.

    Attributes:
        tokens_per_block: Tokens of a block.
        num_texts: Texts that were made so far.
        num_used: Blocks of all requests so far.
    """

    tokens_per_block: int
    num_texts: int = 0
    num_used: int = 0
    _numbers: dict[Any, int] = field(default_factory=dict)

    def new_text(self) -> int:
        """Return the number of a text that occurs nowhere else."""
        self.num_texts += 1
        return self.num_texts

    def append(self, prompt: _Prompt, text: int, num_tokens: int) -> _Prompt:
        """Append a text of so many tokens to a prompt."""
        chain, tail = list(prompt.blocks), prompt.tail
        first, size = 0, self.tokens_per_block
        num_tail = sum(piece[2] for piece in tail)
        if len(self._numbers) + (num_tail + num_tokens) // size > MAX_BLOCKS:
            raise _TooManyBlocksError
        while num_tail + num_tokens - first >= size:
            taken = size - num_tail
            parent = chain[-1] if chain else -1
            name = (parent, *tail, (text, first, taken))
            chain.append(self._numbers.setdefault(name, len(self._numbers)))
            first, tail, num_tail = first + taken, (), 0
        if first < num_tokens:
            tail = (*tail, (text, first, num_tokens - first))
        return _Prompt(tuple(chain), tail, prompt.num_tokens + num_tokens)


def _requests(
    workload: Workload, source: np.random.Generator, blocks: _Blocks
) -> Iterator[_Request]:
    if isinstance(workload, Rag):
        return _rag(workload, source, blocks)
    return _sessions(workload, _Sessions.of(workload), source, blocks)


def _line(request: _Request, blocks: _Blocks) -> TraceLine:
    prompt = request.prompt
    blocks.num_used += len(prompt.blocks)
    if blocks.num_used > MAX_BLOCKS:
        raise _TooManyBlocksError
    return TraceLine(
        timestamp=round(1000 * request.arrival_s, 3),
        input_length=prompt.num_tokens,
        output_length=request.output_tokens,
        hash_ids=list(prompt.blocks),
        tokens_per_block=blocks.tokens_per_block,
    )


def _tokens(source: np.random.Generator, mean: float) -> int:
    """Draw a length: at least one token, most of them short, some several times as long."""
    return 1 + int(source.exponential(max(mean - 1, 0)))


class _Sessions(NamedTuple):
    """Sizes of chats, and of agents, which are chats that fork.

    Attributes:
        num_heads: Texts of which each session begins with one.
        task_tokens: Tokens behind it, of the session's own.
        num_requests: Requests of a session and its forks.
        forks: Share of the requests after which two go on.
        input_tokens: Tokens that each request adds.
        pause_s: Seconds between two requests.
    """

    num_heads: int
    task_tokens: int
    num_requests: float
    forks: float
    input_tokens: int
    pause_s: float

    @classmethod
    def of(cls, kind: MultiTurn | Agentic) -> "_Sessions":
        """Find the sizes, which are averages."""
        if isinstance(kind, MultiTurn):
            return cls(kind.system_prompts, 0, kind.turns, 0, kind.user_tokens, kind.think_s)
        more = kind.steps, kind.forks, kind.tool_tokens, kind.tool_s
        return cls(kind.agents, kind.task_tokens, *more)


def _sessions(
    workload: MultiTurn | Agentic,
    sizes: _Sessions,
    source: np.random.Generator,
    blocks: _Blocks,
) -> Iterator[_Request]:
    """Make the requests of sessions, in the order of their arrival."""
    heads = [
        blocks.append(_Prompt(), blocks.new_text(), workload.system_tokens)
        for _ in range(sizes.num_heads)
    ]
    ends = 1 - (1 - 1 / sizes.num_requests) / (1 + sizes.forks)
    between_s = sizes.num_requests / workload.requests_per_s
    next_session_s = source.exponential(between_s)
    waiting: list[tuple[float, int, _Prompt]] = []
    for number in range(workload.requests):
        if not waiting or next_session_s < waiting[0][0]:
            arrival_s, head = next_session_s, heads[source.integers(len(heads))]
            if sizes.task_tokens:
                task = _tokens(source, sizes.task_tokens)
                head = blocks.append(head, blocks.new_text(), task)
            next_session_s += source.exponential(between_s)
        else:
            arrival_s, _, head = heapq.heappop(waiting)
        prompt = blocks.append(head, blocks.new_text(), _tokens(source, sizes.input_tokens))
        answer = _tokens(source, workload.output_tokens)
        if source.random() >= ends:
            num_next = 2 if sizes.forks and source.random() < sizes.forks else 1
            later = blocks.append(prompt, blocks.new_text(), answer)
            for index in range(num_next):
                pause = source.exponential(sizes.pause_s)
                heapq.heappush(waiting, (arrival_s + pause, 2 * number + index, later))
        yield _Request(arrival_s, prompt, answer)


def _rag(workload: Rag, source: np.random.Generator, blocks: _Blocks) -> Iterator[_Request]:
    system = blocks.append(_Prompt(), blocks.new_text(), workload.system_tokens)
    texts = [blocks.new_text() for _ in range(workload.documents)]
    lengths = [_tokens(source, workload.document_tokens) for _ in texts]
    weights = np.arange(1, workload.documents + 1) ** -float(workload.popularity)
    weights /= weights.sum()
    number = min(workload.retrieved, workload.documents)
    arrival_s = 0.0
    for _ in range(workload.requests):
        arrival_s += source.exponential(1 / workload.requests_per_s)
        prompt = system
        for document in source.choice(workload.documents, number, replace=False, p=weights):
            prompt = blocks.append(prompt, texts[document], lengths[document])
        question = _tokens(source, workload.question_tokens)
        prompt = blocks.append(prompt, blocks.new_text(), question)
        yield _Request(arrival_s, prompt, _tokens(source, workload.output_tokens))
