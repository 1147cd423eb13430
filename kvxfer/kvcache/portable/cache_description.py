"""Cache descriptions: what the bytes of a worker's blocks mean, for other engines."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import torch

from kvxfer.checks import (
    require_flag,
    require_instance,
    require_instances,
    require_integer,
    require_text,
)
from kvxfer.errors import CacheMismatchError, InvalidArgumentError, PageMappingError
from kvxfer.kvcache.canonical import CanonicalKVCaches
from kvxfer.kvcache.page_box import PageBox
from kvxfer.kvcache.portable.page_mapping import payload_boxes
from kvxfer.kvcache.portable.worker_shard import WorkerShard, is_state
from kvxfer.text import printable

MAX_DESCRIPTION_BYTES = 1 << 20
"""Maximum size of an encoded description: 4000 boxes; a model of 126 layers has 252."""

MAX_PAYLOAD_BYTES = 1 << 40
"""Maximum size of a described block, so that any sum of offsets fits in 64 bits."""

MAX_INDEX = 1 << 40
"""Maximum index of a head or a token, and maximum number of workers."""

STATE_TOKENS = MAX_INDEX
"""Tokens of a block of states, which stands for all tokens before it, however many."""

MAX_NAME_CHARACTERS = 512
MAX_DIGITS = 32

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and not dtype.is_complex
}


class GroupDescription(msgspec.Struct, frozen=True, kw_only=True):
    """Description of one block of a group on one worker; the constructor checks all bounds.

    Attributes:
        tokens_per_block: Tokens that a block spans, over all workers that share its tokens;
            always `STATE_TOKENS` for states.
        payload_size_bytes: Bytes of a block: the pages of the group's refs, one after the other.
        boxes: Boxes of elements in these bytes, with the worker's own indices of heads and tokens;
            empty if unknown.
        opaque: If boxes are unknown, a text that names all that must be equal besides the rank:
            engine, release, layout, packing.
    """

    tokens_per_block: int
    payload_size_bytes: int
    boxes: tuple[PageBox, ...] = ()
    opaque: str = ""
    has_states: bool = False

    def __post_init__(self) -> None:
        counts = {"tokens_per_block": MAX_INDEX, "payload_size_bytes": MAX_PAYLOAD_BYTES}
        for name, maximum in counts.items():
            count = require_integer(name, getattr(self, name), minimum=1, maximum=maximum)
            msgspec.structs.force_setattr(self, name, count)
        msgspec.structs.force_setattr(self, "opaque", require_text("opaque", self.opaque))
        has_states = require_flag("has_states", self.has_states)
        msgspec.structs.force_setattr(self, "has_states", has_states)
        require_instances("boxes", self.boxes, PageBox)
        msgspec.structs.force_setattr(self, "boxes", tuple(self.boxes))
        if self.has_states:
            msgspec.structs.force_setattr(self, "tokens_per_block", STATE_TOKENS)
        if bool(self.boxes) == bool(self.opaque):
            expected = "a text if there are no boxes, else an empty one"
            raise InvalidArgumentError("opaque", self.opaque, expected)
        for index, box in enumerate(self.boxes):
            _require_inside(f"boxes[{index}]", box, self.payload_size_bytes)
        if any(is_state(box) != self.has_states for box in self.boxes):
            expected = f"True only if all of {sorted({box.part for box in self.boxes})} are states"
            raise InvalidArgumentError("has_states", has_states, expected)


class CacheDescription(msgspec.Struct, frozen=True, kw_only=True, tag="kvxfer-caches-1"):
    """Description of one worker's caches: what another engine needs to read its raw blocks.

    The tag carries the version of the format: other versions are refused. Within a version, a
    release may add fields whose defaults describe the blocks of older releases. A release refuses
    a field that it does not know, by name, since it may misread such blocks.
    """

    shard: WorkerShard
    groups: tuple[GroupDescription, ...]

    def __post_init__(self) -> None:
        require_instance("shard", self.shard, WorkerShard)
        require_instances("groups", self.groups, GroupDescription, at_least_one=True)
        msgspec.structs.force_setattr(self, "groups", tuple(self.groups))
        shard = self.shard
        for name in ("num_kv_heads", "tp_size", "pcp_size", "dcp_size", "interleave_tokens"):
            require_integer(f"shard.{name}", getattr(shard, name), maximum=MAX_INDEX)

    def at_rank(self, rank: int) -> "CacheDescription":
        """Describe another worker of the same engine, whose workers must be alike."""
        return msgspec.structs.replace(self, shard=replace(self.shard, rank=rank))

    def encode(self) -> bytes:
        """Encode for another process; `InvalidArgumentError` if the result is too long."""
        encoded = msgspec.msgpack.encode(self, enc_hook=encode_dtype)
        if len(encoded) > MAX_DESCRIPTION_BYTES:
            expected = f"at most {MAX_DESCRIPTION_BYTES} bytes"
            raise InvalidArgumentError("description", f"{len(encoded)} bytes", expected)
        return encoded

    @staticmethod
    def decode(encoded: bytes) -> "CacheDescription":
        """Decode untrusted bytes from another process.

        Raises:
            InvalidArgumentError: They are not a description of this version, or too long, or a
                value is out of bounds.
            CacheMismatchError: The description has a field that this release does not know.
        """
        if len(encoded) > MAX_DESCRIPTION_BYTES:
            expected = f"at most {MAX_DESCRIPTION_BYTES} bytes"
            raise InvalidArgumentError("description", f"{len(encoded)} bytes", expected)
        try:
            decoded = msgspec.msgpack.decode(encoded, type=CacheDescription, dec_hook=decode_dtype)
            raw = msgspec.msgpack.decode(encoded)
        except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as exc:
            shown = f"{len(encoded)} bytes: {exc}"
            raise InvalidArgumentError("description", shown, "a CacheDescription") from exc
        known = msgspec.to_builtins(decoded, enc_hook=encode_dtype)
        for field, value in _unknown_fields(raw, known):
            name, theirs = (printable(each, MAX_NAME_CHARACTERS) for each in (field, value))
            raise CacheMismatchError(None, name, "no such field", theirs)
        return decoded


def describe_caches(
    caches: CanonicalKVCaches, shard: WorkerShard, *, opaque: str = ""
) -> CacheDescription:
    """Describe caches from `canonicalize` or `allocate_canonical`, whose refs have boxes.

    Groups without boxes are described as plain bytes, for equal workers only, if `opaque` names
    all that must be equal besides the rank: engine, release and layout. Without `opaque`, they
    raise `PageMappingError`.
    """
    require_instance("caches", caches, CanonicalKVCaches)
    require_instance("shard", shard, WorkerShard)
    opaque = require_text("opaque", opaque)
    if len(caches.group_specs) != len(caches.group_data_refs):
        raise InvalidArgumentError("caches", "without group_specs", "caches made by canonicalize")
    groups = []
    for spec, refs in zip(caches.group_specs, caches.group_data_refs, strict=True):
        boxes: Sequence[PageBox] = ()
        try:
            boxes = payload_boxes(refs)
        except PageMappingError:
            if not opaque:
                raise
        groups.append(
            GroupDescription(
                tokens_per_block=spec.tokens_per_block * shard.num_token_shares,
                payload_size_bytes=sum(ref.page_size_bytes for ref in refs),
                boxes=tuple(boxes),
                opaque="" if boxes else opaque,
                has_states=not any("token" in form.axis_sizes for form in spec.cache_tensors),
            )
        )
    return CacheDescription(shard=shard, groups=tuple(groups))


def _unknown_fields(raw: Any, known: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield name and value of each field of a message that its decoded form lacks."""
    if isinstance(known, dict):
        for field, value in raw.items():
            inner = f"{name}.{field}" if name else f"{field}"
            if field not in known:
                yield inner, value
            else:
                yield from _unknown_fields(value, known[field], inner)
    elif isinstance(known, list | tuple):
        for index, pair in enumerate(zip(raw, known, strict=True)):
            yield from _unknown_fields(*pair, f"{name}[{index}]")


