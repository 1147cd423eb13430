"""What others would move blocks with: NIXL itself, and one TCP connection."""

import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from kvxfer.backends.host.private_memory import PrivateMemory
from kvxfer.backends.nixl_module import import_nixl

TOTAL_BYTES = 64 << 20
"""Of a batch, and of the memory on either side."""

SEND, RECEIVE, TAKEN = b"s", b"r", b"t"

Indices = NDArray[np.int32]
Operation = Literal["READ", "WRITE"]


def allocate(seed: int) -> NDArray[np.uint8]:
    """Allocate `TOTAL_BYTES`, in such pages as a holder's blocks are in, with random bytes."""
    memory = PrivateMemory(TOTAL_BYTES).memory
    words = memory.view(np.uint64)
    words[:] = np.random.default_rng(seed).integers(0, 1 << 63, len(words), np.uint64)
    return memory


class RawAgent:
    """NIXL as its documentation uses it: lists are prepared once, a batch is a list of indices.

    Args:
        name: Of the agent.
        memory: What it may move; kept.
        own_progress: Whether NIXL runs a thread that makes progress. Where memory is reached by
            the kernel the side that is reached needs none but when connecting.
    """

    def __init__(self, name: str, memory: NDArray[np.uint8], *, own_progress: bool) -> None:
        nixl = import_nixl(otherwise="benchmark something else")
        config = nixl.nixl_agent_config(enable_prog_thread=own_progress, backends=["UCX"])
        self.agent = nixl.nixl_agent(name, config)
        self._memory = memory
        self.agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
        self._lists: dict[int, tuple[Any, Any]] = {}
        self._peer = ""
        self._their_address = 0

    @property
    def reach(self) -> tuple[bytes, int]:
        """What a peer needs to `connect`."""
        return self.agent.get_agent_metadata(), self._memory.ctypes.data

    def connect(self, reach: tuple[bytes, int]) -> None:
        """Get to know the peer."""
        metadata, self._their_address = reach
        self._peer = self.agent.add_remote_agent(metadata).decode()

    def prepare(self, fragment_bytes: int) -> None:
        """Prepare lists of the whole memory on both sides, in fragments of a size, once."""
        if fragment_bytes in self._lists:
            return
        ours = self._rows(self._memory.ctypes.data, fragment_bytes)
        theirs = self._rows(self._their_address, fragment_bytes)
        self._lists[fragment_bytes] = (
            self.agent.prep_xfer_dlist("NIXL_INIT_AGENT", ours, "DRAM"),
            self.agent.prep_xfer_dlist(self._peer, theirs, "DRAM"),
        )

    def move(
        self, operation: Operation, fragment_bytes: int, ours: Indices, theirs: Indices
    ) -> None:
        """Move fragments; blocks, and polls without a pause.

        Args:
            operation: Which way.
            fragment_bytes: Of the lists that the indices are of.
            ours: Indices on this side.
            theirs: Their counterparts.
        """
        local, remote = self._lists[fragment_bytes]
        handle = self.agent.make_prepped_xfer(operation, local, ours, remote, theirs)
        state = self.agent.transfer(handle)
        while state == "PROC":
            state = self.agent.check_xfer_state(handle)
        handle.release()
        if state != "DONE":
            raise RuntimeError(f"NIXL says {state} of a {operation}")

    def make_progress(self) -> None:
        """Let NIXL answer what a peer that connects asks for."""
        self.agent.get_new_notifs()

    def _rows(self, address: int, fragment_bytes: int) -> NDArray[np.uint64]:
        starts = np.arange(
            0, TOTAL_BYTES - fragment_bytes + 1, fragment_bytes, dtype=np.uint64
        ) + np.uint64(address)
        sizes = np.full_like(starts, fragment_bytes)
        return np.column_stack([starts, sizes, np.zeros_like(starts)])


class PlainServer:
    """Sends and receives memory over one TCP connection, as most would write it.

    Args:
        memory: Sent, and received into, in blocks.
        block_bytes: Of one call.
    """

    def __init__(self, memory: NDArray[np.uint8], block_bytes: int) -> None:
        self._memory = memory
        self._block_bytes = block_bytes
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with self._listener:
            connection, _ = self._listener.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with connection, suppress(ConnectionError):
            while order := connection.recv(1):
                views = _blocks(self._memory, self._block_bytes)
                if order == SEND:
                    for view in views:
                        connection.sendall(view)
                else:
                    for view in views:
                        _receive(connection, view)
                    connection.sendall(TAKEN)


class PlainClient:
    """The other end.

    Args:
        port: Of a `PlainServer` on this machine.
        memory: Received into, and sent.
        block_bytes: Of one call.
        order: Numbers of the blocks in which they are moved.
    """

    def __init__(
        self, port: int, memory: NDArray[np.uint8], block_bytes: int, order: Sequence[int]
    ) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        views = list(_blocks(memory, block_bytes))
        self._views = [views[index] for index in order]

    def load(self) -> None:
        """Receive everything."""
        self._socket.sendall(SEND)
        for view in self._views:
            _receive(self._socket, view)

    def store(self) -> None:
        """Send everything, and wait until it was taken."""
        self._socket.sendall(RECEIVE)
        for view in self._views:
            self._socket.sendall(view)
        self._socket.recv(1)

    def close(self) -> None:
        """End the connection."""
        self._socket.close()


def _blocks(memory: NDArray[np.uint8], block_bytes: int) -> Iterator[memoryview]:
    for start in range(0, memory.nbytes, block_bytes):
        yield memory[start : start + block_bytes].data


def _receive(connection: socket.socket, view: memoryview) -> None:
    while view:
        count = connection.recv_into(view)
        if not count:
            raise ConnectionError("the other side is gone")
        view = view[count:]
