"""Hypothesis strategies: every value that they draw is valid where it is meant to be used."""

from itertools import pairwise

import numpy as np
from hypothesis import find, given
from hypothesis import strategies as st

from kvxfer.storage.backend import require_batch
from kvxfer.storage.keys import BlockKey, group_of
from kvxfer.testing import BlockMemory
from kvxfer.testing.payloads import (
    copy_blocks,
    flip_bit,
    make_payload,
    read_payloads,
    write_payloads,
)
from kvxfer.testing.strategies import (
    ScatteredBlocks,
    block_keys,
    block_memories,
    key_batches,
    scattered_blocks,
)


@given(key_batches(block_keys(num_groups=3)))
def test_key_batches_are_batches_that_backends_accept(keys: list[BlockKey]) -> None:
    require_batch(keys)
    assert {group_of(key) for key in keys} <= {0, 1, 2}


@given(scattered_blocks())
def test_fragments_lie_in_the_buffer_and_never_overlap(scattered: ScatteredBlocks) -> None:
    blocks, base = scattered.blocks, scattered.buffer.ctypes.data
    order = np.argsort(blocks.addresses)
    starts = (blocks.addresses - np.uint64(base))[order].tolist()
    stops = [start + n for start, n in zip(starts, blocks.lengths[order].tolist(), strict=True)]
    assert min(blocks.lengths.tolist()) > 0
    assert all(stop <= start for stop, start in zip(stops, starts[1:], strict=False))
    assert stops[-1] <= len(scattered.buffer)
    assert all(first < last for first, last in pairwise(blocks.block_offsets.tolist()))


@given(scattered_blocks([7, 1, 100]))
def test_given_sizes_are_kept(scattered: ScatteredBlocks) -> None:
    assert scattered.blocks.block_sizes.tolist() == [7, 1, 100]


def test_some_draws_are_scattered_and_some_touch() -> None:
    def num_touching(scattered: ScatteredBlocks) -> int:
        ends = scattered.blocks.addresses + scattered.blocks.lengths
        return len(np.intersect1d(ends, scattered.blocks.addresses))

    find(scattered_blocks(), lambda scattered: num_touching(scattered) > 0)
    find(scattered_blocks(), lambda drawn: len(drawn.blocks) > 3 and num_touching(drawn) == 0)


@given(scattered_blocks(), st.data())
def test_payloads_are_written_and_read_in_payload_order(
    scattered: ScatteredBlocks, data: st.DataObject
) -> None:
    sizes = scattered.blocks.block_sizes.tolist()
    payloads = [data.draw(st.binary(min_size=size, max_size=size)) for size in sizes]
    write_payloads(scattered.blocks, payloads)
    assert read_payloads(scattered.blocks) == payloads
    expected = b"".join(payloads)
    in_order = zip(
        scattered.blocks.addresses.tolist(), scattered.blocks.lengths.tolist(), strict=True
    )
    base = scattered.buffer.ctypes.data
    seen = b"".join(scattered.buffer[a - base : a - base + n].tobytes() for a, n in in_order)
    assert seen == expected


@given(scattered_blocks(), st.data())
def test_a_copy_has_memory_of_its_own(scattered: ScatteredBlocks, data: st.DataObject) -> None:
    before = read_payloads(scattered.blocks)
    copy = copy_blocks(scattered.blocks)
    assert read_payloads(copy) == before
    block = data.draw(st.integers(0, copy.num_blocks - 1))
    flip_bit(copy, block, data.draw(st.integers(0, 10**6)))
    assert read_payloads(scattered.blocks) == before
    different = [i for i, payload in enumerate(read_payloads(copy)) if payload != before[i]]
    assert different == [block]


@given(block_memories(), st.data())
def test_drawn_memories_can_be_described_filled_and_read(
    memory: BlockMemory, data: st.DataObject
) -> None:
    group = data.draw(st.integers(0, memory.num_groups - 1))
    ids = data.draw(st.permutations(range(memory.num_blocks)))
    blocks = memory.describe(group, ids)
    assert blocks.block_sizes.max() <= memory.chunk_size_bytes(group)
    memory.fill(1)
    assert set(b"".join(read_payloads(blocks))) == {1}
    assert set(memory.snapshot()) == {1}
    assert memory.namespace().chunk_size_bytes(group) == memory.chunk_size_bytes(group)


def test_a_payload_depends_on_the_key_and_the_version_and_on_nothing_else() -> None:
    one, other = BlockKey(b"one\0\0\0\0"), BlockKey(b"two\0\0\0\0")
    assert make_payload(one, 64) == make_payload(one, 64)
    assert make_payload(one, 64) != make_payload(other, 64)
    assert make_payload(one, 64) != make_payload(one, 64, version=1)
