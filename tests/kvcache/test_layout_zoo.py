"""Layout zoo on real strides: descriptors point at the bytes that an engine's view wrote."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvxfer import FullAttentionSpec, KVCacheConfig, KVCacheGroup, MLASpec, canonicalize, describe
from kvxfer.engine_side import LAYOUT_ZOO, EngineLayout
from kvxfer.errors import InvalidArgumentError, LayoutError, UnknownLayoutError
from kvxfer.kvcache import AttentionSpec, UniformTypeKVCacheSpecs, attest
from tests.examples import examples
from tests.kvcache.layout_page import DOCS, IMAGES, PAGE, layout_page, runs_per_block
from tests.kvcache.zoo_engines import ZOO, AttentionEngine, named, with_kernel_blocks


@pytest.mark.parametrize("entry", ZOO, ids=named)
def test_a_block_of_an_engine_is_its_pieces_and_what_its_views_write(entry: EngineLayout) -> None:
    engine = AttentionEngine(entry)
    caches = canonicalize(engine.kv_caches, engine.config, layouts=engine.layouts)
    assert len(describe(caches, 0, [1])) == runs_per_block(entry, engine.sizes)
    attest(engine.kv_caches, engine.config, caches, layouts=engine.layouts)


TOLD = {"layer_first", "page_first", "page_first_direct", "page_head"}
"""SGLang's host pools of keys and values: only their owner can tell them apart."""


@pytest.mark.parametrize("entry", ZOO, ids=named)
def test_strides_alone_say_which_layout_it_is(entry: EngineLayout) -> None:
    engine = AttentionEngine(entry)
    if entry.name.removeprefix("Host pool, ") in TOLD:
        with pytest.raises(InvalidArgumentError, match="kv_caches"):
            canonicalize(engine.kv_caches, engine.config)
        return
    recognised = canonicalize(engine.kv_caches, engine.config)
    attest(engine.kv_caches, engine.config, recognised, layouts=engine.layouts)


@pytest.mark.parametrize("entry", [e for e in ZOO if "kv" in e.allocations], ids=named)
def test_pages_whose_keys_and_values_are_apart_are_not_padded(entry: EngineLayout) -> None:
    (group,) = AttentionEngine(entry).groups
    padded = replace(group.spec, page_size_padded=2 * group.spec.page_size_bytes)
    engine = AttentionEngine(entry, [replace(group, spec=padded)])
    with pytest.raises(LayoutError, match=f"pages of {padded.page_size_bytes} bytes"):
        canonicalize(engine.kv_caches, engine.config, layouts=engine.layouts)


def test_kernel_blocks_with_other_layers_between_their_heads_are_refused() -> None:
    (entry,) = (entry for entry in ZOO if entry.name == "BHLNC")
    engine = AttentionEngine(with_kernel_blocks(entry))
    with pytest.raises(UnknownLayoutError, match=r"got shape \(10, 7, 4, 12\)"):
        canonicalize(engine.kv_caches, engine.config, layouts=engine.layouts)


@pytest.mark.parametrize("name", ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"])
def test_the_names_mean_what_they_mean_in_vllm(name: str) -> None:
    order = pytest.importorskip("vllm.v1.kv_cache_layout").KVCacheLayout[name].stride_order
    logical = ("layer", "block", "head", "token", "kv*dim")
    (entry,) = (entry for entry in LAYOUT_ZOO if entry.name == name)
    assert entry.shape == " ".join(logical[1:])
    assert entry.memory == " ".join(logical[dim] for dim in order)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("DynamicLayer", {}),
        ("StaticLayer", {"max_cache_len": 48}),
        ("DynamicSlidingWindowLayer", {"sliding_window": 33}),
    ],
)
def test_layers_of_transformers_have_the_layout_of_the_zoo(
    kind: str, options: dict[str, int]
) -> None:
    layer = getattr(pytest.importorskip("transformers.cache_utils"), kind)(**options)
    layer.update(*torch.zeros(2, 2, 7, 40, 6))
    parts = layer.keys[1], layer.values[1]
    spec = FullAttentionSpec(tokens_per_block=8, num_kv_heads=7, head_dim=6, dtype=torch.float32)
    config = KVCacheConfig(parts[0].shape[1] // 8, (KVCacheGroup(spec, ("a",)),))
    caches = canonicalize({"a": parts}, config)
    (entry,) = (entry for entry in LAYOUT_ZOO if entry.name == kind)
    assert caches.group_data_refs[0][0].layout.startswith(entry.layout)
    sizes = {"layer": 1, "kv": 2, "head": 7}
    assert len(describe(caches, 0, [1])) == runs_per_block(entry, sizes)


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
    assert len(describe(caches, 0, [1])) == 1


def test_the_page_of_layouts_and_its_pictures_are_up_to_date() -> None:
    files = layout_page()
    committed = {f"{IMAGES}/{path.name}" for path in (DOCS / IMAGES).iterdir()} | {PAGE}
    assert committed == files.keys(), "run `make layouts`"
    for name, text in files.items():
        assert (DOCS / name).read_text() == text, f"{name} is old; run `make layouts`"
