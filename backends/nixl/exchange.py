"""Exchange of blocks with peers: the memory, the server and the clients of this process."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Self

from kvxfer import runtime
from kvxfer.backends.nixl.agents import NixlAgent, TransferAgent
from kvxfer.backends.nixl.client import Client
from kvxfer.backends.nixl.config import NixlConfig
from kvxfer.backends.nixl.local_node import LocalNode
from kvxfer.backends.nixl.reads import Quarantine, generations_memory
from kvxfer.backends.nixl.server import HeldBlocks, Server
from kvxfer.backends.nixl.wire import messages as wire
from kvxfer.checks import require_positive
from kvxfer.endpoint import Endpoint
from kvxfer.errors import InvalidArgumentError
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.kvcache.memory_region import HOST, MemoryRegion
from kvxfer.runtime import fetch_error
from kvxfer.storage.call_guard import CallGuard
from kvxfer.storage.keys import Namespace
from kvxfer.storage.leases import CacheLender
from kvxfer.storage.lending import LendingBackend
from kvxfer.storage.observer import Gauge, Reports
from kvxfer.storage.staging_memory import StagingMemory

SETTLE_S = 0.5
"""How long `Exchange.settle` waits for reads before it ends them, and again after."""

RESTART_S = 2.0
"""How long callers wait until NIXL has ended, which usually takes a tenth of a second."""

logger = logging.getLogger(__name__)


class Exchange:
    """Exchange of blocks with peers: a client for each of them, and a server with `listen`.

    The caller decides which peer to ask for a block. The namespace need not have groups; without
    them, the sizes of blocks are not checked.

    Args:
        config: See `NixlConfig`; its `address`, `discover`, `replicas` and `capacity` mean nothing
            here.
        namespace: Namespace of the blocks; peers with another one are refused.
        own: Lender whose blocks are served at `listen`, those of a `CacheLender` also under
            tickets; closed by its creator. None without `listen`.
        largest_block_bytes: Bytes of the largest block that has to fit into staging memory.
        make_agent: Opens the agent that moves bytes between registered memory.
        max_clients: Maximum number of peers to stay connected to; beyond it, idle clients are
            closed, the least recently used first. None for no limit.
        only_asks: Whether this process moves no blocks: peers get none of its memory, and so serve
            it whatever their transport.

    Attributes:
        memory_kinds: Kinds of memory that blocks can be moved from and to, as of a `Backend`.
        clients: Clients of peers by endpoint, the least recently used first.
        server: Server of the blocks of this process; None without.
        staging: Registered memory for blocks on their way, which callers may hold as well.

    Raises:
        InvalidArgumentError: There is `own` without `listen`, or the reverse; the description of
            `own` is too large; or a parameter is out of range.
    """

    def __init__(
        self,
        config: NixlConfig,
        namespace: Namespace,
        *,
        own: LendingBackend | CacheLender | None = None,
        largest_block_bytes: int,
        make_agent: Callable[[], TransferAgent] = NixlAgent,
        max_clients: int | None = None,
        only_asks: bool = False,
    ) -> None:
        if (own is not None) != bool(config.listen):
            wanted = "HOST:PORT with a backend whose blocks are served, and nothing without one"
            raise InvalidArgumentError("listen", config.listen, wanted)
        if isinstance(own, CacheLender) and len(own.description) > wire.MAX_DESCRIPTION_BYTES:
            wanted = f"at most {wire.MAX_DESCRIPTION_BYTES}"
            raise InvalidArgumentError("bytes of own.description", len(own.description), wanted)
        largest = require_positive("largest_block_bytes", largest_block_bytes)
        self._max_clients = max_clients
        if max_clients is not None:
            self._max_clients = require_positive("max_clients", max_clients)
        self.memory_kinds = frozenset({"cpu"})
        if config.is_fenced and config.transport == "nixl":  # no hashing, and NIXL reaches GPUs
            self.memory_kinds = frozenset({"cpu", "cuda"})
        self._guard = CallGuard("exchange")
        self._config = config
        self._own = own
        self._node = LocalNode(config, namespace, make_agent=make_agent)
        self._quarantine = Quarantine()
        self.staging = StagingMemory(config.staging, largest, self.drain)
        self._generations = generations_memory(self.drain) if config.is_fenced else None
        self.clients: dict[Endpoint, Client] = {}
        self._former_clients: list[Client] = []
        self.server: Server | None = None
        self._starting = asyncio.Lock()
        self._started = False
        self._restarting: asyncio.Future[None] | None = None
        self._ending: set[asyncio.Future[None]] = set()  # reads that the last restart should end
        if own is not None and config.listen_endpoint is not None:
            self.attach(own.regions)
            self.server = Server(self._node, self._open_store, config.listen_endpoint)
        if only_asks:
            return
        self.attach([self.staging.region])
        if self._generations is not None:
            self.attach([self._generations.region])

    async def __aenter__(self) -> Self:
        """Start; the exchange is closed when the context ends."""
        try:
            await self.start()
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def observe(self, reports: Reports) -> None:
        """See `Observable.observe`: peers connected in either direction, and their pins."""
        reports.watch(self._gauges)
        if self.server is not None:
            reports.watch(self.server.gauges)

    def attach(self, memory: Sequence[MemoryRegion]) -> None:
        """Let blocks be moved straight from and to memory; to be called before `start`.

        Raises:
            InvalidArgumentError: Memory of a GPU, without `transport=nixl`; memory that overlaps
                other memory or is empty; or any, after `start`.
        """
        self._node.add_memory(memory)

    def require_reach(self, blocks: Descriptors) -> None:
        """Check that clients can move blocks from or to their memory.

        Raises:
            InvalidArgumentError: They are on a device that cannot be reached, or in memory of a GPU
                that was not attached.
        """
        if blocks.device.type not in self.memory_kinds:
            kinds = " or ".join(sorted(self.memory_kinds))
            raise InvalidArgumentError("device of blocks", str(blocks.device), kinds)
        if blocks.device != HOST and not self._node.memory.contains(blocks):
            wanted = f"memory of {blocks.device} that was attached"
            raise InvalidArgumentError("blocks", blocks, wanted)

    async def start(self) -> None:
        """Open NIXL, and listen if configured; before the first peer is asked.

        Raises:
            BackendUnavailableError: The address cannot be listened at, or `transport=nixl` and NIXL
                cannot be used.
            ClosedError: The exchange was closed.
        """
        self._guard.check()
        if self._started:  # backends call this for every batch
            return
        async with self._starting:
            if not self._started:
                await self._node.open()
                self._guard.check()
                if self.server is not None:
                    await self.server.start()
                self._started = True

    def peer(self, endpoint: Endpoint) -> Client:
        """Get the client of a peer, which connects on its first call.

        Get it anew for every call: a client without a call under way or a ticket may be closed.

        Raises:
            ClosedError: The exchange was closed.
        """
        self._guard.check()
        client = self.clients.pop(endpoint, None)
        if client is None:
            self._close_idle()
            client = Client(
                self._node,
                endpoint,
                staging=self.staging,
                quarantine=self._quarantine,
                generations=self._generations,
            )
        self.clients[endpoint] = client  # at the end: the latest one
        return client

    def leave(self, endpoint: Endpoint) -> None:
        """Close the client of a peer when its calls have ended; unknown ones are ignored."""
        self._former_clients = [c for c in self._former_clients if not c.is_closed]
        former = self.clients.pop(endpoint, None)
        if former is not None:
            former.retire()
            self._former_clients.append(former)

    async def connect(self, endpoints: Sequence[Endpoint]) -> None:
        """Connect to peers, all at once, within the time of one request; failures are ignored."""
        if not endpoints:
            return
        opening = [self.peer(endpoint).open() for endpoint in endpoints]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._config.timeout_s):
                await asyncio.gather(*opening, return_exceptions=True)

    async def keep_quarantine_small(self) -> None:
        """Restart NIXL if late reads keep too much memory in quarantine.

        Also if they keep all buffers of one kind, without which nothing could be read.
        """
        memories = filter(None, (self.staging, self._generations))
        is_spent = any(each.unsafe_bytes >= each.region.num_bytes for each in memories)
        if is_spent or self._quarantine.num_bytes > self._config.quarantine:
            await self._end_reads()

    async def settle(self) -> None:
        """Wait until no late read changes memory; end those that stall.

        For callers that cannot keep the memory out of use. Returns in time even if NIXL does not
        end its reads: `is_quiet` tells whether it did, and `drain` waits until it does.
        """
        late = self._quarantine.reads() - self._ending
        if await _wait(late, SETTLE_S):
            await self._end_reads()
            await _wait(late, SETTLE_S)
        elif self._restarting is not None:
            await asyncio.wait([self._restarting])

    def is_quiet(self, blocks: Descriptors | None = None) -> bool:
        """Whether no late read may still change memory, or that of `blocks`."""
        return not self._quarantine.reads(blocks)

    async def _end_reads(self) -> None:
        """Restart NIXL, which ends its reads; once per read, even if an earlier restart hangs."""
        late = self._quarantine.reads()
        if self._restarting is None or late - self._ending:
            text = "restarting NIXL: reads past their deadline may still change %d bytes"
            logger.warning(text, self._quarantine.num_bytes)
            self._ending = late
            self._restarting = asyncio.ensure_future(self._restart())
            self._restarting.add_done_callback(fetch_error)
        await asyncio.wait([self._restarting], timeout=RESTART_S)

    async def _restart(self) -> None:
        self._node.end_agent()  # from now on, a new agent reaches peers
        for client in self.clients.values():
            client.disconnect()
        if self.server is not None:
            await self.server.disconnect()
        await self._node.wait_ended(RESTART_S)

    async def drain(self, blocks: Descriptors | None = None) -> None:
        """Wait until no late read changes memory, or that of `blocks`; end those that stall."""
        late = self._quarantine.reads(blocks)
        if await _wait(late, self._config.timeout_s):
            await self._end_reads()
        await _wait(late)

    async def aclose(self) -> None:
        """End every connection and read; may be called again."""
        await self._guard.aclose(self._release)

    async def _release(self) -> None:
        clients = [*self.clients.values(), *self._former_clients]
        if self.server is not None:
            self.server.close()
        for client in clients:
            client.close()
        await self._node.aclose()  # ends reads, even those that stall
        if self._restarting is not None:
            await asyncio.wait([self._restarting])
        if self.server is not None:
            await self.server.wait_closed()
        for client in clients:
            await client.wait_closed()
        await _wait(self._quarantine.reads())
        await self._node.hasher.aclose()

    def _gauges(self) -> Mapping[Gauge, float]:
        clients, now = list(self.clients.values()), runtime.monotonic()
        return {
            Gauge.SUSPENDED: any(client.suspension.is_on(now) for client in clients),
            Gauge.PEERS: sum(client.is_connected for client in clients),
            Gauge.QUARANTINED_BYTES: self._quarantine.num_bytes,
        }

    def _close_idle(self) -> None:
        """Make room for a client: close the least recently used of those that are idle."""
        if self._max_clients is not None and len(self.clients) >= self._max_clients:
            surplus = len(self.clients) + 1 - self._max_clients
            idle = [endpoint for endpoint, client in self.clients.items() if client.is_idle]
            for endpoint in idle[:surplus]:
                self.leave(endpoint)

    async def _open_store(self, namespace: Namespace) -> HeldBlocks:
        assert self._own is not None
        assert self._node.namespace is not None
        self._node.namespace.require_same(namespace)
        return self._own, self._own


async def _wait(
    reads: "set[asyncio.Future[None]]", timeout_s: float | None = None
) -> "set[asyncio.Future[None]]":
    """Wait until reads have ended, at most `timeout_s`; return those that go on."""
    return (await asyncio.wait(reads, timeout=timeout_s))[1] if reads else reads
