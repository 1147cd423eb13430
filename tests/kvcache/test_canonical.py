"""Canonicalizing: caches become rows of bytes, which is proven, or they are refused."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import permutations, product
from math import prod
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from kvxfer import KVXferError, Namespace
from kvxfer.connect import complete_namespace
from kvxfer.errors import (
    AmbiguousLayoutError,
    AttestationError,
    InvalidArgumentError,
    LayoutError,
    OverlapError,
    PageBoundsError,
    UnknownLayoutError,
)
from kvxfer.kvcache import (
    AttentionLayout,
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    KVCacheSpec,
    MambaSpec,
    MLASpec,
    UniformTypeKVCacheSpecs,
    allocate_canonical,
    attest,
    canonicalize,
)
from kvxfer.kvcache.canonical import memory_regions


def engine_view(
    physical: str, logical: str, sizes: dict[str, int], *, offset: int = 0
) -> torch.Tensor:
    """Make a tensor whose shape has the axes of `logical` and whose memory those of `physical`."""
    axes = physical.split()
    lengths = [
        sizes.get(axis) or prod(sizes[factor] for factor in axis.split("*")) for axis in axes
    ]
    strides = [0] * len(axes)
    dense = 1
    for index in reversed(range(len(axes))):
        strides[index] = dense
        dense *= lengths[index]
    storage = torch.zeros(offset + dense, dtype=torch.float16)
    view = storage.as_strided(lengths, strides, offset)
    return view.permute([axes.index(axis) for axis in logical.split()])


NUM_BLOCKS = 7
SIZES = {"block": NUM_BLOCKS, "kv": 2, "token": 16, "head": 3, "dim": 8}
SPEC = FullAttentionSpec(tokens_per_block=16, num_kv_heads=3, head_dim=8, dtype=torch.float16)
PAGE = SPEC.page_size_bytes
NHD = "block kv token head dim"


def config_of(*groups: tuple[KVCacheSpec, str], **options: Any) -> KVCacheConfig:
    """Make a config of groups whose layers are the letters of a word."""
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


def nhd() -> torch.Tensor:
    return engine_view(NHD, NHD, SIZES)


MAMBA = MambaSpec(
    tokens_per_block=16, shapes=((4, 3), (2, 5, 5)), dtypes=(torch.float16, torch.float32)
)


def states(
    spec: MambaSpec, raw: torch.Tensor, *, num_blocks: int = NUM_BLOCKS
) -> list[torch.Tensor]:
    """View states over one raw allocation, one page after the other."""
    tensors, start = [], 0
    for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True):
        strides = (spec.page_size_bytes // dtype.itemsize, *torch.empty(shape).stride())
        view = raw.view(dtype).as_strided((num_blocks, *shape), strides, start // dtype.itemsize)
        tensors.append(view)
        start += prod(shape) * dtype.itemsize
    return tensors


SPLIT = "kv block token head dim"
HALF = PAGE // 2
PADDED = replace(SPEC, page_size_padded=PAGE + 64)
Refs = list[tuple[int, int, str]]


@dataclass(frozen=True, slots=True)
class Engine:
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
    row = torch.zeros(NUM_BLOCKS, 3, 2, 16, 3, 8, dtype=torch.float16)
    kv_caches = {name: row[:, "abc".index(name)] for name in places}
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
    kv_caches, found = dict.fromkeys(registered, tensor), [(0, 4 * PAGE, "abcd")]
    return Engine(kv_caches, config_of((SPEC, "abcd")), [4 * PAGE], [found], physical)


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


WORDS = (NHD, "block kv head token dim")
"""Layouts that a tensor with as many heads as tokens fits."""


def test_caches_with_other_bytes_at_equal_tokens_have_other_fingerprints() -> None:
    spec, names, like = replace(SPEC, num_kv_heads=16), "abcd", dict.fromkeys("abcd", NHD)
    row, apart = dense(NUM_BLOCKS, 4, 2, 16, 16, 8), {"a": [*dense(2, NUM_BLOCKS, 16, 16, 8)]}
    groups, split = ((spec, "abc"), (replace(spec, sliding_window=8), "d")), config_of((spec, "a"))
    backends = [AttentionLayout(NHD, "block layer kv token head dim")] * 2
    of_split, found = {"a": "block token head dim"}, []
    for order in permutations(range(4)):  # places of the layers
        places = {name: row[:, place] for place, name in zip(order, names, strict=True)}
        found.append(canonicalize(places, config_of(*groups), layouts=like))
        config = config_of(*groups, shared_tensors=tuple((names[at],) for at in order))
        found.append(allocate_canonical(config, backends).caches)
    for words in list(product(WORDS, repeat=3))[1:]:
        layouts = like | dict(zip("abc", words, strict=True))
        places = {name: row[:, place] for place, name in enumerate(names)}
        found.append(canonicalize(places, config_of(*groups), layouts=layouts))
    for parts in ([0, 1], [1, 0]):
        turned = {"a": [row[:, 0, part] for part in parts]}
        found.append(canonicalize(turned, split, layouts=of_split))
    found.append(canonicalize(apart, split, layouts=of_split))
    [ref], more = found[0].group_data_refs
    for refs in permutations([ref, replace(ref, layer_names=("e",))]):
        found.append(replace(found[0], group_data_refs=[refs, more]))
    for change in ({"page_size_bytes": 32}, {"layout": "dim"}, {"layer_names": ("e",)}):
        found.append(replace(found[0], group_data_refs=[[replace(ref, **change)], more]))
    found.append(replace(found[0], group_specs=found[0].group_specs[::-1]))
    found.append(replace(found[0], group_data_refs=[[ref]], group_specs=[spec]))
    namespaces = [complete_namespace(Namespace(model="m"), caches, 1) for caches in found]
    namespaces.append(complete_namespace(Namespace(model="m"), found[0], 2))
    assert len({each.fingerprint for each in namespaces}) == len(namespaces)


def rows(
    tensor: torch.Tensor,
    *starts: int,
    stride: int = PAGE,
    page: int = PAGE,
    names: str = "a",
    num_blocks: int = NUM_BLOCKS,
    num_groups: int = 1,
) -> CanonicalKVCaches:
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
    "another stride": lambda tensor: rows(tensor, 0, stride=PAGE + 2),
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


Refused = tuple[Any, Any, dict[str, Any], type[KVXferError], str]


def dense(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.float16)


def pair(first: Any, second: Any, error: type[KVXferError], match: str) -> Refused:
    return {"a": first, "b": second}, config_of((SPEC, "ab")), {}, error, match


def word(layout: Any, error: type[KVXferError], match: str, *, name: str = "a") -> Refused:
    return {"a": nhd()}, config_of((SPEC, "a")), {name: layout}, error, match


def of_states(first: Any, second: Any) -> Refused:
    """Register states that must be one page of 300 bytes."""
    spec = replace(MAMBA, page_size_padded=300)
    kv_caches, config = {"a": [first, second]}, config_of((spec, "a"))
    return kv_caches, config, {}, LayoutError, r"'a'.*300 bytes"


def all_layers(other: KVCacheSpec) -> Refused:
    """Register one tensor for two unlike layers of one group."""
    tensor = engine_view("block layer kv token head dim", f"layer {NHD}", SIZES | {"layer": 2})
    specs = UniformTypeKVCacheSpecs(tokens_per_block=16, layer_specs={"a": SPEC, "b": other})
    config = config_of((specs, "ab"))
    return {"x": tensor}, config, {}, InvalidArgumentError, "also the layers"


def told(error: type[KVXferError], **layouts: str) -> Refused:
    engine = cross_layer(ALL_LAYERS[0], tuple("abcd"))
    return engine.kv_caches, engine.config, layouts, error, "layer block kv"


def values_with_gaps() -> Refused:
    raw, config = dense(3 * 384), config_of((SPEC, "a"), num_blocks=1)
    keys, values = raw[:384].view(1, 3, 16, 8), raw[384:].view(1, 3, 32, 8)[:, :, :16]
    return {"a": [keys, values]}, config, {}, LayoutError, "3 pieces of 256 bytes, 512 apart"


def gaps(names: str) -> Refused:
    row = dense(NUM_BLOCKS, 5, 3, 16, 16)
    kv_caches = {name: row[:, :, "abc".index(name)] for name in names}
    config = config_of((replace(SPEC, num_kv_heads=5), names))
    match = f"'{names[0]}'.*5 pieces of 512 bytes, 1536 apart"
    return kv_caches, config, {}, LayoutError, match


def padding(block_stride: int, num_bytes: int, error: type[KVXferError], match: str) -> Refused:
    """Register padded pages that lack their padding."""
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
    negated, three = torch._neg_view(nhd()), dense(3, NUM_BLOCKS, 16, 3, 8)
    k, v, other = three
    huge = config_of((replace(SPEC, tokens_per_block=1 << 60), "a"))
    scaled: torch.Tensor = nhd().as_subclass(
        type("Scaled", (torch.Tensor,), {"is_quantized": True})
    )
    invalid, unknown = InvalidArgumentError, UnknownLayoutError
    apart = config_of((SPEC, "a"), (SPEC, "b"), shared_tensors=(("a", "b"),))
    only = config_of((SPEC, "a"))
    return {
        "missing layer": lambda: ({"a": nhd()}, config_of((SPEC, "ab")), {}, invalid, r"\['b'\]"),
        "no layers": lambda: ({"a": nhd(), 7: nhd(), "x": nhd()}, only, {}, invalid, r"\[7, 'x'\]"),
        "three tensors": lambda: pair(nhd(), [nhd()] * 3, invalid, "'b'.*3 tensors"),
        "meta": lambda: pair(nhd(), nhd().to("meta"), invalid, "meta"),
        "another device": lambda: pair(
            nhd(), nhd().as_subclass(Elsewhere), invalid, r"\['cpu', 'cuda:0'\]"
        ),
        "negated values": lambda: pair(
            nhd(), [nhd()[:, 0], negated[:, 1]], unknown, "'b': got a negated"
        ),
        "values with a scale": lambda: pair(nhd(), scaled, unknown, "'b': got a quantized"),
        "layers apart": lambda: ({"a": nhd(), "b": nhd()}, apart, {}, LayoutError, "'a' and 'b'"),
        "a layout of nothing": lambda: word(NHD, invalid, "layouts", name="b"),
        "a layout that does not fit": lambda: word(SPLIT, unknown, SPLIT),
        "a layout under another layer": lambda: told(unknown, b=f"layer {NHD}"),
        "two layouts of a tensor": lambda: told(invalid, a=ALL_LAYERS[0], b=f"layer {NHD}"),
        "tokens outermost": lambda: word(
            "token block kv head dim", invalid, r"layouts\['a'\].*outside 'block'"
        ),
        "too few axes": lambda: word(
            "block token head dim", invalid, r"layouts\['a'\].*exactly the axes"
        ),
        "no axis of blocks": lambda: word("kv token head dim", invalid, r"layouts\['a'\].*'block'"),
        "too few axes of all layers": lambda: word(
            "block layer kv token head", invalid, r"layouts\['a'\].*exactly the axes.*'layer'"
        ),
        "more tokens than can be tried": lambda: ({"a": nhd()}, huge, {}, unknown, "got"),
        "a gap": lambda: of_states(first, second.as_strided(second.shape, second.stride(), 10)),
        "two allocations": lambda: of_states(
            first, torch.zeros(NUM_BLOCKS, 75)[:, :50].view(NUM_BLOCKS, 2, 5, 5)
        ),
        "pages of two sizes": lambda: all_layers(replace(SPEC, page_size_padded=2 * PAGE)),
        "gaps of heads in values that follow keys": values_with_gaps,
        "keys that are values of a layer": lambda: pair(
            three[:2], three[1:], OverlapError, "not all"
        ),
        "keys and values of a layer, turned": lambda: pair([k, v], [v, k], OverlapError, "pages"),
        "values of a layer, other keys": lambda: pair([k, v], [other, v], OverlapError, "not all"),
        "gaps of heads": lambda: gaps("ab"),
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


MANY_HEADS_AND_LAYERS = {"head": 3, "layer": NUM_BLOCKS}


@pytest.mark.parametrize(
    ("sizes", "physical", "other"),
    [
        ({"block": 2}, NHD, SPLIT),
        ({"head": 2}, NHD, "block head token kv dim"),
        ({"head": 2}, "block head token kv*dim", "block kv token head*dim"),
        ({"head": 16}, NHD, "block kv head token dim"),
        ({"token": 2}, NHD, "block token kv head dim"),
        (MANY_HEADS_AND_LAYERS, "block layer kv token head dim", f"layer {NHD}"),
        (MANY_HEADS_AND_LAYERS, f"layer {NHD}", "block layer kv token head dim"),
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


def test_a_state_that_is_turned_in_memory_needs_the_callers_word() -> None:
    spec = replace(MAMBA, shapes=((4, 4),), dtypes=(torch.float16,))
    turned, config = {"a": [dense(NUM_BLOCKS, 4, 4).transpose(1, 2)]}, config_of((spec, "a"))
    with pytest.raises(AmbiguousLayoutError) as caught:
        canonicalize(turned, config)
    assert caught.value.readings == ("block s0 s1", "block s1 s0")
    (ref,) = canonicalize(turned, config, layouts={"a": "block s1 s0"}).group_data_refs[0]
    assert ref.boxes[0].axes == ("s1", "s0")


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
            kv_caches, config_of(*groups, num_blocks=num_blocks), layouts=dict.fromkeys("ab", NHD)
        )


def keys_and_values(first: int, last: int) -> list[torch.Tensor]:
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
