"""Backend over object storage: each page is an object, which all users of the bucket share."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from math import inf
from typing import TypeVar

from kvxfer import runtime
from kvxfer.backends.object.bucket import Bucket, Counts, ObjectVersion
from kvxfer.backends.object.config import AZConfig, GSConfig, ObjectConfig, S3Config
from kvxfer.backends.object.namespace_texts import NamespaceTexts
from kvxfer.backends.object.presence import MAX_KEYS, Presence
from kvxfer.backends.object.request_failure import RequestFailedError
from kvxfer.checks import require_instance
from kvxfer.errors import BackendUnavailableError, InvalidArgumentError
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.pages.digest import Digester
from kvxfer.pages.header import BlockFileError, OtherIntegrityError
from kvxfer.pages.namespace_format import PART
from kvxfer.pages.object_pages import Pages
from kvxfer.runtime import Calls, Pause, Threads, end_tasks, fetch_error
from kvxfer.storage.backend import DONE, MISSING, PAUSED, Outcome, Status, TellsKept
from kvxfer.storage.call_guard import CallGuard
from kvxfer.storage.integrity import read_secret
from kvxfer.storage.key_locks import KeyLocks
from kvxfer.storage.keys import BlockKey, Namespace
from kvxfer.storage.observer import Gauge, Removal, Reports

MAX_THREADS = 4
"""Maximum number of threads that copy and verify: a network cannot feed more."""

STORE_ATTEMPTS = 3
"""Attempts to store a block that others store or remove at the same time."""

LIST_AGAIN_S, LONGEST_NO_LIST_S = 60.0, 3600.0
"""Shortest and longest pause after a failed list: a large bucket may always take too long."""

CLOSED = Outcome(Status.FAILED, reason="the backend was closed")
OTHERS = Outcome(
    Status.FAILED, reason="the block is there with another integrity, or sealed with another key"
)

logger = logging.getLogger(__name__)

T = TypeVar("T")
Limits = Sequence[asyncio.Semaphore]
"""Limits that a call keeps to beside that of `Bucket.slots`."""


class ObjectBackend(TellsKept):
    """Backend that keeps each block in an object of a bucket, and evicts nothing.

    All users of the bucket see a block whole or not at all. Lookups answer from what was seen a
    short time ago, see `ObjectConfig`. While the server is gone, every block is a miss and every
    store fails: within `timeout_s` at first, and at once after some failures. From time to time,
    one request tries again.

    Args:
        config: See `ObjectConfig`.
        namespace: Namespace of the blocks.

    Raises:
        InvalidArgumentError: The namespace has no groups, or the secret is missing or invalid.
        MissingExtraError: obstore, or the package that `sealed` needs, is not installed.
        BackendUnavailableError: The cloud's client refuses what is in the environment.
    """

    config_type: type[ObjectConfig]
    purges_all = False  # others who share the bucket do not expect it to be emptied

    def __init__(self, config: ObjectConfig, namespace: Namespace) -> None:
        self._guard = CallGuard("object storage backend", namespace)
        self._config = config
        digester = Digester(config.integrity, read_secret(config.secret_file), config.tenant)
        self._pages = Pages(config.prefix, namespace, digester)
        self._bucket = Bucket(config)
        self._presence = Presence(config)
        self._threads = Threads("kvxfer-object", min(MAX_THREADS, runtime.num_cores()))
        self._stores = KeyLocks()
        self._deletes = KeyLocks()
        self._texts = NamespaceTexts(self._bucket, self._pages)
        self._calls = Calls()
        self._listing: asyncio.Task[None] | None = None
        self._no_list = Pause(LIST_AGAIN_S, LONGEST_NO_LIST_S)
        self._reports = Reports()

    def observe(self, reports: Reports) -> None:
        """See `Observable.observe`."""
        self._reports = reports
        reports.watch(self._gauges)

    @property
    def counts(self) -> Counts:
        """Requests and bytes since the backend was opened."""
        return self._bucket.counts

    async def lookup(self, keys: Sequence[BlockKey]) -> list[bool]:
        """See `Backend.lookup`; a block that is unknown at the deadline counts as missing."""
        self._guard.check_batch(keys)
        names = [self._pages.name(key) for key in keys]
        ends_at = runtime.monotonic() + self._config.lookup_timeout_s
        if not self._bucket.is_available:
            await self._look_all(keys[:1], names[:1], ends_at)  # tells whether the server is back
            if not self._bucket.is_available:
                return [False] * len(keys)
        self._begin_list()
        known = [self._presence.has(key) for key in keys]
        if asked := [index for index, there in enumerate(known) if there is None]:
            chosen = [keys[i] for i in asked]
            found = await self._look_all(chosen, [names[i] for i in asked], ends_at)
            for index in asked:
                there = self._presence.has(keys[index])  # None if unknown, or expired at once
                known[index] = keys[index] in found if there is None else there
        return [bool(there) for there in known]

    async def store(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        """See `Backend.store`."""
        self._guard.check_batch(keys, blocks)
        self._pages.require_whole_blocks(keys, blocks)
        async with self._stores.acquire(keys):
            await self._deletes.wait(keys)
            self._guard.check()  # the backend may have been closed meanwhile
            if not self._bucket.stores.allows():
                return await self._move_each(self._find_stored, keys, blocks)
            probe = self._bucket.stores.probe
            try:
                await self._texts.write()
                await self._texts.read()
                return await self._move_each(self._store, keys, blocks, self._bucket.of_stores)
            except RequestFailedError as exc:
                return [exc.outcome] * len(keys)
            finally:
                self._bucket.stores.abandon(probe)  # if it had no result

    async def load(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        """See `Backend.load`. Memory of blocks that are not `DONE` is not written."""
        self._guard.check_batch(keys, blocks)
        self._pages.require_whole_blocks(keys, blocks)
        return await self._move_each(self._load, keys, blocks)

    async def delete_or_keep(self, keys: Sequence[BlockKey]) -> tuple[set[BlockKey], set[BlockKey]]:
        """See `TellsKept.delete_or_keep`. A block that stays may also have been stored again.

        A cancelled call goes on, and stores of its keys wait for it.
        """
        self._guard.check_batch(keys)
        names, limits = [self._pages.name(key) for key in keys], self._bucket.of_deletes
        await self._deletes.wait(keys)
        self._guard.check()  # the backend may have been closed meanwhile
        deleted = await self._deletes.hold_during(
            keys, lambda: self._each(lambda i: self._delete(keys[i], names[i]), len(keys), limits)
        )
        pairs = list(zip(keys, deleted, strict=True))
        return {key for key, gone in pairs if gone}, {key for key, gone in pairs if gone is None}

    async def purge(self, prefix: bytes) -> int:
        """Remove the blocks whose keys begin with a prefix, whoever stored them; return how many.

        Raises:
            InvalidArgumentError: The prefix is empty, which would remove everybody's blocks.
            BackendUnavailableError: The server does not list the blocks, or does not remove one.
        """
        self._guard.check()
        require_instance("prefix", prefix, bytes)
        if not prefix:
            raise InvalidArgumentError("prefix", prefix, "at least one byte")
        num_removed = 0
        try:
            async with aclosing(self._bucket.list_objects(self._pages.place(prefix))) as answers:
                async for listed in answers:
                    keys = [self._pages.key_in(each.name) for each in listed]
                    keys = [key for key in keys if key.startswith(prefix)]
                    removed, kept = await self.delete_or_keep(keys) if keys else (set(), set())
                    num_removed += len(removed)
                    if kept:
                        found = f"{len(kept)} blocks cannot be removed"
                        raise BackendUnavailableError(f"{self._bucket.place}: {found}")
        except RequestFailedError as exc:
            raise BackendUnavailableError(f"{self._bucket.place}: {exc}") from exc
        return num_removed

    async def aclose(self) -> None:
        """See `Backend.aclose`; blocks stay in the bucket."""
        await self._guard.aclose(self._release)

    async def _release(self) -> None:
        timeout_s = self._config.close_timeout_s
        self._calls.cancel()
        await end_tasks(filter(None, [self._listing]))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._deletes.wait_for_others()  # those whose callers were cancelled
                await self._texts.aclose(timeout_s)
        closing = self._threads.aclose(timeout_s), self._bucket.aclose(timeout_s)
        if not (await asyncio.gather(*closing))[0]:
            self._pages.close()

    async def _move_each(
        self,
        move: Callable[[BlockKey, str, Descriptors], Awaitable[Outcome]],
        keys: Sequence[BlockKey],
        blocks: Descriptors,
        limits: Limits = (),
    ) -> list[Outcome]:
        """Store or load each block; its error, as when the backend closes, becomes its outcome."""
        names = [self._pages.name(key) for key in keys]

        async def move_one(index: int) -> Outcome:
            try:
                return await move(keys[index], names[index], blocks.select(index, index + 1))
            except RequestFailedError as exc:
                return exc.outcome
            except OtherIntegrityError:
                self._meet_others()
                self._presence.change(keys[index], there=False)
                return OTHERS
            except Exception as exc:
                if self._guard.closed:
                    return CLOSED
                logger.warning("moving block %s failed", names[index], exc_info=exc)
                return Outcome(Status.FAILED, reason=repr(exc))

        return await self._each(move_one, len(keys), limits)

    async def _each(
        self, call: Callable[[int], Awaitable[T]], num_blocks: int, limits: Limits = ()
    ) -> list[T]:
        """Make a call for each block within limits and a slot, in at most `max_requests` tasks."""
        results: dict[int, T] = {}
        indices = iter(range(num_blocks))

        async def work() -> None:
            for index in indices:
                async with AsyncExitStack() as held:
                    for limit in (*limits, self._bucket.slots):
                        await held.enter_async_context(limit)
                    results[index] = await call(index)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(min(num_blocks, self._config.max_requests)):
                tasks.create_task(work())
        return [results[index] for index in range(num_blocks)]

    async def _look_all(
        self, keys: Sequence[BlockKey], names: Sequence[str], ends_at: float
    ) -> set[BlockKey]:
        """Ask for objects until the deadline of a lookup; return the keys of those found.

        Goes on if its caller is cancelled, so that a server's silence counts all the same.
        """
        found: set[BlockKey] = set()

        async def look(index: int) -> None:
            if await self._look(keys[index], names[index]):
                found.add(keys[index])

        try:
            asking = self._each(look, len(keys))
            left_s = ends_at - runtime.monotonic()
            await self._calls.wait_for(left_s, asking, outlives_caller=True)
        except TimeoutError:
            logger.debug("lookup of %d blocks in %s took too long", len(keys), self._bucket.place)
        return found

    async def _look(self, key: BlockKey, name: str) -> bool:
        since = self._presence.mark()
        try:
            # Half of the lookup's time, so that silence counts as a failure before the lookup ends.
            there = await self._is_there(key, name, self._config.lookup_timeout_s / 2)
        except RequestFailedError as exc:
            logger.debug("lookup of block %s failed: %s", name, exc)
            return False
        self._presence.note(key, there=there, since=since)
        return there

    async def _is_there(self, key: BlockKey, name: str, timeout_s: float) -> bool:
        """Whether there is a page that we can read: by its header if there may be others."""
        if not self._texts.has_others:
            version = await self._bucket.head(name, timeout_s)
            return version is not None and not self._presence.is_corrupt(key, version)
        found = await self._read_header(key, name, timeout_s)
        if found is None or not found[1]:
            return False
        try:
            self._pages.require_readable(found[1])
        except OtherIntegrityError:
            self._meet_others()
            return False
        return True

    async def _read_header(
        self, key: BlockKey, name: str, timeout_s: float | None = None
    ) -> tuple[ObjectVersion, memoryview] | None:
        """Read the version and the header of an object; no header if it is known to be corrupt."""
        size = self._pages.format(key).header_size_bytes
        found = await self._bucket.read_begin(name, size, timeout_s)
        if found is not None and self._presence.is_corrupt(key, found[0]):
            return found[0], memoryview(b"")
        return found

    def _meet_others(self) -> None:
        """Note a page that we cannot read; from now on, a listed name no longer proves anything."""
        if self._texts.meet_others():
            self._presence.forget()

    async def _find_stored(self, key: BlockKey, name: str, block: Descriptors) -> Outcome:
        """Find the outcome of a store while stores are paused: `DONE` if the block is there."""
        is_stored = self._presence.has(key) and await self._is_stored(key, name, block)
        return DONE if is_stored else PAUSED

    async def _is_stored(self, key: BlockKey, name: str, block: Descriptors) -> bool:
        since = self._presence.mark()
        there = await self._read_header(key, name)
        is_stored = there and self._pages.covers(key, there[1], there[0].size_bytes, block)
        if is_stored:
            self._presence.note(key, there=True, since=since)
        return bool(is_stored)

    async def _store(self, key: BlockKey, name: str, block: Descriptors) -> Outcome:
        if not (self._bucket.stores.closed or self._bucket.stores.probe):  # paused meanwhile
            return await self._find_stored(key, name, block)
        asks_first = self._texts.overwrites or self._texts.has_others
        fits = self._pages.format(key).can_hold(block.num_bytes)
        asks_first = asks_first or bool(self._presence.has(key)) or not fits
        if asks_first and await self._is_stored(key, name, block):
            return DONE
        if not fits:
            return PART
        page = await self._threads.run(self._pages.encode, key, block)
        for _ in range(STORE_ATTEMPTS):
            if await self._bucket.create(name, page):
                return self._stored(key)
            there = await self._read_header(key, name)
            if there is None:
                continue
            if self._pages.covers(key, there[1], there[0].size_bytes, block):
                self._presence.change(key, there=True)
                return DONE
            if await self._bucket.replace(name, page, there[0]):
                self._reports.removed([key], Removal.REPLACED)
                return self._stored(key)
        return Outcome(Status.FAILED, reason="others keep storing and removing this block")

    def _stored(self, key: BlockKey) -> Outcome:
        self._presence.change(key, there=True)
        self._reports.added([key])
        return DONE

    async def _load(
        self, key: BlockKey, name: str, block: Descriptors, version: ObjectVersion | None = None
    ) -> Outcome:
        """Load a block.

        If a page is corrupt, its version is asked for and the page read once more: a page that
        others have stored in its place is loaded, and not removed.
        """
        since, expected = self._presence.mark(), self._pages.format(key)
        # One byte more than a page can have shows an object that is too long.
        page = await self._bucket.read_range(name, 0, expected.file_size_bytes + 1)
        if page is None:
            self._presence.note(key, there=False, since=since)
            return MISSING
        try:
            if len(page) > self._pages.max_inline_bytes:
                outcome = await self._threads.run(self._pages.decode, key, page, block)
            elif self._guard.closed:
                return CLOSED
            else:
                outcome = self._pages.decode(key, page, block)
        except OtherIntegrityError as exc:
            self._meet_others()
            self._presence.note(key, there=False, since=since)
            return exc.outcome
        except BlockFileError as exc:
            now = version or await self._version_of(name)
            num_bytes = now.size_bytes - expected.header_size_bytes if now else 0
            if version is None and expected.can_hold(num_bytes):
                return await self._load(key, name, block, now)
            is_all = now and len(page) == min(now.size_bytes, expected.file_size_bytes + 1)
            if now and not is_all and now == await self._version_of(name):
                reason = f"the server sent {len(page)} bytes of an object of {now.size_bytes}"
                return Outcome(Status.FAILED, reason=reason)
            self._presence.change(key, there=False)
            if now:
                await self._remove_corrupt(key, name, exc, now)
            return Outcome(Status.CORRUPT, reason=str(exc))
        self._presence.note(key, there=True, since=since)
        return outcome

    async def _version_of(self, name: str) -> ObjectVersion | None:
        with contextlib.suppress(RequestFailedError):
            return await self._bucket.head(name)
        return None

    async def _remove_corrupt(
        self, key: BlockKey, name: str, found: BlockFileError, version: ObjectVersion
    ) -> None:
        try:
            if await self._bucket.remove(name, version):
                logger.warning("removed corrupt block %s: %s", name, found)
                self._reports.removed([key], Removal.CORRUPT)
        except RequestFailedError as exc:
            self._presence.note_corrupt(key, version)
            logger.warning("cannot remove corrupt block %s (%s): %s", name, found, exc)

    async def _delete(self, key: BlockKey, name: str) -> bool | None:
        """Remove a block; return whether it was there, None if it may still be."""
        since, found = self._presence.mark(), None
        try:
            found = await self._bucket.head(name)
            if found is None:
                self._presence.note(key, there=False, since=since)
                return False
            self._presence.change(key, there=False)
            if await self._bucket.remove(name, found):
                self._reports.removed([key], Removal.DELETED)
                return True
            if await self._bucket.head(name) is None:  # somebody else has removed it
                return False
        except RequestFailedError as exc:
            logger.warning("cannot remove block %s: %s", name, exc)
        if found is not None:
            self._presence.change(key, there=True)  # if it is not, a load will find out
        return None

    def _begin_list(self) -> None:
        """Begin the list that fills the cache, once, and again some time after a failure."""
        is_listing = self._listing is not None and not self._listing.done()
        if not is_listing and not self._no_list.is_on(runtime.monotonic()):
            self._listing = asyncio.create_task(self._list())
            self._listing.add_done_callback(fetch_error)

    async def _list(self) -> None:
        """List the namespace, unless there are too many names, or pages that we cannot read."""
        began_at, since, num_names = runtime.monotonic(), self._presence.mark(), 0
        self._no_list.begin(began_at)
        try:
            await self._texts.read()
            async with (
                asyncio.timeout(self._config.list_timeout_s),
                aclosing(self._bucket.list_objects(self._pages.folder)) as answers,
            ):
                async for listed in answers:
                    if self._texts.has_others or num_names >= MAX_KEYS:
                        break
                    for key in filter(None, (self._pages.key_in(each.name) for each in listed)):
                        self._presence.note(key, there=True, since=since)
                    num_names += len(listed)
                else:
                    if not self._texts.has_others:
                        self._presence.note_all_listed(began_at)
        except (RequestFailedError, TimeoutError) as exc:
            logger.info("list of %s%s failed: %r", self._bucket.place, self._pages.fingerprint, exc)
            return
        if not self._texts.has_others:
            self._no_list.until = inf
        logger.info("listed %s%s: %d names", self._bucket.place, self._pages.fingerprint, num_names)

    def _gauges(self) -> Mapping[Gauge, float]:
        bucket = self._bucket
        works = bucket.is_available and bucket.stores.closed and bucket.deletes.closed
        return {
            Gauge.BREAKER_OPEN: not works,
            Gauge.REQUESTS: bucket.counts.requests,
            Gauge.SENT_BYTES: bucket.counts.sent_bytes,
            Gauge.RECEIVED_BYTES: bucket.counts.received_bytes,
        }


class S3Backend(ObjectBackend):
    """Backend over S3, or a server that speaks its protocol."""

    config_type = S3Config


class GSBackend(ObjectBackend):
    """Backend over Google Cloud Storage."""

    config_type = GSConfig


class AZBackend(ObjectBackend):
    """Backend over Azure Blob Storage."""

    config_type = AZConfig
