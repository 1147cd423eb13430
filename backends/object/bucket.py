"""Bucket: requests to object storage, each with a deadline, retried where that helps."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, TypeVar

from kvxfer import runtime
from kvxfer.backends.object.request_failure import (
    CONFLICT,
    ENDS,
    RequestFailedError,
    open_client,
    request_failure,
)
from kvxfer.runtime import CircuitBreaker, Pause, Threads
from kvxfer.storage.backend import Status

if TYPE_CHECKING:
    from kvxfer.backends.object.config import ObjectConfig

FIRST_BACKOFF_S = 0.1
"""Pause before the first retry of a request; doubled each time."""

LIST_CHUNK = 1000
"""Names in one answer to a list, as with S3."""

AFTER_HEAD = "DELETE after HEAD"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ListedObject:
    """Object in a list: its name, its size, and when it was stored, in seconds since the epoch."""

    name: str
    size_bytes: int
    stored_at: float


@dataclass(frozen=True, slots=True)
class ObjectVersion:
    """Size of an object, and tags that tell it from earlier and later objects of its name."""

    size_bytes: int
    version: dict[str, str]

    @classmethod
    def of(cls, meta: Any) -> "ObjectVersion":
        """Translate the metadata that the client returns."""
        version = {name: meta[name] for name in ("e_tag", "version") if meta[name] is not None}
        return cls(int(meta["size"]), version)


@dataclass(slots=True)
class Counts:
    """Counts since a bucket was opened: requests with their retries, and bytes of objects."""

    requests: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0


@dataclass
class _Deadline:
    """Deadline of a request and its retries, which is set when the request has its turn."""

    timeout_s: float
    ends_at: float = inf  # until its turn comes
    backoff: Pause = field(default_factory=partial(Pause, FIRST_BACKOFF_S, inf))

    def begin(self) -> None:
        self.ends_at = runtime.monotonic() + self.timeout_s

    def has_passed(self, later_s: float = 0.0) -> bool:
        return runtime.monotonic() + later_s >= self.ends_at


class Bucket:
    """Bucket of object storage; belongs to one event loop.

    After several failures in a row that show that the server is gone, requests fail at once for a
    while. After several stores in a row that fail, as with a full disk, only stores do, and after
    several removals only `remove`. A request that fails raises a `RequestFailedError`.

    Attributes:
        slots: Limit of `max_requests`; hold one slot for each block.
        of_stores, of_deletes: Limits of each: if one kind hangs, slots are left for all others.
        stores, deletes: Circuit breakers for requests that store, and for `remove`.

    Raises:
        MissingExtraError: obstore is not installed.
        BackendUnavailableError: The cloud's client refuses what is in the environment.
    """

    def __init__(self, config: "ObjectConfig") -> None:
        self._store = open_client(config.open_store)
        from obstore import exceptions

        self._is_there = exceptions.AlreadyExistsError, exceptions.PreconditionError
        self.place, pause_s = config.url, config.retry_after_s
        self._timeout_s = config.timeout_s
        self.slots = asyncio.Semaphore(config.max_requests)
        num_changes = config.max_requests * 3 // 4
        shares = num_changes, num_changes - 1, config.max_requests // 2
        changes, stores, deletes = (asyncio.Semaphore(max(1, share)) for share in shares)
        self.of_stores, self.of_deletes = (stores, changes), (deletes, changes)
        self._pause_s = 1 / config.max_requests_per_s if config.max_requests_per_s else 0.0
        self._next_at = 0.0
        self._pacing = asyncio.Lock()
        self._breaker = CircuitBreaker(f"requests to {self.place}", pause_s=pause_s)
        self.stores = CircuitBreaker(f"storing to {self.place}", pause_s=pause_s)
        self.deletes = CircuitBreaker(f"deleting from {self.place}", pause_s=pause_s)
        self._changes = {"PUT": self.stores, AFTER_HEAD: self.deletes}
        self._lists = Threads("kvxfer-object-list", 1)
        self.counts = Counts()

    @property
    def is_available(self) -> bool:
        """Whether requests are made; False while they fail at once, since the server seems gone."""
        return self._breaker.closed

    async def head(self, path: str, timeout_s: float | None = None) -> ObjectVersion | None:
        """Ask for the version of an object; None if there is no object."""
        with contextlib.suppress(FileNotFoundError):
            ask = partial(self._store.head_async, path)
            return ObjectVersion.of(await self._request("HEAD", ask, timeout_s))
        return None

    async def read_begin(
        self, path: str, num_bytes: int, timeout_s: float | None = None
    ) -> tuple[ObjectVersion, memoryview] | None:
        """Read the leading bytes of an object, fewer if it is shorter; None if there is none.

        Makes one request, so that the bytes are those of the version.
        """

        async def read() -> tuple[ObjectVersion, Any]:
            found = await self._store.get_async(path, options={"range": (0, num_bytes)})
            return ObjectVersion.of(found.meta), await found.bytes_async()

        try:
            version, data = await self._request("GET", read, timeout_s)
        except FileNotFoundError:
            return None
        except RequestFailedError as exc:
            if not exc.is_empty:
                raise
            found = await self.head(path, timeout_s)
            return None if found is None else (found, memoryview(b""))
        self.counts.received_bytes += len(data)
        return version, memoryview(data)

    async def read_range(self, path: str, start: int, stop: int) -> memoryview | None:
        """Read bytes of an object, fewer if it ends before; None if there is no object.

        Waits for one answer, `read_begin` for two: the version and the bytes.
        """
        ask = partial(self._store.get_range_async, path, start=start, end=stop)
        try:
            data = await self._request("GET", ask)
        except FileNotFoundError:
            return None
        except RequestFailedError as exc:
            if not exc.is_empty:
                raise
            return memoryview(b"")
        self.counts.received_bytes += len(data)
        return memoryview(data)

    async def create(self, path: str, data: memoryview) -> bool:
        """Store an object unless there is one; return whether there was none."""
        return await self._put(path, data, "create")

    async def replace(self, path: str, data: memoryview, version: ObjectVersion) -> bool:
        """Store an object in place of a version; return whether that version was still there."""
        return await self._put(path, data, version.version)

    async def move(self, path: str, version: ObjectVersion, to: str) -> bool:
        """Rename an object; return whether that version of it was still there.

        As with `remove`, an object that is stored in its place between two requests is removed.
        """
        if await self.head(path) != version:
            return False
        with contextlib.suppress(FileNotFoundError):
            await self._request("COPY", lambda: self._store.copy_async(path, to))
            return await self.remove(path, version)
        return False

    async def remove(self, path: str, version: ObjectVersion) -> bool:
        """Remove an object; return whether that version of it was still there.

        Asks for the version before each attempt, since clouds have no conditional removal: an
        object that is stored in its place between the two requests is removed. To keep them close,
        the removal waits for its turn before it asks.
        """
        deadline = _Deadline(self._timeout_s)
        failed: RequestFailedError | None = None
        await self._pace()
        while await self.head(path) == version:
            if failed is None:
                deadline.begin()
            elif deadline.has_passed():
                raise failed
            try:
                await self._ask(AFTER_HEAD, lambda: self._store.delete_async(path), deadline)
            except FileNotFoundError:  # somebody else removed it, which only S3 does not report
                break
            except RequestFailedError as exc:
                failed = exc
                await self._wait_to_retry(AFTER_HEAD, exc, deadline)
            else:
                return True
        return failed is not None  # an attempt removed it, and its answer was lost

    async def delete(self, path: str) -> None:
        """Remove an object, if it is there."""
        with contextlib.suppress(FileNotFoundError):  # only S3 does not report that
            await self._request("DELETE", lambda: self._store.delete_async(path))

    async def list_folder(self, prefix: str) -> tuple[list[str], list[str]]:
        """List the folders and the objects in a prefix, as if slashes made folders."""
        ask = self._store.list_with_delimiter_async
        found = await self._request("LIST", lambda: ask(prefix or None))
        names = (str(each["path"]) for each in found["objects"])
        folders = [str(name).removeprefix(prefix) for name in found["common_prefixes"]]
        return folders, [name.removeprefix(prefix) for name in names]

    async def list_objects(self, prefix: str) -> AsyncGenerator[list[ListedObject], None]:
        """List the objects whose names begin with a prefix, a thousand at a time.

        A retry begins a new list after the last name, because a list of obstore that has failed
        ends as if it were whole. A thread waits for each answer: a list that is cancelled during a
        request, or dropped, panics, "there is no reactor running". On the thread it ends at the
        client's timeout.
        """
        begun: Iterator[Sequence[Any]] | None = None
        last: str | None = None
        firsts = set[str]()

        async def ask() -> Sequence[Any]:
            nonlocal begun
            answers = begun or self._store.list(prefix=prefix, offset=last, chunk_size=LIST_CHUNK)
            begun = None  # until it has answered
            found: Sequence[Any] = await self._lists.ask(next, answers, ())
            begun = answers
            return found

        while True:
            found = await self._request("LIST", ask)
            if found:
                first, last = str(found[0]["path"]), str(found[-1]["path"])
                if first in firsts:
                    raise RequestFailedError("LIST: the server repeats answers", transient=False)
                firsts.add(first)
                yield [
                    ListedObject(str(e["path"]), int(e["size"]), e["last_modified"].timestamp())
                    for e in found
                ]
            if len(found) < LIST_CHUNK:
                return

    async def aclose(self, timeout_s: float) -> None:
        """Wait for a list that is under way."""
        await self._lists.aclose(timeout_s)

    async def _put(self, path: str, data: memoryview, mode: Any) -> bool:
        async def put() -> None:
            self.counts.sent_bytes += len(data)
            await self._store.put_async(path, data, mode=mode, use_multipart=False)

        try:
            await self._request("PUT", put)
        except self._is_there:
            self.stores.record("")
            return False
        except FileNotFoundError as exc:
            if mode == "create":
                raise request_failure("PUT", exc) from None
            return False  # the version to replace is gone
        self.stores.record("")
        return True

    async def _request(
        self, what: str, ask: Callable[[], Awaitable[T]], timeout_s: float | None = None
    ) -> T:
        """Make a request; retry it after a transient failure.

        Its deadline begins with its turn: a request that waits for its turn is not late, and has
        learned nothing about the server. A FileNotFoundError means that there is no such object or
        no bucket; a list raises a `RequestFailedError` for the latter.
        """
        deadline = _Deadline(timeout_s or self._timeout_s)
        while True:
            try:
                return await self._ask(what, ask, deadline)
            except RequestFailedError as exc:
                await self._wait_to_retry(what, exc, deadline)

    async def _ask(self, what: str, ask: Callable[[], Awaitable[T]], deadline: "_Deadline") -> T:
        """Make a request once, when its turn has come, and note what that says about the server."""
        if deadline.ends_at == inf:
            await self._pace()
            deadline.begin()
        breaker = self.deletes if what == AFTER_HEAD else self._breaker  # which has let HEAD pass
        if not breaker.allows():
            reason = f"{what}: requests to {self.place} are paused after repeated errors"
            raise RequestFailedError(reason, transient=True)
        probe = breaker.probe
        try:
            async with asyncio.timeout(deadline.ends_at - runtime.monotonic()):
                self.counts.requests += 1
                answer = await ask()
        except (*self._is_there, FileNotFoundError) as exc:
            breaker.record("")
            raise _meaning(what, exc) from None
        except TimeoutError:
            failed = RequestFailedError(
                f"{what}: no answer in time", status=Status.TIMED_OUT, transient=True
            )
        except Exception as exc:  # noqa: BLE001 - obstore raises its own, OSError, ValueError
            failed = request_failure(what, exc)
        except BaseException as exc:
            breaker.abandon(probe)
            if isinstance(exc, ENDS):
                raise
            # A panic of obstore, which is no Exception, and says nothing about the server.
            raise request_failure(what, exc) from None
        else:
            breaker.record("")
            return answer
        self._note_failure(what, failed, probe)
        raise failed

    def _note_failure(self, what: str, failed: RequestFailedError, probe: int) -> None:
        is_late = failed.outcome.status is Status.TIMED_OUT and not (probe and what == "PUT")
        # Loads may succeed where these fail; a DELETE alone shows whether the server is there.
        is_change = what in self._changes and (failed.answered or is_late)
        error = str(failed) if failed.transient else ""  # who refuses for good is not gone
        if what == AFTER_HEAD or (is_change and error):
            self._changes[what].record(error)
        if what == "PUT" and failed.denied:
            self.stores.trip(str(failed))
        if failed.answered or not is_change:
            self._breaker.record("" if is_change else error)

    async def _wait_to_retry(
        self, what: str, failed: RequestFailedError, deadline: "_Deadline"
    ) -> None:
        """Wait until a request may be retried; raise its failure if that is useless or too late."""
        backoff_s = deadline.backoff.next_s()
        is_paused = not (self._breaker.closed and self._changes.get(what, self._breaker).closed)
        if not failed.transient or is_paused or deadline.has_passed(backoff_s):
            raise failed
        await asyncio.sleep(backoff_s)
        await self._pace()
        if deadline.has_passed():
            raise failed

    async def _pace(self) -> None:
        """Wait until another request may begin, unless the server seems to be gone."""
        if self._pause_s and self._breaker.closed:
            async with self._pacing:  # a caller that is cancelled before its turn takes none
                now = runtime.monotonic()
                begins_at = max(now, self._next_at)
                await asyncio.sleep(begins_at - now)
                self._next_at = begins_at + self._pause_s


def _meaning(what: str, exc: Exception) -> Exception:
    """Tell the answer that there is an object, or none, from a failure.

    Azure says of archived and leased blobs what it answers to a store if there is an object. What a
    list does not find is the bucket.
    """
    is_answer = what == "PUT" or (what != "LIST" and isinstance(exc, FileNotFoundError))
    return exc if is_answer and CONFLICT not in str(exc) else request_failure(what, exc)
