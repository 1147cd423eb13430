"""The layout zoo on real strides: what is described is what an engine's view wrote."""

import ctypes
from math import prod

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kvxfer.errors import InvalidArgumentError
from kvxfer.kvcache.allocation import allocate_canonical
from kvxfer.kvcache.allocation_refusal import AllocationCondition, why_not_canonical
from kvxfer.kvcache.attestation import attest
from kvxfer.kvcache.canonical import CanonicalKVCaches, canonicalize
from kvxfer.kvcache.config import KVCacheConfig, KVCacheGroup
from kvxfer.kvcache.descriptors import describe
from kvxfer.kvcache.engine_layout import EngineLayout
from kvxfer.kvcache.layout_zoo import LAYOUT_ZOO
from kvxfer.kvcache.spec import MambaSpec
from tests.kvcache.zoo_engines import NAMES, TOKENS, ZOO, config_of, numbers, register, sizes_of


def payload(caches: CanonicalKVCaches, block_id: int) -> NDArray[np.int32]:
    """The bytes of a block, read at the addresses of its descriptors."""
    blocks = describe(caches, 0, [block_id])
    pieces = zip(blocks.addresses.tolist(), blocks.lengths.tolist(), strict=True)
    return np.frombuffer(b"".join(ctypes.string_at(*piece) for piece in pieces), np.int32)


@pytest.mark.parametrize("entry", ZOO, ids=lambda entry: f"{entry.engine}, {entry.name}")
def test_a_block_of_an_engine_is_what_its_views_wrote(entry: EngineLayout) -> None:
    kv_caches, config, sizes = register(entry), config_of(entry), sizes_of(entry)
    layouts = dict.fromkeys(kv_caches, entry.layout)
    caches = canonicalize(kv_caches, config, layouts=layouts)
    expected = numbers(sizes, ["block", *(axis for axis in entry.order if axis != "block")], {})
    for block_id in range(config.num_blocks):
        assert payload(caches, block_id).tolist() == expected[block_id].ravel().tolist()
    assert len(describe(caches, 0, [1])) == entry.runs_per_block(sizes)
    attest(kv_caches, config, caches, layouts=layouts)


TOLD = {"layer_first", "page_first", "page_first_direct", "page_head"}
"""SGLang's host pools of keys and values: their owner has to say which one it is."""


@pytest.mark.parametrize("entry", ZOO, ids=lambda entry: f"{entry.engine}, {entry.name}")
def test_strides_alone_say_which_layout_it_is(entry: EngineLayout) -> None:
    kv_caches, config = register(entry), config_of(entry)
    if entry.name.removeprefix("Host pool, ") in TOLD:
        with pytest.raises(InvalidArgumentError, match="kv_caches"):
            canonicalize(kv_caches, config)
        return
    recognised = canonicalize(kv_caches, config)
    for block_id in range(config.num_blocks):
        told = canonicalize(kv_caches, config, layouts=dict.fromkeys(kv_caches, entry.layout))
        assert payload(recognised, block_id).tolist() == payload(told, block_id).tolist()


ALLOCATED = [
    entry for entry in ZOO if entry.attention_layout and entry.attention_layout.memory is not None
]


@pytest.mark.parametrize("entry", ALLOCATED, ids=lambda entry: f"{entry.engine}, {entry.name}")
def test_what_is_allocated_is_what_the_engine_would_register(entry: EngineLayout) -> None:
    config, sizes = config_of(entry), sizes_of(entry)
    backend = entry.attention_layout
    assert backend is not None
    if entry.order[0] != "block":
        (refusal,) = why_not_canonical(config, [backend])
        assert refusal.condition is AllocationCondition.BLOCK_OUTERMOST
        return
    allocation = allocate_canonical(config, [backend])
    axes = [factor for axis in backend.shape.split() for factor in axis.split("*")]
    for layer, name in enumerate(NAMES):
        view = allocation.kv_caches[name]
        written = numbers(sizes, axes, {"layer": layer}).reshape(view.shape)
        view.copy_(torch.from_numpy(written))
    registered = canonicalize(
        register(entry), config, layouts=dict.fromkeys(register(entry), entry.layout)
    )
    for block_id in range(config.num_blocks):
        ours, theirs = payload(allocation.caches, block_id), payload(registered, block_id)
        assert ours.tolist() == theirs.tolist()
    assert len(describe(allocation.caches, 0, [1])) == 1


def test_names_are_unique() -> None:
    names = [(entry.engine, entry.name) for entry in LAYOUT_ZOO]
    assert len(set(names)) == len(names)


STATES = MambaSpec(
    tokens_per_block=TOKENS, shapes=((4, 3), (2, 5)), dtypes=(torch.int16, torch.int32)
)


def slots(spec: MambaSpec, index: int, *, num_layers: int, num_blocks: int) -> torch.Tensor:
    """SGLang: one allocation for a state of all layers."""
    shape, dtype = spec.shapes[index], spec.dtypes[index]
    return torch.arange(num_layers * num_blocks * prod(shape), dtype=dtype).view(
        num_layers, num_blocks, *shape
    )


def test_states_that_have_allocations_of_their_own_are_pages_of_their_own() -> None:
    convolution = slots(STATES, 0, num_layers=3, num_blocks=5)
    temporal = slots(STATES, 1, num_layers=3, num_blocks=5)
    kv_caches = {name: [convolution[i], temporal[i]] for i, name in enumerate(NAMES)}
    config = KVCacheConfig(5, (KVCacheGroup(STATES, NAMES),))
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
    row = torch.zeros(5, 2, TOKENS, 7, 6, dtype=torch.int32)
    config = config_of(ZOO[0])
    kv_caches = {name: (row.clone()[:, 0], row.clone()[:, 1]) for name in NAMES[:2]}
    kv_caches[NAMES[2]] = (row[:, 0], row[:, 1])
    caches = canonicalize(kv_caches, config)
    assert [tuple(each.tensor.shape) for each in caches.tensors][-1] == (5, row[0].numel() * 4)
    attest(kv_caches, config, caches)
