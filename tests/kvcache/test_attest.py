"""Attestation: sentinels written through the engine's views are where the caches say."""

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

import pytest
import torch

from kvxfer.errors import AttestationError, UnknownLayoutError
from kvxfer.kvcache.canonical import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    attest,
    attestation,
    canonicalize,
)
from kvxfer.kvcache.config import KVCacheConfig, KVCacheGroup
from kvxfer.kvcache.spec import FullAttentionSpec, KVCacheSpec, MambaSpec, MLASpec
from tests.kvcache.engine_views import engine_view

NUM_BLOCKS = 7
SIZES = {"block": NUM_BLOCKS, "kv": 2, "token": 16, "head": 3, "dim": 8}
SPEC = FullAttentionSpec(tokens_per_block=16, num_kv_heads=3, head_dim=8, dtype=torch.float16)
PAGE = SPEC.page_size_bytes
NHD = "block kv token head dim"
SPLIT = "kv block token head dim"
MAMBA = MambaSpec(
    tokens_per_block=16, shapes=((4, 3), (2, 5, 5)), dtypes=(torch.float16, torch.float32)
)

Engine = tuple[dict[str, Any], KVCacheConfig]


def config_of(*groups: tuple[KVCacheSpec, str], num_blocks: int = NUM_BLOCKS) -> KVCacheConfig:
    return KVCacheConfig(num_blocks, tuple(KVCacheGroup(s, tuple(names)) for s, names in groups))


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


def one(physical: str, logical: str, sizes: dict[str, int] | None = None, **options: Any) -> Engine:
    return {"a": engine_view(physical, logical, SIZES | (sizes or {}), **options)}, config_of(
        (SPEC, "a")
    )


def interleaved() -> Engine:
    row = torch.zeros(NUM_BLOCKS, 3, 2, 16, 3, 8, dtype=torch.float16)
    kv_caches = {"a": row[:, 0], "b": row[:, 1], "c": row[:, 2], "d": row[:, 0]}
    return kv_caches, config_of((SPEC, "abc"), (SPEC, "d"))


def interleaved_kernel_blocks() -> Engine:
    row = torch.zeros(NUM_BLOCKS * 2, 3, 2, 8, 3, 8, dtype=torch.float16)
    return {"a": row[:, 0], "b": row[:, 1], "c": row[:, 2]}, config_of((SPEC, "abc"))


def cross_layer(physical: str) -> Engine:
    tensor = engine_view(physical, "layer block kv token head dim", SIZES | {"layer": 4})
    return {"x": tensor}, config_of((SPEC, "abcd"))


