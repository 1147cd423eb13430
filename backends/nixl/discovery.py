"""Discovery of peers: holders announce themselves in etcd, and engines find them there."""

import asyncio
import contextlib
import itertools
import logging
import os
import re
import ssl
import threading
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Mapping,
    Sequence,
)
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self, TypeVar

import msgspec

from kvxfer import runtime
from kvxfer.backends.nixl.wire.messages import OLDEST_VERSION, PROTOCOL_VERSION
from kvxfer.endpoint import Endpoint, split_url
from kvxfer.errors import BackendUnavailableError, InvalidArgumentError, KVXferError
from kvxfer.extras import installed_version, require_extra
from kvxfer.named_files import read_named_file
from kvxfer.runtime import LoopThread, Pause, begin_aside, end_tasks, fetch_error
from kvxfer.settings import shown
from kvxfer.storage.integrity import read_secret
from kvxfer.storage.observer import Gauge
from kvxfer.text import printable

if TYPE_CHECKING:
    from types import ModuleType

T = TypeVar("T")

logger = logging.getLogger(__name__)

MAX_ANNOUNCEMENT_BYTES = 4096
"""Maximum size of an announcement."""

MAX_NAME_BYTES = 300
"""Maximum length of a holder's name: a host of 253 characters, and a port."""

_Text = Annotated[str, msgspec.Meta(max_length=128)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]

MAX_PEERS = 4096
"""Maximum number of known holders; any others are ignored."""

MAX_WARNED = 64
"""Maximum number of skipped entries that the log warns of at a time."""

_MAX_CHARACTERS = 300
_MAX_SHOWN = 8

_FORM = "a URL such as etcd://10.0.0.5:2379/kvxfer, without credentials"
_PREFIX = re.compile(r"(/[\w.~-]+)+", re.ASCII)

CLOSE_TIMEOUT_S = 1.0
"""Deadline for closing a connection, which is then abandoned."""

MAX_ENTRIES = 8192
"""Maximum number of entries to ask for; more than `MAX_PEERS`, since some are skipped."""

NEEDS_LEADER = ("hasleader", "true")
"""Metadata that makes a member without a leader refuse calls and end watches: it may be stale.

Source: https://pkg.go.dev/go.etcd.io/etcd/clientv3, `WithRequireLeader`.
"""

_CHANNEL_OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),  # else a new channel inherits the last one's backoff
    ("grpc.enable_http_proxy", 0),  # as for connections to peers
)

_THREADS: dict[int, LoopThread] = {}
_LOCK = threading.Lock()

LEASE_S = 5
"""Lease of an announcement, in seconds: a holder that crashes disappears after it."""

FIRST_LIST_S = 1.0
"""How long opening waits for the first list of holders; until that arrives, none is known."""

FIRST_RETRY_S = 0.1
"""Pause after the first failed attempt; each later pause is twice as long, up to a lease."""

WITHDRAW_TIMEOUT_S = 2.0
"""Deadline for withdrawing an announcement, which otherwise ends with its lease."""

MAX_FAILURES = 8
"""Maximum number of different failures that are logged until etcd answers again."""

END_TIMEOUT_S = 5.0
"""How long a caller waits for discovery to end, even if a call of gRPC hangs."""


@cache
def _release() -> str:
    return installed_version("kvxfer")


class Announcement(msgspec.Struct, frozen=True, kw_only=True):
    """Announcement of a holder: JSON, in an entry whose name is the holder's address.

    It contains no secret, and proves nothing: peers authenticate when they connect. Unknown fields
    are ignored, so that later releases may add some.

    Attributes:
        capacity: Bytes of memory for blocks; 0 if only the engine knows.
        namespace: Fingerprint of the holder's namespace; empty as long as it accepts any.
        started: When the holder began to listen, in seconds since 1970.
        version: Release of kvxfer.
        protocol: Newest version of the protocol that the holder speaks.
        oldest_protocol: Oldest version that it speaks.
    """

    capacity: _Count = 0
    namespace: _Text = ""
    started: float = msgspec.field(default_factory=runtime.wall_time)
    version: _Text = msgspec.field(default_factory=_release)
    protocol: _Count = PROTOCOL_VERSION
    oldest_protocol: _Count = OLDEST_VERSION

    def encode(self) -> bytes:
        """Encode it as JSON."""
        return msgspec.json.encode(self)


