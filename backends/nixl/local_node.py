"""Local node: this process as a peer, with its identity, secret, agents and registered memory."""

import asyncio
import hashlib
import logging
from collections.abc import Callable, Sequence

import msgspec

from kvxfer import runtime
from kvxfer.backends.nixl.agents import SocketAgent, TransferAgent
from kvxfer.backends.nixl.agents.nixl_module import has_active_port, identify_host
from kvxfer.backends.nixl.config import NixlConfig, TLSContexts
from kvxfer.backends.nixl.reads import BlockHasher, RemoteMemory
from kvxfer.backends.nixl.wire.handshake import Greeting
from kvxfer.backends.nixl.wire.messages import (
    MAX_TEXT_CHARACTERS,
    OLDEST_VERSION,
    PROTOCOL_VERSION,
    Hello,
    Reach,
)
from kvxfer.backends.nixl.wire.regions import AgentMetadata, Regions
from kvxfer.endpoint import Endpoint
from kvxfer.errors import (
    BackendUnavailableError,
    DeviceUnavailableError,
    InvalidArgumentError,
    PeerLostError,
    ProtocolError,
    TransferFailedError,
)
from kvxfer.kvcache.memory_region import HOST, MemoryRegion
from kvxfer.runtime import Threads, fetch_error
from kvxfer.storage.keys import Namespace
from kvxfer.text import printable

LINK_SHARE = 0.8
"""Fraction of the time for a handshake that NIXL may take to reach a peer: both sides try at the
same time, while each waits for the other."""

_UNUSABLE = (BackendUnavailableError, DeviceUnavailableError, TransferFailedError)

logger = logging.getLogger(__name__)


async def why_not_straight(
    memory: Sequence[MemoryRegion], make_agent: Callable[[], TransferAgent]
) -> str:
    """Explain why NIXL cannot move blocks straight between GPUs and peers; empty if it can.

    Tests whether the memory can be registered, but not whether peers can then read it, which takes
    RDMA. Without a card for RDMA, UCX has CUDA IPC between processes of one machine; that may be
    missing (containers, virtual machines) even if memory can be registered: on an H100 in a virtual
    machine, no block came through. So only the user's settings choose CUDA IPC.

    Blocks the event loop for up to a second, or for as long as registering takes.
    """
    if not has_active_port():
        return "no network card here has RDMA; transport=nixl with integrity=fenced tries CUDA IPC"
    try:
        agent = make_agent()
        try:
            agent.register(memory)
        finally:
            await agent.aclose()
    except _UNUSABLE as exc:
        return str(exc)
    return ""


