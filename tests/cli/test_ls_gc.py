"""`kvxfer ls` and `gc`: what a store holds, and what is removed from it."""

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from kvxfer.backends.file.folders import Ledger, NamespaceFolder
from kvxfer.cli import main
from kvxfer.pages.names import LEDGER_NAME
from kvxfer.storage.keys import Namespace
from tests.backends.file_store import fail_to
from tests.cli.conftest import Run
from tests.cli.peers import COMMAND
from tests.cli.stores import FILE_BYTES, NUM_BLOCKS, Store, break_seal

DAY_S = 86400


def age(store: Store, namespace: Namespace) -> None:
    """Backdate the last use of block i by i days."""
    for number, key in enumerate(store.keys):
        if (path := store.path(namespace, key)).exists():
            os.utime(path, (time.time() - number * DAY_S - 60,) * 2)


def put_in_quarantine(store: Store, namespace: Namespace, run: Run) -> None:
    """Damage the last block, and let it be found."""
    os.truncate(store.path(namespace, store.keys[-1]), 9000)
    run("fsck", store.root, "--repair")


def left(store: Store, namespace: Namespace) -> int:
    there = [store.path(namespace, key).exists() for key in store.keys]
    assert there == sorted(there, reverse=True)
    return sum(there)


def test_a_list_has_a_line_per_namespace_and_a_total(store: Store, run: Run) -> None:
    ours, other = store.fill(), store.fill(model="another", num_blocks=2)
    age(store, other)
    put_in_quarantine(store, ours, run)
    misplaced = store.root / other.fingerprint / "ff" / store.path(other, store.keys[0]).name
    misplaced.parent.mkdir(exist_ok=True)
    misplaced.hardlink_to(store.path(other, store.keys[0]))  # no lookup finds it there
    status, printed, _ = run("ls", store.root)
    assert status == 0
    header, *lines, total = printed.splitlines()
    assert " ".join(header.split()) == (
        "NAMESPACE MODEL DTYPE INTEGRITY BLOCKS SIZE OLDEST USE NEWEST USE BAD"
    )
    assert [line.split()[0] for line in lines] == sorted([ours.fingerprint, other.fingerprint])
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in lines}
    assert rows[other.fingerprint] == "another fast 2 24.0 KiB 1 d ago 1 min ago 0"
    assert rows[ours.fingerprint].startswith("example/model fast 7 84.0 KiB ")
    assert rows[ours.fingerprint].endswith(" 1")
    assert total.split()[:5] == ["total:", "2", "9", "108.0", "KiB"]


@pytest.mark.parametrize(
    ("model", "columns"), [("千问", 4), ("\uff41", 2), ("e\u0301", 1), ("กำลัง", 4), ("🦙", 2)]
)
def test_a_name_of_wide_or_combined_characters_shifts_no_column(
    store: Store, run: Run, model: str, columns: int
) -> None:
    store.fill(model=model)
    header, line, _ = run("ls", store.root)[1].splitlines()
    assert line.index(" fast ") + columns - len(model) == header.index(" INTEGRITY ")


@pytest.mark.parametrize("form", [[], ["--json"], ["--keys"]])
def test_a_list_says_how_much_it_could_not_read(
    store: Store, run: Run, monkeypatch: pytest.MonkeyPatch, form: list[str]
) -> None:
    path = store.path(store.fill(), store.keys[3]).parent
    fail_to(monkeypatch, "open", path.name, PermissionError(errno.EACCES, "denied", path.name))
    status, _, said = run("ls", store.root, *form)
    told = "kvxfer ls: files and folders that cannot be read: 1; see kvxfer fsck\n"
    assert (status, said) == (0, told)


def test_json_is_a_list_of_objects(store: Store, run: Run) -> None:
    namespace = store.fill(num_tensors=2)
    began = time.time()
    (usage,) = json.loads(run("ls", store.root, "--json")[1])
    tensors = usage.pop("namespace")["groups"][0]["tensors"]
    assert tensors[0] == {"name": "layers.0.k", "dtype": "U8", "shape": [2548]}
    newest, oldest = usage.pop("newest_use"), usage.pop("oldest_use")
    assert 0 <= began - newest <= began - oldest < 60
    assert usage == {
        "fingerprint": namespace.fingerprint,
        "integrity": ["fast"],
        "num_blocks": NUM_BLOCKS,
        "num_bytes": store.counted_bytes,
        "num_quarantined": 0,
        "quarantined_bytes": 0,
    }
    assert store.counted_bytes == NUM_BLOCKS * FILE_BYTES


