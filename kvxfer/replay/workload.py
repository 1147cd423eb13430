"""Workloads of synthetic traces: kinds, and the sizes of each."""

from collections.abc import Mapping

import msgspec

from kvxfer.errors import InvalidArgumentError
from kvxfer.settings import convert_settings


class _Workload(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sizes that all kinds have; lengths and times are averages.

    Attributes:
        system_tokens: Tokens of what a prompt begins with, the same for all that have it.
        output_tokens: Tokens of an answer.

    Raises:
        InvalidArgumentError: A size is out of range.
    """

    requests: int = 5000
    requests_per_s: float = 2
    system_tokens: int = 1000
    output_tokens: int = 400

    def __post_init__(self) -> None:
        """Check that sizes are within what can be computed."""
        for name in self.__struct_fields__:
            least, most = _SIZES.get(name, _TOKENS)
            value = getattr(self, name)
            if not least <= value <= most:
                raise InvalidArgumentError(name, value, f"{least:,} to {most:,}")


class MultiTurn(_Workload, frozen=True, kw_only=True):
    """Chats: each prompt is the chat so far, behind one of a few system prompts.

    Attributes:
        turns: Turns of a chat.
        user_tokens: Tokens of a question.
        think_s: Seconds from an answer to the next question.
    """

    system_prompts: int = 4
    turns: float = 5
    user_tokens: int = 400
    think_s: float = 60


class Agentic(_Workload, frozen=True, kw_only=True):
    """Agents: long common instructions, many short steps, and tasks that fork.

    Attributes:
        agents: Kinds of agents, each with its own instructions and tools.
        steps: Steps of a task and its forks.
        tool_tokens: Tokens of what a tool returns.
        forks: Share of the steps after which a second agent goes on from the same prompt.
        tool_s: Seconds from a step to the next.
    """

    system_tokens: int = 8000
    output_tokens: int = 150
    agents: int = 3
    task_tokens: int = 500
    steps: float = 15
    tool_tokens: int = 800
    forks: float = 0.05
    tool_s: float = 5


class Rag(_Workload, frozen=True, kw_only=True):
    """Retrieval: documents of very different popularity, and a question after them.

    Attributes:
        retrieved: Documents of a prompt.
        popularity: Exponent of Zipf's law by which documents are chosen.
    """

    system_tokens: int = 500
    output_tokens: int = 300
    documents: int = 2000
    document_tokens: int = 2000
    retrieved: int = 3
    popularity: float = 1.1
    question_tokens: int = 60


Workload = MultiTurn | Agentic | Rag

WORKLOADS: Mapping[str, type[Workload]] = {"multi-turn": MultiTurn, "agentic": Agentic, "rag": Rag}
"""Kinds of synthetic traces by their names."""

_SIZES: Mapping[str, tuple[float, float]] = {
    "requests": (1, 10**7),
    "requests_per_s": (1e-6, 1e9),
    "forks": (0, 1),
    "popularity": (0, 20),
    "system_tokens": (0, 10**7),
    **dict.fromkeys(("think_s", "tool_s"), (0, 1e9)),
    **dict.fromkeys(("system_prompts", "agents", "documents", "retrieved"), (1, 10**6)),
    **dict.fromkeys(("turns", "steps"), (1, 10**6)),
}
"""Least and most of each size; of other numbers of tokens those below."""

_TOKENS = 1, 10**7


def parse_workload(kind: str, settings: Mapping[str, str]) -> Workload:
    """Make a workload of its name and of sizes as texts.

    Raises:
        InvalidArgumentError: There is no such kind or size, or a size is no number or out of range.
    """
    if kind not in WORKLOADS:
        raise InvalidArgumentError("synthetic", kind, f"one of {', '.join(WORKLOADS)}")
    return convert_settings("set", settings, WORKLOADS[kind], what=f"sizes of {kind}")
