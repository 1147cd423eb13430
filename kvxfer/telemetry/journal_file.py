"""Journal files: the records in them, and how a folder of them is read."""

import contextlib
import fcntl
import os
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import IO, TypeAlias

import msgspec

from kvxfer import runtime
from kvxfer.errors import InvalidArgumentError
from kvxfer.storage.keys import Namespace

SUFFIX = ".journal"
VERSION = 1
LENGTH_BYTES = 4
"""Bytes of the length in front of each record, big-endian."""
MAX_RECORD_BYTES = 64 << 20
ALIVE_S = 86400.0
"""Time without any sign of its process after which a file counts as left behind, where the file
system has no locks."""


class Kind(StrEnum):
    """Kind of what happened to blocks."""

    STORED = "stored"
    NOT_STORED = "not_stored"
    LOADED = "loaded"
    NOT_LOADED = "not_loaded"
    FOUND = "found"
    MISSED = "missed"
    REMOVED = "removed"
    LATE = "late"
    SKIPPED = "skipped"
    NOT_WRITTEN_BACK = "not_written_back"
    TOO_SLOW = "too_slow"


class _Record(msgspec.Struct, frozen=True, array_like=True):
    """Record of a journal."""


class Began(_Record, frozen=True, tag="began"):
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


class Source(_Record, frozen=True, tag="source"):
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


class Noted(_Record, frozen=True, tag="blocks"):
    """Thing that happened to blocks.

    Attributes:
        at_s: Seconds since the epoch.
        source: Number of the source.
        kind: What happened.
        tier: Name of the tier.
        what: Status, operation, or reason of a removal.
        reason: Reason in words.
        namespace: Fingerprint of their namespace, where it is another one than the source's.
        keys: Keys of the blocks; a number for those of an earlier record, see `recent_keys`.
    """

    at_s: float
    source: int
    kind: Kind
    tier: str
    what: str
    reason: str
    namespace: str
    keys: Sequence[bytes] | int


class Request(_Record, frozen=True, tag="request"):
    """Request of an engine.

    Attributes:
        at_s, source: As of `Noted`.
        request_id: The engine's name of it.
        keys: Keys of its blocks, in order.
        runs: Tier and number of blocks of each run of equal tiers; the tier is empty for a miss,
            None for blocks that were not looked up.
        reason: Why blocks were refused, if one reason holds for all.
    """

    at_s: float
    source: int
    request_id: str
    keys: Sequence[bytes]
    runs: Sequence[tuple[str | None, int]]
    reason: str


class Lost(_Record, frozen=True, tag="lost"):
    """Events that the journal could not take.

    Attributes:
        at_s: Time of the first of them.
        num_events: How many.
    """

    at_s: float
    num_events: int


Record: TypeAlias = Began | Source | Noted | Request | Lost


@dataclass(frozen=True, slots=True)
class JournalFile:
    """File of a journal.

    Attributes:
        path: Where it is.
        began: Its first record.
        next_record: Offset of the record after that.
    """

    path: Path
    began: Began
    next_record: int

    def records(self) -> Iterator[Record]:
        """Read the records after the first one, as far as they are whole and understood.

        Records of `Noted` have their keys. A file that is being written, or whose process was
        killed, ends within a record; what is before it counts.
        """
        recent = recent_keys()
        for record in _read(self.path, self.next_record):
            if not isinstance(record, Noted):
                yield record
            elif not isinstance(record.keys, int):
                recent.appendleft(record.keys)
                yield record
            elif 0 <= record.keys < len(recent):
                yield msgspec.structs.replace(record, keys=recent[record.keys])


def recent_keys() -> deque[Sequence[bytes] | int]:
    """Make the list of the keys that were written last in a file, the latest first.

    Keys that are in it are not written again: the blocks of one batch are told several times.
    """
    return deque(maxlen=4)


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
        first = next(_read(path, 0), None)
        if isinstance(first, Began) and first.version == VERSION:
            files.append(JournalFile(path, first, LENGTH_BYTES + len(encode_record(first))))
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
    """Remove the files of the processes that ended first.

    What cannot be removed, such as the files of another user, stays.

    Args:
        folder: Folder of the journal.
        num_kept: Processes that have ended and whose files are kept.
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
    """Encode a record, without its length."""
    return _ENCODER.encode(record)


def _read(path: Path, offset: int) -> Iterator[Record]:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            while len(head := file.read(LENGTH_BYTES)) == LENGTH_BYTES:
                num_bytes = int.from_bytes(head, "big")
                if num_bytes > MAX_RECORD_BYTES or len(data := file.read(num_bytes)) < num_bytes:
                    return
                yield _DECODER.decode(data)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, InvalidArgumentError):
        return  # removed meanwhile, or no more of it is understood


def _refuse(folder: Path, expected: str) -> InvalidArgumentError:
    return InvalidArgumentError("journal", os.fspath(folder), expected)


_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(Record)
