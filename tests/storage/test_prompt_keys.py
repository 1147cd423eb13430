"""Content keys: equal if and only if scope, prefix, place and group are equal."""

import hashlib

from hypothesis import given
from hypothesis import strategies as st

from kvxfer.storage import BlockKey, PromptKeys, make_block_key
from tests.examples import examples

TOKENS = list(range(1, 11))
KNOWN_BLOCKS = [
    "44599ce186d755b9da80e0cd6d40472e00000002",
    "4920386c191b88a607476149ac67dc5b00000002",
    "2e6b0f61cb212a07a690436b8539fea700000002",
]
KNOWN_STATE = "9d035f81e0fd7374380cab4e4fa89c7b00000001"
INT64 = st.integers(-(2**63), 2**63 - 1)
PROMPTS = st.lists(st.integers(0, 1), max_size=6)
SCOPES = st.sampled_from([b"", b"\0", bytes(8), (1).to_bytes(8, "little")])


def slow_key(
    scope: bytes, tokens: list[int], start: int, group: int, kind: bytes = b"block   "
) -> BlockKey:
    """Compute the key of a block that ends with `tokens`, all at once."""
    data = len(scope).to_bytes(8, "little") + scope
    data += b"".join(token.to_bytes(8, "little", signed=True) for token in tokens)
    data += kind + start.to_bytes(8, "little")
    digest = hashlib.blake2b(data, digest_size=16, person=b"kvxfer prompt v1").digest()
    return make_block_key(digest, group)


def test_keys_are_what_they_were_in_earlier_releases() -> None:
    keys = PromptKeys(TOKENS, scope=b"tenant")
    assert [key.hex() for key in keys.block_keys(2, 4, 10)] == KNOWN_BLOCKS
    assert keys.state_key(1, 9).hex() == KNOWN_STATE


@examples(100)
@given(
    tokens=st.lists(INT64, max_size=40),
    scope=st.binary(max_size=12),
    size=st.integers(1, 9),
    group=st.integers(0, 3),
    data=st.data(),
)
def test_every_block_has_the_key_of_its_prefix_in_any_order_of_questions(
    tokens: list[int], scope: bytes, size: int, group: int, data: st.DataObject
) -> None:
    keys = PromptKeys(tokens, scope=scope)
    for _ in range(3):
        stop = data.draw(st.integers(0, len(tokens)))
        first = data.draw(st.integers(0, stop))
        blocks = [] if first == stop else range(first // size, (stop - 1) // size + 1)
        expected = [
            slow_key(scope, tokens[: min(block * size + size, stop)], block * size, group)
            for block in blocks
        ]
        assert keys.block_keys(group, size, stop, first_token=first) == expected
        state = slow_key(scope, tokens[:stop], 0, group, b"state   ")
        assert keys.state_key(group, stop) == state


@examples(200)
@given(
    ours=PROMPTS,
    theirs=PROMPTS,
    scopes=st.tuples(SCOPES, SCOPES),
    groups=st.tuples(st.integers(0, 1), st.integers(0, 1)),
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 3)),
)
def test_keys_are_equal_only_where_all_that_they_name_is(
    ours: list[int],
    theirs: list[int],
    scopes: tuple[bytes, bytes],
    groups: tuple[int, int],
    sizes: tuple[int, int],
) -> None:
    named = []
    for tokens, scope, group, size in zip((ours, theirs), scopes, groups, sizes, strict=True):
        keys = PromptKeys(tokens, scope=scope)
        places = [*range(0, len(tokens), size)]
        for start, key in zip(places, keys.block_keys(group, size, len(tokens)), strict=True):
            prefix = tuple(tokens[: start + size])
            named.append((key, ("block", scope, prefix, start, group)))
        for stop in range(len(tokens) + 1):
            name = ("state", scope, tuple(tokens[:stop]), 0, group)
            named += [(keys.state_key(group, stop), name)]
    for key, name in named:
        for other, other_name in named:
            assert (key == other) == (name == other_name)
