"""Weights of a model on a device: what their sums notice, and that they cost no copy."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from kvxfer.integrations.transformers import weights
from kvxfer.integrations.transformers.weights import sum_in_place
from tests.integrations.tiny_transformers import (
    FAMILIES,
    fill,
    make_model,
    num_loaded,
    open_cache,
    prompt_of,
)

pytestmark = pytest.mark.timeout(120)  # the first call of a model imports and compiles

DTYPES = [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn, torch.complex64]
SHAPES = [(12, 40), (3, 4, 40), (40,)]


def make(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    source = torch.Generator().manual_seed(1)
    size = torch.zeros(shape, dtype=dtype).nbytes
    data = torch.randint(0, 120, (size,), generator=source, dtype=torch.uint8)
    return data.view(dtype).view(shape)


def change_one(flat: torch.Tensor) -> None:
    flat[7] = flat[8].clone()


def exchange_two(flat: torch.Tensor) -> None:
    flat[[3, 5]] = flat[[5, 3]]


def exchange_two_far_apart(flat: torch.Tensor) -> None:
    flat[[3, len(flat) - 2]] = flat[[len(flat) - 2, 3]]


def turn_three(flat: torch.Tensor) -> None:
    flat[[1, 2, 3]] = flat[[2, 3, 1]]


def exchange_rows(flat: torch.Tensor) -> None:
    half = len(flat) // 2
    flat[:] = torch.cat((flat[half:], flat[:half])).clone()


def exchange_columns(flat: torch.Tensor) -> None:
    rows = flat.view(-1, 40)
    rows[:] = rows.roll(1, dims=1)


CHANGES = [
    change_one,
    exchange_two,
    exchange_two_far_apart,
    turn_three,
    exchange_rows,
    exchange_columns,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("change", CHANGES)
def test_elements_that_change_or_move_are_noticed(
    change: Callable[[torch.Tensor], None], shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    tensor = make(shape, dtype)
    before = sum_in_place(tensor)
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    change(tensor.view(bits).view(-1))
    assert sum_in_place(tensor) != before


@pytest.mark.parametrize("shape", [*SHAPES, (), (1,), (5, 1)], ids=str)
def test_another_place_in_memory_is_no_change(shape: tuple[int, ...]) -> None:
    tensor = make(shape, torch.bfloat16)
    elsewhere = torch.cat((torch.zeros(3, dtype=torch.bfloat16), tensor.flatten()))[3:].view(shape)
    assert elsewhere.data_ptr() != tensor.data_ptr()
    assert sum_in_place(elsewhere) == sum_in_place(tensor)
    strided = torch.stack((tensor, tensor), dim=-1)[..., 0]
    assert sum_in_place(strided) == sum_in_place(tensor)


@pytest.fixture
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sum up weights as where hashing would copy them."""
    monkeypatch.setattr(weights, "_sum_up", lambda _, tensor: sum_in_place(tensor))


@pytest.mark.usefixtures("_as_on_a_gpu")
def test_weights_that_moved_hit_and_rows_that_are_exchanged_miss(tmp_path: Path) -> None:
    model, prompt = make_model(*FAMILIES["llama"]), prompt_of(40)
    with open_cache(model, tmp_path) as cache:
        fill(cache, model, prompt)
        for layer in model.model.layers:  # as after an offload, and back again
            weight: Any = layer.mlp.gate_proj.weight
            weight.data = weight.data.clone()
        assert num_loaded(cache, prompt) == 32
        weight.data[[0, 1]] = weight.data[[1, 0]]
        assert num_loaded(cache, prompt) == 0
        weight.data[[0, 1]] = weight.data[[1, 0]]
        assert num_loaded(cache, prompt) == 32


def test_pages_of_earlier_weights_are_not_taken_for_new_ones_that_another_thread_has_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, prompt = make_model(*FAMILIES["llama"]), prompt_of(40)
    with open_cache(model, tmp_path) as cache:
        fill(cache, model, prompt)
        assert num_loaded(cache, prompt) == 32
        model.model.layers[0].mlp.gate_proj.weight.data[0] += 1
        load_pages, tokens = cache._fill, []

        def load_pages_and_be_overtaken(*arguments: Any) -> None:
            load_pages(*arguments)
            monkeypatch.setattr(cache, "_fill", load_pages)
            other = threading.Thread(  # it waits for no turn, and hashes the weights, too
                target=lambda: tokens.append(cache.load(prompt, timeout_s=0.001).get_seq_length())
            )
            other.start()
            other.join()

        monkeypatch.setattr(cache, "_fill", load_pages_and_be_overtaken)
        assert num_loaded(cache, prompt) == 0
        assert tokens == [0]