class LocalNode:
    """Local node: owner of the agents and of the list of memory that peers may read.

    Without a namespace, a holder takes that of the first peer. The owner of the node closes its
    hasher, once no more blocks are moved.
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
        self.tls = TLSContexts(config)
        self.namespace = namespace
        self.memory = Regions()
        self.sockets = SocketAgent(config.timeout_s)
        self.hasher = BlockHasher()
        self._make_agent = make_agent
        self._threads = Threads("kvxfer-nixl-open", 1)
        boot_id, pid, pid_namespace = identify_host()
        self._hello = Hello(
            version=PROTOCOL_VERSION,
            oldest_version=OLDEST_VERSION,
            incarnation=runtime.unique_id().bytes,
            namespace=namespace,
            boot_id=boot_id,
            pid=pid,
            pid_namespace=pid_namespace,
        )
        self._regions: list[MemoryRegion] = []
        self._is_open = False
        self.agent: TransferAgent | None = None
        self._metadata = b""  # of the agent, whose thread may be busy later
        self._closing: set[asyncio.Future[None]] = set()  # previous agents
        self._opening = asyncio.Lock()

    @property
    def hello(self) -> Hello:
        """Greeting of this process."""
        return msgspec.structs.replace(self._hello, namespace=self.namespace)

    def hello_to(self, endpoint: Endpoint) -> Hello:
        """Make the greeting for the peer at an endpoint.

        A peer ends an earlier session of the same incarnation. So the incarnation differs for each
        endpoint: tickets, which come from outside, may name one peer by several endpoints.
        """
        name = str(endpoint).encode()
        incarnation = hashlib.blake2b(name, key=self._hello.incarnation, digest_size=16).digest()
        return msgspec.structs.replace(self.hello, incarnation=incarnation)

    def add_memory(self, regions: Sequence[MemoryRegion]) -> None:
        """Let peers read memory, unless they may already; to be called before the first handshake.

        Memory of GPUs requires `transport=nixl`: otherwise, a peer may turn out to be reached by
        sockets, which cannot read such memory.
        """
        if self._is_open:
            raise InvalidArgumentError("memory", "attached late", "any attached before other calls")
        transport = self.config.transport
        added = [region for region in regions if not self._has(region)]
        memory = self.memory.extend(added)
        if memory.devices != (HOST,) and transport != "nixl":
            devices = ", ".join(map(str, memory.devices))
            wanted = f"cpu with transport={transport}; that of GPUs needs transport=nixl"
            raise InvalidArgumentError("devices of memory", devices, wanted)
        self.sockets.register([region for region in added if region.device.type == HOST.type])
        self._regions += added
        self.memory = memory

    async def open(self) -> TransferAgent | None:
        """Open NIXL, if it is not open or has failed; None if only sockets are used."""
        self._is_open = True
        if self.config.transport == "socket":
            return None
        async with self._opening:
            if self.agent is not None and self.agent.is_closed:  # it has logged why
                self.end_agent()
            if self.agent is None:
                try:
                    await self._threads.run(self._open_agent)
                except _UNUSABLE as exc:
                    if self.config.transport == "nixl":
                        raise BackendUnavailableError(f"NIXL cannot be used: {exc}") from exc
                    logger.info("NIXL cannot be used; using sockets: %s", exc)
            return self.agent

    async def reach(self, *, data_port: int = 0) -> Reach:
        """Make the `Reach` of this process, for the handshake."""
        agent = await self.open()
        return Reach(
            metadata=b"" if agent is None else self._metadata,
            regions=list(self.memory),
            data_port=data_port,
        )

    async def link(self, greeting: Greeting) -> RemoteMemory:
        """Link a peer's memory: by NIXL where it is faster, else by sockets.

        A peer that only asks gives no memory: nothing is opened for it, whatever the transport.
        """
        peer = greeting.hello.incarnation.hex()
        try:
            regions = Regions(greeting.reach.regions)
            if memory := await self._link_by_nixl(greeting, regions):
                return memory
            name = greeting.session.session_id.hex()
            at = await self.sockets.add_peer(AgentMetadata(name, list(regions)).encode())
            return RemoteMemory(self.sockets, at, "socket", regions, self.hasher)
        except InvalidArgumentError as exc:
            raise ProtocolError(peer, f"sent {exc}") from exc

    def end_agent(self) -> None:
        """Begin to close the NIXL agent, which ends its reads; a new one is opened when needed."""
        agent, self.agent = self.agent, None
        if agent is not None:
            closing = asyncio.ensure_future(agent.aclose())
            closing.add_done_callback(fetch_error)
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def wait_ended(self, timeout_s: float | None = None) -> None:
        """Wait until the previous agents are closed, at most `timeout_s`."""
        if self._closing:
            await asyncio.wait(set(self._closing), timeout=timeout_s)

    async def aclose(self) -> None:
        """Close the agents; may be called again."""
        self.tls.close()
        await self._threads.aclose()  # its thread may be opening an agent
        self.end_agent()
        await self.wait_ended()
        await self.sockets.aclose()

    async def _link_by_nixl(self, greeting: Greeting, regions: Regions) -> RemoteMemory | None:
        if not greeting.reach.regions:
            return None
        agent, metadata = self.agent, greeting.reach.metadata
        carrier = "socket" if agent is None else agent.carrier(self.hello, greeting.hello)
        demanded = self.config.transport == "nixl"
        if agent is None or carrier == "socket" or not metadata:
            if demanded:
                raise BackendUnavailableError(
                    "transport=nixl, but NIXL would have to use TCP to reach the peer"
                )
            return None
        timeout_s = LINK_SHARE * self.config.handshake_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                name = await agent.add_peer(metadata)
        except (InvalidArgumentError, PeerLostError, TimeoutError) as exc:
            reason = str(exc) or f"it does not answer within {timeout_s:g} s"
            if demanded:
                raise BackendUnavailableError(f"transport=nixl, but {reason}") from exc
            text = printable(reason, MAX_TEXT_CHARACTERS)
            logger.warning("NIXL cannot reach a peer; using sockets: %s", text)
            return None
        return RemoteMemory(agent, name, carrier, regions, self.hasher)

    def _has(self, region: MemoryRegion) -> bool:
        stop = region.address + region.num_bytes
        return any(
            known.address <= region.address and stop <= known.address + known.num_bytes
            for known in self._regions
        )

    def _open_agent(self) -> None:
        """Open the agent; the next call finds it, even if this one's caller was cancelled."""
        agent = self._make_agent()
        agent.register(self._regions)
        self._metadata, self.agent = agent.metadata, agent