_DECODER = msgspec.json.Decoder(Announcement)


def decode_announcement(name: bytes, data: bytes) -> tuple[Endpoint, Announcement]:
    """Decode an entry, and the address that is its name; the error says why it is invalid."""
    if len(name) > MAX_NAME_BYTES or len(data) > MAX_ANNOUNCEMENT_BYTES:
        size = f"{len(name)} and {len(data)} bytes"
        wanted = f"at most {MAX_NAME_BYTES} and {MAX_ANNOUNCEMENT_BYTES}"
        raise InvalidArgumentError("name and announcement", size, wanted)
    endpoint = Endpoint.parse("name", name.decode("ascii", "backslashreplace"))
    if str(endpoint).encode() != name or not endpoint.port:
        wanted = "its canonical form, with a port above 0 and no leading zeros"
        raise InvalidArgumentError("name", name, wanted)
    try:
        return endpoint, _DECODER.decode(data)
    except (ValueError, RecursionError) as exc:  # also of text that is not UTF-8
        raise InvalidArgumentError("announcement", data[:64], f"an announcement: {exc}") from exc


class Roster:
    """Roster of the holders of one namespace, from entries that anyone may have written.

    After a loss of contact with etcd, holders that are no longer listed are kept for `grace_s`, in
    which they can announce themselves again: their entries may have expired while etcd was away,
    and they may still have their blocks.

    Attributes:
        endpoints: Endpoints of the holders, in a new tuple after each change.
    """

    def __init__(
        self, namespace: str, require: Callable[[Endpoint], None], *, grace_s: float
    ) -> None:
        self.endpoints: tuple[Endpoint, ...] = ()
        self._namespace = namespace
        self._require = require
        self._grace_s = grace_s
        self._present: dict[bytes, Endpoint] = {}
        self._doubtful: set[bytes] = set()
        self._settles_at = 0.0
        self._was_listed = False
        self._warned: set[bytes] = set()
        self._is_full = False

    def replace(self, entries: Mapping[bytes, bytes], now: float) -> None:
        """Take a list of all entries, by name: the first one, or one after a loss of contact."""
        self._settles_at = now + self._grace_s if self._was_listed else now
        self._was_listed = True
        self._warned &= entries.keys()
        self._doubtful.clear()
        gone = {name: None for name in self._present if name not in entries}
        self.change(gone | dict(entries), now)

    def change(self, changes: Mapping[bytes, bytes | None], now: float) -> None:
        """Take new and changed entries, by name; None for one that is gone."""
        for name, data in changes.items():
            if data is None:
                self._drop(name, now)
                self._warned.discard(name)
            else:
                self._take(name, data, now)
        self._publish()

    def settle(self, now: float) -> None:
        """Forget unlisted holders whose grace has ended; only to be called while etcd answers."""
        if self._doubtful and now >= self._settles_at:
            for name in self._doubtful:
                del self._present[name]
            self._doubtful.clear()
            self._publish()

    def _drop(self, name: bytes, now: float) -> None:
        if name in self._present and now < self._settles_at:
            self._doubtful.add(name)
        else:
            self._present.pop(name, None)
            self._doubtful.discard(name)

    def _take(self, name: bytes, data: bytes, now: float) -> None:
        try:
            endpoint, announcement = decode_announcement(name, data)
            self._check(endpoint, announcement)
        except InvalidArgumentError as exc:
            self._drop(name, now)
            self._skip(name, exc)
            return
        self._warned.discard(name)
        self._doubtful.discard(name)
        if announcement.namespace not in ("", self._namespace):
            self._present.pop(name, None)
        elif name in self._present or len(self._present) < MAX_PEERS:
            self._present[name] = endpoint
        elif not self._is_full:
            self._is_full = True
            logger.warning("%d holders are announced; ignoring any others", MAX_PEERS)

    def _check(self, endpoint: Endpoint, announcement: Announcement) -> None:
        self._require(endpoint)
        oldest, newest = announcement.oldest_protocol, announcement.protocol
        if oldest > PROTOCOL_VERSION or newest < OLDEST_VERSION:
            ours = f"one of {OLDEST_VERSION} to {PROTOCOL_VERSION}, which this process speaks"
            raise InvalidArgumentError("protocol", f"{oldest} to {newest}", ours)

    def _skip(self, name: bytes, exc: InvalidArgumentError) -> None:
        if name not in self._warned and len(self._warned) < MAX_WARNED:
            self._warned.add(name)
            decoded = name[:_MAX_CHARACTERS].decode("ascii", "backslashreplace")
            texts = (printable(text, _MAX_CHARACTERS) for text in (decoded, exc))
            logger.warning("skipped the announcement of %s: %s", *texts)

    def _publish(self) -> None:
        if (endpoints := tuple(self._present.values())) != self.endpoints:
            self.endpoints = endpoints
            listed = ", ".join(map(str, endpoints[:_MAX_SHOWN]))
            more = ", ..." if len(endpoints) > _MAX_SHOWN else ""
            logger.info("%d holders are announced: %s%s", len(endpoints), listed, more)