def overlaid_states() -> Engine:
    linear = replace(MAMBA, page_size_padded=PAGE)
    tensor = engine_view(NHD, NHD, SIZES)
    states, start = [], 0
    for shape, dtype in zip(linear.shapes, linear.dtypes, strict=True):
        strides = (PAGE // dtype.itemsize, *torch.empty(shape).stride())
        raw = tensor.view(-1).view(dtype)
        states.append(raw.as_strided((NUM_BLOCKS, *shape), strides, start // dtype.itemsize))
        start += prod(shape) * dtype.itemsize
    return {"a": tensor, "b": states}, config_of((SPEC, "a"), (linear, "b"))


def latent() -> Engine:
    spec = MLASpec(tokens_per_block=16, head_dim=24, dtype=torch.float8_e4m3fn)
    return {"a": torch.zeros(NUM_BLOCKS, 16, 24, dtype=torch.uint8)}, config_of((spec, "a"))


def padded() -> Engine:
    spec = replace(SPEC, page_size_padded=PAGE + 64)
    tensor = engine_view(NHD, NHD, SIZES, block_stride=(PAGE + 64) // 2)
    return {"a": tensor}, config_of((spec, "a"))


def one_block() -> Engine:
    tensor = torch.zeros(1, 2, 16, 3, 8, dtype=torch.float16)
    return {"a": tensor}, config_of((SPEC, "a"), num_blocks=1)


ENGINES: dict[str, Callable[[], Engine]] = {
    "nhd": lambda: one(NHD, NHD),
    "hnd strides": lambda: one("block kv head token dim", NHD),
    "shape in another order": lambda: one(NHD, "kv block token head dim"),
    "packed k and v": lambda: one("block head token kv*dim", "block head token kv*dim"),
    "k and v outermost": lambda: one(SPLIT, SPLIT),
    "k and v outermost, other shape": lambda: one(SPLIT, NHD),
    "kernel blocks": lambda: one(NHD, NHD, {"block": NUM_BLOCKS * 2, "token": 8}),
    "kernel blocks of k and v": lambda: one(SPLIT, SPLIT, {"block": NUM_BLOCKS * 2, "token": 8}),
    "offset": lambda: one(NHD, NHD, offset=40),
    "padded": padded,
    "interleaved": interleaved,
    "interleaved kernel blocks": interleaved_kernel_blocks,
    "all layers": lambda: cross_layer("block layer kv token head dim"),
    "all layers inside the head": lambda: cross_layer("block head layer kv token dim"),
    "layers outermost": lambda: cross_layer("layer block kv token head dim"),
    "overlaid states": overlaid_states,
    "latent": latent,
    "one block": one_block,
}


@pytest.mark.parametrize("name", list(ENGINES))
def test_canonical_caches_are_proven_and_memory_is_as_before(name: str) -> None:
    kv_caches, config = ENGINES[name]()
    before = fill_with_any_bits(kv_caches)
    attest(kv_caches, config, canonicalize(kv_caches, config))
    assert holds(kv_caches, before)


def test_caches_of_an_engine_that_names_no_layers_are_proven() -> None:
    kv_caches, config = one(SPLIT, SPLIT)
    caches = canonicalize(kv_caches, config)
    unnamed = [[replace(ref, layer_names=()) for ref in refs] for refs in caches.group_data_refs]
    attest(kv_caches, config, CanonicalKVCaches(caches.tensors, unnamed))


def test_tensors_of_inference_mode_are_proven() -> None:
    with torch.inference_mode():
        tensor = torch.zeros(NUM_BLOCKS, 2, 16, 3, 8, dtype=torch.float16)
    config = config_of((SPEC, "a"))
    attest({"a": tensor}, config, canonicalize({"a": tensor}, config))


def rows(
    tensor: torch.Tensor,
    *starts: int,
    stride: int = PAGE,
    page: int = PAGE,
    names: str = "a",
    num_blocks: int = NUM_BLOCKS,
) -> CanonicalKVCaches:
    """Make caches with one tensor and ref for each byte offset."""
    raw = storage_bytes(tensor).view(torch.int8)
    views = [raw.as_strided((num_blocks, page), (stride, 1), start) for start in starts]
    return CanonicalKVCaches(
        [CanonicalKVCacheTensor(view, page) for view in views],
        [[CanonicalKVCacheRef(i, page, tuple(names)) for i in range(len(views))]],
    )


def two_groups(tensor: torch.Tensor) -> CanonicalKVCaches:
    caches = rows(tensor, 0)
    return CanonicalKVCaches(caches.tensors, [*caches.group_data_refs, *caches.group_data_refs])


HALF = PAGE // 2
WRONG: dict[str, Callable[[torch.Tensor], CanonicalKVCaches]] = {
    "another copy": lambda tensor: rows(tensor.clone(), 0),
    "one block further": lambda tensor: rows(tensor, PAGE),
    "one element further": lambda tensor: rows(tensor, 2),
    "half a page": lambda tensor: rows(tensor, 0, page=HALF),
    "v before k": lambda tensor: rows(tensor, HALF, 0, page=HALF),
    "k and v outermost": lambda tensor: rows(tensor, 0, NUM_BLOCKS * HALF, stride=HALF, page=HALF),
    "another layer": lambda tensor: rows(tensor, 0, names="b"),
    "another number of groups": two_groups,
    "another number of blocks": lambda tensor: rows(tensor, 0, num_blocks=NUM_BLOCKS - 1),
}


@pytest.mark.parametrize("kind", list(WRONG))
def test_caches_that_show_something_else_are_refused_and_memory_is_as_before(kind: str) -> None:
    _, config = one(NHD, NHD)
    kv_caches = {"a": engine_view(NHD, NHD, SIZES | {"block": NUM_BLOCKS + 1})[:NUM_BLOCKS]}
    before = fill_with_any_bits(kv_caches)
    with pytest.raises(AttestationError) as caught:
        attest(kv_caches, config, WRONG[kind](kv_caches["a"]))
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


def test_a_failure_on_the_way_leaves_memory_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    kv_caches, config = overlaid_states()
    caches = canonicalize(kv_caches, config)
    before = fill_with_any_bits(kv_caches)

    def fail(*_: object) -> torch.Tensor:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(attestation, "_write_sentinels", fail)
    with pytest.raises(RuntimeError, match="gone"):
        attest(kv_caches, config, caches)
    assert holds(kv_caches, before)


def test_what_cannot_be_read_cannot_be_attested() -> None:
    kv_caches, config = one(NHD, NHD)
    caches = canonicalize(kv_caches, config)
    with pytest.raises(UnknownLayoutError):
        attest({"a": kv_caches["a"].float()}, config, caches)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["hnd strides", "k and v outermost", "latent"])
def test_caches_on_a_gpu_are_proven(name: str) -> None:
    kv_caches, config = ENGINES[name]()
    on_gpu = {
        layer: torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda"
        ).copy_(tensor)
        for layer, tensor in kv_caches.items()
    }
    caches = canonicalize(on_gpu, config)
    assert caches.tensors[0].tensor.device.type == "cuda"
    attest(on_gpu, config, caches)
