"""Asking: which pages of a prompt another engine lends, and for how long it keeps them."""

import asyncio
import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from kvxfer.backends.nixl import Endpoint, Exchange
from kvxfer.errors import CacheMismatchError
from kvxfer.kvcache.portable import CacheDescription, map_peers
from kvxfer.storage.keys import BlockKey
from kvxfer.storage.leases import Held
from kvxfer.storage.prompt_keys import PromptKeys
from kvxfer.transfer.peer_engine import MAX_MATCHES, PeerEngine
from kvxfer.transfer.prompt_pages import Wanted

LOOK_S = 0.01
"""Time between two looks for a ticket that is not known yet."""

SETTLE_S = 0.25
"""Time that a ticket may take from the answer of the other engine's server to its workers, unless
they know of it before its blocks are offered."""

MAX_ENGINES = 256
"""Most engines whose workers are remembered: tickets, which come from outside, name them."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Found:
    """Pages of a prompt that another engine lends.

    Attributes:
        num_tokens: Tokens from the beginning of the prompt whose pages are there, or will be.
        is_complete: Whether they are there now.
        tokens_per_block: Tokens of a block of the other engine, for each group.
        our_tokens_per_block: Tokens of a block of ours, likewise.
        has_states: Whether a block of a group is a state, likewise.
    """

    num_tokens: int
    is_complete: bool
    tokens_per_block: tuple[int, ...]
    our_tokens_per_block: tuple[int, ...]
    has_states: tuple[bool, ...]

    def wanted(
        self,
        prompt: PromptKeys,
        first_token: int,
        num_tokens: int,
        block_ids: Sequence[Sequence[int]],
        *,
        null_block_id: int | None = 0,
    ) -> Wanted:
        """Name the blocks of the other engine that have the pages of our blocks.

        Args:
            prompt: Keys of the prompt.
            first_token: First token that is wanted.
            num_tokens: Tokens of the prompt up to the last one that is wanted.
            block_ids: Our blocks of each group, from the beginning of the prompt; the null block
                for those that are not wanted. Of a state the one that is to have it after
                `num_tokens`.
            null_block_id: Id of our null block; None where there is none.
        """
        firsts, keys, kept = [], [], []
        for group, (theirs, ours, is_state) in enumerate(
            zip(self.tokens_per_block, self.our_tokens_per_block, self.has_states, strict=True)
        ):
            begin = first_token // ours
            ids = block_ids[group]
            used = (at for at in range(begin, len(ids)) if ids[at] != null_block_id)
            first = max(first_token, next(used, len(ids)) * ours)
            stop = min(-(-num_tokens // theirs) * theirs, prompt.num_tokens)
            first = min(first, stop)
            keys.append(
                [prompt.state_key(group, num_tokens)]
                if is_state
                else prompt.block_keys(group, theirs, stop, first_token=first)
            )
            firsts.append(first // theirs)
            skipped = ids[:begin] if null_block_id is None else [null_block_id] * begin
            kept.append([*skipped, *ids[begin:]])
        return Wanted(
            keys=keys,
            first_blocks=firsts,
            block_ids=kept,
            first_token=first_token,
            num_tokens=num_tokens,
            tokens_per_block=self.tokens_per_block,
        )


class Asker:
    """Asker of other engines for the pages of prompts.

    Args:
        exchange: Exchange by which they are asked.
        description: Description of our caches.
        timeout_s: Time that a question may take.
    """

    def __init__(
        self, exchange: Exchange, description: CacheDescription, *, timeout_s: float
    ) -> None:
        self._exchange = exchange
        self._description = description
        self._timeout_s = timeout_s
        self._workers: dict[Endpoint, list[Endpoint]] = {}  # asked last comes last
        self._fitting = functools.lru_cache(MAX_MATCHES)(self._fit)

    async def ask(
        self,
        endpoint: Endpoint,
        ticket: str,
        prompt: PromptKeys,
        windows: Sequence[int | None] = (),
        *,
        waits: bool = False,
    ) -> Found:
        """See `Handover.ask`."""
        async with asyncio.timeout(self._timeout_s):
            return await self._ask(endpoint, ticket, prompt, windows, waits=waits)

    async def _ask(
        self,
        endpoint: Endpoint,
        ticket: str,
        prompt: PromptKeys,
        windows: Sequence[int | None],
        *,
        waits: bool,
    ) -> Found:
        engine = self._fitting(await self._exchange.peer(endpoint).describe())
        theirs = engine.description
        workers = engine.workers(endpoint)
        self._workers.pop(endpoint, None)
        if len(self._workers) >= MAX_ENGINES:
            del self._workers[next(iter(self._workers))]
        self._workers[endpoint] = workers
        windows = [*windows, *[None] * len(theirs.groups)][: len(theirs.groups)]
        num_tokens = prompt.num_tokens
        keys = [
            [prompt.state_key(group, num_tokens)]
            if theirs.groups[group].has_states
            else prompt.block_keys(
                group,
                theirs.groups[group].tokens_per_block,
                num_tokens,
                first_token=0 if window is None else max(num_tokens - window, 0),
            )
            for group, window in enumerate(windows)
        ]
        wanted = [key for each in keys for key in each]
        at_workers = [engine.worker_keys(rank, wanted) for rank in range(len(workers))]
        held = await self._hold(workers, ticket, at_workers)
        loop = asyncio.get_running_loop()
        stop = loop.time() + (self._timeout_s if waits else SETTLE_S)
        while not held.is_known and not all(held.there) and loop.time() < stop:
            await asyncio.sleep(LOOK_S)
            held = await self._hold(workers, ticket, at_workers)
        is_promised = held.is_known and not held.is_complete
        return Found(
            num_tokens=num_tokens
            if is_promised
            else _count(held.there, keys, theirs, windows, prompt),
            is_complete=not is_promised,
            tokens_per_block=engine.tokens_per_block,
            our_tokens_per_block=tuple(g.tokens_per_block for g in self._description.groups),
            has_states=tuple(g.has_states for g in self._description.groups),
        )

    async def release(self, endpoint: Endpoint, ticket: str) -> None:
        """See `Handover.release`."""
        workers = self._workers.get(endpoint, [endpoint])
        releases = (self._exchange.peer(worker).release([ticket]) for worker in workers)
        for failed in await asyncio.gather(*releases, return_exceptions=True):
            if isinstance(failed, BaseException):
                logger.debug("%s was not released at %s: %r", ticket, endpoint, failed)

    def _fit(self, description: bytes) -> PeerEngine:
        """Check that each group of another engine can be turned into ours; errors as `ask`."""
        ours, engine = self._description, PeerEngine(description)
        theirs = engine.description
        if len(theirs.groups) != len(ours.groups):
            raise CacheMismatchError(None, "groups", len(ours.groups), len(theirs.groups))
        for group, each in enumerate(ours.groups):
            map_peers([each.payload_size_bytes], group, ours, [theirs])
        return engine

    async def _hold(
        self, workers: Sequence[Endpoint], ticket: str, keys: Sequence[Sequence[BlockKey]]
    ) -> Held:
        """Hold a ticket at every worker; what one of them lacks is not there."""
        every = await asyncio.gather(
            *(
                self._exchange.peer(worker).hold(ticket, each)
                for worker, each in zip(workers, keys, strict=True)
            )
        )
        return Held(
            is_known=all(held.is_known for held in every),
            is_complete=all(held.is_complete for held in every),
            there=[all(at) for at in zip(*(held.there for held in every), strict=True)],
        )


def _count(
    there: Sequence[bool],
    keys: Sequence[Sequence[BlockKey]],
    theirs: CacheDescription,
    windows: Sequence[int | None],
    prompt: PromptKeys,
) -> int:
    """Count the tokens from the beginning of a prompt whose pages are all there."""
    if all(there):
        return prompt.num_tokens
    if len(keys) > 1 or windows[0] is not None:  # windows of a shorter prompt were not asked for
        return 0
    return there.index(False) * theirs.groups[0].tokens_per_block
