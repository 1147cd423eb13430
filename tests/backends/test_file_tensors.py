"""Groups with named tensors: safetensors lists them, and all promises of `Backend` hold."""

import errno
import json
import mmap
import struct
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from safetensors import safe_open

from kvxfer import Descriptors, GroupIdentity, Namespace, Status, runtime
from kvxfer.backends.file import Integrity
from kvxfer.backends.file.io import EngineName, probe_direct
from kvxfer.errors import InvalidArgumentError
from kvxfer.pages.digest import Digester
from kvxfer.pages.header import BlockFileError, BlockHeader
from kvxfer.storage import StoredTensor
from kvxfer.testing import BlockMemory
from kvxfer.testing.payloads import describe_buffer, read_payloads, write_payloads
from tests.backends.file_store import (
    ENGINES,
    PAGE_BYTES,
    hashed_keys,
    listed,
    open_store,
    path_of,
    record_addresses,
    store,
)

MIN_ZERO_COPY_BYTES = 16 << 10
FAST = Digester(Integrity.FAST)
DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "F8_E4M3": torch.float8_e4m3fn}


def name_tensors(num_tensors: int, shape: tuple[int, ...]) -> tuple[StoredTensor, ...]:
    return tuple(
        StoredTensor(name=f"layers.{index // 2}.{'kv'[index % 2]}", dtype="BF16", shape=shape)
        for index in range(num_tensors)
    )


ODD_TENSORS = (
    StoredTensor(name="layers.0.k", dtype="F8_E4M3", shape=(3, 5)),
    StoredTensor(name='größe "\\ \n', dtype="F32", shape=()),
    StoredTensor(name="layers.0.state", dtype="F32", shape=(1, 2, 3, 4)),
)


def namespace_of(tensors: tuple[StoredTensor, ...]) -> Namespace:
    group = GroupIdentity(
        page_sizes_bytes=tuple(each.num_bytes for each in tensors), tensors=tensors
    )
    return Namespace(model="model", groups=(group,))


def describe_pages(payloads: Sequence[bytes]) -> Descriptors:
    """Describe page-aligned memory, as O_DIRECT wants it, with a block for each payload."""
    sizes = [len(payload) for payload in payloads]
    buffer = np.frombuffer(mmap.mmap(-1, sum(sizes)), np.uint8)
    return describe_buffer(buffer, sizes, np.zeros(len(sizes), np.int64))


def make_values(tensors: tuple[StoredTensor, ...], seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        each.name: torch.randn(each.shape, generator=generator).to(DTYPES[each.dtype])
        for each in tensors
    }


def payload_of(values: dict[str, torch.Tensor]) -> bytes:
    flat = torch.cat([value.reshape(-1).view(torch.uint8) for value in values.values()])
    return flat.numpy().tobytes()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("direct", ["auto", "off"])
@pytest.mark.parametrize(
    ("tensors", "header_pages"),
    [
        (ODD_TENSORS, 1),
        (name_tensors(160, (2, 4, 8)), 4),
        (name_tensors(2, (8, 64, 128)), 1),
        (name_tensors(160, (2, 16, 32)), 4),
    ],
    ids=["odd", "160 small", "2 large", "160 large"],
)
async def test_safetensors_shows_every_tensor_with_its_name_data_type_shape_and_values(
    tmp_path: Path,
    engine: EngineName,
    direct: str,
    tensors: tuple[StoredTensor, ...],
    header_pages: int,
) -> None:
    if direct == "auto" and not probe_direct(tmp_path):
        pytest.skip("the file system has no O_DIRECT")
    namespace, keys = namespace_of(tensors), hashed_keys(2)
    values = [make_values(tensors, seed) for seed in range(2)]
    payloads = [payload_of(each) for each in values]
    source, target = describe_pages(payloads), describe_pages(payloads)
    write_payloads(source, payloads)
    async with open_store(tmp_path, namespace, engine=engine, direct=direct) as backend:
        addresses = record_addresses(backend._files.file_io)
        assert all(outcome.done for outcome in await backend.store(keys, source))
        is_zero_copy = addresses.issuperset(source.addresses.tolist())
        assert is_zero_copy == (len(payloads[0]) > MIN_ZERO_COPY_BYTES)
        assert all(outcome.done for outcome in await backend.load(keys, target))
    assert read_payloads(target) == payloads
    for key, expected in zip(keys, values, strict=True):
        path = path_of(tmp_path, namespace, key)
        assert path.stat().st_size == header_pages * PAGE_BYTES + len(payloads[0])
        with safe_open(path, framework="pt") as file:
            assert sorted(file.keys()) == sorted(expected)
            assert file.metadata()["key"] == key.hex()
            for name, value in expected.items():
                found = file.get_tensor(name)
                assert (found.dtype, found.shape) == (value.dtype, value.shape)
                assert payload_of({name: found}) == payload_of({name: value})


async def test_tensors_that_no_header_can_list_are_refused(tmp_path: Path) -> None:
    name_bytes = 100_000
    tensors = tuple(
        StoredTensor(name=str(number).rjust(name_bytes), dtype="U8", shape=(1,))
        for number in range(11)
    )
    async with open_store(tmp_path, namespace_of(tensors[:10])):
        pass
    with pytest.raises(InvalidArgumentError, match=r"groups\[0\]\.tensors is '11 tensors'"):
        open_store(tmp_path, namespace_of(tensors))


def make_header(num_tensors: int) -> BlockHeader:
    return BlockHeader(
        namespace="0" * 32,
        key=hashed_keys(1)[0],
        start=0,
        tensors=name_tensors(num_tensors, (2, 8)),
        integrity=Integrity.FAST,
        checksum="0123456789abcdef",
    )


