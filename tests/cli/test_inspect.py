"""`kvxfer inspect`: good block files, bad ones, and files of another kind."""

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from kvxfer.backends.file import Integrity
from kvxfer.cli import main
from tests.cli.stores import DATA_BYTES, Store, break_seal, flip


def shown(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    lines = capsys.readouterr().out.splitlines()
    return {line[:14].strip(): line[14:] for line in lines}


def test_a_good_block_is_shown_with_its_namespace(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    namespace = store.fill()
    path = store.path(namespace, store.keys[3])
    assert main(["inspect", str(path)]) == 0
    said = shown(capsys)
    checksum = said.pop("checksum")
    assert checksum.endswith(" holds")
    assert len(checksum) == len("0123456789abcdef holds")
    assert said == {
        "namespace": namespace.fingerprint,
        "key": f"{store.keys[3].hex()} (group 0)",
        "tensor": f"blocks: U8 [1, {DATA_BYTES}]",
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
    ("damage", "seal", "checksum"),
    [
        (break_seal, "does not hold: ", " holds"),
        (lambda path: flip(path, 4096), "holds", "does not hold: "),
    ],
)
def test_a_changed_block_says_what_does_not_hold(
    store: Store,
    capsys: pytest.CaptureFixture[str],
    damage: Callable[[Path], None],
    seal: str,
    checksum: str,
) -> None:
    namespace = store.fill(num_blocks=1)
    path = store.path(namespace, store.keys[0])
    damage(path)
    assert main(["inspect", str(path)]) == 1
    said = shown(capsys)
    assert said["seal"].startswith(seal)
    assert checksum in said["checksum"]


def test_a_sealed_block_is_shown_without_its_key_and_verified_with_it(
    store: Store, secret_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sealed = {"integrity": Integrity.SEALED, "secret_file": secret_file}
    namespace = store.fill(num_blocks=1, tenant="ours", **sealed)  # type: ignore[arg-type]
    path = store.path(namespace, store.keys[0])
    with_secret = ["inspect", str(path), "--secret-file", str(secret_file)]
    for command in (["inspect", str(path)], with_secret):
        assert main(command) == 0
        said = shown(capsys)
        assert said["integrity"] == "sealed"
        assert said["key"] == f"{store.keys[0].hex()} (group 0)"
        assert said["tensor"] == f"sealed: U8 [{DATA_BYTES}]"
        assert said["seal"] == "holds"
        assert "not verified: sealed" in said["checksum"]
    assert main([*with_secret, "--tenant", "ours"]) == 0
    assert shown(capsys)["checksum"].endswith(" holds")
    flip(path, 4096)
    assert main([*with_secret, "--tenant", "ours"]) == 1
    assert "does not hold: the data does not match its tag" in shown(capsys)["checksum"]


def make_safetensors(path: Path, header_bytes: int) -> None:
    tensor = {"dtype": "U8", "shape": [5000], "data_offsets": [0, 5000]}
    header = json.dumps({"weights": tensor}).encode().ljust(header_bytes)
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(5000))


@pytest.mark.parametrize(
    "make",
    [
        Path.touch,
        lambda path: path.write_text("text"),
        lambda path: path.write_bytes(bytes(10000)),
        lambda path: path.write_bytes(b"\xff" * 10000),
        lambda path: make_safetensors(path, 100),
        lambda path: make_safetensors(path, 4088),
        lambda path: make_safetensors(path, 1 << 20),
        Path.mkdir,
        os.mkfifo,
    ],
)
def test_what_is_no_block_file_is_said_to_be_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], make: Callable[[Path], None]
) -> None:
    path = tmp_path / "file"
    make(path)
    assert main(["inspect", str(path)]) == 1
    printed = capsys.readouterr()
    assert not printed.out
    assert printed.err.startswith(f"kvxfer inspect: {path}: not a block file: ")
    assert printed.err.count("\n") == 1
