"""Canonicalizing: every kind of registered layer becomes rows of bytes."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from kvxfer.errors import (
    InvalidArgumentError,
    LayoutError,
    PageBoundsError,
)
from kvxfer.kvcache.canonical import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    canonicalize,
)
from kvxfer.kvcache.spec import (
    MambaSpec,
    MLASpec,
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
    states,
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
    assert caches.group_data_refs[0][0].layout == "block s0 s1 + block s0 s1 s2"


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


def test_keys_and_values_of_a_layer_have_layouts_of_their_own() -> None:
    heads, dim, tokens = SPEC.num_kv_heads, SPEC.head_dim, SPEC.tokens_per_block
    keys = torch.rand(NUM_BLOCKS, heads, dim, tokens).to(SPEC.dtype)
    values = torch.rand(NUM_BLOCKS, heads, tokens, dim).to(SPEC.dtype)
    given = ["block head dim token", "block head token dim"]
    caches = canonicalize({"a": [keys, values]}, config_of((SPEC, "a")), layouts={"a": given})
    boxes = [box for ref in caches.group_data_refs[0] for box in ref.boxes]
    assert [(box.part, box.axes) for box in boxes] == [
        ("k", ("head", "dim", "token")),
        ("v", ("head", "token", "dim")),
    ]
    for wrong in (given[:1], [*given, given[0]], 5):
        with pytest.raises(InvalidArgumentError, match=r"layouts\['a'\]"):
            canonicalize({"a": [keys, values]}, config_of((SPEC, "a")), layouts={"a": wrong})  # type: ignore[dict-item]
