"""`make bench NAME=mapping`: the timed bytes arrive, as many as the baseline's."""

from collections.abc import Iterator

import pytest
import torch

from benchmarks import mapping
from benchmarks.mapping import (
    CASES,
    NUM_KV_HEADS,
    Case,
    MappedEngine,
    Worker,
    make_workers,
    transfer,
)
from kvxfer.copy_engine.cpu import CPUCopyEngine

NUM_LAYERS, NUM_TOKENS = 2, 128

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@pytest.fixture(scope="module")
def engine() -> Iterator[CPUCopyEngine]:
    engine = CPUCopyEngine(num_threads=2)
    yield engine
    engine.close()


def elements(engine: MappedEngine, workers: list[Worker]) -> torch.Tensor:
    """Read the moved blocks of all workers, `(layer, kv, head, token, dim)`."""
    return torch.cat([elements_of_worker(engine, worker) for worker in workers], dim=2)


def elements_of_worker(engine: MappedEngine, worker: Worker) -> torch.Tensor:
    layers = torch.stack(list(worker.tensors.values()))
    axes = ["layer", *engine.layout.split()]
    if "kv*dim" in axes:
        layers, axes = layers.reshape(*layers.shape[:-1], 2, -1), [*axes[:-1], "kv", "dim"]
    order = ["layer", "kv", "head", "block", "token", "dim"]
    inside = layers.permute([axes.index(axis) for axis in order])
    return inside[:, :, :, torch.from_numpy(worker.block_ids)].flatten(3, 4)


def others_of_worker(engine: MappedEngine, worker: Worker) -> torch.Tensor:
    """Read all blocks that are not moved."""
    axis = engine.layout.split().index("block")
    layers = torch.stack(list(worker.tensors.values()))
    moved = set(worker.block_ids.tolist())
    others = [block for block in range(layers.shape[axis + 1]) if block not in moved]
    return layers.index_select(axis + 1, torch.tensor(others))


@every_case
def test_every_element_arrives_in_its_place_and_other_blocks_stay(
    case: Case, engine: CPUCopyEngine
) -> None:
    _, writers, readers = make_workers(case, num_layers=NUM_LAYERS, num_tokens=NUM_TOKENS)
    expected = elements(case.writer, writers)
    assert expected.shape == (NUM_LAYERS, 2, NUM_KV_HEADS, NUM_TOKENS, mapping.HEAD_DIM)
    assert not torch.equal(elements(case.reader, readers), expected)
    others = [others_of_worker(case.reader, reader).clone() for reader in readers]
    transfer(engine, writers, readers, mapped=True)
    assert torch.equal(elements(case.reader, readers), expected)
    assert torch.equal(elements(case.writer, writers), expected)
    for reader, before in zip(readers, others, strict=True):
        assert before.numel() > 0
        assert torch.equal(others_of_worker(case.reader, reader), before)


@every_case
def test_the_baseline_moves_as_many_bytes_of_the_same_memory(case: Case) -> None:
    pages, *engines = make_workers(case, num_layers=NUM_LAYERS, num_tokens=NUM_TOKENS)
    for workers in engines:
        for mapped in (True, False):
            sides = [worker.describe(mapped=mapped) for worker in workers]
            assert all(blocks.num_bytes == host.num_bytes for blocks, host in sides)
            assert sum(host.num_bytes for _, host in sides) == pages.numel()
            starts = torch.zeros(pages.numel(), dtype=torch.int8)
            for _, host in sides:
                offsets = host.addresses.astype(int) - pages.data_ptr()
                for offset, length in zip(offsets, host.lengths.astype(int), strict=True):
                    starts[offset : offset + length] += 1
            assert bool((starts == 1).all())


def test_two_cases_have_a_goal() -> None:
    rows = mapping.run(quick=True, num_tokens=NUM_TOKENS)
    assert [row.case for row in rows[:3]] == [
        f"{CASES[0].name}, {step}" for step in ("written", "read", "written and read")
    ]
    assert len(rows) == 3 * len(CASES)
    assert {row.case: row.goal for row in rows if row.goal} == {
        "HND, TP 2 -> 4, read": ">= 0.8",
        "NHD -> HND, written": ">= 0.5",
    }
    assert all(row.value > 0 and row.baseline > 0 for row in rows)
