"""Numbers of any type: converted exactly, also where arithmetic in their type overflows."""

import mmap
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvxfer import CanonicalKVCaches, Descriptors, TransferEngine, describe, make_block_key
from kvxfer.errors import InvalidArgumentError
from kvxfer.kvcache import CanonicalKVCacheRef, CanonicalKVCacheTensor
from kvxfer.storage.backend import DONE
from kvxfer.testing import BlockMemory, DictBackend, DictConfig

PAGE_BYTES = 16 << 10
STRIDE_BYTES = 48 << 20
"""Bytes from block to block: the block of the largest int8 ends 6 GiB further on."""
NUM_BLOCKS = 128
MAP_NORESERVE = 0x4000
"""Flag of Linux's mmap, which Python 3.11 does not name."""
INTEGER_TYPES: list[Any] = [np.dtype(code).type for code in np.typecodes["AllInteger"]]
DESCRIPTOR_TYPES = {
    "addresses": np.uint64,
    "lengths": np.uint64,
    "block_offsets": np.int64,
    "payload_starts": np.int64,
}


@pytest.fixture(scope="module")
def far_caches() -> CanonicalKVCaches:
    """Caches with blocks gigabytes apart, in memory that is mapped and never touched."""
    reserved = mmap.mmap(-1, NUM_BLOCKS * STRIDE_BYTES, mmap.MAP_PRIVATE | MAP_NORESERVE)
    whole = torch.frombuffer(reserved, dtype=torch.int8)
    rows = whole.as_strided((NUM_BLOCKS, PAGE_BYTES), (STRIDE_BYTES, 1))
    return CanonicalKVCaches(
        [CanonicalKVCacheTensor(rows, PAGE_BYTES)], [[CanonicalKVCacheRef(0, PAGE_BYTES)]]
    )


@given(data=st.data())
def test_blocks_are_where_exact_arithmetic_puts_them(
    far_caches: CanonicalKVCaches, data: st.DataObject
) -> None:
    kinds = st.sampled_from([int, *INTEGER_TYPES])
    of_ids, of_first, of_group, of_chunk = (data.draw(kinds) for _ in range(4))
    ids = data.draw(st.lists(st.integers(0, NUM_BLOCKS - 1), min_size=1, max_size=5, unique=True))
    first = data.draw(st.integers(0, 127))
    chunk = data.draw(st.integers(1, 127))
    as_array = data.draw(st.booleans())
    blocks = describe(
        far_caches,
        of_group(0),
        np.array(ids, of_ids) if as_array else [of_ids(each) for each in ids],
        blocks_per_chunk=of_chunk(chunk),
        first_block_index=of_first(first),
    )
    base = far_caches.tensors[0].tensor.data_ptr()
    assert blocks.addresses.tolist() == [base + each * STRIDE_BYTES for each in ids]
    places = [(first + n) // chunk for n in range(len(ids))]
    assert np.diff(blocks.block_offsets).tolist() == [
        places.count(place) for place in dict.fromkeys(places)
    ]
    assert int(blocks.payload_starts[0]) == first % chunk * PAGE_BYTES


@pytest.mark.parametrize("kind", INTEGER_TYPES)
async def test_a_part_of_a_chunk_is_loaded_from_its_own_place(kind: Any) -> None:
    memory = BlockMemory([[PAGE_BYTES]], num_blocks=32, blocks_per_chunk=8)
    backend = DictBackend(DictConfig(), memory.namespace())
    keys = [make_block_key(b"a", kind(0))]
    rows = memory.caches.tensors[0].tensor
    async with TransferEngine(memory.caches, backend, blocks_per_chunk=kind(8)) as engine:
        for block in range(8):
            rows[block] = block + 1
        assert await engine.store(keys, [np.arange(8, dtype=kind)]) == [DONE]
        loaded = await engine.load(keys, [[kind(24), kind(25)]], first_block_indices=[kind(5)])
    assert loaded == [DONE]
    assert [int(rows[block, 0]) for block in (24, 25)] == [6, 7]


def descriptors(**changed: Any) -> Descriptors:
    fields: dict[str, Any] = {
        "addresses": [100, 200, 300, 400],
        "lengths": [8, 8, 8, 8],
        "block_offsets": [0, 2, 4],
        "payload_starts": [0, 0],
    }
    arrays = {name: np.array(fields[name], kind) for name, kind in DESCRIPTOR_TYPES.items()}
    return Descriptors(**arrays | changed, device=torch.device("cpu"))


@pytest.mark.parametrize("name", DESCRIPTOR_TYPES)
@pytest.mark.parametrize("kind", INTEGER_TYPES)
def test_descriptors_of_any_integers_are_descriptors(name: str, kind: Any) -> None:
    array = np.minimum(getattr(descriptors(), name), 127).astype(kind)
    made = getattr(descriptors(**{name: array}), name)
    assert made.dtype == DESCRIPTOR_TYPES[name]
    assert made.tolist() == array.tolist()
    if array.dtype == made.dtype:
        assert np.shares_memory(array, made)


def test_numbers_that_do_not_fit_are_refused_and_not_wrapped(far_caches: CanonicalKVCaches) -> None:
    with pytest.raises(InvalidArgumentError, match="blocks_per_chunk"):
        describe(far_caches, 0, [1], blocks_per_chunk=1 << 60)
    with pytest.raises(InvalidArgumentError, match="bool"):
        describe(far_caches, 0, np.ones(NUM_BLOCKS, bool))
    with pytest.raises(InvalidArgumentError, match="addresses"):
        descriptors(addresses=np.array([-1, 1, 2, 3]))
    with pytest.raises(InvalidArgumentError, match="block_offsets"):
        descriptors(block_offsets=np.array([0, 2, 2**63], np.uint64))


@pytest.mark.parametrize("kind", INTEGER_TYPES)
def test_a_selection_near_the_end_of_its_type_is_what_was_asked_for(kind: Any) -> None:
    blocks = descriptors(
        addresses=np.arange(1, 129, dtype=np.uint64),
        lengths=np.ones(128, np.uint64),
        block_offsets=np.arange(129),
        payload_starts=np.zeros(128, np.int64),
    )
    assert blocks.select(kind(126), kind(127)).addresses.tolist() == [127]
    assert blocks.take([kind(127), kind(0)]).addresses.tolist() == [128, 1]
