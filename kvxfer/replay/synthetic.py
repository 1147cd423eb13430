"""Synthetic traces: chats, agents and retrieval, made from a seed and a few sizes."""

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from kvxfer.checks import require_integer
from kvxfer.errors import InvalidArgumentError
from kvxfer.replay.trace import Trace, TraceError, make_trace
from kvxfer.settings import convert_settings
from kvxfer.telemetry.trace_recorder import TraceLine

MAX_BLOCKS = 50_000_000
"""Maximum number of blocks in all prompts together, some gigabytes of memory."""

_SIZES: Mapping[str, tuple[float, float]] = {
    "requests": (1, 10**7),
    "requests_per_s": (1e-6, 1e9),
    "forks": (0, 1),
    "popularity": (0, 20),
    **dict.fromkeys(("system_tokens", "task_tokens"), (0, 10**7)),
    "think_s": (0, 1e9),
    **dict.fromkeys(("system_prompts", "turns", "documents", "retrieved"), (1, 10**6)),
}
"""Minimum and maximum of each size; `_TOKENS` is for all others."""

_TOKENS = 1, 10**7


class Workload(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sizes of all workloads; lengths and times are averages, except `system_tokens`.

    Attributes:
        system_tokens: Tokens of a system prompt, with which prompts begin.
        output_tokens: Tokens of an answer.

    Raises:
        InvalidArgumentError: A size is out of range.
    """

    requests: int = 5000
    requests_per_s: float = 2
    system_tokens: int = 1000
    output_tokens: int = 400

    def __post_init__(self) -> None:
        """Check that sizes are within their bounds."""
        for name in self.__struct_fields__:
            least, most = _SIZES.get(name, _TOKENS)
            value = getattr(self, name)
            if not least <= value <= most:
                raise InvalidArgumentError(name, value, f"{least:,} to {most:,}")


class MultiTurn(Workload, frozen=True, kw_only=True):
    """Chats: each prompt is the chat so far, after one of a few system prompts.

    Attributes:
        task_tokens: Tokens with which a chat begins, after the system prompt; 0 for none.
        turns: Turns of a chat and its forks.
        user_tokens: Tokens of a question, or of the result of a tool.
        think_s: Seconds from an answer to the next question.
        forks: Share of the turns after which a second chat continues from the same prompt.
    """

    system_prompts: int = 4
    task_tokens: int = 0
    turns: float = 5
    user_tokens: int = 400
    think_s: float = 60
    forks: float = 0


class Agentic(MultiTurn, frozen=True, kw_only=True):
    """Agents: chats with tools, long instructions and many short turns, some of which fork."""

    system_tokens: int = 8000
    output_tokens: int = 150
    system_prompts: int = 3
    task_tokens: int = 500
    turns: float = 15
    user_tokens: int = 800
    think_s: float = 5
    forks: float = 0.05


class Rag(Workload, frozen=True, kw_only=True):
    """Retrieval: documents of very different popularity, and a question after them.

    Attributes:
        retrieved: Documents per prompt.
        popularity: Exponent of Zipf's law by which documents are chosen.
    """

    system_tokens: int = 500
    output_tokens: int = 300
    documents: int = 2000
    document_tokens: int = 2000
    retrieved: int = 3
    popularity: float = 1.1
    question_tokens: int = 60


WORKLOADS: Mapping[str, type[MultiTurn | Rag]] = {
    "multi-turn": MultiTurn,
    "agentic": Agentic,
    "rag": Rag,
}
"""Kinds of synthetic traces by their names."""


def parse_workload(text: str) -> MultiTurn | Rag:
    """Parse a workload such as `multi-turn,requests=1500,think_s=300`."""
    kind, *sizes = text.split(",")
    if kind not in WORKLOADS:
        raise InvalidArgumentError("synthetic", text, f"one of {', '.join(WORKLOADS)}, and sizes")
    settings, what = name_sizes("synthetic", text, sizes), f"sizes of {kind}"
    return convert_settings("synthetic", settings, WORKLOADS[kind], what=what, shown_as=text)


def name_sizes(argument: str, text: str, sizes: Sequence[str]) -> dict[str, str]:
    """Parse sizes such as `requests=1500`; refuse one that is given twice."""
    named = {name: value for name, _, value in (size.partition("=") for size in sizes)}
    if len(named) < len(sizes):
        raise InvalidArgumentError(argument, text, "each size once")
    return named


def make_synthetic(
    workload: MultiTurn | Rag, *, seed: int = 0, tokens_per_block: int = 64
) -> Trace:
    """Make a synthetic trace; the same arguments give the same trace.

    As in engines, only whole blocks have numbers: tokens after the last one are always computed.
    """
    seed = require_integer("seed", seed)
    kind = next(name for name, each in WORKLOADS.items() if type(workload) is each)
    name = f"synthetic {kind}, seed {seed}"
    source, prompts = np.random.default_rng(seed), _Prompts(name, tokens_per_block)
    if isinstance(workload, Rag):
        return make_trace(name, list(_retrieve(workload, source, prompts)))
    return make_trace(name, list(_chat(workload, source, prompts)))


@dataclass(frozen=True, slots=True)
class _Prompt:
    """Prompt: the number of each whole block, and the texts that begin after the last one."""

    blocks: tuple[int, ...] = ()
    tail: tuple[int, ...] = ()
    num_tokens: int = 0


@dataclass(slots=True)
class _Prompts:
    """Prompts of a trace, which share blocks as far as their texts are equal.

    Attributes:
        num_used: Blocks of all requests so far.
    """

    trace: str
    tokens_per_block: int
    num_texts: int = 0
    num_used: int = 0
    _numbers: dict[tuple[int, tuple[int, ...]], int] = field(default_factory=dict)

    def new_text(self) -> int:
        """Return the number of a text that occurs nowhere else."""
        self.num_texts += 1
        return self.num_texts

    def append(self, prompt: _Prompt, num_tokens: int, text: int | None = None) -> _Prompt:
        """Append a text, by default a new one; a text has the same number of tokens every time."""
        num_tokens += prompt.num_tokens
        num_blocks = num_tokens // self.tokens_per_block
        self._require_room(len(self._numbers) + num_blocks - len(prompt.blocks))
        blocks = [*prompt.blocks]
        tail = (*prompt.tail, self.new_text() if text is None else text)
        while len(blocks) < num_blocks:
            # The previous block determines which text continues, and from where.
            name = blocks[-1] if blocks else -1, tail
            blocks.append(self._numbers.setdefault(name, len(self._numbers)))
            tail = ()
        return _Prompt(tuple(blocks), tail, num_tokens)

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
    """Draw a length of at least one token: mostly short, sometimes several times the mean."""
    return 1 + int(source.exponential(max(mean - 1, 0)))


def _chat(chats: MultiTurn, source: np.random.Generator, prompts: _Prompts) -> Iterator[TraceLine]:
    """Make the requests of all chats, in the order of their arrival."""
    heads = [prompts.append(_Prompt(), chats.system_tokens) for _ in range(chats.system_prompts)]
    ends = 1 - (1 - 1 / chats.turns) / (1 + chats.forks)
    between_s = chats.turns / chats.requests_per_s
    next_chat_s = source.exponential(between_s)
    waiting: list[tuple[float, int, _Prompt]] = []
    for number in range(chats.requests):
        if not waiting or next_chat_s < waiting[0][0]:
            arrival_s, head = next_chat_s, heads[source.integers(len(heads))]
            if chats.task_tokens:
                head = prompts.append(head, _tokens(source, chats.task_tokens))
            next_chat_s += source.exponential(between_s)
        else:
            arrival_s, _, head = heapq.heappop(waiting)
        prompt = prompts.append(head, _tokens(source, chats.user_tokens))
        num_answered = _tokens(source, chats.output_tokens)
        if source.random() >= ends:
            num_next = 2 if chats.forks and source.random() < chats.forks else 1
            later = prompts.append(prompt, num_answered)
            for index in range(num_next):
                pause_s = source.exponential(chats.think_s)
                heapq.heappush(waiting, (arrival_s + pause_s, 2 * number + index, later))
        yield prompts.request(arrival_s, prompt, num_answered)


def _retrieve(workload: Rag, source: np.random.Generator, prompts: _Prompts) -> Iterator[TraceLine]:
    """Make requests of retrieved documents and a question after them."""
    system = prompts.append(_Prompt(), workload.system_tokens)
    texts = [prompts.new_text() for _ in range(workload.documents)]
    lengths = [_tokens(source, workload.document_tokens) for _ in texts]
    weights = np.arange(1, workload.documents + 1) ** -float(workload.popularity)
    weights /= weights.sum()
    number = min(workload.retrieved, workload.documents)
    arrival_s = 0.0
    for _ in range(workload.requests):
        arrival_s += source.exponential(1 / workload.requests_per_s)
        prompt = system
        for document in source.choice(workload.documents, number, replace=False, p=weights):
            prompt = prompts.append(prompt, lengths[document], texts[document])
        prompt = prompts.append(prompt, _tokens(source, workload.question_tokens))
        yield prompts.request(arrival_s, prompt, _tokens(source, workload.output_tokens))
