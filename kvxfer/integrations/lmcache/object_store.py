"""Object store: LMCache's objects, cut into pieces, in a backend.

Bytes pass through buffers of the store: LMCache reuses the memory of an object as soon as it has an
answer, and a transfer that missed its deadline may still read or write.
"""

import asyncio
import ctypes
import logging
import struct
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from kvxfer import runtime
from kvxfer.copy_engine.cpu import CPUCopyEngine
from kvxfer.integrations.lmcache.answers import Task
from kvxfer.integrations.lmcache.interface import ObjectKey
from kvxfer.integrations.lmcache.object_keys import object_id_of, piece_key, piece_of
from kvxfer.integrations.lmcache.residents import Residents
from kvxfer.integrations.lmcache.settings import UNIT_BYTES, AdapterSettings
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.runtime import Calls, LogPause, Suspension, Threads
from kvxfer.storage.backend import Backend, Status
from kvxfer.storage.calls import delete_from, log_failed
from kvxfer.storage.key_locks import KeyLocks
from kvxfer.storage.keys import BlockKey
from kvxfer.storage.observer import Gauge, Reports
from kvxfer.storage.staging_memory import StagedBlocks, StagingMemory, allocate_aligned, staging_of
from kvxfer.transfer.event_loop import EngineLoop
from kvxfer.transfer.job import Direction

HEADER = struct.Struct(">8sQ16s")
"""Header of a piece: form, number of bytes of the object, digest of its shapes and types."""

