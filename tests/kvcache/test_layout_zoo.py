"""The layout zoo on real strides: what is described is what an engine's view wrote."""

import ctypes
from math import prod
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import DTypeLike, NDArray

from kvxfer.errors import InvalidArgumentError
from kvxfer.kvcache.allocation import allocate_canonical
from kvxfer.kvcache.allocation_refusal import AllocationCondition, why_not_canonical
from kvxfer.kvcache.attestation import attest
from kvxfer.kvcache.canonical import CanonicalKVCaches, canonicalize
from kvxfer.kvcache.config import KVCacheConfig, KVCacheGroup
from kvxfer.kvcache.descriptors import describe
from kvxfer.kvcache.engine_layout import EngineLayout
from kvxfer.kvcache.layout_zoo import LAYOUT_ZOO
from kvxfer.kvcache.spec import AttentionSpec, MambaSpec
from tests.kvcache.zoo_engines import SIZES, ZOO, ZooEngine, factors, numbers


def payload(
    caches: CanonicalKVCaches, block_id: int, dtype: DTypeLike = np.int32, *, group: int = 0
) -> NDArray[Any]:
    """The bytes of a block, read at the addresses of its descriptors."""
    blocks = describe(caches, group, [block_id])
    pieces = zip(blocks.addresses.tolist(), blocks.lengths.tolist(), strict=True)
    return np.frombuffer(b"".join(ctypes.string_at(*piece) for piece in pieces), dtype)


@pytest.mark.parametrize("entry", ZOO, ids=lambda entry: f"{entry.engine}, {entry.name}")
def test_a_block_of_an_engine_is_what_its_views_wrote(entry: EngineLayout) -> None:
    engine = ZooEngine(entry)
    engine.number()
    caches = canonicalize(engine.kv_caches, engine.config, layouts=engine.layouts)
    inside = [axis for axis in entry.order if axis != "block"]
    expected = numbers(engine.sizes, ["block", *inside], {})
    for block_id in range(engine.config.num_blocks):
        assert payload(caches, block_id).tolist() == expected[block_id].ravel().tolist()
    assert len(describe(caches, 0, [1])) == entry.runs_per_block(engine.sizes)
    attest(engine.kv_caches, engine.config, caches, layouts=engine.layouts)


@st.composite
def engines(draw: st.DrawFn) -> ZooEngine:
    """Any engine of the zoo, for a model of any size."""
    entry = draw(st.sampled_from(ZOO))
    sizes = {axis: draw(st.integers(1, 4)) for axis in SIZES}
    # A lone block has no stride, so layers side by side in it cannot be told from others.
    sizes["block"] = draw(st.integers(2, 5))
    dtypes = [torch.float8_e4m3fn, torch.int8, torch.float16, torch.bfloat16, torch.float32]
    return ZooEngine(entry, sizes, draw(st.sampled_from(dtypes)))


@settings(max_examples=300)
@given(engine=engines(), data=st.data())
def test_an_element_is_where_the_order_of_axes_predicts(
    engine: ZooEngine, data: st.DataObject
) -> None:
    caches = canonicalize(engine.kv_caches, engine.config, layouts=engine.layouts)
    at = {axis: data.draw(st.integers(0, size - 1)) for axis, size in engine.sizes.items()}
    engine.set_bits(at)
    inside = [axis for axis in engine.entry.order if axis != "block"]
    place = np.ravel_multi_index(
        [at[axis] for axis in inside], [engine.sizes[axis] for axis in inside]
    )
    item = next(iter(engine.tensors.values())).element_size()
    for block_id in range(engine.config.num_blocks):
        found = np.flatnonzero(payload(caches, block_id, np.uint8)).tolist()
        mine = block_id == at["block"]
        assert found == (list(range(place * item, (place + 1) * item)) if mine else [])


@settings(max_examples=100)
@given(engine=engines(), data=st.data())
def test_a_layer_may_share_the_memory_of_another_in_its_group_or_in_another(
    engine: ZooEngine, data: st.DataObject
) -> None:
    assume("layer" not in engine.shape)
    owner = data.draw(st.sampled_from(engine.names))
    kv_caches = {**engine.kv_caches, "again": engine.kv_caches[owner]}
    layouts = dict.fromkeys(kv_caches, engine.entry.layout)
    (group,), num_blocks = engine.config.groups, engine.config.num_blocks
    alone = describe(
        canonicalize(engine.kv_caches, engine.config, layouts=engine.layouts), 0, range(num_blocks)
    )
    at = {axis: data.draw(st.integers(0, size - 1)) for axis, size in engine.sizes.items()}
    engine.set_bits(at | {"layer": engine.names.index(owner)})
    item = next(iter(engine.tensors.values())).element_size()
    for groups in (
        (KVCacheGroup(group.spec, (*engine.names, "again")),),
        (group, KVCacheGroup(group.spec, ("again",))),
    ):
        config = KVCacheConfig(num_blocks, groups)
        caches = canonicalize(kv_caches, config, layouts=layouts)
        attest(kv_caches, config, caches, layouts=layouts)
        blocks = describe(caches, 0, range(num_blocks))
        assert blocks.addresses.tolist() == alone.addresses.tolist()
        assert blocks.lengths.tolist() == alone.lengths.tolist()
        for block_id in range(num_blocks):
            shared = payload(caches, block_id, np.uint8, group=len(groups) - 1)
            assert np.count_nonzero(shared) == (item if block_id == at["block"] else 0)


