"""Peer engine: another engine that lends blocks, as the description of its caches tells of it."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import msgspec

from kvxfer.backends.nixl import Endpoint
from kvxfer.endpoint import MAX_PORT
from kvxfer.errors import CacheMismatchError, InvalidArgumentError
from kvxfer.kvcache.portable import CacheDescription, PeerBlocks
from kvxfer.storage.keys import BlockKey
from kvxfer.transfer.prompt_pages import Wanted

MAX_WORKERS = 128
"""Most workers of another engine: each is connected to, because the first one says so."""

MAX_MATCHES = 16
"""Most kinds of other engines of which is remembered how their blocks become ours."""

DIGEST_BYTES = 16


class PeerEngine:
    """Engine that lends blocks.

    Args:
        encoded: Description that its worker of rank 0 gives, which may be anything.

    Attributes:
        description: The same, decoded.

    Raises:
        InvalidArgumentError: It is no description.
        CacheMismatchError: It is that of another worker, of more workers than there can be, or has
            a field that this release does not know.
    """

    def __init__(self, encoded: bytes) -> None:
        self.description = CacheDescription.decode(encoded)
        shard = self.description.shard
        if shard.rank != 0:
            raise CacheMismatchError(None, "shard.rank of the first worker", 0, shard.rank)
        if shard.num_workers > MAX_WORKERS:
            at_most = f"at most {MAX_WORKERS}"
            raise CacheMismatchError(None, "shard.num_workers", at_most, shard.num_workers)
        self._words = msgspec.msgpack.decode(encoded)
        self._digests: dict[int, bytes] = {}

    @property
    def tokens_per_block(self) -> tuple[int, ...]:
        """Tokens of a block of each group."""
        return tuple(group.tokens_per_block for group in self.description.groups)

    def workers(self, first: Endpoint) -> list[Endpoint]:
        """List the endpoints of its workers by rank: each listens at the port after the last one's.

        Raises:
            InvalidArgumentError: There are not as many ports after that of the first one.
        """
        num_workers = self.description.shard.num_workers
        if first.port + num_workers - 1 > MAX_PORT:
            rule = f"at most {MAX_PORT - num_workers + 1} with {num_workers} workers"
            raise InvalidArgumentError("port", first.port, rule)
        return [Endpoint(first.host, first.port + rank) for rank in range(num_workers)]

    def worker_keys(self, rank: int, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """Make the keys of blocks on one of its workers; see `worker_keys`.

        They come from its own words: a release that has fewer fields than ours leaves some out.
        """
        if rank not in self._digests:
            shard = {**self._words["shard"], "rank": self.description.at_rank(rank).shard.rank}
            self._digests[rank] = _digest(msgspec.msgpack.encode({**self._words, "shard": shard}))
        return _of_worker(self._digests[rank], keys)


@dataclass(frozen=True, slots=True)
class PeerMatch:
    """Another engine, as our caches see it.

    Attributes:
        engine: The engine.
        groups: How its blocks become ours, for each group.
    """

    engine: PeerEngine
    groups: tuple[PeerBlocks, ...]

    def block_size_bytes(self, group: int) -> int:
        """Bytes of a block of one of its workers."""
        return self.engine.description.groups[group].payload_size_bytes

    def targets(self, group: int, index: int, wanted: Wanted, tokens_per_block: int) -> list[int]:
        """List those of our blocks that have tokens of a block; the null block is not left out."""
        size = self.engine.tokens_per_block[group]
        first = max(index * size, wanted.first_token)
        stop = min((index + 1) * size, wanted.num_tokens)
        ids = wanted.block_ids[group]
        return ids[first // tokens_per_block : -(-stop // tokens_per_block)] if first < stop else []

    def require_same_blocks(self, wanted: Wanted) -> None:
        """Check that blocks are those of the engine that was asked; it may have been started anew.

        Raises:
            CacheMismatchError: They are not.
            BlockIdError: We do not have a block.
            DuplicateError: A block of ours is wanted twice.
        """
        sizes = self.engine.tokens_per_block
        if sizes != wanted.tokens_per_block:
            raise CacheMismatchError(None, "tokens_per_block", wanted.tokens_per_block, sizes)
        for blocks, ids in zip(self.groups, wanted.block_ids, strict=True):
            blocks.check_ids(ids)


def worker_keys(description: CacheDescription, keys: Sequence[BlockKey]) -> list[BlockKey]:
    """Make the keys of blocks on one worker out of those of the prompt.

    They name the worker's part of the model and the layout of its memory as well. So who asks the
    wrong worker, or one that was started anew with other caches, finds nothing: equal prompts have
    other bytes there.
    """
    return _of_worker(_digest(description.encode()), keys)


def _digest(encoded: bytes) -> bytes:
    return hashlib.blake2b(encoded, digest_size=DIGEST_BYTES).digest()


def _of_worker(digest: bytes, keys: Sequence[BlockKey]) -> list[BlockKey]:
    return cast("list[BlockKey]", list(map(digest.__add__, keys)))  # there are many
