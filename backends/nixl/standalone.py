"""Standalone peer: a process that only holds blocks for others, as `kvxfer serve` does."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial

from kvxfer import runtime
from kvxfer.backends.host.available_memory import require_memory
from kvxfer.backends.host.held_tiers import HeldTiers
from kvxfer.backends.nixl.agents import NixlAgent, TransferAgent
from kvxfer.backends.nixl.agents.nixl_module import import_nixl
from kvxfer.backends.nixl.config import NixlConfig
from kvxfer.backends.nixl.discovery import Announcement
from kvxfer.backends.nixl.local_node import LocalNode
from kvxfer.backends.nixl.server import HeldBlocks, Server
from kvxfer.endpoint import Endpoint
from kvxfer.errors import BackendUnavailableError, InvalidArgumentError
from kvxfer.runtime import begin_aside, outlive_caller
from kvxfer.storage.backend import Backend
from kvxfer.storage.keys import Namespace
from kvxfer.storage.lending import Lender, StagedLender
from kvxfer.storage.observer import Reports
from kvxfer.storage.staging_memory import DEFAULT_STAGING_BYTES

LENDING_BYTES = 512 << 20
"""Bytes of staging memory through which blocks of tiers are lent: room for the pieces that peers
have in flight, see `client.PIECE_BYTES`."""

logger = logging.getLogger(__name__)


class StandalonePeer:
    """Peer that holds blocks of one namespace: the given one, or that of the first peer.

    Args:
        config: Configuration, with the endpoint to listen at and the authentication of peers.
        open_backend, namespace, prepare: See `HeldTiers`. A backend that provides a `Lender` lends
            its blocks in place; those of any other are lent through staging memory.
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
        self._tiers = HeldTiers(self._open, namespace, prepare=prepare)
        self._needed_bytes = config.capacity + LENDING_BYTES + DEFAULT_STAGING_BYTES
        self._capacity = int(config.capacity)
        self._discovery = config.open_discovery()
        self._node = LocalNode(config, namespace, make_agent=make_agent)
        self._server = Server(self._node, self._open_store, config.listen_endpoint)
        self._lender: Lender | None = None

    @property
    def endpoint(self) -> Endpoint:
        """Endpoint that peers connect to; its port is known once `start` has returned."""
        return self._server.endpoint

    def observe(self, reports: Reports) -> None:
        """See `Observable.observe`; `open_backend` is responsible for observing the blocks."""
        reports.watch(self._server.gauges)
        if self._discovery is not None:
            reports.watch(self._discovery.gauges)

    async def start(self) -> None:
        """Reserve the memory if the namespace is already known, and begin to listen."""
        if not self._tiers.is_open:
            # Without lower tiers, the share for staging memory is left for everything else.
            require_memory(self._needed_bytes, "capacity and staging memory")
        if self._node.namespace is not None:
            await self._open_store(self._node.namespace)
        if self._node.config.transport != "socket":  # the first peer must not wait for the import
            try:
                importing = partial(import_nixl, otherwise="let peers use sockets")
                await outlive_caller(begin_aside("kvxfer-open", importing))
            except BackendUnavailableError:
                if self._node.config.transport == "nixl":
                    raise
        await self._server.start()
        self.is_ready = True
        logger.info(
            "listening at %s (port %d for data, secret %s, TLS %s)",
            self.endpoint,
            self._server.data_port,
            "off" if self._node.secret is None else "on",
            "on" if self._node.config.uses_tls else "off",
        )
        if self._discovery is not None:
            started = runtime.wall_time()
            at = self._node.config.advertised(self.endpoint)
            await self._discovery.announce(at, lambda: self._announcement(started))

    async def drain(self, timeout_s: float) -> None:
        """Refuse new peers, and wait until the connected ones neither pin nor move a block."""
        self.is_ready = False
        async with asyncio.TaskGroup() as tasks:
            if self._discovery is not None:
                tasks.create_task(self._discovery.withdraw())
            await self._server.drain(timeout_s)

    async def aclose(self) -> None:
        """Close every connection and the backend; may be called again.

        Memory that is still being reserved is freed only when the process exits.
        """
        self.is_ready = False
        if self._discovery is not None:
            await self._discovery.aclose()
        self._server.close()
        await self._node.aclose()  # ends reads, even those that stall
        await self._server.wait_closed()
        await self._tiers.aclose(self._close_lender)
        await self._node.hasher.aclose()

    async def _close_lender(self) -> None:
        if isinstance(self._lender, StagedLender):
            await self._lender.aclose()

    def _announcement(self, started: float) -> Announcement:
        settled = self._node.namespace
        fingerprint = "" if settled is None else settled.fingerprint
        return Announcement(capacity=self._capacity, namespace=fingerprint, started=started)

    async def _open_store(self, namespace: Namespace) -> HeldBlocks:
        backend = await self._tiers.settle(namespace)
        assert self._lender is not None
        return backend, self._lender

    def _open(self, namespace: Namespace) -> Backend:
        """Reserve the memory, and let peers read it."""
        backend = self._open_backend(namespace)
        try:
            lender = backend.provide(Lender) or StagedLender(
                backend,
                namespace,
                copy_engine=self._node.hasher.copy_engine,
                threads=self._node.hasher.copying,
                max_bytes=LENDING_BYTES,
            )
            backend.attach(lender.regions)
            self._node.add_memory(lender.regions)
        except BaseException:
            runtime.run(backend.aclose())  # unused so far, and this thread has no event loop
            raise
        self._lender = lender
        return backend
