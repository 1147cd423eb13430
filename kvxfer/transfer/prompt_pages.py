"""Pages of a prompt that are to be fetched from another engine, and what arrived of them."""

from collections import Counter
from dataclasses import dataclass, field

from kvxfer.storage.keys import BlockKey


@dataclass(frozen=True, slots=True)
class Wanted:
    """Pages to fetch.

    Attributes:
        keys: Keys of the other engine's blocks, for each group, consecutive in the prompt.
        first_blocks: Index in the prompt of the first of them, in blocks of the other engine.
        block_ids: Our blocks of each group, from the beginning of the prompt; the null block for
            those that are not wanted.
        first_token: First token that is wanted.
        num_tokens: Tokens of the prompt up to the last one that is wanted.
        tokens_per_block: Tokens of a block of the other engine, for each group.
    """

    keys: list[list[BlockKey]]
    first_blocks: list[int]
    block_ids: list[list[int]]
    first_token: int
    num_tokens: int
    tokens_per_block: tuple[int, ...]


@dataclass(slots=True)
class Fetched:
    """What arrived of a fetch.

    Attributes:
        bad_blocks: Our blocks of each group that have not arrived wholly: their bytes are
            undefined.
        num_verified: Blocks of the other engine that arrived and were verified.
        num_bytes: Their bytes.
        missing: Those that did not arrive, counted by the status of their outcome.
        reason: Reason of one of them; empty where there is none.
        memory_safe: Whether nothing writes to our blocks any more. False where a read stalled that
            even a restart of NIXL has not ended: keep them out of use until `Handover.drain`, or
            the end of the exchange.
    """

    bad_blocks: list[list[int]]
    num_verified: int = 0
    num_bytes: int = 0
    missing: Counter[str] = field(default_factory=Counter)
    reason: str = ""
    memory_safe: bool = True
