"""`kvxfer explain`: requests and keys in lines that fit, JSON, and errors in one line."""

import json
from pathlib import Path

import pytest

from kvxfer.cli import main
from kvxfer.storage.keys import Namespace, make_block_key
from kvxfer.storage.observer import (
    Added,
    Late,
    LookedUp,
    NotWrittenBack,
    Operation,
    Removal,
    Removed,
    Requested,
)
from kvxfer.telemetry.journal import Journal, JournalObserver
from kvxfer.testing.conformance.suite import make_keys

KEYS = make_keys(48)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "journal"


def write(folder: Path, note: object) -> None:
    """Write a journal: `note` gets its observer."""
    journal = Journal(str(folder))
    observer = journal.observer(Namespace(model="model"))
    observer.watch("host", dict)
    observer.watch("file", dict)
    assert callable(note)
    note(observer)
    journal.close()


def note_request(observer: JournalObserver) -> None:
    observer.note(Added("host", KEYS))
    observer.note(Removed("host", KEYS[32:44], Removal.EVICTED))
    observer.note(NotWrittenBack("file", KEYS[32:44]))
    tiers: list[str | None] = [*[None] * 4, *["host"] * 28, *[""] * 13, *[None] * 3]
    observer.note(Late("file", Operation.LOOKUP, KEYS[32:45]))
    observer.note(Requested("cmpl-17", KEYS, tiers))
    for number in range(18, 22):
        observer.note(Requested(f"cmpl-{number}", KEYS[:2], ["host", "host"]))


def run(
    capsys: pytest.CaptureFixture[str], folder: Path, *arguments: str, status: int = 0
) -> list[str]:
    capsys.readouterr()
    assert main(["explain", "--journal", str(folder), *arguments]) == status
    printed = capsys.readouterr()
    return (printed.err if status else printed.out).splitlines()


def test_a_request_is_a_summary_and_a_line_for_each_run_of_equal_answers(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(folder, note_request)
    lines = run(capsys, folder, "cmpl-17")
    assert max(map(len, lines)) <= 80
    text = " ".join(line.strip() for line in lines)
    assert lines[0].startswith("request cmpl-17, scheduled ")
    assert "48 blocks, 28 found (host 28), 13 missed (back-pressure 12, deadline 1)" in text
    heads = [line[:13].rstrip() for line in lines if line.startswith("block")]
    assert heads == ["blocks 0-3", "blocks 4-31", "blocks 32-43", "block 44", "blocks 45-47"]
    assert "evicted from host by capacity at " in text
    assert "not in file: back-pressure (not written back) at " in text
    assert "file missed the deadline of a lookup at " in text


def test_json_has_the_keys_and_a_part_of_a_name_is_enough(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(folder, note_request)
    (report,) = json.loads("\n".join(run(capsys, folder, "17", "--json")))
    assert report["request"] == "cmpl-17"
    assert [key for each in report["runs"] for key in each["keys"]] == [k.hex() for k in KEYS]
    assert [each["answer"] for each in report["runs"]] == [
        *("not looked up", "found", "back-pressure", "deadline", "not looked up")
    ]


def test_groups_are_counted_each_from_its_first_block(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = [make_block_key(b"%d" % number, number % 2) for number in range(6)]
    write(folder, lambda each: each.note(Requested("a", keys, ["host"] * 6)))
    lines = run(capsys, folder, "a")
    assert [line.split("  ")[0] for line in lines[1:]] == [
        *("group 0 blocks 0-2", "group 1 blocks 0-2")
    ]


def test_what_the_journal_lost_and_when_it_begins_are_said(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvxfer.telemetry.journal.MAX_WAITING_KEYS", 3)
    monkeypatch.setattr("kvxfer.telemetry.journal.WRITE_S", 60.0)

    def note(observer: JournalObserver) -> None:
        for _ in range(3):
            observer.note(LookedUp(KEYS[:1], [""], 0.1))

    write(folder, note)
    notes = [line for line in run(capsys, folder, KEYS[0].hex()) if line.startswith("note")]
    assert "the journal begins at" in notes[0]
    assert "the journal lost 3 events at" in notes[1]


def test_names_cannot_give_orders_to_the_terminal(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(folder, lambda each: each.note(Requested("\x1b[2Ja", KEYS[:1], [""], "\x1b[2Jb")))
    text = "\n".join(run(capsys, folder, "a"))
    assert "\x1b" not in text
    assert "refused: \\x1b[2Jb" in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nobody"], "argument is 'nobody'; expected a key"),
        (["cmpl"], "argument is 'cmpl'; expected a part of the names of 4 requests at most"),
        ([KEYS[0].hex(), "xyz"], "arguments[1] is 'xyz'; expected a key"),
        (["00"], "argument is '00'; expected a key"),
        (["file:///nowhere"], "argument is 'file:///nowhere'; expected a key"),
    ],
)
def test_bad_input_is_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    write(folder, note_request)
    (line,) = run(capsys, folder, *arguments, status=2)
    assert line.startswith("kvxfer explain: ")
    assert said in line


def test_a_folder_without_a_journal_or_no_folder_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KVXFER_JOURNAL", raising=False)
    for folder in (tmp_path, tmp_path / "none", Path()):
        (line,) = run(capsys, folder, "a", status=2)
        assert line.startswith(f"kvxfer explain: journal is '{folder}'; expected a folder")
    assert main(["explain", "a"]) == 2
    assert "expected the folder of the journal, or KVXFER_JOURNAL=" in capsys.readouterr().err


def test_a_block_that_was_evicted_while_it_was_read_is_evicted_later(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def note(observer: JournalObserver) -> None:
        observer.note(Added("file", KEYS[:1]))
        observer.note(Removed("file", KEYS[:1], Removal.EVICTED))
        observer.note(LookedUp(KEYS[:1], ["file"], 0.1))  # begun before
        observer.note(LookedUp(KEYS[:1], [""], 0.1))

    write(folder, note)
    said = " ".join(run(capsys, folder, KEYS[0].hex()))
    assert "evicted from file by capacity" in said
    assert "no cause" not in said
