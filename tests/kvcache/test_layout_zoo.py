"""Layout zoo on real strides: descriptors point at the bytes that an engine's view wrote."""

import ctypes
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import DTypeLike, NDArray

from kvxfer.engine_side import LAYOUT_ZOO, EngineLayout
from kvxfer.errors import InvalidArgumentError, LayoutError, UnknownLayoutError
from kvxfer.kvcache.allocation import AllocationCondition, allocate_canonical, why_not_canonical
from kvxfer.kvcache.canonical import CanonicalKVCaches, attest, canonicalize
from kvxfer.kvcache.config import KVCacheConfig, KVCacheGroup
from kvxfer.kvcache.describer import describe
from kvxfer.kvcache.quantization import KVQuantization
from kvxfer.kvcache.spec import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLASpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from tests.examples import examples
from tests.kvcache.zoo_engines import (
    ZOO,
    AttentionEngine,
    ZooEngine,
    ZooGroup,
    numbers,
    with_kernel_blocks,
)
from tests.kvcache.zoo_states import StateEngine


def payload(
    caches: CanonicalKVCaches, block_id: int, dtype: DTypeLike = np.int32, *, group: int = 0
) -> NDArray[Any]:
    """The bytes of a block, read at the addresses of its descriptors."""
    blocks = describe(caches, group, [block_id])
    pieces = zip(blocks.addresses.tolist(), blocks.lengths.tolist(), strict=True)
    return np.frombuffer(b"".join(ctypes.string_at(*piece) for piece in pieces), dtype)


def named(entry: EngineLayout) -> str:
    return f"{entry.engine}, {entry.name}"


@pytest.mark.parametrize("entry", ZOO, ids=named)
def test_a_block_of_an_engine_is_what_its_views_wrote(entry: EngineLayout) -> None:
    engine = AttentionEngine(entry)
    engine.number()
    caches = canonicalize(engine.kv_caches, engine.config, layouts=engine.layouts)
    inside = [axis for axis in entry.order if axis != "block"]
    expected = numbers(engine.sizes, ["block", *inside], {})
    for block_id in range(engine.config.num_blocks):
        assert payload(caches, block_id).tolist() == expected[block_id].ravel().tolist()
    assert len(describe(caches, 0, [1])) == entry.runs_per_block(engine.sizes)
    attest(engine.kv_caches, engine.config, caches, layouts=engine.layouts)


DTYPES = [torch.float8_e4m3fn, torch.int8, torch.float16, torch.bfloat16, torch.float32]


@st.composite
def positions(draw: st.DrawFn) -> list[tuple[int, ...]]:
    """Draw positions of each group's layers. Layers share memory, within and across groups."""
    num_positions = draw(st.integers(1, 4))
    one = st.integers(0, num_positions - 1)
    groups = draw(st.lists(st.lists(one, min_size=1, max_size=4), min_size=1, max_size=3))
    unused = set(range(num_positions)).difference(*groups)
    return [(*groups[0], *unused), *map(tuple, groups[1:])]


def families(entry: EngineLayout, common: dict[str, Any], num_kv_heads: int) -> list[AttentionSpec]:
    """Draw specs whose pages are alike."""
    if entry.content == "latents":
        return [MLASpec(**common), SlidingWindowMLASpec(**common, sliding_window=5)]
    common = common | {"num_kv_heads": num_kv_heads}
    return [
        FullAttentionSpec(**common),
        SlidingWindowSpec(**common, sliding_window=5),
        ChunkedLocalAttentionSpec(**common, attention_chunk_tokens=5),
        CrossAttentionSpec(**common),
    ]


