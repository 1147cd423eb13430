"""Probe of a holder: its namespace, whether it accepts this process, and how its bytes travel."""

import contextlib
from dataclasses import dataclass

import numpy as np

from kvxfer import runtime
from kvxfer.backends.nixl.agents import NixlAgent
from kvxfer.backends.nixl.agents.nixl_module import Carrier
from kvxfer.backends.nixl.config import NixlConfig
from kvxfer.backends.nixl.connection import Connection, deadline, open_channel
from kvxfer.backends.nixl.local_node import LocalNode
from kvxfer.backends.nixl.wire import messages as wire
from kvxfer.backends.nixl.wire.handshake import ask_hello
from kvxfer.endpoint import Endpoint
from kvxfer.errors import NamespaceMismatchError, TransferFailedError
from kvxfer.kvcache.memory_region import MemoryRegion
from kvxfer.storage.keys import Namespace

NUM_PINGS = 5
"""Number of round trips that are measured; the quickest one counts."""


@dataclass(frozen=True, slots=True)
class PeerProbe:
    """Result of a probe.

    Attributes:
        endpoint: Endpoint of the holder.
        namespace: The holder's namespace; None until an engine has settled one.
        is_here: Whether the holder runs on this machine, perhaps in another container.
        carrier: Carrier of the holder's bytes; None without a namespace, since it serves nobody.
        round_trip_s: Shortest time from a request to its answer; None without a namespace.
        description: Description of an engine's caches that the holder lends; None if it lends none.
    """

    endpoint: Endpoint
    namespace: Namespace | None
    is_here: bool
    carrier: Carrier | None = None
    round_trip_s: float | None = None
    description: bytes | None = None


async def probe_peer(config: NixlConfig, endpoint: Endpoint) -> PeerProbe:
    """Find out what a holder has, whether it accepts this process, and how its bytes would travel.

    Stores nothing, and settles no namespace: a holder without one checks only the secret.

    Raises:
        PeerError: The endpoint cannot be reached, is no holder, or refuses this process.
        InvalidArgumentError: The configuration cannot be used.
        BackendUnavailableError: `transport=nixl`, and NIXL cannot be used.
    """
    node = LocalNode(config, None, make_agent=NixlAgent)
    try:
        return await _probe(node, endpoint)
    finally:
        await node.aclose()
        await node.hasher.aclose()


async def _probe(node: LocalNode, endpoint: Endpoint) -> PeerProbe:
    timeout_s = node.config.handshake_timeout_s
    hello = await ask_hello(await open_channel(node, endpoint), node.hello, timeout_s=timeout_s)
    is_here = bool(hello.boot_id) and hello.boot_id == node.hello.boot_id
    if hello.namespace is None:
        # It checks that this process knows the secret, and only then refuses one without a model.
        with contextlib.suppress(NamespaceMismatchError):
            await (await Connection.open(node, endpoint)).aclose()
        return PeerProbe(endpoint, None, is_here)
    node.namespace = hello.namespace
    page = np.zeros(4096, np.uint8)  # a peer without memory would be served by any transport
    node.add_memory([MemoryRegion(page.ctypes.data, page.nbytes, owner=page)])
    async with contextlib.aclosing(await Connection.open(node, endpoint)) as connection:
        async with deadline(endpoint, "a round trip", timeout_s):
            round_trip_s = min([await _ping(connection) for _ in range(NUM_PINGS)])
            description: bytes | None = None
            with contextlib.suppress(TransferFailedError):  # most holders lend no caches
                answer = await connection.request(wire.Describe, wire.Described)
                description = answer.description
        return PeerProbe(
            endpoint,
            hello.namespace,
            is_here,
            carrier=connection.memory.carrier,
            round_trip_s=round_trip_s,
            description=description,
        )


async def _ping(connection: Connection) -> float:
    began = runtime.monotonic()
    await connection.request(wire.Ping, wire.Pong)
    return runtime.monotonic() - began
