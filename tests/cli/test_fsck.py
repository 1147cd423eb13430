"""`kvxfer fsck`: its findings, its repairs, its output and its exit status."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvxfer.backends.file import Integrity
from kvxfer.cli import main
from tests.backends.file_store import fail_to
from tests.cli.stores import DATA_BYTES, FILE_BYTES, NUM_BLOCKS, Store, break_seal
from tests.cli.stores import flip as flip_bit

COMMAND = [sys.executable, "-c", "import sys; from kvxfer.cli import main; sys.exit(main())"]

Damage = Callable[[Path], None]


def flip(offset: int) -> Damage:
    return lambda path: flip_bit(path, offset)


def truncate(num_bytes: int) -> Damage:
    return lambda path: os.truncate(path, num_bytes)


def make_link(path: Path) -> None:
    target = path.rename(path.parents[2] / "elsewhere")
    path.symlink_to(target)


DAMAGES = [
    pytest.param(flip(20), "not a block file", id="format"),
    pytest.param(flip(90), "", id="namespace"),
    pytest.param(flip(4090), "not a block file", id="padding"),
    pytest.param(break_seal, "seal", id="start"),
    pytest.param(flip(4096), "checksum", id="first byte"),
    pytest.param(flip(4096 + DATA_BYTES - 1), "checksum", id="last byte"),
    pytest.param(truncate(0), "too few", id="empty"),
    pytest.param(truncate(4096), "too few", id="header only"),
    pytest.param(truncate(8000), "bytes: ", id="truncated"),
    pytest.param(truncate(1 << 20), "bytes: ", id="extended"),
    pytest.param(lambda path: path.write_bytes(bytes(9000)), "not a block file", id="zeros"),
]


def test_a_store_that_is_whole_is_said_to_be(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    store.fill()
    store.fill(model="another", num_blocks=3)
    assert main(["fsck", str(store.root)]) == 0
    printed = capsys.readouterr()
    assert printed.out == f"{NUM_BLOCKS + 3} good, 0 bad\n"
    assert not printed.err


@pytest.mark.parametrize(("damage", "reason"), DAMAGES)
def test_a_damaged_file_is_named_and_repaired(
    store: Store, capsys: pytest.CaptureFixture[str], damage: Damage, reason: str
) -> None:
    namespace = store.fill()
    relative = store.relative(namespace, store.keys[3])
    damage(store.root / relative)
    assert main(["fsck", str(store.root)]) == 1
    first, summary = capsys.readouterr().out.splitlines()
    assert first.startswith(f"bad: {relative}: ")
    assert reason in first
    assert summary == f"{NUM_BLOCKS - 1} good, 1 bad"
    assert not store.quarantined()
    assert main(["fsck", str(store.root), "--repair"]) == 1
    assert "1 put in quarantine" in capsys.readouterr().out
    assert store.quarantined() == {relative.name}
    assert main(["fsck", str(store.root)]) == 0
    printed = capsys.readouterr().out
    assert printed == f"{NUM_BLOCKS - 1} good, 0 bad, 1 in quarantine before\n"


def test_a_file_of_another_namespace_is_found(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    ours, theirs = store.fill(), store.fill(model="another", num_blocks=1)
    key = store.keys[0]
    store.path(ours, key).write_bytes(store.path(theirs, key).read_bytes())
    assert main(["fsck", str(store.root)]) == 1
    said = f"namespace: the file says {theirs.fingerprint}, expected {ours.fingerprint}"
    assert said in capsys.readouterr().out


def test_a_file_where_no_lookup_finds_it_is_put_in_quarantine(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    namespace = store.fill()
    path = store.path(namespace, store.keys[0])
    path.rename(path.parent.parent / "01" / path.name)
    assert main(["fsck", str(store.root), "--repair"]) == 1
    assert f"01/{path.name}: lookups do not find it in the folder '01'" in capsys.readouterr().out
    assert store.quarantined() == {path.name}
    assert main(["fsck", str(store.root)]) == 0


def test_foreign_files_and_links_are_left_alone(
    store: Store, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    namespace = store.fill()
    folder = store.root / namespace.fingerprint
    foreign = [
        store.root / "notes.txt",
        store.root / ("0" * 32),
        folder / "weights.safetensors",
        folder / "01" / "weights.safetensors",
        folder / "01" / f"01{'AB' * 20}.safetensors",
        folder / "01" / f"{'01' * 121}.safetensors",
        folder / "01" / "0102.safetensors",
    ]
    for path in foreign:
        path.write_text("not a block")
    make_link(store.path(namespace, store.keys[2]))
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / f"{'ff' * 20}.safetensors").write_text("bad")
    (folder / "ff").symlink_to(tmp_path / "outside")
    os.mkfifo(folder / "01" / f"{'01' * 20}.safetensors")
    assert main(["fsck", str(store.root), "--repair"]) == 0
    assert capsys.readouterr().out == f"{NUM_BLOCKS - 1} good, 0 bad\n"
    assert all(path.read_text() == "not a block" for path in foreign)


@pytest.mark.parametrize("damage", [Path.unlink, flip(30), truncate(0), truncate(90)])
def test_a_damaged_description_does_not_keep_blocks_from_being_verified(
    store: Store, capsys: pytest.CaptureFixture[str], damage: Damage
) -> None:
    namespace = store.fill()
    damage(store.root / namespace.fingerprint / "namespace.json")
    assert main(["fsck", str(store.root)]) == 0
    note, summary = capsys.readouterr().out.splitlines()
    assert note.startswith(f"note: {namespace.fingerprint}: namespace.json")
    assert summary == f"{NUM_BLOCKS} good, 0 bad"
    flip(5000)(store.path(namespace, store.keys[0]))
    assert main(["fsck", str(store.root)]) == 1


def test_sealed_files_are_verified_with_their_key_only(
    store: Store, secret_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sealed = {"integrity": Integrity.SEALED, "secret_file": secret_file}
    namespace = store.fill(**sealed, tenant="ours")  # type: ignore[arg-type]
    command = ["fsck", str(store.root), "--repair"]
    with_key = [*command, "--secret-file", str(secret_file), "--tenant", "ours"]
    unverified = f"0 good, 0 bad, {NUM_BLOCKS} not verified: sealed\n"
    for without_key in (command, with_key[:-2]):
        assert main(without_key) == 0
        assert capsys.readouterr().out == unverified
    assert main(with_key) == 0
    assert capsys.readouterr().out == f"{NUM_BLOCKS} good, 0 bad\n"
    flip(5000)(store.path(namespace, store.keys[0]))
    flip(90)(store.path(namespace, store.keys[1]))
    assert main(command) == 1
    assert store.quarantined() == {store.path(namespace, store.keys[1]).name}, "it shows to all"
    assert main(with_key) == 1
    assert "does not match its tag" in capsys.readouterr().out
    assert len(store.quarantined()) == 2


def test_with_a_secret_a_block_beside_sealed_ones_that_anybody_could_have_made_is_bad(
    store: Store, secret_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    secret_file.write_bytes(bytes(64))
    namespace = store.fill(num_blocks=2, integrity=Integrity.SEALED, secret_file=secret_file)
    plain = Store(store.root.with_name("plain"))
    plain.fill(num_blocks=2)
    path = store.path(namespace, store.keys[0])
    path.write_bytes(plain.path(namespace, store.keys[0]).read_bytes())
    command = ["fsck", str(store.root), "--secret-file", str(secret_file)]
    assert main(command) == 1
    first, summary = capsys.readouterr().out.splitlines()
    assert "integrity is 'fast'; expected 'sealed'" in first
    assert summary == "1 good, 1 bad"
    for record in (store.root / namespace.fingerprint).glob("integrity.*"):
        record.unlink()  # as in the copy of a bucket
    assert main(command) == 1
    assert capsys.readouterr().out.endswith("1 good, 1 bad\n")


def test_what_is_not_sealed_by_the_secret_is_never_put_away(
    store: Store, secret_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store.fill()
    command = ["fsck", str(store.root), "--repair", "--secret-file"]
    assert main([*command, str(secret_file)]) == 1
    assert capsys.readouterr().out.endswith(f"0 good, {NUM_BLOCKS} bad\n")
    namespace = store.fill(model="another", integrity=Integrity.KEYED, secret_file=secret_file)
    wrong = secret_file.with_name("wrong")
    wrong.write_bytes(bytes(32))
    before = store.blocks()
    assert main([*command, str(wrong)]) == 2
    printed = capsys.readouterr()
    assert not printed.out
    assert printed.err.startswith("kvxfer fsck: secret_file is 'another secret'; expected")
    assert namespace.fingerprint in printed.err
    assert store.blocks() == before
    assert not store.quarantined()


def test_repair_removes_temporary_files_of_the_dead_and_counts_anew(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    namespace = store.fill()
    path = store.path(namespace, store.keys[0])
    abandoned = path.with_name(f"{'01' * 8}-0.safetensors.tmp")
    abandoned.write_bytes(bytes(100))
    for key in store.keys[:2]:
        store.path(namespace, key).unlink()  # behind the back of the ledger
    assert store.counted_bytes == NUM_BLOCKS * FILE_BYTES
    assert main(["fsck", str(store.root)]) == 0
    assert abandoned.exists()
    assert main(["fsck", str(store.root), "--repair"]) == 0
    assert "1 temporary files removed" in capsys.readouterr().out
    assert not abandoned.exists()
    assert store.counted_bytes == (NUM_BLOCKS - 2) * FILE_BYTES


def test_json_is_one_object(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    namespace = store.fill()
    relative = store.relative(namespace, store.keys[0])
    flip(5000)(store.root / relative)
    assert main(["fsck", str(store.root), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["good"] == NUM_BLOCKS - 1
    assert [problem["path"] for problem in report["bad"]] == [str(relative)]


@pytest.mark.parametrize(
    "command",
    [["ls"], ["fsck"], ["fsck", "--repair"], ["gc", "--capacity", "20KiB"], ["gc", "--dry-run"]],
    ids=" ".join,
)
def test_a_damaged_inode_ends_no_command(
    store: Store,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    command: list[str],
) -> None:
    store.fill()
    name = f"{store.keys[3].hex()}.safetensors"
    for call in ("stat", "unlink"):
        fail_to(monkeypatch, call, name, OSError(5, "Input/output error", name))
    assert main([command[0], str(store.root), *command[1:]]) == (command[0] == "fsck")
    printed = capsys.readouterr()
    if command[0] == "fsck":
        assert f"bad: {name}: cannot be opened: Input/output error" in printed.out
        assert f"{NUM_BLOCKS - 1} good, 1 bad" in printed.out


def test_a_folder_that_holds_no_store_is_misuse_and_stays_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fsck", str(tmp_path), "--repair"]) == 2
    printed = capsys.readouterr()
    assert not printed.out
    assert printed.err.startswith(
        f"kvxfer fsck: path is '{tmp_path}'; expected the root of a store"
    )
    assert not (tmp_path / "usage.ledger").exists()


def test_control_sequences_in_a_file_do_not_reach_the_terminal(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    namespace = store.fill(num_blocks=1)
    path = store.path(namespace, store.keys[0])
    said = namespace.fingerprint.encode()
    evil = rb"\u001b[2J".ljust(len(said), b"0")
    path.write_bytes(path.read_bytes().replace(said, evil, 1))
    main(["fsck", str(store.root)])
    main(["inspect", str(path)])
    assert "\x1b" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["{}/nothing"], "{}/nothing: No such file or directory"),
        (["{}/file"], "{}/file: Not a directory"),
        (["{}", "--secret-file", "{}/nothing"], "secret_file is '{}/nothing'"),
        (["{}", "--secret-file", "{}/file"], "secret_file is '5 bytes'"),
        (["{}", "--tenant", "somebody"], "tenant is 'somebody'"),
    ],
)
def test_misuse_is_said_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    (tmp_path / "file").write_text("short")
    (tmp_path / "usage.ledger").touch()
    assert main(["fsck", *(argument.format(tmp_path) for argument in arguments)]) == 2
    printed = capsys.readouterr()
    assert not printed.out
    assert printed.err.startswith(f"kvxfer fsck: {said.format(tmp_path)}")
    assert printed.err.count("\n") == 1


@pytest.mark.processes
def test_a_reader_who_has_seen_enough_causes_no_traceback(store: Store) -> None:
    store.fill()
    reader, writer = os.pipe()
    os.close(reader)
    command = [*COMMAND, "ls", str(store.root)]
    result = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert result.returncode == 1
    assert not result.stderr