@st.composite
def attention_engines(draw: st.DrawFn, entry: EngineLayout) -> AttentionEngine:
    """Draw an engine of any model: family, dtype, heads, padding, kernel blocks, sharing."""
    ratio, num_kv_heads = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    tokens, dim = ratio * draw(st.integers(1, 3)), draw(st.integers(1, 4))
    dtype = draw(st.sampled_from(DTYPES))
    common: dict[str, Any] = {"tokens_per_block": tokens, "head_dim": dim, "dtype": dtype}
    if dtype.itemsize == 1:
        common["quantization"] = draw(st.sampled_from(KVQuantization))
    if "kv*dim" in entry.shape.split():
        common["head_dim_v"] = draw(st.none() | st.integers(1, 4))
    alike = families(entry, common, num_kv_heads)
    if "kv" not in entry.allocations:
        padding = draw(st.integers(0, 2)) * 2 * num_kv_heads * tokens * dtype.itemsize
        padded = alike[0].page_size_bytes + padding
        alike = [replace(spec, page_size_padded=padded) for spec in alike]
    groups = [ZooGroup(draw(st.sampled_from(alike)), each) for each in draw(positions())]
    # A kernel block of a layer that has other layers between its heads is no piece of memory.
    may_be_cut = entry.layout == entry.memory or not entry.memory.startswith("block head layer")
    cut = with_kernel_blocks(entry) if may_be_cut and draw(st.booleans()) else entry
    # A lone block has no stride, so layers side by side in it cannot be told from others.
    num_blocks = draw(st.integers(2, 5))
    return AttentionEngine(cut, groups, num_blocks=num_blocks, kernel_blocks_per_block=ratio)


@st.composite
def state_engines(draw: st.DrawFn, entry: EngineLayout) -> StateEngine:
    """Draw an engine of any recurrent model: states, dtypes, padding, sharing."""
    inner = st.lists(st.integers(1, 3), max_size=2)
    shapes = [(*draw(inner), 4) for _ in range(draw(st.integers(1, 3)))]  # states stay aligned
    dtypes = [draw(st.sampled_from(DTYPES)) for _ in shapes]
    if "state" in entry.shape.split():
        shapes, dtypes = [(4 * draw(st.integers(1, 9)),)], [torch.int8]
    spec = MambaSpec(tokens_per_block=8, shapes=tuple(shapes), dtypes=tuple(dtypes))
    if "state" not in entry.allocations:
        padded = spec.page_size_bytes + 4 * draw(st.integers(0, 3))
        spec = replace(spec, page_size_padded=padded)
    groups = [ZooGroup(spec, each) for each in draw(positions())]
    return StateEngine(entry, groups, num_blocks=draw(st.integers(2, 5)))


@pytest.mark.parametrize("entry", LAYOUT_ZOO, ids=named)
@examples(8)
@given(data=st.data())
def test_an_element_is_where_the_order_of_axes_predicts(
    entry: EngineLayout, data: st.DataObject
) -> None:
    strategy = state_engines if entry.content == "states" else attention_engines
    engine: ZooEngine = data.draw(strategy(entry))
    caches = canonicalize(engine.kv_caches, engine.config, layouts=engine.layouts)
    attest(engine.kv_caches, engine.config, caches, layouts=engine.layouts)
    element = data.draw(st.integers(0, engine.num_elements - 1))
    engine.set_bits(element)
    for group in range(len(engine.groups)):
        for block_id in range(engine.config.num_blocks):
            found = np.flatnonzero(payload(caches, block_id, np.uint8, group=group)).tolist()
            mine = block_id == engine.block_of(element)
            assert found == (list(engine.bytes_of(element, group)) if mine else [])


TOLD = {"layer_first", "page_first", "page_first_direct", "page_head"}
"""SGLang's host pools of keys and values: only their owner can tell them apart."""


@pytest.mark.parametrize("entry", ZOO, ids=named)
def test_strides_alone_say_which_layout_it_is(entry: EngineLayout) -> None:
    engine = AttentionEngine(entry)
    if entry.name.removeprefix("Host pool, ") in TOLD:
        with pytest.raises(InvalidArgumentError, match="kv_caches"):
            canonicalize(engine.kv_caches, engine.config)
        return
    engine.number()
    recognised = canonicalize(engine.kv_caches, engine.config)
    told = canonicalize(engine.kv_caches, engine.config, layouts=engine.layouts)
    for block_id in range(engine.config.num_blocks):
        assert payload(recognised, block_id).tolist() == payload(told, block_id).tolist()


