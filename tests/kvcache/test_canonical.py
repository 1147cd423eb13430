"""Canonicalizing: every kind of registered cache becomes rows of bytes, or a typed error."""

from dataclasses import replace
from itertools import product
from math import prod
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer.errors import (
    AmbiguousLayoutError,
    InvalidArgumentError,
    KVXferError,
    LayoutError,
    OverlapError,
    PageBoundsError,
    UnknownLayoutError,
)
from kvxfer.kvcache.canonical import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    canonicalize,
)
from kvxfer.kvcache.spec import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    KVCacheSpec,
    MambaSpec,
    MLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from tests.kvcache.engine_views import engine_view

NUM_BLOCKS = 7
SIZES = {"block": NUM_BLOCKS, "kv": 2, "token": 16, "head": 3, "dim": 8}
SPEC = FullAttentionSpec(tokens_per_block=16, num_kv_heads=3, head_dim=8, dtype=torch.float16)
PAGE = SPEC.page_size_bytes
NHD = "block kv token head dim"


def config_of(*groups: tuple[KVCacheSpec, str], **options: Any) -> KVCacheConfig:
    """A config of groups whose layers are the letters of a word."""
    return KVCacheConfig(
        options.pop("num_blocks", NUM_BLOCKS),
        tuple(KVCacheGroup(spec, tuple(names)) for spec, names in groups),
        **options,
    )


def shapes(caches: CanonicalKVCaches) -> list[tuple[int, ...]]:
    return [tuple(each.tensor.shape) for each in caches.tensors]


def refs(caches: CanonicalKVCaches, group: int = 0) -> list[tuple[int, int, str]]:
    return [
        (ref.tensor_idx, ref.page_size_bytes, "".join(ref.layer_names))
        for ref in caches.group_data_refs[group]
    ]


def nhd(**options: Any) -> torch.Tensor:
    return engine_view(NHD, NHD, SIZES, **options)


def packed_row(layers: int, *, page: int = PAGE, num_blocks: int = NUM_BLOCKS) -> torch.Tensor:
    """One allocation in which every block has the pages of all layers."""
    return torch.zeros(num_blocks, layers, page, dtype=torch.int8)


