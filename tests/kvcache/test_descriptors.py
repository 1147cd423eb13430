"""Descriptors against loops over blocks, refs and bytes."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvxfer import CanonicalKVCaches, Descriptors, KVXferError, describe
from kvxfer.errors import BlockIdError, DuplicateError, InvalidArgumentError, UnknownGroupError
from kvxfer.kvcache import CanonicalKVCacheRef, CanonicalKVCacheTensor
from kvxfer.kvcache.describer import BlockDescriber
from kvxfer.kvcache.descriptors import overlap
from kvxfer.testing.payloads import read_payloads

MAX_PAGE_BYTES = 24
MAX_BLOCKS = 12
KINDS_OF_IDS: list[Callable[[list[int]], Any]] = [
    *(partial(np.array, dtype=kind) for kind in (np.int16, np.uint8, np.uint32, np.uint64)),
    partial(torch.tensor, dtype=torch.int32),
    list,
    tuple,
]


@dataclass(frozen=True, slots=True)
class Case:
    caches: CanonicalKVCaches
    group: int
    block_ids: Any
    blocks_per_chunk: int
    first_block_index: int

    def describe(self) -> Descriptors:
        return describe(
            self.caches,
            self.group,
            self.block_ids,
            blocks_per_chunk=self.blocks_per_chunk,
            first_block_index=self.first_block_index,
        )


@st.composite
def columns(draw: st.DrawFn) -> list[CanonicalKVCacheTensor]:
    """Draw views of the same rows, some of them side by side, some with bytes between them."""
    num_blocks = draw(st.integers(1, MAX_BLOCKS))
    sizes = st.tuples(st.sampled_from([0, 0, 0, 5]), st.integers(1, MAX_PAGE_BYTES))
    spans = []
    position = 0
    for gap, page in draw(st.lists(sizes, min_size=1, max_size=4)):
        spans.append((position + gap, page))
        position += gap + page
    stride = position + draw(st.sampled_from([0, 0, 7]))
    offset = draw(st.integers(0, 3))
    storage = random_bytes(offset + num_blocks * stride)
    return [
        CanonicalKVCacheTensor(
            storage.as_strided((num_blocks, page), (stride, 1), offset + start), page
        )
        for start, page in spans
    ]


@st.composite
def keys_and_values(draw: st.DrawFn) -> list[CanonicalKVCacheTensor]:
    """Make two halves of one storage: the pages of all keys, then those of all values."""
    num_blocks, page = draw(st.integers(1, MAX_BLOCKS)), draw(st.integers(1, MAX_PAGE_BYTES))
    halves = random_bytes(2 * num_blocks * page).view(2, num_blocks, page)
    return [CanonicalKVCacheTensor(half, page) for half in halves]


@st.composite
def canonical_caches(draw: st.DrawFn) -> CanonicalKVCaches:
    """Draw several storages, and groups that refer to some of their tensors, partly un-padded."""
    tensors: list[CanonicalKVCacheTensor] = []
    for storage in draw(st.lists(columns() | keys_and_values(), min_size=1, max_size=3)):
        tensors += storage
    groups = []
    for _ in range(draw(st.integers(1, 3))):
        shuffled = draw(st.booleans())
        indices = draw(st.permutations(range(len(tensors)))) if shuffled else range(len(tensors))
        used = indices[: draw(st.integers(1, len(tensors)))]
        groups.append([draw(refs(index, tensors[index])) for index in used])
    return CanonicalKVCaches(tensors, groups)


@st.composite
def refs(draw: st.DrawFn, index: int, tensor: CanonicalKVCacheTensor) -> CanonicalKVCacheRef:
    padded = tensor.page_size_bytes
    is_padded = draw(st.sampled_from([False, False, True]))
    return CanonicalKVCacheRef(index, draw(st.integers(1, padded)) if is_padded else padded)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    caches = draw(canonical_caches())
    group = draw(st.integers(0, len(caches.group_data_refs) - 1))
    num_blocks = num_blocks_of(caches, group)
    start = draw(st.integers(0, num_blocks - 1))
    stop = draw(st.integers(start + 1, num_blocks))
    block_ids = list(range(start, stop))
    if draw(st.booleans()):
        block_ids = draw(st.permutations(block_ids))
    return Case(
        caches=caches,
        group=group,
        block_ids=draw(st.sampled_from(KINDS_OF_IDS))(block_ids),
        blocks_per_chunk=draw(st.integers(1, 4)),
        first_block_index=draw(st.integers(0, 9)),
    )


def random_bytes(num_bytes: int) -> torch.Tensor:
    return torch.randint(-128, 128, (num_bytes,), dtype=torch.int8)


def num_blocks_of(caches: CanonicalKVCaches, group: int) -> int:
    refs = caches.group_data_refs[group]
    return min(len(caches.tensors[ref.tensor_idx].tensor) for ref in refs)


def expected_chunks(case: Case) -> list[tuple[int, bytes]]:
    """Read each chunk's start in its payload, and its bytes, from the tensors."""
    refs = case.caches.group_data_refs[case.group]
    block_size_bytes = sum(ref.page_size_bytes for ref in refs)
    chunks: dict[int, tuple[int, bytes]] = {}
    for block_index, block_id in enumerate(map(int, case.block_ids), case.first_block_index):
        chunk, place = divmod(block_index, case.blocks_per_chunk)
        begin, payload = chunks.get(chunk, (place * block_size_bytes, b""))
        for ref in refs:
            page = case.caches.tensors[ref.tensor_idx].tensor[block_id, : ref.page_size_bytes]
            payload += page.numpy().tobytes()
        chunks[chunk] = begin, payload
    return list(chunks.values())


