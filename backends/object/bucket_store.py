"""Store in a bucket, as maintenance sees it."""

import asyncio
import errno
import itertools
import os
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

from kvxfer.backends.object.bucket import Bucket, ListedObject, ObjectVersion
from kvxfer.backends.object.config import ObjectConfig
from kvxfer.backends.object.request_failure import RequestFailedError
from kvxfer.errors import BackendUnavailableError, InvalidArgumentError
from kvxfer.pages.header import PAGE_BYTES, BlockFileError, header_size_in
from kvxfer.pages.maintenance import BlockStore, OpenBlock, StoredNamespace
from kvxfer.pages.names import (
    NAMESPACE_FILE,
    QUARANTINE,
    FoundBlock,
    OtherEntry,
    file_name,
    is_block_folder,
    is_fingerprint,
    key_in_name,
    owner_of,
)
from kvxfer.pages.texts import DESCRIPTIONS, MAX_TEXT_BYTES
from kvxfer.pages.verification import cut_header
from kvxfer.runtime import LoopThread, end_tasks

PIECE_BYTES = 8 << 20
"""Maximum bytes of an object in one request, which each thread that verifies holds in memory."""

T = TypeVar("T")


class BucketStore(BlockStore):
    """Store in a bucket; see `BlockStore`. The caller closes it.

    Names and sizes come from lists, a thousand at a time. Every request has the deadline and the
    retries of `Bucket`. Engines write no temporary files to a bucket: an object with the name of
    one was copied from a folder. Uses are not recorded: a block counts as used when it was stored.
    Namespaces created after the first look are not seen. Thread-safe. Credentials come from the
    environment.

    Attributes:
        bucket: Bucket, whose requests are passed to `ask`.
        prefix: Beginning of all names.
    """

    def __init__(self, config: ObjectConfig) -> None:
        self.place = config.url.rstrip("/")
        self.num_at_once = config.max_requests
        self.bucket = Bucket(config)
        self.prefix = config.prefix
        self._root = f"{config.scheme}://{config.address}/"
        self._close_timeout_s = config.close_timeout_s
        self._thread = LoopThread("kvxfer-bucket")
        self._fingerprints: list[str] | None = None

    def close(self) -> None:
        """Cancel requests that are under way, and end the event loop."""
        self._thread.run(self._end())
        self._thread.stop()

    def require(self) -> None:
        """See `BlockStore.require`."""
        wanted = "the root of a store, the bucket and prefix of an engine's backend"
        entries = self.entries()
        if not any(isinstance(each, FoundBlock) or each.goes_along for each in entries):
            raise InvalidArgumentError("path", self.place, wanted)

    def fingerprints(self) -> list[str]:
        """See `BlockStore.fingerprints`."""
        if self._fingerprints is None:
            found, _ = self.ask(self.bucket.list_folder(self.prefix))
            self._fingerprints = sorted(filter(self._has_objects, filter(is_fingerprint, found)))
        return self._fingerprints

    def namespace(self, fingerprint: str) -> AbstractContextManager[StoredNamespace]:
        """See `BlockStore.namespace`."""
        return nullcontext(_BucketNamespace(self, fingerprint))

    def blocks(
        self, fingerprint: str = "", *, errors: list[OSError] | None = None
    ) -> Iterator[FoundBlock]:
        """See `BlockStore.blocks`."""
        del errors  # there are no folders to open
        return (entry for _, entry in self._walk(fingerprint) if isinstance(entry, FoundBlock))

    def entries(self) -> Iterator[FoundBlock | OtherEntry]:
        """See `BlockStore.entries`."""
        return (entry for _, entry in self._walk())

    def open_path(self, path: str) -> AbstractContextManager[OpenBlock]:
        """See `BlockStore.open_path`."""
        return nullcontext(_OpenObject(self, self.prefix + path))

    def open_count(self) -> "_Count":
        """See `BlockStore.open_count`."""
        return _Count()

    def collect(self) -> int:
        """See `BlockStore.collect`."""
        names = (name for name, e in self._walk() if isinstance(e, OtherEntry) and e.abandoned)
        num_removed = 0
        while some := list(itertools.islice(names, self.num_at_once)):
            num_removed += self.delete(some).count(None)
        return num_removed

    def ask(self, request: Coroutine[Any, Any, T], name: str = "") -> T:
        """Make a request about an object, or about the bucket if `name` is empty.

        Raises:
            BackendUnavailableError: The server is gone, or a request about the bucket failed.
            OSError: A request about an object failed.
        """
        try:
            return self._thread.run(request)
        except RequestFailedError as exc:
            raise self._translate(exc, name) from None

    def list_objects(self, prefix: str) -> Iterator[ListedObject]:
        """List the objects whose names begin with a prefix, in the order of names."""
        answers = self.bucket.list_objects(prefix)
        while listed := self.ask(_take(answers)):
            yield from listed

    def get(self, name: str, request: Coroutine[Any, Any, T | None]) -> T:
        """Make a request about an object; raise a FileNotFoundError if there is none."""
        answer = self.ask(request, name)
        if answer is None:
            raise self.gone(name)
        return answer

    def delete(self, names: Sequence[str]) -> list[OSError | None]:
        """Remove objects, several at a time; return for each why it stays, None if it is gone."""
        failures = zip(self._thread.run(self._delete_each(names)), names, strict=True)
        return [None if exc is None else self._translate(exc, name) for exc, name in failures]

    def gone(self, name: str) -> FileNotFoundError:
        """Make the error of an object that is not there."""
        return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), f"{self._root}{name}")

    def _has_objects(self, fingerprint: str) -> bool:
        """Whether a namespace has objects: SeaweedFS lists it for a while after they are gone."""
        folder = f"{self.prefix}{fingerprint}/"
        there = self.ask(self.bucket.head(folder + NAMESPACE_FILE), folder + NAMESPACE_FILE)
        return there is not None or next(self.list_objects(folder), None) is not None

    def _walk(self, only: str = "") -> Iterator[tuple[str, FoundBlock | OtherEntry]]:
        """Walk through the entries of one namespace or all; yield the name and entry of each."""
        for fingerprint in [only] if only else self.fingerprints():
            folder = f"{self.prefix}{fingerprint}/"
            for listed in self.list_objects(folder):
                yield listed.name, _entry(fingerprint, listed.name.removeprefix(folder), listed)

    def _translate(self, exc: RequestFailedError, name: str) -> OSError:
        if not name or (exc.transient and self._is_server_gone(name)):
            raise BackendUnavailableError(f"{self.place}: {exc}") from None
        return OSError(errno.EACCES if exc.denied else errno.EIO, str(exc), f"{self._root}{name}")

    def _is_server_gone(self, name: str) -> bool:
        """Whether the server does not even answer a request for an object's version."""
        try:
            self._thread.run(self.bucket.head(name))
        except RequestFailedError as exc:
            return exc.transient
        return False

    async def _delete_each(self, names: Sequence[str]) -> list[RequestFailedError | None]:
        async def delete(name: str) -> RequestFailedError | None:
            try:
                async with self.bucket.slots:
                    await self.bucket.delete(name)
            except RequestFailedError as exc:
                return exc
            return None

        return await asyncio.gather(*map(delete, names))

    async def _end(self) -> None:
        await end_tasks(asyncio.all_tasks() - {asyncio.current_task()})
        await self.bucket.aclose(self._close_timeout_s)