@dataclass(frozen=True, slots=True, repr=False)
class Credentials:
    """Credentials for etcd, read anew for each connection, since files may be replaced.

    Hidden from `repr`, and so from logs.
    """

    user: tuple[str, str] | None
    pems: list[bytes | None]


@dataclass(frozen=True, slots=True)
class EtcdConfig:
    """Configuration of discovery by etcd.

    Attributes:
        endpoints: Members of the cluster; when one fails, the next is asked.
        prefix: Beginning of the keys, with a trailing slash.
        user_file: File with `name:password`.
        ca, cert, key: Files in PEM.
    """

    endpoints: tuple[Endpoint, ...]
    prefix: str
    user_file: str = ""
    ca: str = ""
    cert: str = ""
    key: str = ""

    @classmethod
    def parse(cls, url: str, *, user_file: str, ca: str, cert: str, key: str) -> Self:
        """Parse `etcd://host:port,host:port/prefix`; a password is refused, and not shown."""
        given = re.split("[?#]", shown(url))[0]  # a query or a fragment may be a password, too
        try:
            parts = split_url(url)
        except ValueError:
            raise InvalidArgumentError("discover", given, _FORM) from None
        strange = parts.query or parts.fragment or "@" in url or parts.scheme != "etcd"
        if strange or not _PREFIX.fullmatch(parts.path.rstrip("/")):
            raise InvalidArgumentError("discover", given, _FORM)
        endpoints = tuple(Endpoint.parse("discover", each) for each in parts.netloc.split(","))
        if bool(cert) != bool(key) or (cert and not ca):
            wanted = "a CA alone, all three, or none"
            raise InvalidArgumentError("etcd_ca, etcd_cert, etcd_key", (ca, cert, key), wanted)
        return cls(endpoints, f"{parts.path.rstrip('/')}/", user_file, ca, cert, key)

    def __str__(self) -> str:
        return f"etcd://{','.join(map(str, self.endpoints))}{self.prefix.rstrip('/')}"

    def read_credentials(self) -> Credentials:
        """Read the credentials; blocks."""
        files = {"etcd_ca": self.ca, "etcd_key": self.key, "etcd_cert": self.cert}
        pems = [_read(name, path) if path else None for name, path in files.items()]
        return Credentials(self._read_user(), pems)

    def check(self) -> None:
        """Check the credentials; warn if others can read the password in its file or on its way."""
        user = self.read_credentials().user
        read_secret(self.user_file)  # warns if everybody can read the file
        if not self.ca:
            if user and not all(each.is_loopback for each in self.endpoints):
                logger.warning("%s: the password is sent without TLS; set etcd_ca", self)
            return
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        load_certificates(context, "etcd", self.ca, self.cert, self.key)

    def _read_user(self) -> tuple[str, str] | None:
        if not self.user_file:
            return None
        source = ("etcd_user_file", self.user_file)
        text = _read(*source).decode("utf-8", "replace").rstrip("\r\n")
        name, colon, password = text.partition(":")
        if not (name and colon and password) or "\n" in text:
            raise InvalidArgumentError(*source, "a single line, name:password")
        return name, password


