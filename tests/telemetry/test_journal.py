"""Journal: bounded, whole up to the last write, and what it lacks is counted in it."""

import errno
import fcntl
import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import pytest

from kvxfer.errors import InvalidArgumentError
from kvxfer.storage.backend import DONE, MISSING, PAUSED, Status
from kvxfer.storage.keys import Namespace, make_block_key
from kvxfer.storage.observer import (
    Added,
    Asked,
    Ended,
    Event,
    Late,
    LookedUp,
    Moved,
    NotWrittenBack,
    Operation,
    Removal,
    Removed,
    Requested,
)
from kvxfer.telemetry import journal as journal_module
from kvxfer.telemetry import journal_file
from kvxfer.telemetry.journal import Journal, flush_journal, journal_observers
from kvxfer.telemetry.journal_file import Lost, Noted, Record, Source, list_files
from kvxfer.testing.conformance.suite import make_keys

KEYS = make_keys(4)

CRASHING = """
import os, signal, sys
from kvxfer.storage.observer import Added
from kvxfer.telemetry.journal import flush_journal, journal_observers
(observer,) = journal_observers()
for number in range(int(sys.argv[1])):
    observer.note(Added("host", [b"key %d" % number]))
flush_journal()
observer.note(Added("host", [b"last key"]))
os.kill(os.getpid(), signal.SIGKILL)
"""


def records(folder: Path) -> list[Record]:
    return [record for file in list_files(folder) for record in file.records()]


def test_records_come_back_as_they_were_noted(tmp_path: Path) -> None:
    namespace = Namespace(model="model")
    journal = Journal(str(tmp_path))
    observer = journal.observer(namespace, engine="engine")
    observer.watch("host", dict)
    events: list[Event] = [
        Added("host", KEYS),
        Removed("host", KEYS[:1], Removal.EVICTED),
        LookedUp(KEYS[:3], ["host", "", "host"], 0.1, {"host": 8}),
        Requested("a", KEYS, ["host", "host", "", None], "why"),
        Late("file", Operation.LOOKUP, KEYS),
        NotWrittenBack("file", KEYS),
    ]
    for event in events:
        observer.note(event)
    observer.note(Asked("host", KEYS, [True] * 4, 0.1))  # how long it took explains nothing
    journal.close()
    found = records(tmp_path)
    sources = [each for each in found if isinstance(each, Source)]
    assert sources[-1] == Source(0, "engine", namespace, ("host",))
    assert [each.event for each in found if isinstance(each, Noted)] == events


def test_what_all_blocks_have_is_written_once(tmp_path: Path) -> None:
    journal = Journal(str(tmp_path))
    observer = journal.observer()
    for outcomes in ([DONE] * 4, [DONE, MISSING, DONE, DONE], [PAUSED] * 4):
        observer.note(Moved("host", Operation.STORE, KEYS, outcomes, {Status.DONE: 8}, 0.1))
        observer.note(Ended(Operation.STORE, KEYS, outcomes, 8, 0.1, 0.0))
    observer.note(LookedUp(KEYS, ["host"] * 4, 0.1))
    journal.close()
    noted = [each.event for each in records(tmp_path) if isinstance(each, Noted)]
    assert noted.pop().tiers == ["host"]
    told = [(type(each), each.outcomes) for each in noted]
    some = [DONE, MISSING, DONE, DONE]
    assert told[:3] == [(Moved, [DONE]), (Moved, some), (Ended, some)]  # all done: the tier says so
    assert told[3:] == [(Moved, [PAUSED]), (Ended, [PAUSED])]


def test_a_journal_begins_with_what_it_noted_first(tmp_path: Path) -> None:
    journal = Journal(str(tmp_path), max_bytes=4 << 10)
    observer, before = journal.observer(), time.time()
    for number in range(3):
        observer.note(Added("host", make_keys(50)[number:]))
        time.sleep(0.01)
    journal.close()
    files = list_files(tmp_path)
    assert len(files) > 1, "of one file alone this proves less"
    for file in files:
        noted = [each.at_s for each in file.records() if isinstance(each, Noted)]
        assert before <= file.began.at_s == noted[0]


