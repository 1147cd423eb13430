"""Connector hooks: in every release, the caches hold the bytes that vLLM's own connector moves."""

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvxfer.errors import InvalidArgumentError, PageMappingError, UnknownLayoutError
from kvxfer.integrations.vllm.common.kv_caches import convert_caches
from kvxfer.integrations.vllm_connector import KVCacheHooks
from kvxfer.kvcache import CanonicalKVCaches, WorkerShard, describe, map_caches

pytest.importorskip("vllm.v1.kv_offload", reason="needs vLLM")

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading import worker as offloading
from vllm.v1.attention.backends import utils as backend_utils

from tests.integrations import vllm_tensors
from tests.integrations.vllm_tensors import (
    FULL,
    LATENT,
    LAYOUTS_ARE_NAMED,
    NUM_BLOCKS,
    SLIDING,
    STATES,
    Caches,
    allocate,
    allocate_cross_layer,
    backend,
)

CPU, FLASH = "cpu_attn.CPUAttentionBackend", "flash_attn.FlashAttentionBackend"
B12X = "b12x.B12xPagedAttentionBackend"
TRITON, MLA = "triton_attn.TritonAttentionBackend", "mla.triton_mla.TritonMLABackend"

before_names = pytest.mark.skipif(LAYOUTS_ARE_NAMED, reason="a layout has a name in this vLLM")
with_names = pytest.mark.skipif(not LAYOUTS_ARE_NAMED, reason="layouts have no names in this vLLM")


class Connector(KVCacheHooks, KVConnectorBase_V1):  # type: ignore[misc] # it is Any here
    def __init__(self, caches: Caches) -> None:
        super().__init__(caches.vllm_config, KVConnectorRole.WORKER, caches.config)
        self.told: list[CanonicalKVCaches] = []

    def use_kv_caches(self, caches: CanonicalKVCaches) -> None:
        self.told.append(caches)


Connector.__abstractmethods__ = frozenset()  # what it would load and store is not asked here


@pytest.fixture(params=["NHD", "HND"])
def stride_order(request: pytest.FixtureRequest) -> Iterator[str]:
    """Backend without named layouts."""
    backend_utils.set_kv_cache_layout(request.param)
    yield request.param
    backend_utils.set_kv_cache_layout(None)


def vllms_own(caches: Caches, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[Any]]:
    layers = caches.vllm_config.compilation_config.static_forward_context
    for name, value in [("get_layers_from_vllm_config", layers), ("derive_canonical_mappings", {})]:
        monkeypatch.setattr(offloading, name, lambda *_, value=value: value, raising=False)
    told: list[Any] = []
    worker = object.__new__(offloading.OffloadingConnectorWorker)
    worker.kv_cache_config, worker.vllm_config = caches.config, caches.vllm_config
    worker.spec = SimpleNamespace(kv_cache_config=caches.config, vllm_config=caches.vllm_config)
    worker._init_worker = worker._register_handlers = told.append
    return worker, told


def require_same(told: Sequence[CanonicalKVCaches], expected: Sequence[Any]) -> int:
    """Fail unless both are the same memory; return the descriptors of a block."""
    (ours,), (theirs,) = told, expected
    assert len(ours.group_data_refs) == len(theirs.group_data_refs)
    for group in range(len(ours.group_data_refs)):
        described = describe(ours, group, range(NUM_BLOCKS))
        same = describe(convert_caches(theirs), group, range(NUM_BLOCKS))
        assert np.array_equal(described.addresses, same.addresses)
        assert np.array_equal(described.lengths, same.lengths)
        assert np.array_equal(described.block_offsets, same.block_offsets)
    return len(describe(ours, 0, [1]).lengths)


def register(caches: Caches, monkeypatch: pytest.MonkeyPatch) -> tuple[CanonicalKVCaches, int]:
    connector = Connector(caches)
    worker, expected = vllms_own(caches, monkeypatch)
    worker.register_kv_caches(caches.tensors)
    connector.register_kv_caches(caches.tensors)
    return connector.told[0], require_same(connector.told, expected)


