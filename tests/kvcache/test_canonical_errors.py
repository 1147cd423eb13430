"""Canonicalizing: refuses tensors that fit no layout, or two, or whose pages overlap."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
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
    PageBoundsError,
    UnknownLayoutError,
)
from kvxfer.kvcache.canonical import canonicalize
from kvxfer.kvcache.spec import KVCacheSpec, MLASpec, UniformTypeKVCacheSpecs
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
    shapes,
    states,
)

SPLIT = "kv block token head dim"
PADDED = replace(SPEC, page_size_padded=PAGE + 64)
Refused = tuple[Any, Any, dict[str, Any], type[KVXferError], str]


def dense(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.float16)


def pair(second: Any, error: type[KVXferError], match: str) -> Refused:
    """Register another tensor beside a good one."""
    return {"a": nhd(), "b": second}, config_of((SPEC, "ab")), {}, error, match


def word(layout: Any, error: type[KVXferError], match: str, *, name: str = "a") -> Refused:
    """Give a layout for a good tensor."""
    return {"a": nhd()}, config_of((SPEC, "a")), {name: layout}, error, match


def of_states(first: Any, second: Any) -> Refused:
    """Register states that must be one page of 300 bytes."""
    spec = replace(MAMBA, page_size_padded=300)
    kv_caches, config = {"a": [first, second]}, config_of((spec, "a"))
    return kv_caches, config, {}, LayoutError, r"'a'.*300 bytes"


def all_layers(other: KVCacheSpec) -> Refused:
    """Register one tensor for two layers of one group, of which one is unlike the other."""
    tensor = engine_view("block layer kv token head dim", f"layer {NHD}", SIZES | {"layer": 2})
    specs = UniformTypeKVCacheSpecs(tokens_per_block=16, layer_specs={"a": SPEC, "b": other})
    config = config_of((specs, "ab"))
    return {"x": tensor}, config, {}, InvalidArgumentError, "also the layers"


def gaps(names: str) -> Refused:
    """Register layers between whose heads another one lies."""
    row = dense(NUM_BLOCKS, 5, 3, 16, 16)
    kv_caches = {name: row[:, :, "abc".index(name)] for name in names}
    config = config_of((replace(SPEC, num_kv_heads=5), names))
    match = f"'{names[0]}'.*5 pieces of 512 bytes, 1536 apart"
    return kv_caches, config, {}, LayoutError, match


def padding(block_stride: int, num_bytes: int, error: type[KVXferError], match: str) -> Refused:
    """Register padded pages whose padding is not there."""
    tensor = torch.zeros(num_bytes // 2, dtype=torch.float16).as_strided(
        (NUM_BLOCKS, 2, 16, 3, 8), (block_stride // 2, 384, 24, 8, 1)
    )
    return {"a": tensor}, config_of((PADDED, "a")), {}, error, match


class Elsewhere(torch.Tensor):
    device = torch.device("cuda", 0)


def refused() -> dict[str, Callable[[], Refused]]:
    first, second = states(
        replace(MAMBA, page_size_padded=300), torch.zeros(400 * NUM_BLOCKS, dtype=torch.int8)
    )
    closer = states(replace(MAMBA, page_size_padded=240), torch.zeros(2400, dtype=torch.int8))
    kernel = dense(NUM_BLOCKS * 2, 3, 2, 8, 3, 8)
    negated, numbers = torch._neg_view(nhd()), torch.zeros(7, 2, 16, 3, 8, dtype=torch.complex64)
    invalid, unknown = InvalidArgumentError, UnknownLayoutError
    apart = config_of((SPEC, "a"), (SPEC, "b"), shared_tensors=(("a", "b"),))
    states_config = config_of((MAMBA, "a"))
    complex_spec = replace(SPEC, dtype=torch.complex64)
    raw = torch.zeros(NUM_BLOCKS * MAMBA.page_size_bytes, dtype=torch.int8)
    return {
        "missing layer": lambda: ({"a": nhd()}, config_of((SPEC, "ab")), {}, invalid, r"\['b'\]"),
        "three tensors": lambda: pair([nhd()] * 3, invalid, "'b'.*3 tensors"),
        "meta": lambda: pair(nhd().to("meta"), invalid, "meta"),
        "sparse": lambda: pair(nhd().to_sparse(), invalid, "sparse"),
        "another device": lambda: pair(
            nhd().as_subclass(Elsewhere), invalid, r"\['cpu', 'cuda:0'\]"
        ),
        "conjugated": lambda: (
            {"a": numbers.conj()},
            config_of((complex_spec, "a")),
            {},
            unknown,
            "a conjugated view",
        ),
        "negated values": lambda: pair([nhd()[:, 0], negated[:, 1]], unknown, "'b': got a negated"),
        "layers apart": lambda: ({"a": nhd(), "b": nhd()}, apart, {}, LayoutError, "'a' and 'b'"),
        "a layout of nothing": lambda: word(NHD, invalid, "layouts", name="b"),
        "a layout that does not fit": lambda: word(SPLIT, unknown, SPLIT),
        "tokens outermost": lambda: word("token block kv head dim", invalid, "outside 'block'"),
        "too few axes": lambda: word("block token head dim", invalid, "exactly the axes"),
        "a layout of states": lambda: (
            {"a": states(MAMBA, raw)},
            states_config,
            {"a": "block s0 s1"},
            invalid,
            "layouts",
        ),
        "a gap": lambda: of_states(first, second.as_strided(second.shape, second.stride(), 10)),
        "another step": lambda: of_states(
            first, second.as_strided(second.shape, (76, *second.stride()[1:]), 6)
        ),
        "two allocations": lambda: of_states(
            first, torch.zeros(NUM_BLOCKS, 75)[:, :50].view(NUM_BLOCKS, 2, 5, 5)
        ),
        "a step below the page": lambda: of_states(*closer),
        "pages of two sizes": lambda: all_layers(replace(SPEC, page_size_padded=2 * PAGE)),
        "states of all layers": lambda: (
            {"x": dense(NUM_BLOCKS, 2, 4, 3)},
            config_of((MAMBA, "ab")),
            {},
            invalid,
            "also the lay",
        ),
        "gaps of kernel blocks": lambda: (
            {"a": kernel[:, 0], "c": kernel[:, 2]},
            config_of((SPEC, "ac")),
            {},
            LayoutError,
            "'a'.*2 pieces",
        ),
        **{f"gaps of heads, {names}": partial(gaps, names) for names in ("a", "ab", "bc")},
        "too close for padding": lambda: padding(
            PAGE, NUM_BLOCKS * PAGE, LayoutError, f"'a'.*{PAGE} bytes apart.*{PAGE + 64}"
        ),
        "padding beyond the storage": lambda: padding(
            PAGE + 64, NUM_BLOCKS * (PAGE + 64) - 64, PageBoundsError, "'a'"
        ),
    }


@pytest.mark.parametrize("kind", refused())
def test_what_cannot_be_read_is_refused(kind: str) -> None:
    kv_caches, config, layouts, error, match = refused()[kind]()
    with pytest.raises(error, match=match):
        canonicalize(kv_caches, config, layouts=layouts)


ALL_LAYERS = {"head": 3, "layer": NUM_BLOCKS}


@pytest.mark.parametrize(
    ("sizes", "physical", "other"),
    [
        ({"block": 2}, NHD, SPLIT),
        ({"block": 2}, "kv block head token dim", "block kv head token dim"),
        ({"head": 2}, NHD, "block head token kv dim"),
        ({"head": 2}, "block head token kv*dim", "block kv token head*dim"),
        ({"head": 16}, NHD, "block kv head token dim"),
        ({"head": 16}, "block head token kv*dim", "block token head kv*dim"),
        ({"token": 2}, NHD, "block token kv head dim"),
        (ALL_LAYERS, "block layer kv token head dim", f"layer {NHD}"),
        (ALL_LAYERS, f"layer {NHD}", "block layer kv token head dim"),
    ],
    ids=str,
)
def test_a_tensor_that_reads_in_two_ways_shows_both_and_needs_the_callers_word(
    sizes: dict[str, int], physical: str, other: str
) -> None:
    sizes = SIZES | sizes
    spec = replace(SPEC, num_kv_heads=sizes["head"], tokens_per_block=sizes["token"])
    tensor, names = engine_view(physical, physical, sizes), "abcdefg"[: sizes.get("layer", 1)]
    config = config_of((spec, names), num_blocks=sizes["block"])
    with pytest.raises(AmbiguousLayoutError) as caught:
        canonicalize({"a": tensor} if len(names) == 1 else {"x": tensor}, config)
    assert {physical, other} <= set(caught.value.readings)
    assert caught.value.layer_name == ("a" if len(names) == 1 else "x")
    assert all(reading in str(caught.value) for reading in (physical, other))
    for layout in (physical, other) if "layer" not in sizes or physical[0] == "b" else (physical,):
        key = "a" if len(names) == 1 else "x"
        try:
            caches = canonicalize({key: tensor}, config, layouts={key: layout})
        except UnknownLayoutError:
            assert layout == other, "other strides"
            continue
        assert caches.group_data_refs[0][0].layout == layout


def test_one_block_of_two_kernel_blocks_is_not_k_and_v() -> None:
    tensor, config = dense(2, 2, 8, 3, 8), config_of((SPEC, "a"), num_blocks=1)
    with pytest.raises(AmbiguousLayoutError) as caught:
        canonicalize({"a": tensor}, config)
    assert caught.value.readings == tuple(
        f"{layout}, 2 kernel blocks per block" for layout in (NHD, SPLIT)
    )
    split = canonicalize({"a": dense(1, 2, 16, 3, 8)}, config, layouts={"a": SPLIT})
    assert shapes(split) == [(1, PAGE // 2)] * 2, "the caller may split a single block"


@pytest.mark.parametrize("axis", ["block", "token", "head", "dim"])
def test_strides_of_axes_of_size_one_mean_nothing(axis: str) -> None:
    sizes = SIZES | {axis: 1}
    tensor = engine_view(NHD, NHD, sizes)
    strides = list(tensor.stride())
    strides[NHD.split().index(axis)] = 123_456_789
    spec = replace(
        SPEC, tokens_per_block=sizes["token"], num_kv_heads=sizes["head"], head_dim=sizes["dim"]
    )
    config = config_of((spec, "a"), num_blocks=sizes["block"])
    caches = canonicalize({"a": tensor.as_strided(tensor.shape, strides)}, config)
    assert caches.group_data_refs[0][0].layout == NHD


@pytest.mark.parametrize(
    "tensor",
    [
        dense(7, 2, 16, 3, 9),
        dense(6, 2, 16, 3, 8),
        dense(14, 2, 16, 3, 8),
        dense(21, 2, 5, 3, 8),
        dense(7, 2, 16, 3, 8).float(),
        dense(7, 2, 16, 3, 16)[..., :8],
        dense(7, 2, 32, 3, 8)[:, :, :16],
        dense(7, 3, 16, 3, 8)[:, ::2],
        dense(1, 2, 16, 3, 8).expand(7, 2, 16, 3, 8),
        nhd().as_strided((2, 7, 16, 3, 8), (384, 384, 24, 8, 1)),
        dense(3, 7, 2, 16, 8).permute(1, 2, 3, 0, 4),
        dense(0, 2, 16, 3, 8),
    ],
    ids=lambda tensor: f"{tuple(tensor.shape)} {tensor.stride()} {tensor.dtype}",
)
def test_a_tensor_that_reads_in_no_way_shows_what_was_expected(tensor: torch.Tensor) -> None:
    with pytest.raises(UnknownLayoutError) as caught:
        canonicalize({"a": tensor}, config_of((SPEC, "a")))
    error = caught.value
    assert error.layer_name == "a"
    assert all(str(s) in error.actual for s in (tuple(tensor.shape), tensor.stride(), tensor.dtype))
    assert any("(7, 2, 16, 3, 8)" in expected for expected in error.expected)


@pytest.mark.parametrize(
    ("actual", "declared", "fits"),
    [
        (torch.uint8, torch.float8_e4m3fn, True),
        (torch.float8_e4m3fn, torch.uint8, True),
        (torch.int8, torch.float8_e5m2, True),
        (torch.float8_e5m2, torch.float8_e4m3fn, False),
        (torch.int16, torch.float16, False),
    ],
)
def test_only_eight_bit_floats_may_be_registered_as_plain_bytes(
    actual: torch.dtype, declared: torch.dtype, *, fits: bool
) -> None:
    config = config_of((MLASpec(tokens_per_block=16, head_dim=8, dtype=declared), "a"))
    with nullcontext() if fits else pytest.raises(UnknownLayoutError):
        canonicalize({"a": torch.zeros(7, 16, 8, dtype=actual)}, config)


@st.composite
def strided(draw: st.DrawFn) -> tuple[int, int, int]:
    """Draw the offset, the head dimension and the block stride of a layer's pages, in bytes."""
    head_dim = draw(st.integers(1, 4))
    return draw(st.integers(0, 30)), head_dim, 2 * head_dim + draw(st.integers(0, 6))


