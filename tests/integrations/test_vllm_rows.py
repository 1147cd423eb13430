"""Rows of host memory as portable pages, which engines of other shapes read."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm.v1.kv_offload.base", reason="needs vLLM")

from kvxfer.backends.host import PoolShape
from kvxfer.integrations.vllm.interface import group_ids
from kvxfer.integrations.vllm.row_mapping import map_rows, num_copies
from kvxfer.integrations.vllm.worker_pages import CPU_AXES, GroupPages, WorkerPages, as_bytes
from kvxfer.kvcache.page_box import Digit, PageBox
from kvxfer.kvcache.page_mapping import PageMapping
from tests.integrations.test_vllm import make_config

HEADS, TOKENS, DIM = 4, 16, 8
PAGE_BYTES = 2 * TOKENS * DIM * 4  # of one head


def worker_pages(heads: int, **fields: Any) -> WorkerPages:
    """Layout of a CPU: keys transposed, values not, one head after the other."""
    plane = TOKENS * DIM * 4
    head = Digit("head", heads, 2 * plane)
    boxes = (
        PageBox(
            layer_name="layers.0",
            part="k",
            dtype=torch.float32,
            digits=(head, Digit("dim", DIM, TOKENS * 4), Digit("token", TOKENS, 4)),
        ),
        PageBox(
            layer_name="layers.0",
            part="v",
            dtype=torch.float32,
            digits=(head, Digit("token", TOKENS, DIM * 4), Digit("dim", DIM, 4)),
            offset_bytes=plane,
        ),
    )
    group = GroupPages(payload_size_bytes=heads * PAGE_BYTES, boxes=boxes, axes=CPU_AXES)
    pages = (
        GroupPages(**{"payload_size_bytes": group.payload_size_bytes, **fields})
        if fields
        else group
    )
    return WorkerPages(groups=(pages,), num_kv_heads=HEADS)


def row_config(
    world_size: int, *, blocks_per_chunk: int = 1, pp_size: int = 1, tp_size: int = 0
) -> Any:
    parallel = SimpleNamespace(
        world_size=world_size,
        tp_size=tp_size or world_size // pp_size,
        pcp_size=1,
        dcp_size=1,
        pp_size=pp_size,
    )
    groups = (SimpleNamespace(tokens_per_block=TOKENS, group_id=0, layer_names=("layers.0",)),)
    cache = SimpleNamespace(blocks_per_chunk=blocks_per_chunk)
    return SimpleNamespace(parallel=parallel, groups=groups, cache=cache)


def row_shape(world_size: int, blocks_per_chunk: int = 1) -> PoolShape:
    part = HEADS // world_size * PAGE_BYTES * blocks_per_chunk
    return PoolShape(num_slots=1, num_parts=world_size, part_size_bytes=-(-part // 4096) * 4096)


def page_of(row: np.ndarray[Any, Any], mapping: PageMapping) -> bytes:
    (fragments,) = mapping.pages
    page = np.zeros(mapping.page.num_bytes, np.uint8)
    for local, offset, length in zip(
        fragments.local_offsets, fragments.page_offsets, fragments.lengths, strict=True
    ):
        page[offset : offset + length] = row[local : local + length]
    return page.tobytes()


def fill_row(world_size: int, blocks_per_chunk: int) -> np.ndarray[Any, Any]:
    """Make a row of workers that keep the same model's values."""
    shape = row_shape(world_size, blocks_per_chunk)
    row = np.full(shape.slot_size_bytes, 255, np.uint8)
    values = np.arange(2 * HEADS * blocks_per_chunk * TOKENS * DIM, dtype=np.float32)
    keys, others = values.reshape(2, HEADS, blocks_per_chunk, TOKENS, DIM)
    heads = HEADS // world_size
    for rank in range(world_size):
        start = rank * shape.part_size_bytes
        for block in range(blocks_per_chunk):
            for head in range(rank * heads, rank * heads + heads):
                both = (keys[head, block].T, others[head, block])
                data = b"".join(np.ascontiguousarray(each).tobytes() for each in both)
                row[start : start + len(data)] = np.frombuffer(data, np.uint8)
                start += len(data)
    return row


