"""Canonicalizing layers that lie side by side in a block, or in one tensor of all layers."""

from dataclasses import replace

import pytest
import torch

from kvxfer.errors import (
    InvalidArgumentError,
    LayoutError,
)
from kvxfer.kvcache.canonical import canonicalize
from kvxfer.kvcache.spec import (
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from tests.kvcache.engine_views import (
    MAMBA,
    NHD,
    NUM_BLOCKS,
    PAGE,
    SIZES,
    SPEC,
    config_of,
    engine_view,
    nhd,
    packed_row,
    page_view,
    refs,
    shapes,
)


def test_layers_that_interleave_inside_a_block_become_one_row() -> None:
    row = packed_row(3)
    kv_caches = {name: page_view(row, layer) for layer, name in enumerate("abc")}
    caches = canonicalize(kv_caches, config_of((SPEC, "abc")))
    assert shapes(caches) == [(NUM_BLOCKS, 3 * PAGE)]
    assert refs(caches) == [(0, 3 * PAGE, "abc")]


def test_a_row_of_several_groups_has_one_ref_per_group() -> None:
    row = packed_row(3)
    kv_caches = {
        "a": page_view(row, 0), "b": page_view(row, 1), "c": page_view(row, 2),
        "d": page_view(row, 0), "e": page_view(row, 1),
    }  # fmt: skip
    window = SlidingWindowSpec(
        tokens_per_block=16, num_kv_heads=3, head_dim=8, dtype=torch.float16, sliding_window=64
    )
    caches = canonicalize(
        kv_caches,
        config_of((SPEC, "abc"), (window, "de"), shared_tensors=(("a", "d"), ("b", "e"), ("c",))),
    )
    assert shapes(caches) == [(NUM_BLOCKS, 3 * PAGE)]
    assert refs(caches, 0) == [(0, 3 * PAGE, "abc")]
    assert refs(caches, 1) == [(0, 2 * PAGE, "de")]


def test_a_row_may_be_longer_than_its_layers() -> None:
    row = packed_row(3)
    kv_caches = {"a": page_view(row, 0), "b": page_view(row, 1)}
    caches = canonicalize(kv_caches, config_of((SPEC, "ab")))
    assert shapes(caches) == [(NUM_BLOCKS, 3 * PAGE)]
    assert refs(caches) == [(0, 2 * PAGE, "ab")]


def test_a_row_ends_with_the_storage() -> None:
    row = packed_row(3)
    kv_caches = {"b": page_view(row, 1), "c": page_view(row, 2)}
    caches = canonicalize(kv_caches, config_of((SPEC, "bc")))
    assert shapes(caches) == [(NUM_BLOCKS, 2 * PAGE)]
    assert caches.tensors[0].tensor.stride() == (3 * PAGE, 1)
    assert refs(caches) == [(0, 2 * PAGE, "bc")]


def test_bytes_that_no_layer_declared_are_never_in_a_row() -> None:
    row = packed_row(3)
    kv_caches = {"a": page_view(row, 0), "c": page_view(row, 2)}
    caches = canonicalize(kv_caches, config_of((SPEC, "ac")))
    assert shapes(caches) == [(NUM_BLOCKS, PAGE)] * 2
    assert [each.tensor.stride(0) for each in caches.tensors] == [3 * PAGE] * 2
    assert refs(caches) == [(0, PAGE, "a"), (1, PAGE, "c")]


def test_kernel_blocks_of_interleaved_layers_become_one_row() -> None:
    view = torch.zeros(NUM_BLOCKS * 2, 3, 2, 8, 3, 8, dtype=torch.float16)
    kv_caches = {name: view[:, layer] for layer, name in enumerate("abc")}
    caches = canonicalize(kv_caches, config_of((SPEC, "abc")))
    assert shapes(caches) == [(NUM_BLOCKS, 3 * PAGE)]
    assert refs(caches) == [(0, 3 * PAGE, "abc")]


def test_groups_may_cut_a_row_into_kernel_blocks_of_their_own() -> None:
    raw = torch.zeros(NUM_BLOCKS * 2 * PAGE, dtype=torch.int8).view(torch.float16)
    whole = raw.view(NUM_BLOCKS, 2, 2, 16, 3, 8)
    halves = raw.view(NUM_BLOCKS * 2, 2, 2, 8, 3, 8)
    kv_caches = {"a": whole[:, 0], "b": whole[:, 1], "c": halves[:, 0], "d": halves[:, 1]}
    caches = canonicalize(kv_caches, config_of((SPEC, "ab"), (SPEC, "cd")))
    assert shapes(caches) == [(NUM_BLOCKS, 2 * PAGE)]
    assert refs(caches, 0) == [(0, 2 * PAGE, "ab")]
    assert refs(caches, 1) == [(0, 2 * PAGE, "cd")]


def test_kernel_blocks_with_gaps_that_nobody_fills_are_refused() -> None:
    view = torch.zeros(NUM_BLOCKS * 2, 3, 2, 8, 3, 8, dtype=torch.float16)
    with pytest.raises(LayoutError, match=r"'a'.*2 pieces"):
        canonicalize({"a": view[:, 0], "c": view[:, 2]}, config_of((SPEC, "ac")))


@pytest.mark.parametrize(
    "physical", ["block layer kv token head dim", "block head layer kv token dim"]
)
@pytest.mark.parametrize("register_under", ["cross", "a", "abcd"])
def test_one_tensor_of_all_layers_is_one_row(physical: str, register_under: str) -> None:
    logical = "layer block kv token head dim"
    tensor = engine_view(physical, logical, SIZES | {"layer": 4}, offset=16)
    names = [register_under] if register_under == "cross" else list(register_under)
    caches = canonicalize(dict.fromkeys(names, tensor), config_of((SPEC, "abcd")))
    assert shapes(caches) == [(NUM_BLOCKS, 4 * PAGE)]
    assert refs(caches) == [(0, 4 * PAGE, "abcd")]
    assert caches.group_data_refs[0][0].layout == physical
    assert caches.tensors[0].tensor.data_ptr() == tensor.data_ptr()


def test_one_tensor_of_all_layers_may_have_kernel_blocks() -> None:
    layout = "block layer kv token head dim"
    sizes = SIZES | {"layer": 3, "block": NUM_BLOCKS * 2, "token": 8}
    tensor = engine_view(layout, layout, sizes)
    assert shapes(canonicalize({"x": tensor}, config_of((SPEC, "abc")))) == [(NUM_BLOCKS, 3 * PAGE)]


def test_one_tensor_of_all_positions_has_one_ref_per_group() -> None:
    layout = "block layer kv token head dim"
    tensor = engine_view(layout, layout, SIZES | {"layer": 3})
    config = config_of((SPEC, "abc"), (SPEC, "de"), shared_tensors=(("a", "d"), ("b", "e"), ("c",)))
    caches = canonicalize({"all": tensor}, config)
    assert shapes(caches) == [(NUM_BLOCKS, 3 * PAGE)]
    assert refs(caches, 0) == [(0, 3 * PAGE, "abc")]
    assert refs(caches, 1) == [(0, 2 * PAGE, "de")]


def test_padded_layers_in_one_tensor_keep_their_padding() -> None:
    spec = replace(SPEC, page_size_padded=PAGE + 64)
    row = packed_row(3, page=PAGE + 64)
    step = (PAGE + 64) // 2
    tensor = row.view(torch.float16).as_strided(
        (NUM_BLOCKS, 3, 2, 16, 3, 8), (3 * step, step, 384, 24, 8, 1)
    )
    caches = canonicalize({"x": tensor}, config_of((spec, "abc")))
    assert shapes(caches) == [(NUM_BLOCKS, 3 * (PAGE + 64))]
    assert refs(caches) == [(0, 3 * (PAGE + 64) - 64, "abc")]


@pytest.mark.parametrize("ratio", [1, 2])
def test_padded_layers_in_one_tensor_may_have_kernel_blocks(ratio: int) -> None:
    spec = replace(SPEC, page_size_padded=PAGE + 64)
    step, tokens = (PAGE + 64) // 2 // ratio, 16 // ratio
    storage = torch.zeros(NUM_BLOCKS * 3 * (PAGE + 64) // 2, dtype=torch.float16)
    tensor = storage.as_strided(
        (NUM_BLOCKS * ratio, 3, 2, tokens, 3, 8), (3 * step, step, tokens * 24, 24, 8, 1)
    )
    caches = canonicalize({"x": tensor}, config_of((spec, "abc")))
    assert shapes(caches) == [(NUM_BLOCKS, 3 * (PAGE + 64))]
    assert refs(caches) == [(0, 3 * (PAGE + 64) - 64 // ratio, "abc")]


def test_a_tensor_is_not_of_all_layers_when_their_pages_differ() -> None:
    layout = "block layer kv token head dim"
    tensor = engine_view(layout, layout, SIZES | {"layer": 2})
    wide = replace(SPEC, page_size_padded=2 * PAGE)
    for other in (wide, replace(SPEC, num_kv_heads=5)):
        specs = UniformTypeKVCacheSpecs(tokens_per_block=16, layer_specs={"a": SPEC, "b": other})
        with pytest.raises(InvalidArgumentError, match="also the layers"):
            canonicalize({"x": tensor}, config_of((specs, "ab")))


def test_a_tensor_is_not_of_all_layers_when_they_have_several_states() -> None:
    tensor = torch.zeros(NUM_BLOCKS, 2, 4, 3, dtype=torch.float16)
    with pytest.raises(InvalidArgumentError, match="also the layers"):
        canonicalize({"x": tensor}, config_of((MAMBA, "ab")))


@pytest.mark.parametrize(
    "physical", ["layer block kv token head dim", "layer kv block token head dim"]
)
def test_layers_outermost_are_a_tensor_each(physical: str) -> None:
    tensor = engine_view(physical, physical, SIZES | {"layer": 3})
    caches = canonicalize({"x": tensor}, config_of((SPEC, "abc")))
    halves = 2 if "layer kv" in physical else 1
    assert shapes(caches) == [(NUM_BLOCKS, PAGE // halves)] * 3 * halves
    assert "".join(names for _, _, names in refs(caches)) == "".join(c * halves for c in "abc")


def test_a_layers_tensor_is_not_one_of_all_layers() -> None:
    with pytest.raises(InvalidArgumentError, match=r"also the layers \['b'\]"):
        canonicalize({"a": nhd()}, config_of((SPEC, "ab")))


def test_a_tensor_of_the_only_layer_may_have_a_layer_axis() -> None:
    tensor = torch.zeros(1, NUM_BLOCKS, 2, 16, 3, 8, dtype=torch.float16)
    for name in ("a", "x"):
        caches = canonicalize({name: tensor}, config_of((SPEC, "a")))
        assert shapes(caches) == [(NUM_BLOCKS, PAGE)]
        assert refs(caches) == [(0, PAGE, "a")]


def test_a_tensor_of_the_only_layer_has_no_layer_axis_when_it_reads_without() -> None:
    spec = replace(SPEC, num_kv_heads=1)
    caches = canonicalize({"a": engine_view(NHD, NHD, SIZES | {"head": 1})}, config_of((spec, "a")))
    assert caches.group_data_refs[0][0].layout == NHD


@pytest.mark.parametrize("names", ["a", "ab", "bc"])
def test_heads_with_gaps_that_no_layer_fills_are_refused(names: str) -> None:
    row = torch.zeros(NUM_BLOCKS, 5, 3, 16, 16, dtype=torch.float16)
    spec = replace(SPEC, num_kv_heads=5)
    layers = {name: row[:, :, index] for index, name in enumerate("abc")}
    kv_caches = {name: layers[name] for name in names}
    with pytest.raises(LayoutError, match=f"'{names[0]}'.*5 pieces of 512 bytes, 1536 apart"):
        canonicalize(kv_caches, config_of((spec, names)))
    assert shapes(canonicalize(layers, config_of((spec, "abc")))) == [(NUM_BLOCKS, 5 * 3 * 512)]
