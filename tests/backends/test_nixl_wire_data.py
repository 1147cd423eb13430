"""Data connections: exactly the registered bytes that a read asks for are read."""

import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import pytest
from numpy.typing import NDArray

from kvxfer import runtime
from kvxfer.backends.nixl import tls_contexts
from kvxfer.backends.nixl.wire.data import MAX_VIEWS, DataConnection
from kvxfer.backends.nixl.wire.frames import FrameCodec, FrameKeys
from kvxfer.backends.nixl.wire.handshake import Role, Session
from kvxfer.backends.nixl.wire.messages import Message, Read, Reading
from kvxfer.backends.nixl.wire.regions import Regions
from kvxfer.errors import PeerError, TransferFailedError
from kvxfer.runtime import Runtime
from tests.backends.agent_contract import words
from tests.backends.nixl_wire import HOST, Authority

MEMORY_BYTES = 1 << 20
LIMIT_S = 4.0

Bytes = NDArray[np.uint8]


@dataclass
class Ends:
    """Both ends of a sealed connection, with their sockets, and the memory that is served."""

    client_socket: socket.socket
    server_socket: socket.socket
    executor: ThreadPoolExecutor
    memory: Bytes = field(init=False)

    def __post_init__(self) -> None:
        self.memory = np.random.default_rng(7).integers(0, 256, MEMORY_BYTES, np.uint8)
        self.client = DataConnection(self.client_socket, "server")
        self.server = DataConnection(self.server_socket, "client")
        for connection, role in ((self.client, Role.ASKING), (self.server, Role.SERVING)):
            connection.secure(keys(role))
            connection.begin(LIMIT_S)

    def serve(self) -> "Future[None]":
        regions = Regions([(address(self.memory), MEMORY_BYTES)])
        return self.executor.submit(self.server.serve, lambda: regions)

    def require_served(self) -> None:
        """Check that a read gets exactly the bytes that it asks for."""
        into = np.zeros(MEMORY_BYTES, np.uint8)
        places = words(address(into) + 3), words(address(self.memory) + 3)
        self.client.read(*places, words(5))
        assert np.array_equal(into[3:8], self.memory[3:8])
        assert not into[:3].any()
        assert not into[8:].any()


def address(memory: Bytes) -> int:
    return int(memory.ctypes.data)


def keys(role: Role) -> FrameKeys:
    return Session(role, session_id=b"", key=b"").frame_keys(1)


def frames(role: Role, *messages: Message) -> bytes:
    """Make the first frames that a side would send."""
    codec = FrameCodec("")
    codec.secure(keys(role))
    return b"".join(map(codec.encode, messages))


@pytest.fixture(params=["plain", "TLS"])
def ends(request: pytest.FixtureRequest, authority: Authority) -> Iterator[Ends]:
    with socket.create_server((HOST, 0)) as listener, ThreadPoolExecutor(2) as executor:
        accepted = executor.submit(lambda: listener.accept()[0])
        asking: socket.socket = socket.create_connection(listener.getsockname())
        serving = accepted.result()
        if request.param == "TLS":
            client, server = tls_contexts(authority.config())
            assert client is not None
            assert server is not None
            wrapped = executor.submit(server.wrap_socket, serving, server_side=True)
            asking = client.wrap_socket(asking, server_hostname=HOST)
            serving = wrapped.result()
        both = Ends(asking, serving, executor)
        yield both
        both.client.close()
        both.server.close()


@pytest.mark.parametrize(
    ("offset", "length"),
    [
        (-1, 1),
        (-1, 2),
        (MEMORY_BYTES, 1),
        (MEMORY_BYTES - 1, 2),
        (0, MEMORY_BYTES + 1),
        (0, 0),
        (0, 2**64 - 1),
        (1, 2**64 - 1),  # ends before it begins, within the memory
        (MEMORY_BYTES - 1, 2**64 - MEMORY_BYTES),
        (None, 1),
        (None, 2**64 - 1),
    ],
)
@pytest.mark.parametrize("others", [0, 3, 2 * MAX_VIEWS])
def test_a_read_of_other_bytes_is_refused_and_the_next_one_is_not(
    ends: Ends, offset: int | None, length: int, others: int
) -> None:
    ends.serve()
    start = address(ends.memory)
    wrong = 2**64 - 1 if offset is None else start + offset
    into = np.zeros(MEMORY_BYTES, np.uint8)
    local = words(*[address(into)] * (others + 1))
    with pytest.raises(TransferFailedError, match="expected"):
        ends.client.read(local, words(*[start] * others, wrong), words(*[1] * others, length))
    assert not into.any()
    ends.require_served()


@pytest.mark.parametrize(
    ("addresses", "lengths"), [(0, 8), (8, 0), (8, 16), (16, 8), (7, 7), (9, 9), (8, 7)]
)
def test_arrays_that_do_not_fit_are_refused_and_the_next_read_is_not(
    ends: Ends, addresses: int, lengths: int
) -> None:
    ends.serve()
    into = np.zeros(64, np.uint8)
    remote, sizes = np.zeros(addresses, np.uint8), np.ones(lengths, np.uint8)
    with pytest.raises(TransferFailedError, match="8 for each fragment"):
        ends.client.read(words(address(into)), remote, sizes)  # type: ignore[arg-type]
    assert not into.any()
    ends.require_served()


async def test_a_connection_without_tls_that_is_lost_at_once_says_nothing_of_tls() -> None:
    plain = socket.socket()
    plain.close()
    with pytest.raises(PeerError, match="connection lost"):
        await DataConnection.secured(plain, "peer", None)


def test_a_socket_keeps_its_number_while_a_thread_uses_it(ends: Ends) -> None:
    """Otherwise the next socket would get the number, and the thread would take its bytes."""
    in_call, go_on = threading.Event(), threading.Event()

    def regions() -> Regions:
        in_call.set()
        go_on.wait(LIMIT_S)
        return Regions([(address(ends.memory), MEMORY_BYTES)])

    serving = ends.executor.submit(ends.server.serve, regions)
    read = Read(addresses=words(address(ends.memory)).tobytes(), lengths=words(9).tobytes())
    ends.client_socket.sendall(frames(Role.ASKING, read))
    in_call.wait(LIMIT_S)
    number = ends.server_socket.fileno()
    ends.server.close()
    assert ends.server_socket.fileno() == number
    go_on.set()
    with pytest.raises(PeerError):
        serving.result(LIMIT_S)
    assert ends.server_socket.fileno() == -1


@pytest.mark.parametrize("step", range(7))
def test_a_read_that_is_closed_at_any_step_takes_the_right_bytes_or_none(
    ends: Ends, step: int
) -> None:
    """With TLS, encrypted bytes may still be received from the kernel's buffer."""
    there = ends.memory[:1000]
    for said in (frames(Role.SERVING, Reading()), there.tobytes()):
        ends.server_socket.sendall(said)
    steps = itertools.count()

    class Closing(Runtime):
        def monotonic(self) -> float:
            if next(steps) == step:
                ends.client.close()
            return time.monotonic()

    into = np.zeros(1000, np.uint8)
    with contextlib.suppress(PeerError), runtime.use(Closing()):
        ends.client.read(words(address(into)), words(address(there)), words(1000))
        assert np.array_equal(into, there)
    assert not into.any() or np.array_equal(into, there)
