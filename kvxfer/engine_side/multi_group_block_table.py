"""Block tables of all KV-cache groups, changed together."""

from collections.abc import Sequence

import torch
from numpy.typing import ArrayLike

from kvxfer.checks import require_instance, require_one_per_group, require_positive
from kvxfer.engine_side.block_table import NULL_BLOCK_ID, ROW_ALIGNMENT_TOKENS, BlockTable
from kvxfer.errors import InvalidArgumentError
from kvxfer.kvcache.config import KVCacheConfig
from kvxfer.kvcache.memory_region import HOST
from kvxfer.kvcache.spec import MambaSpec


class MultiGroupBlockTable:
    """Block tables of all KV-cache groups; a request has the same row in each of them.

    Args:
        config: The blocks, groups and specs; block 0 is the null block.
        tokens_per_kernel_block: Tokens of each group's kernel blocks; by default those of its
            blocks.

    The other arguments are those of `BlockTable`.

    Attributes:
        tables: The table of each group.
        max_num_requests: Number of rows.

    Raises:
        InvalidArgumentError: As `BlockTable`; or there is not one kernel block per group, or the
            config's null block is not `NULL_BLOCK_ID`.
    """

    def __init__(
        self,
        config: KVCacheConfig,
        *,
        max_num_requests: int,
        max_tokens_per_request: int,
        max_num_batched_tokens: int,
        tokens_per_kernel_block: Sequence[int] | None = None,
        row_alignment_tokens: int = ROW_ALIGNMENT_TOKENS,
        device: torch.device = HOST,
    ) -> None:
        require_instance("config", config, KVCacheConfig)
        if config.null_block_id not in {None, NULL_BLOCK_ID}:
            expected = f"{NULL_BLOCK_ID}, the block that pads rows, or None"
            raise InvalidArgumentError("config.null_block_id", config.null_block_id, expected)
        groups = config.groups
        if tokens_per_kernel_block is None:
            tokens_per_kernel_block = [group.spec.tokens_per_block for group in groups]
        require_one_per_group("tokens_per_kernel_block", tokens_per_kernel_block, len(groups))
        self.max_num_requests = require_positive("max_num_requests", max_num_requests)
        self.tables = tuple(
            BlockTable(
                group.spec.tokens_per_block,
                num_blocks=config.num_blocks,
                max_num_requests=max_num_requests,
                max_tokens_per_request=max_tokens_per_request,
                max_num_batched_tokens=max_num_batched_tokens,
                tokens_per_kernel_block=tokens_per_kernel_block[index],
                row_alignment_tokens=row_alignment_tokens,
                tokens_have_slots=not isinstance(
                    group.spec.for_layer(group.layer_names[0]), MambaSpec
                ),
                group=index,
                device=device,
            )
            for index, group in enumerate(groups)
        )

    def __getitem__(self, group: int) -> BlockTable:
        return self.tables[group]

    def __len__(self) -> int:
        return len(self.tables)

    def append_row(self, block_ids: Sequence[ArrayLike], row_index: int) -> None:
        """Add blocks to the end of a row.

        Args:
            block_ids: For each group its block ids, in request order; may be empty.
            row_index: The row.

        Raises:
            InvalidArgumentError: There is not one list per group, or as `BlockTable.append_row`.
                The row is unchanged in every group.
            BlockIdError: A block id is negative or past the end of the cache; likewise.
        """
        require_one_per_group("block_ids", block_ids, len(self.tables))
        lengths = [table.num_blocks_of(row_index) for table in self.tables]
        try:
            for table, ids in zip(self.tables, block_ids, strict=True):
                table.append_row(ids, row_index)
        except InvalidArgumentError:
            for table, num_blocks in zip(self.tables, lengths, strict=True):
                table.truncate_row(row_index, num_blocks)
            raise

    def add_row(self, block_ids: Sequence[ArrayLike], row_index: int) -> None:
        """Replace the blocks of a row; raises as `append_row`, and then leaves the row empty."""
        self.clear_row(row_index)
        self.append_row(block_ids, row_index)

    def clear_row(self, row_index: int) -> None:
        """Remove all blocks of a row."""
        for table in self.tables:
            table.clear_row(row_index)

    def move_row(self, source: int, target: int) -> None:
        """Move the blocks of row `source` to row `target`, and clear `source`."""
        for table in self.tables:
            table.move_row(source, target)

    def swap_row(self, first: int, second: int) -> None:
        """Exchange two rows."""
        for table in self.tables:
            table.swap_row(first, second)

    def commit(self, num_requests: int) -> list[torch.Tensor]:
        """Copy the first rows of every group to the device; see `BlockTable.commit`."""
        return [table.commit(num_requests) for table in self.tables]

    def compute_slot_mapping(
        self, query_start_loc: ArrayLike, positions: ArrayLike
    ) -> list[torch.Tensor]:
        """Map the tokens of a batch in every group; see `BlockTable.compute_slot_mapping`."""
        return [table.compute_slot_mapping(query_start_loc, positions) for table in self.tables]
