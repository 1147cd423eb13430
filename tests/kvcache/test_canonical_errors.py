"""Canonicalizing: refuses tensors that fit no layout, or two."""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from kvxfer.errors import (
    AmbiguousLayoutError,
    InvalidArgumentError,
    KVXferError,
    LayoutError,
    OverlapError,
    UnknownLayoutError,
)
from kvxfer.kvcache.canonical import canonicalize
from kvxfer.kvcache.spec import (
    KVCacheSpec,
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
    refs,
    shapes,
    states,
)


def bad_inputs() -> dict[str, tuple[dict[str, Any], type[KVXferError], str]]:
    meta = nhd().to("meta")
    return {
        "nothing": ({}, InvalidArgumentError, "kv_caches"),
        "missing layer": ({"a": nhd()}, InvalidArgumentError, r"\['b'\]"),
        "extra layer": ({"a": nhd(), "b": nhd(), "c": nhd()}, InvalidArgumentError, r"\['c'\]"),
        "not a tensor": ({"a": nhd(), "b": 3}, InvalidArgumentError, "'b'"),
        "not tensors": ({"a": nhd(), "b": [3]}, InvalidArgumentError, "'b'"),
        "a string": ({"a": nhd(), "b": "cpu"}, InvalidArgumentError, "'b'"),
        "three tensors": ({"a": nhd(), "b": [nhd()] * 3}, InvalidArgumentError, "'b'.*3 tensors"),
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


def test_the_caller_may_split_a_single_block() -> None:
    tensor = torch.zeros(1, 2, 16, 3, 8, dtype=torch.float16)
    config = config_of((SPEC, "a"), num_blocks=1)
    layouts = {"a": "kv block token head dim"}
    assert shapes(canonicalize({"a": tensor}, config, layouts=layouts)) == [(1, PAGE // 2)] * 2


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
        ({"a": "token block kv head dim"}, InvalidArgumentError),
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


def test_the_last_page_may_overlap_the_first_page_of_another_layer() -> None:
    storage = torch.zeros(100 * 768, dtype=torch.float16)
    shape, inner = (NUM_BLOCKS, 2, 16, 3, 8), (384, 24, 8, 1)
    near = storage.as_strided(shape, (4 * 768, *inner), 0)
    far = storage.as_strided(shape, (8 * 768, *inner), 6 * 4 * 768 + 100)
    with pytest.raises(OverlapError):
        canonicalize({"a": near, "b": far}, config_of((SPEC, "ab")))


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


@st.composite
def strided(draw: st.DrawFn) -> tuple[int, int, int]:
    """Draw the offset, the head dimension and the block stride of a layer's pages, in bytes."""
    head_dim = draw(st.integers(1, 4))
    return draw(st.integers(0, 30)), head_dim, 2 * head_dim + draw(st.integers(0, 6))


@given(first=strided(), second=strided(), num_blocks=st.integers(1, 4))
@example((0, 2, 8), (13, 2, 8), 3)  # by one byte into the next block
@example((0, 2, 8), (12, 2, 8), 3)  # up to the next block
@example((0, 2, 8), (13, 2, 8), 2)  # into a block that does not exist
@example((0, 2, 8), (11, 2, 8), 2)  # by one byte into the last block
@example((0, 2, 6), (3, 2, 7), 2)  # by one byte, other strides
@example((0, 3, 7), (6, 3, 7), 2)  # a row of two that touch runs into its own next block
def test_pages_are_refused_when_two_layers_share_a_byte(
    first: tuple[int, int, int], second: tuple[int, int, int], num_blocks: int
) -> None:
    storage = torch.zeros(100, dtype=torch.int8)
    kv_caches, specs, places = {}, {}, []
    for name, (offset, dim, stride) in zip("ab", (first, second), strict=True):
        shape, strides = (num_blocks, 2, 1, 1, dim), (stride, dim, dim, dim, 1)
        kv_caches[name] = storage.as_strided(shape, strides, offset)
        specs[name] = replace(
            SPEC, tokens_per_block=1, num_kv_heads=1, head_dim=dim, dtype=torch.int8
        )
        starts = range(offset, offset + num_blocks * stride, stride)
        places.append({start + byte for start in starts for byte in range(2 * dim)})
    group = UniformTypeKVCacheSpecs(tokens_per_block=1, layer_specs=specs)
    fine = places[0] == places[1] or places[0].isdisjoint(places[1])
    with nullcontext() if fine else pytest.raises(OverlapError):
        canonicalize(
            kv_caches,
            config_of((group, "ab"), num_blocks=num_blocks),
            layouts=dict.fromkeys("ab", NHD),
        )


def keys_and_values(first: int, last: int) -> list[torch.Tensor]:
    """Make keys at the start of a storage, and values a number of elements further on."""
    shape, strides = (NUM_BLOCKS, 16, 3, 8), (384, 24, 8, 1)
    storage = torch.zeros(3 * NUM_BLOCKS * 384, dtype=torch.float16)
    return [storage.as_strided(shape, strides, offset) for offset in (first, last)]


@pytest.mark.parametrize("offset", [0, 24, 192, 384, 5 * 384, (NUM_BLOCKS - 1) * 384])
@pytest.mark.parametrize("swapped", [False, True])
def test_keys_over_values_are_refused(offset: int, *, swapped: bool) -> None:
    entry = keys_and_values(offset, 0) if swapped else keys_and_values(0, offset)
    with pytest.raises(OverlapError, match=r"\['a', 'a'\]"):
        canonicalize({"a": entry}, config_of((SPEC, "a")))


def test_keys_beside_values_are_not() -> None:
    entry = keys_and_values(0, NUM_BLOCKS * 384)
    assert len(canonicalize({"a": entry}, config_of((SPEC, "a"))).tensors) == 2


def test_keys_over_values_of_another_storage_are_refused() -> None:
    keys, _ = keys_and_values(0, 0)
    values = torch.from_numpy(keys.numpy())
    assert values.untyped_storage()._cdata != keys.untyped_storage()._cdata
    with pytest.raises(OverlapError):
        canonicalize({"a": [keys, values]}, config_of((SPEC, "a")))


def test_keys_of_which_every_other_block_is_a_value_are_refused() -> None:
    storage = torch.zeros(2 * NUM_BLOCKS, 16, 3, 8, dtype=torch.float16)
    with pytest.raises(OverlapError):
        canonicalize({"a": [storage[:NUM_BLOCKS], storage[::2]]}, config_of((SPEC, "a")))


def test_states_over_each_other_are_refused() -> None:
    spec = replace(MAMBA, shapes=(MAMBA.shapes[0],) * 2, dtypes=(MAMBA.dtypes[0],) * 2)
    state = torch.zeros(NUM_BLOCKS, *MAMBA.shapes[0], dtype=MAMBA.dtypes[0])
    with pytest.raises(OverlapError, match=r"\['a', 'a'\]"):
        canonicalize({"a": [state, state]}, config_of((spec, "a")))


def test_layers_of_a_group_may_keep_the_same_keys_and_values() -> None:
    entry = keys_and_values(0, NUM_BLOCKS * 384)
    caches = canonicalize({"a": entry, "b": entry}, config_of((SPEC, "ab")))
    assert [ref.layer_names for ref in caches.group_data_refs[0]] == [("a", "b")] * 2


def test_a_view_whose_bytes_are_not_its_elements_is_refused() -> None:
    numbers = torch.zeros(NUM_BLOCKS, 2, 16, 3, 8, dtype=torch.complex64)
    spec = replace(SPEC, dtype=torch.complex64)
    negated = torch._neg_view(nhd())
    assert canonicalize({"a": numbers}, config_of((spec, "a"))).tensors
    with pytest.raises(UnknownLayoutError, match="layer 'a': got a conjugated view"):
        canonicalize({"a": numbers.conj()}, config_of((spec, "a")))
    with pytest.raises(UnknownLayoutError, match="layer 'b': got a negated view"):
        canonicalize({"a": nhd(), "b": negated}, config_of((SPEC, "ab")))
    with pytest.raises(UnknownLayoutError, match="layer 'a': got a negated view"):
        canonicalize({"a": [nhd()[:, 0], negated[:, 1]]}, config_of((SPEC, "a")))