def test_a_file_that_is_cut_anywhere_has_the_records_before_the_cut(tmp_path: Path) -> None:
    journal = Journal(str(tmp_path))
    observer = journal.observer()
    for key in KEYS:
        observer.note(Added("host", [key]))
    journal.close()
    (file,) = list_files(tmp_path)
    whole, data = records(tmp_path), file.path.read_bytes()
    counts = []
    next_record = len(journal_file.encode_record(file.began))
    for stop in range(next_record, len(data) + 1):
        file.path.write_bytes(data[:stop])
        found = records(tmp_path)
        assert found == whole[: len(found)]
        counts.append(len(found))
    assert (counts[0], counts[-1]) == (0, len(whole))
    assert counts == sorted(counts)


@pytest.mark.timeout(120)  # it imports twice
def test_a_process_that_is_killed_leaves_what_it_has_written(tmp_path: Path) -> None:
    environment = {**os.environ, "KVXFER_JOURNAL": str(tmp_path)}
    processes = [  # which do each other no harm
        subprocess.Popen([sys.executable, "-c", CRASHING, count], env=environment)
        for count in ("3", "5")
    ]
    assert [process.wait() for process in processes] == [-signal.SIGKILL] * 2
    files = list_files(tmp_path)
    assert len({file.began.process for file in files}) == len(files) == 2
    numbers = [sum(isinstance(each, Noted) for each in file.records()) for file in files]
    assert sorted(numbers) == [3, 5]


def test_a_process_keeps_a_few_files_of_bounded_size(tmp_path: Path) -> None:
    journal = Journal(str(tmp_path), max_bytes=40_000)
    observer = journal.observer(engine="engine")
    for number in range(300):
        observer.note(Added("host", [make_block_key(b"%16d" % number, 0)] * 20))
        journal.flush()
    journal.close()
    files = list_files(tmp_path)
    assert len(files) == journal_module.NUM_PARTS
    assert sum(file.path.stat().st_size for file in files) < 45_000
    assert files[0].began.part > 0
    for file in files:  # each is understood without the others
        first = next(file.records())
        assert isinstance(first, Source)
        assert first.engine == "engine"


def test_files_of_processes_that_ended_are_kept_up_to_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "MAX_PROCESSES", 2)
    alive = Journal(str(tmp_path))
    alive.observer()
    alive.flush()
    for _ in range(5):
        journal = Journal(str(tmp_path))
        journal.observer()
        journal.close()
    processes = {file.began.process for file in list_files(tmp_path)}
    alive.close()
    assert alive._process in processes
    assert len(processes) == 4  # the living one, the last one, and two that ended before it


def lock_as_on_nfs(file: IO[bytes], operation: int) -> None:
    """Lock a file as NFS does: an exclusive lock needs a file that may be written."""
    mode = fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE
    if operation & fcntl.LOCK_EX and mode == os.O_RDONLY:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
    flock(file, operation)


def lock_nothing(file: IO[bytes], operation: int) -> None:
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


flock = fcntl.flock


@pytest.mark.parametrize("lock", [lock_as_on_nfs, lock_nothing])
def test_files_of_processes_that_ended_are_removed_on_network_file_systems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lock: Callable[[IO[bytes], int], None]
) -> None:
    """Source: flock(2), "NFS details"."""
    monkeypatch.setattr(fcntl, "flock", lock)
    monkeypatch.setattr(journal_module, "MAX_PROCESSES", 2)
    monkeypatch.setattr(journal_module, "WRITE_S", 0.01)
    (tmp_path / "a-folder.000000.journal").mkdir()
    alive = Journal(str(tmp_path))
    alive.observer()
    alive.flush()
    old = time.time() - 2 * journal_file.ALIVE_S
    for number in range(5):
        journal = Journal(str(tmp_path))
        journal.observer()
        journal.close()
        for file in list_files(tmp_path):
            if file.began.process == journal._process:
                os.utime(file.path, (old + number, old + number))
            elif file.began.process == alive._process:
                os.utime(file.path, (old, old))
                wait_until_touched(file.path, old)
    processes = {file.began.process for file in list_files(tmp_path)}
    alive.close()
    assert alive._process in processes
    assert len(processes) == 4  # the living one, the last one, and two that ended before it


def wait_until_touched(path: Path, old: float) -> None:
    deadline = time.monotonic() + 10
    while path.stat().st_mtime <= old:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_what_waits_is_bounded_by_its_keys_and_records_are_of_bounded_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "WRITE_S", 60.0)
    monkeypatch.setattr(journal_module, "MAX_WAITING_KEYS", 25_000)
    journal = Journal(str(tmp_path))
    observer, keys = journal.observer(), make_keys(30_000)
    journal.flush()
    observer.note(Added("file", keys))  # more than may wait, but alone
    observer.note(Added("host", keys[:1]))
    journal.flush()
    observer.note(Added("host", keys[:20_000]))
    observer.note(Added("host", keys[:10_000]))
    observer.note(Added("host", keys[:4_000]))
    journal.close()
    found = records(tmp_path)
    events = [each.event for each in found if isinstance(each, Noted)]
    noted = [(each.tier, len(each.keys)) for each in events]
    assert noted == [*[("file", 10_000)] * 3, *[("host", 10_000)] * 2, ("host", 4_000)]
    assert [each.num_events for each in found if isinstance(each, Lost)] == [1, 1]


