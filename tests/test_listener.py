"""Listener: at the limit of descriptors it goes on, and says so once."""

import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

pytestmark = pytest.mark.processes

LIMIT_S = 30
NUM_CLIENTS = 100
SERVE = """
import asyncio, logging, os, resource
from kvxfer.cli import http_pages
from kvxfer.endpoint import Endpoint

logging.basicConfig()
http_pages.MAX_CONNECTIONS = 10_000

async def main():
    async with http_pages.HTTPPages(Endpoint("127.0.0.1", 0), {}, timeout_s=600) as pages:
        used = len(os.listdir("/proc/self/fd"))
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 20, hard))
        print(pages.endpoint.port, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.fixture
def server() -> Iterator["subprocess.Popen[str]"]:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", SERVE], stdout=pipe, stderr=pipe, text=True) as it:
        yield it
        it.kill()


def test_silent_clients_make_room_where_no_descriptor_is_left(
    server: "subprocess.Popen[str]",
) -> None:
    assert server.stdout is not None
    assert server.stderr is not None
    address = "127.0.0.1", int(server.stdout.readline())
    with contextlib.ExitStack() as stack:
        for _ in range(NUM_CLIENTS):
            stack.enter_context(socket.create_connection(address, timeout=LIMIT_S))
        asking = stack.enter_context(socket.create_connection(address, timeout=LIMIT_S))
        asking.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert asking.recv(12) == b"HTTP/1.1 404"
    server.kill()
    said = server.stderr.read()
    assert said.count("Too many open files") == said.count("\n") == 1, said
