"""Node: this process as a peer, with its identity, secret, agent and registered memory."""

import asyncio
import logging
import uuid
from collections.abc import Callable, Sequence

from kvxfer.backends.nixl.config import NixlConfig
from kvxfer.backends.nixl.extents import RegionTable
from kvxfer.backends.nixl.handshake import Greeting
from kvxfer.backends.nixl.link import Link
from kvxfer.backends.nixl.messages import PROTOCOL_VERSION, Hello, Reach
from kvxfer.backends.nixl.peer_book import PeerBook
from kvxfer.backends.nixl.transfer_agent import TransferAgent
from kvxfer.backends.nixl.transport import choose_transport, identify_host
from kvxfer.errors import BackendUnavailableError, PeerLostError, TransferFailedError
from kvxfer.kvcache.memory_region import MemoryRegion
from kvxfer.storage.keys import Namespace
from kvxfer.storage.threads import Threads

LINK_TIMEOUT_S = 5.0

logger = logging.getLogger(__name__)


class Node:
    """Node: owner of this process's agent and of the list of memory that peers may reach.

    Args:
        config: Configuration, with the secret and the transport.
        namespace: Namespace of the blocks; None as long as any is accepted.
        make_agent: Opens an agent; it may block.

    Attributes:
        config: As given.
        secret: Secret of all peers, None without one.
        namespace: As given; a holder that accepts any sets it to the first peer's.

    Raises:
        InvalidArgumentError: The secret or a parameter of TLS cannot be used.
    """

    def __init__(
        self,
        config: NixlConfig,
        namespace: Namespace | None,
        *,
        make_agent: Callable[[], TransferAgent],
    ) -> None:
        self.config = config
        self.secret = config.read_secret()
        self.namespace = namespace
        self._make_agent = make_agent
        self._threads = Threads("kvxfer-nixl-open", 1)
        self._boot_id, self._pid, self._pid_namespace = identify_host()
        self._incarnation = uuid.uuid4().bytes
        self._regions: list[MemoryRegion] = []
        self._book: PeerBook | None = None
        self._opening = asyncio.Lock()

    @property
    def hello(self) -> Hello:
        """Greeting of this process."""
        return Hello(
            version=PROTOCOL_VERSION,
            incarnation=self._incarnation,
            namespace=self.namespace,
            boot_id=self._boot_id,
            pid=self._pid,
            pid_namespace=self._pid_namespace,
        )

    @property
    def memory(self) -> RegionTable:
        """Memory of this process that peers may reach."""
        return RegionTable([(region.address, region.num_bytes) for region in self._regions])

    def add_memory(self, regions: Sequence[MemoryRegion]) -> None:
        """Let peers reach memory, unless they reach it already; before the first handshake."""
        assert self._book is None, "memory is added before the first handshake"
        self._regions += [region for region in regions if not self._has(region)]

    async def reach(self, *, data_port: int = 0) -> Reach:
        """Make the access to this process's memory, for the handshake.

        Raises:
            BackendUnavailableError: `transport=nixl`, and NIXL cannot be used.
        """
        agent = await self.open()
        return Reach(
            metadata=b"" if agent is None else agent.metadata,
            regions=self.memory.regions,
            data_port=data_port,
        )

    async def link(self, greeting: Greeting) -> Link | None:
        """Open a link to a peer's memory by NIXL; None where it would be slower than sockets.

        Raises:
            BackendUnavailableError: `transport=nixl`, and NIXL cannot reach the peer.
            PeerLostError: The peer cannot be reached, or does not answer in time.
        """
        book, metadata = self._book, greeting.reach.metadata
        carrier = choose_transport(self.hello, greeting.hello)
        if book is None or carrier == "socket" or not metadata:
            if self.config.transport == "nixl":
                raise BackendUnavailableError(
                    "transport=nixl, but NIXL would have to use TCP to reach the peer"
                )
            return None
        memory = RegionTable(greeting.reach.regions)
        try:
            async with asyncio.timeout(LINK_TIMEOUT_S):
                return await Link.open(book, metadata, carrier, memory)
        except TimeoutError as exc:
            detail = f"does not answer NIXL within {LINK_TIMEOUT_S:g} s"
            raise PeerLostError(greeting.hello.incarnation.hex(), detail) from exc

    async def restart(self) -> None:
        """Close the agent, which ends its transfers; a new one is opened when needed."""
        async with self._opening:
            book, self._book = self._book, None
            if book is not None:
                await book.agent.aclose()

    async def aclose(self) -> None:
        """Close the agent; may be called again."""
        async with self._opening:
            if self._book is not None:
                await self._book.agent.aclose()
                self._book = None
        await self._threads.aclose()

    def _has(self, region: MemoryRegion) -> bool:
        stop = region.address + region.num_bytes
        return any(
            known.address <= region.address and stop <= known.address + known.num_bytes
            for known in self._regions
        )

    async def open(self) -> TransferAgent | None:
        """Open the agent, if it is not open; None where sockets are used without one.

        Raises:
            BackendUnavailableError: `transport=nixl`, and NIXL cannot be used.
        """
        if self.config.transport == "socket":
            return None
        async with self._opening:
            if self._book is None:
                try:
                    await self._threads.run(self._open_agent)
                except (BackendUnavailableError, TransferFailedError) as exc:
                    if self.config.transport == "nixl":
                        raise BackendUnavailableError(f"NIXL cannot be used: {exc}") from exc
                    logger.info("NIXL cannot be used; using sockets: %s", exc)
            return None if self._book is None else self._book.agent

    def _open_agent(self) -> None:
        """Open the agent; the next call finds it, even if this one's caller was cancelled."""
        agent = self._make_agent()
        agent.register(self._regions)
        self._book = PeerBook(agent)
