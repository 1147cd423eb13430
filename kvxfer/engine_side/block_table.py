"""Block tables: the blocks of each request, and the slot of each token."""

from math import gcd
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from kvxfer.checks import require_flag, require_integer, require_integers, require_positive
from kvxfer.errors import InvalidArgumentError
from kvxfer.kvcache.memory_region import HOST, require_device
from kvxfer.kvcache.payload_memory import require_block_ids

NULL_BLOCK_ID = 0
"""Id of the null block, a placeholder where a request has no block, e.g. outside a window."""

PAD_SLOT = -1
"""Slot of a token whose keys and values must not be written.

Source: `vllm/v1/attention/backends/utils.py`, `PAD_SLOT_ID`.
"""

ROW_ALIGNMENT_TOKENS = 128
"""Tokens of a row that a kernel reads in one step; a row is padded to whole steps.

Source: `vllm/v1/worker/block_table.py`, `get_block_table_width`.
"""


class DeviceArray:
    """Zeroed host array with a device copy that changes only at `commit`.

    A commit does not wait for the device: it copies to a pinned staging buffer, from which the
    device copies in stream order, so the host array may be changed at once. A commit waits only
    for the device copy of the previous commit.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.device = torch.zeros(shape, dtype=dtype, device=device)
        self._staged = self.device
        self._copied: torch.Event | None = None
        if device.type != "cpu":
            self._staged = torch.zeros(shape, dtype=dtype, device=HOST, pin_memory=True)
            self._copied = torch.Event(self.device.device)
        self._staged_array: NDArray[Any] = self._staged.numpy()
        self.host = np.zeros_like(self._staged_array)

    def commit(self, stop: int) -> torch.Tensor:
        """Copy `host[:stop]` to the device, and return the view `device[:stop]`."""
        shown = self.device[:stop]
        if self._copied is not None:
            self._copied.synchronize()
        # numpy, because torch wakes threads for 100 KB, which is slow on a busy machine.
        np.copyto(self._staged_array[:stop], self.host[:stop])
        if self._copied is not None:
            shown.copy_(self._staged[:stop], non_blocking=True)
            self._copied.record(torch.accelerator.current_stream(shown.device))
        return shown


def require_starts(query_start_loc: NDArray[np.int64], num_tokens: int) -> None:
    """Check that the requests' tokens follow each other, from 0 to `num_tokens`."""
    steps = np.diff(query_start_loc, prepend=0, append=num_tokens)
    if not len(query_start_loc) or steps[0] or steps[-1] or (steps < 0).any():
        wanted = f"numbers that rise from 0 to {num_tokens}"
        raise InvalidArgumentError("query_start_loc", query_start_loc.tolist(), wanted)


