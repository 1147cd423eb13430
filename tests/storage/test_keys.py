"""Block keys, and namespaces that differ in anything that changes the bytes."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.errors import InvalidArgumentError, NamespaceMismatchError
from kvxfer.storage.keys import GroupIdentity, Namespace, StoredTensor, group_of, make_block_key

NAMESPACE = Namespace(
    model="llama",
    revision="main",
    dtype="bfloat16",
    groups=(
        GroupIdentity(
            page_sizes_bytes=(64, 64), layer_names=("a", "b"), layouts=("kv", "kv"), spec="full"
        ),
    ),
    parallel={"tp_size": 2, "cp_size": 1},
)
[GROUP] = NAMESPACE.groups

OTHER_VALUES: dict[str, Any] = {
    "model": "mistral",
    "revision": "v2",
    "dtype": "float16",
    "quantization": "fp8",
    "config_hash": "rope-10000",
    "layout": "HND",
    "groups": (GROUP, GROUP),
    "blocks_per_chunk": 2,
    "parallel": {"tp_size": 4, "cp_size": 1},
    "instruction_set": "amx",
}
OTHER_GROUP_VALUES: dict[str, Any] = {
    "page_sizes_bytes": (64, 32),
    "layer_names": ("a", "c"),
    "layouts": ("kv", "vk"),
    "spec": "sliding",
    "tensors": (StoredTensor(name="k", dtype="BF16", shape=(2, 32)),),
}


@given(st.binary(min_size=1, max_size=40), st.integers(0, 2**32 - 1))
def test_a_key_is_the_hash_and_the_group_in_4_bytes_big_endian(
    content_hash: bytes, group: int
) -> None:
    key = make_block_key(content_hash, group)
    assert key == content_hash + group.to_bytes(4, "big")
    assert group_of(key) == group


def test_what_is_no_hash_or_no_key_is_told_what_makes_one() -> None:
    with pytest.raises(InvalidArgumentError, match="content_hash is 'abc'; expected bytes"):
        make_block_key("abc")  # type: ignore[arg-type]
    with pytest.raises(
        InvalidArgumentError, match="key is 'abc'; expected a key of make_block_key"
    ):
        group_of("abc")  # type: ignore[arg-type]


def test_the_tables_of_other_values_cover_every_field() -> None:
    assert set(OTHER_VALUES) == set(Namespace.__struct_fields__)
    assert set(OTHER_GROUP_VALUES) == set(GroupIdentity.__struct_fields__)


def changed(field: str) -> Namespace:
    """Make the namespace with another value of a field, of its own or of its group."""
    if field in OTHER_VALUES:
        return msgspec.structs.replace(NAMESPACE, **{field: OTHER_VALUES[field]})
    group = msgspec.structs.replace(GROUP, **{field: OTHER_GROUP_VALUES[field]})
    return msgspec.structs.replace(NAMESPACE, groups=(group,))


@pytest.mark.parametrize("field", [*OTHER_VALUES, *OTHER_GROUP_VALUES])
def test_one_different_field_gives_another_fingerprint_and_is_named(field: str) -> None:
    theirs = changed(field)
    assert theirs.fingerprint != NAMESPACE.fingerprint
    with pytest.raises(NamespaceMismatchError) as caught:
        NAMESPACE.require_same(theirs)
    named = field if field in OTHER_VALUES else f"groups[0].{field}"
    assert caught.value.field.startswith(named)
    assert repr(caught.value.ours) in str(caught.value)
    assert repr(caught.value.theirs) in str(caught.value)


def test_a_namespace_survives_json_and_another_order_of_its_fields() -> None:
    copy = msgspec.json.decode(msgspec.json.encode(NAMESPACE), type=Namespace)
    assert copy == NAMESPACE
    other_order = msgspec.structs.replace(NAMESPACE, parallel={"cp_size": 1, "tp_size": 2})
    assert copy.fingerprint == other_order.fingerprint == NAMESPACE.fingerprint


def tensor(**changes: Any) -> StoredTensor:
    return StoredTensor(**({"name": "layers.0.k", "dtype": "BF16", "shape": (2, 4, 8)} | changes))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", ""),
        ("name", "__metadata__"),
        ("dtype", "bfloat16"),
        ("shape", (2, 0)),
        ("shape", (-2, -4)),
        ("shape", (1,) * 65),
    ],
)
def test_a_tensor_that_no_file_can_hold_is_refused(field: str, value: Any) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        tensor(**{field: value})
    assert (caught.value.argument, caught.value.value) == (field, value)


def test_two_tensors_of_a_group_with_one_name_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"tensors is 'layers\.0\.k'"):
        msgspec.structs.replace(GROUP, tensors=(tensor(), tensor(dtype="F32")))


def test_tensors_that_are_not_a_whole_chunk_are_refused_with_the_group_and_both_sizes() -> None:
    assert tensor(dtype="U8").num_bytes * 4 == tensor(dtype="F32").num_bytes == 256
    listed = msgspec.structs.replace(GROUP, tensors=(tensor(),))
    fitting = msgspec.structs.replace(NAMESPACE, groups=(GROUP, listed))
    assert fitting.chunk_size_bytes(1) == 128
    with pytest.raises(
        InvalidArgumentError, match=r"^groups\[1\]\.tensors is 128; expected 256 bytes"
    ):
        msgspec.structs.replace(fitting, blocks_per_chunk=2)


def test_chunks_of_more_bytes_than_64_bits_count_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"^bytes of groups\[0\] is 9"):
        Namespace(model="model", groups=(GroupIdentity(page_sizes_bytes=(2**62, 2**62)),))


def test_a_group_without_tensors_keeps_the_fingerprint_it_had_before_there_were_any() -> None:
    assert NAMESPACE.fingerprint == "08f90c7e96ed638bbad2d44ced3ef628"
    assert "tensors" not in NAMESPACE.fields()["groups"][0]
