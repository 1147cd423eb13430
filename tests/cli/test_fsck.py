"""`kvxfer fsck` and `inspect`: what they find in block files, their repairs, and exit statuses."""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kvxfer.backends.file import Integrity
from kvxfer.pages.names import LEDGER_NAME
from tests.backends.file_store import fail_to, flip_bit
from tests.cli.conftest import Run
from tests.cli.stores import DATA_BYTES, FILE_BYTES, NUM_BLOCKS, Store, break_seal

Damage = Callable[[Path], object]
NUM_TENSORS = 160


def flip(offset: int) -> Damage:
    return lambda path: flip_bit(path, 8 * offset)


def truncate(num_bytes: int) -> Damage:
    return lambda path: os.truncate(path, num_bytes)


DAMAGES = {
    "padding": (flip(4090), 0, "not a block file"),
    "start": (break_seal, 0, "seal"),
    "last byte": (flip(4096 + DATA_BYTES - 1), 0, "checksum"),
    "empty": (truncate(0), 0, "too few"),
    "truncated": (truncate(8000), 0, "bytes: "),
    "zeros": (lambda path: path.write_bytes(bytes(9000)), 0, "not a block file"),
    "second page of the header": (flip(4096), NUM_TENSORS, ""),
}


@pytest.mark.parametrize(("damage", "num_tensors", "reason"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_file_is_named_and_repaired(
    store: Store, run: Run, damage: Damage, num_tensors: int, reason: str
) -> None:
    namespace = store.fill(num_tensors=num_tensors)
    path = store.path(namespace, store.keys[3])
    relative = path.relative_to(store.root)
    assert run("fsck", store.root) == (0, f"{NUM_BLOCKS} good, 0 bad\n", "")
    assert run("inspect", path)[0] == 0
    damage(path)
    status, shown, _ = run("inspect", path)
    broken = [line.split()[0] for line in shown.splitlines() if "does not hold: " in line]
    assert (status, broken) == (1, [reason] if reason in {"seal", "checksum"} else broken)
    status, printed, _ = run("fsck", store.root)
    first, summary = printed.splitlines()
    assert (status, summary) == (1, f"{NUM_BLOCKS - 1} good, 1 bad")
    assert first.startswith(f"bad: {relative}: ")
    assert reason in first
    report = json.loads(run("fsck", store.root, "--json")[1])
    assert (report["good"], report["bad"][0]["path"]) == (NUM_BLOCKS - 1, str(relative))
    assert not store.quarantined()
    status, printed, _ = run("fsck", store.root, "--repair")
    assert (status, "1 put in quarantine" in printed) == (1, True)
    assert store.quarantined() == {relative.name}
    whole = f"{NUM_BLOCKS - 1} good, 0 bad, 1 in quarantine before\n"
    assert run("fsck", store.root)[:2] == (0, whole)


def test_foreign_files_and_links_are_left_alone(store: Store, run: Run, tmp_path: Path) -> None:
    namespace = store.fill()
    folder = store.root / namespace.fingerprint
    foreign = [
        folder / "01" / f"01{'AB' * 20}.safetensors",
        folder / "01" / f"{'01' * 121}.safetensors",
        folder / "01" / "0102.safetensors",
    ]
    for path in foreign:
        path.write_text("not a block")
    block = store.path(namespace, store.keys[2])
    block.symlink_to(block.rename(store.root / "elsewhere"))
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / f"{'ff' * 20}.safetensors").write_text("bad")
    (folder / "ff").symlink_to(tmp_path / "outside")
    os.mkfifo(folder / "01" / f"{'01' * 20}.safetensors")
    assert run("fsck", store.root, "--repair")[:2] == (0, f"{NUM_BLOCKS - 1} good, 0 bad\n")
    assert all(path.read_text() == "not a block" for path in foreign)


@pytest.mark.parametrize("damage", [Path.unlink, flip(30), truncate(0), truncate(90)])
def test_a_damaged_description_does_not_keep_blocks_from_being_verified(
    store: Store, run: Run, damage: Damage
) -> None:
    namespace = store.fill()
    damage(store.root / namespace.fingerprint / "namespace.json")
    status, printed, _ = run("fsck", store.root)
    note, summary = printed.splitlines()
    assert (status, summary) == (0, f"{NUM_BLOCKS} good, 0 bad")
    assert note.startswith(f"note: {namespace.fingerprint}: namespace.json")
    flip(5000)(store.path(namespace, store.keys[0]))
    assert run("fsck", store.root)[0] == 1


@pytest.mark.parametrize("integrity", Integrity)
def test_a_store_of_each_integrity_is_verified(
    store: Store, run: Run, secret_file: Path, integrity: Integrity
) -> None:
    secret = ["--secret-file", secret_file] if integrity.needs_secret else []
    namespace = store.fill(integrity=integrity, secret_file=secret_file if secret else None)
    counted = "without a checksum" if integrity is Integrity.OFF else "good"
    status, printed, _ = run("fsck", store.root, *secret)
    assert (status, f"{NUM_BLOCKS} {counted}" in printed) == (0, True)
    shown = run("inspect", store.path(namespace, store.keys[0]), *secret)[1]
    assert f"integrity     {integrity.value}\n" in shown


def test_sealed_files_are_verified_with_their_key_only(
    store: Store, secret_file: Path, run: Run
) -> None:
    namespace = store.fill(integrity=Integrity.SEALED, secret_file=secret_file, tenant="ours")
    secret, tenant = ["--secret-file", secret_file], ["--tenant", "ours"]
    command = ["fsck", store.root, "--repair"]
    path = store.path(namespace, store.keys[0])
    sealed = f"0 good, 0 bad, {NUM_BLOCKS} not verified: sealed\n"
    for given in ([], secret):
        assert run(*command, *given)[:2] == (0, sealed)
        status, shown, _ = run("inspect", path, *given)
        assert (status, f"tensor        sealed: U8 [{DATA_BYTES}]\n" in shown) == (0, True)
        assert f"key           {store.keys[0].hex()} (group 0)\n" in shown
        assert "not verified: sealed" in shown
    assert run(*command, *secret, *tenant)[:2] == (0, f"{NUM_BLOCKS} good, 0 bad\n")
    assert run("inspect", path, *secret, *tenant)[0] == 0
    flip(5000)(path)
    flip(90)(store.path(namespace, store.keys[1]))
    assert "the data does not match its tag" in run("inspect", path, *secret, *tenant)[1]
    assert run(*command)[0] == 1
    assert store.quarantined() == {store.path(namespace, store.keys[1]).name}, "it shows to all"
    status, printed, _ = run(*command, *secret, *tenant)
    assert (status, "does not match its tag" in printed) == (1, True)
    assert len(store.quarantined()) == 2


def test_with_a_secret_a_block_beside_sealed_ones_that_anybody_could_have_made_is_bad(
    store: Store, secret_file: Path, run: Run
) -> None:
    secret_file.write_bytes(bytes(64))
    namespace = store.fill(num_blocks=2, integrity=Integrity.SEALED, secret_file=secret_file)
    plain = Store(store.root.with_name("plain"))
    plain.fill(num_blocks=2)
    path = store.path(namespace, store.keys[0])
    path.write_bytes(plain.path(namespace, store.keys[0]).read_bytes())
    command = ["fsck", store.root, "--secret-file", secret_file]
    status, printed, _ = run(*command)
    first, summary = printed.splitlines()
    assert (status, summary) == (1, "1 good, 1 bad")
    assert "integrity is 'fast'; expected 'sealed'" in first
    for record in (store.root / namespace.fingerprint).glob("integrity.*"):
        record.unlink()  # as in the copy of a bucket
    status, printed, _ = run(*command)
    assert (status, printed.endswith("1 good, 1 bad\n")) == (1, True)


def test_a_keyed_file_keeps_no_other_from_being_verified_with_several_secrets(
    store: Store, secret_file: Path, run: Run
) -> None:
    keyed = Store(store.root.with_name("keyed"))
    keyed.fill(num_blocks=2, integrity=Integrity.KEYED, secret_file=secret_file)
    secret_file.write_bytes(bytes(64))
    namespace = store.fill(num_blocks=2, integrity=Integrity.SEALED, secret_file=secret_file)
    path = store.path(namespace, store.keys[0])
    path.write_bytes(keyed.path(namespace, store.keys[0]).read_bytes())
    secrets = ["--secret-file", secret_file]
    counted = "1 good, 0 bad, 1 not verified: keyed\n"
    assert run("fsck", store.root, "--repair", *secrets) == (0, counted, "")
    status, shown, _ = run("inspect", path, *secrets)
    assert (status, "not verified: keyed" in shown) == (0, True)


def test_a_planted_keyed_file_keeps_no_sealed_one_from_being_verified(
    store: Store, secret_file: Path, run: Run
) -> None:
    namespace = store.fill(num_blocks=2, integrity=Integrity.SEALED, secret_file=secret_file)
    command = ["fsck", store.root, "--repair", "--secret-file", secret_file]
    keyed, other = Store(store.root.with_name("keyed")), secret_file.with_name("other")
    other.write_bytes(bytes(32))
    other.chmod(0o600)
    keyed.fill(num_blocks=2, integrity=Integrity.KEYED, secret_file=other)
    path = store.path(namespace, store.keys[0])
    path.write_bytes(keyed.path(namespace, store.keys[0]).read_bytes())
    status, printed, _ = run(*command)
    assert (status, printed.splitlines()[-1]) == (1, "1 good, 1 bad, 1 put in quarantine")
    assert store.quarantined() == {path.name}


def test_what_is_not_sealed_by_the_secret_is_never_put_away(
    store: Store, secret_file: Path, run: Run
) -> None:
    store.fill()
    command = ["fsck", store.root, "--repair", "--secret-file"]
    status, printed, _ = run(*command, secret_file)
    assert (status, printed.endswith(f"0 good, {NUM_BLOCKS} bad\n")) == (1, True)
    namespace = store.fill(model="another", integrity=Integrity.KEYED, secret_file=secret_file)
    wrong = secret_file.with_name("wrong")
    wrong.write_bytes(bytes(32))
    before = store.blocks()
    status, printed, said = run(*command, wrong)
    assert (status, printed) == (2, "")
    assert said.startswith("kvxfer fsck: secret_file is 'another secret'; expected")
    assert namespace.fingerprint in said
    assert store.blocks() == before
    assert not store.quarantined()


def test_repair_removes_temporary_files_of_the_dead_and_counts_anew(store: Store, run: Run) -> None:
    namespace = store.fill()
    path = store.path(namespace, store.keys[0])
    abandoned = path.with_name(f"{'01' * 8}-0.safetensors.tmp")
    abandoned.write_bytes(bytes(100))
    for key in store.keys[:2]:
        store.path(namespace, key).unlink()  # behind the back of the ledger
    assert store.counted_bytes == NUM_BLOCKS * FILE_BYTES
    assert run("fsck", store.root)[0] == 0
    assert abandoned.exists()
    status, printed, _ = run("fsck", store.root, "--repair")
    assert (status, "1 temporary files removed" in printed) == (0, True)
    assert not abandoned.exists()
    assert store.counted_bytes == (NUM_BLOCKS - 2) * FILE_BYTES


def test_a_file_that_cannot_be_read_is_named_and_stays(
    store: Store, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.fill()
    name = f"{store.keys[3].hex()}.safetensors"
    for call in ("stat", "unlink"):
        fail_to(monkeypatch, call, name, OSError(5, "Input/output error", name))
    status, printed, _ = run("fsck", store.root, "--repair")
    assert status == 1
    assert f"bad: {name}: cannot be opened: Input/output error" in printed
    assert f"{NUM_BLOCKS - 1} good, 1 bad" in printed
    assert run("ls", store.root)[0] == run("gc", store.root, "--capacity", "20KiB")[0] == 0


@pytest.mark.parametrize(("form", "shown"), [([], "7 good, 1 bad"), (["--json"], '"good":7')])
def test_what_was_found_is_told_also_if_the_disk_is_too_full_to_count_anew(
    store: Store, run: Run, monkeypatch: pytest.MonkeyPatch, form: list[str], shown: str
) -> None:
    break_seal(store.path(store.fill(), store.keys[0]))
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), LEDGER_NAME)
    fail_to(monkeypatch, "open", LEDGER_NAME, full)
    status, printed, said = run("fsck", store.root, "--repair", *form)
    assert (status, said) == (2, f"kvxfer fsck: {LEDGER_NAME}: No space left on device\n")
    assert shown in printed


