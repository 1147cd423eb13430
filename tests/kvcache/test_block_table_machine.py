"""Block tables: all of their operations, in any order, against plain lists."""

from typing import TypeAlias

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvxfer.engine_side import NULL_BLOCK_ID, PAD_SLOT, MultiGroupBlockTable
from kvxfer.kvcache.config import KVCacheConfig, KVCacheGroup
from kvxfer.kvcache.spec import FullAttentionSpec, KVCacheSpec, MambaSpec, SlidingWindowSpec
from tests.examples import examples

NUM_BLOCKS = 12
NUM_ROWS = 4
MAX_TOKENS = 40
MAX_BATCHED_TOKENS = 64
ALIGNMENT_TOKENS = 24

Ids: TypeAlias = list[int]

FULL = FullAttentionSpec(tokens_per_block=8, num_kv_heads=1, head_dim=2, dtype=torch.float16)
WINDOW = SlidingWindowSpec(
    tokens_per_block=4, num_kv_heads=1, head_dim=2, dtype=torch.float16, sliding_window=6
)
STATE = MambaSpec(tokens_per_block=20, shapes=((2,),), dtypes=(torch.float16,))
SPECS: tuple[KVCacheSpec, ...] = (FULL, WINDOW, STATE)

rows = st.integers(0, NUM_ROWS - 1)


def ids_of(num_blocks: int) -> st.SearchStrategy[Ids]:
    return st.lists(st.integers(0, NUM_BLOCKS - 1), max_size=num_blocks)


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

    @rule(data=st.data(), row=rows)
    def append_row(self, data: st.DataObject, row: int) -> None:
        block_ids = [data.draw(ids_of(self.room(group, row))) for group in range(len(SPECS))]
        self.tables.append_row(block_ids, row)
        for group, ids in enumerate(block_ids):
            self.model[group][row] += ids

    @rule(data=st.data(), row=rows)
    def add_row(self, data: st.DataObject, row: int) -> None:
        self.clear_row(row)
        block_ids = [data.draw(ids_of(self.room(group, row))) for group in range(len(SPECS))]
        self.tables.add_row(block_ids, row)
        for group, ids in enumerate(block_ids):
            self.model[group][row] = list(ids)

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