def _read(argument: str, path: str) -> bytes:
    try:
        return read_named_file(path).data
    except (OSError, ValueError) as exc:  # ValueError: a NUL in the path
        reason = getattr(exc, "strerror", None) or exc
        raise InvalidArgumentError(argument, path, f"a readable file: {reason}") from exc


def load_certificates(context: ssl.SSLContext, name: str, ca: str, cert: str, key: str) -> None:
    """Load an authority's certificate and, unless `cert` is empty, a certificate and its key.

    Raises:
        InvalidArgumentError: `{name}_ca`, or `{name}_cert, {name}_key`, cannot be read or is not
            such a PEM file.
    """
    for path in filter(None, (ca, cert, key)):
        if os.access(path, os.F_OK) and not Path(path).is_file():  # OpenSSL waits for pipes
            raise InvalidArgumentError(f"{name}_ca, {name}_cert, {name}_key", path, "regular files")
    try:
        if cert:
            context.load_cert_chain(cert, key, password="")  # without a prompt
    except OSError as exc:  # includes `ssl.SSLError`
        wanted = f"a certificate and its private key, not encrypted, in PEM: {exc}"
        raise InvalidArgumentError(f"{name}_cert, {name}_key", f"{cert}, {key}", wanted) from exc
    try:
        context.load_verify_locations(ca)
    except OSError as exc:
        wanted = f"a certificate of an authority in PEM: {exc}"
        raise InvalidArgumentError(f"{name}_ca", ca, wanted) from exc


class EtcdError(KVXferError, ConnectionError):
    """Call to etcd that failed, or was not answered in time."""


class CompactedError(EtcdError):
    """Watch of changes that etcd has compacted: list the entries again."""


