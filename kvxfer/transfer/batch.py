"""Batches: keys and the blocks that belong to them, checked before anything is moved."""

from collections import Counter
from collections.abc import Sequence

from numpy.typing import ArrayLike

from kvxfer.checks import require_integer, require_integers, require_one_per_group
from kvxfer.errors import InvalidArgumentError, LengthMismatchError
from kvxfer.kvcache.descriptors import BlockDescriber, Descriptors
from kvxfer.storage.keys import BlockKey, group_of


def describe_batch(
    describer: BlockDescriber,
    keys: Sequence[BlockKey],
    block_ids: Sequence[ArrayLike],
    first_block_indices: Sequence[int] | None,
) -> Descriptors:
    """Describe the blocks of a batch, group after group, one entry for each key.

    Raises:
        InvalidArgumentError: The keys, blocks and groups do not fit each other; its children name
            what is wrong.
    """
    num_groups = describer.num_groups
    firsts = [0] * num_groups if first_block_indices is None else first_block_indices
    for name, per_group in (("block_ids", block_ids), ("first_block_indices", firsts)):
        require_one_per_group(name, per_group, num_groups, what="one entry")
    wanted = Counter(map(group_of, keys))
    described, groups = [], []
    for group, (given, index) in enumerate(zip(block_ids, firsts, strict=True)):
        first = require_integer(f"first_block_indices[{group}]", index)
        ids = require_integers(f"block_ids[{group}]", given)
        if not ids.size:
            continue
        batch = describer.describe(group, ids, first_block_index=first, num_pages=wanted[group])
        described.append(batch)
        groups += [group] * batch.num_blocks
    if len(groups) != len(keys):
        rule = f"one per chunk of {describer.blocks_per_chunk} blocks"
        raise LengthMismatchError(len(keys), len(groups), rule)
    for index, (key, group) in enumerate(zip(keys, groups, strict=True)):
        if group_of(key) != group:
            raise InvalidArgumentError(f"keys[{index}]", key, f"a key of group {group}")
    return Descriptors.concatenate(described)