def expected_pieces(case: Case) -> list[list[tuple[int, int]]]:
    """List the pieces of each chunk, those that touch as one.

    Blocks whose ids are no neighbours stay apart, also where they touch: after `[1, 0]`, when the
    values come first, the last block of the keys may lie right before the first one of the values.
    """
    refs = case.caches.group_data_refs[case.group]
    ids = list(map(int, case.block_ids))
    chunks: dict[int, list[tuple[int, int]]] = {}
    for index, block_id in enumerate(ids):
        pieces = chunks.setdefault((index + case.first_block_index) // case.blocks_per_chunk, [])
        goes_on = index > 0 and block_id == ids[index - 1] + 1
        for ref in refs:
            start = case.caches.tensors[ref.tensor_idx].tensor[block_id].data_ptr()
            piece = start, ref.page_size_bytes
            if pieces and goes_on and sum(pieces[-1]) == start:
                before, length = pieces.pop()
                piece = before, length + ref.page_size_bytes
            pieces.append(piece)
            goes_on = True
    return list(chunks.values())


def read(blocks: Descriptors) -> list[tuple[int, bytes]]:
    return list(zip(blocks.payload_starts.tolist(), read_payloads(blocks), strict=True))


@given(case=cases())
def test_descriptors_read_the_bytes_that_the_tensors_hold(case: Case) -> None:
    blocks, expected = case.describe(), expected_chunks(case)
    assert read(blocks) == expected
    sizes = [len(payload) for _, payload in expected]
    assert (blocks.num_blocks, blocks.num_bytes) == (len(expected), sum(sizes))
    assert blocks.block_sizes.tolist() == sizes
    arrays = (blocks.addresses, blocks.lengths, blocks.block_offsets, blocks.payload_starts)
    assert [each.dtype for each in arrays] == [np.uint64, np.uint64, np.int64, np.int64]
    assert blocks.block_offsets[-1] == len(blocks) == len(blocks.lengths)
    assert (np.diff(blocks.block_offsets, prepend=-1) > 0).all()
    assert (blocks.lengths > 0).all()
    assert (blocks.device, blocks.owners) == (torch.device("cpu"), (case.caches,))
    pieces = list(zip(blocks.addresses.tolist(), blocks.lengths.tolist(), strict=True))
    offsets = pairwise(blocks.block_offsets.tolist())
    assert [pieces[first:last] for first, last in offsets] == expected_pieces(case)


@given(case=cases(), data=st.data())
def test_blocks_that_are_selected_or_taken_are_those_that_were_asked_for(
    case: Case, data: st.DataObject
) -> None:
    blocks, expected = replace(case.describe(), after=Mock()), expected_chunks(case)
    start = data.draw(st.integers(0, len(expected)))
    stop = data.draw(st.integers(start, len(expected)))
    selected = blocks.select(start, stop)
    assert read(selected) == expected[start:stop]
    assert np.shares_memory(selected.addresses, blocks.addresses) or start == stop
    order = data.draw(st.lists(st.integers(0, len(expected) - 1)))
    taken = blocks.take(order)
    assert read(taken) == [expected[index] for index in order]
    assert selected.owners == taken.owners == blocks.owners
    assert selected.after is taken.after is blocks.after
    longest = data.draw(st.none() | st.integers(1, 3))
    max_bytes = data.draw(st.integers(1, 200))
    sizes, runs = blocks.block_sizes, list(blocks.cut(max_bytes, longest_run=longest))
    assert [index for run in runs for index in range(*run)] == list(range(len(sizes)))
    for first, last in runs:
        assert last == first + 1 or sizes[first:last].sum() <= max_bytes
        is_full = last == len(sizes) or last - first == longest
        assert is_full or sizes[first : last + 1].sum() > max_bytes


@given(several=st.lists(cases(), min_size=1, max_size=4))
def test_concatenated_batches_are_one_batch_in_order(several: list[Case]) -> None:
    together = Descriptors.concatenate([case.describe() for case in several])
    assert read(together) == [chunk for case in several for chunk in expected_chunks(case)]
    for case in several:
        assert any(owner is case.caches for owner in together.owners)


@pytest.mark.parametrize("seed", range(50))
def test_batches_overlap_where_they_have_a_byte_in_common(seed: int) -> None:
    generator = np.random.default_rng(seed)
    places = [
        (generator.integers(0, 100, count).astype(np.uint64), generator.integers(1, 5, count))
        for count in generator.integers(0, 6, 2)
    ]
    one, other = (Descriptors.of_pieces(*each) for each in places)
    bytes_of_one, bytes_of_other = (
        {at for start, size in zip(*each, strict=True) for at in range(start, start + size)}
        for each in (tuple(map(np.ndarray.tolist, each)) for each in places)
    )
    expected = not bytes_of_one.isdisjoint(bytes_of_other)
    assert (overlap(one, other), overlap(other, one)) == (expected, expected)
    assert not overlap(one, replace(other, device=torch.device("cuda", 0)))


def caches_of(*refs: int, devices: tuple[str, ...] = ("cpu", "meta")) -> CanonicalKVCaches:
    tensors = [
        CanonicalKVCacheTensor(torch.zeros(count, 8, dtype=torch.int8, device=device), 8)
        for count, device in zip((6, 4), devices, strict=True)
    ]
    return CanonicalKVCaches(tensors, [[CanonicalKVCacheRef(index, 8) for index in refs]])


ROWS = caches_of(0)
TWO = describe(ROWS, 0, [1, 5])
INVALID = InvalidArgumentError
BYTES = torch.zeros(4, 8, dtype=torch.int8)


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: describe(caches_of(0, 1, devices=("cpu", "cpu")), 0, [5]), BlockIdError, "d < 4"),
        (lambda: describe(ROWS, 0, [1, 5, 2, 5]), DuplicateError, r"block_ids\[0\].* 5"),
        (lambda: describe(ROWS, 1, [0]), UnknownGroupError, "1.*1"),
        (lambda: BlockDescriber(caches_of(0, 1)), INVALID, "meta"),
        (lambda: Descriptors.concatenate([TWO, describe(caches_of(1), 0, [0])]), INVALID, "meta"),
        (lambda: CanonicalKVCacheTensor(torch.zeros(4, 8), 8), INVALID, "tensor.dtype"),
        (lambda: CanonicalKVCacheTensor(BYTES, 4), INVALID, "tensor.shape"),
        (lambda: CanonicalKVCacheTensor(BYTES[:, ::2], 4), INVALID, "tensor.stride"),
        (lambda: CanonicalKVCacheTensor(BYTES[:0], 8), INVALID, "tensor.shape"),
        (lambda: CanonicalKVCaches([], []), INVALID, "group_data_refs is "),
        (caches_of, INVALID, r"group_data_refs\[0\] is "),
        (lambda: TWO.take([0, -1]), INVALID, r"blocks is .*-1"),
        (lambda: list(TWO.cut(1, longest_run=-1)), INVALID, "longest_run is -1"),
        (lambda: replace(TWO, lengths=TWO.lengths[:1]), INVALID, "lengths is 1; .* 2 addresses"),
        (lambda: replace(TWO, payload_starts=np.zeros(1, int)), INVALID, "payload_starts is 1"),
        (lambda: replace(TWO, addresses=TWO.addresses[:, None]), INVALID, r"not \w+ in 2"),
        (lambda: replace(TWO, device="cpu"), INVALID, "device is 'cpu'"),  # type: ignore[arg-type]
        (lambda: Descriptors.of_pieces([8], [8], device=None), INVALID, "device is None"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_described_is_an_error_that_names_it(
    call: Callable[[], object], error: type[KVXferError], match: str
) -> None:
    with pytest.raises(error, match=match):
        call()


def test_what_a_caller_writes_to_a_batch_is_not_in_the_next_one() -> None:
    with pytest.raises(ValueError, match="read-only"):
        describe(ROWS, 0, [1]).lengths[:] = 0
