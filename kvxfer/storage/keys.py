"""Keys of blocks, made of a content hash and a group, and the namespaces they are unique in."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NewType

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from kvxfer.checks import (
    INT64_MAX,
    find_repeated,
    require_instance,
    require_instances,
    require_integer,
    require_positive,
    require_sequence,
    require_text,
    require_texts,
)
from kvxfer.errors import InvalidArgumentError, NamespaceMismatchError, UnknownGroupError

GROUP_INDEX_BYTES = 4
"""Bytes of the group index at the end of a key, as in vLLM's chunk keys."""

KEY_FORM = "a key of make_block_key: a content hash and a 4-byte group index"

MAX_AXES = 64
"""Maximum number of axes of a tensor, as in torch and numpy."""

_BYTES_OF_DTYPES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
"""safetensors' data types of whole bytes.

Source: https://github.com/huggingface/safetensors, `Dtype` in `safetensors/src/tensor.rs`.
"""

BlockKey = NewType("BlockKey", bytes)
"""A content hash followed by the group index, 4 bytes big-endian.

The same bytes as vLLM's `OffloadKey`, so its keys need no conversion.
Source: `vllm/v1/kv_offload/base.py`, `make_offload_key`.
"""


def make_block_key(content_hash: bytes, group: int = 0) -> BlockKey:
    """Make the key of the block with `content_hash` of KV-cache group `group`.

    Raises:
        InvalidArgumentError: The hash is empty or the group is not a 32-bit unsigned number.
    """
    if not isinstance(content_hash, bytes) or not content_hash:  # type: ignore[redundant-expr]
        raise InvalidArgumentError("content_hash", content_hash, "bytes, at least one")
    group = require_integer(
        "group", group, maximum=(1 << 8 * GROUP_INDEX_BYTES) - 1, expected="0 <= group < 2**32"
    )
    return BlockKey(content_hash + group.to_bytes(GROUP_INDEX_BYTES, "big"))


def group_of(key: BlockKey) -> int:
    """Read the group index out of a key.

    Raises:
        InvalidArgumentError: The key is not bytes or is too short to be a key.
    """
    if not isinstance(key, bytes) or len(key) <= GROUP_INDEX_BYTES:  # type: ignore[redundant-expr]
        raise InvalidArgumentError("key", key, KEY_FORM)
    return int.from_bytes(key[-GROUP_INDEX_BYTES:], "big")


def groups_of(keys: Sequence[BlockKey]) -> NDArray[np.int64]:
    """Read the group index out of each of many keys, `(len(keys),)`.

    Raises:
        InvalidArgumentError: A key is not bytes or is too short to be a key.
    """
    require_keys(keys)
    indices = b"".join([key[-GROUP_INDEX_BYTES:] for key in keys])
    return np.frombuffer(indices, f">u{GROUP_INDEX_BYTES}").astype(np.int64)


def require_keys(keys: Iterable[BlockKey]) -> None:
    """Check that every element is a block key.

    Raises:
        InvalidArgumentError: A key is not bytes or is too short.
    """
    for index, key in enumerate(keys):
        if not isinstance(key, bytes) or len(key) <= GROUP_INDEX_BYTES:  # type: ignore[redundant-expr]
            raise InvalidArgumentError(f"keys[{index}]", key, KEY_FORM)