def test_control_sequences_do_not_reach_the_terminal(store: Store, run: Run) -> None:
    namespace = store.fill(model="\x1b[2Jmodel\nother", num_blocks=1)
    assert "  \\x1b[2Jmodel\\nother  " in run("ls", store.root)[1]
    path = store.path(namespace, store.keys[0])
    said = namespace.fingerprint.encode()
    evil = rb"\u001b[2J".ljust(len(said), b"0")
    path.write_bytes(path.read_bytes().replace(said, evil, 1))
    for command in (["fsck", store.root], ["inspect", path]):
        assert "\x1b" not in run(*command)[1]


@pytest.mark.parametrize("names", [[], ["notes.txt"], ["d41d8cd98f00b204e9800998ecf8427e/a.txt"]])
def test_a_folder_that_holds_no_store_is_misuse_and_stays_as_it_is(
    tmp_path: Path, run: Run, names: list[str]
) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("mine")
    before = {*tmp_path.rglob("*")}
    bounds = ["--max-age", "0s", "--capacity", "1B"]
    for name, *more in (
        *(["ls"], ["ls", "--json"], ["fsck", "--repair"]),
        *(["gc", *bounds], ["gc", *bounds, "--dry-run"]),
    ):
        status, printed, said = run(name, tmp_path, *more)
        assert (status, printed) == (2, "")
        assert said.startswith(f"kvxfer {name}: path is '{tmp_path}'; expected the root of a store")
        assert {*tmp_path.rglob("*")} == before


