"""Batches: keys and their blocks, checked and described before any byte is moved."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvxfer.checks import require_integer, require_integers, require_one_per_group
from kvxfer.errors import DuplicateError, InvalidArgumentError, LengthMismatchError
from kvxfer.kvcache.describer import BlockDescriber
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.storage.keys import BlockKey, group_of
from kvxfer.transfer.job import Direction


def describe_batch(
    describer: BlockDescriber,
    keys: Sequence[BlockKey],
    block_ids: Sequence[ArrayLike],
    first_block_indices: Sequence[int] | None,
    *,
    direction: Direction = Direction.STORE,
) -> Descriptors:
    """Describe the blocks of a batch, group after group, one entry for each key.

    A block belongs to one group at a time: where groups share memory, a batch that uses one block
    for two of them is refused. Only the null block may be in several groups; loads refuse it.

    Raises:
        InvalidArgumentError: The keys, blocks and groups do not fit each other; subclasses say in
            which way.
    """
    num_groups = describer.num_groups
    firsts = [0] * num_groups if first_block_indices is None else first_block_indices
    require_one_per_group("block_ids", block_ids, num_groups, what="one entry")
    if firsts is first_block_indices:
        require_one_per_group("first_block_indices", firsts, num_groups, what="one entry")
    groups_of_keys = list(map(group_of, keys))
    described, groups, used = [], [], {}
    for group, (given, index) in enumerate(zip(block_ids, firsts, strict=True)):
        first = require_integer(f"first_block_indices[{group}]", index)
        ids = require_integers(f"block_ids[{group}]", given)
        if not ids.size:
            continue
        num_pages = groups_of_keys.count(group)
        batch = describer.describe(group, ids, first_block_index=first, num_pages=num_pages)
        described.append(batch)
        used[group] = ids
        groups += [group] * batch.num_blocks
    if len(groups) != len(keys):
        rule = f"one per chunk of {describer.blocks_per_chunk} blocks"
        raise LengthMismatchError(len(keys), len(groups), rule)
    if groups != groups_of_keys:
        pairs = enumerate(zip(groups, groups_of_keys, strict=True))
        index, group = next((index, group) for index, (group, actual) in pairs if group != actual)
        raise InvalidArgumentError(f"keys[{index}]", keys[index], f"a key of group {group}")
    null = describer.caches.null_block_id
    if null is not None and direction is Direction.LOAD:
        _require_absent(null, used)
    for overlaid in describer.overlaid_groups:
        _require_apart([group for group in used if group in overlaid], used, null)
    return Descriptors.concatenate(described)


def _require_absent(null: int, used: Mapping[int, NDArray[np.int64]]) -> None:
    for group, ids in used.items():
        if (ids == null).any():
            expected = "a block other than the null block, which keeps no data"
            raise InvalidArgumentError(f"block_ids[{group}]", null, expected)


def _require_apart(
    groups: Sequence[int], used: Mapping[int, NDArray[np.int64]], null: int | None
) -> None:
    """Check that no block but the null block is used by two of these groups."""
    if len(groups) < 2:
        return
    counts = np.bincount(np.concatenate([used[group] for group in groups]))
    if null is not None:
        counts[null : null + 1] = 0
    if counts.max() > 1:
        block = int(counts.argmax())
        first, second, *_ = (group for group in groups if (used[group] == block).any())
        expected = f"a block that group {first} does not use: the two groups share memory"
        raise DuplicateError(f"block_ids[{second}]", block, expected)
