"""Journal: events of blocks, written to files by an observer and read by `kvxfer explain`."""

import atexit
import contextlib
import fcntl
import itertools
import logging
import os
import socket
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from errno import ENOSPC
from pathlib import Path
from typing import IO, Annotated, Any, TypeAlias, get_args
from weakref import WeakValueDictionary

import msgspec

from kvxfer import runtime
from kvxfer.checks import require_positive
from kvxfer.errors import InvalidArgumentError
from kvxfer.storage.backend import Outcome, Status
from kvxfer.storage.keys import Namespace
from kvxfer.storage.observer import (
    ENGINE,
    Added,
    Asked,
    AskGauges,
    Cause,
    Ended,
    Event,
    LookedUp,
    Moved,
    Observer,
    Operation,
    Removed,
)

VARIABLE = "KVXFER_JOURNAL"
"""Environment variable: folder of the journal."""

Time: TypeAlias = Annotated[float, msgspec.Meta(ge=0, lt=1e11)]
"""Seconds since the epoch, within the range of dates."""

SUFFIX, UNFINISHED = ".journal", ".new"
VERSION = 2
LENGTH_BYTES = 4
"""Bytes of the length before each record, big-endian."""
MAX_RECORD_BYTES = 64 << 20
ALIVE_S = 86400.0
"""How long a file must be untouched before its process counts as ended, on file systems without
locks."""

MAX_BYTES = 32 << 20
"""Maximum bytes of a process's files: some hundred thousand blocks stored, evicted and missed."""
NUM_PARTS = 4
MAX_PROCESSES = 32
"""Maximum number of ended processes whose files are kept."""
MAX_WAITING_KEYS = 500_000
"""Maximum keys of events that wait to be written, some 40 MB; an event counts as one more. Further
events are lost, and counted; a larger event is taken only if no other waits."""
MAX_KEYS_PER_RECORD = 10_000
"""Maximum keys in a record of added or removed blocks, so that files are bounded."""
WRITE_S = 0.5
"""Interval between writes; a killed process loses at most this much of its journal."""
CLOSE_TIMEOUT_S = 2.0
TIER_STATUSES = frozenset({Status.DONE, Status.MISSING, Status.CORRUPT})
"""Statuses of an engine's batch that add nothing to those of its tiers."""

logger = logging.getLogger(__name__)


class Began(msgspec.Struct, frozen=True, tag="began"):
    """First record of every file.

    Attributes:
        process: Host and number of the process, and the time at which its journal began.
        part: Number of this file among those of the process, of which the oldest are removed.
    """

    version: int
    at_s: Time
    process: str
    part: int


class Source(msgspec.Struct, frozen=True, tag="source"):
    """Source of later records: an observed backend or engine.

    Attributes:
        number: Number of the source in this process.
        engine: Name of the engine that it is a part of, if that has several processes.
        namespace: Namespace of the blocks, if known.
        tiers: Names of the tiers known so far, fastest first.
    """

    number: int
    engine: str
    namespace: Namespace | None
    tiers: tuple[str, ...]


class Noted(msgspec.Struct, frozen=True, tag="event"):
    """Event of an observer. An outcome or tier that all blocks of a batch share is stored once."""

    at_s: Time
    source: int
    kind: str
    event: Any


class Lost(msgspec.Struct, frozen=True, tag="lost"):
    """Events that the journal could not take; `at_s` is the time of the first."""

    at_s: Time
    num_events: int


Record: TypeAlias = Began | Source | Noted | Lost


@dataclass(frozen=True, slots=True)
class JournalFile:
    """File of a journal."""

    path: Path
    began: Began

    def records(self) -> Iterator[Record]:
        """Read the records after the first, up to one that is incomplete or cannot be decoded.

        The last record is incomplete while it is being written, or if the process was killed.
        """
        return itertools.islice(_read(self.path), 1, None)


def list_files(folder: Path) -> list[JournalFile]:
    """List the files of a journal, by process and in order."""
    try:
        paths = sorted(p for p in folder.iterdir() if p.name.endswith(SUFFIX) and p.is_file())
    except OSError as exc:
        raise _refuse(folder, f"a folder that can be read: {exc.strerror}") from exc
    firsts = [(path, next(_read(path), None)) for path in paths]
    files = [JournalFile(p, f) for p, f in firsts if isinstance(f, Began) and f.version == VERSION]
    if not files:
        raise _refuse(folder, f"a folder with files of a journal (*{SUFFIX})")
    return sorted(files, key=lambda file: (file.began.process, file.began.part))


