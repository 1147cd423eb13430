"""Baselines of `make bench NAME=nixl`: NIXL itself, and one plain TCP connection."""

import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from kvxfer.backends.host.memory import PrivateMemory
from kvxfer.backends.nixl.agents.nixl_module import import_nixl

TOTAL_BYTES = 64 << 20
"""Bytes of a batch, and of the memory on either side, unless the caller says otherwise."""

LIMIT_S = 60.0
"""Time that NIXL may take to move a batch: a transfer to a peer that does not answer never ends."""

TCP_ALONE = {"UCX_TLS": "tcp,self" + ",cuda_copy" * torch.cuda.is_available()}
"""Environment in which UCX moves bytes between processes by TCP alone.

NIXL opens no UCX without CUDA on a machine with a GPU.
"""

SEND, RECEIVE, TAKEN = b"s", b"r", b"t"

Indices = NDArray[np.int32]
NixlOperation = Literal["READ", "WRITE"]


def allocate(seed: int, num_bytes: int = TOTAL_BYTES) -> NDArray[np.uint8]:
    """Allocate random bytes, in the same kind of pages as a holder's blocks."""
    memory = PrivateMemory(num_bytes).memory
    words = memory.view(np.uint64)
    words[:] = np.random.default_rng(seed).integers(0, 1 << 63, len(words), np.uint64)
    return memory


class RawAgent:
    """NIXL agent used as documented: lists are prepared once, a batch is a list of indices.

    Args:
        name: Name of the agent.
        memory: Memory that it may move, as large as the peer's; kept alive.
        own_progress: Whether NIXL runs a thread that makes progress. Where the kernel copies
            between processes, the passive side needs it for connecting, and now and then.
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
        """Metadata and address that a peer needs to `connect`."""
        return self.agent.get_agent_metadata(), self._memory.ctypes.data

    def connect(self, reach: tuple[bytes, int]) -> None:
        """Add the peer by its metadata."""
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
        self, operation: NixlOperation, fragment_bytes: int, ours: Indices, theirs: Indices
    ) -> None:
        """Move fragments of prepared lists by their indices; blocks, and polls without a pause.

        Raises:
            RuntimeError: It failed, or has not ended within `LIMIT_S`.
        """
        local, remote = self._lists[fragment_bytes]
        handle = self.agent.make_prepped_xfer(operation, local, ours, remote, theirs)
        stop = time.monotonic() + LIMIT_S
        state = self.agent.transfer(handle)
        while state == "PROC" and time.monotonic() < stop:
            state = self.agent.check_xfer_state(handle)
        handle.release()
        if state != "DONE":
            raise RuntimeError(f"NIXL ended a {operation} in state {state}")

    def make_progress(self) -> None:
        """Let NIXL answer a peer that connects."""
        self.agent.get_new_notifs()

    def _rows(self, address: int, fragment_bytes: int) -> NDArray[np.uint64]:
        starts = np.arange(
            0, self._memory.nbytes - fragment_bytes + 1, fragment_bytes, dtype=np.uint64
        ) + np.uint64(address)
        sizes = np.full_like(starts, fragment_bytes)
        return np.column_stack([starts, sizes, np.zeros_like(starts)])


class PlainServer:
    """Server that sends and receives memory over one TCP connection, a block in each call."""

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
    """Client of a `PlainServer`, which moves blocks of its memory in a given order."""

    def __init__(
        self, port: int, memory: NDArray[np.uint8], block_bytes: int, order: Sequence[int]
    ) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        views = list(_blocks(memory, block_bytes))
        self._views = [views[index] for index in order]

    def load(self) -> None:
        """Receive all blocks."""
        self._socket.sendall(SEND)
        for view in self._views:
            _receive(self._socket, view)

    def store(self) -> None:
        """Send all blocks, and wait until the server has received them."""
        self._socket.sendall(RECEIVE)
        for view in self._views:
            self._socket.sendall(view)
        self._socket.recv(1)

    def close(self) -> None:
        """Close the connection."""
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