def _require_inside(name: str, box: PageBox, payload_size_bytes: int) -> None:
    """Check that a box is well formed and that all its elements lie in the payload."""
    texts = (box.layer_name, box.part, box.encoding, *(digit.axis for digit in box.digits))
    texts += tuple(axis for axis, _ in box.first)
    if bad := [each for each in texts if len(each) > MAX_NAME_CHARACTERS or not each.isprintable()]:
        expected = f"text of at most {MAX_NAME_CHARACTERS} printable characters"
        raise InvalidArgumentError(name, bad[0], expected)
    if len(box.digits) > MAX_DIGITS or len(dict(box.first)) != len(box.first):
        expected = f"at most {MAX_DIGITS} digits, and each axis once in `first`"
        raise InvalidArgumentError(name, f"{len(box.digits)} digits, {box.first}", expected)
    end = require_integer(f"{name}.offset_bytes", box.offset_bytes, maximum=payload_size_bytes)
    end += box.dtype.itemsize
    for digit in box.digits:
        for field in ("size", "step"):
            value = getattr(digit, field)
            require_integer(f"{name}.{digit.axis}.{field}", value, minimum=1, maximum=MAX_INDEX)
        stride = require_integer(f"{name}.{digit.axis}.stride_bytes", digit.stride_bytes)
        end += (digit.size - 1) * stride
    for axis, index in box.first:
        require_integer(f"{name}.first[{axis!r}]", index, maximum=MAX_INDEX)
    if max(end, box.num_bytes) > payload_size_bytes:
        expected = f"at most {payload_size_bytes} bytes of payload"
        raise InvalidArgumentError(name, f"bytes up to {max(end, box.num_bytes)}", expected)


def encode_dtype(value: Any) -> str:
    """Encode a dtype by its name, as an encoder's hook."""
    require_instance("dtype", value, torch.dtype)
    return str(value).removeprefix("torch.")


def decode_dtype(_kind: type, value: Any) -> torch.dtype:
    """Decode a dtype that `encode_dtype` encoded, as a decoder's hook."""
    dtype = _DTYPES.get(value) if isinstance(value, str) else None
    if dtype is None:
        raise InvalidArgumentError("dtype", value, "the name of a torch dtype")
    return dtype
