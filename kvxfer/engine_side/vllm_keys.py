"""Keys of vLLM's blocks: the hashes of its prefix cache, computed from tokens without vLLM."""

import hashlib
import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal, get_args

import xxhash
from numpy.typing import ArrayLike

from kvxfer.checks import require_integer, require_integers, require_positive, require_text
from kvxfer.errors import InvalidArgumentError
from kvxfer.storage.keys import BlockKey, make_block_key

HashName = Literal["sha256", "xxhash"]
SEED_VARIABLE = "PYTHONHASHSEED"
DEFAULT_SEED = "vllm-none-hash"
"""vLLM's seed of SHA-256 if `PYTHONHASHSEED` is not set, since release `DEFAULT_SEED_SINCE`.

Source: `vllm/v1/core/kv_cache_utils.py`, `DEFAULT_NONE_HASH_SEED`, `init_none_hash` and
`hash_block_tokens`; `vllm/utils/hashing.py`.
"""
DEFAULT_SEED_SINCE = "0.29"
"""First release of vLLM with `DEFAULT_SEED`; before it, seeds without the variable are random."""
DEFAULT_HASH: Final = "sha256"
"""Default of vLLM's `--prefix-caching-hash-algo` in every release that is supported."""
HASHES_WITH_DEFAULT_SEED = ("sha256", "sha256_cbor")
"""Values of `--prefix-caching-hash-algo` with `DEFAULT_SEED`; others default to a random seed."""
PICKLE_PROTOCOL = 5
"""Highest pickle protocol of Python 3.8 to 3.14; vLLM hashes values that are pickled with it."""

_FUNCTIONS: dict[str, Callable[[bytes], bytes]] = {
    "sha256": lambda data: hashlib.sha256(data).digest(),
    "xxhash": xxhash.xxh3_128_digest,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class VLLMKeys:
    """Keys under which vLLM stores the blocks of prompts without adapter, image or salt.

    Attributes:
        hash: vLLM's `--prefix-caching-hash-algo`.
        seed: `PYTHONHASHSEED` of vLLM's processes; by default that of this process or, if it is
            not set, vLLM's own seed since 0.29; earlier releases then have random hashes. As in
            vLLM, an empty variable is a seed, too.
        tokens_per_block: vLLM's `--block-size`, if chunks have several blocks; by default, a chunk
            is one block.

    Raises:
        InvalidArgumentError: An attribute has the wrong type, or there is no such hash; or
            `xxhash` has no seed, without which vLLM's hashes are random.
    """

    hash: HashName = DEFAULT_HASH
    seed: str = ""
    tokens_per_block: int | None = None

    def __post_init__(self) -> None:
        if require_text("hash", self.hash) not in get_args(HashName):
            known = " or ".join(map(repr, get_args(HashName)))
            raise InvalidArgumentError("hash", self.hash, known)
        seed = require_text("seed", self.seed) or os.environ.get(SEED_VARIABLE)
        if seed is None and self.hash not in HASHES_WITH_DEFAULT_SEED:
            wanted = f"vLLM's {SEED_VARIABLE}, without which its hashes are random"
            raise InvalidArgumentError("seed", self.seed, wanted)
        object.__setattr__(self, "seed", DEFAULT_SEED if seed is None else seed)
        if self.tokens_per_block is not None:
            tokens = require_positive("tokens_per_block", self.tokens_per_block)
            object.__setattr__(self, "tokens_per_block", tokens)

    def chunk_keys(
        self, tokens: ArrayLike, *, tokens_per_chunk: int, group: int = 0
    ) -> list[BlockKey]:
        """Compute the keys of all whole chunks of a prompt.

        Args:
            tokens: Token ids, integers, `(num_tokens,)`.
            tokens_per_chunk: Tokens stored under one key.
            group: KV-cache group of the chunks.

        Raises:
            InvalidArgumentError: `tokens` are not integers in one dimension, or chunks are not
                whole blocks.
        """
        ids = require_integers("tokens", tokens).tolist()
        size = require_positive("tokens_per_chunk", tokens_per_chunk)
        group = require_integer("group", group)
        block = self.tokens_per_block or size
        if size % block:
            wanted = f"a multiple of {block}, the tokens of a block"
            raise InvalidArgumentError("tokens_per_chunk", tokens_per_chunk, wanted)
        digest, keys = self._digest(self.seed), []
        for end in range(block, len(ids) - len(ids) % size + 1, block):
            digest = self._digest((digest, tuple(ids[end - block : end]), None))
            if end % size == 0:
                keys.append(make_block_key(digest, group))
        return keys

    def _digest(self, value: object) -> bytes:
        return _FUNCTIONS[self.hash](pickle.dumps(value, protocol=PICKLE_PROTOCOL))
