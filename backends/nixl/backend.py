"""NIXL backend: blocks at peers, and a holder for blocks of peers."""

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
from kvxfer.storage.door import CallGuard
from kvxfer.storage.integrity import Integrity
from kvxfer.storage.keys import BlockKey, Namespace
from kvxfer.storage.outcomes import pick_outcome
from kvxfer.storage.staging import StagingMemory

STAGING_BYTES = 64 << 20

T = TypeVar("T")

Home: TypeAlias = Peer | HostBackend
"""Place of blocks: a peer, or the host memory of this process."""

logger = logging.getLogger(__name__)


class NixlBackend(Backend):
    """Backend that keeps blocks at peers and, with `listen`, blocks of peers in its own memory.

    Every key has its peers, the same in all processes that know the same set of peers. A peer that
    is gone has no blocks; a key is looked up at every peer that may hold it, and loaded from the
    first one that delivers it.

    Args:
        config: See `NixlConfig`.
        namespace: Namespace of the blocks, which says how large they are; peers with another one
            are refused.
        directory: Directory of the peers; by default those of the configuration.
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
        directory: PeerDirectory | None = None,
        make_agent: Callable[[], TransferAgent] = NixlAgent,
    ) -> None:
        self._guard = CallGuard("nixl backend", namespace)
        self._config = config
        self._tls = client_context(config)
        self._directory = directory or StaticPeers(config.peers)
        self._node = Node(config, namespace, make_agent=make_agent)
        self._hasher = BlockHasher()
        self._quarantine = Quarantine()
        largest = max(self._guard.chunk_sizes)
        self._staging = StagingMemory(STAGING_BYTES, largest, self._quarantine.drain)
        self._peers: dict[Endpoint, Peer] = {}
        self._own: HostBackend | None = None
        self._holder: Holder | None = None
        self._starting = asyncio.Lock()
        self._started = False
        if config.listen_endpoint is not None and config.capacity is not None:
            self._own = HostBackend(HostConfig(capacity=config.capacity), namespace)
            self.attach([self._own.region])  # first: peers probe the way to us with this region
            self._holder = Holder(self._node, self._open_store, config.listen_endpoint)
        self.attach([self._staging.region])

    def __repr__(self) -> str:
        peers = ", ".join(f"{e} by {p.route.transport}" for e, p in self._peers.items())
        serving = f", serving at {self._config.listen}" if self._holder else ""
        return f"NixlBackend({peers or 'no peer yet'}{serving})"

    @property
    def statistics(self) -> dict[str, tuple[str, PeerStatistics]]:
        """Transport and statistics of each peer."""
        return {str(e): (p.route.transport, p.statistics) for e, p in self._peers.items()}

    @property
    def num_quarantined_bytes(self) -> int:
        """Bytes that transfers may still touch after their deadline."""
        return self._quarantine.num_bytes

    @property
    def holder(self) -> Holder | None:
        """Holder that serves the blocks of this process, if there is one."""
        return self._holder

    def attach(self, memory: Sequence[MemoryRegion]) -> None:
        """See `Backend.attach`. Blocks elsewhere are copied to registered memory first."""
        self._node.add_memory(memory)

    async def start(self) -> None:
        """Open NIXL, and listen if configured; the first call of any other method does so as well.

        Raises:
            BackendUnavailableError: The address cannot be listened at, or `transport=nixl` and NIXL
                cannot be used.
        """
        async with self._starting:
            if not self._started:
                await self._node.open()
                if self._holder is not None:
                    await self._holder.start()
                self._started = True

    async def lookup(self, keys: Sequence[BlockKey]) -> list[bool]:
        """See `Backend.lookup`; asks all peers that may hold a key."""
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
        """See `Backend.load`; blocks that one peer does not deliver are loaded from the next."""
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
        """See `Backend.delete`; deletes at every peer that may hold a key."""
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
        if not self._guard.close():
            return
        if self._holder is not None:
            await self._holder.aclose()
        for peer in self._peers.values():
            await peer.route.aclose()
        await self._node.aclose()  # from here on only peers can still touch memory
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
        """Find the homes of blocks, and rank those of each key, best first."""
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
            if self._own is not None:  # this process itself may listen there
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
        """Replace the agent when its late transfers keep too much memory in quarantine."""
        if self._quarantine.num_bytes <= self._config.quarantine:
            return
        text = "%d bytes may still be touched by transfers past their deadline: restarting NIXL"
        logger.warning(text, self._quarantine.num_bytes)
        await self._node.restart()
        for peer in self._peers.values():
            await peer.route.disconnect()
            peer.route.forget_remote()

    async def _check(self, keys: Sequence[BlockKey], *blocks: Descriptors) -> None:
        self._guard.check_batch(keys, *blocks)
        if not self._started:
            await self.start()


async def _ask_each(
    placed: Sequence[tuple[Home, Sequence[int]]],
    ask: Callable[[Home, Sequence[int]], Coroutine[Any, Any, T]],
) -> list[tuple[Sequence[int], T]]:
    """Call every home with the blocks that belong to it, all at once."""
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
    """Group the columns of `ranked` by home, without homes that have none.

    Args:
        homes: Homes of blocks.
        ranked: Indices of homes, a column for each block.
        wanted: Columns to group, rising; all of them by default.
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
    """Keep the more telling outcome of each block; its memory is safe only if it is in both."""
    for index, outcome in zip(indices, given, strict=True):
        before = outcomes[index]
        if before is MISSING:
            outcomes[index] = outcome
        else:
            safe = before.memory_safe and outcome.memory_safe
            outcomes[index] = pick_outcome(before, outcome, memory_safe=safe)
