"""Canonicalizing: every kind of registered cache becomes rows of bytes, which is proven."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from kvxfer.errors import AttestationError, InvalidArgumentError
from kvxfer.kvcache.canonical import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    attest,
    canonicalize,
    memory_regions,
)
from kvxfer.kvcache.config import KVCacheConfig
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
    packed_row,
    page_view,
    refs,
    shapes,
    states,
)

SPLIT = "kv block token head dim"
HALF = PAGE // 2
PADDED = replace(SPEC, page_size_padded=PAGE + 64)
Refs = list[tuple[int, int, str]]


@dataclass(frozen=True, slots=True)
class Engine:
    """Caches that an engine registers, and the rows that they are."""

    kv_caches: dict[str, Any]
    config: KVCacheConfig
    pages: list[int]
    refs: list[Refs]
    layout: str = ""


def one(physical: str, logical: str) -> Engine:
    """Make an engine of one layer, whose shape has another order of axes than its memory."""
    view = engine_view(physical, logical, SIZES, offset=24)
    pages = [HALF, HALF] if physical == SPLIT else [PAGE]
    found: Refs = [(index, size, "a") for index, size in enumerate(pages)]
    return Engine({"a": view}, config_of((SPEC, "a")), pages, [found], physical)


def overlaid_states() -> Engine:
    linear, tensor = replace(MAMBA, page_size_padded=PAGE), nhd()
    kv_caches = {"a": tensor, "b": states(linear, tensor.view(-1).view(torch.int8))}
    groups: list[Refs] = [[(0, PAGE, "a")], [(0, linear.unpadded_page_size_bytes, "b")]]
    return Engine(kv_caches, config_of((SPEC, "a"), (linear, "b")), [PAGE], groups)


def several_storages(order: str) -> Engine:
    """Two storages of one memory, as `torch.from_numpy` makes them."""
    raw = np.zeros(NUM_BLOCKS * HALF, dtype=np.float16)
    narrow = replace(SPEC, num_kv_heads=1)
    shape, stride = (NUM_BLOCKS, 2, 16, 1, 8), (HALF, 128, 8, 8, 1)
    kv_caches = {
        "a": torch.from_numpy(raw).view(NUM_BLOCKS, 2, 16, 3, 8),
        "b": torch.from_numpy(raw[: -PAGE // 4]).as_strided(shape, stride),
    }
    specs = {"a": SPEC, "b": narrow}
    groups: list[Refs] = [[(0, specs[name].page_size_bytes, name)] for name in order]
    config = config_of(*((specs[name], name) for name in order))
    return Engine({name: kv_caches[name] for name in order}, config, [PAGE], groups)


def spec_per_layer() -> Engine:
    wide = replace(SPEC, num_kv_heads=5)
    specs = UniformTypeKVCacheSpecs(tokens_per_block=16, layer_specs={"a": SPEC, "b": wide})
    kv_caches = {"a": nhd(), "b": engine_view(NHD, NHD, SIZES | {"head": 5})}
    pages = [PAGE, wide.page_size_bytes]
    return Engine(
        kv_caches, config_of((specs, "ab")), pages, [[(0, PAGE, "a"), (1, pages[1], "b")]]
    )


def apart(*groups: str) -> Engine:
    """Layers with memory of their own, registered from the last to the first."""
    names = "".join(groups)
    found = [[(names.index(n), PAGE, n) for n in group] for group in groups]
    kv_caches = {name: nhd() for name in reversed(names)}
    return Engine(kv_caches, config_of(*((SPEC, g) for g in groups)), [PAGE] * len(names), found)


def one_allocation() -> Engine:
    both = torch.zeros(2, 1, 2, 16, 3, 8, dtype=torch.float16)
    config = config_of((SPEC, "ab"), num_blocks=1)
    found = [(0, PAGE, "a"), (1, PAGE, "b")]
    return Engine({"a": both[0], "b": both[1]}, config, [PAGE] * 2, [found])


def single_block(*shape: int, spec: KVCacheSpec = SPEC) -> Engine:
    storage = torch.zeros(spec.page_size_bytes // 2, dtype=torch.float16)
    tensor = storage.as_strided(shape, (1, 384, 24, 8, 1) if shape[0] == 1 else (384, 1, 24, 8, 1))
    config = config_of((spec, "a"), num_blocks=1)
    return Engine({"a": tensor}, config, [spec.page_size_bytes], [[(0, PAGE, "a")]])


def in_a_row(places: str, pages: list[int], found: Refs) -> Engine:
    """Layers a, b and c at the first, second and third place of a row of three pages."""
    row = packed_row(3)
    kv_caches = {name: page_view(row, "abc".index(name)) for name in places}
    return Engine(kv_caches, config_of((SPEC, places)), pages, [found])


def row_cut_in_two_ways() -> Engine:
    raw = torch.zeros(NUM_BLOCKS * 2 * PAGE, dtype=torch.int8).view(torch.float16)
    whole, halves = raw.view(NUM_BLOCKS, 2, 2, 16, 3, 8), raw.view(NUM_BLOCKS * 2, 2, 2, 8, 3, 8)
    kv_caches = {"a": whole[:, 0], "b": whole[:, 1], "c": halves[:, 0], "d": halves[:, 1]}
    config = config_of((SPEC, "ab"), (SPEC, "cd"))
    return Engine(kv_caches, config, [2 * PAGE], [[(0, 2 * PAGE, n)] for n in ("ab", "cd")])


def cross_layer(physical: str, registered: tuple[str, ...]) -> Engine:
    """Four layers in one tensor, registered under one name or several."""
    layout = "layer block kv token head dim"
    tensor = engine_view(physical, layout, SIZES | {"layer": 4}, offset=16)
    found = [(0, 4 * PAGE, "abcd")]
    if physical.startswith("layer"):
        found = [(index, PAGE, name) for index, name in enumerate("abcd")]
    pages = [page for _, page, _ in found]
    shown = "" if physical.startswith("layer") else physical
    kv_caches = dict.fromkeys(registered, tensor)
    return Engine(kv_caches, config_of((SPEC, "abcd")), pages, [found], shown)


def only_layer(name: str) -> Engine:
    tensor = torch.zeros(1, NUM_BLOCKS, 2, 16, 3, 8, dtype=torch.float16)
    return Engine({name: tensor}, config_of((SPEC, "a")), [PAGE], [[(0, PAGE, "a")]])


ALL_LAYERS = ("block layer kv token head dim", "block head layer kv token dim")
ENGINES: dict[str, Callable[[], Engine]] = {
    **{
        f"{physical} in {logical}": partial(one, physical, logical)
        for physical, logical in (
            (SPLIT, NHD),
            ("block token kv head dim", "head kv dim block token"),
            ("block head kv token dim", "dim token block head kv"),
        )
    },
    "overlaid states": overlaid_states,
    "storages of one memory": partial(several_storages, "ab"),
    "storages of one memory, the other way": partial(several_storages, "ba"),
    "a spec for each layer": spec_per_layer,
    "groups apart": partial(apart, "bc", "a"),
    "one block after the other": one_allocation,
    "a block": partial(single_block, 1, 2, 16, 3, 8),
    "a block, k and v first": partial(single_block, 2, 1, 16, 3, 8),
    "a padded block": partial(single_block, 1, 2, 16, 3, 8, spec=PADDED),
    "a row longer than its layers": partial(in_a_row, "ab", [3 * PAGE], [(0, 2 * PAGE, "ab")]),
    "a row that ends with the storage": partial(in_a_row, "bc", [2 * PAGE], [(0, 2 * PAGE, "bc")]),
    "a row with bytes of nobody": partial(
        in_a_row, "ac", [PAGE] * 2, [(0, PAGE, "a"), (1, PAGE, "c")]
    ),
    "a row that groups cut in two ways": row_cut_in_two_ways,
    **{
        f"{physical}, registered as {registered}": partial(cross_layer, physical, registered)
        for physical in ALL_LAYERS
        for registered in (("cross",), ("a",), tuple("abcd"))
    },
    "layers first": partial(cross_layer, f"layer {NHD}", ("x",)),
    "the only layer in a tensor of layers": partial(only_layer, "x"),
    "the only layer in a tensor of its own": partial(only_layer, "a"),
}
"""What the layout zoo does not draw."""


def storage_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View every byte of the storage, also those in no view."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def tensors_of(kv_caches: dict[str, Any]) -> list[torch.Tensor]:
    return [t for e in kv_caches.values() for t in ([e] if isinstance(e, torch.Tensor) else e)]


def fill_with_any_bits(kv_caches: dict[str, Any]) -> list[torch.Tensor]:
    """Fill the storages, NaNs with payloads among the values, and return a copy of them."""
    generator = torch.Generator().manual_seed(1)
    for tensor in tensors_of(kv_caches):
        storage_bytes(tensor).random_(generator=generator)
    return [storage_bytes(tensor).clone() for tensor in tensors_of(kv_caches)]


def holds(kv_caches: dict[str, Any], content: list[torch.Tensor]) -> bool:
    pairs = zip(tensors_of(kv_caches), content, strict=True)
    return all(torch.equal(storage_bytes(tensor), before) for tensor, before in pairs)


@pytest.mark.parametrize("name", ENGINES)
def test_caches_become_rows_that_are_proven_and_memory_is_as_before(name: str) -> None:
    engine = ENGINES[name]()
    before = fill_with_any_bits(engine.kv_caches)
    caches = canonicalize(engine.kv_caches, engine.config)
    assert shapes(caches) == [(engine.config.num_blocks, page) for page in engine.pages]
    assert [each.page_size_bytes for each in caches.tensors] == engine.pages
    assert [refs(caches, group) for group in range(len(engine.refs))] == engine.refs
    assert caches.group_data_refs[0][0].layout == engine.layout or not engine.layout
    assert caches.group_specs == tuple(group.spec for group in engine.config.groups)
    attest(engine.kv_caches, engine.config, caches)
    assert holds(engine.kv_caches, before)


def test_caches_keep_the_memory_alive_and_show_what_is_written_there() -> None:
    tensor = nhd().fill_(2)
    caches = canonicalize({"a": tensor}, config_of((SPEC, "a")))
    caches.tensors[0].tensor[3] = 0
    assert not tensor[3].any()
    del tensor
    assert (caches.tensors[0].tensor[4].view(torch.float16) == 2).all()


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
    keys = torch.rand(NUM_BLOCKS, 3, 8, 16).to(SPEC.dtype)
    values = torch.rand(NUM_BLOCKS, 3, 16, 8).to(SPEC.dtype)
    given = ["block head dim token", "block head token dim"]
    caches = canonicalize({"a": [keys, values]}, config_of((SPEC, "a")), layouts={"a": given})
    boxes = [box for ref in caches.group_data_refs[0] for box in ref.boxes]
    assert [(box.part, box.axes) for box in boxes] == [
        ("k", ("head", "dim", "token")),
        ("v", ("head", "token", "dim")),
    ]


def rows(
    tensor: torch.Tensor,
    *starts: int,
    stride: int = PAGE,
    page: int = PAGE,
    names: str = "a",
    num_blocks: int = NUM_BLOCKS,
    num_groups: int = 1,
) -> CanonicalKVCaches:
    """Make caches with one tensor and ref for each byte offset."""
    raw = storage_bytes(tensor).view(torch.int8)
    views = [raw.as_strided((num_blocks, page), (stride, 1), start) for start in starts]
    return CanonicalKVCaches(
        [CanonicalKVCacheTensor(view, page) for view in views],
        [[CanonicalKVCacheRef(i, page, tuple(names)) for i in range(len(views))]] * num_groups,
    )


WRONG: dict[str, Callable[[torch.Tensor], CanonicalKVCaches]] = {
    "another copy": lambda tensor: rows(tensor.clone(), 0),
    "one block further": lambda tensor: rows(tensor, PAGE),
    "one element further": lambda tensor: rows(tensor, 2),
    "half a page": lambda tensor: rows(tensor, 0, page=HALF),
    "v before k": lambda tensor: rows(tensor, HALF, 0, page=HALF),
    "k and v outermost": lambda tensor: rows(tensor, 0, NUM_BLOCKS * HALF, stride=HALF, page=HALF),
    "another layer": lambda tensor: rows(tensor, 0, names="b"),
    "another number of groups": lambda tensor: rows(tensor, 0, num_groups=2),
    "another number of blocks": lambda tensor: rows(tensor, 0, num_blocks=NUM_BLOCKS - 1),
}


@pytest.mark.parametrize("kind", WRONG)
def test_caches_that_show_something_else_are_refused_and_memory_is_as_before(kind: str) -> None:
    kv_caches = {"a": engine_view(NHD, NHD, SIZES | {"block": NUM_BLOCKS + 1})[:NUM_BLOCKS]}
    before = fill_with_any_bits(kv_caches)
    with pytest.raises(AttestationError) as caught:
        attest(kv_caches, config_of((SPEC, "a")), WRONG[kind](kv_caches["a"]))
    assert caught.value.layer_name == "a"
    assert caught.value.block_id in range(NUM_BLOCKS)
    assert holds(kv_caches, before)


@pytest.mark.parametrize("physical", [NHD, SPLIT])
def test_the_layout_decides_between_two_readings(physical: str) -> None:
    tensor = torch.zeros(2, 2, 16, 3, 8, dtype=torch.float16)
    config = config_of((SPEC, "a"), num_blocks=2)
    caches = canonicalize({"a": tensor}, config, layouts={"a": physical})
    attest({"a": tensor}, config, caches, layouts={"a": physical})
    other = SPLIT if physical == NHD else NHD
    with pytest.raises(AttestationError):
        attest({"a": tensor}, config, caches, layouts={"a": other})


def test_tensors_of_inference_mode_and_layers_without_names_are_proven() -> None:
    with torch.inference_mode():
        tensor = torch.zeros(2, NUM_BLOCKS, 16, 3, 8, dtype=torch.float16)
    config = config_of((SPEC, "a"))
    caches = canonicalize({"a": tensor}, config)
    unnamed = [[replace(ref, layer_names=()) for ref in each] for each in caches.group_data_refs]
    attest({"a": tensor}, config, CanonicalKVCaches(caches.tensors, unnamed))


@pytest.mark.parametrize(
    ("spans", "regions"),
    [
        ([(0, 60)], [(0, 360)]),  # up to the last page
        ([(0, 40), (40, 100)], [(0, 400)]),  # rows that interleave
        ([(0, 20), (400, 460)], [(0, 320), (400, 360)]),
    ],
)
def test_every_byte_of_a_page_is_in_one_region(
    spans: list[tuple[int, int]], regions: list[tuple[int, int]]
) -> None:
    memory = torch.zeros(8 * 100, dtype=torch.int8)
    views = [memory.as_strided((4, b - a), (100, 1), a) for a, b in spans]
    caches = CanonicalKVCaches(
        [CanonicalKVCacheTensor(view, view.shape[1]) for view in views],
        [[CanonicalKVCacheRef(index, view.shape[1]) for index, view in enumerate(views)]],
    )
    found = memory_regions(caches)
    assert [(each.address - memory.data_ptr(), each.num_bytes) for each in found] == regions
    assert all(each.owner is caches for each in found)