def test_what_comes_too_fast_is_counted_where_it_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "MAX_WAITING_KEYS", 10 * (1 + len(KEYS)))
    monkeypatch.setattr(journal_module, "WRITE_S", 60.0)
    journal = Journal(str(tmp_path))
    observer = journal.observer()
    for _ in range(30):
        observer.note(Added("host", KEYS))
    journal.flush()
    observer.note(Added("host", KEYS[:1]))
    journal.close()
    kinds = [type(each) for each in records(tmp_path)]
    assert kinds.count(Noted) == 10
    lost = kinds.index(Lost)
    assert kinds[:lost].count(Noted) == 9
    assert kinds[lost + 1 :] == [Source, Noted]  # sources are told again: they may be lost, too
    assert [each.num_events for each in records(tmp_path) if isinstance(each, Lost)] == [21]


def test_a_disk_that_is_full_for_a_while_costs_events_that_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "journal"
    blocked.write_text("no folder")
    journal = Journal(str(blocked))
    observer = journal.observer()
    for _ in range(3):
        observer.note(Added("host", KEYS))
        journal.flush()
    blocked.unlink()
    observer.note(Added("host", KEYS[:1]))
    journal.close()
    found = records(blocked)
    assert [each.event.keys for each in found if isinstance(each, Noted)] == [KEYS[:1]]
    assert sum(each.num_events for each in found if isinstance(each, Lost)) >= 3
    assert [each for each in found if isinstance(each, Source)]
    assert ["cannot be written" in each.message for each in caplog.records] == [True]


def test_a_part_whose_beginning_cannot_be_written_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_refused = 0

    class Full(io.FileIO):
        def write(self, data: Any) -> int:
            nonlocal num_refused
            if num_refused < 2:
                num_refused += 1
                return super().write(data[: len(data) // num_refused - 1])
            return super().write(data)

    journal = Journal(str(tmp_path), max_bytes=4 * 200)
    observer = journal.observer()
    with monkeypatch.context() as filling:
        filling.setattr(Path, "open", lambda path, mode, buffering: Full(path, mode))
        for _ in range(2):
            observer.note(Added("host", KEYS))
            journal.flush()
        assert not list(tmp_path.iterdir())
        for number in range(20):
            observer.note(Added("host", make_keys(1, first=number)))
            journal.flush()
    journal.close()
    found = records(tmp_path)
    assert sum(isinstance(each, Noted) for each in found) > 1
    assert list(list_files(tmp_path)[-1].records())


def test_what_waits_together_is_written_to_as_many_files_as_it_needs(tmp_path: Path) -> None:
    journal = Journal(str(tmp_path), max_bytes=64 << 10)
    observer = journal.observer()
    for number in range(300):
        observer.note(Added("host", make_keys(40, first=40 * number)))
    journal.close()
    sizes = [path.stat().st_size for path in tmp_path.iterdir()]
    assert 32 << 10 < sum(sizes) < 96 << 10
    assert isinstance(records(tmp_path)[-1], Noted)


def test_an_event_that_cannot_be_written_is_lost_and_the_next_ones_are_not(tmp_path: Path) -> None:
    journal = Journal(str(tmp_path))
    observer = journal.observer()
    journal.flush()
    observer.note(Added("tier \ud800", KEYS))
    journal.flush()
    observer.note(Added("host", KEYS))
    journal.close()
    found = records(tmp_path)
    assert [each.num_events for each in found if isinstance(each, Lost)] == [1]
    assert [each.event.keys for each in found if isinstance(each, Noted)] == [KEYS]


def test_without_the_variable_nothing_is_observed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVXFER_JOURNAL", raising=False)
    assert journal_observers() == []
    flush_journal()


def test_a_folder_without_a_journal_is_named(tmp_path: Path) -> None:
    (tmp_path / "other.journal").write_bytes(b"\0\0\0\1\xc1")
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(InvalidArgumentError, match="journal is"):
            list_files(folder)
