"""Listeners of pages and of the proxy: they survive the limit of descriptors, and log it once."""

import contextlib
import socket
import subprocess
import sys
import threading
from unittest.mock import patch

import pytest

from kvxfer.backends.nixl import NixlBackend, NixlConfig
from kvxfer.cli.http_pages import HTTPPages
from kvxfer.endpoint import Endpoint
from kvxfer.errors import BackendUnavailableError
from kvxfer.listener import listen_at
from kvxfer.units import ByteSize
from tests.cli import peers

LIMIT_S = 30
NUM_CLIENTS = 100
SERVE = """
import asyncio, logging, os, resource
from examples.proxy.listener import Listener
from kvxfer.cli import http_pages
from kvxfer.endpoint import Endpoint

logging.basicConfig()
http_pages.MAX_CONNECTIONS = 10_000
AT = Endpoint("127.0.0.1", 0)

class Answer(asyncio.Protocol):
    def connection_made(self, transport):
        self.transport = transport
    def data_received(self, data):
        self.transport.write(b"HTTP/1.1 404")

async def main():
    server = SERVER
    await (server.start() if isinstance(server, Listener) else server.__aenter__())
    used = len(os.listdir("/proc/self/fd"))
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 20, hard))
    print(server.endpoint.port, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""
SERVERS = {
    "pages": "http_pages.HTTPPages(AT, {}, timeout_s=600)",
    "proxy": "Listener(AT, Answer, timeout_s=600, max_connections=10_000)",
}


@pytest.mark.processes
@pytest.mark.parametrize("name", SERVERS)
def test_silent_clients_make_room_where_no_descriptor_is_left(name: str) -> None:
    command, pipe = [sys.executable, "-c", SERVE.replace("SERVER", SERVERS[name])], subprocess.PIPE
    with (
        subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as server,
        contextlib.ExitStack() as stack,
    ):
        stack.callback(server.kill)
        assert server.stdout is not None
        assert server.stderr is not None
        address = "127.0.0.1", int(server.stdout.readline())
        for _ in range(NUM_CLIENTS):
            stack.enter_context(socket.create_connection(address, timeout=LIMIT_S))
        asking = stack.enter_context(socket.create_connection(address, timeout=LIMIT_S))
        asking.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert asking.recv(12) == b"HTTP/1.1 404"
        server.kill()
        said = server.stderr.read()
        assert said.count("Too many open files") == said.count("\n") == 1, said


FOREIGN = socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("2001:db8::1", 0, 0, 0)
LOOPBACK = socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0)


async def test_addresses_of_a_name_that_this_machine_lacks_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As `localhost` has one of IPv6 in containers that have no IPv6."""
    found = [FOREIGN, LOOPBACK]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    (listening,), endpoint = await listen_at(Endpoint("localhost", 0))
    with listening:
        assert listening.getsockname() == ("127.0.0.1", endpoint.port)
    config = NixlConfig(listen="localhost:0", capacity=ByteSize(1 << 20), transport="socket")
    async with NixlBackend(config, peers.namespace()) as holder:
        await holder.start()
        assert await holder.lookup(peers.KEYS) == [False] * len(peers.KEYS)
    del found[1:]
    with pytest.raises(OSError, match="2001:db8::1"):
        await listen_at(Endpoint("localhost", 0))


async def test_all_addresses_of_a_machine_are_those_of_ipv4_too() -> None:
    """`::` is said to be all of them, as `0.0.0.0`."""
    if not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    (listening,), endpoint = await listen_at(Endpoint("::", 0))
    with listening:
        for host in ("127.0.0.1", "::1"):
            socket.create_connection((host, endpoint.port), timeout=LIMIT_S).close()


async def test_servers_say_which_name_no_thread_could_be_started_to_look_up() -> None:
    config = NixlConfig(listen="localhost:0", capacity=ByteSize(1 << 20), transport="socket")
    async with NixlBackend(config, peers.namespace()) as holder:
        for begin in (holder.start, HTTPPages(Endpoint("localhost", 0), {}).__aenter__):
            with (
                patch.object(threading.Thread, "start", side_effect=RuntimeError("no thread")),
                pytest.raises(BackendUnavailableError, match="localhost cannot be looked up: no"),
            ):
                await begin()
