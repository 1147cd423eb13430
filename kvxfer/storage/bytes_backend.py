"""Backend over a storage of bytes: four blocking methods, `put`, `get`, `has` and `remove`."""

import asyncio
import logging
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from typing import Any, TypeVar

import xxhash

from kvxfer.checks import require_instance, require_positive
from kvxfer.errors import BackendUnavailableError, KVXferError
from kvxfer.kvcache.descriptors import Descriptors, view_blocks
from kvxfer.runtime import CLOSE_TIMEOUT_S, Threads, begin_aside
from kvxfer.storage.backend import DONE, MISSING, Backend, Outcome, Status
from kvxfer.storage.call_guard import CallGuard
from kvxfer.storage.integrity import Integrity
from kvxfer.storage.key_locks import KeyLocks
from kvxfer.storage.keys import BlockKey, Namespace, groups_of, require_keys

CHECKSUM_BYTES = 8

T = TypeVar("T")

_NOT_IN_ORDER = (str, bytes, bytearray, Mapping, AbstractSet)

logger = logging.getLogger(__name__)

CORRUPT = Outcome(Status.CORRUPT, reason="the value has a wrong checksum or size")
REFUSED = Outcome(Status.FAILED, reason="the storage refused the value")
WHOLE_ONLY = Outcome(Status.FAILED, reason="this storage keeps only whole chunks")


