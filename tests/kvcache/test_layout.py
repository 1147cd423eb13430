"""Layouts: axis strings, and the recognition of a tensor's layout."""

from typing import Any

import pytest
import torch

from kvxfer.errors import AmbiguousLayoutError, InvalidArgumentError, UnknownLayoutError
from kvxfer.kvcache.layout import KVLayout, recognise
from kvxfer.kvcache.spec import FullAttentionSpec, KVCacheSpec, MambaSpec, MLASpec
from tests.kvcache.engine_views import engine_view

SIZES = {"block": 7, "kv": 2, "token": 16, "head": 3, "dim": 8}


def spec_of(**sizes: int) -> FullAttentionSpec:
    merged = SIZES | sizes
    return FullAttentionSpec(
        tokens_per_block=merged["token"],
        num_kv_heads=merged["head"],
        head_dim=merged["dim"],
        dtype=torch.float16,
    )


def test_a_layout_is_its_axes() -> None:
    layout = KVLayout.parse("block head token kv*dim")
    assert layout.axes == ("block", "head", "token", "kv*dim")
    assert layout.factors == ("block", "head", "token", "kv", "dim")
    assert layout.outer_axes == ()
    assert KVLayout.parse("layer kv block token head dim").outer_axes == ("layer", "kv")
    assert str(layout) == "block head token kv*dim"
    assert KVLayout.parse(layout) is layout


@pytest.mark.parametrize(
    "text", ["", "token dim", "block token token", "block to-ken", "block kv*", 3]
)
def test_a_layout_that_cannot_be_is_refused(text: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="layout"):
        KVLayout.parse(text)


@pytest.mark.parametrize(
    ("physical", "logical"),
    [
        ("block kv token head dim", "block kv token head dim"),
        ("block kv token head dim", "kv block token head dim"),
        ("block kv head token dim", "block kv token head dim"),
        ("block kv head token dim", "kv block token head dim"),
        ("block head kv token dim", "block head kv token dim"),
        ("block token kv head dim", "block token kv head dim"),
        ("block token head kv*dim", "block head token kv*dim"),
        ("block head token kv*dim", "block head token kv*dim"),
        ("kv block token head dim", "kv block token head dim"),
        ("kv block token head dim", "block kv token head dim"),
        ("kv block head token dim", "kv block token head dim"),
        ("block kv token head*dim", "block kv token head*dim"),
        ("kv block token head*dim", "kv block token head*dim"),
    ],
)
def test_strides_decide_and_the_order_of_the_shape_does_not(physical: str, logical: str) -> None:
    tensor = engine_view(physical, logical, SIZES)
    assert str(recognise(tensor, spec_of(), 7)) == physical


@pytest.mark.parametrize("logical", ["block token dim", "token dim block"])
def test_latent_attention_has_one_vector_per_token(logical: str) -> None:
    spec = MLASpec(tokens_per_block=16, head_dim=8, dtype=torch.float16)
    tensor = engine_view("block token dim", logical, SIZES)
    assert str(recognise(tensor, spec, 7)) == "block token dim"
    with_head = engine_view("block token head dim", "block token head dim", SIZES | {"head": 1})
    assert str(recognise(with_head, spec, 7)) == "block token head dim"


@pytest.mark.parametrize("physical", ["block token head kv*dim", "block head token kv*dim"])
def test_keys_and_values_of_unequal_width_are_packed(physical: str) -> None:
    spec = FullAttentionSpec(
        tokens_per_block=16, num_kv_heads=3, head_dim=8, head_dim_v=4, dtype=torch.float16
    )
    tensor = engine_view(physical, "block head token kv*dim", SIZES | {"kv*dim": 12})
    assert str(recognise(tensor, spec, 7)) == physical
    with pytest.raises(InvalidArgumentError, match="layout"):
        recognise(tensor, spec, 7, layout="block kv token head dim")