def remove_ended(folder: Path, *, num_kept: int) -> None:
    """Remove the files of ended processes, except those of the `num_kept` that ended last.

    Files that cannot be removed, such as those of another user, stay.
    """
    last_parts = {path.name.rsplit(".", 2)[0]: path for path in sorted(folder.glob(f"*{SUFFIX}"))}
    ended: list[tuple[float, str]] = []
    for name, path in last_parts.items():
        with contextlib.suppress(OSError):  # another process may remove it just now
            if _has_ended(path):
                ended.append((path.stat().st_mtime, name))
    for _, name in sorted(ended)[: max(0, len(ended) - num_kept)]:
        for path in folder.glob(f"{name}.*{SUFFIX}*"):
            with contextlib.suppress(OSError):
                path.unlink()
    for path in folder.glob(f"*{SUFFIX}{UNFINISHED}"):  # of processes that were killed
        with contextlib.suppress(OSError):
            if runtime.wall_time() - path.stat().st_mtime > ALIVE_S:
                path.unlink()


def _has_ended(path: Path) -> bool:
    """Whether a process's newest file is unlocked or, without locks, untouched for `ALIVE_S`."""
    with path.open("r+b") as file:  # NFS locks only files that are open for writing
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:  # locked, or a file system without locks
            untouched_s = runtime.wall_time() - os.fstat(file.fileno()).st_mtime
            return not isinstance(exc, BlockingIOError) and untouched_s > ALIVE_S
    return True


def encode_record(record: Record) -> bytes:
    """Encode a record in msgpack, with its length in front."""
    data = msgspec.msgpack.encode(record)
    return len(data).to_bytes(LENGTH_BYTES, "big") + data


def append_whole(file: IO[bytes], data: bytes) -> None:
    """Append all of `data` or raise; a partial write is undone, unless others appended after it."""
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
    except (OSError, msgspec.MsgspecError, ValueError, KeyError, RecursionError):
        return  # the file was removed, or the rest cannot be decoded


def _refuse(folder: Path, expected: str) -> InvalidArgumentError:
    return InvalidArgumentError("journal", os.fspath(folder), expected)


_DECODER: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(Record)
_EVENTS = {kind.__name__: kind for kind in get_args(Event)}


