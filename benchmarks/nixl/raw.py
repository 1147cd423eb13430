"""Baselines of `make bench NAME=nixl`: NIXL alone, and one plain TCP connection."""

import socket
import threading
import time
import uuid
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
"""Maximum time for NIXL to move a batch: a transfer never ends if the peer does not answer."""

TCP_ALONE = {"UCX_TLS": "tcp,self" + ",cuda_copy" * torch.cuda.is_available()}
"""Environment in which UCX moves bytes between processes by TCP alone.

On a machine with a GPU, NIXL does not open UCX without CUDA.
"""

SEND, RECEIVE, TAKEN = b"s", b"r", b"t"

Indices = NDArray[np.int32]
NixlOperation = Literal["READ", "WRITE"]
Reach = tuple[bytes, int]
"""Metadata of an agent, and the address of its memory."""


def allocate(seed: int, num_bytes: int = TOTAL_BYTES) -> NDArray[np.uint8]:
    """Allocate random bytes, in the same kind of pages as a holder's blocks."""
    memory = PrivateMemory(num_bytes).memory
    words = memory.view(np.uint64)
    words[:] = np.random.default_rng(seed).integers(0, 1 << 63, len(words), np.uint64)
    return memory


def fragments(order: NDArray[np.int64], num_per_block: int) -> tuple[Indices, Indices]:
    """List fragments of all blocks on both sides, layer by layer; hardly any two touch on both.

    Args:
        order: Our block for each of theirs, which are in order.
        num_per_block: Fragments of a block, each in the memory of another layer.
    """
    layers = np.arange(num_per_block) * len(order)
    near = (order[:, None] + layers).ravel().astype(np.int32)
    far = (np.arange(len(order))[:, None] + layers).ravel().astype(np.int32)
    return near, far


class RawAgent:
    """NIXL agent used as documented: lists are prepared once, a batch is a list of indices.

    Args:
        memory: Memory that it may move, as large as the peer's; kept alive.
        own_progress: Whether NIXL runs a thread that makes progress. Where the kernel copies
            between processes, the passive side needs it for connecting, and now and then.
    """

    def __init__(self, memory: NDArray[np.uint8], *, own_progress: bool) -> None:
        nixl = import_nixl(otherwise="benchmark something else")
        config = nixl.nixl_agent_config(enable_prog_thread=own_progress, backends=["UCX"])
        self._agent = nixl.nixl_agent(f"bench-{uuid.uuid4()}", config)
        self._memory = memory
        self._agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
        self._lists: dict[int, tuple[Any, Any]] = {}
        self.reach: Reach = self._agent.get_agent_metadata(), memory.ctypes.data

    def connect(self, reach: Reach) -> None:
        """Add the peer."""
        metadata, self._their_address = reach
        self._peer = self._agent.add_remote_agent(metadata).decode()

    def move(
        self, operation: NixlOperation, fragment_bytes: int, ours: Indices, theirs: Indices
    ) -> float:
        """Move fragments of a size by their indices; blocks, and polls without a pause.

        Returns:
            Seconds, without the time to prepare lists of the whole memory once.

        Raises:
            RuntimeError: The transfer failed, or did not end within `LIMIT_S`.
        """
        if fragment_bytes not in self._lists:
            sides = ("NIXL_INIT_AGENT", self._memory.ctypes.data), (self._peer, self._their_address)
            local, remote = (
                self._agent.prep_xfer_dlist(whose, self._rows(address, fragment_bytes), "DRAM")
                for whose, address in sides
            )
            self._lists[fragment_bytes] = local, remote
        local, remote = self._lists[fragment_bytes]
        began = time.perf_counter()
        handle = self._agent.make_prepped_xfer(operation, local, ours, remote, theirs)
        stop = time.monotonic() + LIMIT_S
        state = self._agent.transfer(handle)
        while state == "PROC" and time.monotonic() < stop:
            state = self._agent.check_xfer_state(handle)
        handle.release()
        if state != "DONE":
            raise RuntimeError(f"NIXL ended a {operation} in state {state}")
        return time.perf_counter() - began

    def make_progress(self) -> None:
        """Let NIXL answer a peer that connects."""
        self._agent.get_new_notifs()

    def _rows(self, address: int, fragment_bytes: int) -> NDArray[np.uint64]:
        starts = np.arange(
            0, self._memory.nbytes - fragment_bytes + 1, fragment_bytes, dtype=np.uint64
        ) + np.uint64(address)
        sizes = np.full_like(starts, fragment_bytes)
        return np.column_stack([starts, sizes, np.zeros_like(starts)])


def serve_plain(memory: NDArray[np.uint8], block_bytes: int) -> int:
    """Serve one TCP connection that moves memory, one block per call; return the port."""
    listener = socket.create_server(("127.0.0.1", 0))
    views = list(_blocks(memory, block_bytes))

    def serve() -> None:
        with listener:
            connection, _ = listener.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with connection, suppress(ConnectionError):
            while order := connection.recv(1):
                for view in views:
                    if order == SEND:
                        connection.sendall(view)
                    else:
                        _receive(connection, view)
                if order == RECEIVE:
                    connection.sendall(TAKEN)

    threading.Thread(target=serve, daemon=True).start()
    return int(listener.getsockname()[1])


class PlainClient:
    """Client of `serve_plain`, which moves blocks of its memory in a given order."""

    def __init__(
        self, port: int, memory: NDArray[np.uint8], block_bytes: int, order: Sequence[int]
    ) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        views = list(_blocks(memory, block_bytes))
        self._views = [views[index] for index in order]
        self.close = self._socket.close

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


def _blocks(memory: NDArray[np.uint8], block_bytes: int) -> Iterator[memoryview]:
    for start in range(0, memory.nbytes, block_bytes):
        yield memory[start : start + block_bytes].data


def _receive(connection: socket.socket, view: memoryview) -> None:
    while view:
        count = connection.recv_into(view)
        if not count:
            raise ConnectionError("the other side is gone")
        view = view[count:]
