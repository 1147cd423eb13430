"""Session of one engine that is attached to a host pool."""

import asyncio
import contextlib
import itertools
import logging
import os
import socket
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

import msgspec
import numpy as np

from kvxfer.backends.host import HostBackend
from kvxfer.backends.pool.messages import (
    MAX_RECEIVE_BYTES,
    Answer,
    Bye,
    Done,
    Failed,
    Found,
    Lookup,
    Message,
    Pin,
    Pinned,
    Publish,
    Question,
    Request,
    Reserve,
    Reserved,
    Unpin,
    encode,
    peer_of,
    receive,
)
from kvxfer.errors import BlockStateError, InvalidArgumentError, KVXferError
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.runtime import await_call
from kvxfer.storage.backend import Backend, Outcome, Status
from kvxfer.storage.keys import BlockKey
from kvxfer.storage.lending import BlockParts, ReservedBlocks, require_parts_in_blocks
from kvxfer.tiering import TieredBackend

GRACE_S = 5.0
"""Time after which memory is free that an engine was writing whose process cannot be watched."""

SO_PEERPIDFD = 77
"""Source: Linux 6.5, include/uapi/asm-generic/socket.h."""

logger = logging.getLogger(__name__)

_REQUEST: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)


@dataclass(frozen=True, slots=True)
class PoolStore:
    """Store behind a host pool.

    Attributes:
        backend: All tiers.
        host: The first of them, whose memory engines have mapped.
        chunk_sizes: Bytes of a chunk of each group.
    """

    backend: Backend
    host: HostBackend
    chunk_sizes: Sequence[int]


@dataclass(frozen=True, slots=True)
class _Room:
    """Slots that an engine is writing.

    Attributes:
        reserved: The slots; the blocks in them are kept at the end of the stack.
        stack: Ends the reservation.
        parts: The blocks for these slots.
    """

    reserved: ReservedBlocks
    stack: AsyncExitStack
    parts: BlockParts


