"""Object storage of a simulation: a bucket, its clients, and a network that a seed controls."""

import asyncio
import enum
import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from random import Random
from typing import Any, TypeAlias, TypeVar, cast

from obstore import exceptions
from obstore.store import ObjectStore

from kvxfer import runtime
from kvxfer.backends.object import S3Config
from kvxfer.testing.simulation.scenario import Simulation
from kvxfer.testing.simulation.scheduler import FaultWindows

REQUESTS = ("HEAD", "GET", "PUT", "DELETE", "COPY", "LIST")
MAX_LATENCY_S = 0.02
"""Maximum time of a request on its way to the server, and of its answer on the way back."""
LOOK_S = 0.025
"""Maximum time between a look at an object and its removal: the answer, and the next request."""

T = TypeVar("T")
Listed: TypeAlias = list[dict[str, Any]]


class BucketFault(enum.StrEnum):
    """Fault of requests that begin in a window of time.

    Attributes:
        SLOW: Requests reach the server late, but within the window.
        HANG: Requests reach the server late or never, and are not answered.
        LOST: Requests never reach the server, and the client gets an error.
        UNANSWERED: Requests reach the server, but the client gets an error.
        LATE: The client gets an error, and the requests reach the server later.
        REPEATED: Requests reach the server twice; the client gets the second answer.
        REFUSED: The server answers that it is busy.
        FULL: The server answers that it has no room.
        DENIED: The server answers that the credentials are insufficient.
    """

    SLOW = "slow"
    HANG = "hang"
    LOST = "lost"
    UNANSWERED = "unanswered"
    LATE = "late"
    REPEATED = "repeated"
    REFUSED = "refused"
    FULL = "full"
    DENIED = "denied"


_STATUS = {BucketFault.REFUSED: 503, BucketFault.FULL: 507, BucketFault.DENIED: 403}
_DELAYED = (BucketFault.SLOW, BucketFault.HANG, BucketFault.LATE)


@dataclass(frozen=True, slots=True)
class _Object:
    data: bytes
    serial: int
    stored_at: float

    def meta(self, name: str) -> dict[str, Any]:
        """Describe it as obstore does."""
        return {
            "path": name,
            "size": len(self.data),
            "e_tag": f'"{hashlib.md5(self.data, usedforsecurity=False).hexdigest()}"',
            "version": None,
            "last_modified": datetime.fromtimestamp(self.stored_at, UTC),
        }


class _Config(S3Config, frozen=True, kw_only=True, forbid_unknown_fields=True):
    client: object

    def open_store(self) -> ObjectStore:
        return cast("ObjectStore", self.client)


