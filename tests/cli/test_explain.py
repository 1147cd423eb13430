"""`kvxfer explain`: requests and keys in lines that fit, JSON, and errors in one line."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from kvxfer.storage.backend import NO_ROOM_REASON, PAUSED, Outcome, Status
from kvxfer.storage.keys import Namespace
from kvxfer.storage.observer import (
    Added,
    Ended,
    Event,
    Late,
    LookedUp,
    Moved,
    NotLoaded,
    NotWrittenBack,
    Operation,
    Removal,
    Removed,
    Requested,
)
from kvxfer.telemetry.journal import Journal
from kvxfer.testing.conformance.suite import make_keys
from tests.cli.conftest import Run

KEYS = make_keys(48)
Note = Callable[..., None]


@pytest.fixture
def note(tmp_path: Path) -> Note:
    def note(*events: Event) -> None:
        journal = Journal(str(tmp_path))
        observer = journal.observer(Namespace(model="model"))
        observer.watch("host", dict)
        observer.watch("file", dict)
        for event in events:
            observer.note(event)
        journal.close()

    return note


REQUESTS: list[Event] = [
    Added("host", KEYS),
    Removed("host", KEYS[32:44], Removal.EVICTED),
    NotWrittenBack("file", KEYS[32:44]),
    Late("file", Operation.LOOKUP, KEYS[32:45]),
    Requested("cmpl-17", KEYS, [*[None] * 4, *["host"] * 28, *[""] * 13, *[None] * 3]),
    *(Requested(f"cmpl-{number}", KEYS[:2], ["host", "host"]) for number in range(18, 22)),
]


def test_a_request_is_a_summary_and_a_line_for_each_run_of_equal_answers(
    tmp_path: Path, note: Note, run: Run
) -> None:
    note(*REQUESTS)
    status, printed, _ = run("explain", "--journal", tmp_path, "cmpl-17")
    lines = printed.splitlines()
    assert (status, max(map(len, lines)) <= 80) == (0, True)
    text = " ".join(line.strip() for line in lines)
    assert lines[0].startswith("request cmpl-17, scheduled ")
    assert "48 blocks, 28 found (host 28), 13 missed (back-pressure 12, deadline 1)" in text
    heads = [line[:13].rstrip() for line in lines if line.startswith("block")]
    assert heads == ["blocks 0-3", "blocks 4-31", "blocks 32-43", "block 44", "blocks 45-47"]
    assert "evicted from host by capacity at " in text
    assert "not in file: back-pressure (not written back) at " in text
    assert "file missed the deadline of a lookup at " in text
    # JSON has the keys; a part of the name is enough.
    (report,) = json.loads(run("explain", "--journal", tmp_path, "17", "--json")[1])
    assert report["request"] == "cmpl-17"
    assert [key for each in report["runs"] for key in each["keys"]] == [k.hex() for k in KEYS]
    assert [each["answer"] for each in report["runs"]] == [
        *("not looked up", "found", "back-pressure", "deadline", "not looked up")
    ]


KEY = KEYS[:1]
HERE = Added("file", KEY)
LOAD, STORE = Operation.LOAD, Operation.STORE


def moved(operation: Operation, status: Status, reason: str = "") -> Moved:
    return Moved("file", operation, KEY, [Outcome(status, reason=reason)], {}, 0.1)


def gone(reason: Removal) -> Removed:
    return Removed("file", KEY, reason)


FULL = moved(STORE, Status.FAILED, f"{NO_ROOM_REASON} at all")
IN_QUEUE = Ended(STORE, KEY, [Outcome(Status.TIMED_OUT)], 0, 0.1, 0.1)
ANSWERS: list[tuple[list[Event], str, str]] = [
    ([HERE], "unknown", "stored in file but not found there: no cause was recorded"),
    ([HERE, gone(Removal.DELETED)], "removed", "deleted from file at "),
    ([HERE, gone(Removal.CLEARED)], "removed", "cleared from file with all its blocks at "),
    ([HERE, gone(Removal.VANISHED)], "removed", "removed from file by another process at "),
    # A lookup that began before still finds what was evicted.
    ([HERE, gone(Removal.EVICTED), LookedUp(KEY, ["file"], 0.1)], "evicted", "by capacity at "),
    ([HERE, moved(LOAD, Status.MISSING)], "removed", "gone from file before it was loaded"),
    ([HERE, moved(LOAD, Status.CORRUPT)], "corrupt", "corrupt in file at "),
    ([HERE, moved(LOAD, Status.TIMED_OUT)], "deadline", "file missed the deadline of a load"),
    ([HERE, moved(LOAD, Status.FAILED, "x")], "failed", "from file: the load failed: x"),
    ([moved(STORE, Status.FAILED, "x")], "failed", "not in file: the store failed: x"),
    ([moved(STORE, Status.TIMED_OUT)], "deadline", "file missed the deadline of a store"),
    ([moved(STORE, Status.FAILED, PAUSED.reason)], "paused tier", f"not in file: {PAUSED.reason}"),
    ([FULL], "back-pressure", "not in file: back-pressure (no room at all)"),
    ([IN_QUEUE], "back-pressure", "(no room among the bytes in flight in time)"),
    ([HERE, NotLoaded("file", KEY)], "slower than computing", "longer than computing it"),
]


@pytest.mark.parametrize(("events", "answer", "text"), ANSWERS)
def test_a_key_that_was_missed_has_an_answer(
    tmp_path: Path, note: Note, run: Run, events: list[Event], answer: str, text: str
) -> None:
    note(*events, LookedUp(KEY, [""], 0.1))
    status, printed, _ = run("explain", "--journal", tmp_path, KEYS[0].hex(), "--json")
    assert status == 0
    (report,) = json.loads(printed)
    assert report["missed"] == {answer: 1}
    assert text in report["runs"][0]["text"]


@pytest.mark.parametrize("then", [[], [Requested("cmpl-1", KEY, [""])]])
def test_a_lookup_of_another_engine_or_of_the_same_request_hides_no_cause(
    tmp_path: Path, run: Run, then: list[Event]
) -> None:
    journal = Journal(str(tmp_path))
    ours, theirs = (journal.observer(Namespace(model="model"), engine=name) for name in "ab")
    ours.watch("file", dict)
    missed = LookedUp(KEY, [""], 0.1)
    ours.note(Late("file", Operation.LOOKUP, KEY))
    theirs.note(missed)
    for event in (missed, *then):
        ours.note(event)
    journal.close()
    printed = run("explain", "--journal", tmp_path, KEYS[0].hex(), "--json")[1]
    assert json.loads(printed)[0]["missed"] == {"deadline": 1}


def test_what_the_journal_lost_and_when_it_begins_are_said(
    tmp_path: Path, note: Note, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvxfer.telemetry.journal.MAX_WAITING_KEYS", 3)
    monkeypatch.setattr("kvxfer.telemetry.journal.WRITE_S", 60.0)
    note(*[LookedUp(KEY, [""], 0.1)] * 3)
    lines = run("explain", "--journal", tmp_path, KEYS[0].hex())[1].splitlines()
    notes = [line for line in lines if line.startswith("note")]
    assert "the journal begins at" in notes[0]
    assert "the journal lost 3 events at" in notes[1]


def test_names_cannot_give_orders_to_the_terminal(tmp_path: Path, note: Note, run: Run) -> None:
    note(Requested("\x1b[2Ja", KEY, [""], "\x1b[2Jb"))
    text = run("explain", "--journal", tmp_path, "a")[1]
    assert "\x1b" not in text
    assert "refused: \\x1b[2Jb" in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["cmpl"], "argument is 'cmpl'; expected a part of the names of at most 4 requests"),
        ([KEYS[0].hex(), "xyz"], "arguments[1] is 'xyz'; expected a key"),
        (["a", "--journal", "/nowhere"], "journal is '/nowhere'; expected a folder"),
    ],
)
def test_bad_input_is_one_line(
    tmp_path: Path, note: Note, run: Run, arguments: list[str], said: str
) -> None:
    note(*REQUESTS)
    status, printed, error = run("explain", "--journal", tmp_path, *arguments)
    assert (status, printed, error.count("\n")) == (2, "", 1)
    assert error.startswith(f"kvxfer explain: {said}")