@pytest.mark.parametrize("entry", [e for e in ZOO if "kv" in e.allocations], ids=named)
def test_pages_whose_keys_and_values_are_apart_are_not_padded(entry: EngineLayout) -> None:
    (group,) = AttentionEngine(entry).groups
    padded = replace(group.spec, page_size_padded=2 * group.spec.page_size_bytes)
    engine = AttentionEngine(entry, [ZooGroup(padded, group.positions)])
    with pytest.raises(LayoutError, match=f"pages of {padded.page_size_bytes} bytes"):
        canonicalize(engine.kv_caches, engine.config, layouts=engine.layouts)


def test_kernel_blocks_with_other_layers_between_their_heads_are_refused() -> None:
    (entry,) = (entry for entry in ZOO if entry.name == "BHLNC")
    engine = AttentionEngine(with_kernel_blocks(entry))
    with pytest.raises(UnknownLayoutError, match=r"got shape \(10, 7, 4, 12\)"):
        canonicalize(engine.kv_caches, engine.config, layouts=engine.layouts)


@pytest.mark.parametrize("entry", [e for e in ZOO if e.attention_layout], ids=named)
@examples(10)
@given(data=st.data())
def test_what_is_allocated_is_what_the_engine_would_register(
    entry: EngineLayout, data: st.DataObject
) -> None:
    engine, backend = data.draw(attention_engines(entry)), entry.attention_layout
    assert backend is not None
    config, backends = engine.config, [backend] * len(engine.groups)
    kernel_tokens = [engine.sizes["token"]] * len(backends)
    if backend.memory is None or not backend.memory.startswith("block"):
        conditions = {r.condition for r in why_not_canonical(config, backends)}
        one_per_layer = backend.memory is None
        assert conditions == {
            AllocationCondition.LAYER_DIMENSION
            if one_per_layer
            else AllocationCondition.BLOCK_OUTERMOST
        }
        return
    allocation = allocate_canonical(config, backends, tokens_per_kernel_block=kernel_tokens)
    engine.fill()
    for name in config.layer_names:
        allocation.kv_caches[name].copy_(engine.layer_view(name).view(engine.dtype))
    registered = canonicalize(engine.kv_caches, config, layouts=engine.layouts)
    for group in range(len(backends)):
        for block_id in range(config.num_blocks):
            ours = payload(allocation.caches, block_id, np.uint8, group=group)
            theirs = payload(registered, block_id, np.uint8, group=group)
            assert ours.tolist() == theirs.tolist()
        assert len(describe(allocation.caches, group, [1])) == 1


@pytest.mark.parametrize("entry", ZOO, ids=named)
def test_an_attention_backend_has_the_shape_that_is_registered(entry: EngineLayout) -> None:
    engine, backend = AttentionEngine(entry), entry.attention_layout
    if backend is None:
        one_tensor_per_layer = "kv" not in entry.allocations
        assert not one_tensor_per_layer or "block*" in entry.shape
        return
    spec = engine.groups[0].spec
    assert isinstance(spec, AttentionSpec)
    view = engine.layer_view(engine.config.layer_names[0])
    assert tuple(view.shape) == backend.cache_shape(spec, engine.config.num_blocks)


@examples(50)
@given(widths=st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_layers_of_other_widths_may_lie_in_the_same_row(widths: list[int]) -> None:
    common: dict[str, Any] = {"tokens_per_block": 8, "dtype": torch.int32}
    specs = {f"{i}": MLASpec(head_dim=width, **common) for i, width in enumerate(widths)}
    group = UniformTypeKVCacheSpecs(tokens_per_block=8, layer_specs=specs)
    rows = torch.arange(5 * 8 * sum(widths), dtype=torch.int32).view(5, -1)
    pages = torch.split(rows, [8 * width for width in widths], dim=1)
    views = (page.view(5, 8, width) for page, width in zip(pages, widths, strict=True))
    kv_caches = dict(zip(specs, views, strict=True))
    config = KVCacheConfig(5, (KVCacheGroup(group, tuple(specs)),))
    layouts = dict.fromkeys(specs, "block token dim")
    caches = canonicalize(kv_caches, config, layouts=layouts)
    attest(kv_caches, config, caches, layouts=layouts)
    for block_id in range(5):
        assert payload(caches, block_id).tolist() == rows[block_id].tolist()
    assert len(describe(caches, 0, [1])) == 1