class Journal:
    """Journal of a process: a few files of bounded size in a folder that processes share.

    Events are noted in memory, and a thread writes them. Noting never raises or waits for a disk:
    events that come too fast, or do not fit on the disk, are counted, and the count is written
    where they are missing. A file is intact up to the last write, however its process ends. This
    process's files have at most `max_bytes`.
    """

    def __init__(self, folder: str, *, max_bytes: int = MAX_BYTES) -> None:
        self._folder = Path(folder)
        self._max_part_bytes = require_positive("max_bytes", max_bytes) // NUM_PARTS
        self._process = f"{socket.gethostname()}-{os.getpid()}-{int(1e9 * runtime.wall_time()):x}"
        self._lock = runtime.lock()
        self._waiting: list[tuple[float, JournalObserver, Event | None]] = []
        self._num_waiting_keys = self._num_lost = 0
        self._lost_at_s = 0.0
        self._sources: dict[int, Source] = {}
        self._numbers = itertools.count()
        self._observers = WeakValueDictionary[int, JournalObserver]()
        self._reporting: set[tuple[int, str]] = set()  # tiers that report what they have added
        self._file: IO[bytes] | None = None
        self._num_bytes = self._part = 0
        self._has_failed = self._is_closing = self._is_closed = False
        self._wake = runtime.event()
        self._flushing = runtime.lock()
        self._thread = runtime.start_thread(self._run, name="kvxfer-journal")

    def observer(
        self, namespace: Namespace | None = None, *, engine: str = ""
    ) -> "JournalObserver":
        """Create the observer of one backend and the engine on top of it.

        `engine` names an engine that has several processes, all of which pass the same name.
        """
        with self._lock:
            number = next(self._numbers)
            self._sources[number] = Source(number, engine, namespace, ())
            self._observers[number] = observer = JournalObserver(self, number)
        self.append(observer, None)
        return observer

    def append(self, observer: "JournalObserver", event: Event | None) -> None:
        """Note an event, or None if the observer's source has changed."""
        at_s, num_keys = runtime.wall_time(), 1 + (0 if event is None else len(event.keys))
        with self._lock:
            has_room = self._num_waiting_keys + num_keys <= MAX_WAITING_KEYS or not self._waiting
            if (has_room or event is None) and not self._is_closing:
                self._waiting.append((at_s, observer, event))
                self._num_waiting_keys += num_keys
                return
            self._lost_at_s = self._lost_at_s if self._num_lost else at_s
            self._num_lost += 1

    def add_tier(self, observer: "JournalObserver", tier: str) -> None:
        """Note the name of a further tier."""
        with self._lock:
            source = self._sources[observer.number]
            if tier == ENGINE or tier in source.tiers:
                return
            tiers = (*source.tiers, tier)
            self._sources[observer.number] = msgspec.structs.replace(source, tiers=tiers)
        self.append(observer, None)

    def flush(self) -> None:
        """Write everything noted so far; blocks on the disk."""
        with self._flushing:
            if not self._is_closed:
                self._write_noted()

    def close(self) -> None:
        """Write everything noted, waiting at most `CLOSE_TIMEOUT_S`; may be called again."""
        self._is_closing = True
        self._wake.set()
        self._thread.join(CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        while not self._wake.wait(WRITE_S):
            self.flush()
            with self._flushing, contextlib.suppress(OSError):  # a `flush` could replace the file
                file = self._file
                if file and runtime.wall_time() - os.fstat(file.fileno()).st_mtime > ALIVE_S / 4:
                    os.utime(file.fileno())
        self.flush()
        with self._flushing:
            self._is_closed = True
            if self._file is not None:
                self._file.close()

    def _write_noted(self) -> None:
        with self._lock:
            lost, self._num_lost = Lost(self._lost_at_s, self._num_lost), 0
            noted, self._waiting, self._num_waiting_keys = self._waiting, [], 0
        records: list[Record] = []
        for at_s, observer, event in noted:
            if event is None:
                records.append(self._sources[observer.number])
            else:
                kind, parts = type(event).__name__, self._shorten(observer.number, event)
                records += (Noted(at_s, observer.number, kind, part) for part in parts)
        if lost.num_events:
            records.append(lost)
        if records and not self._write(records):
            times = [at_s for at_s, _, event in noted if event is not None]
            earlier = [lost.at_s] if lost.num_events else []
            with self._lock:
                self._waiting[:0] = [each for each in noted if each[2] is None]
                self._lost_at_s = min(earlier + times, default=self._lost_at_s)
                self._num_lost += lost.num_events + len(times)

    def _shorten(self, number: int, event: Event) -> Iterator[Event]:
        """Shorten an event: common outcomes and tiers once, and a bounded number of keys.

        A batch that adds nothing to other events of its source is left out.
        """
        if isinstance(event, Added):
            self._reporting.add((number, event.tier))
        if isinstance(event, (Moved, Ended)) and _are_equal(event.outcomes):
            if self._is_redundant(number, event, event.outcomes[0]):
                return
            event = replace(event, outcomes=event.outcomes[:1])
        elif isinstance(event, LookedUp) and _are_equal(event.tiers):
            event = replace(event, tiers=event.tiers[:1])
        if not isinstance(event, (Added, Removed)) or len(event.keys) <= MAX_KEYS_PER_RECORD:
            yield event
            return
        for start in range(0, len(event.keys), MAX_KEYS_PER_RECORD):
            yield replace(event, keys=event.keys[start : start + MAX_KEYS_PER_RECORD])

    def _is_redundant(self, number: int, event: Moved | Ended, outcome: Outcome) -> bool:
        """Whether other events say that all blocks of a batch have this outcome."""
        if isinstance(event, Ended):
            return outcome.status in TIER_STATUSES
        if event.operation is Operation.STORE:
            return outcome.done and (number, event.tier) in self._reporting
        return outcome.done and event.cause is Cause.WRITE_BACK  # the tier below reports the copy

    def _write(self, records: Sequence[Record]) -> bool:
        """Write records; return whether that was possible."""
        data, num_bytes = list[bytes](), self._num_bytes
        try:
            if self._file is not None and not os.fstat(self._file.fileno()).st_nlink:
                num_bytes = self._max_part_bytes + 1  # the file was removed: begin another
            for index, record in enumerate(records):
                if self._file is None or num_bytes > self._max_part_bytes:
                    if self._file is not None:
                        self._append(self._file, b"".join(data))
                    data.clear()
                    noted = (each.at_s for each in records[index:] if isinstance(each, Noted))
                    self._open_part(next(noted, runtime.wall_time()))
                    num_bytes = self._num_bytes
                data.append(encode_record(record))
                num_bytes += len(data[-1])
            assert self._file is not None
            self._append(self._file, b"".join(data))
        except (OSError, ValueError, TypeError) as exc:  # the disk, or a request id that is no text
            if not self._has_failed:
                logger.warning("cannot write the journal in %s: %s", self._folder, exc)
            self._has_failed = True
            return False
        self._has_failed = False
        return True

    def _append(self, file: IO[bytes], data: bytes) -> None:
        append_whole(file, data)
        self._num_bytes += len(data)

    def _open_part(self, began_s: float) -> None:
        """Begin a file; remove this process's oldest and, the first time, those of ended ones."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self._part == 0:
            remove_ended(self._folder, num_kept=MAX_PROCESSES)
        began = Began(VERSION, began_s, self._process, self._part)
        with self._lock:
            for number in self._sources.keys() - self._observers.keys():
                del self._sources[number]  # its observer is gone, and with it all further events
            first: list[Record] = [began, *self._sources.values()]
        data = b"".join(map(encode_record, first))
        path = self._path(self._part)
        new = path.with_name(path.name + UNFINISHED)  # no `_has_ended` opens it, and keeps its lock
        file = new.open("x+b", buffering=0)
        try:
            with contextlib.suppress(OSError):  # not every file system has locks
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shows that we are alive
            append_whole(file, data)
            new.rename(path)
        except BaseException:  # without its first records, the file would be useless
            file.close()
            new.unlink(missing_ok=True)
            raise
        if self._file is not None:
            self._file.close()
        self._file, self._num_bytes = file, len(data)
        if self._part >= NUM_PARTS:
            self._path(self._part - NUM_PARTS).unlink(missing_ok=True)
        self._part += 1

    def _path(self, part: int) -> Path:
        return self._folder / f"{self._process}.{part:06d}{SUFFIX}"


class JournalObserver(Observer):
    """Observer that writes to a journal."""

    def __init__(self, journal: Journal, number: int) -> None:
        self.number = number
        self._journal = journal

    def note(self, event: Event) -> None:
        """See `Observer.note`."""
        if not isinstance(event, Asked):
            self._journal.append(self, event)

    def watch(self, tier: str, ask: AskGauges) -> None:  # noqa: ARG002 - only its name is of use
        """See `Observer.watch`."""
        self._journal.add_tier(self, tier)


def _are_equal(values: Sequence[object]) -> bool:
    return bool(values) and values.count(values[0]) == len(values)


def journal_observers(
    namespace: Namespace | None = None, *, engine: str = ""
) -> list[JournalObserver]:
    """Create the observer of the journal that `KVXFER_JOURNAL` names; none if it is not set."""
    journal = _journal_of_process()
    return [] if journal is None else [journal.observer(namespace, engine=engine)]


def flush_journal() -> None:
    """Write everything noted so far to this process's journal; waits at most `CLOSE_TIMEOUT_S`."""
    if (journal := _journal_of_process()) is not None:
        flushing = runtime.begin_aside("kvxfer-journal-flush", journal.flush)
        runtime.wait_futures([flushing], CLOSE_TIMEOUT_S)


def journal_folder() -> str:
    """Return the folder that `KVXFER_JOURNAL` names; empty if it is not set."""
    return os.environ.get(VARIABLE, "")


def _journal_of_process() -> Journal | None:
    folder, pid = journal_folder(), os.getpid()
    if folder and (folder, pid) not in _OPENED:
        with _OPENING:
            if (folder, pid) not in _OPENED:
                for (_, opener), journal in _OPENED.items():
                    if opener == pid:  # a forked child does not have its parent's thread
                        journal.close()
                _OPENED.clear()
                _OPENED[folder, pid] = journal = Journal(folder)
                atexit.register(journal.close)
    return _OPENED[folder, pid] if folder else None


_OPENED: dict[tuple[str, int], Journal] = {}
_OPENING = threading.Lock()