class SimulatedBucket:
    """S3 bucket in memory, strongly consistent; each process has a client of it.

    Attributes:
        on_late: Called with the kind and the name of a request that arrives after its client gave
            it up.
    """

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.on_late: Callable[[str, str], object] | None = None
        self._objects: dict[str, _Object] = {}
        self._num_stored = 0
        self._changes: dict[str, list[tuple[float, bool]]] = {}
        self._looks: dict[tuple[str, str], tuple[float, int]] = {}
        self._windows = FaultWindows[BucketFault]()
        self._num_asked: Counter[tuple[str, str, str]] = Counter()

    def begin_fault(
        self, fault: BucketFault, for_s: float, share: float, requests: Collection[str] = REQUESTS
    ) -> None:
        """Inject a fault into a share of the given requests that begin within `for_s` from now."""
        if fault is BucketFault.FULL:
            requests = [each for each in requests if each == "PUT"]
        self._windows.begin(fault, self.simulation.now + for_s, share, requests)

    def open_client(self, name: str, **fields: Any) -> tuple[S3Config, "SimulatedStore"]:
        """Open a client for one process, and make the configuration of a backend that uses it.

        Args:
            name: Name of the process in the trace.
            **fields: Fields of `S3Config`.
        """
        timeout_s = float(fields.get("timeout_s", S3Config(address="bucket").timeout_s))
        client = SimulatedStore(self, name, timeout_s)
        return _Config(address="bucket", client=client, **fields), client

    def names(self, prefix: str = "") -> list[str]:
        """List the names below a prefix, which ends with a whole part of a path."""
        folder = f"{prefix.rstrip('/')}/" if prefix.rstrip("/") else ""
        return sorted(name for name in self._objects if name.startswith(folder))

    def damage(self, name: str, random: Random) -> bool:
        """Change the bytes of an object, as a medium that rots; return whether there is one."""
        found = self._objects.get(name)
        if found is None:
            return False
        data, at = found.data, random.randrange(len(found.data))
        flipped = data[:at] + bytes([data[at] ^ (1 << random.randrange(8))]) + data[at + 1 :]
        changed = random.choice((flipped, flipped, data[:at] or b"?", data + b"\0"))
        self._put(name, changed)
        return True

    def get(self, name: str) -> _Object:
        """Read an object.

        Raises:
            FileNotFoundError: There is none.
        """
        if name not in self._objects:
            raise FileNotFoundError(f"Object at location {name} not found: status code: 404")
        return self._objects[name]

    def find(self, name: str) -> _Object | None:
        return self._objects.get(name)

    def put(self, name: str, data: bytes, mode: str | Mapping[str, str]) -> dict[str, Any]:
        """Store an object as `mode` says: `create`, `overwrite`, or in place of a version.

        Raises:
            obstore.exceptions.AlreadyExistsError: There is one.
            obstore.exceptions.PreconditionError: There is another version, or none.
        """
        if mode == "create" and name in self._objects:
            raise exceptions.AlreadyExistsError(f"Object at location {name} already exists")
        if not isinstance(mode, str):
            found = self._objects.get(name)
            if found is None or found.meta(name)["e_tag"] != mode["e_tag"]:
                raise exceptions.PreconditionError(f"Request precondition failure for {name}")
        self._put(name, data)
        return {"e_tag": self._objects[name].meta(name)["e_tag"], "version": None}

    def delete(self, name: str) -> None:
        """Remove an object; none is no failure, as in S3."""
        if self._objects.pop(name, None) is not None:
            self._note_change(name, is_there=False)

    def draw(self, request: str, random: Random) -> tuple[BucketFault | None, float]:
        """Draw the fault of a request, and how long its window is still open."""
        now = self.simulation.now
        fault, ends_at = next(self._windows.draw(now, request, random), (None, now))
        return fault, ends_at - now

    def random_of(self, client: str, request: str, name: str) -> Random:
        """Make the random numbers of a request, independent of other requests."""
        asked = client, request, name
        self._num_asked[asked] += 1
        return self.simulation.random(f"{asked} {self._num_asked[asked]}")

    def was(self, name: str, since: float, *, is_there: bool) -> bool:
        """Whether there was an object, or none, at some moment since then."""
        was_there = False
        for at, is_there_now in self._changes.get(name, []):
            if at > since and is_there in (was_there, is_there_now):
                return True
            was_there = is_there_now
        return was_there is is_there

    def note_look(self, client: str, name: str, serial: int) -> None:
        """Note that a client has learned which object has a name."""
        self._looks[client, name] = self.simulation.now, serial

    def note_removal(self, client: str, name: str, serial: int | None) -> None:
        """Check that a client has just looked at the object that it removes.

        S3 removes without a condition, so an object stored between look and removal is lost. The
        removal must therefore follow the look at once.
        """
        at, looked_at = self._looks.get((client, name), (-1.0, None))
        is_unseen = serial is not None and serial != looked_at
        if is_unseen and self.simulation.now - at > LOOK_S:
            detail = f"{client}: {name}, looked at {self.simulation.now - at:.3f} s before"
            self.simulation.fail("removed what it had not looked at", detail)

    def note_arrival(self, request: str, name: str, *, is_late: bool) -> None:
        """Note that a request has reached the bucket."""
        if is_late and self.on_late is not None:
            self.on_late(request, name)

    def _put(self, name: str, data: bytes) -> None:
        self._num_stored += 1
        self._objects[name] = _Object(data, self._num_stored, runtime.wall_time())
        self._note_change(name, is_there=True)

    def _note_change(self, name: str, *, is_there: bool) -> None:
        self._changes.setdefault(name, []).append((self.simulation.now, is_there))


