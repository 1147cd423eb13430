"""Cache descriptions: what another engine is told of our blocks, whatever arrives of it."""

from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.errors import CacheMismatchError, InvalidArgumentError, KVXferError
from kvxfer.kvcache.canonical import CanonicalKVCaches, canonicalize
from kvxfer.kvcache.config import KVCacheConfig, KVCacheGroup
from kvxfer.kvcache.page_box import Digit, PageBox
from kvxfer.kvcache.portable import (
    CacheDescription,
    GroupDescription,
    WorkerShard,
    describe_caches,
    match_caches,
)
from kvxfer.kvcache.spec import FullAttentionSpec
from tests.examples import examples

SHARD = WorkerShard(num_kv_heads=2)


def small_caches() -> CanonicalKVCaches:
    spec = FullAttentionSpec(tokens_per_block=4, num_kv_heads=2, head_dim=2, dtype=torch.bfloat16)
    config = KVCacheConfig(3, (KVCacheGroup(spec, ("layers.0",)),))
    cache = torch.zeros(3, 2, 4, 2, 2, dtype=torch.bfloat16)
    return canonicalize(
        {"layers.0": cache}, config, layouts={"layers.0": "block kv token head dim"}
    )


CACHES = small_caches()
DESCRIBED = describe_caches(CACHES, SHARD)
assert [box.part for box in DESCRIBED.groups[0].boxes] == ["k", "v"]
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
        CacheDescription(shard=SHARD, groups=(long,)).encode()
    assert told.at_rank(7).shard.rank == 7
    assert told.at_rank(7).groups == told.groups


def plain() -> dict[str, Any]:
    """Return the message as plain values."""
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
    """Decode and match; where that succeeds, all bytes that would be read are staged ones."""
    try:
        theirs = CacheDescription.decode(encoded)
        matched = match_caches(CACHES, DESCRIBED, [theirs])
    except KVXferError:
        return
    for blocks, group in zip(matched, theirs.groups, strict=True):
        for rank in blocks.sources:
            index = 0
            source, destination = blocks.describe(rank, [index], [1 << 20], [1, 2])
            ends = source.addresses + source.lengths
            assert not len(source) or source.addresses.min() >= 1 << 20
            assert not len(source) or ends.max() <= (1 << 20) + group.payload_size_bytes
            assert source.num_bytes == destination.num_bytes <= 2 * 64


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