class EtcdSession:
    """Session with one member of etcd, with a deadline for every call; made by `open_session`.

    The messages and stubs are aetcd's. Its client is not used, because it

    - cannot use TLS;
    - never gets a new token when its own has expired;
    - by default waits forever for a server that is stopped;
    - ignores that etcd has cancelled a watch, e.g. for lack of permission, and waits on;
    - cannot check whether a watch is still alive, and does not return the revision of a list;
    - mistakes the answer that a lease is gone for its renewal.
    """

    def __init__(self, rpc: "ModuleType", channel: Any, timeout_s: float) -> None:
        self._rpc = rpc
        self._timeout_s = timeout_s
        self._metadata: tuple[tuple[str, str], ...] = (NEEDS_LEADER,)
        self._auth = rpc.AuthStub(channel)
        self._kv = rpc.KVStub(channel)
        self._leases = rpc.LeaseStub(channel)
        self._watches = rpc.WatchStub(channel)

    async def authenticate(self, user: tuple[str, str]) -> None:
        """Get a token for a user's name and password, which all later calls send."""
        name, password = user
        request = self._rpc.AuthenticateRequest(name=name, password=password)
        answer = await self._call(self._auth.Authenticate, request)
        self._metadata = (NEEDS_LEADER, ("token", answer.token))

    async def entries(self, prefix: bytes) -> tuple[int, dict[bytes, bytes]]:
        """Return a revision, and its entries under a prefix, by name without the prefix."""
        request = self._rpc.RangeRequest(key=prefix, range_end=_next_key(prefix), limit=MAX_ENTRIES)
        answer = await self._call(self._kv.Range, request)
        found = {entry.key[len(prefix) :]: entry.value for entry in answer.kvs}
        return answer.header.revision, found

    async def has(self, key: bytes) -> bool:
        """Whether this member has a key; it does not ask the others."""
        request = self._rpc.RangeRequest(key=key, count_only=True, serializable=True)
        return bool((await self._call(self._kv.Range, request)).count)

    async def put(self, key: bytes, value: bytes, lease: int) -> None:
        """Put a key that ends with its lease."""
        await self._call(self._kv.Put, self._rpc.PutRequest(key=key, value=value, lease=lease))

    async def grant(self, ttl_s: int) -> int:
        """Take a lease; return its id."""
        answer = await self._call(self._leases.LeaseGrant, self._rpc.LeaseGrantRequest(TTL=ttl_s))
        lease: int = answer.ID
        return lease

    async def renew(self, lease: int) -> bool:
        """Renew a lease; return whether it is still there."""
        call = self._leases.LeaseKeepAlive(metadata=self._metadata)
        try:
            await self._bounded(call.write(self._rpc.LeaseKeepAliveRequest(ID=lease)))
            answer = await self._read(call)
        finally:
            call.cancel()
        return bool(answer.TTL > 0)

    async def revoke(self, lease: int) -> None:
        """End a lease, and delete its keys."""
        await self._call(self._leases.LeaseRevoke, self._rpc.LeaseRevokeRequest(ID=lease))

    async def changes(
        self, prefix: bytes, revision: int
    ) -> AsyncGenerator[Mapping[bytes, bytes | None], None]:
        """Watch the entries under a prefix, from a revision on.

        Yields new and changed entries, by name without the prefix, and None for those that are
        gone; also an empty mapping now and then, when etcd has shown that it is alive.
        """
        create = self._rpc.WatchCreateRequest(
            key=prefix, range_end=_next_key(prefix), start_revision=revision
        )
        alive = self._rpc.WatchRequest(progress_request=self._rpc.WatchProgressRequest())
        call = self._watches.Watch(metadata=self._metadata)
        try:
            await self._bounded(call.write(self._rpc.WatchRequest(create_request=create)))
            answer = await self._read(call)
            while True:
                self._require_watched(answer)
                yield {
                    event.kv.key[len(prefix) :]: None
                    if event.type == event.DELETE
                    else event.kv.value
                    for event in answer.events
                }
                answer = await self._read(call, when_silent=alive)
        finally:
            call.cancel()

    def _require_watched(self, answer: Any) -> None:
        if answer.compact_revision:
            raise CompactedError(f"changes up to revision {answer.compact_revision} are gone")
        if answer.canceled:
            reason = printable(answer.cancel_reason, _MAX_CHARACTERS) or "no reason was given"
            raise EtcdError(f"etcd cancelled the watch: {reason}")

    async def _read(self, call: Any, *, when_silent: Any = None) -> Any:
        """Read the next answer of a stream; if none comes in time, send `when_silent`."""
        from grpc.aio import EOF

        reading = asyncio.ensure_future(call.read())
        reading.add_done_callback(fetch_error)
        try:
            if when_silent is not None:
                await asyncio.wait([reading], timeout=self._timeout_s)
                if not reading.done():
                    await self._bounded(call.write(when_silent))
            answer = await self._bounded(asyncio.shield(reading))
        finally:
            reading.cancel()
        if answer is EOF:
            raise EtcdError("etcd ended the stream")
        return answer

    async def _call(self, method: Callable[..., Awaitable[T]], request: Any) -> T:
        return await self._bounded(method(request, metadata=self._metadata))

    async def _bounded(self, answer: Awaitable[T]) -> T:
        """Wait for an answer, but not with gRPC's own deadline, which some of its faults defeat."""
        from grpc import RpcError
        from grpc.aio import BaseError

        try:
            async with asyncio.timeout(self._timeout_s):
                return await answer
        except TimeoutError as exc:
            raise EtcdError(f"no answer within {self._timeout_s:.2g} s") from exc
        except (RpcError, BaseError) as exc:
            code = exc.code().name.lower() if hasattr(exc, "code") else type(exc).__name__
            details = exc.details() if hasattr(exc, "details") else str(exc)
            raise EtcdError(f"{code}: {printable(details, _MAX_CHARACTERS)}") from exc
        except asyncio.InvalidStateError as exc:  # from a write to a stream that has ended
            raise EtcdError("etcd ended the stream") from exc