class BytesBackend(Backend):
    """Backend over a storage that keeps bytes under names, and may block its caller.

    Each chunk is one value: its bytes, and a checksum of them and of the name, which is verified
    before the chunk counts as loaded. Whole chunks only: a part of a chunk is `FAILED`.

    The storage gets copies of bytes and returns its own, never the memory of blocks, so that a call
    that hangs can be abandoned at the caller's deadline. Changes of one value never overtake each
    other.

    Implementors must:

    - write `put`, `get`, `has` and `remove`, which are called on several threads at once;
    - raise if the storage as a whole cannot be reached, which becomes a `BackendUnavailableError`;
    - set `outlives_process` to False if values end with the process.

    Args:
        namespace: Identity of the blocks, groups included. Its fingerprint begins each name, so
            that namespaces may share a storage.
        integrity: `FAST` adds an XXH3 checksum of 8 bytes; `OFF` stores the bytes alone.
        num_threads: Maximum number of concurrent calls of the storage; further ones wait.

    Raises:
        InvalidArgumentError: The namespace has no groups, or the integrity needs a secret.
    """

    def __init__(
        self, namespace: Namespace, *, integrity: Integrity = Integrity.FAST, num_threads: int = 4
    ) -> None:
        require_instance("namespace", namespace, Namespace)
        require_instance("integrity", integrity, Integrity)
        integrity.require_keyless()
        self.namespace = namespace
        self._checksum_bytes = 0 if integrity is Integrity.OFF else CHECKSUM_BYTES
        self._guard = CallGuard(type(self).__name__, namespace)
        self._threads = Threads("kvxfer-bytes", require_positive("num_threads", num_threads))
        # Apart, so that copies of callers' memory never wait for a call that hangs in the storage.
        self._copies = Threads("kvxfer-bytes-copy", num_threads)
        self._locks = KeyLocks()

    @abstractmethod
    def put(self, names: Sequence[str], values: Sequence[bytes]) -> Sequence[bool]:
        """Store a value under each name; return for each whether it is stored, whole.

        A value that is already there may be replaced or kept: it has the same bytes.
        """

    @abstractmethod
    def get(self, names: Sequence[str]) -> Sequence[bytes | None]:
        """Return the value of each name; None if there is none."""

    @abstractmethod
    def has(self, names: Sequence[str]) -> Sequence[bool]:
        """Return for each name whether it has a value."""

    @abstractmethod
    def remove(self, names: Sequence[str]) -> None:
        """Remove the values of names; names without a value are ignored."""

    def close(self) -> None:
        """Close the storage; called once."""

    def name_of(self, key: BlockKey) -> str:
        """Name the value of a block: fingerprint of the namespace and key, in hexadecimal."""
        require_keys([key])
        return f"{self.namespace.fingerprint}-{key.hex()}"

    async def lookup(self, keys: Sequence[BlockKey]) -> list[bool]:
        """See `Backend.lookup`."""
        self._guard.check_batch(keys)
        return await self._threads.ask(self._ask, bool, self.has, self._names(keys))

    async def store(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        """See `Backend.store`. A part of a chunk is `FAILED`, unless the chunk is there."""
        self._guard.check_batch(keys, blocks)
        await self._locks.wait_for_others(keys)  # else a removal could take what the lookup finds
        there = await self.lookup(keys)
        sizes = zip(blocks.block_sizes.tolist(), groups_of(keys).tolist(), strict=True)
        whole = [size == self._guard.chunk_sizes[group] for size, group in sizes]
        outcomes = [DONE if found else WHOLE_ONLY for found in there]
        left = [n for n, found in enumerate(there) if whole[n] and not found]
        if left:
            chosen = [keys[n] for n in left]
            names = self._names(chosen)
            values = await self._run(self._copies, self._read, names, blocks.take(left))
            stored = await self._change(chosen, partial(self._ask, bool, self.put, names, values))
            for index, is_stored in zip(left, stored, strict=True):
                outcomes[index] = DONE if is_stored else REFUSED
        return outcomes

    async def load(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        """See `Backend.load`."""
        self._guard.check_batch(keys, blocks)
        names = self._names(keys)
        sizes = [self._guard.chunk_sizes[group] for group in groups_of(keys).tolist()]
        values = await self._threads.ask(self._ask, _as_bytes, self.get, names)
        outcomes = await self._run(self._copies, self._write, names, sizes, values, blocks)
        corrupt = [n for n, o in enumerate(outcomes) if o is CORRUPT and keys[n] not in self._locks]
        if corrupt:
            chosen = [keys[n] for n in corrupt]
            drop = partial(self._drop, self._names(chosen), [sizes[n] for n in corrupt])
            try:
                await self._change(chosen, drop)
            except KVXferError as exc:  # the other blocks were loaded all the same
                logger.warning("%d corrupt values cannot be removed: %s", len(chosen), exc)
        return outcomes

    async def delete(self, keys: Sequence[BlockKey]) -> list[bool]:
        """See `Backend.delete`."""
        self._guard.check_batch(keys)
        return await self._change(keys, partial(self._delete, self._names(keys)))

    async def drain(self) -> None:
        """See `Backend.drain`; also waits for changes that their callers abandoned."""
        await self._locks.wait_for_others()

    async def aclose(self) -> None:
        """See `Backend.aclose`. Calls that hang are abandoned; the storage is closed after them."""
        await self._guard.aclose(self._release)

    async def _release(self) -> None:
        await self._copies.aclose()
        if await self._threads.aclose():  # calls hang in the storage, which is closed after them
            self._threads.when_ended(partial(self._call, self.close))
            return
        closing = begin_aside("kvxfer-bytes-close", partial(self._call, self.close))
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await asyncio.wrap_future(closing)
        except TimeoutError:
            logger.warning("%s: not closed within %g s", type(self).__name__, CLOSE_TIMEOUT_S)

    def _names(self, keys: Sequence[BlockKey]) -> list[str]:
        return [self.name_of(key) for key in keys]

    def _call(self, func: Callable[[], T], what: str = "") -> T:
        try:
            return func()
        except KVXferError:
            raise
        except BaseException as exc:  # a `SystemExit` would end the event loop
            raise BackendUnavailableError(f"{type(self).__name__}: {what}{exc!r}") from exc

    def _ask(
        self, read: Callable[[Any], T], ask: Callable[..., object], names: Sequence[str], *args: Any
    ) -> list[T]:
        """Call a method of the subclass, which must return an answer for each name; read them."""
        answers: Any = self._call(partial(ask, names, *args))
        verb, found = f"{getattr(ask, '__name__', 'a method')}()", f"a {type(answers).__name__}"
        if isinstance(answers, Iterable) and not isinstance(answers, _NOT_IN_ORDER):
            listed = self._call(lambda: [read(each) for each in answers], f"an answer of {verb}: ")
            if len(listed) == len(names):
                return listed
            found = f"{len(listed)} answers"
        text = f"{verb} returned {found}; expected one for each of {len(names)} names"
        raise BackendUnavailableError(f"{type(self).__name__}: {text}")

    async def _change(self, keys: Sequence[BlockKey], func: Callable[[], T]) -> T:
        """Call a function that changes values; locks the keys until it ends, even if cancelled."""
        change = partial(self._run, self._threads, self._call, func)
        return await self._locks.hold_during(keys, change)

    async def _run(self, threads: Threads, func: Callable[..., T], *args: Any) -> T:
        """Run a function on a thread, unless the backend has been closed meanwhile."""
        self._guard.check()
        return await threads.run(func, *args)

    def _checksum(self, name: str, payload: bytes | memoryview) -> bytes:
        seed = xxhash.xxh3_64_intdigest(name.encode())
        return xxhash.xxh3_64_digest(payload, seed=seed)[: self._checksum_bytes]

    def _read(self, names: Sequence[str], blocks: Descriptors) -> list[bytes]:
        pairs = zip(names, map(b"".join, view_blocks(blocks)), strict=True)
        return [payload + self._checksum(name, payload) for name, payload in pairs]

    def _verified(self, name: str, size: int, value: memoryview) -> memoryview | None:
        """Return the bytes of a chunk; None if they are not those that were stored."""
        payload, checksum = value[:size], value[size:]
        intact = len(payload) == size and checksum == self._checksum(name, payload)
        return payload if intact else None

    def _write(
        self,
        names: Sequence[str],
        sizes: Sequence[int],
        values: Sequence[memoryview | None],
        blocks: Descriptors,
    ) -> list[Outcome]:
        outcomes, starts = [], blocks.payload_starts.tolist()
        rows = zip(names, sizes, values, starts, view_blocks(blocks), strict=True)
        for name, size, value, start, views in rows:
            verified = None if value is None else self._verified(name, size, value)
            if verified is None:
                outcomes.append(MISSING if value is None else CORRUPT)
                continue
            payload = verified[start:]
            for view in views:
                view[:], payload = payload[: len(view)], payload[len(view) :]
            outcomes.append(DONE)
        return outcomes

    def _drop(self, names: Sequence[str], sizes: Sequence[int]) -> None:
        """Remove values that are still corrupt: another process may have stored some again."""
        triples = zip(names, sizes, self._ask(_as_bytes, self.get, names), strict=True)
        bad = [n for n, size, v in triples if v is not None and self._verified(n, size, v) is None]
        if bad:
            self.remove(bad)

    def _delete(self, names: Sequence[str]) -> list[bool]:
        there = self._ask(bool, self.has, names)
        self.remove(names)
        return there


def _as_bytes(value: Any) -> memoryview | None:
    return None if value is None else memoryview(value).cast("B")
