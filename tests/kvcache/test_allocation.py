"""Canonical allocation: every byte of every layer is where a slow reference puts it."""

from dataclasses import replace
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from kvxfer.kvcache.allocation import AttentionLayout, allocate_canonical
from kvxfer.kvcache.canonical import attest, canonicalize
from kvxfer.kvcache.config import KVCacheConfig, KVCacheGroup
from kvxfer.kvcache.describer import describe
from kvxfer.kvcache.spec import (
    AttentionSpec,
    FullAttentionSpec,
    MLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from tests.examples import examples

NHD = AttentionLayout("kv block token head dim", "block layer kv token head dim")
BACKENDS = [
    NHD,
    AttentionLayout("kv block token head dim", "block head layer kv token dim"),
    AttentionLayout("block kv token head dim", "block layer kv head token dim"),
    AttentionLayout("block kv token head dim", "block kv head layer token dim"),
    AttentionLayout("block head token kv*dim", "block layer head token kv*dim"),
    AttentionLayout("block head token kv*dim", "block layer token head kv*dim"),
    AttentionLayout("block head token kv*dim", "block head layer token kv*dim"),
]
LATENT = AttentionLayout("block token dim", "block layer token dim")
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
FULL = FullAttentionSpec(tokens_per_block=16, num_kv_heads=2, head_dim=8, dtype=torch.float16)
SLIDING = SlidingWindowSpec(
    tokens_per_block=16, num_kv_heads=2, head_dim=8, dtype=torch.float16, sliding_window=32
)
NHD_PAGE = "block kv token head dim"


@st.composite
def models(draw: st.DrawFn) -> dict[str, Any]:
    """Draw any model: groups of any family and number of layers, each with kernel blocks."""
    latent = draw(st.integers(0, 4)) == 0
    backend = LATENT if latent else draw(st.sampled_from(BACKENDS))
    tokens, padding = draw(st.sampled_from([6, 12])), draw(st.sampled_from([0, 0, 12]))
    dtype = draw(st.sampled_from([torch.int8, torch.float8_e4m3fn, torch.float16, torch.float32]))
    heads, dim = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    groups = []
    for group, num_layers in enumerate(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))):
        # Pages of another shape are as large.
        shape = (heads, dim) if draw(st.booleans()) else (dim, heads)
        common: dict[str, Any] = {"tokens_per_block": tokens, "dtype": dtype}
        paged = {**common, "num_kv_heads": shape[0], "head_dim": shape[1]}
        families: list[AttentionSpec] = [
            FullAttentionSpec(**paged),
            SlidingWindowSpec(**paged, sliding_window=8),
        ]
        if latent:
            families = [MLASpec(**common, head_dim=heads * dim)]
        spec = draw(st.sampled_from(families))
        page = spec.unpadded_page_size_bytes + padding * dtype.itemsize
        spec = replace(spec, page_size_padded=page if padding else None)
        names = tuple(f"{group}.{layer}" for layer in range(num_layers))
        groups.append(KVCacheGroup(spec, names))
    positions = [
        tuple(group.layer_names[index] for group in groups if index < len(group.layer_names))
        for index in range(max(len(group.layer_names) for group in groups))
    ]
    if draw(st.booleans()):  # a layer that reads the cache of another one of its group
        first = groups[0]
        groups[0] = KVCacheGroup(first.spec, (*first.layer_names, "0.again"))
        positions[0] += ("0.again",)
    shuffled = tuple(draw(st.permutations(positions)))
    return {
        "config": KVCacheConfig(draw(st.integers(1, 4)), tuple(groups), shuffled),
        "backends": [backend] * len(groups),
        "kernel_tokens": [tokens // draw(st.sampled_from([1, 2, 3])) for _ in groups],
    }


def slow_offset(model: dict[str, Any], group: int, name: str, at: dict[str, int]) -> int:
    """Compute the byte of a row at which an element lies, axis by axis from the inside."""
    config, backend = model["config"], model["backends"][group]
    spec = config.groups[group].spec
    sizes = dict(zip(backend.axes, at["shape"], strict=True))  # type: ignore[call-overload]
    positions = config.shared_tensors
    ratio = spec.tokens_per_block // model["kernel_tokens"][group]
    axes = backend.memory.split()
    at = at | {"layer": next(i for i, names in enumerate(positions) if name in names)}
    page = spec.page_size_bytes // ratio
    interleaved = prod(sizes[axis] for axis in axes[1 : axes.index("layer")])
    offset, step = 0, spec.dtype.itemsize
    for axis in reversed(axes[1:]):
        step = page if axis == "layer" and interleaved == 1 else step
        offset += at[axis] * step
        step *= len(positions) if axis == "layer" else sizes[axis]
    return int(offset + at["block"] % ratio * page * len(positions))


@examples(200)
@given(model=models(), data=st.data())
def test_an_element_is_found_where_a_slow_reference_says(
    model: dict[str, Any], data: st.DataObject
) -> None:
    config = model["config"]
    allocation = allocate_canonical(
        config, model["backends"], tokens_per_kernel_block=model["kernel_tokens"]
    )
    name = data.draw(st.sampled_from(config.layer_names))
    group = int(name.split(".")[0])
    view, backend = allocation.kv_caches[name], model["backends"][group]
    index = tuple(data.draw(st.integers(0, size - 1)) for size in view.shape)
    view.view(INTEGERS[view.element_size()])[index] = -1

    spec = config.groups[group].spec
    ratio = spec.tokens_per_block // model["kernel_tokens"][group]
    at = dict(zip(backend.axes, index, strict=True))
    offset = slow_offset(model, group, name, at | {"shape": view.shape})
    (rows,) = allocation.caches.tensors
    (ref,) = allocation.caches.group_data_refs[group]
    found = [tuple(place) for place in rows.tensor.nonzero().tolist()]
    assert found == [(at["block"] // ratio, offset + i) for i in range(spec.dtype.itemsize)]
    assert offset + spec.dtype.itemsize <= ref.page_size_bytes


def registered_layout(backend: AttentionLayout) -> str | None:
    """List the axes of one layer in memory, where its page is one piece of the row."""
    assert backend.memory is not None
    axes = backend.memory.split()
    return " ".join(axis for axis in axes if axis != "layer") if axes[1] == "layer" else None


@examples(80)
@given(model=models())
def test_views_registered_per_layer_canonicalize_into_the_same_rows(model: dict[str, Any]) -> None:
    config, backends = model["config"], model["backends"]
    layout = registered_layout(backends[0])
    # The stride of a single block means nothing, so it does not join the layers.
    assume(layout is not None and config.num_blocks > 1)
    allocation = allocate_canonical(
        config, backends, tokens_per_kernel_block=model["kernel_tokens"]
    )
    layouts = dict.fromkeys(config.layer_names, str(layout))
    attest(allocation.kv_caches, config, allocation.caches, layouts=layouts)
    assert not allocation.buffer.any()
    registered = canonicalize(allocation.kv_caches, config, layouts=layouts)
    assert len(registered.tensors) == 1
    for group in range(len(config.groups)):
        ours, theirs = allocation.caches.group_data_refs[group], registered.group_data_refs[group]
        assert [ref.page_size_bytes for ref in ours] == [ref.page_size_bytes for ref in theirs]
        block_ids = list(range(config.num_blocks))
        one = describe(allocation.caches, group, block_ids)
        other = describe(registered, group, block_ids)
        assert one.addresses.tolist() == other.addresses.tolist()
        assert one.lengths.tolist() == other.lengths.tolist()


GEMMA = KVCacheConfig(
    6,
    (
        KVCacheGroup(FULL, ("0", "1", "2")),
        KVCacheGroup(SLIDING, ("3", "4")),
        KVCacheGroup(SLIDING, ("5", "6")),
    ),
    (("0", "3", "5"), ("1", "4", "6"), ("2",)),
)


def test_a_block_of_any_group_is_one_piece() -> None:
    allocation = allocate_canonical(GEMMA, [NHD] * 3, tokens_per_kernel_block=[16, 8, 16])
    row = 3 * FULL.page_size_bytes
    (tensor,) = allocation.caches.tensors
    assert tuple(tensor.tensor.shape) == (6, row)
    assert allocation.buffer.shape == (6 * row,)
    assert not allocation.buffer.any()
    for group, num_layers in enumerate((3, 2, 2)):
        blocks = describe(allocation.caches, group, [4, 1])
        assert blocks.addresses.tolist() == [
            allocation.buffer.data_ptr() + block * row for block in (4, 1)
        ]
        # The second group's kernel blocks spread its two layers over the whole row.
        end = row - (3 - num_layers) * FULL.page_size_bytes // (2 if group == 1 else 1)
        assert blocks.lengths.tolist() == [end, end]


def test_the_refs_say_whose_pages_they_are_and_how_they_read() -> None:
    allocation = allocate_canonical(GEMMA, [NHD] * 3, tokens_per_kernel_block=[16, 8, 16])
    (first,), (second,), _ = allocation.caches.group_data_refs
    assert (first.layer_names, first.layout) == (("0", "1", "2"), NHD.memory)
    assert second.layout == f"{NHD.memory}, 2 kernel blocks per block"
    assert allocation.caches.group_specs == (FULL, SLIDING, SLIDING)


def test_layers_of_one_group_may_have_their_own_specs() -> None:
    narrow = replace(FULL, num_kv_heads=4, head_dim=4)
    specs = UniformTypeKVCacheSpecs(tokens_per_block=16, layer_specs={"a": FULL, "b": narrow})
    config = KVCacheConfig(6, (KVCacheGroup(specs, ("a", "b")),))
    allocation = allocate_canonical(config, [NHD])
    assert tuple(allocation.kv_caches["a"].shape) == (2, 6, 16, 2, 8)
    assert tuple(allocation.kv_caches["b"].shape) == (2, 6, 16, 4, 4)
    attest(allocation.kv_caches, config, allocation.caches, layouts={"a": NHD_PAGE})


def test_a_tensor_of_all_layers_canonicalizes_into_the_same_caches() -> None:
    backend = AttentionLayout("kv block token head dim", "block head layer kv token dim")
    allocation = allocate_canonical(GEMMA, [backend] * 3)
    layered = {"all": allocation.buffer.view(FULL.dtype).view(6, 2, 3, 2, 16, 8)}
    ours = allocation.caches
    theirs = canonicalize(layered, GEMMA, layouts={"all": str(backend.memory)})
    assert ours.group_data_refs == theirs.group_data_refs
    (our_rows,), (their_rows,) = ours.tensors, theirs.tensors
    assert our_rows.tensor.data_ptr() == their_rows.tensor.data_ptr()
    assert our_rows.tensor.stride() == their_rows.tensor.stride()
    attest(layered, GEMMA, ours, layouts={"all": str(backend.memory)})


def test_heads_around_layers_canonicalize_into_the_same_rows() -> None:
    backend = AttentionLayout("kv block token head dim", "block head layer kv token dim")
    allocation = allocate_canonical(GEMMA, [backend] * 3)
    layouts = dict.fromkeys(GEMMA.layer_names, "block head kv token dim")
    registered = canonicalize(allocation.kv_caches, GEMMA, layouts=layouts)
    attest(allocation.kv_caches, GEMMA, allocation.caches, layouts=layouts)
    for group in range(3):
        ours, theirs = (describe(c, group, [4, 1]) for c in (allocation.caches, registered))
        assert ours.addresses.tolist() == theirs.addresses.tolist()
        assert ours.lengths.tolist() == theirs.lengths.tolist()


def test_a_single_head_does_not_part_the_layers_from_their_padding() -> None:
    spec = replace(FULL, num_kv_heads=1, page_size_padded=600)
    config = KVCacheConfig(6, (KVCacheGroup(spec, ("a", "b")),))
    backend = AttentionLayout("kv block token head dim", "block head layer kv token dim")
    allocation = allocate_canonical(config, [backend])
    first, second = allocation.kv_caches.values()
    assert second.data_ptr() - first.data_ptr() == 600
    layered = allocation.buffer.view(spec.dtype).as_strided(
        (6, 1, 2, 2, 16, 8), (600, 600, 300, 128, 8, 1)
    )
    registered = canonicalize({"all": layered}, config, layouts={"all": str(backend.memory)})
    (ours,), (theirs,) = allocation.caches.group_data_refs[0], registered.group_data_refs[0]
    assert (ours.page_size_bytes, ours.layout) == (theirs.page_size_bytes, theirs.layout)


@pytest.mark.gpu
def test_a_block_is_one_piece_of_device_memory() -> None:
    allocation = allocate_canonical(GEMMA, [NHD] * 3, device="cuda")
    assert allocation.buffer.is_cuda
    layouts = dict.fromkeys(GEMMA.layer_names, NHD_PAGE)
    attest(allocation.kv_caches, GEMMA, allocation.caches, layouts=layouts)


@pytest.mark.gpu
def test_host_memory_is_pinned() -> None:
    assert allocate_canonical(GEMMA, [NHD] * 3, pinned=True).buffer.is_pinned()