@contextlib.asynccontextmanager
async def open_session(
    config: EtcdConfig, endpoint: Endpoint, timeout_s: float
) -> AsyncIterator[EtcdSession]:
    """Connect to a member, and authenticate.

    `timeout_s` is the deadline for each call, and for reading the credentials.
    """
    rpc = import_aetcd()
    import grpc.aio

    reading = begin_aside("kvxfer-etcd-files", config.read_credentials)
    try:
        async with asyncio.timeout(timeout_s):
            credentials = await asyncio.wrap_future(reading)
    except (InvalidArgumentError, TimeoutError) as exc:
        raise EtcdError(f"cannot read the credentials: {exc}") from exc
    if not config.ca:
        channel = grpc.aio.insecure_channel(str(endpoint), options=_CHANNEL_OPTIONS)
    else:
        tls = grpc.ssl_channel_credentials(*credentials.pems)
        channel = grpc.aio.secure_channel(str(endpoint), tls, options=_CHANNEL_OPTIONS)
    try:
        session = EtcdSession(rpc, channel, timeout_s)
        if credentials.user is not None:
            await session.authenticate(credentials.user)
        yield session
    finally:
        closing = asyncio.ensure_future(channel.close())
        await asyncio.wait([closing], timeout=CLOSE_TIMEOUT_S)
        closing.cancel()


def import_aetcd() -> "ModuleType":
    """Import the messages and stubs of aetcd."""
    require_extra("etcd", "aetcd", "grpc", "google.protobuf", what="discover=etcd://")
    from aetcd import rpc

    module: ModuleType = rpc
    return module


def _next_key(prefix: bytes) -> bytes:
    """First key after all keys that begin with a prefix, which ends with a slash."""
    return prefix[:-1] + b"0"


def own_loop() -> asyncio.AbstractEventLoop:
    """Get the loop for all discovery of a process, on a thread that ends with the process.

    gRPC's asyncio interface has one queue for all event loops of a process: leftovers of the calls
    of a loop that has ended arrive in another one, and raise there. So discovery uses one loop that
    never ends. It also renews leases while an engine's own loop is busy.
    """
    with _LOCK:
        pid = os.getpid()  # a forked process has none of its parent's threads
        if pid not in _THREADS:
            try:
                _THREADS[pid] = LoopThread("kvxfer-etcd")
            except RuntimeError as exc:
                raise BackendUnavailableError(f"cannot start discovery: {exc}") from exc
        return _THREADS[pid].loop


async def run_there(make: Callable[[], Coroutine[Any, Any, T]], timeout_s: float) -> T | None:
    """Run a coroutine on the loop of discovery, which calls `make`: none is left unawaited.

    Returns:
        Its result; None if it was cancelled there, or took too long: its end is not waited for.
    """
    loop, ended = own_loop(), Future[T]()

    def begin() -> None:
        if not ended.cancelled():
            task = loop.create_task(make())
            ended.add_done_callback(lambda _: loop.call_soon_threadsafe(task.cancel))
            task.add_done_callback(give)

    def give(task: asyncio.Task[T]) -> None:
        error = None if task.cancelled() else task.exception()
        if task.cancelled() or not ended.set_running_or_notify_cancel():
            ended.cancel()
        elif error is None:
            ended.set_result(task.result())
        else:
            ended.set_exception(error)

    loop.call_soon_threadsafe(begin)
    running = asyncio.wrap_future(ended)
    try:
        done, _ = await asyncio.wait([running], timeout=timeout_s)
        return running.result() if done and not running.cancelled() else None
    finally:
        ended.cancel()


async def look_once(config: EtcdConfig, timeout_s: float) -> Mapping[bytes, bytes]:
    """List the announcements once, by name; `timeout_s` is for each step."""
    import_aetcd()
    config.check()
    failure = EtcdError(f"no answer within {4 * timeout_s:.2g} s")
    for endpoint in config.endpoints:
        try:
            found = await run_there(partial(_list_at, config, endpoint, timeout_s), 4 * timeout_s)
        except EtcdError as exc:
            failure, found = exc, None
        if found is not None:
            return found
    raise failure


