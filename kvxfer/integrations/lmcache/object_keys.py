"""Keys of LMCache's objects: every field of an `ObjectKey`, and the piece of the object.

A key can be decoded, so that after a restart the files tell which objects they belong to. If its
names are too long for the name of a file, a digest of all fields takes their place.
"""

import dataclasses
import hashlib
import struct

from kvxfer.engine_side.harmless_words import default_of
from kvxfer.integrations.lmcache.interface import ObjectKey
from kvxfer.storage.keys import GROUP_INDEX_BYTES, BlockKey, make_block_key

MAX_ID_BYTES = 111
"""Maximum bytes of an object's id, which has to fit into a file's name with its piece and group."""

READABLE, DIGEST = b"\x01", b"\x00"

DECODED_FIELDS = frozenset({"chunk_hash", "model_name", "kv_rank", "object_group_id", "cache_salt"})
"""Fields of a key that can be decoded; one that a later release adds goes into the digest."""

_FIELDS = struct.Struct(">QIBB")
"""Rank, object group, bytes of the chunk's hash, bytes of the model's name."""

_PIECE = struct.Struct(">I")


def object_id_of(key: ObjectKey) -> bytes:
    """Make the part of a key that all pieces of an object have in common.

    The chunk's hash comes first: folders are named after the first digits of a key.
    """
    chunk_hash: bytes = key.chunk_hash
    model: bytes = key.model_name.encode(errors="surrogatepass")  # clients may send any text
    salt: bytes = key.cache_salt.encode(errors="surrogatepass")
    fields = (key.kv_rank, key.object_group_id, len(chunk_hash), len(model))
    try:
        readable = chunk_hash + model + salt + _FIELDS.pack(*fields) + READABLE
    except struct.error:  # a number out of range
        readable = b""
    others = list[bytes]()
    for each in dataclasses.fields(key):
        if each.name not in DECODED_FIELDS and getattr(key, each.name) != default_of(each):
            others.append(f"{each.name}={getattr(key, each.name)!r}".encode())
    if readable and len(readable) <= MAX_ID_BYTES and not others:
        return readable
    digest = hashlib.blake2b(digest_size=32)
    for field in (chunk_hash, model, salt, repr(fields[:2]).encode(), *others):
        digest.update(len(field).to_bytes(8, "big") + field)
    return digest.digest() + DIGEST


def object_key_of(object_id: bytes) -> ObjectKey | None:
    """Decode an object's key from its id; None if the id is a digest, or of another form."""
    tail = object_id[-_FIELDS.size - 1 :]
    if len(tail) <= _FIELDS.size or tail[-1:] != READABLE:
        return None
    rank, group, hash_bytes, model_bytes = _FIELDS.unpack(tail[:-1])
    names = object_id[: -len(tail)]
    try:
        return ObjectKey(
            chunk_hash=names[:hash_bytes],
            model_name=names[hash_bytes : hash_bytes + model_bytes].decode(errors="surrogatepass"),
            kv_rank=rank,
            object_group_id=group,
            cache_salt=names[hash_bytes + model_bytes :].decode(errors="surrogatepass"),
        )
    except (TypeError, ValueError):  # perhaps a later release requires more fields
        return None


def piece_key(object_id: bytes, index: int) -> BlockKey:
    """Make the key under which a piece is stored."""
    return make_block_key(object_id + _PIECE.pack(index), 0)


def piece_of(key: BlockKey) -> tuple[bytes, int]:
    """Decode a piece's key: the object's id and the index of the piece."""
    content = key[:-GROUP_INDEX_BYTES]
    return content[: -_PIECE.size], int.from_bytes(content[-_PIECE.size :], "big")