class SimulatedStore:
    """Client of a simulated bucket, with the calls of obstore's clients that kvxfer makes.

    Args:
        bucket: The bucket.
        name: Name of the process.
        timeout_s: Seconds that the client waits for an answer.

    Attributes:
        num_requests: Requests that were begun.
        sent_bytes: Bytes of the objects in them.
        received_bytes: Bytes of objects in answers.
    """

    def __init__(self, bucket: SimulatedBucket, name: str, timeout_s: float) -> None:
        self._bucket = bucket
        self._name = name
        self._timeout_s = timeout_s
        self._under_way: dict[_Request, None] = {}
        self._is_dead = False
        self.num_requests = self.sent_bytes = self.received_bytes = 0

    def kill(self) -> None:
        """End the process: no answer reaches it, and no further request leaves it."""
        self._is_dead = True
        for request in list(self._under_way):
            request.abandon()
            if not request.answer.done():
                request.answer.set_exception(_lost("Connect"))

    async def head_async(self, path: str) -> dict[str, Any]:
        return await self._ask("HEAD", path, lambda: self._look(path).meta(path))

    async def get_async(self, path: str, *, options: Any = None) -> "_Answer":
        start, stop = (options or {}).get("range", (0, None))
        found = await self._ask("GET", path, lambda: self._read(path, start, stop))
        return _Answer(self, *found)

    async def get_range_async(self, path: str, *, start: int, end: int) -> bytes:
        _, data = await self._ask("GET", path, lambda: self._read(path, start, end))
        self.received_bytes += len(data)
        return data

    async def put_async(
        self, path: str, data: memoryview, *, mode: str | Mapping[str, str], use_multipart: bool
    ) -> dict[str, Any]:
        """See `obstore.put_async`; the bytes are read when they are sent, which may be late."""
        self.sent_bytes += len(data)
        return await self._ask("PUT", path, lambda: self._bucket.put(path, bytes(data), mode))

    async def copy_async(self, from_: str, to: str) -> None:

        def copy() -> None:
            self._bucket.put(to, self._look(from_).data, "overwrite")

        await self._ask("COPY", from_, copy)

    async def delete_async(self, path: str) -> None:
        found = self._bucket.find(path)
        serial = None if found is None else found.serial
        self._bucket.note_removal(self._name, path, serial)
        await self._ask("DELETE", path, lambda: self._bucket.delete(path))

    async def list_with_delimiter_async(self, prefix: str | None = None) -> dict[str, Any]:

        def find() -> dict[str, Any]:
            folder = f"{(prefix or '').rstrip('/')}/" if prefix else ""
            names = self._bucket.names(folder)
            below = [name for name in names if "/" in name.removeprefix(folder)]
            folders = [folder + name.removeprefix(folder).partition("/")[0] for name in below]
            here = [name for name in names if name not in below]
            objects = [self._bucket.get(name).meta(name) for name in here]
            return {"common_prefixes": list(dict.fromkeys(folders)), "objects": objects}

        return await self._ask("LIST", prefix or "", find)

    def _list_page(self, prefix: str, offset: str | None, num: int) -> Listed:
        self.num_requests += 1
        random = self._bucket.random_of(self._name, "LIST", prefix)
        fault, left_s = self._bucket.draw("LIST", random)
        runtime.sleep(random.random() * MAX_LATENCY_S)
        if self._is_dead or fault in (BucketFault.LOST, BucketFault.UNANSWERED, BucketFault.LATE):
            raise _lost("Connect")
        if fault in _STATUS:
            raise _refused(_STATUS[cast("BucketFault", fault)])
        if fault in (BucketFault.HANG, BucketFault.SLOW):
            waits_s = left_s if fault is BucketFault.HANG else random.random() * left_s
            runtime.sleep(min(waits_s, self._timeout_s))
            if fault is BucketFault.HANG or waits_s > self._timeout_s:
                raise _lost("Timeout")
        names = [name for name in self._bucket.names(prefix) if name > (offset or "")][:num]
        found = [self._bucket.get(name).meta(name) for name in names]
        runtime.sleep(random.random() * MAX_LATENCY_S)
        return found

    def list(
        self, prefix: str | None = None, *, offset: str | None = None, chunk_size: int = 50
    ) -> Iterator[Listed]:
        """See `obstore.list`; blocks, and ends silently at a failure."""
        while True:
            found = self._list_page(prefix or "", offset, chunk_size)
            if not found:
                return
            offset = found[-1]["path"]
            yield found

    def _look(self, name: str) -> _Object:
        found = self._bucket.get(name)
        self._bucket.note_look(self._name, name, found.serial)
        return found

    def _read(self, name: str, start: int, stop: int | None) -> tuple[dict[str, Any], bytes]:
        found = self._look(name)
        if start >= len(found.data):
            raise _refused(416)
        return found.meta(name), found.data[start:stop]

    async def _ask(self, name_of_request: str, name: str, apply: Callable[[], T]) -> T:
        """Make a request, which reaches the server whatever happens to its caller, or never."""
        self.num_requests += 1
        if self._is_dead:
            raise _lost("Connect")
        request = _Request(self._bucket, self._name, name_of_request, name, apply)
        self._under_way[request] = None
        try:
            async with asyncio.timeout(self._timeout_s):
                return cast("T", await request.answer)
        except TimeoutError:
            raise _lost("Timeout") from None
        except asyncio.CancelledError:
            request.abandon()
            raise
        finally:
            del self._under_way[request]


