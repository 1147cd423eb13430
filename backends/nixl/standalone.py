"""Standalone peer: a process that only holds blocks for others, as `kvxfer serve` does."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from kvxfer import runtime
from kvxfer.backends.host.available_memory import require_memory
from kvxfer.backends.host.backend import HostBackend
from kvxfer.backends.nixl.agents import NixlAgent, TransferAgent
from kvxfer.backends.nixl.agents.nixl_module import import_nixl
from kvxfer.backends.nixl.config import NixlConfig
from kvxfer.backends.nixl.discovery import Announcement
from kvxfer.backends.nixl.local_node import LocalNode
from kvxfer.backends.nixl.reads import BlockHasher
from kvxfer.backends.nixl.server import Server
from kvxfer.backends.nixl.session import BlockStore
from kvxfer.copy_engine.cpu import CPUCopyEngine
from kvxfer.endpoint import Endpoint
from kvxfer.errors import BackendUnavailableError, InvalidArgumentError
from kvxfer.runtime import Threads
from kvxfer.storage.backend import Backend
from kvxfer.storage.keys import Namespace
from kvxfer.storage.lending import Lender, StagedLender
from kvxfer.storage.observer import Reports
from kvxfer.storage.staging_memory import DEFAULT_STAGING_BYTES
from kvxfer.tiering.tiered_backend import tiers_of
from kvxfer.units import format_size

LENDING_BYTES = 512 << 20
"""Bytes of staging memory by way of which blocks of tiers are lent: room for the pieces that
peers have in flight, see `client.PIECE_BYTES`."""

NUM_HASHING_THREADS = 2
"""Threads of the staging memory that blocks are lent by way of."""

ABANDON_AFTER_S = 0.2
"""Seconds that the end waits for memory that is being reserved: a system gives 1 GiB or so a
second, and nothing is in it yet."""

logger = logging.getLogger(__name__)


class StandalonePeer:
    """Peer that holds blocks of one namespace: the given one, or that of the first peer.

    Without a namespace it does not know how large a block is, so its memory is reserved when the
    first peer connects, on a thread. That may take longer than the first peer waits; its next
    attempt finds the memory reserved.

    Args:
        config: Configuration, with the endpoint to listen at and the authentication of peers.
        open_backend: Opens the backend that keeps the blocks; may block. A `Lender` lends them in
            place; blocks of any other backend are lent by way of staging memory.
        namespace: Namespace of the blocks; None for that of the first peer that connects.
        prepare: Called with the backend when it was opened, before any peer uses it.
        make_agent: Opens the agent that moves bytes between registered memory.

    Attributes:
        is_ready: Whether new peers are served.

    Raises:
        InvalidArgumentError: There is no endpoint to listen at, or a parameter is out of range.
    """

    def __init__(
        self,
        config: NixlConfig,
        open_backend: Callable[[Namespace], Backend],
        *,
        namespace: Namespace | None = None,
        prepare: Callable[[Backend], Awaitable[None]] | None = None,
        make_agent: Callable[[], TransferAgent] = NixlAgent,
    ) -> None:
        if config.listen_endpoint is None or config.capacity is None:
            raise InvalidArgumentError("listen", config.listen, "HOST:PORT")
        self.is_ready = False
        self._open_backend = open_backend
        self._prepare = prepare
        self._needed_bytes = config.capacity + LENDING_BYTES + DEFAULT_STAGING_BYTES
        self._capacity = int(config.capacity)
        self._discovery = config.open_discovery()
        self._node = LocalNode(config, namespace, make_agent=make_agent)
        self._server = Server(self._node, self._open_store, config.listen_endpoint)
        self._opening = Threads("kvxfer-open", 1)
        self._hashing = Threads("kvxfer-hash", NUM_HASHING_THREADS)
        self._hasher = BlockHasher()
        self._copy_engine = CPUCopyEngine()
        self._opened: tuple[Namespace, Backend, Lender] | None = None

    @property
    def endpoint(self) -> Endpoint:
        """Endpoint that peers connect to; known once it listens."""
        return self._server.endpoint

    @property
    def data_port(self) -> int:
        """Port for data connections; known once it listens."""
        return self._server.data_port

    def observe(self, reports: Reports) -> None:
        """See `Observable.observe`; the blocks are observed by whoever opens their backend."""
        reports.watch(self._server.gauges)
        if self._discovery is not None:
            reports.watch(self._discovery.gauges)

    async def start(self) -> None:
        """Reserve the memory of a namespace that is known, and begin to listen.

        Raises:
            CapacityError: The machine, or a control group of this process, does not have the
                memory, now or when the first peer connects.
            BackendUnavailableError: The address, or the port for data, is in use, or the address is
                not one of this machine; or `transport=nixl`, and NIXL cannot be imported.
        """
        if self._opened is None:
            # Without tiers below, what would be staging memory is left for everything else.
            require_memory(self._needed_bytes, "capacity and staging memory")
        if self._node.namespace is not None:
            await self._open_store(self._node.namespace)
        if self._node.config.transport != "socket":  # the first peer must not wait for the import
            try:
                await self._opening.ask(import_nixl, otherwise="let peers use sockets")
            except BackendUnavailableError:
                if self._node.config.transport == "nixl":
                    raise
        await self._server.start()
        self.is_ready = True
        logger.info(
            "listening at %s (port %d for data, secret %s, TLS %s)",
            self.endpoint,
            self.data_port,
            "off" if self._node.secret is None else "on",
            "on" if self._node.config.uses_tls else "off",
        )
        if self._discovery is not None:
            started = runtime.wall_time()
            await self._discovery.announce(
                self._node.config.advertised(self.endpoint), lambda: self._announcement(started)
            )

    async def drain(self, timeout_s: float) -> None:
        """Accept no new peers, and wait until the connected ones pin and move no block."""
        self.is_ready = False
        logger.info("draining: no new peers, %d are connected", len(self._server.sessions))
        async with asyncio.TaskGroup() as tasks:
            if self._discovery is not None:
                tasks.create_task(self._discovery.withdraw())
            if not await self._server.drain(timeout_s):
                logger.warning("blocks are still in use after %g s; ending all the same", timeout_s)

    async def aclose(self) -> None:
        """End every connection and close the backend; may be called again.

        Memory that is still being reserved is left to the end of the process.
        """
        self.is_ready = False
        if self._discovery is not None:
            await self._discovery.aclose()
        self._server.close()
        await self._node.aclose()  # ends reads, also those that stall
        await self._server.wait_closed()
        await self._opening.aclose(ABANDON_AFTER_S)
        if self._opened is not None:
            _, backend, lender = self._opened
            if isinstance(lender, StagedLender):
                await lender.aclose()
            await backend.aclose()
        await self._hashing.aclose()
        await self._hasher.aclose()
        self._copy_engine.close()

    def _announcement(self, started: float) -> Announcement:
        settled = self._node.namespace
        fingerprint = "" if settled is None else settled.fingerprint
        return Announcement(capacity=self._capacity, namespace=fingerprint, started=started)

    async def _open_store(self, namespace: Namespace) -> BlockStore:
        if self._opened is None:
            await self._opening.ask(self._open, namespace)
        assert self._opened is not None
        settled, backend, lender = self._opened
        if self._prepare is not None:
            prepare, self._prepare = self._prepare, None
            await prepare(backend)
        settled.require_same(namespace)  # a peer that did not wait may have settled another one
        return BlockStore(backend, lender, self._hasher)

    def _open(self, namespace: Namespace) -> None:
        """Reserve the memory; the next call finds it, even if this one's caller was cancelled."""
        if self._opened is not None:
            return
        backend = self._open_backend(namespace)
        lender = backend.provide(Lender) or self._stage(backend, namespace)
        backend.attach(lender.regions)
        self._node.add_memory(lender.regions)
        self._opened = namespace, backend, lender
        tiers = tiers_of(backend)
        hosts = filter(None, (tier.provide(HostBackend) for tier in tiers))
        sizes = [namespace.chunk_size_bytes(group) for group in range(len(namespace.groups))]
        logger.info(
            "settled namespace %s of %r: %d slots of %s in host memory, tiers below: %d",
            namespace.fingerprint,
            namespace.model,
            sum(host.num_slots for host in hosts),
            format_size(max(sizes)),
            len(tiers) - 1,
        )

    def _stage(self, backend: Backend, namespace: Namespace) -> Lender:
        return StagedLender(
            backend,
            namespace,
            copy_engine=self._copy_engine,
            threads=self._hashing,
            max_bytes=LENDING_BYTES,
        )