@before_names
@pytest.mark.parametrize("name", [CPU, FLASH, TRITON])
def test_tensors_of_layers_are_read_as_their_backend_says(
    stride_order: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    caches = allocate([FULL, SLIDING], backend(name))
    _, num_descriptors = register(caches, monkeypatch)
    assert num_descriptors in {2, 4}  # of two layers, whose keys may lie apart


@with_names
@pytest.mark.parametrize(
    ("layout", "num_descriptors"), [("LBHNC", 2), ("LBNHC", 2), ("BLHNC", 1), ("BLNHC", 1)]
)
def test_a_block_is_one_descriptor_where_blocks_are_outermost(
    layout: str, num_descriptors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    caches = allocate([FULL, SLIDING], backend(FLASH), layout=layout)
    assert register(caches, monkeypatch)[1] == num_descriptors


@pytest.mark.parametrize(
    ("specs", "name", "num_descriptors"),
    [([FULL], CPU, {2, 4}), ([LATENT], MLA, {2}), ([STATES, STATES], CPU, {2})],
    ids=["keys and values", "latents", "states"],
)
def test_every_kind_of_cache_is_read_as_such(
    specs: list[Any], name: str, num_descriptors: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    caches = allocate(specs, backend(name), layout="LBHNC" if LAYOUTS_ARE_NAMED else "")
    told, num = register(caches, monkeypatch)
    assert num in num_descriptors
    if specs[0] is FULL:  # planes, outside of a head or within
        layouts = {ref.layout for ref in told.group_data_refs[0]}
        assert layouts <= {"block head kv token dim", "kv block head token dim"}
        with pytest.raises(PageMappingError, match="named axes"):  # a CPU's kernels pack keys
            map_caches(told, WorkerShard(num_kv_heads=2))
    if specs[0] is STATES:  # without the bytes behind them, up to those of attention
        data = STATES.shapes[0][0] * STATES.shapes[0][1] * 2 + 4 * 16 * 8 * 4
        assert {ref.page_size_bytes for refs in told.group_data_refs for ref in refs} == {data}


@with_names
@pytest.mark.parametrize("layout", ["LBNHC", "BLNHC"])
def test_a_cache_of_a_cpu_in_whose_heads_tokens_lie_apart_is_refused_by_name(
    layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    caches = allocate([FULL], backend(CPU), layout=layout)
    with pytest.raises(UnknownLayoutError, match=r"group0\.layer0"):
        register(caches, monkeypatch)


@pytest.mark.skipif(
    not hasattr(KVConnectorBase_V1, "register_cross_layers_kv_cache"),
    reason="this vLLM allocates no tensor of all layers",
)
def test_a_block_of_one_tensor_of_all_layers_is_one_descriptor(
    stride_order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    caches, tensor = allocate_cross_layer(FULL, backend(FLASH))
    connector = Connector(caches)
    worker, expected = vllms_own(caches, monkeypatch)
    worker.register_cross_layers_kv_cache(tensor, backend(FLASH))
    connector.register_cross_layers_kv_cache(tensor, backend(FLASH))
    assert require_same(connector.told, expected) == 1


def test_a_backend_that_does_not_say_where_layers_are_is_refused() -> None:
    caches = vllm_tensors.plan([FULL], SimpleBackend, num_layers=2, layout="LBHNC")
    with pytest.raises(InvalidArgumentError, match="a tensor of all layers"):
        Connector(caches).register_cross_layers_kv_cache(torch.zeros(1), SimpleBackend)


class SimpleBackend:
    """Backend that declares a shape and no stride order."""

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> tuple[int, ...]:
        return num_blocks, block_size, num_kv_heads, 2 * head_size

    @staticmethod
    def get_name() -> str:
        return "SIMPLE"


def test_pages_of_other_bytes_than_their_elements_have_are_refused() -> None:
    class Scaled(type(FULL)):  # type: ignore[misc] # vLLM's classes are Any here
        @property
        def page_size_bytes(self) -> int:
            return int(super().page_size_bytes) + 256

    caches = vllm_tensors.plan(
        [Scaled(**vllm_tensors.ATTENTION)], backend(FLASH), num_layers=1, layout="LBHNC"
    )
    with pytest.raises(InvalidArgumentError, match="16640 bytes in a page, not 16384"):
        Connector(caches).register_kv_caches({})


@pytest.mark.skipif(not hasattr(FULL, "num_head_slots"), reason="this vLLM has no such kernels")
def test_pages_in_an_order_of_a_kernels_own_are_refused() -> None:
    """B12X keeps keys and values as two heads: as many as a worker's model may have."""
    spec = backend(B12X).customize_spec(FULL)
    assert spec.page_size_bytes == FULL.page_size_bytes
    caches = allocate([spec], backend(B12X), layout="LBHNC")
    with pytest.raises(InvalidArgumentError, match="num_head_slots is 2"):
        Connector(caches).register_kv_caches(caches.tensors)