async def _take(answers: AsyncGenerator[list[ListedObject], None]) -> list[ListedObject]:
    return await anext(answers, [])


class _Count:
    """Count of a bucket's bytes by one walk, since nobody keeps a count."""

    used = 0

    def locked(self) -> nullcontext[None]:
        return nullcontext()

    def recount_blocks(
        self, blocks: Iterable[FoundBlock], num_skipped: Callable[[], int] = int
    ) -> None:
        del num_skipped
        self.used = sum(block.num_bytes_on_disk for block in blocks)

    def remove(self, num_bytes: int) -> None:
        self.used -= num_bytes

    def close(self) -> None:
        pass


class _BucketNamespace(StoredNamespace):
    def __init__(self, store: BucketStore, fingerprint: str) -> None:
        self.fingerprint = fingerprint
        self._store = store
        self._folder = f"{store.prefix}{fingerprint}/"

    def read_text(self, name: str) -> str:
        return self._read_text(name).decode(errors="replace")

    def read_head(self, block: FoundBlock) -> bytes:
        name, read = self._store.prefix + block.path, self._store.bucket.read_range
        try:
            head = self._store.get(name, read(name, 0, min(PAGE_BYTES, block.num_bytes)))
            size = header_size_in(bytes(head))
            if size > len(head):
                head = self._store.get(name, read(name, 0, min(size, block.num_bytes)))
        except BackendUnavailableError:
            raise
        except (BlockFileError, OSError):
            return b""
        return bytes(head)

    def open(self, block: FoundBlock) -> AbstractContextManager[OpenBlock]:
        name, aside = self._store.prefix + block.path, f"{self._folder}{QUARANTINE}/"
        return nullcontext(_OpenObject(self._store, name, aside + file_name(block.key)))

    def remove(self, blocks: Sequence[FoundBlock]) -> Iterator[int | OSError]:
        stay = self._store.delete([self._store.prefix + block.path for block in blocks])
        return (why or each.num_bytes_on_disk for why, each in zip(stay, blocks, strict=True))

    def remove_empty(self) -> bool:
        names = list(itertools.islice(self._names(), len(DESCRIPTIONS) + 1))
        if not DESCRIPTIONS.issuperset(names):
            return False
        try:
            texts = {name: self._read_text(name) for name in names}
        except FileNotFoundError:
            return False
        stay = self._store.delete([self._folder + name for name in texts])
        if not any(stay) and next(self._names(), None) is None:
            return True
        for name, text in texts.items():  # a block was stored meanwhile
            path = self._folder + name
            self._store.ask(self._store.bucket.create(path, memoryview(text)), path)
        return False

    def _names(self) -> Iterator[str]:
        listed = self._store.list_objects(self._folder)
        return (each.name.removeprefix(self._folder) for each in listed)

    def _read_text(self, name: str) -> bytes:
        path, bucket = self._folder + name, self._store.bucket
        return bytes(self._store.get(path, bucket.read_begin(path, MAX_TEXT_BYTES))[1])