async def _list_at(config: EtcdConfig, endpoint: Endpoint, timeout_s: float) -> dict[bytes, bytes]:
    async with open_session(config, endpoint, timeout_s) as session:
        _, entries = await session.entries(config.prefix.encode())
        return entries


class EtcdDiscovery:
    """Discovery by etcd, on a thread of its own: moving a block never waits for etcd.

    While etcd cannot be reached, the peers known last stay known, however long that takes. When it
    answers again and does not list them, they stay known for two more leases: see `Roster`.

    A holder, which looks for no peers, gives no namespace. A third of the lease is the interval of
    renewals, and the deadline for every call.
    """

    def __init__(
        self,
        config: EtcdConfig,
        *,
        namespace: str = "",
        require: Callable[[Endpoint], None] = lambda _: None,
        lease_s: int = LEASE_S,
    ) -> None:
        import_aetcd()
        config.check()
        self._config = config
        self._lease_s = lease_s
        # A holder tries again after a lease at the latest, and its calls take two thirds of one.
        self._roster = Roster(namespace, require, grace_s=2 * lease_s)
        self._following = _EtcdTask(config, lease_s, self._watch, self._say_known)
        self._announcing: _EtcdTask | None = None
        self._lease: int | None = None
        self._waits_until: float | None = None
        self._is_closed = False

    @property
    def peers(self) -> Sequence[Endpoint]:
        """Known peers, each once; while etcd cannot be reached, those known last."""
        return self._roster.endpoints

    async def follow(self) -> None:
        """Begin to find peers; wait a moment for the first list. May be called again."""
        if self._is_closed or self._following.tried.is_set():
            return
        now = runtime.monotonic()
        if self._waits_until is None:
            self._following.start()
            self._waits_until = now + FIRST_LIST_S
        if now < self._waits_until:  # later calls wait no longer, whatever hangs
            await run_there(self._following.tried.wait, self._waits_until - now)

    async def announce(self, at: Endpoint, describe: Callable[[], Announcement]) -> None:
        """Begin to announce this process; may be called again.

        `describe` is called for every renewal, since the holder's namespace may be settled later.
        """
        if self._announcing is None and not self._is_closed:
            self._at, self._describe = at, describe
            meanwhile = f"{at} is not announced until it answers"
            work = self._keep_announced
            announcing = _EtcdTask(self._config, self._lease_s, work, lambda: meanwhile)
            announcing.start()
            self._announcing = announcing

    async def withdraw(self) -> None:
        """End the announcement, so that others look elsewhere; may be called again."""
        if self._announcing is not None:
            await run_there(partial(self._end_announcement, self._announcing), END_TIMEOUT_S)

    async def aclose(self) -> None:
        """Withdraw, and end everything, within seconds; may be called again."""
        self._is_closed = True
        await self.withdraw()
        if self._following.is_begun:
            await run_there(self._following.end, END_TIMEOUT_S)

    def gauges(self) -> Mapping[Gauge, float]:
        """State for observers: how many peers are known, and whether discovery is failing."""
        tasks = filter(None, (self._following, self._announcing))
        gauges = {Gauge.DISCOVERY_FAILING: float(any(each.is_failing for each in tasks))}
        if self._following.is_begun:
            gauges[Gauge.PEERS_KNOWN] = len(self._roster.endpoints)
        return gauges

    async def _watch(self, task: "_EtcdTask", session: EtcdSession) -> None:
        """Keep the roster: list the holders, and then watch them."""
        prefix = self._config.prefix.encode()
        revision, entries = await session.entries(prefix)
        self._roster.replace(entries, runtime.monotonic())
        async with contextlib.aclosing(session.changes(prefix, revision + 1)) as changes:
            async for changed in changes:
                now = runtime.monotonic()
                self._roster.change(changed, now)
                self._roster.settle(now)
                task.succeed()

    def _say_known(self) -> str:
        num_peers = len(self._roster.endpoints)
        return f"{num_peers} holders are known" if num_peers else "no holder is known yet"

    async def _keep_announced(self, task: "_EtcdTask", session: EtcdSession) -> None:
        key = f"{self._config.prefix}{self._at}".encode()
        announced = b""
        while True:
            if self._lease is None or not await session.renew(self._lease):
                self._lease = await session.grant(self._lease_s)
                announced = b""
            value = self._describe().encode()
            if value != announced or not await session.has(key):
                await session.put(key, value, self._lease)
                logger.info("announced %s at %s", self._at, self._config)
                announced = value
            task.succeed()
            await asyncio.sleep(self._lease_s / 3)

    async def _end_announcement(self, announcing: "_EtcdTask") -> None:
        """End the task, and the lease if etcd answers; else the lease ends by itself."""
        await announcing.end()
        if (lease := self._lease) is None:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WITHDRAW_TIMEOUT_S):
                for endpoint in self._config.endpoints:
                    with contextlib.suppress(EtcdError):
                        async with open_session(self._config, endpoint, CLOSE_TIMEOUT_S) as session:
                            await session.revoke(lease)
                        self._lease = None  # only now: the next call completes a cancelled one
                        logger.info("withdrew the announcement of %s", self._at)
                        return
        if self._lease is not None:  # another call may have ended it
            self._lease = None
            text = "etcd does not answer; %s stays announced for up to %d s"
            logger.warning(text, self._at, self._lease_s)