FORM = b"KVXLMC02"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class StoredObject:
    """Object of LMCache, and its place in host memory."""

    key: ObjectKey
    address: int
    num_bytes: int
    layout: str  # its shapes and types
    index: int  # within its task
    owner: object  # keeps the memory alive

    def cut(self, piece_bytes: int) -> Iterator["Piece"]:
        """Cut the object into pieces of `piece_bytes`, each with the header."""
        layout = xxhash.xxh3_128_digest(self.layout.encode())
        object_id, head = object_id_of(self.key), HEADER.pack(FORM, self.num_bytes, layout)
        step = piece_bytes - len(head)
        for index, first in enumerate(range(0, max(1, self.num_bytes), step)):
            address, num_bytes = self.address + first, min(step, self.num_bytes - first)
            yield Piece(self, piece_key(object_id, index), index, head, address, num_bytes)


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Piece of an object: its header `head`, and `num_bytes` of the object at `address`."""

    of: StoredObject
    key: BlockKey
    index: int
    head: bytes
    address: int
    num_bytes: int

    @property
    def stored_bytes(self) -> int:
        """Bytes that are stored: whole units, padded with zeros."""
        return -(-(len(self.head) + self.num_bytes) // UNIT_BYTES) * UNIT_BYTES


class ObjectStore:
    """Store of objects, on an event loop of its own. `begin` may be called on any thread.

    An object is there if and only if its first piece is, which is stored last. This is no
    `RowStore`: unlike an engine's blocks, the pieces of a batch differ in size, and no caller
    waits. The store closes the backend, and tells `residents` what the backend does not report.
    """

    def __init__(
        self, open_it: Callable[[], Backend], settings: AdapterSettings, residents: Residents
    ) -> None:
        allocate_aligned(settings.staging)  # fails for too large a size before a tier is opened
        self._settings, self._residents = settings, residents
        self._staging: dict[Direction, StagingMemory] = {}
        self._loop = EngineLoop("LMCache's store")
        self._calls = Calls()
        self._deletes = KeyLocks()
        self._copies = CPUCopyEngine()
        self._threads = Threads("kvxfer-lmcache", 2)
        self._suspension = Suspension("LMCache's store", settings.pause_s)
        self._log_pause = LogPause()
        self._answered_at = runtime.monotonic()  # when the backend last answered a store or load
        self._backend = open_it()  # last, since an error after this would leave it open
        if (reports := self._backend.provide(Reports)) is not None:
            reports.watch(self._gauges)

    @property
    def is_suspended(self) -> bool:
        """Whether the backend is not called for a while because it missed a deadline."""
        return self._suspension.is_on(runtime.monotonic())

    def _gauges(self) -> Mapping[Gauge, float]:
        return {Gauge.SUSPENDED: self.is_suspended}

    def start(self) -> None:
        """Create buffers, and start the backend; blocks. Must be closed even if this fails."""
        for each in Direction:
            num_bytes, piece_bytes = self._settings.staging // 2, self._settings.piece
            self._staging[each] = staging_of(self._backend, num_bytes, piece_bytes)
        self._backend.attach([each.region for each in self._staging.values()])
        self._loop.run_blocking(self._backend.start())

    def begin(self, task: Task, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Begin the work on a task, and return at once. The task ends by the deadline."""
        if self.is_suspended:
            task.end()
        else:
            self._loop.submit(self._work(task, work))

    def ask(self, call: Callable[[], Coroutine[Any, Any, Any]]) -> Future[Any]:
        """Begin any other call, which has the same deadline."""
        return self._loop.submit(self._ask(call))

    def call_soon(self, func: Callable[[], object]) -> None:
        """Call a function on the event loop."""
        self._loop.call_soon(func)

    def close(self) -> None:
        """Close the backend within the deadline for closing; blocks the thread."""
        self._loop.run_blocking(self._aclose())
        self._loop.stop()
        self._copies.close()

    async def lookup(self, task: Task, keys: Sequence[ObjectKey]) -> None:
        """Find out which objects are there."""
        task.done[:] = await self._lookup(task, keys)

    async def store(self, task: Task, objects: Sequence[StoredObject]) -> None:
        """Store the objects that are not there, after deletes of their pieces have ended."""
        await self._deletes.wait([piece_key(object_id_of(each.key), 0) for each in objects])
        there = await self._lookup(task, [each.key for each in objects])
        new = {each.key: each for each, found in zip(objects, there, strict=True) if not found}
        with ExitStack() as begun:
            for each in new.values():
                self._residents.begin_store(each.key, each.num_bytes)
                begun.callback(self._residents.end_store, each.key)
            stored = await self._store_new(task, list(new.values()))
        for each, found in zip(objects, there, strict=True):
            task.done[each.index] = found or each.key in stored
        task.num_bytes = sum(new[key].num_bytes for key in stored)

    async def load(self, task: Task, objects: Sequence[StoredObject]) -> None:
        """Load objects into memory; delete those with a corrupt piece, or one of another object."""
        pieces = [piece for each in objects for piece in each.cut(self._settings.piece)]
        statuses = await self._move_all(task, pieces, Direction.LOAD)
        bad = {piece.of.index for piece in pieces if statuses.get(piece) is not Status.DONE}
        for each in objects:
            task.done[each.index] = each.index not in bad
        useless = {piece.of.index for piece, status in statuses.items() if status is Status.CORRUPT}
        if useless:
            task.end()
            await self.delete_pieces([each.key for each in pieces if each.of.index in useless])

    async def delete(self, object_ids: Sequence[bytes]) -> None:
        """Delete objects, as far as their pieces are known."""
        await self.delete_pieces([k for each in object_ids for k in self._residents.keys_of(each)])

    async def delete_broken(self, broken: Sequence[BlockKey]) -> None:
        """Delete what is left of objects that lost a piece; failed deletes are tried again."""
        kept = set(broken)
        try:
            kept = await self.delete_pieces(broken)
        finally:
            self._residents.put_back(kept)

    async def delete_pieces(self, keys: Sequence[BlockKey]) -> set[BlockKey]:
        """Delete pieces, and note which of them are gone; return those that may stay."""
        keys = list(dict.fromkeys(keys))
        if not keys:
            return set()
        first = dict.fromkeys(piece_key(piece_of(key)[0], 0) for key in keys)
        async with self._deletes.acquire(list(first)):
            since = self._residents.num_adds
            _, kept = await delete_from(self._backend, keys)
        if gone := [key for key in keys if key not in kept]:  # else nothing has changed
            self._residents.discard(gone, since=since)
        return kept

    async def _ask(self, call: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        return await self._calls.wait_for(self._settings.timeout_s, call())

    async def _work(self, task: Task, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        left = task.deadline - runtime.monotonic()
        call, failed = f"a task of {len(task.done)} objects", "LMCache's store: %s failed"
        try:
            await self._calls.wait_for(max(0.0, left), work())
        except TimeoutError as exc:
            now, timeout_s = runtime.monotonic(), self._settings.timeout_s
            # A task that waits for a buffer judges the backend by its answers to other tasks.
            since = task.answered if task.num_asked else max(task.answered, self._answered_at)
            if now - since > timeout_s / 2:  # else the backend is slow, but answers
                self._suspension.note_late(now, call, timeout_s)
            elif now < task.deadline:  # the backend's own error
                logger.warning(failed, call, exc_info=exc)
        except Exception as exc:
            logger.warning(failed, call, exc_info=exc)
        finally:
            task.end()

    async def _lookup(self, task: Task, keys: Sequence[ObjectKey]) -> list[bool]:
        ids = [object_id_of(key) for key in keys]
        needed = {
            each: dict.fromkeys([piece_key(each, 0), *self._residents.look_for(each, key)])
            for each, key in zip(ids, keys, strict=True)
        }
        asked = [key for pieces in needed.values() for key in pieces]
        since = self._residents.num_adds
        answer = await task.ask(self._backend.lookup(asked)) if asked else []
        found = dict(zip(asked, answer, strict=True))
        self._residents.miss([key for key, is_there in found.items() if not is_there], since=since)
        self._residents.find([key for key, is_there in found.items() if is_there])
        return [all(found[key] for key in needed[each]) for each in ids]

    async def _store_new(self, task: Task, objects: Sequence[StoredObject]) -> set[ObjectKey]:
        """Store objects; return the keys of those that are there."""
        pieces = [piece for each in objects for piece in each.cut(self._settings.piece)]
        rest = [piece for piece in pieces if piece.index]
        statuses = await self._move_all(task, rest, Direction.STORE)
        bad = {piece.of.key for piece in rest if statuses.get(piece) is not Status.DONE}
        first = [piece for piece in pieces if not piece.index and piece.of.key not in bad]
        statuses = await self._move_all(task, first, Direction.STORE)
        return {each.of.key for each, status in statuses.items() if status is Status.DONE}

    async def _move_all(
        self, task: Task, pieces: Sequence[Piece], direction: Direction
    ) -> dict[Piece, Status]:
        """Move pieces, several windows at a time; a window is what fits into one buffer."""
        staging = self._staging[direction]
        room = asyncio.Semaphore(staging.num_buffers)

        async def move(window: Sequence[Piece]) -> None:
            async with room:
                statuses.update(await self._move(task, window, direction))

        statuses: dict[Piece, Status] = {}
        async with asyncio.TaskGroup() as group:
            for each in _split_repeated(pieces):
                for start, stop in staging.cut([piece.stored_bytes for piece in each]):
                    group.create_task(move(each[start:stop]))
        return statuses

    async def _move(
        self, task: Task, pieces: Sequence[Piece], direction: Direction
    ) -> dict[Piece, Status]:
        """Move pieces through one buffer, which goes back once nothing touches it."""
        keys = [piece.key for piece in pieces]
        sizes = [piece.stored_bytes for piece in pieces]
        async with self._staging[direction].hold(sizes, [0] * len(sizes)) as staged:
            is_store = direction is Direction.STORE
            if is_store and not await self._threads.run(self._fill, task, pieces, staged):
                return {}
            move = self._backend.store if is_store else self._backend.load
            since = self._residents.num_adds
            outcomes = await task.ask(staged.move(move, keys, staged.blocks))
            self._answered_at = runtime.monotonic()
            statuses = dict(zip(pieces, (each.status for each in outcomes), strict=True))
            log_failed(self._log_pause, f"LMCache's store: {direction}", outcomes, unit="pieces")
            done = [each.key for each in pieces if statuses[each] is Status.DONE]
            if is_store:
                self._residents.add(done)
            else:
                missing = [each.key for each in pieces if statuses[each] is Status.MISSING]
                self._residents.lose(missing, since=since)
                self._residents.find(done)
                statuses |= await self._threads.run(self._empty, task, statuses, staged)
        return statuses

    def _fill(self, task: Task, pieces: Sequence[Piece], staged: StagedBlocks) -> bool:
        """Copy pieces to a buffer; return False if their memory is LMCache's again."""
        for piece, address in zip(pieces, staged.blocks.addresses.tolist(), strict=True):
            stop = len(piece.head) + piece.num_bytes
            ctypes.memmove(address, piece.head, len(piece.head))
            ctypes.memset(address + stop, 0, piece.stored_bytes - stop)
        return task.touch(lambda: self._copies.copy(*_describe(pieces, staged)))

    def _empty(
        self, task: Task, statuses: dict[Piece, Status], staged: StagedBlocks
    ) -> dict[Piece, Status]:
        """Copy landed pieces out of a buffer; return a status for each that was not copied."""
        pieces, addresses = list(statuses), staged.blocks.addresses.tolist()
        done = [at for at, piece in enumerate(pieces) if statuses[piece] is Status.DONE]
        heads = {at: ctypes.string_at(addresses[at], len(pieces[at].head)) for at in done}
        other = {pieces[at]: Status.CORRUPT for at in done if heads[at] != pieces[at].head}
        landed = [at for at in done if pieces[at] not in other]
        if landed:
            memory, buffer = _describe(pieces, staged)
            if not task.touch(lambda: self._copies.copy(buffer.take(landed), memory.take(landed))):
                other |= {pieces[index]: Status.TIMED_OUT for index in landed}
        return other

    async def _aclose(self) -> None:
        for staging in self._staging.values():
            staging.withdraw()
        timeout_s = self._settings.close_timeout_s
        try:
            await self._calls.wait_for(timeout_s, self._backend.aclose())
            await self._calls.wait_for(timeout_s / 2, self._calls.drain())
        except Exception as exc:
            logger.warning("LMCache's store did not close within %g s", timeout_s, exc_info=exc)
        await self._threads.aclose(1.0)


def _split_repeated(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """Divide pieces so that no key is twice in one part: LMCache may ask for an object twice."""
    parts: list[dict[BlockKey, Piece]] = []
    for piece in pieces:
        part = next((each for each in parts if piece.key not in each), None)
        if part is None:
            parts.append(part := {})
        part[piece.key] = piece
    return [list(part.values()) for part in parts]


def _describe(pieces: Sequence[Piece], staged: StagedBlocks) -> tuple[Descriptors, Descriptors]:
    """Describe the bytes of pieces in LMCache's memory and in a buffer."""
    sizes = [piece.num_bytes for piece in pieces]
    memory = Descriptors.of_pieces(np.array([piece.address for piece in pieces], np.uint64), sizes)
    starts = staged.blocks.addresses + np.uint64(HEADER.size)
    return memory, Descriptors.of_pieces(starts, sizes)
