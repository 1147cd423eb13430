"""Session with etcd: a connection to one of its members, with a deadline for every call.

The messages and stubs are those of aetcd. Its client is not used, for it
- knows no TLS;
- never asks for another token, when its own has expired;
- waits for ever, unless told otherwise, for a server that is stopped;
- ignores that etcd cancels a watch, as for want of a permission, and waits on;
- cannot ask whether a watch is still alive, and does not tell as of which revision a list is;
- takes the answer that a lease is gone for its renewal.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from kvxfer.backends.nixl.discovery.etcd_config import Credentials, EtcdConfig
from kvxfer.endpoint import Endpoint
from kvxfer.errors import InvalidArgumentError, KVXferError
from kvxfer.extras import require_extra
from kvxfer.runtime import DaemonThreads, fetch_error
from kvxfer.text import printable

if TYPE_CHECKING:
    from types import ModuleType

T = TypeVar("T")

EXTRA = "etcd"
CLOSE_TIMEOUT_S = 1.0
"""Time that closing a connection may take; it ends all the same."""

MAX_ENTRIES = 8192
"""Most entries that are asked for; more than there may be holders, since some are skipped."""

NEEDS_LEADER = ("hasleader", "true")
"""Has a member that has no leader refuse calls and end watches: it would answer as of long ago.

Source: https://pkg.go.dev/go.etcd.io/etcd/clientv3, `WithRequireLeader`.
"""

_MAX_CHARACTERS = 300
_CHANNEL_OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),  # or a new channel waits as long as the last one would
    ("grpc.enable_http_proxy", 0),  # as connections to peers
)

logger = logging.getLogger(__name__)


class EtcdError(KVXferError, ConnectionError):
    """Call of etcd that failed, or was not answered in time."""


class CompactedError(EtcdError):
    """Watch of changes that etcd does not have any more: list again."""


class EtcdSession:
    """Session with one member of etcd; made by `open_session`.

    Args:
        rpc: Messages and stubs of aetcd.
        channel: Channel to the member.
        timeout_s: Time for each call.
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
        """Get a token for a name and its password, which all later calls show."""
        name, password = user
        request = self._rpc.AuthenticateRequest(name=name, password=password)
        answer = await self._call(self._auth.Authenticate, request)
        self._metadata = (NEEDS_LEADER, ("token", answer.token))

    async def entries(self, prefix: bytes) -> tuple[int, dict[bytes, bytes]]:
        """List the entries under a prefix that ends with a slash.

        Returns:
            The revision that the list is of, and the entries without the prefix.
        """
        request = self._rpc.RangeRequest(key=prefix, range_end=_end(prefix), limit=MAX_ENTRIES)
        answer = await self._call(self._kv.Range, request)
        found = {entry.key[len(prefix) :]: entry.value for entry in answer.kvs}
        return answer.header.revision, found

    async def has(self, key: bytes) -> bool:
        """Ask whether there is a key, of one member alone."""
        request = self._rpc.RangeRequest(key=key, count_only=True, serializable=True)
        return bool((await self._call(self._kv.Range, request)).count)

    async def put(self, key: bytes, value: bytes, lease: int) -> None:
        """Put a key that is gone when its lease is."""
        await self._call(self._kv.Put, self._rpc.PutRequest(key=key, value=value, lease=lease))

    async def grant(self, ttl_s: int) -> int:
        """Take a lease; return its name."""
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

        Yields:
            Entries that are new or changed, without the prefix, None for those that are gone; and
            an empty mapping now and then, when etcd has shown that it is alive.

        Raises:
            CompactedError: etcd has forgotten changes since the revision.
            EtcdError: It ended the watch, or was silent for twice the time of a call.
        """
        create = self._rpc.WatchCreateRequest(
            key=prefix, range_end=_end(prefix), start_revision=revision
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
            raise EtcdError(f"the watch was ended: {reason}")

    async def _read(self, call: Any, *, when_silent: Any = None) -> Any:
        """Read the next answer of a stream; ask for one when there is none in time."""
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
            raise EtcdError("the stream was ended")
        return answer

    async def _call(self, method: Callable[..., Awaitable[T]], request: Any) -> T:
        return await self._bounded(method(request, metadata=self._metadata))

    async def _bounded(self, answer: Awaitable[T]) -> T:
        """Wait for an answer; not by a deadline of gRPC, which some of its faults defeat."""
        from grpc import RpcError
        from grpc.aio import BaseError

        try:
            async with asyncio.timeout(self._timeout_s):
                return await answer
        except TimeoutError as exc:
            raise EtcdError(f"no answer within {self._timeout_s:.2g} s") from exc
        except (RpcError, BaseError) as exc:
            raise EtcdError(_describe(exc)) from exc
        except asyncio.InvalidStateError as exc:  # what is written to a stream that has ended
            raise EtcdError("the stream was ended") from exc


@contextlib.asynccontextmanager
async def open_session(
    config: EtcdConfig, endpoint: Endpoint, timeout_s: float
) -> AsyncIterator[EtcdSession]:
    """Connect to a member, and prove who this process is.

    Args:
        config: Configuration, with the credentials.
        endpoint: The member.
        timeout_s: Time for each call, and for reading the credentials.

    Raises:
        EtcdError: It cannot be reached, refuses, does not answer in time, or the credentials cannot
            be read any more.
    """
    rpc = import_aetcd()
    files = DaemonThreads("kvxfer-etcd-files", 1)
    try:
        async with asyncio.timeout(timeout_s):
            credentials = await asyncio.wrap_future(files.submit(config.read_credentials))
    except (InvalidArgumentError, TimeoutError) as exc:
        raise EtcdError(f"cannot read the credentials: {exc}") from exc
    finally:
        files.shutdown()
    channel = _open_channel(endpoint, credentials)
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
    """Import the messages and stubs of aetcd.

    Raises:
        MissingExtraError: aetcd is not installed.
    """
    require_extra(EXTRA, "aetcd", "grpc", "google.protobuf", what="discover=etcd://")
    from aetcd import rpc

    module: ModuleType = rpc
    return module


def _open_channel(endpoint: Endpoint, credentials: Credentials) -> Any:
    import grpc.aio

    if credentials.ca is None:
        return grpc.aio.insecure_channel(str(endpoint), options=_CHANNEL_OPTIONS)
    key, certificate = credentials.pair or (None, None)
    tls = grpc.ssl_channel_credentials(credentials.ca, key, certificate)
    return grpc.aio.secure_channel(str(endpoint), tls, options=_CHANNEL_OPTIONS)


def _end(prefix: bytes) -> bytes:
    """First key after all that begin with a prefix, which ends with a slash."""
    return prefix[:-1] + b"0"


def _describe(exc: Any) -> str:
    """Describe an error of gRPC: its code, and what the server or the network said."""
    code = exc.code().name.lower() if hasattr(exc, "code") else type(exc).__name__
    details = exc.details() if hasattr(exc, "details") else str(exc)
    return f"{code}: {printable(details, _MAX_CHARACTERS)}"
