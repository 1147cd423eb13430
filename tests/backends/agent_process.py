"""Processes with a transfer agent, for tests: forked, so that none starts an interpreter.

`python -m tests.backends.agent_process FD` forks one at each request on that socket.
"""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

from kvxfer.kvcache.memory_region import HOST
from tests.backends.agent_contract import LocalPeer
from tests.backends.device_agent_contract import GPU, LocalDevicePeer

REPOSITORY = Path(__file__).parents[2]

GPU_VARIABLE = "KVXFER_TEST_GPU"
WITH_GPU = f"{GPU_VARIABLE}=0"
"""Environment of a process whose peer has memory of the GPU, too."""


class PeerProcess:
    """`Peer` in another process; its `pid` is valid for `os.kill` until `stop` or `kill`.

    It is a `DevicePeer` if it was started with `WITH_GPU`.
    """

    def __init__(self, nursery: "Nursery", environment: str) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self.pid = nursery.fork(environment, theirs)
        self._nursery = nursery
        self._socket, self._answers = ours, ours.makefile("rb")
        metadata, *addresses = self._answers.readline().split()
        self.metadata, self.address = bytes.fromhex(metadata.decode()), int(addresses[0])
        self.addresses = dict(zip((HOST, GPU), map(int, addresses), strict=False))

    async def fill(self, seed: int) -> None:
        await asyncio.to_thread(self._ask, f"fill {seed}\n")

    async def content(self) -> bytes:
        return await asyncio.to_thread(self._ask, "content 0\n")

    def stop(self) -> int:
        """Let the process end by itself, its agent left open; return its exit status."""
        self._answers.close()
        self._socket.close()
        return self._nursery.wait(self.pid)

    def kill(self) -> None:
        """Kill the process, also when it is stopped; may be called again."""
        if self._socket.fileno() != -1:
            os.kill(self.pid, signal.SIGKILL)
            self.stop()

    def _ask(self, question: str) -> bytes:
        self._socket.sendall(question.encode())
        return self._answers.read(int(self._answers.readline()))


class Nursery:
    """Server that forks processes which have their imports already."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        self._answers = self._socket.makefile("r")
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.backends.agent_process", str(theirs.fileno())],
                cwd=REPOSITORY,
                pass_fds=[theirs.fileno()],
            )
        self._answers.readline()

    def start(self, environment: str = "") -> PeerProcess:
        """Start a process, with one more variable in its environment: `NAME=value`."""
        return PeerProcess(self, environment)

    def fork(self, environment: str, connection: socket.socket) -> int:
        """Fork a process that answers requests on a connection; return its id."""
        socket.send_fds(self._socket, [f"fork {environment}\n".encode()], [connection.fileno()])
        return int(self._answers.readline())

    def wait(self, pid: int) -> int:
        """Wait for the end of a process; return its exit status, negative for a signal."""
        self._socket.sendall(f"wait {pid}\n".encode())
        return int(self._answers.readline())

    def close(self) -> None:
        self._answers.close()
        self._socket.close()
        self._process.wait()


def answer(connection: socket.socket) -> None:
    """Open an agent, and answer requests until the connection ends."""
    from kvxfer.backends.nixl.agents import NixlAgent
    from tests.cuda.gpu import Gpu

    peer: LocalPeer | LocalDevicePeer
    if GPU_VARIABLE in os.environ:
        peer = LocalDevicePeer(NixlAgent(), Gpu())
        addresses = [peer.addresses[HOST], peer.addresses[GPU]]
    else:
        peer = LocalPeer(NixlAgent())
        addresses = [peer.address]
    questions = connection.makefile("r")
    shown = " ".join(map(str, addresses))
    connection.sendall(f"{peer.metadata.hex()} {shown}\n".encode())
    for question in questions:
        verb, seed = question.split()
        if verb == "fill":
            asyncio.run(peer.fill(int(seed)))
        content = b""
        if verb == "content":
            assert isinstance(peer, LocalPeer)
            content = asyncio.run(peer.content())
        connection.sendall(f"{len(content)}\n".encode() + content)


def serve(control: socket.socket) -> None:
    """Fork and await processes until the connection ends."""
    control.sendall(b"ready\n")
    while True:
        request, descriptors, _, _ = socket.recv_fds(control, 1024, 1)
        if not request:
            return
        verb, _, argument = request.decode().rstrip("\n").partition(" ")
        if verb == "wait":
            _, status = os.waitpid(int(argument), 0)
            control.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
            continue
        with socket.socket(fileno=descriptors[0]) as connection:
            pid = os.fork()
            if not pid:
                control.close()
                name, _, value = argument.partition("=")
                os.environ.update({name: value} if name else {})
                answer(connection)
                return
        control.sendall(f"{pid}\n".encode())


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
