"""What names a block: a content hash, a group, and the namespace they live in."""

from typing import Any, NewType

import msgspec
import xxhash

from kvxfer.errors import InvalidArgumentError, NamespaceMismatchError

GROUP_INDEX_BYTES = 4

BlockKey = NewType("BlockKey", bytes)
"""A content hash followed by the group index, 4 bytes big-endian.

The same bytes as vLLM's `OffloadKey`, so its keys need no conversion.
Source: `vllm/v1/kv_offload/base.py`, `make_offload_key`.
"""


def make_block_key(content_hash: bytes, group: int) -> BlockKey:
    """Name the block with `content_hash` of KV-cache group `group`.

    Raises:
        InvalidArgumentError: The hash is empty or the group is not a 32-bit unsigned number.
    """
    if not content_hash:
        raise InvalidArgumentError("content_hash", content_hash, "at least one byte")
    if not 0 <= group < 1 << 8 * GROUP_INDEX_BYTES:
        raise InvalidArgumentError("group", group, "0 <= group < 2**32")
    return BlockKey(content_hash + group.to_bytes(GROUP_INDEX_BYTES, "big"))


def group_of(key: BlockKey) -> int:
    """Read the group index out of a key.

    Raises:
        InvalidArgumentError: The key is not bytes or is too short to be a key.
    """
    if not isinstance(key, bytes) or len(key) <= GROUP_INDEX_BYTES:  # type: ignore[redundant-expr]
        raise InvalidArgumentError("key", key, "a content hash and a 4-byte group index")
    return int.from_bytes(key[-GROUP_INDEX_BYTES:], "big")


class GroupIdentity(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What changes the bytes of one KV-cache group's blocks.

    Attributes:
        page_sizes_bytes: Un-padded page size of each ref, in payload order.
        layer_names: Layers of the group, in payload order.
        layouts: Layout of each ref's pages.
        spec: The group's spec in words: tokens per block, heads, dimensions, data type.
    """

    page_sizes_bytes: tuple[int, ...]
    layer_names: tuple[str, ...] = ()
    layouts: tuple[str, ...] = ()
    spec: str = ""

    @property
    def block_size_bytes(self) -> int:
        """Bytes of one block of this group on this worker."""
        return sum(self.page_sizes_bytes)


class Namespace(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that changes the bytes behind a key.

    Blocks are shared only between workers whose namespaces are equal in every field: one
    difference gives another fingerprint, and the blocks of one are invisible to the other.

    Attributes:
        model: Model identifier, e.g. a repository name or path.
        revision: Revision of the weights.
        dtype: Data type of the cached values.
        quantization: Quantization of the cache, empty when there is none.
        config_hash: Hash of everything in the model's configuration that changes keys or
            values at equal tokens: RoPE parameters, sliding windows, adapters.
        layout: Name that the engine gives the layout of its caches, if any.
        groups: One identity per KV-cache group.
        blocks_per_chunk: Engine blocks stored under one key.
        parallel: Parallel mapping, e.g. `{"tp_size": 2}`.
        instruction_set: Instruction set that the CPU attention kernels pack keys for;
            empty on devices whose bytes do not depend on it.
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

    @property
    def fingerprint(self) -> str:
        """32 hexadecimal digits (XXH3-128) over every field, independent of field order."""
        return xxhash.xxh3_128_hexdigest(msgspec.json.encode(self, order="deterministic"))

    def chunk_size_bytes(self, group: int) -> int:
        """Bytes stored under one key of `group`."""
        return self.groups[group].block_size_bytes * self.blocks_per_chunk

    def require_same(self, theirs: "Namespace") -> None:
        """Check that blocks of `theirs` may be read as ours.

        Raises:
            NamespaceMismatchError: Names the first field that differs, and both values.
        """
        _require_equal("", msgspec.to_builtins(self), msgspec.to_builtins(theirs))


def _require_equal(path: str, ours: Any, theirs: Any) -> None:
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for name in sorted(ours.keys() | theirs.keys()):
            _require_equal(f"{path}.{name}".lstrip("."), ours.get(name), theirs.get(name))
    elif isinstance(ours, (list, tuple)) and isinstance(theirs, (list, tuple)):
        if len(ours) != len(theirs):
            raise NamespaceMismatchError(path, ours, theirs)
        for index, (our, their) in enumerate(zip(ours, theirs, strict=True)):
            _require_equal(f"{path}[{index}]", our, their)
    elif ours != theirs:
        raise NamespaceMismatchError(path, ours, theirs)
