"""Journal: bounded, complete up to the last write, and it counts what it had to drop."""

import errno
import fcntl
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO
from unittest import mock

import msgspec
import pytest

from kvxfer import make_block_key, runtime
from kvxfer.errors import InvalidArgumentError
from kvxfer.storage.observer import Added, Removal, Removed
from kvxfer.telemetry import journal as journal_module
from kvxfer.telemetry.journal import Began, Journal, Lost, Noted, Record, Source, list_files
from kvxfer.testing.conformance.suite import make_keys
from tests.clock import until

KEYS = make_keys(4)
NESTED = msgspec.msgpack.encode(Noted(1.0, 0, "Added", None))[:-1] + b"\x91" * 100_000
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


def test_a_file_that_is_cut_anywhere_has_the_records_before_the_cut(tmp_path: Path) -> None:
    journal = Journal(str(tmp_path))
    observer = journal.observer()
    for key in KEYS:
        observer.note(Added("host", [key]))
    journal.close()
    (file,) = list_files(tmp_path)
    whole, data = records(tmp_path), file.path.read_bytes()
    counts = []
    next_record = len(journal_module.encode_record(file.began))
    for stop in range(next_record, len(data) + 1):
        file.path.write_bytes(data[:stop])
        found = records(tmp_path)
        assert found == whole[: len(found)]
        counts.append(len(found))
    assert (counts[0], counts[-1]) == (0, len(whole))
    assert counts == sorted(counts)


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
    (warning,) = caplog.records  # of the first write that failed
    lost = [(e.num_events, e.at_s < warning.created) for e in found if isinstance(e, Lost)]
    assert lost == [(3, True)]
    assert [each for each in found if isinstance(each, Source)]
    assert "cannot write the journal" in warning.message


def test_a_journal_that_is_removed_while_it_is_written_begins_anew(tmp_path: Path) -> None:
    journal = Journal(str(tmp_path / "journal"))
    observer = journal.observer()
    observer.note(Added("host", KEYS))
    journal.flush()
    shutil.rmtree(tmp_path / "journal")
    observer.note(Added("host", KEYS[:1]))
    journal.close()
    found = records(tmp_path / "journal")
    assert [each.event.keys for each in found if isinstance(each, Noted)] == [KEYS[:1]]
    assert [each for each in found if isinstance(each, Source)]


def test_a_disk_that_hangs_keeps_no_engine_from_closing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()
    written: list[bool] = []
    monkeypatch.setenv(journal_module.VARIABLE, str(tmp_path))
    monkeypatch.setattr(journal_module, "CLOSE_TIMEOUT_S", 0.01)
    with monkeypatch.context() as patched:
        patched.setattr(Journal, "flush", lambda _: written.append(answers.wait(5.0)))
        journal_module.flush_journal()
        assert not written
        answers.set()


def test_a_source_whose_observer_is_gone_is_in_no_further_file(tmp_path: Path) -> None:
    journal = Journal(str(tmp_path), max_bytes=4)
    for engine in ("gone", "kept"):
        observer = journal.observer(engine=engine)
        observer.note(Added("host", KEYS))
        journal.flush()
    observer.note(Added("host", KEYS))
    journal.close()
    told = [each for each in list_files(tmp_path)[-1].records() if isinstance(each, Source)]
    assert {each.engine for each in told} == {"kept"}


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


@pytest.mark.parametrize(
    "data",
    [
        b"\0\0\0\1\xc1",
        len(NESTED).to_bytes(4, "big") + NESTED,
        journal_module.encode_record(Began(journal_module.VERSION, math.inf, "process", 0)),
    ],
    ids=["no msgpack", "nested too deeply", "no time"],
)
def test_a_folder_without_a_journal_is_named(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "other.journal").write_bytes(data)
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(InvalidArgumentError, match="journal is"):
            list_files(folder)


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


def test_a_pipe_among_the_files_of_a_journal_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "0.000000.journal")
    journal = Journal(str(tmp_path))
    journal.observer()
    journal.close()
    assert len(list_files(tmp_path)) == 1


def test_of_unfinished_files_those_of_the_last_day_are_kept(tmp_path: Path) -> None:
    old, new = (tmp_path / f"{name}.000000.journal.new" for name in ("killed", "living"))
    for path in (old, new):
        path.touch()
    os.utime(old, (1, 1))
    journal = Journal(str(tmp_path))
    journal.observer()
    journal.close()
    assert (old.exists(), new.exists()) == (False, True)


def test_a_process_that_stops_while_it_looks_at_new_files_ends_and_holds_up_no_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asks with a lock of its own whether the process of a file has ended."""
    monkeypatch.setattr(journal_module, "MAX_PROCESSES", 0)
    lock, looking = fcntl.flock, list[int]()

    def look_first(file: IO[bytes], how: int) -> None:
        if how & fcntl.LOCK_SH:
            for path in tmp_path.glob("*.journal"):
                looking.append(os.open(path, os.O_RDWR))
                lock(looking[-1], fcntl.LOCK_EX)
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", look_first)
    alive = Journal(str(tmp_path))
    alive.observer().note(Added("host", KEYS))
    try:
        runtime.begin_aside("test", alive.flush).result(timeout=5)
    finally:
        for fd in looking:
            os.close(fd)
    assert any(isinstance(each, Noted) for each in records(tmp_path))
    monkeypatch.setattr(fcntl, "flock", lock)
    other = Journal(str(tmp_path))
    other.observer()
    other.close()
    processes = {file.began.process for file in list_files(tmp_path)}
    alive.close()
    assert processes == {alive._process, other._process}


def test_where_files_have_no_locks_those_of_the_last_day_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse = mock.Mock(side_effect=OSError(errno.ENOLCK, "no locks"))
    monkeypatch.setattr("kvxfer.telemetry.journal.fcntl.flock", refuse)
    monkeypatch.setattr(journal_module, "MAX_PROCESSES", 0)
    alive, ended, last = (Journal(str(tmp_path)) for _ in range(3))
    for journal in (alive, ended):
        journal.observer()
        journal.flush()
    ended.close()
    for file in list_files(tmp_path):
        os.utime(file.path, (1, 1))
    (path,) = (each.path for each in list_files(tmp_path) if each.began.process == alive._process)
    until(lambda: path.stat().st_mtime != 1)
    last.observer()
    last.close()
    alive.close()
    processes = {file.began.process for file in list_files(tmp_path)}
    assert processes == {alive._process, last._process}


def test_a_file_that_another_thread_replaces_does_not_end_the_thread_of_the_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(str(tmp_path), max_bytes=64 << 10)
    observer, now, was_asked = journal.observer(), time.time, threading.Event()

    def fill_the_file() -> None:
        for _ in range(20):
            observer.note(Added("host", [*make_keys(200)]))
            journal.flush()

    def wall_time() -> float:  # the thread of the journal has its file, and asks how old it is
        if sys._getframe(1).f_code.co_name == "_run" and not was_asked.is_set():
            was_asked.set()
            other = threading.Thread(target=fill_the_file)
            other.start()
            other.join(0.5)
        return now()

    observer.note(Added("host", KEYS))
    journal.flush()
    monkeypatch.setattr(journal_module, "WRITE_S", 0.01)
    monkeypatch.setattr(runtime, "wall_time", wall_time)
    assert was_asked.wait(10)
    observer.note(Removed("host", KEYS, Removal.EVICTED))
    journal.close()
    kinds = [record.kind for record in records(tmp_path) if isinstance(record, Noted)]
    assert kinds[-1] == "Removed"
