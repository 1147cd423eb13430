"""Placement: even, the same for all processes, and changed only for keys of peers that leave."""

import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvxfer import BlockKey, make_block_key
from kvxfer.backends.nixl import Endpoint, rank

ENDPOINTS = st.lists(
    st.builds(
        Endpoint, st.sampled_from(["10.0.0.1", "::1", "node-1", "node-2"]), st.integers(1, 99)
    ),
    min_size=1,
    max_size=8,
    unique=True,
)
KEYS = st.lists(st.binary(min_size=5, max_size=40).map(BlockKey), min_size=1, unique=True)
REPLICAS = st.integers(1, 4)


def some_keys(num: int) -> list[BlockKey]:
    return [make_block_key(index.to_bytes(32, "big"), 0) for index in range(num)]


def holders(keys: list[BlockKey], endpoints: list[Endpoint], replicas: int) -> list[list[Endpoint]]:
    return [[endpoints[peer] for peer in column] for column in rank(keys, endpoints, replicas).T]


@given(KEYS, ENDPOINTS, REPLICAS, st.data())
def test_when_a_peer_leaves_only_its_keys_move_and_each_to_one_new_peer(
    keys: list[BlockKey], endpoints: list[Endpoint], replicas: int, data: st.DataObject
) -> None:
    gone = data.draw(st.sampled_from(endpoints))
    rest = [endpoint for endpoint in endpoints if endpoint != gone]
    if not rest:
        return
    for before, after in zip(
        holders(keys, endpoints, replicas), holders(keys, rest, replicas), strict=True
    ):
        stayed = [peer for peer in before if peer != gone]
        assert after[: len(stayed)] == stayed


def weight(endpoint: Endpoint, key: BlockKey) -> int:
    value = xxhash.xxh3_64_intdigest(str(endpoint).encode()) ^ xxhash.xxh3_64_intdigest(key)
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ value >> 27) * 0x94D049BB133111EB % 2**64
    return value ^ value >> 31


def test_the_placement_is_that_of_the_protocol() -> None:
    endpoints = [Endpoint("10.0.0.1", 7000), Endpoint("::1", 7001), Endpoint("node-3", 7002)]
    keys = some_keys(100)
    expected = [
        sorted(endpoints, key=lambda endpoint: weight(endpoint, key), reverse=True)[:2]
        for key in keys
    ]
    assert holders(keys, endpoints, 2) == expected
    assert rank(keys[:8], endpoints, 2).tolist() == [
        [2, 2, 2, 1, 0, 2, 1, 1],
        [0, 0, 0, 2, 2, 0, 0, 2],
    ]
