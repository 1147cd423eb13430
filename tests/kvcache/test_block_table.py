"""Block tables: refused arguments, padding, kernel blocks and the null block."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import ArrayLike

from kvxfer.engine_side import NULL_BLOCK_ID, PAD_SLOT, BlockTable, MultiGroupBlockTable
from kvxfer.errors import BlockIdError, InvalidArgumentError
from kvxfer.kvcache.spec import FullAttentionSpec, MambaSpec, UniformTypeKVCacheSpecs
from tests.kvcache.engine_views import config_of

FULL = FullAttentionSpec(tokens_per_block=16, num_kv_heads=1, head_dim=2, dtype=torch.float16)
SMALL = FullAttentionSpec(tokens_per_block=4, num_kv_heads=1, head_dim=2, dtype=torch.float16)
STATE = MambaSpec(tokens_per_block=16, shapes=((2,),), dtypes=(torch.float16,))


def make_table(tokens_per_block: int = 16, **options: Any) -> BlockTable:
    settings = {
        "num_blocks": 10,
        "max_num_requests": 3,
        "max_tokens_per_request": 60,
        "max_num_batched_tokens": 32,
    }
    return BlockTable(tokens_per_block, **(settings | options))


def make_tables(**options: Any) -> MultiGroupBlockTable:
    return MultiGroupBlockTable(
        config_of((FULL, "a"), (SMALL, "b"), num_blocks=10),
        max_num_requests=3,
        max_tokens_per_request=60,
        max_num_batched_tokens=32,
        **options,
    )


def test_rows_have_room_for_the_longest_request_and_are_padded_to_the_alignment() -> None:
    table = make_table(row_alignment_tokens=128)
    assert table.max_blocks_per_request == 4
    assert tuple(table.device_table.shape) == (3, 8)  # 8 blocks of 16 tokens are 128
    assert tuple(make_table(row_alignment_tokens=1).device_table.shape) == (3, 4)
    # 48 tokens are the least that blocks of 16 fill with steps of 24.
    assert tuple(make_table(row_alignment_tokens=24).device_table.shape) == (3, 6)


def test_the_slot_of_a_token_does_not_depend_on_the_kernels_blocks() -> None:
    starts, positions = [0, 4, 4, 7], [15, 16, 0, 31, 47, 5, 33]
    mappings = []
    for kernel_tokens in (1, 2, 4, 8, 16):
        table = make_table(tokens_per_kernel_block=kernel_tokens)
        table.add_row([9, 3], 0)
        table.add_row([7, NULL_BLOCK_ID, 2], 2)
        mappings.append(table.compute_slot_mapping(starts, positions).tolist())
    assert mappings == [[159, 48, 144, 63, 47, 117, 33]] * 5


def test_tokens_of_recurrent_layers_have_no_slots_but_their_rows_have_blocks() -> None:
    per_layer = UniformTypeKVCacheSpecs(tokens_per_block=16, layer_specs={"b": STATE, "c": STATE})
    tables = MultiGroupBlockTable(
        config_of((FULL, "a"), (per_layer, "bc"), (STATE, "d"), num_blocks=10),
        max_num_requests=1,
        max_tokens_per_request=32,
        max_num_batched_tokens=2,
    )
    tables.add_row([[1, 2], [3], [4]], 0)
    assert [table[0, 0].item() for table in tables.commit(1)] == [1, 3, 4]
    slots = tables.compute_slot_mapping([0, 2], [0, 31])
    assert [each.tolist() for each in slots] == [[16, 47], [PAD_SLOT] * 2, [PAD_SLOT] * 2]


@pytest.mark.parametrize(
    ("block_ids", "error", "match"),
    [
        ([1, 10], BlockIdError, r"block_ids\[0\] is 10; expected 0 <= block id < 10"),
        ([-1], BlockIdError, r"block_ids\[0\] is -1"),
        ([[1]], InvalidArgumentError, r"block_ids\[0\] is \[\[1\]\]; expected integers in one"),
        ([1.0], InvalidArgumentError, r"integers in one dimension"),
        ([True], InvalidArgumentError, r"integers in one dimension"),
        (3, InvalidArgumentError, r"integers in one dimension"),
        ([1, 1, 2, 2, 3], InvalidArgumentError, r"at most 4 more in row 0"),
    ],
)
def test_blocks_that_cannot_be_are_refused(
    block_ids: ArrayLike, error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        make_table().append_row(block_ids, 0)


@pytest.mark.parametrize("row_index", [-1, 3])
def test_a_row_that_is_not_there_is_refused_by_everything_that_takes_one(row_index: int) -> None:
    tables = make_tables()
    tables.add_row([[1], [2]], 0)
    calls: list[Callable[[], object]] = [
        lambda: tables.append_row([[], []], row_index),
        lambda: tables.add_row([[], []], row_index),
        lambda: tables.clear_row(row_index),
        lambda: tables.move_row(0, row_index),
        lambda: tables.move_row(row_index, 0),
        lambda: tables.swap_row(0, row_index),
        lambda: tables.swap_row(row_index, 0),
        lambda: tables[0].row(row_index),
        lambda: tables[0].truncate_row(row_index, 0),
    ]
    names = "(row_index|source|target|first|second)"
    for call in calls:
        with pytest.raises(InvalidArgumentError, match=rf"{names} is {row_index}; .* < 3"):
            call()
    assert [table.row(0).tolist() for table in tables.tables] == [[1], [2]]


@pytest.mark.parametrize(
    ("starts", "positions", "match"),
    [
        ([0, 2], [0, 16], r"positions\[1\] is 16; expected one of the 16 tokens that row 0 of gr"),
        ([0, 1, 2], [0, 0], r"positions\[1\] is 0; expected one of the 0 tokens that row 1 of gr"),
        ([0, 1], [-1], r"positions\[0\] is -1"),
        ([0, 1], [0.5], r"positions is \[0.5\]; expected integers"),
        ([0, 1], [[0]], r"positions is \[\[0\]\]; expected integers"),
        ([0, 1], [0, 1], r"query_start_loc is \[0, 1\]; expected numbers that rise from 0 to 2"),
        ([1, 2], [0, 1], r"rise from 0 to 2"),
        ([0, 2, 1, 2], [0, 1], r"rise from 0 to 2"),
        ([], [], r"query_start_loc is -1; expected 0 to 3 requests"),
        ([0, 0, 0, 0, 0], [], r"query_start_loc is 4; expected 0 to 3 requests"),
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


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"tokens_per_kernel_block": 3}, r"tokens_per_kernel_block\[0\] is 3; expected a divisor"),
        ({"tokens_per_kernel_block": 32}, r"a divisor of the 16 tokens"),
        ({"tokens_per_kernel_block": -4}, r"a positive integer"),
        ({"num_blocks": 0}, r"num_blocks is 0"),
        ({"num_blocks": 1 << 31}, r"num_blocks is 2147483648; expected at most 2147483647"),
        ({"num_blocks": 1 << 29, "tokens_per_kernel_block": 4}, r"expected at most 536870911"),
        ({"max_num_requests": 0}, r"max_num_requests is 0"),
        ({"max_tokens_per_request": 0}, r"max_tokens_per_request is 0"),
        ({"max_num_batched_tokens": 0}, r"max_num_batched_tokens is 0"),
        ({"row_alignment_tokens": 0}, r"row_alignment_tokens is 0"),
    ],
)
def test_tables_that_cannot_be_are_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(InvalidArgumentError, match=match):
        make_table(**options)


def test_every_group_is_given_its_own_blocks_and_counts_are_checked() -> None:
    tables = make_tables()
    for num_requests in (-1, 4):
        with pytest.raises(InvalidArgumentError, match=rf"num_requests is {num_requests}; .*0 to"):
            tables.commit(num_requests)
    tables.add_row([[1, 2, 3], []], 0)
    for num_blocks, left in ((5, [1, 2, 3]), (2, [1, 2])):
        tables[0].truncate_row(0, num_blocks)
        assert tables[0].row(0).tolist() == left
    with pytest.raises(InvalidArgumentError, match="num_blocks is -1"):
        tables[0].truncate_row(0, -1)
    for call in (tables.append_row, tables.add_row):
        with pytest.raises(InvalidArgumentError, match="one for each of 2 groups"):
            call([[1]], 0)
    with pytest.raises(InvalidArgumentError, match="one for each of 2 groups"):
        make_tables(tokens_per_kernel_block=[4])


def test_an_append_that_one_group_refuses_changes_none() -> None:
    tables = make_tables()
    tables.add_row([[1], [2, 3]], 1)
    with pytest.raises(BlockIdError, match=r"block_ids\[1\] is 10"):
        tables.append_row([[4, 5], [6, 10]], 1)
    assert [table.row(1).tolist() for table in tables.tables] == [[1], [2, 3]]
    full, _ = tables.commit(2)
    assert full[1, :3].tolist() == [1, 0, 0]
    with pytest.raises(BlockIdError, match=r"block_ids\[1\]"):
        tables.add_row([[4, 5], [6, 10]], 1)
    assert [table.row(1).tolist() for table in tables.tables] == [[], []]


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