@pytest.mark.parametrize("command", ["ls", "fsck", "gc", "inspect", "doctor"])
def test_an_empty_path_is_not_the_folder_that_the_command_runs_in(
    store: Store, run: Run, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    namespace = store.fill()
    monkeypatch.chdir(store.root)
    status, printed, said = run(command, "", *[store.root][: command == "doctor"])
    assert (status, printed) == (2, "")
    name = "argument" if command == "doctor" else "path"
    assert said.startswith(f"kvxfer {command}: {name} is ''; expected a f")
    block = store.path(namespace, store.keys[0])
    monkeypatch.chdir(block.parent)
    assert run("inspect", f"/{block.name}")[0] == 2  # nor is it one at the root


@pytest.mark.parametrize("command", ["ls", "fsck", "gc", "inspect"])
@pytest.mark.parametrize("url", ["file:///store", "host://", "file:///store?token=abc"])
def test_a_url_that_names_no_bucket_is_refused_whatever_its_parameters(
    run: Run, command: str, url: str
) -> None:
    place = "file" if command == "inspect" else "folder"
    told = f"path is '{url.replace('abc', '...')}'; expected a {place}, or s3://, gs:// or az://"
    assert run(command, url) == (2, "", f"kvxfer {command}: {told}\n")


@pytest.mark.parametrize("option", ["--capacity", "--max-age"])
def test_a_bound_that_is_empty_is_named(store: Store, run: Run, option: str) -> None:
    store.fill()
    status, printed, said = run("gc", store.root, option, "")
    assert (status, printed, said.count("\n")) == (2, "", 1)
    assert said.startswith(f"kvxfer gc: {option.removeprefix('--')} is ''; expected ")


def everything(store: Store) -> dict[Path, bytes | None]:
    found = store.root.rglob("*")
    return {path: path.read_bytes() if path.is_file() else None for path in found}


@pytest.mark.parametrize(
    ("bounds", "removed", "num_left"),
    [
        ([], "", (7, 2)),
        (["--max-age", "3d"], "4 unused for too long", (3, 2)),
        (["--capacity", 4 * FILE_BYTES + 1], "5 beyond the capacity", (2, 2)),
        (["--max-age", "5d", "--capacity", 3 * FILE_BYTES], "2 unused for too long, 4 ", (1, 2)),
        (["--max-age", "0s"], "9 unused for too long", (0, 0)),
    ],
)
def test_a_dry_run_removes_nothing_and_says_what_goes(
    store: Store, run: Run, bounds: list[Any], removed: str, num_left: tuple[int, int]
) -> None:
    first, second = store.fill(), store.fill(model="another", num_blocks=2)
    emptied = store.fill(model="emptied", num_blocks=1)
    age(store, first)
    store.path(emptied, store.keys[0]).unlink()
    foreign = store.root / second.fingerprint / "notes.txt"
    foreign.write_text("mine")
    put_in_quarantine(store, first, run)
    folder = store.path(first, store.keys[0]).parent
    with contextlib.closing(Ledger(store.root)) as ledger:
        dead, living = (folder / f"{owner}-0.safetensors.tmp" for owner in ("01" * 8, ledger.owner))
        for path in (dead, living, store.root / f"{'01' * 8}.claim"):
            path.write_bytes(b"of a process that died, or of one that lives")
        before = everything(store)
        status, would, _ = run("gc", store.root, *bounds, "--dry-run")
        assert status == 0
        assert everything(store) == before
        status, printed, _ = run("gc", store.root, *bounds)
    assert status == 0
    for words in ("would be removed:", "removed:"), ("would be freed", "freed"):
        would = would.replace(*words)
    assert printed == would.replace("would be left", "left")
    assert printed.startswith("removed: 1 temporary, 1 in quarantine, ")
    assert removed in printed
    assert (left(store, first), left(store, second)) == num_left
    assert (living.exists(), dead.exists(), foreign.exists()) == (True, False, True)
    assert not store.quarantined()
    assert not (store.root / emptied.fingerprint).exists()
    assert store.counted_bytes == sum(num_left) * FILE_BYTES


def test_a_file_that_cannot_be_removed_is_told_when_all_others_are(
    store: Store, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = store.fill()
    stays = store.path(ours, store.keys[0])
    error = PermissionError(errno.EPERM, os.strerror(errno.EPERM), stays.name)
    fail_to(monkeypatch, "unlink", stays.name, error)
    status, printed, said = run("gc", store.root, "--max-age", "0s")
    assert (status, printed) == (2, "")
    assert stays.name in said
    assert [*store.root.rglob("*.safetensors")] == [stays]
    assert store.counted_bytes == FILE_BYTES


def test_a_capacity_holds_for_what_can_be_read_where_nobody_knows_the_bytes_of_the_rest(
    store: Store, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.fill()
    hidden = store.fill(model="another", num_blocks=2).fingerprint
    (store.root / LEDGER_NAME).unlink()
    error = PermissionError(errno.EACCES, os.strerror(errno.EACCES), hidden)
    fail_to(monkeypatch, "open", hidden, error)
    status, printed, _ = run("gc", store.root, "--capacity", 3 * FILE_BYTES)
    assert (status, len(store.blocks())) == (0, 3 + 2)
    assert printed.endswith(" freed, 36.0 KiB left\n")


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_between_two_files_leaves_the_count_right(
    store: Store, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, status: int
) -> None:
    store.fill()
    remove = NamespaceFolder.remove

    def remove_and_signal(*arguments: Any) -> int | None:
        monkeypatch.setattr(NamespaceFolder, "remove", remove)
        num_bytes = remove(*arguments)
        os.kill(os.getpid(), number)
        return num_bytes

    monkeypatch.setattr(NamespaceFolder, "remove", remove_and_signal)
    # A shell ignores them for what it starts in the background, and the tests may be that.
    default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
    inherited = signal.signal(number, default)
    try:
        with pytest.raises(SystemExit) as ended:
            sys.exit(main(["gc", str(store.root), "--max-age", "0s"]))
        assert signal.getsignal(number) is default
    finally:
        signal.signal(number, inherited)
    assert ended.value.code == status
    assert len(store.blocks()) < NUM_BLOCKS
    assert store.counted_bytes == len(store.blocks()) * FILE_BYTES


@pytest.mark.processes
@pytest.mark.parametrize(
    ("redirected", "status", "shown", "said"),
    [
        ("", 0, b"  mod\\xe8le  ", b""),
        (">&-", 2, b"", b"kvxfer ls: [Errno 9] Bad file descriptor\n"),
        (">/dev/full", 2, b"", b"kvxfer ls: [Errno 28] No space left on device\n"),
        (">&{}", 128 + signal.SIGPIPE, b"", b""),  # 1 would be a bad block
    ],
)
def test_output_that_is_ascii_closed_full_or_read_no_more_causes_no_traceback(
    store: Store, redirected: str, status: int, shown: bytes, said: bytes
) -> None:
    store.fill(model="modèle")
    reader, writer = os.pipe()
    os.close(reader)
    shell = ["bash", "-c", f'"$@" {redirected.format(writer)}', "bash"]
    result = subprocess.run(
        [*shell, *COMMAND, "ls", str(store.root)],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        pass_fds=[writer],
        capture_output=True,
        check=False,
    )
    os.close(writer)
    assert (result.returncode, result.stderr) == (status, said)
    assert shown in result.stdout


@pytest.mark.processes
def test_an_error_that_nobody_can_be_told_is_no_bad_block() -> None:
    command = ["bash", "-c", '"$@" 2>&-', "bash", *COMMAND, "fsck", "/nowhere"]
    assert subprocess.run(command, check=False).returncode == 2


@pytest.mark.processes
@pytest.mark.parametrize(("closed", "statuses"), [("2>&-", (0, 1)), (">&- 2>&-", (2, 2))])
def test_a_store_is_verified_and_repaired_also_where_nothing_can_be_said(
    store: Store, closed: str, statuses: tuple[int, int]
) -> None:
    store.fill()
    command = ["bash", "-c", f'"$@" {closed}', "bash", *COMMAND, "fsck", "--repair"]
    for num_bad, status in zip((0, 2), statuses, strict=True):
        for path in sorted(store.blocks())[:num_bad]:
            break_seal(store.root / path)
        assert subprocess.run([*command, store.root], check=False).returncode == status
        assert len(store.blocks()) == NUM_BLOCKS - num_bad
