"""Cache mappings: portable pages of workers' caches, and the reasons of caches without any."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kvxfer.errors import InvalidArgumentError, PageMappingError
from kvxfer.kvcache.canonical import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    canonicalize,
)
from kvxfer.kvcache.config import KVCacheConfig, KVCacheGroup
from kvxfer.kvcache.portable import (
    PageMapping,
    WorkerShard,
    compile_mapping,
    map_caches,
    payload_boxes,
    portable_page,
    verify_mappings,
)
from kvxfer.kvcache.spec import (
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLASpec,
    UniformTypeKVCacheSpecs,
)

NUM_BLOCKS, TOKENS, HEADS, DIM = 3, 8, 2, 4
NHD = "block kv token head dim"
SPEC = FullAttentionSpec(
    tokens_per_block=TOKENS, num_kv_heads=HEADS, head_dim=DIM, dtype=torch.float16
)
ALONE = WorkerShard(num_kv_heads=HEADS)


def caches_of(
    layout: str = NHD,
    *,
    names: Sequence[str] = ("layers.0",),
    spec: KVCacheSpec = SPEC,
    kernel_blocks_per_block: int = 1,
) -> CanonicalKVCaches:
    """Make a worker whose layers have tensors of one layout."""
    config = KVCacheConfig(NUM_BLOCKS, (KVCacheGroup(spec, tuple(names)),))
    kv_caches = {
        name: torch.zeros(_shape(layout, spec.for_layer(name), kernel_blocks_per_block)).to(
            spec.for_layer(name).cache_tensors[0].dtype
        )
        for name in names
    }
    return canonicalize(kv_caches, config, layouts=dict.fromkeys(names, layout))


def _shape(layout: str, spec: KVCacheSpec, kernel_blocks_per_block: int) -> list[int]:
    sizes = {"kv": 1, **spec.cache_tensors[0].axis_sizes, "block": NUM_BLOCKS}
    sizes["block"] *= kernel_blocks_per_block
    if "token" in layout:
        sizes["token"] //= kernel_blocks_per_block
    return [sizes[axis] for axis in layout.split()]


def map_one(caches: CanonicalKVCaches, shard: WorkerShard = ALONE, **options: Any) -> PageMapping:
    (mapping,) = map_caches(caches, shard, **options)
    return mapping


def names_of(mapping: PageMapping) -> list[str]:
    return [tensor.name for tensor in mapping.page.tensors]


def test_a_page_is_heads_then_tokens_layer_by_layer() -> None:
    mapping = map_one(caches_of(names=("model.layers.10.attn", "model.layers.9.attn")))
    assert names_of(mapping) == ["layers.9.k", "layers.9.v", "layers.10.k", "layers.10.v"]
    assert {tensor.axes for tensor in mapping.page.tensors} == {("head", "token", "dim")}
    assert {tensor.shape for tensor in mapping.page.tensors} == {(HEADS, TOKENS, DIM)}
    assert str(mapping) == (
        "512 of 512 bytes of a page in 10 runs, 1 blocks per page, 1 pages per block"
    )


def test_the_order_of_boxes_does_not_matter() -> None:
    caches = caches_of(names=("layers.9", "layers.10"))
    boxes = payload_boxes(caches.group_data_refs[0])
    page = portable_page(boxes[::-1], ALONE, num_tokens=TOKENS)
    assert page == map_one(caches).page


@pytest.mark.parametrize(
    "layout", ["kv layer block token head dim", "block layer kv token head dim"]
)
def test_pages_of_all_layers_have_the_order_of_pages_of_one(layout: str) -> None:
    names = ("layers.9", "layers.10")
    sizes = {"layer": 2, "block": NUM_BLOCKS, "kv": 2, "token": TOKENS, "head": HEADS, "dim": DIM}
    tensor = torch.zeros([sizes[axis] for axis in layout.split()], dtype=torch.float16)
    config = KVCacheConfig(NUM_BLOCKS, (KVCacheGroup(SPEC, names),))
    caches = canonicalize({"all": tensor}, config, layouts={"all": layout})
    assert map_one(caches).page == map_one(caches_of(names=names)).page


@pytest.mark.parametrize(
    ("names", "called"),
    [
        (("a.3.attn", "a.12.attn"), ["layers.3", "layers.12"]),
        (("first", "second"), ["first", "second"]),
        (("encoder.0", "decoder.0"), ["decoder.0", "encoder.0"]),
        (("h.03", "g.3"), ["g.3", "h.03"]),
        (("layers.0.mla2", "layers.1"), ["layers.0.mla2", "layers.1"]),
    ],
)
def test_layers_are_called_by_their_number_where_that_is_one_layer(
    names: tuple[str, ...], called: list[str]
) -> None:
    mapping = map_one(caches_of(names=names))
    assert names_of(mapping) == [f"{name}.{part}" for name in called for part in "kv"]


def test_a_layer_that_keeps_what_another_does_is_not_mapped_twice() -> None:
    tensor = torch.zeros(_shape(NHD, SPEC, 1), dtype=torch.float16)
    config = KVCacheConfig(NUM_BLOCKS, (KVCacheGroup(SPEC, ("layers.12", "layers.3")),))
    caches = canonicalize(
        {"layers.12": tensor, "layers.3": tensor},
        config,
        layouts={"layers.12": NHD, "layers.3": NHD},
    )
    mapping = map_one(caches)
    assert names_of(mapping) == ["layers.3.k", "layers.3.v"]
    assert mapping.num_bytes == mapping.block_size_bytes == SPEC.page_size_bytes


def test_slots_of_single_tokens_are_blocks_of_one_token() -> None:
    spec = replace(SPEC, tokens_per_block=1)
    config = KVCacheConfig(NUM_BLOCKS, (KVCacheGroup(spec, ("layers.0",)),))
    slots = tuple(torch.zeros(NUM_BLOCKS, HEADS, DIM, dtype=torch.float16) for _ in "kv")
    mapping = map_one(canonicalize({"layers.0": slots}, config), tokens_per_page=TOKENS)
    assert (mapping.blocks_per_page, mapping.num_bytes) == (TOKENS, SPEC.page_size_bytes)
    assert mapping.page == map_one(caches_of()).page


@pytest.mark.parametrize("rank", [0, 1])
def test_a_layout_may_leave_out_a_single_head(rank: int) -> None:
    caches = caches_of("block kv token dim", spec=replace(SPEC, num_kv_heads=1))
    shard = WorkerShard(num_kv_heads=HEADS, rank=rank, tp_size=2)
    mapping = map_one(caches, shard)
    assert mapping.page == map_one(caches_of()).page
    half = SPEC.page_size_bytes // 4
    assert mapping.pages[0].page_offsets.tolist() == [rank * half, (2 + rank) * half]
    assert mapping.num_writers == 1


def test_latents_of_several_heads_are_divided_like_keys() -> None:
    spec = MLASpec(tokens_per_block=TOKENS, num_kv_heads=HEADS, head_dim=DIM, dtype=torch.float16)
    mapping = map_one(caches_of("block token head dim", spec=spec))
    assert mapping.num_bytes == spec.page_size_bytes


OTHERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dim": ({}, {"spec": replace(SPEC, head_dim=DIM + 1)}),
    "dtype": ({}, {"spec": replace(SPEC, dtype=torch.bfloat16)}),
    "layer": ({}, {"names": ("layers.0", "layers.1")}),
    "page": ({"names": ("layers.0", "layers.1")}, {}),
    "token": ({}, {"spec": replace(SPEC, tokens_per_block=12)}),
}


@pytest.mark.parametrize("axis", OTHERS)
def test_a_page_of_another_model_is_refused_by_what_differs(axis: str) -> None:
    ours, theirs = OTHERS[axis]
    boxes = payload_boxes(caches_of(**ours).group_data_refs[0])
    page = map_one(caches_of(**theirs)).page
    with pytest.raises(PageMappingError) as caught:
        compile_mapping(boxes, page, tokens_per_block=TOKENS, payload_sizes=[len(boxes) * 128])
    assert caught.value.axis == axis
    assert str(caught.value).startswith(f"pages cannot be mapped along {axis!r}: ")


def test_a_page_in_another_encoding_is_refused() -> None:
    boxes = payload_boxes(caches_of().group_data_refs[0])
    packed = [replace(box, encoding="packed for AMX") for box in boxes]
    page = map_one(caches_of()).page
    with pytest.raises(PageMappingError, match="packed for AMX") as caught:
        compile_mapping(packed, page, tokens_per_block=TOKENS, payload_sizes=[256])
    assert caught.value.axis == "encoding"


def test_bytes_of_a_float_are_the_same_elements() -> None:
    floats = replace(SPEC, dtype=torch.float8_e4m3fn)
    page = map_one(caches_of(spec=replace(SPEC, dtype=torch.uint8))).page
    boxes = payload_boxes(caches_of(spec=replace(floats, dtype=torch.uint8)).group_data_refs[0])
    boxes = [replace(box, dtype=torch.float8_e4m3fn) for box in boxes]
    compile_mapping(boxes, page, tokens_per_block=TOKENS, payload_sizes=[128])


@pytest.mark.parametrize("kept", [1, 3, 4])
def test_a_worker_has_the_heads_that_its_rank_says(kept: int) -> None:
    caches = caches_of(spec=replace(SPEC, num_kv_heads=kept))
    with pytest.raises(PageMappingError, match="2 per worker") as caught:
        map_caches(caches, WorkerShard(num_kv_heads=4, tp_size=2))
    assert (caught.value.axis, caught.value.actual) == ("head", f"{kept} in 'layers.0'")


def test_every_layer_has_the_heads_that_the_rank_says() -> None:
    names = ("layers.0", "layers.1")
    specs = {names[0]: SPEC, names[1]: replace(SPEC, num_kv_heads=1)}
    spec = UniformTypeKVCacheSpecs(tokens_per_block=TOKENS, layer_specs=specs)
    with pytest.raises(PageMappingError) as caught:
        map_caches(caches_of(names=names, spec=spec), ALONE)
    assert (caught.value.axis, caught.value.actual) == ("head", "1 in 'layers.1'")


def test_heads_that_workers_cannot_share_are_refused() -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        WorkerShard(num_kv_heads=6, tp_size=4)
    assert caught.value.argument == "tp_size"


@pytest.mark.parametrize(
    ("shard", "pages"),
    [
        ({"dcp_size": 2, "interleave_tokens": 16}, {}),  # a turn is longer than a block
        ({"dcp_size": 2, "interleave_tokens": 8}, {"tokens_per_page": 8}),  # nothing for rank 1
        ({}, {"tokens_per_page": 12}),
        ({}, {"tokens_per_page": 3}),
    ],
)
def test_tokens_that_cannot_be_cut_so_are_refused(
    shard: dict[str, int], pages: dict[str, Any]
) -> None:
    caches = caches_of(spec=replace(SPEC, num_kv_heads=1))
    worker = WorkerShard(num_kv_heads=1, tp_size=2, rank=1, **shard)
    with pytest.raises(PageMappingError) as caught:
        map_caches(caches, worker, **pages)
    assert caught.value.axis == "token"


def test_a_page_that_ends_inside_of_kernel_blocks_is_refused() -> None:
    spec = replace(SPEC, tokens_per_block=24)
    caches = caches_of(NHD, spec=spec, kernel_blocks_per_block=4)
    assert map_one(caches, tokens_per_page=12).pages_per_block == 2
    assert map_one(caches, tokens_per_page=3).pages_per_block == 8
    with pytest.raises(PageMappingError, match="steps of 6; expected 0 to 8") as caught:
        map_caches(caches, ALONE, tokens_per_page=8)
    assert caught.value.axis == "token"


STATES = MambaSpec(tokens_per_block=64, shapes=((4, 3), (4, 2)), dtypes=(torch.float16,) * 2)


def states_of(spec: MambaSpec = STATES) -> CanonicalKVCaches:
    config = KVCacheConfig(NUM_BLOCKS, (KVCacheGroup(spec, ("layers.0",)),))
    states = [torch.zeros(NUM_BLOCKS, *shape, dtype=torch.float16) for shape in spec.shapes]
    return canonicalize({"layers.0": states}, config)


@pytest.mark.parametrize("state_heads", [(), ("s0",), (None, "s0")])
def test_states_need_to_be_told_how_workers_divide_them(state_heads: Any) -> None:
    with pytest.raises(PageMappingError, match="without heads") as caught:
        map_caches(states_of(), WorkerShard(num_kv_heads=2, tp_size=2), state_heads=state_heads)
    assert caught.value.axis == "head"
    assert map_one(states_of(), state_heads=state_heads).num_bytes == STATES.page_size_bytes


def test_states_are_not_divided_by_tokens() -> None:
    shard = WorkerShard(num_kv_heads=1, tp_size=2, dcp_size=2)
    with pytest.raises(PageMappingError, match="state0 without tokens") as caught:
        map_caches(states_of(), shard, state_heads=("s0", "s0"))
    assert caught.value.axis == "token"


def test_caches_of_unknown_bytes_are_refused() -> None:
    tensor = CanonicalKVCacheTensor(torch.zeros(3, 8, dtype=torch.int8), 8)
    unknown = CanonicalKVCaches((tensor,), ((CanonicalKVCacheRef(0, 8, ("layers.0",)),),))
    with pytest.raises(InvalidArgumentError) as caught:
        map_caches(unknown, ALONE)
    assert caught.value.argument == "caches"
    unnamed = replace(unknown, group_specs=(SPEC,))
    with pytest.raises(PageMappingError, match=r"bytes of \['layers.0'\]") as refused:
        map_caches(unnamed, ALONE)
    assert refused.value.axis == "layout"
    for caches in (unknown, unnamed):
        (tensor_of_page,) = map_one(caches, opaque="engine 1").page.tensors
        assert tensor_of_page.name == "layers.0.opaque0"
        assert "named axes" in tensor_of_page.encoding


@pytest.mark.parametrize("parallel", [{"dcp_size": 2}, {"pcp_size": 2}, {}])
def test_what_cannot_be_mapped_is_kept_by_each_worker_for_itself(parallel: dict[str, int]) -> None:
    first = WorkerShard(num_kv_heads=1, tp_size=2, **parallel)
    mappings = [
        map_one(states_of(), replace(first, rank=rank), opaque="engine 1, NHD")
        for rank in range(first.num_workers)
    ]
    verify_mappings(mappings)
    encodings = []
    for rank, mapping in enumerate(mappings):
        (encoding,) = {tensor.encoding for tensor in mapping.page.tensors}
        assert encoding.startswith(f"engine 1, NHD, worker {rank} of {first.num_workers} (")
        assert "state0 without heads" in encoding
        encodings.append(encoding)
        assert mapping.num_bytes == mapping.block_size_bytes == STATES.page_size_bytes
        assert mapping.writes(0)
        assert mapping.writes(1)
    assert len(set(encodings)) == first.num_workers


def test_a_group_that_can_be_mapped_is_so_beside_one_that_cannot() -> None:
    config = KVCacheConfig(
        NUM_BLOCKS, (KVCacheGroup(SPEC, ("layers.0",)), KVCacheGroup(STATES, ("layers.1",)))
    )
    caches = canonicalize(
        {
            "layers.0": torch.zeros(_shape(NHD, SPEC, 1), dtype=torch.float16),
            "layers.1": [torch.zeros(NUM_BLOCKS, *s, dtype=torch.float16) for s in STATES.shapes],
        },
        config,
        layouts={"layers.0": NHD},
    )
    shard = WorkerShard(num_kv_heads=2 * HEADS, tp_size=2)
    attention, states = map_caches(caches, shard, opaque="engine 1")
    assert [tensor.encoding for tensor in attention.page.tensors] == ["", ""]
    assert all(tensor.encoding for tensor in states.page.tensors)


def test_parts_may_have_another_order_if_heads_are_first() -> None:
    caches = caches_of("block kv head token dim")
    turned = map_one(caches, axes={"k": ("head", "dim", "token")})
    keys, values = turned.page.tensors[:2]
    assert (keys.axes, values.axes) == (("head", "dim", "token"), ("head", "token", "dim"))
    assert turned.page != map_one(caches).page
    for order in [("token", "head", "dim"), ("head", "dim"), ("head", "dim", "dim")]:
        with pytest.raises(InvalidArgumentError, match="heads first"):
            map_one(caches, axes={"k": order})


def test_shards_are_equal_shares_of_the_heads() -> None:
    whole = map_one(caches_of(names=("layers.0", "layers.1")), num_shards=2)
    assert whole.shards == (0, 1)
    assert whole.page.shard_sizes == (SPEC.page_size_bytes,) * 2
    for shard, tensors in enumerate(whole.page.shards):
        assert [tensor.first[0] for tensor in tensors] == [shard] * 4
        assert [tensor.shape[0] for tensor in tensors] == [1] * 4


def test_a_worker_says_which_shards_it_holds() -> None:
    held = [
        map_one(caches_of(), WorkerShard(num_kv_heads=4, tp_size=2, rank=rank), num_shards=4).shards
        for rank in range(2)
    ]
    assert held == [(0, 1), (2, 3)]


def test_a_worker_that_holds_a_part_of_a_shard_is_told_so() -> None:
    mapping = map_one(caches_of(), WorkerShard(num_kv_heads=4, tp_size=2))
    with pytest.raises(PageMappingError, match="use more shards") as caught:
        _ = mapping.shards
    assert caught.value.axis == "head"


def test_latents_are_in_the_first_shard() -> None:
    spec = MLASpec(tokens_per_block=TOKENS, head_dim=DIM, dtype=torch.float16)
    shard = WorkerShard(num_kv_heads=1, rank=1, tp_size=2)
    mapping = map_one(caches_of("block token dim", spec=spec), shard, num_shards=2)
    assert (mapping.shards, len(mapping.page.shards)) == ((0,), 1)
    assert (mapping.num_writers, mapping.writer_index) == (2, 1)


def test_heads_that_shards_do_not_divide_are_refused() -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        map_caches(caches_of(), ALONE, num_shards=3)
    assert caught.value.argument == "num_shards"


def test_tokens_are_shared_by_workers_that_hold_the_same_heads() -> None:
    shard = WorkerShard(num_kv_heads=4, tp_size=2, dcp_size=2)
    with pytest.raises(InvalidArgumentError) as caught:
        map_caches(caches_of(), shard)
    assert caught.value.argument == "dcp_size"


def test_writers_take_turns() -> None:
    spec = replace(SPEC, num_kv_heads=1)
    mappings = [
        map_one(caches_of(spec=spec), WorkerShard(num_kv_heads=HEADS, tp_size=8, rank=rank))
        for rank in range(8)
    ]
    verify_mappings(mappings)
    for turn in range(9):
        writers = [rank for rank, mapping in enumerate(mappings) if mapping.writes(turn)]
        assert writers == [turn % 4, 4 + turn % 4]


def test_the_pieces_of_a_block_are_all_its_bytes() -> None:
    for mapping in (map_one(caches_of()), map_one(caches_of(), tokens_per_page=2)):
        covered = np.zeros(mapping.block_size_bytes, int)
        for fragments in mapping.pages:
            for start, length in zip(fragments.local_offsets, fragments.lengths, strict=True):
                covered[start : start + length] += 1
        assert (covered == 1).all()
