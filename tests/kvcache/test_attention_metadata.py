"""Metadata builders: one order of the batch for all groups, and each group's own tables."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvxfer.engine_side import (
    AttentionMetadataBuilder,
    BatchOrderError,
    MultiGroupBlockTable,
    MultiGroupMetadataBuilder,
    TokenBatch,
    TooManyGroupsError,
    decodes_first,
)
from kvxfer.errors import InvalidArgumentError
from kvxfer.kvcache.spec import FullAttentionSpec
from tests.kvcache.engine_views import config_of

SPEC = FullAttentionSpec(tokens_per_block=4, num_kv_heads=1, head_dim=2, dtype=torch.float16)
MAX_REQUESTS = 6


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
        config_of(*((SPEC, letter) for letter in "abc"[:num_groups]), num_blocks=40),
        max_num_requests=MAX_REQUESTS,
        max_tokens_per_request=16,
        max_num_batched_tokens=64,
    )
    for row in range(num_requests):
        tables.add_row([[1 + row + 10 * group] for group in range(num_groups)], row)
    return tables


def first_blocks(tables: MultiGroupBlockTable) -> list[list[int]]:
    return [[int(t.row(r)[0]) for r in range(MAX_REQUESTS) if len(t.row(r))] for t in tables.tables]


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


def test_what_is_no_order_of_the_batch_is_refused() -> None:
    reordering = ReorderingBuilder(lambda _: np.array([0, 0]))
    builder = MultiGroupMetadataBuilder([reordering], make_tables(1, 2))
    with pytest.raises(BatchOrderError, match=r"group 0: .* not an order of 2 requests"):
        builder.reorder(TokenBatch.of([[0], [0]]))


def test_a_backend_for_one_group_is_refused_where_there_are_several() -> None:
    MultiGroupMetadataBuilder([OneTableBuilder()], make_tables(1))
    with pytest.raises(TooManyGroupsError, match=r"num_groups is 3; .* at most 1") as caught:
        MultiGroupMetadataBuilder(
            [PlainBuilder(), OneTableBuilder(), PlainBuilder()], make_tables(3)
        )
    assert "OneTableBuilder, the metadata builder of group 1," in str(caught.value)
    assert (caught.value.group, caught.value.num_groups) == (1, 3)
    with pytest.raises(InvalidArgumentError, match="one for each of 2 groups"):
        MultiGroupMetadataBuilder([PlainBuilder()], make_tables(2))


def test_decodes_are_those_of_few_tokens() -> None:
    batch = TokenBatch.of([[0, 1, 2], [0, 1], [5], [6]])
    assert decodes_first(batch).tolist() == [2, 3, 0, 1]
    assert decodes_first(batch, max_decode_tokens=2).tolist() == [1, 2, 3, 0]


@given(
    requests=st.lists(st.lists(st.integers(0, 3), max_size=4), max_size=MAX_REQUESTS),
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
