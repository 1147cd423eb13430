"""Prompt exchange: hand-over of prompts between engines, by their tokens and blocks."""

import asyncio
import contextlib
import logging
from collections.abc import Coroutine, Sequence
from typing import Any, Self, TypeVar

from numpy.typing import ArrayLike

from kvxfer.backends.nixl import Endpoint, NixlConfig
from kvxfer.checks import (
    require_instance,
    require_instances,
    require_integer,
    require_integers,
    require_one_per_group,
    require_text,
)
from kvxfer.errors import BackendUnavailableError, ClosedError, InvalidArgumentError
from kvxfer.kvcache.canonical import CanonicalKVCaches
from kvxfer.kvcache.portable import WorkerShard, describe_caches
from kvxfer.lending.handover import Handover, reachable_host
from kvxfer.lending.reader import Fetched, Wanted
from kvxfer.runtime import run_aside, wait_despite_cancel
from kvxfer.storage.calls import wait_for_mark
from kvxfer.storage.keys import BlockKey, Namespace
from kvxfer.storage.leases import make_ticket, require_ticket
from kvxfer.storage.observer import Observer, Reports
from kvxfer.storage.prompt_keys import PromptKeys

logger = logging.getLogger(__name__)

T = TypeVar("T")


class PromptExchange:
    """Exchange of prompts between engines: one lends the blocks it computed, another reads them.

    An engine *offers* the blocks of a prompt and gets a ticket, a text that it passes to another
    engine by any channel. That engine *fetches* the blocks of its own prompt into its own blocks:
    they are found by its tokens, whatever the ticket says, and verified. It *releases* the ticket,
    which otherwise ends with its lease. Use the exchange as an asynchronous context manager.

    All work runs on a thread of its own. An engine whose scheduler and workers are different
    processes uses `Handover`, on which this is built.

    Args:
        config: How engines reach each other; with `listen`, blocks are lent. The worker of rank r
            listens at the r-th port after that of `listen`.
        caches: Caches of this worker, from `canonicalize` or `allocate_canonical`.
        namespace: Identity of the model, without groups; engines with another one are refused.
        shard: Position of this worker in its model; default: the only worker.
        advertise: Host at which other engines reach `listen`; default: the host of `listen`.
        observers: Told which blocks were fetched, and asked for leases and connected peers.

    Raises:
        InvalidArgumentError: An argument is invalid.
        PageMappingError: The meaning of a group's bytes is not known.
    """

    def __init__(
        self,
        config: NixlConfig,
        caches: CanonicalKVCaches,
        namespace: Namespace,
        *,
        shard: WorkerShard | None = None,
        advertise: str = "",
        observers: Sequence[Observer] = (),
    ) -> None:
        require_instances("observers", observers, Observer)
        require_instance("config", config, NixlConfig)
        require_instance("caches", caches, CanonicalKVCaches)
        require_instance("namespace", namespace, Namespace)
        if shard is None:  # the only worker has all heads of its model
            heads = [getattr(spec, "num_kv_heads", 1) for spec in caches.group_specs]
            shard = WorkerShard(num_kv_heads=max(heads, default=1))
        require_instance("shard", shard, WorkerShard)
        self._host = reachable_host(config, require_text("advertise", advertise), shard.num_workers)
        if namespace.groups:
            raise InvalidArgumentError("namespace.groups", namespace.groups, "none")
        description = describe_caches(caches, shard)
        for group, described in enumerate(description.groups):
            if described.has_states:
                raise InvalidArgumentError("caches", f"states in group {group}", "tokens only")
        self._config = config
        self._rank = shard.rank
        self._null_block_id = caches.null_block_id
        self._sizes = [group.tokens_per_block for group in description.groups]
        self._windows = [getattr(spec, "sliding_window", None) for spec in caches.group_specs]
        self._handover = Handover(config.at_rank(shard.rank), namespace, description, caches)
        if self._handover.way:
            logger.info("exchange: %s", self._handover.way)
        self._lent: dict[str, set[object]] = {}  # offers of leases that `take_ended` has not told
        self._handover.observe(Reports(observers, "nixl"))

    async def __aenter__(self) -> Self:
        """Open NIXL and begin to listen.

        Raises:
            BackendUnavailableError: This process cannot listen at the address, or NIXL is required
                and cannot be used.
        """
        try:
            await run_aside("kvxfer-open", self._handover.start)
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End all tickets and calls; wait until nothing touches the caches. May be called again."""
        await run_aside("kvxfer-close", self._handover.close)

    async def offer(
        self,
        tokens: ArrayLike,
        block_ids: Sequence[ArrayLike],
        *,
        ticket: str = "",
        num_computed_tokens: int | None = None,
        scope: bytes = b"",
    ) -> str:
        """Lend the blocks of a prompt; return the ticket.

        The blocks must not change until `take_ended` has the ticket.

        If the only offer of a ticket is cancelled, nothing is lent under it. Blocks in GPU memory
        are lent once all work is done that was on the calling thread's current stream before the
        call.

        Args:
            tokens: Token ids of the prompt, integers, `(num_tokens,)`.
            block_ids: For each group, the blocks of the prompt from its beginning; the null block
                for those that are gone, as outside a sliding window. Further blocks are ignored.
            ticket: Ticket of an earlier offer with fewer tokens computed, or one that rank 0 got;
                by default a new one.
            num_computed_tokens: Number of computed tokens; default: all. With fewer, only whole
                blocks are lent, more may be offered under the ticket, and its lease does not run.
            scope: Anything else that changes the bytes of equal tokens, such as an adapter or salt.

        Raises:
            InvalidArgumentError: An argument is invalid, there is no `listen`, or our caches were
                freed or moved.
            BlockIdError: There is no such block.
            ClosedError: The exchange was closed.
            TimeoutError: The GPU did not finish that work within the configured `timeout_s`.
        """
        if not self._handover.port:
            rule = "HOST:PORT to lend blocks; with port 0, offer inside `async with`"
            raise InvalidArgumentError("listen", self._config.listen, rule)
        prompt = PromptKeys(tokens, scope=scope)
        ids = self._require_blocks(block_ids)
        stop = prompt.num_tokens if num_computed_tokens is None else num_computed_tokens
        stop = require_integer("num_computed_tokens", stop, maximum=prompt.num_tokens)
        ticket = require_text("ticket", ticket)
        lease = self._read(ticket)[1] if ticket else make_ticket()
        ticket, offer, lent = self._ticket(lease), object(), dict[BlockKey, int]()
        for group, size in enumerate(self._sizes):
            end = stop if stop == prompt.num_tokens else stop - stop % size
            named = zip(prompt.block_keys(group, size, end), ids[group], strict=False)
            lent.update((key, block) for key, block in named if block != self._null_block_id)

        async def lend() -> None:
            is_complete = stop == prompt.num_tokens
            self._handover.lend(lease, [*lent], [*lent.values()], is_complete=is_complete)
            self._lent.setdefault(lease, set()).add(offer)  # not before: earlier ends do not count

        async def take_back() -> None:
            offers = self._lent.get(lease, set())
            offers.discard(offer)
            if not offers:
                self._lent.pop(lease, None)
                await self._handover.withdraw([lease])

        async with asyncio.timeout(self._config.timeout_s):
            await wait_for_mark(self._handover.reader.mark())
        try:
            await self._run(lend())
        except BaseException:  # it was cancelled, perhaps once it had lent
            await self._run_if_open(take_back())
            raise
        return ticket

    async def ask(self, ticket: str, tokens: ArrayLike, *, scope: bytes = b"") -> int:
        """Ask how many tokens, from the beginning of a prompt, can be fetched.

        The other engine keeps their blocks until `release`. Under a ticket whose offers are not
        complete, blocks that are still to be offered count, too.

        Raises:
            InvalidArgumentError: The ticket is malformed, or its address is not a loopback address
                although neither a secret nor TLS proves peers.
            KVXferError: The other engine cannot be reached, has another model, or has blocks that
                cannot be turned into ours; the error names the field and both values.
            TimeoutError: The other engine did not answer in time.
        """
        endpoint, lease = self._read(ticket)
        prompt = PromptKeys(tokens, scope=scope)
        asking = self._handover.reader.ask(endpoint, lease, prompt, self._windows)
        try:
            return (await self._run(asking)).num_tokens
        except BaseException:
            await self._run_if_open(self._handover.reader.leave(endpoint, lease))
            raise

    async def fetch(
        self,
        ticket: str,
        tokens: ArrayLike,
        block_ids: Sequence[ArrayLike],
        *,
        first_token: int = 0,
        scope: bytes = b"",
    ) -> Fetched:
        """Read the blocks of a prompt into ours, also those that are computed meanwhile.

        The other engine keeps them until this ends; then the lease runs, unless `ask` keeps them.

        However this ends, nothing writes to our blocks then, unless `Fetched.memory_safe` is False.
        A cancelled call waits for that, at most for the configured timeouts if NIXL ends its reads.

        Args:
            ticket: Ticket from the other engine.
            tokens: Token ids of our prompt.
            block_ids: For each group, our blocks from the beginning of the prompt; the null block
                for those that are not wanted.
            first_token: First token that is wanted.
            scope: As for `offer`.

        Returns:
            The result, whose `bad_blocks` are those of our blocks that did not arrive completely.

        Raises: as `ask`, and
            InvalidArgumentError: Our caches were freed or moved.
            BlockIdError: We have no such block.
            DuplicateError: A block of ours appears twice.
        """
        endpoint, lease = self._read(ticket)
        prompt = PromptKeys(tokens, scope=scope)
        first = require_integer("first_token", first_token, maximum=prompt.num_tokens)
        ids = self._require_blocks(block_ids, prompt.num_tokens)
        reader, null = self._handover.reader, self._null_block_id
        wanted: Wanted | None = None
        try:
            try:
                found = await self._run(reader.ask(endpoint, lease, prompt, self._windows))
                wanted = found.wanted(prompt, first, prompt.num_tokens, ids, null_block_id=null)
                return await self._run(reader.fetch(endpoint, wanted, waits_for=lease))
            finally:
                await self._run_if_open(reader.leave(endpoint, lease))
        except asyncio.CancelledError:  # which cannot report unsafe blocks
            if wanted is not None:
                await self._run_if_open(reader.drain(wanted))
            raise

    async def release(self, ticket: str) -> None:
        """Tell the other engine that its blocks are no longer needed.

        Failures are ignored: the lease then ends by itself.

        Raises:
            InvalidArgumentError: As for `ask`.
        """
        await self._run(self._handover.reader.release(*self._read(ticket)))

    def give_up(self, ticket: str) -> None:
        """End a ticket of ours, even before its prompt is computed; `take_ended` returns it soon.

        Has no effect on a ticket that `take_ended` has returned.
        """
        with contextlib.suppress(ClosedError):  # closing ends every ticket
            self._handover.give_up([self._read(ticket)[1]])

    def take_ended(self) -> list[str]:
        """Return our tickets that have ended since the last call; their blocks may be reused."""
        lent, told = self._lent.copy(), self._handover.take_ended()  # twice if given up as it ended
        ended = [lease for lease in told if lease in lent and self._lent.pop(lease, set())]
        return [self._ticket(lease) for lease in ended]

    def _ticket(self, lease: str) -> str:
        return f"{Endpoint(self._host, self._handover.port - self._rank)}/{lease}"

    async def _run_if_open(self, call: Coroutine[Any, Any, None]) -> None:
        with contextlib.suppress(ClosedError):  # closing ends every ticket, hold and read
            await self._run(call)

    async def _run(self, call: Coroutine[Any, Any, T]) -> T:
        running = self._handover.submit(call)
        try:
            return await wait_despite_cancel(running)
        except BackendUnavailableError as exc:
            if running.cancelled():
                raise ClosedError("exchange") from exc
            raise

    def _read(self, ticket: str) -> tuple[Endpoint, str]:
        """Split a ticket into the endpoint of the first worker and the name of the lease."""
        text, _, lease = require_text("ticket", ticket).rpartition("/")
        try:
            endpoint = Endpoint.parse("ticket", text)
        except InvalidArgumentError as exc:
            rule = "HOST:PORT/LEASE, as `offer` returns it"
            raise InvalidArgumentError("ticket", ticket, rule) from exc
        if not (endpoint.is_loopback or self._config.proves_peers):
            rule = "a ticket with a loopback address, unless a secret or TLS proves peers"
            raise InvalidArgumentError("ticket", ticket, rule)
        return endpoint, require_ticket(lease)

    def _require_blocks(
        self, block_ids: Sequence[ArrayLike], num_tokens: int = 0
    ) -> list[list[int]]:
        require_one_per_group("block_ids", block_ids, len(self._sizes), what="block ids")
        found = [
            require_integers(f"block_ids[{g}]", ids).tolist() for g, ids in enumerate(block_ids)
        ]
        for group, (ids, size) in enumerate(zip(found, self._sizes, strict=True)):
            if len(ids) * size < num_tokens:
                rule = f"at least {-(-num_tokens // size)} for {num_tokens} tokens"
                raise InvalidArgumentError(f"number of block_ids[{group}]", len(ids), rule)
        return found
