"""Stored files are safetensors that anyone can read, with modes and names that are safe."""

import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from safetensors import safe_open

from kvxfer.errors import BackendUnavailableError, InvalidArgumentError
from kvxfer.storage.backend import Status
from kvxfer.storage.keys import Namespace, make_block_key
from kvxfer.testing import BlockMemory
from kvxfer.testing.payloads import make_payload
from tests.backends.file_store import (
    flip_bit,
    hashed_keys,
    load_verified,
    open_store,
    path_of,
    store,
)

PAGE_BYTES = 4096


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


OLD = (
    b"\xf8\x0f\0\0\0\0\0\0"
    b'{"__metadata__":{"format":"kvxfer-block","version":"1",'
    b'"namespace":"c6214ece1928b36692a0c49b8b38ec31","start":"0",'
    b'"key":"f1d3c091062dc79753f50d24755cc2c000000000","integrity":"fast",'
    b'"checksum":"606576ef06cf52f8","seal":"79bbc4af20814079"},'
    b'"blocks":{"dtype":"U8","shape":[2,307],"data_offsets":[0,614]}}'
).ljust(PAGE_BYTES)
"""Header of the block below, as it was written before groups could list tensors."""


async def test_opaque_blocks_are_written_as_ever_and_old_ones_are_read(tmp_path: Path) -> None:
    memory, keys = BlockMemory([[300, 7]], num_blocks=4, blocks_per_chunk=2), hashed_keys(1)
    path = path_of(tmp_path, memory.namespace(), keys[0])
    async with open_store(tmp_path, memory.namespace()) as backend:
        await store(backend, keys, memory.describe(0, [0, 1]))
        assert path.read_bytes() == OLD + make_payload(keys[0], 614)
        with safe_open(path, framework="numpy") as file:
            assert list(file.keys()) == ["blocks"]
            assert file.get_tensor("blocks").shape == (2, 307)
            assert file.get_tensor("blocks").tobytes() == make_payload(keys[0], 614)
            assert file.metadata()["key"] == keys[0].hex()
        path.unlink()
        path.write_bytes(OLD + make_payload(keys[0], 614))
        assert await load_verified(backend, keys, memory.describe(0, [2, 3])) == [Status.DONE]
    assert "tensors" not in (path.parents[1] / "namespace.json").read_text()


async def test_files_and_folders_are_their_owners_alone_whatever_the_umask(tmp_path: Path) -> None:
    memory, keys = BlockMemory([[512]], num_blocks=4), hashed_keys(2)
    for umask in (0, 0o022, 0o077):
        root = tmp_path / f"{umask:o}"
        old = os.umask(umask)
        try:
            async with open_store(root, memory.namespace()) as backend:
                await store(backend, keys, memory.describe(0, [0, 1]))
                flip_bit(path_of(root, memory.namespace(), keys[0]), 0)
                await load_verified(backend, keys, memory.describe(0, [2, 3]))
                modes = {
                    path: path.stat().st_mode & 0o7777
                    for folder, _, names in os.walk(root)
                    for path in (Path(folder), *(Path(folder) / name for name in names))
                }
        finally:
            os.umask(old)
        for path, mode in modes.items():
            assert mode == (0o700 if path.is_dir() else 0o600), path
        assert any("quarantine" in path.parts for path in modes)


async def test_namespace_json_says_what_the_namespace_is(tmp_path: Path) -> None:
    memory = BlockMemory([[512], [64, 64]], num_blocks=4)
    namespace = memory.namespace(model='a/b: ü \n"quoted"')
    async with open_store(tmp_path, namespace):
        pass
    text = (tmp_path / namespace.fingerprint / "namespace.json").read_text()
    assert msgspec.convert(json.loads(text), Namespace) == namespace
    assert text.count("\n") > 5, "for people, on several lines"


@pytest.mark.parametrize(
    "content", [b"../../../etc/passwd", b"/etc/passwd", b"..", b"\0", b"a\0b", b"\n", b"\xff" * 9]
)
async def test_no_key_leads_out_of_the_root(tmp_path: Path, content: bytes) -> None:
    memory, key = BlockMemory([[512]], num_blocks=4), make_block_key(content, 0)
    root = tmp_path / "store"
    async with open_store(root, memory.namespace()) as backend:
        outcomes = await store(backend, [key], memory.describe(0, [0]))
        assert [outcome.status for outcome in outcomes] == [Status.DONE]
        assert await load_verified(backend, [key], memory.describe(0, [1])) == [Status.DONE]
        assert path_of(root, memory.namespace(), key).exists()
    assert names_in(tmp_path) == {"store"}


@pytest.mark.parametrize("key", [bytes(300), bytes(120), b"", b"abcd", "text", None])
async def test_a_key_that_is_none_or_too_long_is_refused(tmp_path: Path, key: Any) -> None:
    memory, keys = BlockMemory([[512]], num_blocks=4), [key]
    async with open_store(tmp_path, memory.namespace()) as backend:
        with pytest.raises(InvalidArgumentError):
            await backend.lookup(keys)
        with pytest.raises(InvalidArgumentError):
            await backend.store(keys, memory.describe(0, [0]))
        with pytest.raises(InvalidArgumentError):
            await backend.load(keys, memory.describe(0, [0]))
        with pytest.raises(InvalidArgumentError):
            await backend.delete(keys)


async def test_a_namespace_folder_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    memory, root, elsewhere = BlockMemory([[512]], num_blocks=4), tmp_path / "a", tmp_path / "b"
    root.mkdir()
    elsewhere.mkdir()
    (root / memory.namespace().fingerprint).symlink_to(elsewhere)
    with pytest.raises(BackendUnavailableError):
        open_store(root, memory.namespace())
    assert list(elsewhere.iterdir()) == []
