"""Blocks in the memory of other processes and machines."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvxfer.backends.host.backend import HostBackend, HostConfig
from kvxfer.backends.nixl.agent import NixlAgent
from kvxfer.backends.nixl.config import NixlConfig
from kvxfer.backends.nixl.directory import PeerDirectory, StaticPeers
from kvxfer.backends.nixl.endpoint import Endpoint
from kvxfer.backends.nixl.hasher import BlockHasher
from kvxfer.backends.nixl.holder import Holder
from kvxfer.backends.nixl.node import Node
from kvxfer.backends.nixl.peer import Peer, PeerStatistics
from kvxfer.backends.nixl.placement import rank
from kvxfer.backends.nixl.quarantine import Quarantine
from kvxfer.backends.nixl.route import Route
from kvxfer.backends.nixl.store import BlockStore
from kvxfer.backends.nixl.tls import client_context
from kvxfer.backends.nixl.transfer_agent import TransferAgent
from kvxfer.errors import KVXferError
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.kvcache.memory_region import MemoryRegion
from kvxfer.storage.backend import MISSING, Backend, Outcome
from kvxfer.storage.door import Door
from kvxfer.storage.integrity import Integrity
from kvxfer.storage.keys import BlockKey, Namespace
from kvxfer.storage.outcomes import pick_outcome
from kvxfer.storage.staging import StagingMemory

STAGING_BYTES = 64 << 20

T = TypeVar("T")

Home: TypeAlias = Peer | HostBackend
"""Where blocks can be: at a peer, or in this process."""

logger = logging.getLogger(__name__)


class NixlBackend(Backend):
    """Keeps blocks at peers, and, when it is told to listen, blocks of peers in its own memory.

    Every key has its peers, which all who know the same peers agree on. A peer that is gone has
    nothing; a key is looked up at every peer that may hold it, and loaded from the first one that
    gives it.

    Args:
        config: See `NixlConfig`.
        namespace: Says how large a block is; peers of another one are refused.
        directory: Knows the peers; those of the configuration when there is none.
        make_agent: Opens what moves bytes between registered memory.

    Raises:
        InvalidArgumentError: The namespace has no groups, or a parameter cannot be.
        CapacityError: There is not that much memory to serve.
    """

    config_type = NixlConfig

    def __init__(
        self,
        config: NixlConfig,
        namespace: Namespace,
        *,
        directory: PeerDirectory | None = None,
        make_agent: Callable[[], TransferAgent] = NixlAgent,
    ) -> None:
        self._door = Door("nixl backend", namespace)
        self._config = config
        self._tls = client_context(config)
        self._directory = directory or StaticPeers(config.peers)
        self._node = Node(config, namespace, make_agent=make_agent)
        self._hasher = BlockHasher()
        self._quarantine = Quarantine()
        largest = max(self._door.chunk_sizes)
        self._staging = StagingMemory(STAGING_BYTES, largest, self._quarantine.drain)
        self._peers: dict[Endpoint, Peer] = {}
        self._own: HostBackend | None = None
        self._holder: Holder | None = None
        self._starting = asyncio.Lock()
        self._started = False
        if config.listen_endpoint is not None and config.capacity is not None:
            self._own = HostBackend(HostConfig(capacity=config.capacity), namespace)
            self.attach([self._own.region])  # first: peers try their way to us with that
            self._holder = Holder(self._node, self._open_store, config.listen_endpoint)
        self.attach([self._staging.region])

    def __repr__(self) -> str:
        peers = ", ".join(f"{e} by {p.route.transport}" for e, p in self._peers.items())
        serving = f", serving at {self._config.listen}" if self._holder else ""
        return f"NixlBackend({peers or 'no peer yet'}{serving})"

    @property
    def statistics(self) -> dict[str, tuple[str, PeerStatistics]]:
        """For each peer what moves its blocks, and what happened so far."""
        return {str(e): (p.route.transport, p.statistics) for e, p in self._peers.items()}

    @property
    def num_quarantined_bytes(self) -> int:
        """Bytes that a transfer which was given up may still touch."""
        return self._quarantine.num_bytes

    @property
    def holder(self) -> Holder | None:
        """What serves the blocks of this process, if anything does."""
        return self._holder

    def attach(self, memory: Sequence[MemoryRegion]) -> None:
        """See `Backend.attach`. Blocks elsewhere are copied to registered memory first."""
        self._node.add_memory(memory)

    async def start(self) -> None:
        """Open NIXL, and listen if that was asked for; every other call does so as well.

        Raises:
            BackendUnavailableError: It cannot listen there, or NIXL is asked for and cannot be
                used.
        """
        async with self._starting:
            if not self._started:
                await self._node.open()
                if self._holder is not None:
                    await self._holder.start()
                self._started = True

    async def lookup(self, keys: Sequence[BlockKey]) -> list[bool]:
        """See `Backend.lookup`; asks the peers that may hold a key, all at once."""
        await self._check(keys)
        homes, ranked = await self._find_homes(keys)
        answers = await _ask_each(
            _by_home(homes, ranked), lambda home, at: self._lookup_at(home, _chosen(keys, at))
        )
        found = {key for _, there in answers for key in there}
        return [key in found for key in keys]

    async def store(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        """See `Backend.store`; a block is `DONE` when one of its peers has it."""
        await self._check(keys, blocks)
        homes, ranked = await self._find_homes(keys)
        outcomes = [MISSING] * len(keys)
        stores = await _ask_each(
            _by_home(homes, ranked),
            lambda home, at: home.store(_chosen(keys, at), blocks.take(at)),
        )
        for indices, stored in stores:
            _merge(outcomes, indices, stored)
        await self._keep_quarantine_small()
        return outcomes

    async def load(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        """See `Backend.load`; what its first peer does not give, the next one may."""
        await self._check(keys, blocks)
        homes, ranked = await self._find_homes(keys)
        outcomes = [MISSING] * len(keys)
        left = list(range(len(keys)))
        for choice in ranked:
            loads = await _ask_each(
                _by_home(homes, choice[None], left),
                lambda home, at: home.load(_chosen(keys, at), blocks.take(at)),
            )
            for indices, loaded in loads:
                _merge(outcomes, indices, loaded)
            left = [i for i in left if not outcomes[i].done and outcomes[i].memory_safe]
            if not left:
                break
        await self._keep_quarantine_small()
        return outcomes

    async def delete(self, keys: Sequence[BlockKey]) -> list[bool]:
        """See `Backend.delete`; at every peer that may hold a key."""
        await self._check(keys)
        homes, ranked = await self._find_homes(keys)
        answers = await _ask_each(
            _by_home(homes, ranked), lambda home, at: self._delete_at(home, _chosen(keys, at))
        )
        deleted = {key for _, gone in answers for key in gone}
        return [key in deleted for key in keys]

    async def drain(self) -> None:
        """See `Backend.drain`."""
        await self._quarantine.drain()

    async def aclose(self) -> None:
        """See `Backend.aclose`. Memory that a peer may still touch is kept, and never freed."""
        if not self._door.close():
            return
        if self._holder is not None:
            await self._holder.aclose()
        for peer in self._peers.values():
            await peer.route.aclose()
        await self._node.aclose()  # from here on only a peer can still touch anything
        self._quarantine.keep_for_ever()
        for peer in self._peers.values():
            peer.route.give_up()
        await self._quarantine.drain()
        await self._hasher.aclose()
        if self._own is not None:
            await self._own.aclose()

    async def _open_store(self, namespace: Namespace) -> BlockStore:  # noqa: ARG002 - only ours comes
        assert self._own is not None
        return BlockStore(self._own, self._own, self._hasher)

    async def _find_homes(self, keys: Sequence[BlockKey]) -> tuple[list[Home], NDArray[np.intp]]:
        """The places where blocks can be, and for each key those it belongs to, best first."""
        endpoints = await self._directory.peers()
        if not endpoints:
            assert self._own is not None
            return [self._own], np.zeros((1, len(keys)), np.intp)
        homes = [await self._home(endpoint) for endpoint in endpoints]
        return homes, rank(keys, endpoints, self._config.replicas)

    async def _home(self, endpoint: Endpoint) -> Home:
        peer = self._peers.get(endpoint)
        if peer is None:
            route = Route(self._node, endpoint, tls=self._tls, scratch=self._staging.region)
            peer = self._peers[endpoint] = Peer(
                route,
                hasher=self._hasher,
                staging=self._staging,
                quarantine=self._quarantine,
                verifies=self._config.integrity is Integrity.FAST,
                timeout_s=self._config.timeout_s,
            )
            if self._own is not None:  # it may be this process that listens there
                with contextlib.suppress(KVXferError):
                    await route.open()
        return self._own if self._own is not None and peer.route.is_own else peer

    async def _lookup_at(self, home: Home, keys: Sequence[BlockKey]) -> set[BlockKey]:
        try:
            there = await home.lookup(keys)
        except (KVXferError, TimeoutError) as exc:
            logger.debug("lookup of %d keys failed: %s", len(keys), exc)
            return set()
        return {key for key, found in zip(keys, there, strict=True) if found}

    async def _delete_at(self, home: Home, keys: Sequence[BlockKey]) -> set[BlockKey]:
        try:
            deleted = await home.delete(keys)
        except (KVXferError, TimeoutError) as exc:
            logger.debug("deletion of %d keys failed: %s", len(keys), exc)
            return set()
        return {key for key, is_gone in zip(keys, deleted, strict=True) if is_gone}

    async def _keep_quarantine_small(self) -> None:
        """Go on with a new agent when too much memory may still be touched by the old one."""
        if self._quarantine.num_bytes <= self._config.quarantine:
            return
        text = "%d bytes may still be touched by transfers that were given up: starting NIXL anew"
        logger.warning(text, self._quarantine.num_bytes)
        await self._node.restart()
        for peer in self._peers.values():
            await peer.route.disconnect()
            peer.route.forget_remote()

    async def _check(self, keys: Sequence[BlockKey], *blocks: Descriptors) -> None:
        self._door.check_batch(keys, *blocks)
        if not self._started:
            await self.start()


async def _ask_each(
    placed: Sequence[tuple[Home, Sequence[int]]],
    ask: Callable[[Home, Sequence[int]], Coroutine[Any, Any, T]],
) -> list[tuple[Sequence[int], T]]:
    """Ask every home for what belongs to it, all at once."""
    if len(placed) == 1:  # a task less to switch to and back from
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
    """Which columns of `ranked` belong to each home, as far as any does.

    Args:
        homes: Where blocks can be.
        ranked: Indices of homes, a column for each block.
        wanted: The columns that count, rising; all of them by default.
    """
    if wanted is None:
        wanted = range(ranked.shape[1])
    if len(homes) == 1:
        return [(homes[0], wanted)]
    belongs = [(ranked == at).any(axis=0).tolist() for at in range(len(homes))]
    placed = [
        (home, [index for index in wanted if there[index]])
        for home, there in zip(homes, belongs, strict=True)
    ]
    return [(home, indices) for home, indices in placed if indices]


def _merge(outcomes: list[Outcome], indices: Sequence[int], given: Sequence[Outcome]) -> None:
    """Keep of each block what says most; its memory is safe when everything says so."""
    for index, outcome in zip(indices, given, strict=True):
        before = outcomes[index]
        if before is MISSING:
            outcomes[index] = outcome
        else:
            safe = before.memory_safe and outcome.memory_safe
            outcomes[index] = pick_outcome(before, outcome, memory_safe=safe)
