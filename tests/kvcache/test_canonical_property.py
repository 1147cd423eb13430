"""Canonicalizing against a slow reference: every element is where that puts it."""

from itertools import product
from math import prod
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.kvcache.canonical import canonicalize
from kvxfer.kvcache.spec import (
    FullAttentionSpec,
)
from tests.examples import examples
from tests.kvcache.engine_views import config_of, engine_view

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
    """Draw any engine: layers one by one or interleaved, kernel blocks, padding, offset, order."""
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
    """List every element of every block and half, one by one, in the order of memory."""
    axes = [axis for each in layout.split() for axis in each.split("*")]
    order = []
    for index in product(*(range(sizes[axis]) for axis in axes)):
        at = dict(zip(axes, index, strict=True))
        order.append(at | {"row": at["block"] // ratio})
    return order


@examples(300)
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
    """Allocate the tensors of an engine, each by itself or interleaved in one."""
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