@pytest.mark.parametrize("one_group", [True, False])
@given(first=strided(), second=strided(), num_blocks=st.integers(1, 4))
@example((0, 2, 8), (13, 2, 8), 3)  # by one byte into the next block
@example((0, 2, 8), (12, 2, 8), 3)  # up to the next block
@example((0, 2, 8), (13, 2, 8), 2)  # into a block that does not exist
@example((0, 2, 8), (11, 2, 8), 2)  # by one byte into the last block
@example((0, 2, 6), (3, 2, 7), 2)  # by one byte, other strides
@example((0, 3, 7), (6, 3, 7), 2)  # a row of two that touch runs into its own next block
@example((0, 1, 4), (0, 2, 4), 1)  # pages of one block that begin alike
@example((0, 1, 4), (2, 1, 8), 4)  # the last page between the first pages of another
def test_pages_are_refused_when_two_layers_share_a_byte(
    first: tuple[int, int, int], second: tuple[int, int, int], num_blocks: int, *, one_group: bool
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
    groups = [(group, "ab")] if one_group else [(specs["a"], "a"), (specs["b"], "b")]
    # Pages of groups may overlay; one block alone has no stride but its own size.
    same_starts = first[::2] == second[::2] and num_blocks > 1 and not one_group
    fine = places[0] == places[1] or places[0].isdisjoint(places[1]) or same_starts
    with nullcontext() if fine else pytest.raises(OverlapError):
        canonicalize(
            kv_caches,
            config_of(*groups, num_blocks=num_blocks),
            layouts=dict.fromkeys("ab", NHD),
        )


def keys_and_values(first: int, last: int) -> list[torch.Tensor]:
    """Make keys and values of one storage, each a number of elements after its start."""
    shape, strides = (NUM_BLOCKS, 16, 3, 8), (384, 24, 8, 1)
    storage = torch.zeros(3 * NUM_BLOCKS * 384, dtype=torch.float16)
    return [storage.as_strided(shape, strides, offset) for offset in (first, last)]


def test_keys_over_values_and_states_over_each_other_are_refused() -> None:
    keys, _ = keys_and_values(0, 0)
    halves = dense(2 * NUM_BLOCKS, 16, 3, 8)
    entries = [
        *(keys_and_values(0, at) for at in (0, 24, 192, 384, 5 * 384, (NUM_BLOCKS - 1) * 384)),
        keys_and_values(24, 0),
        [keys, torch.from_numpy(keys.numpy())],  # another storage of the same memory
        [halves[:NUM_BLOCKS], halves[::2]],  # every other block of one is a block of the other
    ]
    spec = replace(MAMBA, shapes=(MAMBA.shapes[0],) * 2, dtypes=(MAMBA.dtypes[0],) * 2)
    state = torch.zeros(NUM_BLOCKS, *MAMBA.shapes[0], dtype=MAMBA.dtypes[0])
    cases: list[tuple[Any, KVCacheSpec]] = [(each, SPEC) for each in entries]
    for entry, of in (*cases, ([state, state], spec)):
        with pytest.raises(OverlapError, match=r"\['a', 'a'\]"):
            canonicalize({"a": entry}, config_of((of, "a")))
