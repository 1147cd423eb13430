"""Peer blocks: raw blocks of any engine's workers become those of any other engine's."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvxfer.engine_side import EngineLayout
from kvxfer.errors import CacheMismatchError, InvalidArgumentError, KVXferError, PageMappingError
from kvxfer.kvcache.canonical import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    canonicalize,
)
from kvxfer.kvcache.config import KVCacheConfig, KVCacheGroup
from kvxfer.kvcache.describer import BlockDescriber
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.kvcache.page_box import Digit, PageBox
from kvxfer.kvcache.portable import (
    CacheDescription,
    GroupDescription,
    PeerBlocks,
    WorkerShard,
    describe_caches,
    match_caches,
)
from kvxfer.kvcache.spec import FullAttentionSpec, MambaSpec, UniformTypeKVCacheSpecs
from tests.examples import examples
from tests.kvcache.zoo_engines import (
    COPIES,
    ZOO,
    Worker,
    WorldEngine,
    engine_options,
    generators,
    named,
    start_engine,
    worlds,
)

NHD = "block kv token head dim"
LAYOUTS = (NHD, "block kv head token dim", "block head kv token dim", "block head token kv dim")


def described(worker: Worker) -> CacheDescription:
    return CacheDescription.decode(describe_caches(worker.caches, worker.shard).encode())


def stage(
    caches: CanonicalKVCaches, group: int, block_ids: Sequence[int]
) -> tuple[NDArray[np.uint8], NDArray[np.uint64]]:
    """Copy the payloads of blocks to memory of their own, as a reader does; one row for each."""
    describer = BlockDescriber(caches)
    size = describer.block_size_bytes(group)
    staged = np.zeros((len(block_ids), size), np.uint8)
    addresses = staged.ctypes.data + np.arange(len(block_ids), dtype=np.uint64) * np.uint64(size)
    if block_ids:
        lengths = np.full(len(block_ids), size)
        rows = Descriptors.of_pieces(addresses, lengths, owners=(staged,))
        COPIES.copy(describer.describe(group, block_ids), rows)
    return staged, addresses


def load(blocks: PeerBlocks, theirs: WorldEngine, block_ids: Sequence[int]) -> None:
    """Load a group from all sources, in place where every byte of a block has one, or staged."""
    for rank in blocks.mapping.sources:
        caches = theirs.workers[rank].caches
        their_ids = theirs.block_ids[blocks.group]
        order = np.random.default_rng(len(their_ids)).permutation(len(their_ids))
        rows, places = blocks.describe_in_place(rank, order, block_ids)
        if len(rows):
            in_place = [their_ids[index] for index in order[rows]]
            COPIES.copy(BlockDescriber(caches).describe(blocks.group, in_place), places)
        order = np.delete(order, rows)
        staged, addresses = stage(caches, blocks.group, [their_ids[index] for index in order])
        COPIES.copy(*blocks.describe(rank, order, addresses, block_ids))
        del staged


@pytest.mark.parametrize("entry", ZOO, ids=named)
@examples(6)
@given(data=st.data())
def test_a_model_moves_to_an_engine_of_any_shape(entry: EngineLayout, data: st.DataObject) -> None:
    world = data.draw(worlds(entry))
    is_even = len({width for _, width in world.parts}) == 1
    others = [
        other
        for other in ZOO
        if other.content == entry.content and (is_even or "kv*dim" in other.shape.split())
    ]
    engines = []
    for each in (entry, data.draw(st.sampled_from(others))):
        options = data.draw(
            engine_options(world, each).filter(lambda o: o.shard.num_token_shares == 1)
        )
        engines.append(start_engine(data.draw(generators()), world, options))
    theirs, ours = engines
    for worker in theirs.workers:
        worker.fill()
    for worker in ours.workers:
        worker.clear()
        told = described(theirs.workers[0])
        for blocks in match_caches(worker.caches, described(worker), told):
            load(blocks, theirs, ours.block_ids[blocks.group])
        worker.check()


def numbered(
    tokens_per_block: int = 32, *, layout: str = NHD, **shard: Any
) -> tuple[CanonicalKVCaches, torch.Tensor]:
    """Make two layers of one tensor each, whose elements are numbers of their own."""
    whole = WorkerShard(**{"num_kv_heads": 4, **shard})
    spec = FullAttentionSpec(
        tokens_per_block=tokens_per_block,
        num_kv_heads=max(1, whole.num_kv_heads // whole.tp_size),
        head_dim=3,
        dtype=torch.int32,
    )
    sizes = {**spec.cache_tensors[0].axis_sizes, "block": 9}
    shape = [sizes[axis] for axis in layout.split()]
    layers = torch.arange(2 * int(np.prod(shape)), dtype=torch.int32).view(2, *shape)
    config = KVCacheConfig(9, (KVCacheGroup(spec, ("layers.0", "layers.1")),), null_block_id=0)
    names = {"layers.0": layers[0], "layers.1": layers[1]}
    return canonicalize(names, config, layouts=dict.fromkeys(names, layout)), layers


def whole(**fields: Any) -> WorkerShard:
    return WorkerShard(**{"num_kv_heads": 4, **fields})


@pytest.mark.parametrize(
    ("mine", "theirs", "sources"),
    [
        ({"tp_size": 2, "rank": 1}, {"tp_size": 2}, (1,)),
        ({}, {"tp_size": 4}, (0, 1, 2, 3)),
        ({"tp_size": 2, "rank": 1}, {"tp_size": 4}, (2, 3)),
        ({"tp_size": 4, "rank": 3}, {"tp_size": 2}, (1,)),
        ({"tp_size": 8, "rank": 3}, {"tp_size": 8}, (3,)),
        ({"tp_size": 2, "rank": 1}, {"tp_size": 8}, (5, 7)),
        ({"tp_size": 8, "rank": 5}, {"tp_size": 2}, (1,)),
        ({"tp_size": 8, "rank": 5}, {"tp_size": 16}, (9,)),
    ],
)
def test_sources_are_the_workers_that_hold_our_heads_one_of_each_copy(
    mine: dict[str, Any], theirs: dict[str, Any], sources: tuple[int, ...]
) -> None:
    ours, _ = numbered(**mine)
    others, _ = numbered(**theirs)
    (blocks,) = match_caches(
        ours, describe_caches(ours, whole(**mine)), describe_caches(others, whole(**theirs))
    )
    assert blocks.mapping.sources == sources
    same_heads = min(4, mine.get("tp_size", 1)) == min(4, theirs["tp_size"])
    assert blocks.mapping.is_direct == same_heads


def matched(ours: CanonicalKVCaches, theirs: CanonicalKVCaches) -> PeerBlocks:
    described = describe_caches(theirs, whole())
    (blocks,) = match_caches(ours, describe_caches(ours, whole()), described)
    return blocks


@examples(30)
@given(data=st.data())
def test_only_pages_that_are_wanted_and_there_are_written(data: st.DataObject) -> None:
    mine, their_tokens = data.draw(st.permutations([16, 32, 48]))[:2]
    layout = data.draw(st.sampled_from(LAYOUTS))
    ours, memory = numbered(mine, layout=layout)
    theirs, their_memory = numbered(their_tokens)
    blocks = matched(ours, theirs)
    page = blocks.mapping.tokens_per_page
    their_ids = data.draw(st.permutations(range(9)))
    there = data.draw(st.lists(st.integers(0, 8), unique=True))
    block_ids = data.draw(st.permutations(range(1, 9)))[: data.draw(st.integers(0, 8))]
    nulls = data.draw(st.sets(st.integers(0, 8)))
    block_ids = [0 if index in nulls else each for index, each in enumerate(block_ids)]
    first_page = data.draw(st.integers(0, 30))
    stop_page = data.draw(st.none() | st.integers(0, 30))
    expected, reference = by_token(memory, layout), by_token(their_memory, NHD)
    for index, block_id in enumerate(block_ids):
        for token in range(mine):
            place = index * mine + token
            is_there = place // their_tokens in there and block_id
            last = 10**9 if stop_page is None else stop_page
            if is_there and first_page <= place // page < last:
                source = their_ids[place // their_tokens]
                expected[block_id, token] = reference[source, place % their_tokens]
    wanted: dict[str, Any] = {"first_page": first_page, "stop_page": stop_page}
    rows, places = blocks.describe_in_place(0, there, block_ids, **wanted)
    whole_blocks = [there[row] for row in rows]
    if whole_blocks:
        their_blocks = [their_ids[index] for index in whole_blocks]
        COPIES.copy(BlockDescriber(theirs).describe(0, their_blocks), places)
    there = [index for index in there if index not in whole_blocks]
    _, addresses = staged = stage(theirs, 0, [their_ids[index] for index in there])
    COPIES.copy(*blocks.describe(0, there, addresses, block_ids, **wanted))
    del staged
    np.testing.assert_array_equal(by_token(memory, layout), expected)


def by_token(layers: torch.Tensor, layout: str) -> NDArray[np.int32]:
    """Copy all memory out as `(block, token, layer, part, head, dim)`."""
    axes = ["layer", *layout.split()]
    order = [axes.index(axis) for axis in ("block", "token", "layer", "kv", "head", "dim")]
    return layers.permute(order).numpy().copy()


DESCRIBED = describe_caches(numbered()[0], whole())
STATES = GroupDescription(
    tokens_per_block=32, payload_size_bytes=96, opaque="vLLM 0.32", has_states=True
)


def altered(**fields: Any) -> CacheDescription:
    (group,) = DESCRIBED.groups
    return msgspec.structs.replace(DESCRIBED, groups=(msgspec.structs.replace(group, **fields),))


def boxes_with(**fields: Any) -> CacheDescription:
    first, *rest = DESCRIBED.groups[0].boxes
    return altered(boxes=(replace(first, **fields), *rest))


REFUSED = {
    "groups": (msgspec.structs.replace(DESCRIBED, groups=DESCRIBED.groups * 2), (1, 2)),
    "num_kv_heads": (msgspec.structs.replace(DESCRIBED, shard=whole(num_kv_heads=8)), (4, 8)),
    "dcp_size": (msgspec.structs.replace(DESCRIBED, shard=whole(tp_size=8, dcp_size=2)), (1, 8)),
    "has_states": (msgspec.structs.replace(DESCRIBED, groups=(STATES,)), (False, True)),
    "opaque": (altered(boxes=(), opaque="vLLM 0.31"), ("", "vLLM 0.31")),
    "tensors": (boxes_with(layer_name="layers.7"), ("layers.0.k", "layers.7.k")),
    "encoding of layers.0.k": (boxes_with(encoding="fp8"), ("", "fp8")),
    "dtype of layers.0.k": (boxes_with(dtype=torch.float32), (torch.int32, torch.float32)),
}


@pytest.mark.parametrize("field", REFUSED)
def test_engines_that_differ_are_refused_by_field_and_both_values(field: str) -> None:
    theirs, (ours, other) = REFUSED[field]
    with pytest.raises(CacheMismatchError) as caught:
        match_caches(numbered()[0], DESCRIBED, theirs)
    assert caught.value.field == {"dcp_size": "tp_size"}.get(field, field)
    assert caught.value.group == (None if field == "groups" else 0)
    assert (caught.value.ours, caught.value.theirs) == (ours, other)
    assert str(caught.value.theirs) in str(caught.value)


def test_blocks_that_lack_elements_are_refused() -> None:
    first = DESCRIBED.groups[0].boxes[0]
    changes: list[tuple[str, dict[str, Any]]] = [
        ("dim", {"size": 2}),
        ("token", {"size": 16}),
        ("head", {"size": 2}),
        ("token", {"stride_bytes": 0}),
        ("dim", {"step": 2}),
    ]
    for axis, fields in changes:
        digits = (replace(d, **fields) if d.axis == axis else d for d in first.digits)
        with pytest.raises(CacheMismatchError):
            match_caches(numbered()[0], DESCRIBED, boxes_with(digits=tuple(digits)))


def test_blocks_that_would_take_long_to_map_are_refused() -> None:
    ours, _ = numbered()
    with pytest.raises(CacheMismatchError) as caught:
        match_caches(ours, DESCRIBED, altered(tokens_per_block=2**40 - 1))
    assert (caught.value.field, caught.value.theirs) == ("tokens_per_block", 2**40 - 1)
    spec = FullAttentionSpec(
        tokens_per_block=1 << 12, num_kv_heads=1, head_dim=1 << 11, dtype=torch.int8
    )
    config = KVCacheConfig(1, (KVCacheGroup(spec, ("layers.0",)),))
    cache = torch.empty(1, 2, 1 << 12, 1, 1 << 11, dtype=torch.int8)
    large = canonicalize({"layers.0": cache}, config, layouts={"layers.0": NHD})
    mine = describe_caches(large, WorkerShard(num_kv_heads=1))
    (group,) = mine.groups
    strides = {"dim": 2, "token": 1 << 12}  # no two elements are neighbours
    boxes = []
    for box in group.boxes:
        digits = [replace(d, stride_bytes=strides.get(d.axis, d.stride_bytes)) for d in box.digits]
        boxes.append(replace(box, digits=tuple(digits)))
    scattered = msgspec.structs.replace(group, boxes=tuple(boxes), payload_size_bytes=1 << 26)
    with pytest.raises(CacheMismatchError, match="fragments"):
        match_caches(large, mine, msgspec.structs.replace(mine, groups=(scattered,)))


def opaque_caches() -> CanonicalKVCaches:
    tensor = CanonicalKVCacheTensor(torch.zeros(3, 96, dtype=torch.int8), 96)
    of_layer = MambaSpec(tokens_per_block=32, shapes=((12, 4),), dtypes=(torch.float16,))
    spec = UniformTypeKVCacheSpecs(tokens_per_block=32, layer_specs={"layers.0": of_layer})
    return CanonicalKVCaches((tensor,), ((CanonicalKVCacheRef(0, 96, ("layers.0",)),),), (spec,))


@pytest.mark.parametrize(
    ("field", "theirs", "shard"),
    [
        ("opaque", {"opaque": "vLLM 0.31"}, {}),
        ("payload_size_bytes", {"payload_size_bytes": 98}, {}),
        ("tp_size", {}, {"tp_size": 2}),
        ("num_kv_heads", {}, {"num_kv_heads": 2}),
    ],
)
def test_opaque_blocks_are_read_only_from_equal_workers(
    field: str, theirs: dict[str, Any], shard: dict[str, int]
) -> None:
    caches = opaque_caches()
    mine = describe_caches(caches, whole(), opaque="vLLM 0.32")
    assert mine.groups == (STATES,)
    (blocks,) = match_caches(caches, mine, mine)
    assert (blocks.mapping.is_direct, blocks.mapping.sources) == (True, (0,))
    other = CacheDescription(
        shard=whole(**shard), groups=(msgspec.structs.replace(STATES, **theirs),)
    )
    with pytest.raises(CacheMismatchError) as caught:
        match_caches(caches, mine, other)
    assert caught.value.field == field
    with pytest.raises(PageMappingError):
        describe_caches(caches, whole())


def test_states_are_read_from_the_same_rank_whatever_their_tokens_are() -> None:
    spec = MambaSpec(tokens_per_block=64, shapes=((4, 3),), dtypes=(torch.float16,))
    config = KVCacheConfig(4, (KVCacheGroup(spec, ("layers.0",)),))
    caches = canonicalize({"layers.0": [torch.zeros(4, 4, 3, dtype=torch.float16)]}, config)
    mine = describe_caches(caches, whole(tp_size=2, rank=1))
    (group,) = mine.groups
    longer = msgspec.structs.replace(group, tokens_per_block=4096)
    theirs = msgspec.structs.replace(mine.at_rank(0), groups=(longer,))
    (blocks,) = match_caches(caches, mine, theirs)
    assert (blocks.mapping.is_direct, blocks.mapping.sources) == (True, (1,))
    apart = replace(group.boxes[0], offset_bytes=8)
    moved = msgspec.structs.replace(group, boxes=(apart,), payload_size_bytes=32)
    theirs = msgspec.structs.replace(mine.at_rank(0), groups=(moved,))
    (blocks,) = match_caches(caches, mine, theirs)
    source, destination = blocks.describe(1, [0], [4096], [2])
    assert (blocks.mapping.is_direct, source.addresses.tolist()) == (False, [4104])
    assert destination.addresses.tolist() == [caches.tensors[0].tensor.data_ptr() + 48]


CACHES = numbered()[0]
ENCODED = DESCRIBED.encode()


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.uint8]
)
def test_a_description_arrives_as_it_was(dtype: torch.dtype) -> None:
    box = PageBox(
        layer_name="layers.0.attn",
        part="latent",
        dtype=dtype,
        digits=(Digit("token", 4, 32), Digit("dim", 8, 4, 1)),
        offset_bytes=4,
        first=(("token", 3),),
        encoding="packed",
    )
    known = GroupDescription(tokens_per_block=4, payload_size_bytes=140, boxes=(box,))
    unknown = GroupDescription(
        tokens_per_block=9, payload_size_bytes=7, opaque="vLLM 0.32", has_states=True
    )
    shard = WorkerShard(num_kv_heads=4, rank=3, tp_size=4, pcp_size=2, interleave_tokens=8)
    told = CacheDescription(shard=shard, groups=(known, unknown))
    assert CacheDescription.decode(told.encode()) == told
    long = GroupDescription(tokens_per_block=1, payload_size_bytes=1, opaque="x" * (1 << 20))
    with pytest.raises(InvalidArgumentError, match="description"):
        CacheDescription(shard=whole(), groups=(long,)).encode()
    assert told.at_rank(7).shard.rank == 7
    assert told.at_rank(7).groups == told.groups


def plain() -> dict[str, Any]:
    value: dict[str, Any] = msgspec.msgpack.decode(ENCODED)
    return value


ODD: list[Any] = [-1, 0, 2**40, 2**63 - 1, 2**63, 2**64 - 1, 1.5, None, "k", [], {}, True]


@examples(300)
@given(data=st.data())
def test_any_value_in_a_description_is_read_or_refused(data: st.DataObject) -> None:
    message = plain()
    node: Any = message
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        key = data.draw(st.sampled_from(keys))
        if not isinstance(node[key], (dict, list)) or not node[key] or data.draw(st.booleans()):
            break
        node = node[key]
    if isinstance(node, dict) and data.draw(st.booleans()):
        node[data.draw(st.sampled_from(["other", "size", "first"]))] = node.pop(key)
    else:
        node[key] = data.draw(st.sampled_from(ODD) | st.integers(0, 70))
    read_or_refuse(msgspec.msgpack.encode(message))


@examples(300)
@given(data=st.data())
def test_any_bytes_are_read_or_refused(data: st.DataObject) -> None:
    encoded = bytearray(ENCODED)
    for _ in range(data.draw(st.integers(1, 4))):
        encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    read_or_refuse(bytes(encoded[: data.draw(st.integers(0, len(encoded)))]))


def read_or_refuse(encoded: bytes) -> None:
    """Decode and match; if that succeeds, all reads must be within the staged bytes."""
    try:
        theirs = CacheDescription.decode(encoded)
        matched = match_caches(CACHES, DESCRIBED, theirs)
    except KVXferError as exc:
        assert str(exc).isprintable()  # noqa: PT017 - any may come, or none
        return
    for blocks, group in zip(matched, theirs.groups, strict=True):
        for rank in blocks.mapping.sources:
            index = 0
            source, destination = blocks.describe(rank, [index], [1 << 20], [1, 2])
            ends = source.addresses + source.lengths
            assert not len(source) or source.addresses.min() >= 1 << 20
            assert not len(source) or ends.max() <= (1 << 20) + group.payload_size_bytes
            assert (
                source.num_bytes
                == destination.num_bytes
                <= 2 * DESCRIBED.groups[0].payload_size_bytes
            )


def test_a_name_with_control_characters_is_refused_without_them() -> None:
    message = plain()
    message["groups"][0]["boxes"][1]["digits"][0]["axis"] = "\x1b[2J"
    read_or_refuse(msgspec.msgpack.encode(message))


@pytest.mark.parametrize(
    "encoded",
    [
        msgspec.msgpack.encode({**plain(), "type": "kvxfer-caches-2"}),
        b"\x91" * 100_000,
        bytes(2 << 20),
    ],
    ids=["another version", "deep", "long"],
)
def test_what_is_no_description_is_refused(encoded: bytes) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        CacheDescription.decode(encoded)
    assert caught.value.argument == "description"


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ([], "more"),
        (["shard"], "shard.more"),
        (["groups", 0], "groups[0].more"),
        (["groups", 0, "boxes", 1], "groups[0].boxes[1].more"),
        (["groups", 0, "boxes", 1, "digits", 0], "groups[0].boxes[1].digits[0].more"),
    ],
)
def test_a_field_of_another_release_is_refused_by_its_name(
    path: list[str | int], field: str
) -> None:
    message = node = plain()
    for step in path:
        node = node[step]  # type: ignore[index] # a list has numbers
    node["more"] = {"than": ["before"]}
    with pytest.raises(CacheMismatchError) as caught:
        CacheDescription.decode(msgspec.msgpack.encode(message))
    assert (caught.value.field, caught.value.ours) == (field, "no such field")
    assert "before" in str(caught.value.theirs)


def box(**fields: Any) -> PageBox:
    options: dict[str, Any] = {"layer_name": "layers.0", "part": "k", "dtype": torch.int16}
    return PageBox(**{**options, "digits": (Digit("token", 4, 2),), **fields})


@pytest.mark.parametrize(
    ("fields", "argument"),
    [
        ({"boxes": (box(offset_bytes=1),)}, "boxes[0]"),
        ({"boxes": (box(digits=(Digit("dim", 4, -2),)),)}, "boxes[0].dim.stride_bytes"),
        ({"boxes": (box(digits=(Digit("dim", 4, 2, 0),)),)}, "boxes[0].dim.step"),
        ({"boxes": (box(first=(("token", -1),)),)}, "boxes[0].first['token']"),
        ({"boxes": (box(part="k" * 1000),)}, "boxes[0]"),
        ({"boxes": (box(),), "opaque": "vLLM"}, "opaque"),
        ({"boxes": (box(),), "has_states": True}, "has_states"),
        ({"payload_size_bytes": 1 << 50}, "payload_size_bytes"),
    ],
)
def test_boxes_are_within_the_block(fields: dict[str, Any], argument: str) -> None:
    good: dict[str, Any] = {"tokens_per_block": 4, "payload_size_bytes": 8, "boxes": (box(),)}
    GroupDescription(**good)
    with pytest.raises(InvalidArgumentError) as caught:
        GroupDescription(**{**good, **fields})
    assert caught.value.argument == argument