@pytest.mark.parametrize("blocks_per_chunk", [1, 3])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_rows_of_any_number_of_workers_are_one_page(world_size: int, blocks_per_chunk: int) -> None:
    (mapping,) = map_rows(
        [worker_pages(HEADS // world_size)] * world_size,
        row_config(world_size, blocks_per_chunk=blocks_per_chunk),
        row_shape(world_size, blocks_per_chunk),
        "here",
    )
    values = np.arange(2 * HEADS * blocks_per_chunk * TOKENS * DIM, dtype=np.float32)
    keys, others = values.reshape(2, HEADS, blocks_per_chunk * TOKENS, DIM)
    expected = np.ascontiguousarray(keys.swapaxes(1, 2)).tobytes() + others.tobytes()
    assert page_of(fill_row(world_size, blocks_per_chunk), mapping) == expected
    assert [tensor.shape for tensor in mapping.page.tensors] == [
        (HEADS, DIM, blocks_per_chunk * TOKENS),
        (HEADS, blocks_per_chunk * TOKENS, DIM),
    ]


@pytest.mark.parametrize(
    ("workers", "config", "reason"),
    [
        ([worker_pages(2, reason="states")] * 2, row_config(2), "states"),
        ([worker_pages(2)] * 2, row_config(2, pp_size=2), "2 stages"),
        ([worker_pages(1)] * 8, row_config(8), "kept by 2 workers; expected 1"),
        ([worker_pages(4)] * 2, row_config(2), "'head'"),
        ([worker_pages(2)] * 2, row_config(2, tp_size=1), "'head'"),
    ],
)
def test_rows_that_mean_something_unknown_stay_as_they_are(
    workers: list[WorkerPages], config: Any, reason: str
) -> None:
    shape = PoolShape(num_slots=1, num_parts=len(workers), part_size_bytes=4096)
    (mapping,) = map_rows(workers, config, shape, "only here")
    (tensor,) = mapping.page.tensors
    assert (tensor.dtype, tensor.shape) == (torch.uint8, (shape.slot_size_bytes,))
    assert tensor.encoding.startswith("only here")
    assert reason in tensor.encoding
    assert mapping.pages[0].lengths.tolist() == [shape.slot_size_bytes]


def test_heads_are_divided_even_where_the_order_inside_of_them_is_unknown() -> None:
    def packed(heads: int) -> WorkerPages:
        (group,) = worker_pages(heads).groups
        boxes = tuple(as_bytes(box, "packed for amx") for box in group.boxes)
        told = GroupPages(payload_size_bytes=group.payload_size_bytes, boxes=boxes)
        return WorkerPages(groups=(told,), num_kv_heads=HEADS)

    pages = []
    for world_size in (1, 4):
        workers = [packed(HEADS // world_size)] * world_size
        shape = row_shape(world_size)
        (mapping,) = map_rows(workers, row_config(world_size), shape, "here")
        assert "packed for amx" in mapping.page.tensors[0].encoding
        pages.append(page_of(fill_row(world_size, 1), mapping))
    assert pages[0] == pages[1]


def test_groups_that_are_not_offloaded_have_a_place() -> None:
    config = make_config()
    told = [GroupPages(payload_size_bytes=128, reason="made up")] * len(config.groups)
    shape = PoolShape(num_slots=1, num_parts=1, part_size_bytes=4096)
    mappings = map_rows([WorkerPages(groups=tuple(told), num_kv_heads=2)], config, shape, "here")
    assert len(mappings) == max(group_ids(config)) + 1


def test_workers_that_keep_the_same_heads_share_a_part() -> None:
    workers, config = [worker_pages(1)] * 8, row_config(8)
    assert num_copies(workers[0], config) == 2
    assert num_copies(worker_pages(1, reason="states"), config) == 1
    assert num_copies(None, config) == 1
    shape = row_shape(HEADS)
    (mapping,) = map_rows(workers, config, shape, "here")
    (alone,) = map_rows([worker_pages(HEADS)], row_config(1), row_shape(1), "there")
    assert mapping.page == alone.page
    assert page_of(fill_row(HEADS, 1), mapping) == page_of(fill_row(1, 1), alone)