@dataclass
class _OpenObject(OpenBlock):
    """Object read in one request, or in pieces if it is large; `name_in_quarantine` if known."""

    _store: BucketStore
    _name: str
    _name_in_quarantine: str = ""
    _version: ObjectVersion | None = None
    _begin: memoryview | bytes = b""

    def read_header(self) -> tuple[bytes, int]:
        request = self._store.bucket.read_begin(self._name, PIECE_BYTES)
        version, begin = self._version, self._begin = self._store.get(self._name, request)
        return cut_header(version.size_bytes, lambda num_bytes: bytes(begin[:num_bytes]))

    def read_data(self, offset: int) -> Iterator[memoryview]:
        assert self._version is not None
        yield memoryview(bytearray(self._begin[offset:]))
        size, at = self._version.size_bytes, len(self._begin)
        for start in range(at, size, PIECE_BYTES):
            stop = min(start + PIECE_BYTES, size)
            piece = self._store.bucket.read_range(self._name, start, stop)
            yield memoryview(bytearray(self._store.get(self._name, piece)))
        if at < size and self._ask_version() != self._version:
            raise self._store.gone(self._name)

    def quarantine(self) -> bool:
        try:
            version = self._version or self._ask_version()
        except FileNotFoundError:
            return False
        move = self._store.bucket.move(self._name, version, self._name_in_quarantine)
        return self._store.ask(move, self._name)

    def _ask_version(self) -> ObjectVersion:
        return self._store.get(self._name, self._store.bucket.head(self._name))


def _entry(fingerprint: str, path: str, listed: ListedObject) -> FoundBlock | OtherEntry:
    folder, _, name = path.rpartition("/")
    key = key_in_name(name)
    if key and is_block_folder(folder):
        return FoundBlock(fingerprint, folder, key, listed.size_bytes, listed.stored_at)
    abandoned = bool(owner_of(name)) and (not folder or is_block_folder(folder))
    return OtherEntry(fingerprint, abandoned=abandoned, goes_along=path in DESCRIPTIONS)
