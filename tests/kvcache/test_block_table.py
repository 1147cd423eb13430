"""Block tables against plain lists; metadata builders: one order of the batch for all groups."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from numpy.typing import ArrayLike, NDArray

from kvxfer.engine_side import (
    NULL_BLOCK_ID,
    PAD_SLOT,
    AttentionMetadataBuilder,
    BatchOrderError,
    BlockTable,
    MultiGroupBlockTable,
    MultiGroupMetadataBuilder,
    TokenBatch,
    TooManyGroupsError,
    decodes_first,
)
from kvxfer.engine_side.attention_metadata import _swaps
from kvxfer.errors import BlockIdError, InvalidArgumentError
from kvxfer.kvcache.config import KVCacheConfig, KVCacheGroup
from kvxfer.kvcache.spec import FullAttentionSpec, KVCacheSpec, MambaSpec, SlidingWindowSpec
from tests.examples import examples
from tests.kvcache.test_canonical import config_of

FULL = FullAttentionSpec(tokens_per_block=16, num_kv_heads=1, head_dim=2, dtype=torch.float16)
SMALL = FullAttentionSpec(tokens_per_block=4, num_kv_heads=1, head_dim=2, dtype=torch.float16)
BOUNDS: dict[str, Any] = {"max_num_requests": 3, "max_tokens_per_request": 60}
BOUNDS["max_num_batched_tokens"] = 32


def make_table(**options: Any) -> BlockTable:
    return BlockTable(16, num_blocks=10, **(BOUNDS | options))


@pytest.mark.parametrize(
    ("block_ids", "error", "match"),
    [
        ([1, 10], BlockIdError, r"block_ids\[0\] is 10; expected 0 <= block id < 10"),
        ([1, 1, 2, 2, 3], InvalidArgumentError, r"at most 4 more in row 0"),
    ],
)
def test_blocks_that_cannot_be_are_refused(
    block_ids: ArrayLike, error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        make_table().append_row(block_ids, 0)


@pytest.mark.parametrize(
    ("starts", "positions", "match"),
    [
        ([0, 2], [0, 16], r"positions\[1\] is 16; expected one of the 16 tokens that row 0 of gr"),
        ([0, 2, 1, 2], [0, 1], r"rise from 0 to 2"),
        ([0, 33], [0] * 33, r"positions is 33; expected at most 32 tokens"),
    ],
)
def test_batches_that_cannot_be_are_refused(
    starts: ArrayLike, positions: ArrayLike, match: str
) -> None:
    table = make_table()
    table.add_row([4], 0)
    table.compute_slot_mapping([0, 1], [3])
    with pytest.raises(InvalidArgumentError, match=match):
        table.compute_slot_mapping(starts, positions)
    assert table.slot_mapping[:2].tolist() == [67, PAD_SLOT], "the last batch is still there"
    for wrong in ([], [0, 1], [0, 3], [1, 2], [0, 2, 1, 2]):
        with pytest.raises(InvalidArgumentError, match="query_start_loc"):
            TokenBatch(np.array(wrong), np.array([5, 6]))


def test_an_append_that_one_group_refuses_changes_none() -> None:
    groups = config_of((FULL, "a"), (SMALL, "b"), num_blocks=10)
    tables = MultiGroupBlockTable(groups, **BOUNDS)
    tables.add_row([[1], [2, 3]], 1)
    with pytest.raises(BlockIdError, match=r"block_ids\[1\] is 10"):
        tables.append_row([[4, 5], [6, 10]], 1)
    assert [table.row(1).tolist() for table in tables.tables] == [[1], [2, 3]]
    full, _ = tables.commit(2)
    assert full[1, :3].tolist() == [1, 0, 0]
    with pytest.raises(BlockIdError, match=r"block_ids\[1\]"):
        tables.add_row([[4, 5], [6, 10]], 1)
    assert [table.row(1).tolist() for table in tables.tables] == [[], []]


def test_another_null_block_than_the_one_of_padding_is_refused() -> None:
    elsewhere = config_of((FULL, "a"), num_blocks=10, null_block_id=5)
    with pytest.raises(InvalidArgumentError, match="null_block_id is 5; expected 0"):
        MultiGroupBlockTable(elsewhere, **BOUNDS)


@pytest.mark.gpu
def test_a_commit_shows_the_device_the_rows_as_they_were_when_it_was_called() -> None:
    device = torch.device("cuda")
    table = make_table(max_num_requests=2, max_tokens_per_request=1 << 16, device=device)
    rng = np.random.default_rng(0)
    for _ in range(50):
        ids = rng.integers(1, 10, table.max_blocks_per_request)
        table.add_row(ids, 0)
        seen = table.commit(1).clone()
        table.clear_row(0)
        assert seen[0, : len(ids)].tolist() == ids.tolist()
    slots = table.compute_slot_mapping([0], [])
    assert slots.device.type == "cuda"


NUM_BLOCKS = 12
NUM_ROWS = 4
MAX_TOKENS = 40
MAX_BATCHED_TOKENS = 64
ALIGNMENT_TOKENS = 24

Ids: TypeAlias = list[int]

WHOLE = FullAttentionSpec(tokens_per_block=8, num_kv_heads=1, head_dim=2, dtype=torch.float16)
WINDOW = SlidingWindowSpec(
    tokens_per_block=4, num_kv_heads=1, head_dim=2, dtype=torch.float16, sliding_window=6
)
STATE = MambaSpec(tokens_per_block=20, shapes=((2,),), dtypes=(torch.float16,))
SPECS: tuple[KVCacheSpec, ...] = (WHOLE, WINDOW, STATE)

rows = st.integers(0, NUM_ROWS - 1)


class BlockTableMachine(RuleBasedStateMachine):
    """State machine of the tables of three groups, against a plain list of block ids per row."""

    @initialize(full=st.sampled_from([2, 4, 8]), window=st.sampled_from([1, 2, 4]))
    def make(self, full: int, window: int) -> None:
        groups = tuple(KVCacheGroup(spec, (str(index),)) for index, spec in enumerate(SPECS))
        self.kernel_tokens = [full, window, STATE.tokens_per_block]
        self.tables = MultiGroupBlockTable(
            KVCacheConfig(NUM_BLOCKS, groups),
            max_num_requests=NUM_ROWS,
            max_tokens_per_request=MAX_TOKENS,
            max_num_batched_tokens=MAX_BATCHED_TOKENS,
            tokens_per_kernel_block=self.kernel_tokens,
            row_alignment_tokens=ALIGNMENT_TOKENS,
        )
        self.model: list[list[Ids]] = [[[] for _ in range(NUM_ROWS)] for _ in SPECS]
        self.committed: list[list[Ids]] = [[[] for _ in range(NUM_ROWS)] for _ in SPECS]

    def room(self, group: int, row: int) -> int:
        return -(-MAX_TOKENS // SPECS[group].tokens_per_block) - len(self.model[group][row])

    def put(self, put: Callable[..., None], data: st.DataObject, row: int) -> None:
        rooms = [self.room(group, row) for group in range(len(SPECS))]
        block_id = st.integers(0, NUM_BLOCKS - 1)
        block_ids = [data.draw(st.lists(block_id, max_size=room)) for room in rooms]
        put(block_ids, row)
        for group, ids in enumerate(block_ids):
            self.model[group][row] += ids

    @rule(data=st.data(), row=rows)
    def append_row(self, data: st.DataObject, row: int) -> None:
        self.put(self.tables.append_row, data, row)

    @rule(data=st.data(), row=rows)
    def add_row(self, data: st.DataObject, row: int) -> None:
        self.clear_row(row)
        self.put(self.tables.add_row, data, row)

    @rule(row=rows)
    def clear_row(self, row: int) -> None:
        self.tables.clear_row(row)
        for group in self.model:
            group[row] = []

    @rule(row=rows, num_blocks=st.integers(0, 6))
    def truncate_row(self, row: int, num_blocks: int) -> None:
        for table, group in zip(self.tables.tables, self.model, strict=True):
            table.truncate_row(row, num_blocks)
            del group[row][num_blocks:]

    @rule(source=rows, destination=rows)
    def move_row(self, source: int, destination: int) -> None:
        self.tables.move_row(source, destination)
        for group in self.model:
            moved = group[source]
            group[source] = []
            group[destination] = moved

    @rule(first=rows, second=rows)
    def swap_row(self, first: int, second: int) -> None:
        self.tables.swap_row(first, second)
        for group in self.model:
            group[first], group[second] = group[second], group[first]

    @rule(num_requests=st.integers(0, NUM_ROWS))
    def commit(self, num_requests: int) -> None:
        views = self.tables.commit(num_requests)
        assert [len(view) for view in views] == [num_requests] * len(SPECS)
        for committed, group in zip(self.committed, self.model, strict=True):
            committed[:num_requests] = [list(row) for row in group[:num_requests]]

    @rule(data=st.data())
    def compute_slot_mapping(self, data: st.DataObject) -> None:
        num_requests = data.draw(st.integers(0, NUM_ROWS))
        batch = []
        for row in range(num_requests):
            num_tokens = min(len(self.model[g][row]) * SPECS[g].tokens_per_block for g in (0, 1))
            limit = MAX_BATCHED_TOKENS // NUM_ROWS if num_tokens else 0
            places = st.integers(0, max(0, num_tokens - 1))
            batch.append(data.draw(st.lists(places, max_size=limit)))
        starts = np.cumsum([0, *map(len, batch)])
        positions = [place for places in batch for place in places]
        mappings = self.tables.compute_slot_mapping(starts, positions)
        for group, mapping in enumerate(mappings):
            expected = [
                self.slot(group, row, place) for row, places in enumerate(batch) for place in places
            ]
            assert mapping.tolist() == expected
            padding = self.tables[group].slot_mapping[len(positions) :]
            assert padding.tolist() == [PAD_SLOT] * (MAX_BATCHED_TOKENS - len(positions))

    def slot(self, group: int, row: int, place: int) -> int:
        """Compute the slot of a token: its index if all blocks lay one after the other."""
        if isinstance(SPECS[group], MambaSpec):
            return PAD_SLOT
        tokens_per_block = SPECS[group].tokens_per_block
        block_id = self.model[group][row][place // tokens_per_block]
        if block_id == NULL_BLOCK_ID:
            return PAD_SLOT
        return block_id * tokens_per_block + place % tokens_per_block

    @invariant()
    def a_row_has_the_ids_that_were_put_there(self) -> None:
        for table, group in zip(self.tables.tables, self.model, strict=True):
            assert [table.row(row).tolist() for row in range(NUM_ROWS)] == group
            assert [table.num_blocks_of(row) for row in range(NUM_ROWS)] == list(map(len, group))

    @invariant()
    def the_device_has_what_was_committed_in_kernel_blocks_padded_with_the_null_block(self) -> None:
        for group, committed in enumerate(self.committed):
            table = self.tables[group].device_table.tolist()
            ratio = SPECS[group].tokens_per_block // self.kernel_tokens[group]
            for row, block_ids in zip(table, committed, strict=True):
                expected = [block * ratio + j for block in block_ids for j in range(ratio)]
                assert row == expected + [NULL_BLOCK_ID] * (len(row) - len(expected))
                assert len(row) * self.kernel_tokens[group] % ALIGNMENT_TOKENS == 0


TestBlockTableMachine = BlockTableMachine.TestCase
TestBlockTableMachine.settings = examples(60, steps=30)


def test_the_null_block_and_the_padding_are_vllms() -> None:
    utils = pytest.importorskip("vllm.v1.attention.backends.utils", reason="needs vLLM")
    runner = pytest.importorskip("vllm.v1.worker.gpu_model_runner", reason="needs vLLM")
    assert (PAD_SLOT, NULL_BLOCK_ID) == (utils.PAD_SLOT_ID, runner.NULL_BLOCK_ID)


MOST_REQUESTS = 6


class PlainBuilder(AttentionMetadataBuilder[dict[str, Any]]):
    def build(
        self, batch: TokenBatch, block_table: torch.Tensor, slot_mapping: torch.Tensor
    ) -> dict[str, Any]:
        return {"blocks": block_table[:, 0].tolist(), "slots": slot_mapping.tolist()}


class ReorderingBuilder(PlainBuilder):
    def __init__(self, order: Callable[[TokenBatch], NDArray[np.int64]] = decodes_first) -> None:
        self.order = order

    def reorder(self, batch: TokenBatch) -> NDArray[np.int64]:
        return self.order(batch)


class OneTableBuilder(PlainBuilder):
    max_num_groups = 1


def make_tables(num_groups: int, num_requests: int = 0) -> MultiGroupBlockTable:
    """Make tables in which request r has block `1 + r + 10 * group`."""
    tables = MultiGroupBlockTable(
        config_of(*((SMALL, letter) for letter in "abc"[:num_groups]), num_blocks=40),
        max_num_requests=MOST_REQUESTS,
        max_tokens_per_request=16,
        max_num_batched_tokens=64,
    )
    for row in range(num_requests):
        tables.add_row([[1 + row + 10 * group] for group in range(num_groups)], row)
    return tables


def first_blocks(tables: MultiGroupBlockTable) -> list[list[int]]:
    return [
        [int(t.row(r)[0]) for r in range(MOST_REQUESTS) if len(t.row(r))] for t in tables.tables
    ]


def test_each_group_is_built_from_its_own_table() -> None:
    builder = MultiGroupMetadataBuilder([PlainBuilder(), PlainBuilder()], make_tables(2, 2))
    assert builder.build(TokenBatch.of([[3], [0, 1]])) == [
        {"blocks": [1, 2], "slots": [7, 8, 9]},
        {"blocks": [11, 12], "slots": [47, 48, 49]},
    ]


def test_another_group_that_wants_to_reorder_is_an_error_that_names_it() -> None:
    tables = make_tables(3, 3)
    builders = [PlainBuilder(), PlainBuilder(), ReorderingBuilder()]
    builder = MultiGroupMetadataBuilder(builders, tables)
    with pytest.raises(BatchOrderError, match=r"^group 2: ReorderingBuilder .* only group 0 may"):
        builder.reorder(TokenBatch.of([[0, 1], [3], [2]]))
    assert first_blocks(tables)[0] == [1, 2, 3]
    batch = TokenBatch.of([[3], [2], [0, 1]])
    reordered, order = builder.reorder(batch)
    assert order.tolist() == [0, 1, 2]
    assert reordered.positions.tolist() == batch.positions.tolist()
    twice: Any = [0, 0]
    builder = MultiGroupMetadataBuilder([ReorderingBuilder(lambda _: twice)], make_tables(1, 2))
    with pytest.raises(BatchOrderError, match=r"group 0: .* not an order of 2 requests"):
        builder.reorder(TokenBatch.of([[0], [0]]))


def test_a_backend_for_one_group_is_refused_where_there_are_several() -> None:
    MultiGroupMetadataBuilder([OneTableBuilder()], make_tables(1))
    with pytest.raises(TooManyGroupsError, match=r"num_groups is 3; .* at most 1") as caught:
        MultiGroupMetadataBuilder(
            [PlainBuilder(), OneTableBuilder(), PlainBuilder()], make_tables(3)
        )
    assert "OneTableBuilder, the builder of group 1" in str(caught.value)
    assert (caught.value.group, caught.value.num_groups) == (1, 3)
    with pytest.raises(InvalidArgumentError, match="one for each of 2 groups"):
        MultiGroupMetadataBuilder([PlainBuilder()], make_tables(2))


def test_decodes_are_those_of_few_tokens() -> None:
    batch = TokenBatch.of([[0, 1, 2], [0, 1], [5], [6]])
    assert decodes_first(batch).tolist() == [2, 3, 0, 1]
    assert decodes_first(batch, max_decode_tokens=2).tolist() == [1, 2, 3, 0]


@given(
    requests=st.lists(st.lists(st.integers(0, 3), max_size=4), max_size=MOST_REQUESTS),
    data=st.data(),
)
def test_any_order_carries_tokens_and_blocks_of_a_request_along(
    requests: list[list[int]], data: st.DataObject
) -> None:
    order = np.array(data.draw(st.permutations(range(len(requests)))), np.int64)
    tables = make_tables(2, len(requests))
    builder = MultiGroupMetadataBuilder(
        [ReorderingBuilder(lambda _: order), PlainBuilder()], tables
    )
    batch, _ = builder.reorder(TokenBatch.of(requests))
    starts = batch.query_start_loc
    found = [batch.positions[start:stop].tolist() for start, stop in pairwise(starts.tolist())]
    assert found == [requests[request] for request in order]
    assert first_blocks(tables) == [
        [1 + int(request) + 10 * group for request in order] for group in range(2)
    ]


class Counted(np.ndarray[Any, np.dtype[np.int64]]):
    num_looks = 0

    def __getitem__(self, at: Any) -> Any:
        Counted.num_looks += 1
        return super().__getitem__(at)


def test_no_order_takes_more_looks_than_twice_its_requests() -> None:
    """With one decode behind prefills only, each prefill looked through all before it."""
    order = np.roll(np.arange(100), 1).view(Counted)
    assert len(list(_swaps(order))) == 99
    assert Counted.num_looks <= 200
