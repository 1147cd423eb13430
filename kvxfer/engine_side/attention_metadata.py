"""Attention metadata: the order of a batch, and each group's block table and slots for kernels."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Self, TypeVar

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from kvxfer.checks import (
    require_instance,
    require_instances,
    require_integer,
    require_integers,
    require_one_per_group,
    require_sequence,
)
from kvxfer.engine_side.block_table import require_starts
from kvxfer.engine_side.multi_group_block_table import MultiGroupBlockTable
from kvxfer.errors import InvalidArgumentError, KVXferError
from kvxfer.kvcache.fragments import concatenated_ranges

M = TypeVar("M")


class BatchOrderError(KVXferError, ValueError):
    """Batch order that a group's attention backend needs and cannot get.

    Attributes:
        group: The group.
        builder: Its metadata builder.
        order: The required order: for each position, the index of the request that belongs there.
    """

    def __init__(self, group: int, builder: str, order: Sequence[int], detail: str) -> None:
        self.group = group
        self.builder = builder
        self.order = tuple(order)
        super().__init__(
            f"group {group}: {builder} needs the requests in the order {order!r}; {detail}"
        )


class TooManyGroupsError(InvalidArgumentError):
    """Model with more KV-cache groups than an attention backend supports.

    Attributes:
        group: The group that uses the backend.
        builder: The backend's metadata builder.
        max_num_groups: Groups that the backend supports.
        num_groups: Groups of the model.
    """

    def __init__(self, group: int, builder: str, max_num_groups: int, num_groups: int) -> None:
        self.group = group
        self.builder = builder
        self.max_num_groups = max_num_groups
        self.num_groups = num_groups
        super().__init__(
            "num_groups",
            num_groups,
            f"at most {max_num_groups}, the limit of {builder}, the builder of group {group}",
        )


@dataclass(frozen=True, slots=True, eq=False)
class TokenBatch:
    """Tokens that one step computes, request after request; on the host.

    Attributes:
        query_start_loc: int64, `(num_requests + 1,)`: the tokens of request r are those from
            `query_start_loc[r]` to `query_start_loc[r + 1]`.
        positions: int64, `(num_tokens,)`: the index of each token within its request.

    Raises:
        InvalidArgumentError: `query_start_loc` does not rise from 0 to the number of tokens.
    """

    query_start_loc: NDArray[np.int64]
    positions: NDArray[np.int64]

    def __post_init__(self) -> None:
        for name in ("query_start_loc", "positions"):
            object.__setattr__(self, name, require_integers(name, getattr(self, name)))
        require_starts(self.query_start_loc, len(self.positions))

    @classmethod
    def of(cls, positions: Sequence[ArrayLike]) -> Self:
        """Create a batch from the positions of each request's tokens."""
        require_sequence("positions", positions, "the positions of each request's tokens")
        places = [
            require_integers(f"positions[{request}]", of_one)
            for request, of_one in enumerate(positions)
        ]
        starts = np.cumsum([0, *map(len, places)])
        return cls(starts, np.concatenate([np.empty(0, np.int64), *places]))

    @property
    def num_requests(self) -> int:
        """Number of requests."""
        return len(self.query_start_loc) - 1

    @property
    def query_lens(self) -> NDArray[np.int64]:
        """Number of tokens that are computed for each request, `(num_requests,)`."""
        return np.diff(self.query_start_loc)

    def reorder(self, order: NDArray[np.int64]) -> "TokenBatch":
        """Return the same batch with request `order[i]` at position i.

        Raises:
            InvalidArgumentError: `order` is not a permutation of the requests.
        """
        order = require_integers("order", order)
        if not _is_sorted(np.sort(order)) or len(order) != self.num_requests:
            raise InvalidArgumentError("order", order, f"each of {self.num_requests} requests once")
        lens = self.query_lens[order]
        starts = np.concatenate(([0], np.cumsum(lens)))
        tokens = np.repeat(self.query_start_loc[:-1][order], lens) + concatenated_ranges(lens)
        return TokenBatch(starts, self.positions[tokens])


def decodes_first(batch: TokenBatch, *, max_decode_tokens: int = 1) -> NDArray[np.int64]:
    """Order requests of at most `max_decode_tokens` tokens first; otherwise keep their order.

    Returns:
        int64, `(num_requests,)`, as `AttentionMetadataBuilder.reorder` does.

    Raises:
        InvalidArgumentError: `max_decode_tokens` is negative.
    """
    require_instance("batch", batch, TokenBatch)
    max_decode_tokens = require_integer("max_decode_tokens", max_decode_tokens)
    return np.argsort(batch.query_lens > max_decode_tokens, kind="stable")


