"""Block tables: refused arguments, padding, kernel blocks and the null block."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import ArrayLike

from kvxfer.engine_side import PAD_SLOT, BlockTable, MultiGroupBlockTable
from kvxfer.errors import BlockIdError, InvalidArgumentError
from kvxfer.kvcache.spec import FullAttentionSpec
from tests.kvcache.engine_views import config_of

FULL = FullAttentionSpec(tokens_per_block=16, num_kv_heads=1, head_dim=2, dtype=torch.float16)
SMALL = FullAttentionSpec(tokens_per_block=4, num_kv_heads=1, head_dim=2, dtype=torch.float16)


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


@pytest.mark.parametrize(
    ("block_ids", "error", "match"),
    [
        ([1, 10], BlockIdError, r"block_ids\[0\] is 10; expected 0 <= block id < 10"),
        ([-1], BlockIdError, r"block_ids\[0\] is -1"),
        ([[1]], InvalidArgumentError, r"block_ids\[0\] is \[\[1\]\]; expected integers in one"),
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
        ([0, 1, 2], [0, 0], r"positions\[1\] is 0; expected one of the 0 tokens that row 1 of gr"),
        ([0, 1], [-1], r"positions\[0\] is -1"),
        ([0, 1], [0.5], r"positions is \[0.5\]; expected integers"),
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
    ("call", "match"),
    [
        (lambda: make_tables().append_row([[], []], 3), "row_index is 3; .* < 3"),
        (lambda: make_tables().move_row(0, 3), "target is 3; .* < 3"),
        (lambda: make_tables().commit(4), "num_requests is 4; .*0 to"),
        (lambda: make_tables().add_row([[1]], 0), "one for each of 2 groups"),
        (lambda: make_tables(tokens_per_kernel_block=[4]), "one for each of 2 groups"),
        (lambda: make_table(tokens_per_kernel_block=3), r"block\[0\] is 3; expected a divisor"),
        (lambda: make_table(tokens_per_kernel_block=32), "a divisor of the 16 tokens"),
        (lambda: make_table(num_blocks=1 << 31), "num_blocks is 2147483648; .* 2147483647"),
        (
            lambda: make_table(num_blocks=1 << 29, tokens_per_kernel_block=4),
            "expected at most 536870911",
        ),
    ],
)
def test_what_does_not_fit_the_tables_is_refused(call: Callable[[], object], match: str) -> None:
    with pytest.raises(InvalidArgumentError, match=match):
        call()


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