def page_view(row: torch.Tensor, layer: int, *, offset: int = 0) -> torch.Tensor:
    """The NHD view of one layer in a packed row."""
    num_blocks, layers, page = row.shape
    return (
        row.view(torch.float16)
        .view(-1)
        .as_strided(
            (num_blocks, 2, 16, 3, 8),
            (layers * page // 2, 384, 24, 8, 1),
            (layer * page + offset) // 2,
        )
    )


@pytest.mark.parametrize("offset", [0, 24])
@pytest.mark.parametrize(
    ("physical", "logical"),
    [
        (NHD, NHD),
        (NHD, "kv block token head dim"),
        ("block kv head token dim", NHD),
        ("block kv head token dim", "kv block token head dim"),
        ("block head token kv*dim", "block head token kv*dim"),
        ("block token head kv*dim", "block head token kv*dim"),
    ],
)
def test_blocks_outermost_become_one_tensor(physical: str, logical: str, offset: int) -> None:
    tensor = engine_view(physical, logical, SIZES, offset=offset)
    caches = canonicalize({"a": tensor}, config_of((SPEC, "a")))
    assert shapes(caches) == [(NUM_BLOCKS, PAGE)]
    assert caches.tensors[0].page_size_bytes == PAGE
    assert refs(caches) == [(0, PAGE, "a")]
    assert caches.tensors[0].tensor.data_ptr() == tensor.data_ptr()
    assert caches.group_data_refs[0][0].layout == physical
    assert caches.group_specs == (SPEC,)


@pytest.mark.parametrize("offset", [0, 24])
@pytest.mark.parametrize("physical", ["kv block token head dim", "kv block head token dim"])
def test_k_and_v_outermost_become_two_tensors(physical: str, offset: int) -> None:
    tensor = engine_view(physical, "kv block token head dim", SIZES, offset=offset)
    caches = canonicalize({"a": tensor}, config_of((SPEC, "a")))
    assert shapes(caches) == [(NUM_BLOCKS, PAGE // 2)] * 2
    assert refs(caches) == [(0, PAGE // 2, "a"), (1, PAGE // 2, "a")]
    assert caches.tensors[0].tensor.data_ptr() == tensor[0].data_ptr()
    assert caches.tensors[1].tensor.data_ptr() == tensor[1].data_ptr()


def test_latent_attention_becomes_one_tensor() -> None:
    spec = MLASpec(tokens_per_block=16, head_dim=24, dtype=torch.bfloat16)
    tensor = torch.zeros(NUM_BLOCKS, 16, 24, dtype=torch.bfloat16)
    caches = canonicalize({"a": tensor}, config_of((spec, "a")))
    assert shapes(caches) == [(NUM_BLOCKS, 16 * 24 * 2)]


MAMBA = MambaSpec(
    tokens_per_block=16, shapes=((4, 3), (2, 5, 5)), dtypes=(torch.float16, torch.float32)
)


def states(
    spec: MambaSpec, raw: torch.Tensor, *, offset: int = 0, num_blocks: int = NUM_BLOCKS
) -> list[torch.Tensor]:
    """States over one raw allocation, one page after the other."""
    tensors, start = [], offset
    for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True):
        strides = (spec.page_size_bytes // dtype.itemsize, *torch.empty(shape).stride())
        view = raw.view(dtype).as_strided((num_blocks, *shape), strides, start // dtype.itemsize)
        tensors.append(view)
        start += prod(shape) * dtype.itemsize
    return tensors


@pytest.mark.parametrize("offset", [0, 128])
@pytest.mark.parametrize("padding", [0, 40])
def test_states_over_one_allocation_become_one_raw_tensor(offset: int, padding: int) -> None:
    unpadded = MAMBA.unpadded_page_size_bytes
    spec = replace(MAMBA, page_size_padded=unpadded + padding)
    raw = torch.zeros(offset + NUM_BLOCKS * spec.page_size_bytes, dtype=torch.int8)
    caches = canonicalize({"a": states(spec, raw, offset=offset)}, config_of((spec, "a")))
    assert shapes(caches) == [(NUM_BLOCKS, unpadded + padding)]
    assert refs(caches) == [(0, unpadded, "a")]
    assert caches.tensors[0].tensor.data_ptr() == raw.data_ptr() + offset


def test_one_state_may_be_registered_by_itself_or_as_a_list() -> None:
    spec = MambaSpec(tokens_per_block=16, shapes=((5, 5),), dtypes=(torch.float32,))
    tensor = torch.zeros(NUM_BLOCKS, 5, 5)
    for entry in (tensor, [tensor]):
        assert shapes(canonicalize({"a": entry}, config_of((spec, "a")))) == [(NUM_BLOCKS, 100)]


def test_a_single_block_of_states_has_its_padded_page() -> None:
    spec = replace(MAMBA, page_size_padded=300)
    raw = torch.zeros(300, dtype=torch.int8)
    config = config_of((spec, "a"), num_blocks=1)
    assert shapes(canonicalize({"a": states(spec, raw, num_blocks=1)}, config)) == [(1, 300)]


@pytest.mark.parametrize("kind", ["gap", "other step", "two allocations", "step below the page"])
def test_states_that_do_not_make_up_a_page_are_refused(kind: str) -> None:
    spec = replace(MAMBA, page_size_padded=300)
    first, second = states(spec, torch.zeros(400 * NUM_BLOCKS, dtype=torch.int8))
    if kind == "gap":
        second = second.as_strided(second.shape, second.stride(), 10)
    elif kind == "other step":
        second = second.as_strided(second.shape, (76, *second.stride()[1:]), 6)
    elif kind == "two allocations":
        second = torch.zeros(NUM_BLOCKS, 75)[:, :50].view(NUM_BLOCKS, 2, 5, 5)
    else:
        first, second = states(
            replace(spec, page_size_padded=240), first.view(torch.int8).new_zeros(2400)
        )
    with pytest.raises(LayoutError, match=r"'a'.*300 bytes"):
        canonicalize({"a": [first, second]}, config_of((spec, "a")))


@pytest.mark.parametrize("ratio", [2, 4])
def test_kernel_blocks_are_viewed_as_blocks(ratio: int) -> None:
    sizes = SIZES | {"block": NUM_BLOCKS * ratio, "token": 16 // ratio}
    caches = canonicalize({"a": engine_view(NHD, NHD, sizes)}, config_of((SPEC, "a")))
    assert shapes(caches) == [(NUM_BLOCKS, PAGE)]
    assert refs(caches) == [(0, PAGE, "a")]
    layout = caches.group_data_refs[0][0].layout
    assert layout == f"{NHD}, {ratio} kernel blocks per block"


def test_kernel_blocks_with_k_and_v_outermost_are_viewed_as_blocks() -> None:
    layout = "kv block token head dim"
    tensor = engine_view(layout, layout, SIZES | {"block": NUM_BLOCKS * 2, "token": 8})
    caches = canonicalize({"a": tensor}, config_of((SPEC, "a")))
    assert shapes(caches) == [(NUM_BLOCKS, PAGE // 2)] * 2


def test_a_padded_page_is_the_tensors_and_the_unpadded_one_the_refs() -> None:
    spec = replace(SPEC, page_size_padded=PAGE + 64)
    tensor = nhd(block_stride=(PAGE + 64) // 2)
    caches = canonicalize({"a": tensor}, config_of((spec, "a")))
    assert shapes(caches) == [(NUM_BLOCKS, PAGE + 64)]
    assert refs(caches) == [(0, PAGE, "a")]


def test_padded_pages_may_be_cut_into_kernel_blocks() -> None:
    spec = replace(SPEC, page_size_padded=PAGE + 64)
    sizes = SIZES | {"block": NUM_BLOCKS * 2, "token": 8}
    tensor = engine_view(NHD, NHD, sizes, block_stride=(PAGE + 64) // 4)
    caches = canonicalize({"a": tensor}, config_of((spec, "a")))
    assert shapes(caches) == [(NUM_BLOCKS, PAGE + 64)]
    assert refs(caches) == [(0, PAGE + 32, "a")]


def test_padded_pages_with_k_and_v_outermost_have_half_the_padding_each() -> None:
    spec = replace(SPEC, page_size_padded=PAGE + 64)
    layout = "kv block token head dim"
    tensor = engine_view(layout, layout, SIZES, block_stride=(PAGE + 64) // 4)
    caches = canonicalize({"a": tensor}, config_of((spec, "a")))
    assert shapes(caches) == [(NUM_BLOCKS, PAGE // 2 + 32)] * 2
    assert refs(caches) == [(0, PAGE // 2, "a"), (1, PAGE // 2, "a")]


def test_pages_closer_than_their_padding_are_refused() -> None:
    spec = replace(SPEC, page_size_padded=PAGE + 64)
    with pytest.raises(LayoutError, match=f"'a'.*{PAGE} bytes apart.*{PAGE + 64}"):
        canonicalize({"a": nhd()}, config_of((spec, "a")))


def test_padding_beyond_the_storage_is_refused() -> None:
    spec = replace(SPEC, page_size_padded=PAGE + 64)
    stride = (PAGE + 64) // 2
    storage = torch.zeros(NUM_BLOCKS * stride - 32, dtype=torch.float16)
    tensor = storage.as_strided((NUM_BLOCKS, 2, 16, 3, 8), (stride, 384, 24, 8, 1))
    with pytest.raises(PageBoundsError) as caught:
        canonicalize({"a": tensor}, config_of((spec, "a")))
    assert caught.value.layer_name == "a"
    assert caught.value.needed_bytes == caught.value.storage_bytes + 64


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


@pytest.mark.parametrize("layout", [NHD, "kv block token head dim"])
def test_groups_that_overlay_each_other_share_tensors(layout: str) -> None:
    tensor = engine_view(layout, layout, SIZES)
    again = tensor.as_strided(tensor.shape, tensor.stride(), 0)
    caches = canonicalize({"a": tensor, "b": again}, config_of((SPEC, "a"), (SPEC, "b")))
    halves = 1 if layout == NHD else 2
    assert shapes(caches) == [(NUM_BLOCKS, PAGE // halves)] * halves
    assert refs(caches, 0) == [(i, PAGE // halves, "a") for i in range(halves)]
    assert refs(caches, 1) == [(i, PAGE // halves, "b") for i in range(halves)]


def test_groups_that_overlay_each_other_keep_their_own_page_sizes() -> None:
    linear = replace(MAMBA, page_size_padded=PAGE)
    tensor = nhd()
    raw = tensor.view(-1).view(torch.int8)
    caches = canonicalize(
        {"a": tensor, "b": states(linear, raw)}, config_of((SPEC, "a"), (linear, "b"))
    )
    assert shapes(caches) == [(NUM_BLOCKS, PAGE)]
    assert refs(caches, 0) == [(0, PAGE, "a")]
    assert refs(caches, 1) == [(0, linear.unpadded_page_size_bytes, "b")]


def test_layers_of_one_group_that_share_bytes_are_moved_once() -> None:
    tensor = nhd()
    caches = canonicalize({"a": tensor, "b": tensor}, config_of((SPEC, "ab")))
    assert shapes(caches) == [(NUM_BLOCKS, PAGE)]
    assert refs(caches) == [(0, PAGE, "ab")]


def test_a_group_may_have_a_spec_per_layer() -> None:
    wide = replace(SPEC, num_kv_heads=5)
    specs = UniformTypeKVCacheSpecs(tokens_per_block=16, layer_specs={"a": SPEC, "b": wide})
    kv_caches = {"a": nhd(), "b": engine_view(NHD, NHD, SIZES | {"head": 5})}
    caches = canonicalize(kv_caches, config_of((specs, "ab")))
    assert shapes(caches) == [(NUM_BLOCKS, PAGE), (NUM_BLOCKS, wide.page_size_bytes)]
    assert refs(caches) == [(0, PAGE, "a"), (1, wide.page_size_bytes, "b")]
    assert caches.group_specs == (specs,)


def test_layers_in_one_allocation_one_after_the_other_are_a_tensor_each() -> None:
    both = torch.zeros(2, NUM_BLOCKS, 2, 16, 3, 8, dtype=torch.float16)
    caches = canonicalize({"a": both[0], "b": both[1]}, config_of((SPEC, "ab")))
    assert shapes(caches) == [(NUM_BLOCKS, PAGE)] * 2
    assert caches.tensors[1].tensor.data_ptr() == both[1].data_ptr()


def test_layers_are_in_the_order_of_their_group_not_of_registration() -> None:
    tensors = {name: nhd() for name in "cab"}
    caches = canonicalize(tensors, config_of((SPEC, "bc"), (SPEC, "a")))
    assert [each.tensor.data_ptr() for each in caches.tensors] == [
        tensors[name].data_ptr() for name in "bca"
    ]


def test_a_single_block_is_one_page() -> None:
    config = config_of((SPEC, "a"), num_blocks=1)
    for shape in [(1, 2, 16, 3, 8), (2, 1, 16, 3, 8)]:
        caches = canonicalize({"a": torch.zeros(shape, dtype=torch.float16)}, config)
        assert sum(page for _, page, _ in refs(caches)) == PAGE


def test_single_blocks_next_to_each_other_are_a_tensor_each() -> None:
    both = torch.zeros(2, 1, 2, 16, 3, 8, dtype=torch.float16)
    caches = canonicalize({"a": both[0], "b": both[1]}, config_of((SPEC, "ab"), num_blocks=1))
    assert shapes(caches) == [(1, PAGE)] * 2


def test_a_single_padded_block_has_its_padding() -> None:
    spec = replace(SPEC, page_size_padded=PAGE + 64)
    storage = torch.zeros((PAGE + 64) // 2, dtype=torch.float16)
    tensor = storage.as_strided((1, 2, 16, 3, 8), (1, 384, 24, 8, 1))
    caches = canonicalize({"a": tensor}, config_of((spec, "a"), num_blocks=1))
    assert shapes(caches) == [(1, PAGE + 64)]
    assert refs(caches) == [(0, PAGE, "a")]


def test_memory_that_several_storages_share_is_one_tensor() -> None:
    raw = np.zeros(NUM_BLOCKS * PAGE // 2, dtype=np.float16)
    narrow = replace(SPEC, num_kv_heads=1)
    shape, stride = (NUM_BLOCKS, 2, 16, 1, 8), (PAGE // 2, 128, 8, 8, 1)
    beginning = torch.from_numpy(raw[: -PAGE // 4]).as_strided(shape, stride)
    whole = torch.from_numpy(raw).view(NUM_BLOCKS, 2, 16, 3, 8)
    for kv_caches in ({"a": whole, "b": beginning}, {"b": beginning, "a": whole}):
        specs = {"a": SPEC, "b": narrow}
        caches = canonicalize(kv_caches, config_of(*((specs[name], name) for name in kv_caches)))
        assert shapes(caches) == [(NUM_BLOCKS, PAGE)]
        pages = [caches.group_data_refs[group][0].page_size_bytes for group in (0, 1)]
        assert pages == [specs[name].page_size_bytes for name in kv_caches]


def bad_inputs() -> dict[str, tuple[dict[str, Any], type[KVXferError], str]]:
    meta = nhd().to("meta")
    return {
        "nothing": ({}, InvalidArgumentError, "kv_caches"),
        "missing layer": ({"a": nhd()}, InvalidArgumentError, r"\['b'\]"),
        "extra layer": ({"a": nhd(), "b": nhd(), "c": nhd()}, InvalidArgumentError, r"\['c'\]"),
        "not a tensor": ({"a": nhd(), "b": 3}, InvalidArgumentError, "'b'"),
        "not tensors": ({"a": nhd(), "b": [3]}, InvalidArgumentError, "'b'"),
        "a string": ({"a": nhd(), "b": "cpu"}, InvalidArgumentError, "'b'"),
        "two tensors": ({"a": nhd(), "b": [nhd(), nhd()]}, InvalidArgumentError, "'b'.*2 tensors"),
        "no tensor": ({"a": nhd(), "b": []}, InvalidArgumentError, "'b'"),
        "meta": ({"a": meta, "b": meta.clone()}, InvalidArgumentError, "meta"),
        "sparse": ({"a": nhd(), "b": nhd().to_sparse()}, InvalidArgumentError, "sparse"),
        "other dtype": ({"a": nhd(), "b": nhd().float()}, UnknownLayoutError, "'b'.*float32"),
        "other heads": ({"a": nhd(), "b": nhd()[:, :, :, :2]}, UnknownLayoutError, "'b'"),
        "holes in a page": (
            {"a": nhd(), "b": torch.zeros(7, 2, 16, 3, 16, dtype=torch.float16)[..., :8]},
            UnknownLayoutError,
            r"'b'.*\(1536, 768, 48, 16, 1\)",
        ),
        "k is v": (
            {"a": nhd(), "b": nhd().as_strided((2, 7, 16, 3, 8), (384, 384, 24, 8, 1))},
            UnknownLayoutError,
            "'b'",
        ),
        "expanded": ({"a": nhd(), "b": nhd()[:1].expand(7, -1, -1, -1, -1)}, LayoutError, "'b'"),
    }


@pytest.mark.parametrize("kind", list(bad_inputs()))
def test_input_that_cannot_be_used_is_refused(kind: str) -> None:
    kv_caches, error, text = bad_inputs()[kind]
    with pytest.raises(error, match=text):
        canonicalize(kv_caches, config_of((SPEC, "ab")))


def test_caches_on_several_devices_are_refused() -> None:
    class Elsewhere(torch.Tensor):
        device = torch.device("cuda", 0)

    kv_caches = {"a": nhd(), "b": nhd().as_subclass(Elsewhere)}
    with pytest.raises(InvalidArgumentError, match=r"\['cpu', 'cuda:0'\]"):
        canonicalize(kv_caches, config_of((SPEC, "ab")))


def test_what_is_not_a_config_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="config"):
        canonicalize({"a": nhd()}, {"num_blocks": 7})  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="kv_caches"):
        canonicalize([nhd()], config_of((SPEC, "a")))  # type: ignore[arg-type]


def test_two_blocks_are_not_k_and_v_unless_the_caller_says_so() -> None:
    tensor = torch.zeros(2, 2, 16, 3, 8, dtype=torch.float16)
    config = config_of((SPEC, "a"), num_blocks=2)
    with pytest.raises(AmbiguousLayoutError) as caught:
        canonicalize({"a": tensor}, config)
    assert set(caught.value.readings) == {NHD, "kv block token head dim"}
    blocks = canonicalize({"a": tensor}, config, layouts={"a": NHD})
    assert shapes(blocks) == [(2, PAGE)]
    halves = canonicalize({"a": tensor}, config, layouts={"a": "kv block token head dim"})
    assert shapes(halves) == [(2, PAGE // 2)] * 2


@pytest.mark.parametrize(
    ("sizes", "layout"),
    [({"head": 2}, NHD), ({"head": 2}, "block head token kv*dim"), ({"head": 16}, NHD)],
)
def test_heads_that_read_in_two_ways_need_the_callers_word(
    sizes: dict[str, int], layout: str
) -> None:
    spec = replace(SPEC, num_kv_heads=sizes["head"])
    tensor = engine_view(layout, layout, SIZES | sizes)
    with pytest.raises(AmbiguousLayoutError) as caught:
        canonicalize({"a": tensor}, config_of((spec, "a")))
    assert layout in caught.value.readings
    caches = canonicalize({"a": tensor}, config_of((spec, "a")), layouts={"a": layout})
    assert caches.group_data_refs[0][0].layout == layout


def test_as_many_layers_as_blocks_need_the_callers_word() -> None:
    tensor = torch.zeros(NUM_BLOCKS, NUM_BLOCKS, 2, 16, 3, 8, dtype=torch.float16)
    config = config_of((SPEC, "abcdefg"))
    with pytest.raises(AmbiguousLayoutError):
        canonicalize({"x": tensor}, config)
    rows = canonicalize({"x": tensor}, config, layouts={"x": f"block layer {NHD[6:]}"})
    assert shapes(rows) == [(NUM_BLOCKS, 7 * PAGE)]
    layers = canonicalize({"x": tensor}, config, layouts={"x": f"layer {NHD}"})
    assert shapes(layers) == [(NUM_BLOCKS, PAGE)] * 7


@pytest.mark.parametrize(
    ("layouts", "error"),
    [
        ({"b": NHD}, InvalidArgumentError),
        ({"a": "kv block token head dim"}, UnknownLayoutError),
        ({"a": "head block kv token dim"}, InvalidArgumentError),
        ({"a": "block token"}, InvalidArgumentError),
        ({"a": 7}, InvalidArgumentError),
    ],
)
def test_the_callers_word_is_checked(layouts: dict[str, Any], error: type[KVXferError]) -> None:
    with pytest.raises(error):
        canonicalize({"a": nhd()}, config_of((SPEC, "a")), layouts=layouts)


def test_several_states_have_no_layout_to_choose() -> None:
    raw = torch.zeros(NUM_BLOCKS * MAMBA.page_size_bytes, dtype=torch.int8)
    with pytest.raises(InvalidArgumentError, match="layouts"):
        canonicalize(
            {"a": states(MAMBA, raw)}, config_of((MAMBA, "a")), layouts={"a": "block s0 s1"}
        )


def test_layers_said_to_share_a_tensor_must_do_so() -> None:
    config = config_of((SPEC, "a"), (SPEC, "b"), shared_tensors=(("a", "b"),))
    with pytest.raises(LayoutError, match="'a' and 'b'"):
        canonicalize({"a": nhd(), "b": nhd()}, config)


@pytest.mark.parametrize("groups", [((SPEC, "ab"),), ((SPEC, "a"), (SPEC, "b"))], ids=str)
@pytest.mark.parametrize("shift", [24, 768 - 24, 768 * 3 + 24])
def test_pages_that_overlap_in_part_are_refused(
    groups: tuple[tuple[KVCacheSpec, str], ...], shift: int
) -> None:
    storage = torch.zeros(20 * PAGE, dtype=torch.float16)
    shape, stride = (NUM_BLOCKS, 2, 16, 3, 8), (768, 384, 24, 8, 1)
    kv_caches = {n: storage.as_strided(shape, stride, o) for n, o in (("a", 0), ("b", shift))}
    with pytest.raises(OverlapError) as caught:
        canonicalize(kv_caches, config_of(*groups))
    assert set(caught.value.layer_names) == {"a", "b"}


def test_a_row_that_runs_into_the_next_one_is_refused() -> None:
    storage = torch.zeros(40 * PAGE, dtype=torch.float16)
    shape, stride = (NUM_BLOCKS, 2, 16, 3, 8), (1200, 384, 24, 8, 1)
    kv_caches = {n: storage.as_strided(shape, stride, o) for n, o in (("a", 0), ("b", 800))}
    with pytest.raises(OverlapError):
        canonicalize(kv_caches, config_of((SPEC, "ab")))


def test_blocks_of_one_layer_over_k_and_v_of_another_are_refused() -> None:
    tensor = nhd()
    other = tensor.as_strided((2, NUM_BLOCKS, 16, 3, 8), (384 * NUM_BLOCKS, 384, 24, 8, 1))
    with pytest.raises(OverlapError):
        canonicalize({"a": tensor, "b": other}, config_of((SPEC, "a"), (SPEC, "b")))


def test_pages_of_one_group_at_one_place_and_of_two_sizes_are_refused() -> None:
    narrow = replace(SPEC, num_kv_heads=1, page_size_padded=PAGE)
    specs = UniformTypeKVCacheSpecs(tokens_per_block=16, layer_specs={"a": SPEC, "b": narrow})
    tensor = nhd()
    inner = tensor.as_strided((NUM_BLOCKS, 2, 16, 1, 8), (768, 128, 8, 8, 1))
    with pytest.raises(OverlapError):
        canonicalize({"a": tensor, "b": inner}, config_of((specs, "ab")))


def test_pages_between_the_pages_of_others_are_apart() -> None:
    storage = torch.zeros(4 * NUM_BLOCKS * PAGE, dtype=torch.float16)
    shape, inner = (NUM_BLOCKS, 2, 16, 3, 8), (384, 24, 8, 1)
    far = storage.as_strided(shape, (2 * 768, *inner), 0)
    near = storage.as_strided(shape, (768, *inner), 2 * NUM_BLOCKS * 768)
    caches = canonicalize({"a": far, "b": near}, config_of((SPEC, "ab")))
    assert refs(caches) == [(0, PAGE, "a"), (1, PAGE, "b")]


def test_pages_that_touch_the_pages_of_others_are_apart() -> None:
    storage = torch.zeros(8 * NUM_BLOCKS * 768, dtype=torch.float16)
    shape, inner = (NUM_BLOCKS, 2, 16, 3, 8), (384, 24, 8, 1)
    near = storage.as_strided(shape, (4 * 768, *inner), 0)
    far = storage.as_strided(shape, (8 * 768, *inner), 768)
    caches = canonicalize({"a": near, "b": far}, config_of((SPEC, "ab")))
    assert [page for _, page, _ in refs(caches)] == [PAGE, PAGE]
    closer = storage.as_strided(shape, (8 * 768, *inner), 768 - 1)
    with pytest.raises(OverlapError):
        canonicalize({"a": near, "b": closer}, config_of((SPEC, "ab")))


def test_caches_show_what_the_engine_writes_and_the_engine_sees_what_is_loaded() -> None:
    tensor = nhd()
    caches = canonicalize({"a": tensor}, config_of((SPEC, "a")))
    tensor[3] = 1.5
    ones = caches.tensors[0].tensor[3].view(torch.float16)
    assert torch.equal(ones, torch.full((PAGE // 2,), 1.5, dtype=torch.float16))
    caches.tensors[0].tensor[3] = 0
    assert not tensor.any()


def test_caches_keep_the_memory_alive() -> None:
    caches = canonicalize({"a": nhd().fill_(2)}, config_of((SPEC, "a")))
    assert (caches.tensors[0].tensor.view(torch.float16) == 2).all()


def test_caches_print_what_is_where() -> None:
    row = packed_row(2)
    kv_caches = {"a": page_view(row, 0), "b": page_view(row, 1), "c": nhd()}
    text = str(canonicalize(kv_caches, config_of((SPEC, "ab"), (SPEC, "c"))))
    assert text.splitlines() == [
        "2 tensors, 2 groups",
        f"tensor 0: 7 blocks, page {2 * PAGE} bytes, stride {2 * PAGE} bytes, cpu",
        f"tensor 1: 7 blocks, page {PAGE} bytes, stride {PAGE} bytes, cpu",
        f"group 0: 1 refs, {2 * PAGE} bytes per block",
        f"  tensor 0, {2 * PAGE} bytes: a, b ({NHD})",
        f"group 1: 1 refs, {PAGE} bytes per block",
        f"  tensor 1, {PAGE} bytes: c ({NHD})",
    ]
    unnamed = CanonicalKVCaches(
        [CanonicalKVCacheTensor(torch.zeros(2, 8, dtype=torch.int8), 8)],
        [[CanonicalKVCacheRef(0, 8)]],
    )
    assert str(unnamed).endswith("  tensor 0, 8 bytes: layers not named")


@pytest.mark.parametrize(
    ("tensor", "page"),
    [
        (torch.zeros(4, 8), 8),
        (torch.zeros(4, 8, dtype=torch.int8), 4),
        (torch.zeros(4, 8, dtype=torch.int8)[:, ::2], 4),
        (torch.zeros(4, 8, dtype=torch.int8)[:1].expand(4, 8), 8),
        (torch.zeros(32, dtype=torch.int8), 32),
        (torch.zeros(0, 8, dtype=torch.int8), 8),
    ],
)
def test_a_canonical_tensor_is_rows_of_bytes(tensor: torch.Tensor, page: int) -> None:
    with pytest.raises(InvalidArgumentError, match="tensor"):
        CanonicalKVCacheTensor(tensor, page)


LAYOUTS = [
    "block kv token head dim",
    "block kv head token dim",
    "block head kv token dim",
    "block token kv head dim",
    "block head token kv*dim",
    "kv block token head dim",
    "kv block head token dim",
]


@st.composite
def engines(draw: st.DrawFn) -> dict[str, Any]:
    """Any engine: layers one by one or interleaved, kernel blocks, padding, offset, permutation."""
    layout = draw(st.sampled_from(LAYOUTS))
    return {
        "layout": layout,
        "logical": " ".join(draw(st.permutations(layout.split()))),
        "num_blocks": draw(st.integers(2, 5)),  # one block of kernel blocks may read in two ways
        "ratio": draw(st.sampled_from([1, 2, 3])),
        "tokens": draw(st.integers(1, 3)),
        "heads": draw(st.integers(1, 3)),
        "dim": draw(st.integers(1, 3)),
        "dtype": draw(st.sampled_from([torch.int8, torch.int16, torch.int32])),
        "offset": draw(st.integers(0, 9)),
        "num_layers": draw(st.integers(1, 3)),
        "interleaved": draw(st.booleans()),
        "padding": draw(st.integers(0, 3)),
    }


def slow_page(layout: str, sizes: dict[str, int], ratio: int) -> list[dict[str, int]]:
    """Every element of every block and half, one by one, in the order in which memory has them."""
    axes = [axis for each in layout.split() for axis in each.split("*")]
    order = []
    for index in product(*(range(sizes[axis]) for axis in axes)):
        at = dict(zip(axes, index, strict=True))
        order.append(at | {"row": at["block"] // ratio})
    return order


@settings(max_examples=300, deadline=None)
@given(engine=engines(), data=st.data())
def test_an_element_is_found_where_a_slow_reference_says(
    engine: dict[str, Any], data: st.DataObject
) -> None:
    layout, ratio, dtype = engine["layout"], engine["ratio"], engine["dtype"]
    sizes = {
        "block": engine["num_blocks"] * ratio,
        "kv": 2,
        "token": engine["tokens"],
        "head": engine["heads"],
        "dim": engine["dim"],
    }
    outer = layout.startswith("kv")
    step = prod(sizes[a] for a in ("kv", "token", "head", "dim")) // (2 if outer else 1)
    padded = step + (0 if outer else engine["padding"])
    names = "abc"[: engine["num_layers"]]
    kv_caches = register(engine, sizes, padded, names)
    spec = FullAttentionSpec(
        tokens_per_block=engine["tokens"] * ratio,
        num_kv_heads=engine["heads"],
        head_dim=engine["dim"],
        dtype=dtype,
        page_size_padded=None if padded == step else padded * ratio * dtype.itemsize,
    )
    config = config_of((spec, names), num_blocks=engine["num_blocks"])
    caches = canonicalize(kv_caches, config, layouts=dict.fromkeys(names, layout))

    name = data.draw(st.sampled_from(names))
    order = slow_page(layout, sizes, ratio)
    at = data.draw(st.sampled_from(order))
    write(kv_caches[name], layout, engine["logical"], sizes, at)

    same_piece = [e for e in order if e["row"] == at["row"] and (not outer or e["kv"] == at["kv"])]
    before = same_piece.index(at)
    kernel_block, within = divmod(before, step)
    interleaved = engine["interleaved"] and not outer
    layers_in_row = len(names) if interleaved else 1
    position = names.index(name) if interleaved else 0
    offset = ((kernel_block * layers_in_row + position) * padded + within) * dtype.itemsize
    group_refs = [ref for ref in caches.group_data_refs[0] if name in ref.layer_names]
    ref = group_refs[at["kv"] if outer and len(group_refs) == 2 else 0]
    for index, each in enumerate(caches.tensors):
        found = [tuple(place) for place in each.tensor.nonzero().tolist()]
        if index == ref.tensor_idx:
            assert found == [(at["row"], offset + byte) for byte in range(dtype.itemsize)]
            assert offset + dtype.itemsize <= ref.page_size_bytes <= each.page_size_bytes
        else:
            assert not found


def register(
    engine: dict[str, Any], sizes: dict[str, int], padded: int, names: str
) -> dict[str, torch.Tensor]:
    """Tensors of an engine, each in its own allocation or interleaved in one."""
    layout, logical, dtype = engine["layout"], engine["logical"], engine["dtype"]
    outer = layout.startswith("kv")
    if not engine["interleaved"] or outer:
        return {
            name: engine_view(
                layout, logical, sizes, dtype=dtype, offset=engine["offset"], block_stride=padded
            )
            for name in names
        }
    first = engine_view(
        layout,
        logical,
        sizes,
        dtype=dtype,
        offset=engine["offset"],
        block_stride=padded * len(names),
    )
    return {
        name: first.as_strided(first.shape, first.stride(), first.storage_offset() + index * padded)
        for index, name in enumerate(names)
    }


def write(
    tensor: torch.Tensor, layout: str, logical: str, sizes: dict[str, int], at: dict[str, int]
) -> None:
    """Set all bits of one element through the engine's view."""
    index = []
    for axis in logical.split():
        position = 0
        for factor in axis.split("*"):
            position = position * sizes[factor] + at[factor]
        index.append(position)
    tensor[tuple(index)] = -1
