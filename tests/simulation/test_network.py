"""The simulated network behaves like the operating system's, and its faults as documented."""

import asyncio
import contextlib
import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvxfer import runtime
from kvxfer.backends.host.memory import SharedMemory
from kvxfer.testing.simulation import Simulation
from tests.simulation.test_disk import run_simulated as run_one

BYTES = os.urandom(300_000)
LOCAL = "127.0.0.1"

Body = Callable[[], None]


def run_simulated(body: Body) -> None:
    for seed in range(5):
        simulation = Simulation(seed)
        with runtime.use(simulation.runtime):
            simulation.runtime.scheduler.run(body)


@pytest.fixture(params=[pytest.param(lambda body: body(), id="ordinary"), run_simulated])
def run(request: pytest.FixtureRequest) -> Callable[[Body], None]:
    """Return a function that runs a body on the real or the simulated network."""
    chosen: Callable[[Body], None] = request.param
    return chosen


def on_either(body: Body) -> Callable[[Callable[[Body], None]], None]:
    """Make a test that runs a body on both networks."""
    return lambda run: run(body)


def listen_tcp() -> socket.socket:
    return runtime.listen((LOCAL, 0), family=socket.AF_INET, backlog=8)


def connect_tcp(listening: socket.socket) -> tuple[socket.socket, socket.socket]:
    client = runtime.open_socket(socket.AF_INET, socket.SOCK_STREAM)
    client.settimeout(10)
    client.connect(listening.getsockname())
    server, address = listening.accept()
    assert address == client.getsockname()
    assert server.getpeername() == client.getsockname()
    server.settimeout(10)
    return client, server


@contextlib.contextmanager
def connected() -> Iterator[tuple[socket.socket, socket.socket]]:
    with listen_tcp() as listening:
        client, server = connect_tcp(listening)
        with client, server:
            yield client, server


def send_for_ever(connection: socket.socket, data: bytes | bytearray = BYTES) -> None:
    while True:
        connection.send(data)


def receive(connection: socket.socket, count: int) -> bytes:
    received = bytearray()
    while len(received) < count and (data := connection.recv(count - len(received))):
        received += data
    return bytes(received)


@on_either
def test_bytes_arrive_in_order_and_then_the_end() -> None:
    with connected() as (client, server):
        sender = runtime.start_thread(client.sendall, name="sender", args=(BYTES,))
        assert receive(server, len(BYTES)) == BYTES
        sender.join()
        client.shutdown(socket.SHUT_WR)
        assert server.recv(10) == b""
        server.sendall(b"still open")
        assert receive(client, 10) == b"still open"


@on_either
def test_who_does_not_read_makes_the_sender_wait() -> None:
    with connected() as (client, _):
        client.settimeout(0.2)
        with pytest.raises(TimeoutError):
            client.sendall(BYTES * 100)
        client.setblocking(False)
        with pytest.raises(BlockingIOError):
            send_for_ever(client)


@on_either
def test_a_send_that_fails_does_not_hold_its_buffer() -> None:
    with connected() as (client, _):
        client.setblocking(False)
        buffer = bytearray(BYTES)
        with pytest.raises(BlockingIOError) as raised:
            send_for_ever(client, buffer)
        buffer.clear()
        assert raised.tb is not None  # and has the frame of the call


@on_either
def test_nobody_there_is_a_refusal_and_a_silent_one_a_timeout() -> None:
    with listen_tcp() as listening:
        address = listening.getsockname()
        client, server = connect_tcp(listening)
        with client, server:
            client.settimeout(0.1)
            with pytest.raises(TimeoutError):
                client.recv(1)
    late = runtime.open_socket(socket.AF_INET, socket.SOCK_STREAM)
    with late, pytest.raises(ConnectionRefusedError):
        late.connect(address)


