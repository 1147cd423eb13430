"""NIXL backend: keeps blocks at peers, and can hold blocks of peers itself."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, TypeAlias, TypeVar

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvxfer import runtime
from kvxfer.backends.host.backend import HostBackend, HostConfig
from kvxfer.backends.nixl.agents import NixlAgent, TransferAgent
from kvxfer.backends.nixl.client import Client
from kvxfer.backends.nixl.config import NixlConfig
from kvxfer.backends.nixl.discovery import Announcement
from kvxfer.backends.nixl.exchange import Exchange
from kvxfer.backends.nixl.server import Server
from kvxfer.endpoint import Endpoint
from kvxfer.errors import InvalidArgumentError, KVXferError
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.kvcache.memory_region import MemoryRegion
from kvxfer.runtime import Calls
from kvxfer.storage.backend import MISSING, Outcome, Status, TellsKept, pick_outcome
from kvxfer.storage.call_guard import CallGuard
from kvxfer.storage.calls import Move, call_backend, delete_from
from kvxfer.storage.keys import BlockKey, Namespace
from kvxfer.storage.observer import Reports

T = TypeVar("T")

Home: TypeAlias = Client | HostBackend
"""Place of blocks: a peer, or this process."""

# Finalizer of SplitMix64, a bijection. Source: https://prng.di.unimi.it/splitmix64.c
_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))

logger = logging.getLogger(__name__)


class NixlBackend(TellsKept):
    """Backend that keeps blocks at peers and, with `listen`, blocks of peers in its own memory.

    Every key has its peers, the same in all processes that know the same set of peers. A key is
    looked up at every peer that may hold it, and loaded from the first one that delivers it. The
    blocks of a peer that is gone are misses.

    Args:
        config: See `NixlConfig`.
        namespace: Namespace of the blocks, which determines their sizes; peers with another one are
            refused.
        make_agent: Opens the agent that moves bytes between registered memory.

    Raises:
        InvalidArgumentError: The namespace has no groups, or a parameter is out of range.
        CapacityError: There is not enough memory for `capacity`.
    """

    config_type = NixlConfig

    def __init__(
        self,
        config: NixlConfig,
        namespace: Namespace,
        *,
        make_agent: Callable[[], TransferAgent] = NixlAgent,
    ) -> None:
        self._guard = CallGuard("nixl backend", namespace)
        if config.listen and config.capacity is None:
            raise InvalidArgumentError("capacity", None, "a size, with listen=HOST:PORT")
        if not config.peers and config.listen_endpoint is None and not config.discover:
            raise InvalidArgumentError("address", config.address, "peers, or listen=HOST:PORT")
        self._config = config
        self._peers = config.peers
        self._discovery = config.open_discovery(namespace.fingerprint)
        self._announced_at: Endpoint | None = None
        self._announcement = Announcement(
            capacity=int(config.capacity or 0), namespace=namespace.fingerprint
        )
        self._own: HostBackend | None = None
        if config.capacity is not None:
            self._own = HostBackend(HostConfig(capacity=config.capacity), namespace)
        self._exchange = Exchange(
            config,
            namespace,
            own=self._own,
            largest_block_bytes=max(self._guard.chunk_sizes),
            make_agent=make_agent,
        )
        self.memory_kinds = self._exchange.memory_kinds
        self._calls = Calls()

    def __repr__(self) -> str:
        peers = ", ".join(f"{peer} by {carrier}" for peer, carrier in self.carriers.items())
        serving = f", serving at {self._config.listen}" if self.server else ""
        return f"NixlBackend({peers or 'no peer yet'}{serving})"

    @property
    def carriers(self) -> dict[str, str]:
        """Current carrier of each peer's bytes."""
        return {str(at): client.carrier for at, client in self._exchange.clients.items()}

    @property
    def server(self) -> Server | None:
        """Server of the blocks of this process, if there is one."""
        return self._exchange.server

    def observe(self, reports: Reports) -> None:
        """See `Observable.observe`; with `capacity`, the blocks held by this process, too."""
        if self._own is not None:
            self._own.observe(reports)
        self._exchange.observe(reports)
        if self._discovery is not None:
            reports.watch(self._discovery.gauges)

    def attach(self, memory: Sequence[MemoryRegion]) -> None:
        """See `Backend.attach` and `Exchange.attach`.

        Blocks elsewhere in host memory are copied through staging memory.
        """
        self._exchange.attach(memory)

    async def start(self) -> None:
        """Open NIXL, and listen if configured; the first call of any other method does so as well.

        Discovery, if configured, begins here, with a short wait for the first list of peers. Raises
        what `Exchange.start` raises.
        """
        await self._exchange.start()
        if self._discovery is not None:
            if self.server is not None and self._announced_at is None:
                self._announced_at = self._config.advertised(self.server.endpoint)
                await self._discovery.announce(self._announced_at, lambda: self._announcement)
            await self._discovery.follow()

    async def lookup(self, keys: Sequence[BlockKey]) -> list[bool]:
        """See `Backend.lookup`; asks all peers that may hold a key.

        If one of several peers does not answer in time, its blocks are misses and it is not asked
        for a while, even if the caller did not wait that long.
        """
        homes, ranked = await self._find_homes(keys)
        timeout_s = self._config.lookup_timeout_s if len(homes) > 1 else None
        answers = await _ask_each(
            _by_home(homes, ranked),
            lambda home, at: self._lookup_at(home, _chosen(keys, at), timeout_s),
        )
        found = {key for _, there in answers for key in there}
        return [key in found for key in keys]

    async def store(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        """See `Backend.store`; a block is `DONE` when one of its peers has it."""
        homes, ranked = await self._find_homes(keys, blocks)
        outcomes = [MISSING] * len(keys)
        stores = await _ask_each(
            _by_home(homes, ranked),
            lambda home, at: call_backend(
                _fail if _is_suspended(home) else home.store, _chosen(keys, at), blocks.take(at)
            ),
        )
        for indices, stored in stores:
            _merge(outcomes, indices, stored)
        if not homes:
            outcomes = [Outcome(Status.FAILED, reason="no peer is known")] * len(keys)
        await self._exchange.keep_quarantine_small()
        return outcomes

    async def load(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        """See `Backend.load`; blocks that one peer does not deliver are loaded from the next."""
        homes, ranked = await self._find_homes(keys, blocks)
        outcomes = [MISSING] * len(keys)
        left: Sequence[int] = range(len(keys))
        for nth, choice in enumerate(ranked, 1):
            load = partial(_load_at, keys, blocks, len(ranked) - nth)
            loads = await _ask_each(_by_home(homes, choice[None], left), load)
            for indices, loaded in loads:
                _merge(outcomes, indices, loaded)
            left = [i for i in left if not outcomes[i].done and outcomes[i].memory_safe]
            if not left:
                break
        await self._exchange.keep_quarantine_small()
        return outcomes

    async def delete_or_keep(self, keys: Sequence[BlockKey]) -> tuple[set[BlockKey], set[BlockKey]]:
        """See `TellsKept.delete_or_keep`; deletes at every peer that may hold a key."""
        homes, ranked = await self._find_homes(keys)
        # An unknown peer may have them; with discovery, an own home does not rule that out.
        finds_nobody = not self._exchange.clients and (self._discovery is not None or not homes)
        answers = await _ask_each(
            _by_home(homes, ranked), lambda home, at: _delete_at(home, _chosen(keys, at))
        )
        removed = {key for _, (gone, _) in answers for key in gone}
        kept = {*keys} if finds_nobody else {key for _, (_, left) in answers for key in left}
        return removed - kept, kept

    async def drain(self) -> None:
        """See `Backend.drain`."""
        await self._exchange.drain()

    async def aclose(self) -> None:
        """See `Backend.aclose`."""
        await self._guard.aclose(self._release)

    async def _release(self) -> None:
        async with contextlib.AsyncExitStack() as closing:
            if self._own is not None:
                closing.push_async_callback(self._own.aclose)
            closing.push_async_callback(self._exchange.aclose)
            if self._discovery is not None:  # closed first, so that others look elsewhere
                closing.push_async_callback(self._discovery.aclose)

    async def _find_homes(
        self, keys: Sequence[BlockKey], *blocks: Descriptors
    ) -> tuple[list[Home], NDArray[np.intp]]:
        """Check a call, start, and find the homes of its blocks, for each key best first."""
        self._guard.check_batch(keys, *blocks)
        for each in blocks:
            self._exchange.require_reach(each)
        await self.start()
        endpoints = self._list_peers()
        if not endpoints:
            homes: list[Home] = [self._own] if self._own is not None else []
            return homes, np.zeros((len(homes), len(keys)), np.intp)
        if self._own is not None and self._announced_at is None:
            # This process itself may listen at one of them.
            known = self._exchange.clients
            await self._exchange.connect([each for each in endpoints if each not in known])
        homes = [self._home(self._exchange.peer(endpoint)) for endpoint in endpoints]
        return homes, rank(keys, endpoints, self._config.replicas)

    def _list_peers(self) -> Sequence[Endpoint]:
        """List the current peers, each once, and leave those that are gone."""
        if self._discovery is None:
            return self._peers
        endpoints = self._discovery.peers
        listed = set(endpoints)
        for endpoint in [each for each in self._exchange.clients if each not in listed]:
            self._exchange.leave(endpoint)
        return endpoints

    def _home(self, client: Client) -> Home:
        if self._own is None:
            return client
        is_own = client.is_own or client.endpoint == self._announced_at
        return self._own if is_own else client

    async def _lookup_at(
        self, home: Home, keys: Sequence[BlockKey], timeout_s: float | None
    ) -> set[BlockKey]:
        if _is_suspended(home):
            return set()

        def note_late() -> None:
            if isinstance(home, Client) and timeout_s is not None:
                what = f"lookup of {len(keys)} blocks"
                home.suspension.note_late(runtime.monotonic(), what, timeout_s)

        try:
            there = await self._calls.wait_for(
                timeout_s, home.lookup(keys), note_late=note_late, outlives_caller=True
            )
        except (KVXferError, TimeoutError) as exc:
            if isinstance(exc, TimeoutError):  # perhaps one of the client's own
                note_late()
            logger.debug("lookup of %d keys failed: %s", len(keys), exc)
            return set()
        return {key for key, found in zip(keys, there, strict=True) if found}


def _is_suspended(home: Home) -> bool:
    suspension = home.suspension if isinstance(home, Client) else None
    return bool(suspension and suspension.num_failures and suspension.is_on(runtime.monotonic()))


async def _fail(keys: Sequence[BlockKey], _: Descriptors) -> list[Outcome]:
    return [Outcome(Status.FAILED, reason="the peer does not answer lookups")] * len(keys)


def _load_at(
    keys: Sequence[BlockKey], blocks: Descriptors, num_others: int, home: Home, at: Sequence[int]
) -> Coroutine[Any, Any, list[Outcome]]:
    """Load some blocks from a home; a suspended home is tried only as the last choice."""
    move: Move = _fail if num_others and _is_suspended(home) else home.load
    return call_backend(move, _chosen(keys, at), blocks.take(at))


async def _delete_at(home: Home, keys: Sequence[BlockKey]) -> tuple[set[BlockKey], set[BlockKey]]:
    try:
        return await delete_from(home, keys)
    except (KVXferError, TimeoutError) as exc:
        logger.debug("deletion of %d keys failed: %s", len(keys), exc)
        return set(), {*keys}


async def _ask_each(
    placed: Sequence[tuple[Home, Sequence[int]]],
    ask: Callable[[Home, Sequence[int]], Coroutine[Any, Any, T]],
) -> list[tuple[Sequence[int], T]]:
    """Call every home with the blocks that belong to it, all at once."""
    if len(placed) == 1:  # saves switching to a task and back
        ((home, indices),) = placed
        return [(indices, await ask(home, indices))]
    async with asyncio.TaskGroup() as tasks:
        asked = [(indices, tasks.create_task(ask(home, indices))) for home, indices in placed]
    return [(indices, task.result()) for indices, task in asked]


def _chosen(keys: Sequence[BlockKey], indices: Sequence[int]) -> Sequence[BlockKey]:
    return keys if len(indices) == len(keys) else [keys[index] for index in indices]


def _by_home(
    homes: Sequence[Home], ranked: NDArray[np.intp], wanted: Sequence[int] | None = None
) -> list[tuple[Home, Sequence[int]]]:
    """Group blocks, which are columns of `ranked`, by home; leave out homes that have none."""
    if wanted is None:
        wanted = range(ranked.shape[1])
    if len(homes) == 1:
        return [(homes[0], wanted)]
    choices = ranked.T.tolist()
    placed: dict[int, list[int]] = {}
    for index in wanted:
        for at in choices[index]:
            placed.setdefault(at, []).append(index)
    return [(homes[at], placed[at]) for at in sorted(placed)]


def _merge(outcomes: list[Outcome], indices: Sequence[int], given: Sequence[Outcome]) -> None:
    """Keep the more telling outcome of each block; its memory is safe only if both say so."""
    for index, outcome in zip(indices, given, strict=True):
        before = outcomes[index]
        if before is MISSING:
            outcomes[index] = outcome
        else:
            safe = before.memory_safe and outcome.memory_safe
            outcomes[index] = pick_outcome(before, outcome, memory_safe=safe)


def rank(
    keys: Sequence[BlockKey], endpoints: Sequence[Endpoint], replicas: int
) -> NDArray[np.intp]:
    """Rank the peers that hold each key, best first, by rendezvous hashing.

    Every peer has a weight for every key, a hash of the two, and the heaviest peers hold the block.
    When a peer leaves, only its blocks move. The answer for a key depends only on the key and the
    set of endpoints, which are distinct and not empty. It is part of the protocol, because
    processes that store and processes that load must agree.

    Returns:
        Indices into `endpoints`, `(min(replicas, num_endpoints), num_keys)`.

    Source: Thaler, Ravishankar: "Using name-based mappings to increase hit rates", IEEE/ACM
        Transactions on Networking 6(1), 1998.
    """
    if len(endpoints) == 1:
        return np.zeros((1, len(keys)), np.intp)
    weights = _mix(
        _hashes([str(endpoint).encode() for endpoint in endpoints])[:, None] ^ _hashes(keys)
    )
    ranked: NDArray[np.intp]
    if replicas == 1:
        ranked = weights.argmax(axis=0)[None]
    else:
        ranked = weights.argsort(axis=0)[::-1][:replicas]
    return ranked


def _hashes(names: Sequence[bytes]) -> NDArray[np.uint64]:
    return np.fromiter(map(xxhash.xxh3_64_intdigest, names), np.uint64, len(names))


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Scatter the bits; different values stay different."""
    values = (values ^ (values >> _SHIFTS[0])) * _MULTIPLIERS[0]
    values = (values ^ (values >> _SHIFTS[1])) * _MULTIPLIERS[1]
    return values ^ (values >> _SHIFTS[2])
