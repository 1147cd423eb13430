"""Both ends of a sealed data connection, with memory to read at either."""

import contextlib
import socket
import ssl
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvxfer.backends.nixl import client_context, server_context
from kvxfer.backends.nixl.wire.data import DataConnection
from kvxfer.backends.nixl.wire.frames import FrameCodec, FrameKeys
from kvxfer.backends.nixl.wire.handshake import Role, Session
from kvxfer.backends.nixl.wire.messages import Message, Read
from kvxfer.backends.nixl.wire.regions import Regions, Words
from tests.backends.nixl_wire import HOST, Authority

MEMORY_BYTES = 1 << 20
LIMIT_S = 4.0

Bytes = NDArray[np.uint8]


@dataclass
class Ends:
    """Both ends of a sealed connection, with their sockets, and the memory of either."""

    sockets: dict[Role, socket.socket]
    executor: ThreadPoolExecutor
    connections: dict[Role, DataConnection] = field(init=False)
    memories: dict[Role, Bytes] = field(init=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(7)
        self.connections = {role: DataConnection(s, role.name) for role, s in self.sockets.items()}
        self.memories = {role: rng.integers(0, 256, MEMORY_BYTES, np.uint8) for role in Role}
        for role, connection in self.connections.items():
            connection.secure(keys(role))
            connection.begin(LIMIT_S)

    @property
    def client(self) -> DataConnection:
        return self.connections[Role.ASKING]

    @property
    def server(self) -> DataConnection:
        return self.connections[Role.SERVING]

    @property
    def client_socket(self) -> socket.socket:
        return self.sockets[Role.ASKING]

    @property
    def server_socket(self) -> socket.socket:
        return self.sockets[Role.SERVING]

    def serve(self, role: Role = Role.SERVING) -> "Future[None]":
        """Serve the memory of one side, on a thread."""
        regions = Regions([(address(self.memories[role]), MEMORY_BYTES)])
        return self.executor.submit(self.connections[role].serve, lambda: regions)

    def read(self, offsets: list[int], lengths: list[int], role: Role = Role.ASKING) -> Bytes:
        """Read the other side's memory to the same offsets of fresh memory; return that."""
        into = np.zeros(MEMORY_BYTES, np.uint8)
        local, remote = address(into), address(self.memories[role.other])
        places = words(offsets)
        start = np.uint64(local), np.uint64(remote)
        self.connections[role].read(places + start[0], places + start[1], words(lengths))
        return into


def address(memory: Bytes) -> int:
    return int(memory.ctypes.data)


def words(values: list[int]) -> Words:
    return np.array(values, np.uint64)


def keys(role: Role) -> FrameKeys:
    return Session(role, session_id=b"", key=b"").frame_keys(1)


def frames(role: Role, *messages: Message) -> bytes:
    """Make the first frames that a side would send."""
    codec = FrameCodec("")
    codec.secure(keys(role))
    return b"".join(map(codec.encode, messages))


def a_read(memory: Bytes, num_bytes: int) -> Read:
    return Read(addresses=words([address(memory)]).tobytes(), lengths=words([num_bytes]).tobytes())


def contexts(authority: Authority) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    config = authority.config()
    client, server = client_context(config), server_context(config)
    assert client is not None
    assert server is not None
    return client, server


@contextlib.contextmanager
def both_ends(tls: Authority | None) -> Iterator[Ends]:
    """Open both ends of a connection, with TLS if there is an authority for it."""
    with socket.create_server((HOST, 0)) as listener, ThreadPoolExecutor(2) as executor:
        accepted = executor.submit(lambda: listener.accept()[0])
        asking: socket.socket = socket.create_connection(listener.getsockname())
        serving = accepted.result()
        if tls is not None:
            client, server = contexts(tls)
            wrapped = executor.submit(server.wrap_socket, serving, server_side=True)
            asking = client.wrap_socket(asking, server_hostname=HOST)
            serving = wrapped.result()
        both = Ends({Role.ASKING: asking, Role.SERVING: serving}, executor)
        yield both
        for end in both.connections.values():
            end.close()
