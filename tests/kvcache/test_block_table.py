"""Block tables: refused arguments, padding, kernel blocks and the null block."""

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