class PoolSession:
    """Session of one engine: answers its requests, one after the other.

    When the engine ends the connection, its pins are released at once: it is dead, or reads no
    more. Slots that it was writing are free when it said so, or its process has ended: a copy that
    a GPU has begun outlives the connection.

    Args:
        connection: The connection, non-blocking; closed by its maker.
        store: Store of the blocks.
    """

    _numbers = itertools.count(1)

    def __init__(self, connection: socket.socket, store: PoolStore) -> None:
        self._connection = connection
        self._store = store
        self._chunk_sizes = store.chunk_sizes
        self._pins: Counter[BlockKey] = Counter()
        self._num_batches = 0
        self._rooms: dict[int, _Room] = {}
        self._draining = False
        self._number = next(self._numbers)
        self._pid, _ = peer_of(connection)
        self._process = _watch(connection, self._pid)

    def __str__(self) -> str:
        return f"engine {self._number} (process {self._pid})"

    @property
    def num_pins(self) -> int:
        """Batches that this engine has pinned."""
        return self._num_batches if self._pins else 0

    @property
    def is_idle(self) -> bool:
        """Whether this engine reads and stores nothing."""
        return not (self._pins or self._rooms)

    def drain(self) -> None:
        """Refuse what begins anew."""
        self._draining = True

    async def serve(self, welcome: Message, memory: int) -> None:
        """Answer until the engine ends the connection, and release what it had.

        Args:
            welcome: The first answer.
            memory: Descriptor of the pool's memory, which goes with it.
        """
        said_bye, loop = False, asyncio.get_running_loop()
        if self._process >= 0:  # a child that it forked would keep its end open
            loop.add_reader(self._process, self._end_connection)
        try:
            socket.send_fds(self._connection, [encode(welcome)], [memory])
            while not said_bye:
                request = _REQUEST.decode(await receive(self._connection))
                if isinstance(request, Bye):
                    said_bye = True
                elif isinstance(request, Unpin):
                    self._unpin(request)
                else:
                    await self._send(await self._answer(request))
        except (OSError, EOFError):
            pass
        except asyncio.CancelledError:
            said_bye = True  # this process ends, and stores nothing any more
            raise
        except ValueError as exc:
            logger.warning("%s sent what is no request: %s", self, exc)
            try:
                await self._hear_end()  # until then its threads may read what it has pinned
            except asyncio.CancelledError:
                said_bye = True
                raise
        finally:
            if self._process >= 0:
                loop.remove_reader(self._process)
            await self._release(at_once=said_bye)

    def _end_connection(self) -> None:
        """End a connection whose engine has ended, whoever inherited its end."""
        asyncio.get_running_loop().remove_reader(self._process)
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    async def _hear_end(self) -> None:
        """End our side of the connection, and wait for the engine's end of it."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)
            while await asyncio.get_running_loop().sock_recv(self._connection, MAX_RECEIVE_BYTES):
                pass

    async def _send(self, answer: Answer) -> None:
        with contextlib.suppress(OSError):  # what it sent before it went is still read
            await asyncio.get_running_loop().sock_sendall(self._connection, encode(answer))

    async def _answer(self, request: Question) -> Answer:
        try:
            if isinstance(request, Publish):
                return await self._publish(request)
            if self._draining:
                return Failed(reason="it is about to end")
            if isinstance(request, Lookup):
                return Found(there=await self._find(request.keys, request.within_s))
            if isinstance(request, Pin):
                return await self._pin(request)
            if isinstance(request, Reserve):
                return await self._reserve(request)
            return Done(done=await await_call(self._store.backend.delete(request.keys)))
        except KVXferError as exc:
            return Failed(reason=str(exc))
        except Exception as exc:
            logger.exception("%s of %s failed", type(request).__name__, self)
            return Failed(reason=repr(exc))

    async def _find(self, keys: list[BlockKey], within_s: float) -> list[bool]:
        """Look up blocks; those that an engine is storing are misses, as in any tier."""
        host = self._store.host
        asked = [key for key in keys if not host.is_storing(key)]
        there: set[BlockKey] = set()
        if asked:
            try:
                async with asyncio.timeout(within_s):
                    found = await await_call(self._store.backend.lookup(asked))
            except TimeoutError:
                logger.warning("a lookup in the tiers below took longer than %g s", within_s)
                found = await host.lookup(asked)
            there = {key for key, is_there in zip(asked, found, strict=True) if is_there}
        return [key in there for key in keys]

    async def _pin(self, request: Pin) -> Pinned:
        rows, slots = self._store.host.pin(request.keys)
        if len(rows) < len(request.keys) and isinstance(self._store.backend, TieredBackend):
            self._store.host.unpin([request.keys[row] for row in rows])
            there = set(rows)
            missing = [key for row, key in enumerate(request.keys) if row not in there]
            await self._find(missing, request.within_s)
            rows, slots = self._store.host.pin(request.keys)
        self._pins.update(request.keys[row] for row in rows)
        self._num_batches += bool(rows)
        return Pinned(rows=rows, slots=slots)

    def _unpin(self, request: Unpin) -> None:
        ours = [key for key in request.keys if self._pins[key]]
        for key, (slot, reason) in request.corrupt.items():
            if key in ours:
                corrupt = Outcome(Status.CORRUPT, reason=reason)
                self._store.host.drop_corrupt([key], [slot], [corrupt])
        self._store.host.unpin(ours)
        self._pins.subtract(ours)
        self._num_batches -= bool(ours)
        self._pins = +self._pins

    async def _reserve(self, request: Reserve) -> Reserved:
        if request.number in self._rooms:
            raise InvalidArgumentError("number", request.number, "that of no other reservation")
        require_parts_in_blocks(
            BlockParts(request.keys, request.starts, request.sizes), self._chunk_sizes
        )
        host = self._store.host
        busy: list[int] = []
        rows: list[int] = []
        for row, key in enumerate(request.keys):
            (busy if host.is_storing(key) else rows).append(row)
        refused: dict[int, str] = {}
        given: list[int] = []
        slots: list[int] = []
        if rows:
            async with AsyncExitStack() as stack:
                making = host.make_room(_chosen(request, rows))
                room = await stack.enter_async_context(making)
                for row, outcome in zip(rows, room.outcomes, strict=True):
                    if outcome is None:
                        given.append(row)
                    elif not outcome.done:
                        refused[row] = outcome.reason
                if room.blocks is not None:
                    slots = self._slots_of(room.blocks)
                    parts = _chosen(request, given)
                    self._rooms[request.number] = _Room(room, stack.pop_all(), parts)
        return Reserved(rows=given, slots=slots, busy=busy, refused=refused)

    async def _publish(self, request: Publish) -> Done:
        room = self._rooms.pop(request.number, None)
        if room is None:
            raise InvalidArgumentError("number", request.number, "that of a reservation")
        num_blocks = len(room.parts.keys)
        is_written = len(request.checksums) == num_blocks
        if is_written:
            room.reserved.arrived.update(enumerate(request.checksums))
        await room.stack.aclose()
        if is_written and isinstance(self._store.backend, TieredBackend):
            self._store.backend.write_back(room.parts)
        return Done(done=[is_written] * num_blocks)

    async def _release(self, *, at_once: bool) -> None:
        with contextlib.suppress(BlockStateError):
            self._store.host.unpin(list(self._pins.elements()))
        self._pins.clear()
        try:
            if self._rooms and not at_once:
                await self._wait_for_end()
        finally:
            for room in self._rooms.values():
                await room.stack.aclose()
            self._rooms.clear()
            if self._process >= 0:
                os.close(self._process)

    def _slots_of(self, blocks: Descriptors) -> list[int]:
        pool = self._store.host.pool
        offsets = blocks.addresses.astype(np.int64) - pool.region.address
        slots: list[int] = (offsets // pool.shape.slot_size_bytes).tolist()
        return slots

    async def _wait_for_end(self) -> None:
        """Wait until the engine's process has ended."""
        if self._process < 0:
            await asyncio.sleep(GRACE_S)
            return
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(self._process, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(self._process)


def _chosen(request: Reserve, rows: Sequence[int]) -> BlockParts:
    return BlockParts(
        [request.keys[row] for row in rows],
        [request.starts[row] for row in rows],
        [request.sizes[row] for row in rows],
    )


def _watch(connection: socket.socket, pid: int) -> int:
    """Open a descriptor that becomes readable when the process has ended; -1 if nothing can."""
    with contextlib.suppress(OSError):
        return connection.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
    with contextlib.suppress(OSError):  # also a process of a container, which has no number here
        return os.pidfd_open(pid)
    return -1
