"""Journal files: the records in them, and how a folder of them is read."""

import contextlib
import fcntl
import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from errno import ENOSPC
from pathlib import Path
from typing import IO, Any, TypeAlias, get_args

import msgspec

from kvxfer import runtime
from kvxfer.errors import InvalidArgumentError
from kvxfer.storage.keys import Namespace
from kvxfer.storage.observer import Event

SUFFIX = ".journal"
VERSION = 2
LENGTH_BYTES = 4
"""Bytes of the length in front of each record, big-endian."""
MAX_RECORD_BYTES = 64 << 20
ALIVE_S = 86400.0
"""Time without any sign of its process after which a file counts as left behind, where the file
system has no locks."""


class Began(msgspec.Struct, frozen=True, tag="began"):
    """First record of every file.

    Attributes:
        version: Version of the format.
        at_s: Seconds since the epoch.
        process: Host and number of the process, and the time at which it began.
        part: Number of this file among those of the process; the first are removed in time.
    """

    version: int
    at_s: float
    process: str
    part: int


class Source(msgspec.Struct, frozen=True, tag="source"):
    """Source of further records: a backend or an engine that is observed.

    Attributes:
        number: Number of the source in this process.
        engine: Name of the engine that it is a part of, where that has several processes.
        namespace: Namespace of the blocks, if it is known.
        tiers: Names of the tiers that are known by now, fastest first.
    """

    number: int
    engine: str
    namespace: Namespace | None
    tiers: tuple[str, ...]


class Noted(msgspec.Struct, frozen=True, tag="event"):
    """Event of an observer.

    Attributes:
        at_s: Seconds since the epoch.
        event: The event. If all blocks of a batch have one outcome or tier, that is written once.
    """

    at_s: float
    source: int
    kind: str
    event: Any


class Lost(msgspec.Struct, frozen=True, tag="lost"):
    """Events that the journal could not take.

    Attributes:
        at_s: Time of the first of them.
    """

    at_s: float
    num_events: int


Record: TypeAlias = Began | Source | Noted | Lost


@dataclass(frozen=True, slots=True)
class JournalFile:
    """File of a journal."""

    path: Path
    began: Began

    def records(self) -> Iterator[Record]:
        """Read the records after the first one, as far as they are whole and understood.

        A file that is being written, or whose process was killed, ends within a record; what is
        before it counts.
        """
        return itertools.islice(_read(self.path), 1, None)


def list_files(folder: Path) -> list[JournalFile]:
    """List the files of a journal, those of a process in order.

    Raises:
        InvalidArgumentError: The folder has no file of a journal, or cannot be read.
    """
    try:
        paths = sorted(path for path in folder.iterdir() if path.name.endswith(SUFFIX))
    except OSError as exc:
        raise _refuse(folder, f"a folder that can be read: {exc.strerror}") from exc
    files = []
    for path in paths:
        first = next(_read(path), None)
        if isinstance(first, Began) and first.version == VERSION:
            files.append(JournalFile(path, first))
    if not files:
        raise _refuse(folder, f"a folder with files of a journal (*{SUFFIX}) in it")
    return sorted(files, key=lambda file: (file.began.process, file.began.part))


def mark_alive(file: IO[bytes]) -> None:
    """Lock the newest file of a process: whoever has the lock is alive."""
    with contextlib.suppress(OSError):  # not every file system has locks
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)


def still_alive(file: IO[bytes]) -> None:
    """Tell by the time of the file, too, now and then, for file systems without locks."""
    with contextlib.suppress(OSError, ValueError):  # or it is closed
        if runtime.wall_time() - os.fstat(file.fileno()).st_mtime > ALIVE_S / 4:
            os.utime(file.fileno())


def remove_ended(folder: Path, *, num_kept: int) -> None:
    """Remove the files of the processes that ended first, but for the last `num_kept`.

    What cannot be removed, such as the files of another user, stays.
    """
    last_parts: dict[str, Path] = {}
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        last_parts[path.name.rsplit(".", 2)[0]] = path
    ended: list[tuple[float, str]] = []
    for name, path in last_parts.items():
        with contextlib.suppress(OSError):  # another process may remove it just now
            if _has_ended(path):
                ended.append((path.stat().st_mtime, name))
    for _, name in sorted(ended)[: max(0, len(ended) - num_kept)]:
        for path in folder.glob(f"{name}.*{SUFFIX}"):
            with contextlib.suppress(OSError):
                path.unlink()


def _has_ended(path: Path) -> bool:
    with path.open("r+b") as file:  # NFS locks only what may be written
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:  # a file system without locks
            return runtime.wall_time() - os.fstat(file.fileno()).st_mtime > ALIVE_S
    return True


def encode_record(record: Record) -> bytes:
    """Encode a record in msgpack, with its length in front."""
    data = msgspec.msgpack.encode(record)
    return len(data).to_bytes(LENGTH_BYTES, "big") + data


def append_whole(file: IO[bytes], data: bytes) -> None:
    """Append data; of what is written in part nothing stays, unless others appended behind it.

    Raises:
        OSError: The disk is full, also where it takes a part, or nothing.
    """
    written = file.write(data)
    if written < len(data):
        end = file.tell()
        if os.fstat(file.fileno()).st_size == end:
            file.truncate(end - written)
            file.seek(end - written)
        raise OSError(ENOSPC, os.strerror(ENOSPC))


def _read(path: Path) -> Iterator[Record]:
    try:
        with path.open("rb") as file:
            while len(head := file.read(LENGTH_BYTES)) == LENGTH_BYTES:
                num_bytes = int.from_bytes(head, "big")
                if num_bytes > MAX_RECORD_BYTES or len(data := file.read(num_bytes)) < num_bytes:
                    return
                record = _DECODER.decode(data)
                if isinstance(record, Noted):
                    event = msgspec.convert(record.event, _EVENTS[record.kind])
                    record = msgspec.structs.replace(record, event=event)
                yield record
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, KeyError, InvalidArgumentError):
        return  # removed meanwhile, or no more of it is understood


def _refuse(folder: Path, expected: str) -> InvalidArgumentError:
    return InvalidArgumentError("journal", os.fspath(folder), expected)


_DECODER: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(Record)
_EVENTS = {kind.__name__: kind for kind in get_args(Event)}