class _Request:
    """Request on its way: it reaches the bucket at its time or never, even if nobody waits for it.

    Attributes:
        answer: Answer that comes back to the client.
    """

    def __init__(
        self,
        bucket: SimulatedBucket,
        client: str,
        request: str,
        name: str,
        apply: Callable[[], object],
    ) -> None:
        self._bucket = bucket
        self._request = request
        self._name = name
        self._apply = apply
        self._random = random = bucket.random_of(client, request, name)
        self._fault, left_s = bucket.draw(request, random)
        self._loop = asyncio.get_running_loop()
        self._has_arrived = False
        self._back_s = random.random() * MAX_LATENCY_S
        self.answer: asyncio.Future[object] = self._loop.create_future()
        there_s = random.random() * MAX_LATENCY_S
        if self._fault in _DELAYED:
            there_s += random.random() * left_s
        self._arrival = self._loop.call_later(there_s, self._arrive)
        never = self._fault is BucketFault.HANG and random.random() < 0.5
        if never or self._fault is BucketFault.LOST or self._fault in _STATUS:
            self._arrival.cancel()
        if self._fault in _STATUS:
            self._end_soon(_refused(_STATUS[self._fault]))
        elif self._fault in (BucketFault.LOST, BucketFault.LATE):
            self._end_soon(_lost("Request"))

    def abandon(self) -> None:
        """Note that the client no longer waits; perhaps the request was never sent."""
        if self._has_arrived:
            self._bucket.note_arrival(self._request, self._name, is_late=True)
        elif self._random.random() < 0.5:
            self._arrival.cancel()

    def _arrive(self) -> None:
        self._has_arrived, fault = True, self._fault
        self._bucket.note_arrival(self._request, self._name, is_late=self.answer.done())
        for _ in range(2 if fault is BucketFault.REPEATED else 1):
            error, result = None, None
            try:
                result = self._apply()
            except Exception as exc:  # noqa: BLE001 - the client raises it
                error = exc
        if fault is not BucketFault.HANG:
            error = _lost("Request") if fault is BucketFault.UNANSWERED else error
            self._end_soon(error, result)

    def _end_soon(self, error: Exception | None, result: object = None) -> None:
        self._loop.call_later(self._back_s, self._end, error, result)

    def _end(self, error: Exception | None, result: object) -> None:
        if self.answer.done():
            return
        if error is None:
            self.answer.set_result(result)
        else:
            self.answer.set_exception(error)


class _Answer:
    """Answer to a read: metadata of the object, and then its bytes."""

    def __init__(self, client: SimulatedStore, meta: dict[str, Any], data: bytes) -> None:
        self.meta = meta
        self._client = client
        self._data = data

    async def bytes_async(self) -> bytes:
        self._client.received_bytes += len(self._data)
        return self._data


def _lost(kind: str) -> Exception:
    """Make the error of a request without an answer, in the words of obstore."""
    return exceptions.GenericError(f"Generic S3 error: HTTP error: kind: {kind}")


def _refused(status: int) -> Exception:
    """Make the error of a request that the server refuses, in the words of obstore."""
    kind = exceptions.PermissionDeniedError if status == 403 else exceptions.GenericError
    return kind(f"Generic S3 error: Server returned non-2xx status code: {status}")
