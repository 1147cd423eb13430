"""Commands on block files that list tensors, in headers of several pages."""

import json
from pathlib import Path

import pytest

from kvxfer.backends.file import Integrity
from kvxfer.cli import main
from tests.cli.stores import DATA_BYTES, NUM_BLOCKS, Store, flip

NUM_TENSORS = 160
HEADER_BYTES = 3 * 4096
FILE_BYTES = HEADER_BYTES + 2 * 4096  # on the disk


def test_inspect_shows_every_tensor(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    namespace = store.fill(num_blocks=1, num_tensors=NUM_TENSORS)
    assert main(["inspect", str(store.path(namespace, store.keys[0]))]) == 0
    lines = capsys.readouterr().out.splitlines()
    tensors = [line.removeprefix("tensor").strip() for line in lines if line.startswith("tensor")]
    assert len(tensors) == NUM_TENSORS
    assert tensors[:3] == [
        "layers.0.k: U8 [31]",
        "layers.0.v: U8 [32]",
        "layers.1.k: U8 [32]",
    ]
    assert f"{'data offset':<14}{HEADER_BYTES}" in lines
    assert f"{'in the chunk':<14}bytes 0 to {DATA_BYTES}" in lines
    assert f"{'file size':<14}{HEADER_BYTES + DATA_BYTES} (17.0 KiB)" in lines
    assert f"{'seal':<14}holds" in lines


@pytest.mark.slow
@pytest.mark.parametrize("offset", [100, 4096, HEADER_BYTES - 1])
def test_inspect_and_fsck_notice_a_changed_header(
    store: Store, capsys: pytest.CaptureFixture[str], offset: int
) -> None:
    namespace = store.fill(num_tensors=NUM_TENSORS)
    path = store.path(namespace, store.keys[2])
    flip(path, offset)
    assert main(["inspect", str(path)]) == 1
    capsys.readouterr()
    assert main(["fsck", str(store.root), "--repair"]) == 1
    bad, summary = capsys.readouterr().out.splitlines()
    assert bad.startswith(f"bad: {store.relative(namespace, store.keys[2])}: ")
    assert summary == f"{NUM_BLOCKS - 1} good, 1 bad, 1 put in quarantine"
    assert store.quarantined() == {path.name}
    assert main(["fsck", str(store.root)]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("integrity", Integrity)
def test_fsck_and_ls_know_the_blocks_and_what_they_take(
    store: Store,
    secret_file: Path,
    capsys: pytest.CaptureFixture[str],
    integrity: Integrity,
) -> None:
    secret = secret_file if integrity.needs_secret else None
    namespace = store.fill(num_tensors=NUM_TENSORS, integrity=integrity, secret_file=secret)
    assert main(["fsck", str(store.root), *(["--secret-file", str(secret)] if secret else [])]) == 0
    counted = "without a checksum" if integrity is Integrity.OFF else "good"
    assert f"{NUM_BLOCKS} {counted}" in capsys.readouterr().out
    assert main(["ls", str(store.root), "--json"]) == 0
    (usage,) = json.loads(capsys.readouterr().out)
    assert usage["fingerprint"] == namespace.fingerprint
    assert usage["num_blocks"] == NUM_BLOCKS
    assert usage["num_bytes"] == store.counted_bytes == NUM_BLOCKS * FILE_BYTES
    tensors = usage["namespace"]["groups"][0]["tensors"]
    assert tensors[0] == {"name": "layers.0.k", "dtype": "U8", "shape": [31]}