class _EtcdTask:
    """Task with a session of etcd; when the session fails, another is opened, at the next member.

    Its coroutines run on the loop of discovery, see `own_loop`. `work` calls `succeed` whenever
    etcd has answered. It is repeated in a new session: at once after a `CompactedError`, after a
    pause for other errors. `meanwhile` tells the log how things stand while etcd fails.
    """

    def __init__(
        self,
        config: EtcdConfig,
        lease_s: int,
        work: "Callable[[_EtcdTask, EtcdSession], Awaitable[None]]",
        meanwhile: Callable[[], str],
    ) -> None:
        self.is_begun = self._is_working = self._is_ended = False
        self._config = config
        self._timeout_s = lease_s / 3
        self._work = work
        self._meanwhile = meanwhile
        self._task: asyncio.Task[None] | None = None
        self.tried = asyncio.Event()
        self._failures: set[str] = set()
        self._pause = Pause(FIRST_RETRY_S, lease_s, uneven=True)

    @property
    def is_failing(self) -> bool:
        """Whether etcd did not answer the last call, or has not answered any yet."""
        return self.is_begun and not (self._is_working or self._is_ended)

    def start(self) -> None:
        """Start, once, from any thread."""
        own_loop().call_soon_threadsafe(self._start)
        self.is_begun = True

    def _start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def end(self) -> None:
        """End the task; whatever hangs in gRPC is left behind."""
        await end_tasks(filter(None, [self._task]), 2 * CLOSE_TIMEOUT_S)
        self._is_ended = True

    def succeed(self) -> None:
        """Note that etcd has answered."""
        if self._failures:
            logger.info("%s answers again", self._config)
            self._failures.clear()
        self._is_working = True
        self._pause.reset()
        self.tried.set()

    async def _run(self) -> None:
        for endpoint in itertools.cycle(self._config.endpoints):
            try:
                async with open_session(self._config, endpoint, self._timeout_s) as session:
                    await self._work(self, session)
            except CompactedError as exc:
                logger.debug("%s: %s", endpoint, exc)
                continue
            except Exception as exc:  # noqa: BLE001 - gRPC raises any; the next session may work
                reason = str(exc) if isinstance(exc, EtcdError) else repr(exc)
                self._fail(endpoint, printable(reason, _MAX_CHARACTERS))
            await asyncio.sleep(self._pause.next_s())

    def _fail(self, endpoint: Endpoint, reason: str) -> None:
        if reason not in self._failures and len(self._failures) < MAX_FAILURES:
            self._failures.add(reason)
            logger.warning(
                "discovery by etcd at %s failed: %s; %s", endpoint, reason, self._meanwhile()
            )
        self._is_working = False
        self.tried.set()
