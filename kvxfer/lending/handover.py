"""Hand-over: an engine reads blocks of a prompt from the KV caches of another that made them."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import msgspec

from kvxfer import runtime
from kvxfer.backends.nixl import Exchange, NixlConfig, why_not_straight
from kvxfer.backends.nixl.agents import NixlAgent, TransferAgent
from kvxfer.copy_engine.cpu import MAX_THREADS, CPUCopyEngine
from kvxfer.copy_engine.devices import DeviceCopyEngine
from kvxfer.copy_engine.engine import CopyEngine
from kvxfer.endpoint import is_any_host, is_host
from kvxfer.errors import InvalidArgumentError
from kvxfer.kvcache.canonical import CanonicalKVCaches, memory_regions
from kvxfer.kvcache.memory_region import HOST, MemoryRegion
from kvxfer.kvcache.portable import CacheDescription
from kvxfer.lending.reader import Reader, worker_keys
from kvxfer.runtime import Pause, Threads, begin_aside
from kvxfer.storage.keys import BlockKey, Namespace
from kvxfer.storage.leases import CacheLender, require_ticket
from kvxfer.storage.observer import Reports
from kvxfer.transfer.event_loop import EngineLoop

T = TypeVar("T")

LOOK_S = 0.01
LONGEST_LOOK_S = 1.0
"""Time between two looks for tickets that have ended, and at most after looks that failed."""

MAX_CLIENTS = 256
"""Maximum number of engines to stay connected to: tickets, which come from outside, name them."""

NUM_THREADS = 2
"""Threads that copy and hash blocks, each on its share of the cores."""

CLOSE_S = 30.0

REVOKE_S = 30.0
"""Deadline of `Handover.revoke` for an answer of the event loop, which itself never blocks."""

logger = logging.getLogger(__name__)


class Handover:
    """Hand-over of blocks between engines: offers our blocks, and fetches those of other engines.

    An engine *offers* the blocks of a prompt under a ticket. Another engine *asks* for them by the
    tokens of its own prompt, *fetches* them into its own blocks, and *releases* the ticket. A
    ticket that nobody asks for ends with its lease. Blocks are read in place, verified when they
    have arrived, and may have another shape on the other side.

    Blocks in GPU memory go straight, proven by their generations, if the settings allow it and
    NIXL can register that memory. Otherwise they pass through pinned host memory on both sides.

    All work runs on an event loop of its own; `offer`, `submit` and `take_ended` return at once and
    may be called from any thread. Calls of the reader, which ask other engines, are submitted:
    `handover.submit(handover.reader.ask(...))`. A process that only asks, such as a scheduler, has
    no caches. With `listen`, blocks are lent; engines with another namespace are refused.

    Attributes:
        reader: Reader of the blocks of other engines.
        is_on_device: Whether our caches are in GPU memory.
        way: Sentence that says how blocks in GPU memory move, and why; empty for host memory.
    """

    def __init__(
        self,
        config: NixlConfig,
        namespace: Namespace,
        description: CacheDescription,
        caches: CanonicalKVCaches | None = None,
        *,
        make_agent: Callable[[], TransferAgent] = NixlAgent,
    ) -> None:
        regions = [] if caches is None else memory_regions(caches)
        self.is_on_device = any(region.device != HOST for region in regions)
        self.way, in_place = "", True
        if self.is_on_device:
            config, self.way, in_place = _choose_way(config, regions, make_agent)
        self._description = description
        self._threads = Threads("kvxfer-handover", NUM_THREADS)
        if self.is_on_device:
            self._copy_engine: CopyEngine = DeviceCopyEngine()
        else:
            num_threads = max(1, min(MAX_THREADS, runtime.num_cores()) // NUM_THREADS)
            self._copy_engine = CPUCopyEngine(num_threads=num_threads)
        self._lender: CacheLender | None = None
        if caches is not None and config.listen:
            self._lender = CacheLender(
                caches,
                lease_s=config.lease_s,
                description=description.encode(),
                threads=self._threads,
                copy_engine=self._copy_engine,
                staging_bytes=None if in_place else config.staging,
                hash_early=not (config.is_fenced or self.is_on_device),
            )
        self._exchange = Exchange(
            config,
            namespace,
            own=self._lender,
            largest_block_bytes=max(group.payload_size_bytes for group in description.groups),
            max_clients=MAX_CLIENTS,
            only_asks=caches is None,
            make_agent=make_agent,
        )
        self.reader = Reader(
            self._exchange,
            description,
            caches,
            in_place=in_place,
            copy_engine=self._copy_engine,
            threads=self._threads,
            timeout_s=config.timeout_s,
        )
        if caches is not None and in_place:
            self._exchange.attach(regions)
        elif caches is not None:
            self._copy_engine.attach([*regions, self._exchange.staging.region])
        self._loop = EngineLoop("hand-over")
        self._ended: deque[str] = deque()
        self._watching: asyncio.Task[None] | None = None
        self._pause = Pause(LOOK_S, LONGEST_LOOK_S)

    def observe(self, reports: Reports) -> None:
        """See `Observable.observe`: leases, peers, their pins, and the blocks that are fetched."""
        if self._lender is not None:
            self._lender.observe(reports)
        self.reader.observe(reports)
        self._exchange.observe(reports)

    @property
    def port(self) -> int:
        """Port at which blocks are lent, once started; 0 if none are lent."""
        return self._exchange.server.endpoint.port if self._exchange.server is not None else 0

    @property
    def num_expired(self) -> int:
        """Number of leases that ran out before anybody released them."""
        return self._lender.book.num_expired if self._lender is not None else 0

    def start(self) -> None:
        """Open NIXL and begin to listen; blocks, and raises as `PromptExchange.__aenter__`."""
        self._loop.run_blocking(self._exchange.start())

    def submit(self, call: Coroutine[Any, Any, T]) -> "Future[T]":
        """Begin a call of `withdraw` or the reader, and return at once."""
        return self._loop.submit(call)

    def offer(
        self,
        ticket: str,
        keys: Sequence[BlockKey],
        block_ids: Sequence[int],
        *,
        is_complete: bool = True,
    ) -> None:
        """Lend blocks, which must not change until `take_ended` returns the ticket.

        `keys` are those of the prompt's tokens. With its last blocks, a ticket `is_complete` and
        its lease begins to run; until then more blocks may be offered under it. An error is logged,
        and if `is_complete` it ends the ticket.
        """
        self._loop.guard.check()
        ticket = require_ticket(ticket)
        offer = partial(self._offer, ticket, list(keys), list(block_ids), is_complete=is_complete)
        self._loop.call_soon(offer)

    def lend(
        self, ticket: str, keys: Sequence[BlockKey], block_ids: Sequence[int], *, is_complete: bool
    ) -> None:
        """Lend blocks as `offer` does, on the event loop; after an error none of them is lent."""
        if self._lender is None:
            raise InvalidArgumentError("listen", "", "HOST:PORT to lend blocks")
        self.reader.require_caches_in_place()
        keys = worker_keys(self._description, keys)
        self._lender.offer(ticket, keys, block_ids, complete=is_complete)
        with suppress(ValueError):  # an end of this ticket before that nobody has taken
            self._ended.remove(ticket)
        self._watch_soon()

    def revoke(self, tickets: Sequence[str]) -> None:
        """End tickets whose blocks are about to change; return once no reader finds these blocks.

        If this raises, since the loop hangs, the blocks may still be found and must not change.
        """
        self._loop.run_blocking(self.withdraw(tickets), REVOKE_S)

    async def withdraw(self, tickets: Sequence[str]) -> None:
        """End tickets as `revoke` does."""
        if self._lender is None:
            return
        for ticket in tickets:
            self._lender.revoke(ticket)
        self._watch_soon()  # a ticket whose blocks could not be lent is collected by nobody else

    def give_up(self, tickets: Sequence[str]) -> None:
        """End tickets soon, even open ones; `take_ended` returns each once no block is pinned."""
        self._loop.guard.check()
        for ticket in tickets:
            self._loop.call_soon(self._give_up, ticket)

    def take_ended(self) -> list[str]:
        """Return the tickets that ended since the last call; none of their blocks is pinned."""
        taken = []
        with suppress(IndexError):  # another thread may take some at the same time
            while True:
                taken.append(self._ended.popleft())
        return taken

    def close(self) -> None:
        """End every ticket and call, and wait until nothing touches our caches; blocks."""
        self._loop.close(self._shut_down)

    def _offer(
        self, ticket: str, keys: list[BlockKey], block_ids: list[int], *, is_complete: bool
    ) -> None:
        try:
            if self._lender is not None:
                self.lend(ticket, keys, block_ids, is_complete=is_complete)
            elif is_complete:  # without `listen` nobody can read the blocks
                self._ended.append(ticket)
        except Exception:  # of any kind: the engine waits for the end of the ticket
            logger.exception("hand-over: cannot lend the blocks of ticket %s", ticket)
            if is_complete:
                self._give_up(ticket)

    def _give_up(self, ticket: str) -> None:
        """Revoke a ticket, known or not; it has ended once none of its blocks is pinned."""
        if self._lender is None:
            self._ended.append(ticket)
            return
        with suppress(InvalidArgumentError):  # it is complete already
            self._lender.offer(ticket, [], [], complete=True)
        self._lender.revoke(ticket)
        self._watch_soon()

    def _watch_soon(self) -> None:
        if self._watching is None or self._watching.done():
            self._watching = asyncio.get_running_loop().create_task(self._watch())

    async def _watch(self) -> None:
        """Collect the tickets that end, as long as there are any tickets."""
        assert self._lender is not None
        while True:
            pause_s = LOOK_S
            try:
                if not self._lender.book.num_tickets:
                    return
                self._ended.extend(self._lender.take_ended())
                self._pause.reset()
            except Exception:  # the engine waits for the end of its tickets: look again
                if not self._pause.num_failures:
                    logger.exception("hand-over: cannot look for tickets that have ended yet")
                pause_s = self._pause.next_s()
            await asyncio.sleep(pause_s)

    async def _shut_down(self) -> None:
        try:
            async with asyncio.timeout(CLOSE_S):
                await self._loop.end_submitted(CLOSE_S / 2)
                if self._watching is not None:
                    self._watching.cancel()
                await self._exchange.aclose()
                if self._lender is not None:
                    await self._lender.aclose()
                num_running = await self._threads.aclose()
        except TimeoutError:
            logger.warning("hand-over: not closed after %g s", CLOSE_S)
            num_running = await self._threads.aclose(0.0)
        if self._lender is not None:
            self._lender.revoke_all()  # in case a call that hangs left no time to close it
            self._ended.extend(self._lender.take_ended())
        await asyncio.sleep(0)  # so that calls end whose reads have ended
        if not (num_running or self._loop.num_submitted):  # else they still use these
            self._copy_engine.close()
            self.reader.close()


def reachable_host(config: NixlConfig, advertise: str, num_workers: int = 1) -> str:
    """Return the host by which other engines reach our workers; empty if nothing is lent.

    Raises:
        InvalidArgumentError: The settings name no such host, no ports, or peers to read from.
    """
    for name, value in (("address", config.address), ("discover", config.discover)):
        if value:
            raise InvalidArgumentError(name, value, "none: tickets name other engines")
    if (listen := config.listen_endpoint) is None:
        return ""
    if num_workers > 1 and not listen.port:
        rule = f"a port: {num_workers} workers listen on it and on the next ones"
        raise InvalidArgumentError("listen", config.listen, rule)
    host = advertise or listen.host
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if is_any_host(host) or not is_host(host, bracketed=":" in host):
        rule = f"the host by which other machines reach listen={config.listen}"
        raise InvalidArgumentError("advertise", advertise, rule)
    return host


def _choose_way(
    config: NixlConfig, memory: Sequence[MemoryRegion], make_agent: Callable[[], TransferAgent]
) -> tuple[NixlConfig, str, bool]:
    """Choose how blocks in GPU memory move: the settings, a sentence, and whether straight."""
    where = f"blocks on {', '.join(sorted({str(region.device) for region in memory}))}"
    hashed = config.integrity == "full"
    if config.transport == "nixl" and config.is_fenced:
        return config, f"{where} go straight by NIXL, fenced, as configured", True
    if hashed or config.transport == "socket":
        why = "integrity=full" if hashed else f"transport={config.transport}"
    else:
        trying = partial(runtime.run, why_not_straight(memory, make_agent))
        why = runtime.result(begin_aside("kvxfer-nixl-try", trying))
    if why:
        return config, f"{where} pass through host memory and are hashed there: {why}", False
    straight = msgspec.structs.replace(config, transport="nixl", integrity="fenced")
    way = f"{where} go straight by NIXL, fenced (transport=nixl, integrity=fenced): it reaches them"
    return straight, way, True