@pytest.mark.parametrize("index", [0, 1])
def test_a_state_is_one_dense_array_per_block(index: int) -> None:
    spec = MambaSpec(
        tokens_per_block=1, shapes=((4, 3), (2, 4, 4)), dtypes=(torch.float16, torch.float32)
    )
    tensor = torch.zeros(7, *spec.shapes[index], dtype=spec.dtypes[index])
    expected = ("block s0 s1", "block s0 s1 s2")[index]
    assert str(recognise(tensor, spec, 7, tensor_index=index)) == expected


@pytest.mark.parametrize("ratio", [2, 4, 16])
@pytest.mark.parametrize("physical", ["block kv token head dim", "kv block token head dim"])
def test_kernel_blocks_may_be_smaller_than_blocks(ratio: int, physical: str) -> None:
    small = SIZES | {"block": 7 * ratio, "token": 16 // ratio}
    if small["token"] == 2:
        pytest.skip("two tokens look like K and V")
    assert str(recognise(engine_view(physical, physical, small), spec_of(), 7)) == physical


@pytest.mark.parametrize(
    ("physical", "num_layers"),
    [
        ("block layer kv token head dim", 4),
        ("block layer kv head token dim", 4),
        ("block head layer kv token dim", 4),
        ("block layer head token kv*dim", 4),
        ("layer block kv token head dim", 4),
        ("layer kv block token head dim", 4),
    ],
)
def test_a_tensor_of_all_layers_has_one_more_axis(physical: str, num_layers: int) -> None:
    tensor = engine_view(physical, physical, SIZES | {"layer": num_layers})
    assert str(recognise(tensor, spec_of(), 7, num_layers=num_layers)) == physical
    with pytest.raises(UnknownLayoutError):
        recognise(tensor, spec_of(), 7)


@pytest.mark.parametrize(
    ("sizes", "physical", "other"),
    [
        ({"block": 2}, "block kv token head dim", "kv block token head dim"),
        ({"block": 2}, "kv block head token dim", "block kv head token dim"),
        ({"head": 2}, "block kv token head dim", "block head token kv dim"),
        ({"head": 2}, "block head token kv*dim", "block kv token head*dim"),
        ({"head": 16}, "block kv token head dim", "block kv head token dim"),
        ({"head": 16}, "block head token kv*dim", "block token head kv*dim"),
        ({"token": 2}, "block kv token head dim", "block token kv head dim"),
    ],
    ids=str,
)
def test_a_tensor_that_reads_in_two_ways_shows_both(
    sizes: dict[str, int], physical: str, other: str
) -> None:
    tensor = engine_view(physical, physical, SIZES | sizes)
    spec, num_blocks = spec_of(**sizes), (SIZES | sizes)["block"]
    with pytest.raises(AmbiguousLayoutError) as caught:
        recognise(tensor, spec, num_blocks, layer_name="layer.0")
    assert {physical, other} <= set(caught.value.readings)
    assert caught.value.layer_name == "layer.0"
    assert physical in str(caught.value)
    assert other in str(caught.value)


@pytest.mark.parametrize("ratio", [1, 2])
def test_one_block_of_two_kernel_blocks_is_not_k_and_v(ratio: int) -> None:
    sizes = SIZES | {"block": ratio, "token": 16 // ratio}
    tensor = engine_view("block kv token head dim", "block kv token head dim", sizes)
    if ratio == 1:
        assert str(recognise(tensor, spec_of(), 1)) == "block kv token head dim"
        return
    with pytest.raises(AmbiguousLayoutError) as caught:
        recognise(tensor, spec_of(), 1)
    assert caught.value.readings == (
        "block kv token head dim, 2 kernel blocks per block",
        "kv block token head dim, 2 kernel blocks per block",
    )


def test_as_many_layers_as_blocks_read_in_two_ways() -> None:
    tensor = torch.zeros(7, 7, 2, 16, 3, 8, dtype=torch.float16)
    with pytest.raises(AmbiguousLayoutError) as caught:
        recognise(tensor, spec_of(), 7, num_layers=7)
    assert set(caught.value.readings) == {
        "block layer kv token head dim",
        "layer block kv token head dim",
    }


@pytest.mark.parametrize("layout", ["block kv token head dim", "kv block token head dim"])
def test_the_caller_may_say_which_reading_it_is(layout: str) -> None:
    tensor = torch.zeros(2, 2, 16, 3, 8, dtype=torch.float16)
    assert str(recognise(tensor, spec_of(block=2), 2, layout=layout)) == layout


@pytest.mark.parametrize(
    "layout", ["kv block token head dim", "block head kv token dim", "block head token kv*dim"]
)
def test_the_callers_word_must_fit_shape_and_strides(layout: str) -> None:
    tensor = torch.zeros(7, 2, 16, 3, 8, dtype=torch.float16)
    with pytest.raises(UnknownLayoutError) as caught:
        recognise(tensor, spec_of(), 7, layout=layout)
    (expected,) = caught.value.expected
    assert layout in expected


@pytest.mark.parametrize(
    "layout",
    [
        "block token head dim",
        "block kv token head dim layer",
        "block kv token head dim s0",
        "token block kv head dim",
        "kv*block token head dim",
    ],
)
def test_the_callers_word_must_name_a_page(layout: str) -> None:
    tensor = torch.zeros(7, 2, 16, 3, 8, dtype=torch.float16)
    with pytest.raises(InvalidArgumentError, match="layout"):
        recognise(tensor, spec_of(), 7, layout=layout)


@pytest.mark.parametrize("axis", ["block", "token", "head", "dim"])
def test_strides_of_axes_of_size_one_mean_nothing(axis: str) -> None:
    sizes = SIZES | {axis: 1}
    layout = "block kv token head dim"
    tensor = engine_view(layout, layout, sizes)
    strides = list(tensor.stride())
    strides[layout.split().index(axis)] = 123_456_789
    odd = tensor.as_strided(tensor.shape, strides)
    assert str(recognise(odd, spec_of(**sizes), sizes["block"])) == layout


def dense(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.float16)


@pytest.mark.parametrize(
    "tensor",
    [
        dense(7, 2, 16, 3, 9),
        dense(6, 2, 16, 3, 8),
        dense(7, 2, 16, 3),
        dense(7, 2, 16, 3, 8, 1),
        dense(14, 2, 16, 3, 8),
        dense(21, 2, 5, 3, 8),
        dense(7, 2, 16, 3, 8).float(),
        dense(7, 2, 16, 3, 8).bfloat16(),
        dense(7, 2, 16, 3, 16)[..., :8],
        dense(7, 2, 16, 3, 16)[..., ::2],
        dense(7, 2, 32, 3, 8)[:, :, :16],
        dense(7, 3, 16, 3, 8)[:, ::2],
        dense(1, 2, 16, 3, 8).expand(7, 2, 16, 3, 8),
        dense(7, 1, 16, 3, 8).expand(7, 2, 16, 3, 8),
        dense(3, 7, 2, 16, 8).permute(1, 2, 3, 0, 4),
        dense(16, 7, 2, 3, 8).permute(1, 2, 0, 3, 4),
        dense(0, 2, 16, 3, 8),
        dense(),
    ],
    ids=lambda tensor: f"{tuple(tensor.shape)} {tensor.stride()} {tensor.dtype}",
)
def test_a_tensor_that_reads_in_no_way_shows_what_was_expected(tensor: torch.Tensor) -> None:
    with pytest.raises(UnknownLayoutError) as caught:
        recognise(tensor, spec_of(), 7, layer_name="layer.0")
    error = caught.value
    assert error.layer_name == "layer.0"
    assert str(tuple(tensor.shape)) in error.actual
    assert str(tensor.stride()) in error.actual
    assert str(tensor.dtype) in error.actual
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
    spec: KVCacheSpec = MLASpec(tokens_per_block=16, head_dim=8, dtype=declared)
    tensor = torch.zeros(7, 16, 8, dtype=actual)
    if fits:
        assert str(recognise(tensor, spec, 7)) == "block token dim"
        return
    with pytest.raises(UnknownLayoutError):
        recognise(tensor, spec, 7)