class BlockTable:
    """Block table of one KV-cache group: the blocks of every request of a batch, one row each.

    The table is written on the host; the device copy changes only at `commit`. If the kernel's
    blocks are smaller than the block, the table lists kernel blocks: block b is the kernel blocks
    `b * ratio` to `b * ratio + ratio - 1`. Unused entries of a row name the null block, so rows
    beyond the batch may be committed as padding.

    Args:
        tokens_per_block: Tokens of a block.
        num_blocks: Blocks of the cache, the null block included.
        max_num_requests: Rows.
        max_tokens_per_request: Tokens that a row must have room for.
        max_num_batched_tokens: Tokens of the largest batch.
        tokens_per_kernel_block: Tokens of the kernel's blocks, `tokens_per_block` unless given.
        row_alignment_tokens: Rows are padded to a multiple of this number of tokens.
        tokens_have_slots: False for recurrent layers, which keep states instead of tokens.
        group: Index of the KV-cache group, for errors.
        device: Device of the kernel.

    Attributes:
        device_table: int32, `(max_num_requests, num_columns)`, on the device, as committed.
        slot_mapping: int64, `(max_num_batched_tokens,)`, on the device, of the last batch.

    Raises:
        InvalidArgumentError: A count is not positive, the kernel's blocks do not fill a block, or
            ids of kernel blocks do not fit in 32 bits.
    """

    def __init__(
        self,
        tokens_per_block: int,
        *,
        num_blocks: int,
        max_num_requests: int,
        max_tokens_per_request: int,
        max_num_batched_tokens: int,
        tokens_per_kernel_block: int | None = None,
        row_alignment_tokens: int = ROW_ALIGNMENT_TOKENS,
        tokens_have_slots: bool = True,
        group: int = 0,
        device: torch.device = HOST,
    ) -> None:
        self.group = group = require_integer("group", group)
        self.num_blocks = num_blocks = require_positive("num_blocks", num_blocks)
        tokens_per_block = require_positive("tokens_per_block", tokens_per_block)
        max_num_requests = require_positive("max_num_requests", max_num_requests)
        max_tokens = require_positive("max_tokens_per_request", max_tokens_per_request)
        max_num_tokens = require_positive("max_num_batched_tokens", max_num_batched_tokens)
        alignment = require_positive("row_alignment_tokens", row_alignment_tokens)
        kernel_tokens, name = tokens_per_block, f"tokens_per_kernel_block[{group}]"
        if tokens_per_kernel_block is not None:
            kernel_tokens = require_positive(name, tokens_per_kernel_block)
        if tokens_per_block % kernel_tokens:
            wanted = f"a divisor of the {tokens_per_block} tokens of a block"
            raise InvalidArgumentError(name, kernel_tokens, wanted)
        self.kernel_blocks_per_block = tokens_per_block // kernel_tokens
        self.tokens_per_kernel_block = kernel_tokens
        if num_blocks * self.kernel_blocks_per_block > np.iinfo(np.int32).max:
            limit = np.iinfo(np.int32).max // self.kernel_blocks_per_block
            raise InvalidArgumentError("num_blocks", num_blocks, f"at most {limit}")
        self.max_blocks_per_request = -(-max_tokens // tokens_per_block)
        columns = self.max_blocks_per_request * self.kernel_blocks_per_block
        step = alignment // gcd(alignment, kernel_tokens)
        columns = -(-columns // step) * step
        device = require_device("device", device)
        self._tokens_have_slots = require_flag("tokens_have_slots", tokens_have_slots)
        self._table = DeviceArray((max_num_requests, columns), torch.int32, device)
        self._slots = DeviceArray((max_num_tokens,), torch.int64, device)
        self.device_table, self.slot_mapping = self._table.device, self._slots.device
        self._rows: NDArray[np.int32] = self._table.host
        self._num_blocks = np.zeros(max_num_requests, np.int64)
        self.slot_mapping.fill_(PAD_SLOT)

    def row(self, row_index: int) -> NDArray[np.int32]:
        """Return a copy of a row's block ids (not kernel block ids), in request order.

        Raises:
            InvalidArgumentError: There is no such row; likewise in every method that takes one.
        """
        row_index, ratio = self._checked_row("row_index", row_index), self.kernel_blocks_per_block
        return self._rows[row_index, : self.num_blocks_of(row_index) * ratio : ratio] // ratio

    def num_blocks_of(self, row_index: int) -> int:
        """Count the blocks of a row, null blocks included."""
        return int(self._num_blocks[self._checked_row("row_index", row_index)])

    def append_row(self, block_ids: ArrayLike, row_index: int) -> None:
        """Add blocks to the end of a row.

        Args:
            block_ids: Integers, `(n,)`, in request order; may be empty.
            row_index: The row.

        Raises:
            InvalidArgumentError: `block_ids` is not one-dimensional or not integers, or the row
                has no room for them. The row is unchanged.
            BlockIdError: A block id is negative or past the end of the cache.
        """
        row_index = self._checked_row("row_index", row_index)
        num_before, ratio = self.num_blocks_of(row_index), self.kernel_blocks_per_block
        ids = require_block_ids(self.group, block_ids, self.num_blocks)
        num_after = num_before + len(ids)
        if num_after > self.max_blocks_per_request:
            room = self.max_blocks_per_request - num_before
            raise InvalidArgumentError(
                f"block_ids[{self.group}]", ids.tolist(), f"at most {room} more in row {row_index}"
            )
        kernel_ids = ids[:, None] * ratio + np.arange(ratio)
        self._rows[row_index, num_before * ratio : num_after * ratio] = kernel_ids.reshape(-1)
        self._num_blocks[row_index] = num_after

    def truncate_row(self, row_index: int, num_blocks: int) -> None:
        """Remove the blocks of a row past the first `num_blocks`.

        Raises:
            InvalidArgumentError: `num_blocks` is negative.
        """
        row_index = self._checked_row("row_index", row_index)
        num_blocks = require_integer("num_blocks", num_blocks)
        self._rows[row_index, num_blocks * self.kernel_blocks_per_block :] = NULL_BLOCK_ID
        self._num_blocks[row_index] = min(num_blocks, self._num_blocks[row_index])

    def clear_row(self, row_index: int) -> None:
        """Remove all blocks of a row."""
        self.truncate_row(row_index, 0)

    def add_row(self, block_ids: ArrayLike, row_index: int) -> None:
        """Replace the blocks of a row; raises as `append_row`, and then leaves the row empty."""
        self.clear_row(row_index)
        self.append_row(block_ids, row_index)

    def move_row(self, source: int, target: int) -> None:
        """Move the blocks of row `source` to row `target`, and clear `source`."""
        source, target = self._checked_row("source", source), self._checked_row("target", target)
        self.swap_row(source, target)
        if source != target:
            self.clear_row(source)

    def swap_row(self, first: int, second: int) -> None:
        """Exchange two rows."""
        first, second = self._checked_row("first", first), self._checked_row("second", second)
        for array in (self._rows, self._num_blocks):
            array[[first, second]] = array[[second, first]]

    def commit(self, num_requests: int) -> torch.Tensor:
        """Copy the first rows to the device, in the order of its stream.

        Returns:
            Kernel block ids, int32, `(num_requests, num_columns)`: a view of `device_table`.

        Raises:
            InvalidArgumentError: The table has fewer rows.
        """
        return self._table.commit(
            require_integer("num_requests", num_requests, maximum=len(self._rows))
        )

    def compute_slot_mapping(
        self, query_start_loc: ArrayLike, positions: ArrayLike
    ) -> torch.Tensor:
        """Compute the slots of a batch's keys and values, and copy them to the device.

        The tokens of request r are those from `query_start_loc[r]` to `query_start_loc[r + 1]`,
        and its blocks are those of row r on the host. The slot of a token is its kernel block's id
        times `tokens_per_kernel_block` plus its index in that block. A token in the null block
        gets `PAD_SLOT`: nothing is ever written there. The rest of `slot_mapping` is padded.

        Args:
            query_start_loc: Integers, `(num_requests + 1,)`, rising from 0 to `num_tokens`.
            positions: Integers, `(num_tokens,)`: the index of each token within its request.

        Returns:
            int64, `(num_tokens,)`: a view of `slot_mapping`.

        Raises:
            InvalidArgumentError: The arrays do not fit together, there are too many requests or
                tokens, or a position is past the blocks of its row.
        """
        starts = require_integers("query_start_loc", query_start_loc)
        places = require_integers("positions", positions)
        if len(places) > (limit := len(self.slot_mapping)):
            raise InvalidArgumentError("positions", len(places), f"at most {limit} tokens")
        if len(starts) > (limit := len(self._rows)) + 1:
            raise InvalidArgumentError("query_start_loc", len(starts) - 1, f"0 to {limit} requests")
        require_starts(starts, len(places))
        slots = self._slots_of(starts, places) if self._tokens_have_slots else PAD_SLOT
        padded = self._slots.host
        padded[: len(places)] = slots
        padded[len(places) :] = PAD_SLOT
        self._slots.commit(len(padded))
        return self.slot_mapping[: len(places)]

    def _slots_of(
        self, starts: NDArray[np.int64], positions: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        rows = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
        columns, offsets = np.divmod(positions, self.tokens_per_kernel_block)
        num_columns = self._num_blocks * self.kernel_blocks_per_block
        outside = (columns < 0) | (columns >= num_columns[rows])
        if outside.any():
            token = int(outside.argmax())
            row = int(rows[token])
            limit = int(num_columns[row]) * self.tokens_per_kernel_block
            raise InvalidArgumentError(
                f"positions[{token}]",
                int(positions[token]),
                f"one of the {limit} tokens that row {row} of group {self.group} has blocks for",
            )
        blocks = self._rows[rows, columns].astype(np.int64)
        slots: NDArray[np.int64] = blocks * self.tokens_per_kernel_block + offsets
        slots[blocks < self.kernel_blocks_per_block] = PAD_SLOT
        return slots

    def _checked_row(self, name: str, row_index: int) -> int:
        limit = len(self._rows)
        expected = f"0 <= row index < {limit}"
        return require_integer(name, row_index, maximum=limit - 1, expected=expected)
