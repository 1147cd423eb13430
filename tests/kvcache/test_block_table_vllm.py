"""Block tables against vLLM's own: the same requests get the same ids and slots."""

import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("vllm.v1.worker.block_table", reason="needs vLLM")

from vllm.v1.worker import block_table as vllm_tables

from kvxfer.engine_side import NULL_BLOCK_ID, PAD_SLOT, MultiGroupBlockTable
from kvxfer.kvcache.spec import FullAttentionSpec
from tests.examples import examples
from tests.kvcache.engine_views import config_of

NUM_BLOCKS = 50
MAX_REQUESTS = 4
MAX_TOKENS = 200
MAX_BATCHED_TOKENS = 96
TOKENS_PER_BLOCK = (16, 48)

pytestmark = [
    pytest.mark.timeout(120),  # importing vLLM takes ten seconds of a busy machine
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # of torch.distributed, in vLLM's dispatch
]


@pytest.fixture(scope="module", autouse=True)
def _slot_kernels_of_the_cpu() -> None:
    from vllm.platforms import current_platform

    # vLLM looks for its kernels in every module, and trips over what llvmlite has in its own:
    # LMCache imports it, and its tests may have run in this process.
    hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if "llvmlite" in name}
    current_platform.register_triton_kernel_overrides()
    sys.modules.update(hidden)


def make_theirs() -> Any:
    return vllm_tables.MultiGroupBlockTable(
        max_num_reqs=MAX_REQUESTS,
        max_num_batched_tokens=MAX_BATCHED_TOKENS,
        pin_memory=False,
        device=torch.device("cpu"),
        block_sizes=list(TOKENS_PER_BLOCK),
        max_num_blocks=[-(-MAX_TOKENS // tokens) for tokens in TOKENS_PER_BLOCK],
    )


def make_ours() -> MultiGroupBlockTable:
    specs = [
        FullAttentionSpec(tokens_per_block=t, num_kv_heads=1, head_dim=1, dtype=torch.int8)
        for t in TOKENS_PER_BLOCK
    ]
    return MultiGroupBlockTable(
        config_of((specs[0], "a"), (specs[1], "b"), num_blocks=NUM_BLOCKS),
        max_num_requests=MAX_REQUESTS,
        max_tokens_per_request=MAX_TOKENS,
        max_num_batched_tokens=MAX_BATCHED_TOKENS,
    )


def draw_requests(data: st.DataObject) -> tuple[list[list[list[int]]], list[list[int]]]:
    """Draw each request's block ids per group, and the positions of its tokens in the batch."""
    num_requests = data.draw(st.integers(1, MAX_REQUESTS))
    blocks, positions = [], []
    for _ in range(num_requests):
        num_tokens = data.draw(st.integers(1, MAX_TOKENS))
        start = data.draw(st.integers(max(0, num_tokens - 24), num_tokens - 1))
        ids = st.integers(1, NUM_BLOCKS - 1)
        counts = [-(-num_tokens // tokens) for tokens in TOKENS_PER_BLOCK]
        blocks.append([data.draw(st.lists(ids, min_size=n, max_size=n)) for n in counts])
        positions.append(list(range(start, num_tokens)))
    return blocks, positions


@examples(40)
@given(data=st.data())
def test_rows_and_slots_are_vllms(data: st.DataObject) -> None:
    blocks, positions = draw_requests(data)
    ours, theirs = make_ours(), make_theirs()
    for row, block_ids in enumerate(blocks):
        split = data.draw(st.integers(0, 2))
        for tables in (ours, theirs):
            tables.add_row([ids[:split] for ids in block_ids], row)
            tables.append_row([ids[split:] for ids in block_ids], row)
    rows = st.integers(0, len(blocks) - 1)
    first, second = data.draw(rows), data.draw(rows)
    blocks[first], blocks[second] = blocks[second], blocks[first]
    positions[first], positions[second] = positions[second], positions[first]
    for tables in (ours, theirs):
        tables.swap_row(first, second)

    starts = np.cumsum([0, *map(len, positions)])
    places = [place for request in positions for place in request]
    mappings = ours.compute_slot_mapping(starts, places)
    theirs.commit_block_table(len(blocks))
    theirs.compute_slot_mapping(
        len(blocks), torch.tensor(starts, dtype=torch.int32), torch.tensor(places)
    )
    for group, committed in enumerate(ours.commit(len(blocks))):
        table = theirs[group]
        assert torch.equal(committed, table.get_device_tensor(len(blocks)))
        assert torch.equal(mappings[group], table.slot_mapping.gpu[: len(places)])


def test_the_null_block_and_the_padding_are_vllms() -> None:
    from vllm.v1.attention.backends.utils import PAD_SLOT_ID
    from vllm.v1.worker.gpu_model_runner import NULL_BLOCK_ID as THEIR_NULL_BLOCK_ID

    assert (PAD_SLOT, NULL_BLOCK_ID) == (PAD_SLOT_ID, THEIR_NULL_BLOCK_ID)
