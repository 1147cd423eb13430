"""Rows of host memory as portable pages, which engines of other shapes read."""

import math
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

pytest.importorskip("vllm.v1.kv_offload.base", reason="needs vLLM")

from vllm.v1 import kv_cache_interface as interface

from kvxfer.backends.host import PoolShape
from kvxfer.errors import CacheMismatchError, NamespaceMismatchError
from kvxfer.integrations.vllm.common.cpu_packing import cpu_kernels
from kvxfer.integrations.vllm.common.worker_pages import (
    CPU_AXES,
    GroupPages,
    WorkerPages,
    as_bytes,
    describe_pages,
    unpack,
)
from kvxfer.integrations.vllm.offloading.rows import map_rows, num_copies, row_namespace
from kvxfer.integrations.vllm.prefill_decode.groups import describe_worker
from kvxfer.kvcache import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor
from kvxfer.kvcache.page_box import Digit, PageBox
from kvxfer.kvcache.portable import CacheDescription, PageMapping, map_peers
from kvxfer.storage.keys import Namespace
from kvxfer.storage.portable_backend import portable_namespace
from kvxfer.testing import BlockMemory
from tests.integrations.test_vllm import make_config
from tests.integrations.vllm_tensors import STATES, pretend_gpu

HEADS, TOKENS, DIM = 4, 16, 8
PAGE_BYTES = 2 * TOKENS * DIM * 4  # of one head


def worker_pages(heads: int, *, reason: str = "", packing: str = "") -> WorkerPages:
    """Layout of a CPU: keys transposed, values not, one head after the other."""
    plane = TOKENS * DIM * 4
    box = partial(PageBox, layer_name="layers.0", dtype=torch.float32)
    head = Digit("head", heads, 2 * plane)
    of_keys = head, Digit("dim", DIM, TOKENS * 4), Digit("token", TOKENS, 4)
    of_values = head, Digit("token", TOKENS, DIM * 4), Digit("dim", DIM, 4)
    boxes = box(part="k", digits=of_keys), box(part="v", digits=of_values, offset_bytes=plane)
    told: dict[str, Any] = {"reason": reason} if reason else {"boxes": boxes, "axes": CPU_AXES}
    group = GroupPages(payload_size_bytes=heads * PAGE_BYTES, packing=packing, **told)
    return WorkerPages(groups=(group,), num_kv_heads=HEADS)


def row_config(
    world_size: int, *, blocks_per_chunk: int = 1, pp_size: int = 1, tp_size: int = 0
) -> Any:
    parallel = SimpleNamespace(
        world_size=world_size,
        tp_size=tp_size or world_size // pp_size,
        pcp_size=1,
        dcp_size=1,
        pp_size=pp_size,
    )
    groups = (SimpleNamespace(tokens_per_block=TOKENS, group_id=0, layer_names=("layers.0",)),)
    cache = SimpleNamespace(blocks_per_chunk=blocks_per_chunk)
    return SimpleNamespace(parallel=parallel, groups=groups, cache=cache)