@on_either
def test_to_close_with_unread_bytes_resets_the_other_end() -> None:
    with listen_tcp() as listening:
        client, server = connect_tcp(listening)
        with client:
            client.sendall(b"unread")
            runtime.sleep(0.1)
            server.close()
            with pytest.raises(ConnectionError):
                client.recv(1)
            with pytest.raises(ConnectionError):
                send_for_ever(client)


@on_either
def test_a_thread_that_waits_is_woken_when_its_end_is_shut() -> None:
    with connected() as (client, _):
        heard: list[bytes] = []
        waiter = runtime.start_thread(lambda: heard.append(client.recv(1)), name="waiter")
        runtime.sleep(0.05)
        client.shutdown(socket.SHUT_RDWR)
        waiter.join(5)
        assert heard == [b""]


@on_either
def test_a_path_carries_descriptors_and_says_who_is_there() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "socket")
        listening = runtime.open_socket(socket.AF_UNIX, socket.SOCK_STREAM)
        client = runtime.open_socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with pytest.raises(FileNotFoundError):
            client.connect(path)
        listening.bind(path)
        with pytest.raises(ConnectionRefusedError):
            client.connect(path)
        listening.listen()
        client.connect(path)
        server, _ = listening.accept()
        assert server.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)[4:8] == (
            os.geteuid().to_bytes(4, "little")
        )
        shared = SharedMemory.create(4096)
        socket.send_fds(server, [b"here"], [shared.fd])
        header, [fd], *_ = socket.recv_fds(client, 4, 1)
        mapped = SharedMemory(fd, 4096)
        shared.memory[:5] = memoryview(b"bytes")
        assert (header, bytes(mapped.memory[:5])) == (b"here", b"bytes")
        for each in (mapped, shared, client, server, listening):
            each.close()
        again = runtime.open_socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with again, pytest.raises(ConnectionRefusedError):
            again.connect(path)


def test_streams_of_asyncio_work_and_a_reader_waits_for_no_thread(
    run: Callable[[Body], None],
) -> None:
    async def echo(listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        listening.setblocking(False)
        connection, _ = await loop.sock_accept(listening)
        with connection:
            while data := await loop.sock_recv(connection, 100_000):
                await loop.sock_sendall(connection, data)

    async def main() -> None:
        with listen_tcp() as listening:
            serving = asyncio.create_task(echo(listening))
            port = listening.getsockname()[1]
            reader, writer = await runtime.connect(LOCAL, port, tls=None, buffer_bytes=1 << 16)
            writer.write(BYTES)
            assert await reader.readexactly(len(BYTES)) == BYTES
            writer.close()
            await writer.wait_closed()
            await serving

    run(lambda: runtime.run(main()))


def test_sockets_and_files_never_have_the_same_number() -> None:
    def body(simulation: Simulation) -> None:
        disk = runtime.disk()
        files = {disk.open(f"/{number}", os.O_CREAT | os.O_RDWR) for number in range(4)}
        with connected() as (client, server):
            assert files.isdisjoint({client.fileno(), server.fileno()})

    run_one(body, 1)


def test_what_is_sent_in_a_partition_arrives_when_it_is_over() -> None:
    def body(simulation: Simulation) -> None:
        with connected() as (client, server):
            simulation.runtime.network.partition("main", "main", 5.0)
            began = simulation.now
            client.sendall(b"late")
            assert receive(server, 4) == b"late"
            assert 5.0 <= simulation.now - began < 5.1

    run_one(body, 1)


def test_the_end_of_a_lost_machine_is_told_to_who_sends_later() -> None:
    def body(simulation: Simulation) -> None:
        with listen_tcp() as listening:
            client, server = connect_tcp(listening)
            server.vanish(simulation.runtime.scheduler.now + 3)  # type: ignore[attr-defined]
            client.settimeout(1)
            client.sendall(b"into nothing")
            with pytest.raises(TimeoutError):
                client.recv(1)
            runtime.sleep(3)
            client.sendall(b"still")
            with pytest.raises(ConnectionResetError):
                client.recv(1)

    run_one(body, 1)