class StoredTensor(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tensor within the bytes stored under a key, row-major and without gaps.

    Attributes:
        name: Name in a file, e.g. `layers.3.k`.
        dtype: Data type as safetensors names it, e.g. `BF16`, `F32`, `U8`, `F8_E4M3`.
        shape: E.g. `(heads, tokens, dim)`.

    Raises:
        InvalidArgumentError: The name is empty or reserved by safetensors, the data type is not
            known, an axis has no elements, or there are too many axes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        _set(self, "name", require_text("name", self.name))
        _set(self, "dtype", require_text("dtype", self.dtype))
        require_sequence("shape", self.shape, "the size of each axis")
        if self.name in ("", "__metadata__"):
            raise InvalidArgumentError("name", self.name, "the name of a tensor")
        if self.dtype not in _BYTES_OF_DTYPES:
            raise InvalidArgumentError("dtype", self.dtype, f"one of {', '.join(_BYTES_OF_DTYPES)}")
        wanted = f"at most {MAX_AXES} axes, at least 1 along each"
        if len(self.shape) > MAX_AXES:
            raise InvalidArgumentError("shape", self.shape, wanted)
        try:
            shape = tuple(require_positive("shape", length) for length in self.shape)
        except InvalidArgumentError as exc:
            raise InvalidArgumentError("shape", self.shape, wanted) from exc
        _set(self, "shape", shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * _BYTES_OF_DTYPES[self.dtype]


class GroupIdentity(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Identity of one KV-cache group: every property that changes the bytes of its blocks.

    Attributes:
        page_sizes_bytes: Un-padded page size of each ref, in payload order.
        layer_names: Layers of the group, in payload order.
        layouts: Layout of each ref's pages.
        spec: The group's spec as text: tokens per block, heads, dimensions, data type.
        tensors: Tensors of a chunk, in payload order, that make up exactly its bytes; empty if
            pages are opaque bytes.

    Raises:
        InvalidArgumentError: Two tensors have the same name.
    """

    page_sizes_bytes: tuple[int, ...]
    layer_names: tuple[str, ...] = ()
    layouts: tuple[str, ...] = ()
    spec: str = ""
    tensors: tuple[StoredTensor, ...] = ()

    def __post_init__(self) -> None:
        require_sequence("page_sizes_bytes", self.page_sizes_bytes, "the size of each page")
        sizes = enumerate(self.page_sizes_bytes)
        sizes_bytes = tuple(require_integer(f"page_sizes_bytes[{n}]", size) for n, size in sizes)
        _set(self, "page_sizes_bytes", sizes_bytes)
        for name in ("layer_names", "layouts"):
            _set(self, name, require_texts(name, getattr(self, name)))
        _set(self, "spec", require_text("spec", self.spec))
        require_instances("tensors", self.tensors, StoredTensor)
        _set(self, "tensors", tuple(self.tensors))
        twice = find_repeated(tensor.name for tensor in self.tensors)
        if twice is not None:
            raise InvalidArgumentError("tensors", twice, "each name once in a group")

    @property
    def block_size_bytes(self) -> int:
        """Bytes of one block of this group on this worker."""
        return sum(self.page_sizes_bytes)


class Difference(NamedTuple):
    """Field in which two namespaces differ, such as `groups[0].spec`, with both values."""

    field: str
    ours: Any
    theirs: Any


class Namespace(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Identity of stored blocks: every property that changes the bytes stored under a key.

    Blocks are shared only between workers whose namespaces are equal in every field: one
    difference gives another fingerprint, and the blocks of one are invisible to the other.

    Attributes:
        model: Model identifier, e.g. a repository name or path.
        revision: Revision of the weights, such as a commit or a hash of their files. `connect`
            requires one if blocks outlive the process, or are shared.
        dtype: Data type of the cached values.
        quantization: Quantization of the cache; empty if there is none.
        config_hash: Hash of everything in the model's configuration that changes keys or
            values at equal tokens: RoPE parameters, sliding windows, adapters.
        groups: One identity per KV-cache group.
        layout: Name that the engine gives the layout of its caches, if any. Page mappings bridge
            differences in this and the following fields: see `portable_namespace`.
        blocks_per_chunk: Engine blocks stored under one key.
        parallel: Parallel mapping, e.g. `{"tp_size": 2}`.
        instruction_set: Instruction set that the CPU attention kernels pack keys for;
            empty on devices whose bytes do not depend on it.

    Raises:
        InvalidArgumentError: A field has the wrong type, a chunk has 2**63 bytes or more, or the
            tensors of a group do not make up exactly the bytes of its chunk.
    """

    model: str
    revision: str = ""
    dtype: str = ""
    quantization: str = ""
    config_hash: str = ""
    layout: str = ""
    groups: tuple[GroupIdentity, ...] = ()
    blocks_per_chunk: int = 1
    parallel: dict[str, int] = {}
    instruction_set: str = ""

    def __post_init__(self) -> None:
        for name in _TEXTS:
            _set(self, name, require_text(name, getattr(self, name)))
        require_instances("groups", self.groups, GroupIdentity)
        _set(self, "groups", tuple(self.groups))
        _set(self, "blocks_per_chunk", require_positive("blocks_per_chunk", self.blocks_per_chunk))
        require_instance("parallel", self.parallel, Mapping)
        parallel = {
            require_text("parallel", name): require_integer(f"parallel[{name!r}]", size)
            for name, size in self.parallel.items()
        }
        _set(self, "parallel", parallel)
        for index, group in enumerate(self.groups):
            stored, wanted = self.chunk_size_bytes(index), "fewer than 2**63 in a chunk"
            require_integer(f"bytes of groups[{index}]", stored, expected=wanted)
            listed = sum(tensor.num_bytes for tensor in group.tensors)
            if group.tensors and listed != stored:
                raise InvalidArgumentError(
                    f"groups[{index}].tensors", listed, f"{stored} bytes, the size of a chunk"
                )

    @property
    def fingerprint(self) -> str:
        """32 hexadecimal digits (XXH3-128) over every field, independent of field order."""
        return xxhash.xxh3_128_hexdigest(msgspec.json.encode(self.fields()))

    def fields(self) -> dict[str, Any]:
        """Convert every field that the fingerprint covers to JSON types.

        An empty `tensors` is left out, so that opaque groups keep the fingerprint, and thus the
        files, that they had before the field existed.
        """
        fields: dict[str, Any] = msgspec.to_builtins(self, order="deterministic")
        for group in fields["groups"]:
            if not group["tensors"]:
                del group["tensors"]
        return fields

    def chunk_size_bytes(self, group: int) -> int:
        """Bytes stored under one key of `group`.

        Raises:
            UnknownGroupError: There is no such group.
        """
        index = require_integer("group", group, minimum=-INT64_MAX)
        if not 0 <= index < len(self.groups):
            raise UnknownGroupError(index, len(self.groups))
        return self.groups[index].block_size_bytes * self.blocks_per_chunk

    @property
    def chunk_sizes(self) -> list[int]:
        """Bytes stored under one key of each group."""
        return [self.chunk_size_bytes(group) for group in range(len(self.groups))]

    def differences(self, theirs: "Namespace") -> list[Difference]:
        """Find every field in which another namespace differs, by name."""
        require_instance("theirs", theirs, Namespace)
        return list(_differences("", self.fields(), theirs.fields()))

    def require_same(self, theirs: "Namespace") -> None:
        """Check that both namespaces are equal, so that blocks of `theirs` may be read as ours.

        Raises:
            NamespaceMismatchError: A field differs; the error names the first, with both values.
        """
        for difference in self.differences(theirs):
            raise NamespaceMismatchError(*difference)


_TEXTS = [each.name for each in msgspec.structs.fields(Namespace) if each.type is str]


def _set(struct: msgspec.Struct, name: str, value: object) -> None:
    """Set a field of a frozen struct in its `__post_init__`."""
    msgspec.structs.force_setattr(struct, name, value)


def _differences(path: str, ours: Any, theirs: Any) -> Iterator[Difference]:
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for name in sorted(ours.keys() | theirs.keys()):
            yield from _differences(f"{path}.{name}".lstrip("."), ours.get(name), theirs.get(name))
    elif isinstance(ours, tuple) and isinstance(theirs, tuple) and len(ours) == len(theirs):
        for index, (our, their) in enumerate(zip(ours, theirs, strict=True)):
            yield from _differences(f"{path}[{index}]", our, their)
    elif ours != theirs:
        yield Difference(path, ours, theirs)