def row_shape(world_size: int, blocks_per_chunk: int = 1) -> PoolShape:
    part = HEADS // world_size * PAGE_BYTES * blocks_per_chunk
    return PoolShape(num_slots=1, num_parts=world_size, part_size_bytes=-(-part // 4096) * 4096)


def page_of(row: np.ndarray[Any, Any], mapping: PageMapping) -> bytes:
    (fragments,) = mapping.pages
    page = np.zeros(mapping.page.num_bytes, np.uint8)
    for local, offset, length in zip(
        fragments.local_offsets, fragments.page_offsets, fragments.lengths, strict=True
    ):
        page[offset : offset + length] = row[local : local + length]
    return page.tobytes()


def fill_row(world_size: int, blocks_per_chunk: int) -> np.ndarray[Any, Any]:
    """Make a row of workers that keep the same model's values."""
    shape = row_shape(world_size, blocks_per_chunk)
    row = np.full(shape.slot_size_bytes, 255, np.uint8)
    values = np.arange(2 * HEADS * blocks_per_chunk * TOKENS * DIM, dtype=np.float32)
    keys, others = values.reshape(2, HEADS, blocks_per_chunk, TOKENS, DIM)
    heads = HEADS // world_size
    for rank in range(world_size):
        start = rank * shape.part_size_bytes
        for block in range(blocks_per_chunk):
            for head in range(rank * heads, rank * heads + heads):
                both = (keys[head, block].T, others[head, block])
                data = b"".join(np.ascontiguousarray(each).tobytes() for each in both)
                row[start : start + len(data)] = np.frombuffer(data, np.uint8)
                start += len(data)
    return row


@pytest.mark.parametrize("blocks_per_chunk", [1, 3])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_rows_of_any_number_of_workers_are_one_page(world_size: int, blocks_per_chunk: int) -> None:
    (mapping,) = map_rows(
        [worker_pages(HEADS // world_size)] * world_size,
        row_config(world_size, blocks_per_chunk=blocks_per_chunk),
        row_shape(world_size, blocks_per_chunk),
        "here",
    )
    values = np.arange(2 * HEADS * blocks_per_chunk * TOKENS * DIM, dtype=np.float32)
    keys, others = values.reshape(2, HEADS, blocks_per_chunk * TOKENS, DIM)
    expected = np.ascontiguousarray(keys.swapaxes(1, 2)).tobytes() + others.tobytes()
    assert page_of(fill_row(world_size, blocks_per_chunk), mapping) == expected
    assert [tensor.shape for tensor in mapping.page.tensors] == [
        (HEADS, DIM, blocks_per_chunk * TOKENS),
        (HEADS, blocks_per_chunk * TOKENS, DIM),
    ]


@pytest.mark.parametrize(
    ("workers", "config", "reason"),
    [
        ([worker_pages(2, reason="states")] * 2, row_config(2), "states"),
        ([worker_pages(2)] * 2, row_config(2, pp_size=2), "2 stages"),
        ([worker_pages(2, packing="x")] * 2, row_config(2, pp_size=2), ", packed for x"),
        ([worker_pages(1)] * 8, row_config(8), "kept by 2 workers; expected 1"),
        ([worker_pages(4)] * 2, row_config(2), "'head'"),
        ([worker_pages(2)] * 2, row_config(2, tp_size=1), "'head'"),
    ],
)
def test_rows_that_mean_something_unknown_stay_as_they_are(
    workers: list[WorkerPages], config: Any, reason: str
) -> None:
    shape = PoolShape(num_slots=1, num_parts=len(workers), part_size_bytes=4096)
    (mapping,) = map_rows(workers, config, shape, "only here")
    (tensor,) = mapping.page.tensors
    assert (tensor.dtype, tensor.shape) == (torch.uint8, (shape.slot_size_bytes,))
    assert tensor.encoding.startswith("only here")
    assert reason in tensor.encoding
    assert mapping.pages[0].lengths.tolist() == [shape.slot_size_bytes]


def test_heads_are_divided_even_where_the_order_inside_of_them_is_unknown() -> None:
    def in_an_unknown_order(heads: int) -> WorkerPages:
        (group,) = worker_pages(heads).groups
        boxes = tuple(as_bytes(box, "packed for amx") for box in group.boxes)
        told = GroupPages(payload_size_bytes=group.payload_size_bytes, boxes=boxes)
        return WorkerPages(groups=(told,), num_kv_heads=HEADS)

    pages = []
    for world_size in (1, 4):
        workers = [in_an_unknown_order(HEADS // world_size)] * world_size
        shape = row_shape(world_size)
        (mapping,) = map_rows(workers, row_config(world_size), shape, "here")
        assert "packed for amx" in mapping.page.tensors[0].encoding
        pages.append(page_of(fill_row(world_size, 1), mapping))
    assert pages[0] == pages[1]


def packed(isa: str) -> PageMapping:
    """Map rows of one worker whose keys and values are packed for an instruction set."""
    tokens, dim = 32, 64
    plane, size = tokens * dim * 2, HEADS * tokens * dim * 4
    digits = Digit("head", HEADS, 2 * plane), Digit("token", tokens, 2 * dim), Digit("dim", dim, 2)
    box = partial(PageBox, layer_name="layers.0", dtype=torch.bfloat16, digits=digits)
    said, axes = unpack([box(part="k"), box(part="v", offset_bytes=plane)], isa)
    pages = GroupPages(payload_size_bytes=size, boxes=tuple(said), axes=dict(axes), packing=isa)
    config = row_config(1)
    config.groups[0].tokens_per_block = tokens
    shape = PoolShape(num_slots=1, num_parts=1, part_size_bytes=size)
    workers = [WorkerPages(groups=(pages,), num_kv_heads=HEADS)]
    (mapping,) = map_rows(workers, config, shape, "here")
    return mapping


@pytest.mark.skipif(
    not hasattr(torch.ops._C, "cpu_attn_reshape_and_cache"),
    reason="this vLLM has no CPU attention that runs with the torch that is installed",
)
def test_engines_of_two_instruction_sets_have_one_page_or_different_names() -> None:
    if "avx512_bf16" not in cpu_kernels().split():
        pytest.skip(f"amx not run: no avx512_bf16, whose build packs for it, on {cpu_kernels()}")
    names = {
        isa: portable_namespace(Namespace(model="m"), [packed(isa)])
        for isa in ("vec", "vec16", "amx")
    }
    assert names["vec"] == names["vec16"]
    with pytest.raises(NamespaceMismatchError, match="packed for amx"):
        names["vec"].require_same(names["amx"])


def test_workers_that_keep_the_same_heads_share_a_part() -> None:
    workers, config = [worker_pages(1)] * 8, row_config(8)
    assert num_copies(workers[0], config) == 2
    assert num_copies(worker_pages(1, reason="states"), config) == 1
    assert num_copies(None, config) == 1
    shape = row_shape(HEADS)
    (mapping,) = map_rows(workers, config, shape, "here")
    (alone,) = map_rows([worker_pages(HEADS)], row_config(1), row_shape(1), "there")
    assert mapping.page == alone.page
    assert page_of(fill_row(HEADS, 1), mapping) == page_of(fill_row(1, 1), alone)


def described(told: dict[str, Any], tp_size: int, *, draft: Any = None) -> WorkerPages:
    def model(told: dict[str, Any], heads: int) -> Any:
        config = SimpleNamespace(to_dict=lambda: told)
        return SimpleNamespace(get_total_num_kv_heads=lambda: heads, hf_text_config=config)

    drafted = None if draft is None else SimpleNamespace(draft_model_config=model(draft, 8))
    vllm_config: Any = SimpleNamespace(
        model_config=model(told, 4),
        speculative_config=drafted,
        parallel_config=SimpleNamespace(tensor_parallel_size=tp_size),
        compilation_config=SimpleNamespace(static_forward_context={}),
    )
    caches = BlockMemory([[64]], num_blocks=2).caches
    return describe_pages(caches, [(["layers.0"], TOKENS)], vllm_config)


def layer(kind: str, spec: Any, **fields: Any) -> Any:
    attn_backend = SimpleNamespace(get_name=lambda: kind)
    shapes = [(2, *shape) for shape in getattr(spec, "shapes", ())]
    return SimpleNamespace(
        get_attn_backend=lambda: attn_backend,
        get_kv_cache_spec=lambda _: spec,
        kv_cache=[torch.zeros(shape) for shape in shapes],
        **fields,
    )


def describe_on(
    monkeypatch: pytest.MonkeyPatch,
    vllm_layer: Any,
    gpu: tuple[Any, ...] | None,
    *,
    layout: str = "",
) -> CacheDescription:
    """Describe the caches of a worker with one layer, on a GPU of a name and capability."""
    if gpu is not None:
        pretend_gpu(monkeypatch, *gpu)
    spec = vllm_layer.get_kv_cache_spec(None)
    caches = BlockMemory([[64]], num_blocks=2).caches
    if isinstance(vllm_layer.kv_cache, torch.Tensor):
        rows = vllm_layer.kv_cache.flatten(1).view(torch.int8)
        ref = CanonicalKVCacheRef(0, rows.shape[1])
        caches = CanonicalKVCaches([CanonicalKVCacheTensor(rows, rows.shape[1])], [[ref]])
    elif vllm_layer.kv_cache:  # the states, in one piece
        raw = torch.zeros(2, spec.page_size_bytes, dtype=torch.int8)
        views, start = [], 0
        for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True):
            size = math.prod(shape) * dtype.itemsize
            part = raw[:, start : start + size].view(dtype)
            views.append(part.view(-1, *shape))
            start += size
        vllm_layer.kv_cache = views
        ref = CanonicalKVCacheRef(0, spec.page_size_bytes)
        caches = CanonicalKVCaches([CanonicalKVCacheTensor(raw, spec.page_size_bytes)], [[ref]])
    vllm_config: Any = SimpleNamespace(
        model_config=SimpleNamespace(get_total_num_kv_heads=lambda: 1, hf_text_config=None),
        speculative_config=None,
        parallel_config=SimpleNamespace(tensor_parallel_size=1, rank=0),
        cache_config=SimpleNamespace(kv_cache_layout=layout),
        compilation_config=SimpleNamespace(static_forward_context={"layers.0": vllm_layer}),
    )
    group = SimpleNamespace(layer_names=["layers.0"], kv_cache_spec=spec)
    return describe_worker(caches, SimpleNamespace(kv_cache_groups=[group]), vllm_config)


TWO_HEADS: dict[str, Any] = {"num_kv_heads": 2, "head_size": DIM, "dtype": torch.float32}
H100, H200, B200 = ("NVIDIA H100", (9, 0)), ("NVIDIA H200", (9, 0)), ("NVIDIA H100", (10, 0))


@pytest.mark.parametrize("kind", ["states", "unknown"])
def test_what_only_kernels_know_is_named_by_the_gpu_that_it_is_from(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = STATES if kind == "states" else SimpleNamespace(block_size=TOKENS)
    found = set()
    for gpu in (None, H100, H200, B200):
        for name, prefill in (("GDN_ATTN", "triton"), ("GDN_ATTN", "flashinfer"), ("X", "triton")):
            vllm_layer = layer(name, spec, gdn_prefill_backend=prefill)
            described = describe_on(monkeypatch, vllm_layer, gpu)
            (group,) = described.groups
            assert bool(group.boxes) == (kind == "states")
            words = group.opaque or group.boxes[0].encoding
            found.add(words)
            if gpu is None:
                assert words.count(cpu_kernels()) == 1
            else:
                assert cpu_kernels() not in words
                assert all(word in words for word in (gpu[0], name, prefill))
    num_on_cpu = 2 if kind == "states" else 1
    assert len(found) == num_on_cpu + 3 * 3


def latents(kind: str, tokens: int) -> Any:
    sizes = {"num_kv_heads": 1, "head_size": 132, "dtype": torch.uint8}
    vllm_layer = layer(kind, interface.MLAAttentionSpec(block_size=tokens, **sizes))
    vllm_layer.kv_cache = torch.zeros(2, tokens, 132, dtype=torch.uint8)
    return vllm_layer


def test_keys_of_an_indexer_go_to_blocks_of_as_many_tokens_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its kernels put the scales of a block behind all of the block's values."""
    for kind, goes in (("DEEPSEEK_V32_INDEXER", False), ("TRITON_MLA", True)):
        small, large = (describe_on(monkeypatch, latents(kind, each), H100) for each in (32, 64))
        assert map_peers(small, small)[0].is_direct
        with nullcontext() if goes else pytest.raises(CacheMismatchError, match="encoding"):
            map_peers(small, large)


def test_keys_of_an_indexer_are_not_divided_by_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of workers that share the tokens of a block are for equal engines only."""
    config = row_config(2)
    config.parallel.dcp_size, config.groups[0].tokens_per_block = 2, 64
    shape = PoolShape(num_slots=1, num_parts=2, part_size_bytes=32 * 132)
    for kind, is_portable in (("DEEPSEEK_V32_INDEXER", False), ("TRITON_MLA", True)):
        told = describe_on(monkeypatch, latents(kind, 32), H100).groups[0]
        group = GroupPages(payload_size_bytes=told.payload_size_bytes, boxes=told.boxes)
        workers = [WorkerPages(groups=(group,), num_kv_heads=1)] * 2
        (mapping,) = map_rows(workers, config, shape, "here")
        assert (mapping.page.tensors[0].name == "layers.0.latent") is is_portable


@pytest.mark.skipif(
    not hasattr(interface.FullAttentionSpec, "num_head_slots"), reason="no backend changes a spec"
)
def test_pages_in_an_order_of_a_kernels_own_stay_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Keys and values are two heads in B12X's, where a worker's model may have two heads, too."""
    kernels = layer("B12X", interface.FullAttentionSpec(block_size=TOKENS, **TWO_HEADS))
    kernels.kv_cache = torch.zeros(2, 2, TOKENS, 2 * DIM)
    own = {"num_head_slots": 2, "state_content_bytes": 2 * DIM * 4}
    for customize in (None, lambda spec: replace(spec, **own)):
        if customize is not None:
            kernels.get_attn_backend().customize_spec = customize
        (group,) = describe_on(monkeypatch, kernels, H100, layout="LBHNC").groups
        assert bool(group.boxes) is (customize is None)
        assert ("B12X" in group.opaque) is (customize is not None)


def test_rows_and_their_groups_are_named_by_the_gpu_too(monkeypatch: pytest.MonkeyPatch) -> None:
    names = set()
    for gpu in (H100, H200, B200):
        pretend_gpu(monkeypatch, *gpu)
        namespace = row_namespace(
            make_config(), Namespace(model="", revision="r"), row_size_bytes=64
        )
        assert gpu[0] in namespace.instruction_set
        names.add(namespace.instruction_set)
        (group,) = described({}, 1).groups
        assert gpu[0] in group.packing
    assert len(names) == 3


def block_of(heads: int) -> dict[str, Any]:
    return {"attention": {"no_op": False, "n_heads_in_group": 32 // heads}}


@pytest.mark.parametrize("tp_size", [4, 8])
@pytest.mark.parametrize(
    ("told", "reason"),
    [
        ({"num_key_value_heads": 4, "swa_num_key_value_heads": 8}, "layers have [4, 8] KV heads"),
        ({"num_kv_heads": [4, 8]}, "layers have [4, 8] KV heads"),
        (
            {"num_attention_groups": 4, "attention_other_setting": {"num_attention_groups": 8}},
            "layers have [4, 8] KV heads",
        ),
        ({"block_configs": [block_of(4), block_of(8)]}, "'block_configs'"),
        ({"num_attention_heads": [32, 16], "num_key_value_heads": 4}, "'num_attention_heads'"),
        ({"other_attention": {"num_attention_heads": 8}}, "'other_attention.num_attention_heads'"),
        ({"num_global_head_sets": 8}, "'num_global_head_sets'"),
    ],
)
def test_layers_with_other_numbers_of_heads_are_bytes_of_each_worker(
    told: dict[str, Any], reason: str, tp_size: int
) -> None:
    """With 4 heads in some layers and 8 in others, eight workers have one of each."""
    pages = described(told, tp_size)
    assert (reason in pages.groups[0].reason) is (tp_size == 8)
    assert num_copies(pages, row_config(tp_size)) == 1


def test_a_draft_model_with_another_number_of_heads() -> None:
    pages = described({}, 8, draft={"num_key_value_heads": 8})
    assert "layers have [4, 8] KV heads" in pages.groups[0].reason


def test_workers_whose_tensors_have_other_heads_are_no_copies() -> None:
    """One layer has one head on each of 8 workers, another one two, so 16 in all."""
    one, two = worker_pages(1), worker_pages(2)
    others = (replace(box, layer_name="layers.1") for box in two.groups[0].boxes)
    boxes = (*one.groups[0].boxes, *others)
    group = msgspec.structs.replace(one.groups[0], boxes=boxes)
    pages = msgspec.structs.replace(one, groups=(group,))
    assert num_copies(one, row_config(8)) == 2
    assert num_copies(pages, row_config(8)) == 1