TOLD = {"layer_first", "page_first", "page_first_direct", "page_head"}
"""SGLang's host pools of keys and values: their owner has to say which one it is."""


@pytest.mark.parametrize("entry", ZOO, ids=lambda entry: f"{entry.engine}, {entry.name}")
def test_strides_alone_say_which_layout_it_is(entry: EngineLayout) -> None:
    engine = ZooEngine(entry)
    if entry.name.removeprefix("Host pool, ") in TOLD:
        with pytest.raises(InvalidArgumentError, match="kv_caches"):
            canonicalize(engine.kv_caches, engine.config)
        return
    engine.number()
    recognised = canonicalize(engine.kv_caches, engine.config)
    told = canonicalize(engine.kv_caches, engine.config, layouts=engine.layouts)
    for block_id in range(engine.config.num_blocks):
        assert payload(recognised, block_id).tolist() == payload(told, block_id).tolist()


ALLOCATED = [
    entry for entry in ZOO if entry.attention_layout and entry.attention_layout.memory is not None
]


@pytest.mark.parametrize("entry", ALLOCATED, ids=lambda entry: f"{entry.engine}, {entry.name}")
def test_what_is_allocated_is_what_the_engine_would_register(entry: EngineLayout) -> None:
    engine, backend = ZooEngine(entry), entry.attention_layout
    assert backend is not None
    if entry.order[0] != "block":
        (refusal,) = why_not_canonical(engine.config, [backend])
        assert refusal.condition is AllocationCondition.BLOCK_OUTERMOST
        return
    engine.number()
    allocation = allocate_canonical(engine.config, [backend])
    for layer, name in enumerate(engine.names):
        view = allocation.kv_caches[name]
        written = numbers(engine.sizes, factors(backend.shape), {"layer": layer})
        view.copy_(torch.from_numpy(written).view(view.shape))
    registered = canonicalize(engine.kv_caches, engine.config, layouts=engine.layouts)
    for block_id in range(engine.config.num_blocks):
        ours, theirs = payload(allocation.caches, block_id), payload(registered, block_id)
        assert ours.tolist() == theirs.tolist()
    assert len(describe(allocation.caches, 0, [1])) == 1


@pytest.mark.parametrize("entry", ZOO, ids=lambda entry: f"{entry.engine}, {entry.name}")
def test_an_attention_backend_has_the_shape_that_is_registered(entry: EngineLayout) -> None:
    engine, backend = ZooEngine(entry), entry.attention_layout
    if backend is None:
        one_tensor_per_layer = "kv" not in entry.allocations
        assert not one_tensor_per_layer or "block*" in entry.shape
        return
    (group,) = engine.config.groups
    assert isinstance(group.spec, AttentionSpec)
    shape = backend.cache_shape(group.spec, engine.config.num_blocks)
    (tensor, *_) = engine.tensors.values()
    if "layer" in entry.shape.split():
        tensor = tensor.select(entry.shape.split().index("layer"), 0)
    assert tuple(tensor.shape) == shape


def test_names_are_unique() -> None:
    names = [(entry.engine, entry.name) for entry in LAYOUT_ZOO]
    assert len(set(names)) == len(names)


STATES = MambaSpec(tokens_per_block=8, shapes=((4, 3), (2, 5)), dtypes=(torch.int16, torch.int32))


def slots(spec: MambaSpec, index: int, *, num_layers: int, num_blocks: int) -> torch.Tensor:
    """SGLang: one allocation for a state of all layers."""
    shape, dtype = spec.shapes[index], spec.dtypes[index]
    return torch.arange(num_layers * num_blocks * prod(shape), dtype=dtype).view(
        num_layers, num_blocks, *shape
    )


def test_states_that_have_allocations_of_their_own_are_pages_of_their_own() -> None:
    names = ("a", "b", "c")
    convolution = slots(STATES, 0, num_layers=3, num_blocks=5)
    temporal = slots(STATES, 1, num_layers=3, num_blocks=5)
    kv_caches = {name: [convolution[i], temporal[i]] for i, name in enumerate(names)}
    config = KVCacheConfig(5, (KVCacheGroup(STATES, names),))
    caches = canonicalize(kv_caches, config)
    attest(kv_caches, config, caches)
    for block_id in range(5):
        blocks = describe(caches, 0, [block_id])
        pieces = zip(blocks.addresses.tolist(), blocks.lengths.tolist(), strict=True)
        expected = [
            state[layer, block_id].numpy().tobytes()
            for layer in range(3)
            for state in (convolution, temporal)
        ]
        assert [ctypes.string_at(*piece) for piece in pieces] == expected


def test_keys_and_values_of_one_row_are_one_piece() -> None:
    engine = ZooEngine(ZOO[0])
    rows = {name: torch.zeros(5, 2, 8, 7, 6, dtype=torch.int32) for name in engine.names}
    kv_caches = {name: (row[:, 0], row[:, 1]) for name, row in rows.items()}
    caches = canonicalize(kv_caches, engine.config)
    assert [tuple(each.tensor.shape) for each in caches.tensors] == [(5, 2 * 8 * 7 * 6 * 4)] * 3
    attest(kv_caches, engine.config, caches)