class AttentionMetadataBuilder(ABC, Generic[M]):
    """Builder of the metadata that the kernels of one KV-cache group need for a batch.

    Implementors must build from the arguments alone: the next batch overwrites the tensors.

    Attributes:
        max_num_groups: Maximum number of KV-cache groups, None for no limit; 1 for backends that
            keep one block table per batch, such as those for TPUs.
    """

    max_num_groups: int | None = None

    def reorder(self, batch: TokenBatch) -> NDArray[np.int64]:
        """Choose the order of the requests: request `order[i]` moves to position i.

        All groups compute the same batch, so only group 0 decides. The other groups must accept
        the order that group 0 chose.

        Returns:
            A permutation, int64, `(num_requests,)`; the present order unless overridden.
        """
        require_instance("batch", batch, TokenBatch)
        return np.arange(batch.num_requests)

    @abstractmethod
    def build(self, batch: TokenBatch, block_table: torch.Tensor, slot_mapping: torch.Tensor) -> M:
        """Build the metadata of one batch.

        Args:
            batch: The tokens, in their final order.
            block_table: Block table of the group, on the device, see `BlockTable.commit`.
            slot_mapping: Slots of the group, on the device, see `BlockTable.compute_slot_mapping`.
        """


class MultiGroupMetadataBuilder(Generic[M]):
    """Metadata builders of all KV-cache groups, over their block tables.

    Args:
        builders: The builder of each group.
        block_tables: The tables; row r belongs to the batch's request r.

    Raises:
        InvalidArgumentError: There is not one builder per group.
        TooManyGroupsError: A builder's backend serves fewer groups.
    """

    def __init__(
        self, builders: Sequence[AttentionMetadataBuilder[M]], block_tables: MultiGroupBlockTable
    ) -> None:
        require_instance("block_tables", block_tables, MultiGroupBlockTable)
        num_groups = len(block_tables)
        require_one_per_group("builders", builders, num_groups)
        require_instances("builders", builders, AttentionMetadataBuilder)
        for group, builder in enumerate(builders):
            limit = builder.max_num_groups
            if limit is not None and limit < num_groups:
                raise TooManyGroupsError(group, type(builder).__name__, limit, num_groups)
        self._builders = tuple(builders)
        self._block_tables = block_tables

    def reorder(self, batch: TokenBatch) -> tuple[TokenBatch, NDArray[np.int64]]:
        """Let group 0 reorder the batch and the rows of the block tables.

        Returns:
            The batch in its final order, and that order, in which the engine must put its own
            per-request data.

        Raises:
            BatchOrderError: Another group needs another order, or an order is not a permutation.
                The block tables are unchanged.
            InvalidArgumentError: The batch has more requests than the block tables have rows.
        """
        require_instance("batch", batch, TokenBatch)
        limit = self._block_tables.max_num_requests
        if batch.num_requests > limit:
            raise InvalidArgumentError("batch", batch.num_requests, f"at most {limit} requests")
        order = self._checked_order(0, batch)
        reordered = batch.reorder(order)
        for group in range(1, len(self._builders)):
            wanted = self._checked_order(group, reordered)
            if not _is_sorted(wanted):
                raise self._refusal(group, wanted, "only group 0 may reorder the batch")
        for first, second in _swaps(order):
            self._block_tables.swap_row(first, second)
        return reordered, order

    def build(self, batch: TokenBatch) -> list[M]:
        """Commit the block tables, map the tokens to slots, and build each group's metadata.

        Raises:
            InvalidArgumentError: The batch does not fit the block tables.
        """
        require_instance("batch", batch, TokenBatch)
        block_tables = self._block_tables.commit(batch.num_requests)
        slot_mappings = self._block_tables.compute_slot_mapping(
            batch.query_start_loc, batch.positions
        )
        return [
            builder.build(batch, block_table, slot_mapping)
            for builder, block_table, slot_mapping in zip(
                self._builders, block_tables, slot_mappings, strict=True
            )
        ]

    def _checked_order(self, group: int, batch: TokenBatch) -> NDArray[np.int64]:
        order = require_integers(f"order of group {group}", self._builders[group].reorder(batch))
        if len(order) != batch.num_requests or not _is_sorted(np.sort(order)):
            raise self._refusal(group, order, f"not an order of {batch.num_requests} requests")
        return order

    def _refusal(self, group: int, order: NDArray[np.int64], detail: str) -> BatchOrderError:
        return BatchOrderError(group, type(self._builders[group]).__name__, order.tolist(), detail)


def _is_sorted(order: NDArray[np.int64]) -> bool:
    return np.array_equal(order, np.arange(len(order)))


def _swaps(order: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Yield the swaps of rows that bring row `order[i]` to row i."""
    held = list(range(len(order)))  # row at each place
    place = held.copy()  # place of each row
    for to, row in enumerate(order.tolist()):
        if (source := place[row]) != to:
            yield to, source
            place[held[to]], held[source] = source, held[to]