async def test_a_file_that_lists_other_tensors_is_corrupt_though_its_seal_holds(
    tmp_path: Path,
) -> None:
    memory, (key,) = BlockMemory([[512]], num_blocks=4), hashed_keys(1)
    namespace = listed(memory.namespace(), 2)
    path = path_of(tmp_path, namespace, key)
    async with open_store(tmp_path, namespace) as backend:
        await store(backend, [key], memory.describe(0, [0]))
        data = path.read_bytes()
        header = BlockHeader.verify(data[:PAGE_BYTES], FAST)
        first, second = header.tensors
        renamed = (
            msgspec.structs.replace(first, name=second.name),
            msgspec.structs.replace(second, name=first.name),
        )
        path.write_bytes(replace(header, tensors=renamed).encode(FAST) + data[PAGE_BYTES:])
        (outcome,) = await backend.load([key], memory.describe(0, [1]))
    assert outcome.status is Status.CORRUPT
    assert "layers.0.k" in outcome.reason
    assert "layers.0.v" in outcome.reason


async def test_a_part_is_stored_where_the_name_of_its_whole_chunk_would_survive_a_power_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, keys = BlockMemory([[512]], num_blocks=4, blocks_per_chunk=2), hashed_keys(1)
    namespace, part = listed(memory.namespace(), 2), memory.describe(0, [2])

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "no sync")

    async with open_store(tmp_path, namespace, durability="fsync") as backend:
        await store(backend, keys, memory.describe(0, [0, 1]))
        assert [outcome.done for outcome in await backend.store(keys, part)] == [True]
        monkeypatch.setattr(runtime.disk(), "fsync", fail)
        (outcome,) = await backend.store(keys, part)
        assert "no sync" in outcome.reason
        monkeypatch.undo()


def head(text: bytes, *, num_pages: int = 1) -> bytes:
    num_bytes = num_pages * PAGE_BYTES - 8
    return struct.pack("<Q", num_bytes) + text.ljust(num_bytes)


TEXT = make_header(2).encode(FAST)[8:].rstrip()
K = b'"layers.0.k":{"dtype":"BF16","shape":[2,8],"data_offsets":[0,32]}'
V = b'"layers.0.v":{"dtype":"BF16","shape":[2,8],"data_offsets":[32,64]}'


def changed(old: bytes, new: bytes) -> bytes:
    assert TEXT.count(old) == 1
    return head(TEXT.replace(old, new))


ONE = {"dtype": "U8", "shape": [1, 1], "data_offsets": [0, 1]}
HOSTILE = {
    "length 2**64 - 1": struct.pack("<Q", 2**64 - 1) + b"{}",
    "length 100 MB": struct.pack("<Q", 10**8) + b" " * 9000,
    "many tensors in one page": head(json.dumps({f"t{each}": ONE for each in range(40)}).encode()),
    "a line of a log": head(b'{"__metadata__":{"\\u001b[2J\\nall is well":""}}'),
    "nested arrays": head(b"[" * 4000),
    "nested in place of a field": head(b'{"__metadata__":' + b"[" * 4000),
    "huge numbers": head(b'{"blocks":{"dtype":"U8","shape":[1e999,' + b"9" * 3000 + b"]}}"),
    "no JSON": head(b"\xff" * 4000),
    "nothing": b"",
    "same key many times": head(b"{" + b'"blocks":{},' * 300 + b'"blocks":{}}'),
    "a gap": changed(b"[32,64]", b"[33,65]"),
    "another order": changed(K + b"," + V, V + b"," + K),
    "fewer bytes than the shape": changed(b"[0,32]", b"[0,31]"),
    "an unknown data type": changed(K, K.replace(b"BF16", b"BF17")),
    "a shape of 65 axes": changed(K, K.replace(b"[2,8]", b"[2,8" + b",1" * 63 + b"]")),
    "a name that is none": changed(b'"layers.0.k"', b'""'),
    "no metadata": head(b"{" + K + b"," + V + b"}"),
    "a field too many": changed(b'"BF16","shape":[2,8],"data_offsets":[0,', b'"x":0,"shape":[0,'),
    "one page too many": head(TEXT, num_pages=2),
    "one page too few": make_header(60).encode(FAST)[:PAGE_BYTES],
    "a shape of 50,000 axes": head(
        TEXT.replace(K, K.replace(b"[2,8]", b"[2" + b",9223372036854775807" * 50_000 + b"]")),
        num_pages=250,
    ),
    "an endless array": head(b'{"x":' + b"[" * 500_000, num_pages=130),
    "more than a header may be": head(b"{}", num_pages=257),
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_a_hostile_header_is_corrupt_and_said_so_in_a_few_words(
    tmp_path: Path, name: str
) -> None:
    with pytest.raises(BlockFileError) as caught:
        BlockHeader.decode(HOSTILE[name])  # what was keyed is shown without its seal, too
    assert len(str(caught.value)) <= 1000
    assert str(caught.value).isprintable()
    memory, keys = BlockMemory([[1 << 20]], num_blocks=4), hashed_keys(1)
    namespace = listed(memory.namespace(), 2)
    path = path_of(tmp_path, namespace, keys[0])
    async with open_store(tmp_path, namespace) as backend:
        path.parent.mkdir(mode=0o700)
        path.write_bytes(HOSTILE[name].ljust(9000))
        [outcome] = await backend.load(keys, memory.describe(0, [1]))
        assert outcome.status is Status.CORRUPT
        assert len(outcome.reason) <= 1000
        assert await backend.lookup(keys) == [False]