def test_a_folder_that_cannot_be_opened_is_named_with_its_namespace(
    store: Store, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = store.path(store.fill(), store.keys[3]).parent
    fail_to(monkeypatch, "open", path.name, PermissionError(errno.EACCES, "denied", path.name))
    status, printed, _ = run("fsck", store.root)
    assert status == 1
    assert f"bad: {path.relative_to(store.root)}: cannot be opened: denied" in printed


def test_a_good_block_is_shown_with_its_namespace(store: Store, run: Run) -> None:
    namespace = store.fill(num_tensors=2)
    status, printed, _ = run("inspect", store.path(namespace, store.keys[3]))
    lines = [(line[:14].strip(), line[14:]) for line in printed.splitlines()]
    tensors = [text for name, text in lines if name == "tensor"]
    assert (status, tensors) == (0, ["layers.0.k: U8 [2548]", "layers.0.v: U8 [2548]"])
    said = dict(line for line in lines if line[0] != "tensor")
    assert said.pop("checksum").endswith(" holds")
    assert said == {
        "namespace": namespace.fingerprint,
        "key": f"{store.keys[3].hex()} (group 0)",
        "in the chunk": f"bytes 0 to {DATA_BYTES}",
        "data offset": "4096",
        "file size": "9192 (9.0 KiB)",
        "integrity": "fast",
        "seal": "holds",
        "model": "example/model",
        "groups": "1",
        "chunk": "1 blocks",
    }


@pytest.mark.parametrize(
    "make", [lambda path: path.write_bytes(b"\xff" * 10000), Path.mkdir, os.mkfifo]
)
def test_what_is_no_block_file_is_said_to_be_none(
    tmp_path: Path, run: Run, make: Callable[[Path], object]
) -> None:
    path = tmp_path / "file"
    make(path)
    status, printed, said = run("inspect", path)
    assert (status, printed, said.count("\n")) == (1, "", 1)
    assert said.startswith(f"kvxfer inspect: {path}: not a block file: ")
