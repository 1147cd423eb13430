"""Synthetic traces: chats, agents and retrieval, made of a seed and a few sizes."""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

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

    Raises:
        InvalidArgumentError: The seed is negative.
        TraceError: The prompts are too short for a block, or have more than `MAX_BLOCKS`.
    """
    seed = require_integer("seed", seed)
    kind = next(name for name, each in WORKLOADS.items() if isinstance(workload, each))
    name = f"synthetic {kind}, seed {seed}"
    source = np.random.default_rng(seed)
    blocks = _Blocks(name, tokens_per_block)
    if isinstance(workload, Rag):
        return make_trace(name, list(_rag(workload, source, blocks)))
    return make_trace(name, list(_sessions(workload, source, blocks)))


@dataclass(frozen=True, slots=True)
class _Prompt:
    """Prompt as a chain of blocks, and what is behind the last whole one.

    Attributes:
        blocks: Number of each whole block.
        tail: Pieces of text behind them: `(text, first token, tokens)`.
    """

    blocks: tuple[int, ...] = ()
    tail: tuple[tuple[int, int, int], ...] = ()
    num_tokens: int = 0


@dataclass(slots=True)
class _Blocks:
    """Numbers of blocks: equal ones for equal texts up to their end.

    Attributes:
        num_texts: Texts that were made so far.
        num_used: Blocks of all requests so far.
    """

    trace: str
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
        self._require_room(len(self._numbers) + (num_tail + num_tokens) // size)
        while num_tail + num_tokens - first >= size:
            taken = size - num_tail
            parent = chain[-1] if chain else -1
            name = (parent, *tail, (text, first, taken))
            chain.append(self._numbers.setdefault(name, len(self._numbers)))
            first, tail, num_tail = first + taken, (), 0
        if first < num_tokens:
            tail = (*tail, (text, first, num_tokens - first))
        return _Prompt(tuple(chain), tail, prompt.num_tokens + num_tokens)

    def request(self, arrival_s: float, prompt: _Prompt, output_tokens: int) -> TraceLine:
        """Make the line of a request in a trace."""
        self.num_used += len(prompt.blocks)
        self._require_room(self.num_used)
        return TraceLine(
            timestamp=round(1000 * arrival_s, 3),
            input_length=prompt.num_tokens,
            output_length=output_tokens,
            hash_ids=list(prompt.blocks),
            tokens_per_block=self.tokens_per_block,
        )

    def _require_room(self, num_blocks: int) -> None:
        if num_blocks > MAX_BLOCKS:
            problem = f"more than {MAX_BLOCKS:,} blocks; expected fewer or shorter prompts"
            raise TraceError(self.trace, problem)


def _tokens(source: np.random.Generator, mean: float) -> int:
    """Draw a length: at least one token, most of them short, some several times as long."""
    return 1 + int(source.exponential(max(mean - 1, 0)))


def _sessions(
    workload: MultiTurn | Agentic, source: np.random.Generator, blocks: _Blocks
) -> Iterator[TraceLine]:
    """Make the requests of chats, or of agents, which are chats with a task that fork."""
    if isinstance(workload, MultiTurn):
        num_heads, num_requests = workload.system_prompts, workload.turns
        input_tokens, pause_s = workload.user_tokens, workload.think_s
        task_tokens, forks = 0, 0.0
    else:
        num_heads, num_requests = workload.agents, workload.steps
        input_tokens, pause_s = workload.tool_tokens, workload.tool_s
        task_tokens, forks = workload.task_tokens, workload.forks
    heads = [
        blocks.append(_Prompt(), blocks.new_text(), workload.system_tokens)
        for _ in range(num_heads)
    ]
    ends = 1 - (1 - 1 / num_requests) / (1 + forks)
    between_s = num_requests / workload.requests_per_s
    next_session_s = source.exponential(between_s)
    waiting: list[tuple[float, int, _Prompt]] = []
    for number in range(workload.requests):
        if not waiting or next_session_s < waiting[0][0]:
            arrival_s, head = next_session_s, heads[source.integers(len(heads))]
            if task_tokens:
                task = _tokens(source, task_tokens)
                head = blocks.append(head, blocks.new_text(), task)
            next_session_s += source.exponential(between_s)
        else:
            arrival_s, _, head = heapq.heappop(waiting)
        prompt = blocks.append(head, blocks.new_text(), _tokens(source, input_tokens))
        answer = _tokens(source, workload.output_tokens)
        if source.random() >= ends:
            num_next = 2 if forks and source.random() < forks else 1
            later = blocks.append(prompt, blocks.new_text(), answer)
            for index in range(num_next):
                pause = source.exponential(pause_s)
                heapq.heappush(waiting, (arrival_s + pause, 2 * number + index, later))
        yield blocks.request(arrival_s, prompt, answer)


def _rag(workload: Rag, source: np.random.Generator, blocks: _Blocks) -> Iterator[TraceLine]:
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
        yield blocks.request(arrival_s, prompt, _tokens(source, workload.output_tokens))
