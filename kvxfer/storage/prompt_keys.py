"""Keys of a prompt's blocks, made of its tokens: equal prompts have equal keys, in any process."""

import hashlib
from collections.abc import Sequence

from numpy.typing import ArrayLike

from kvxfer.checks import require_instance, require_integer, require_integers, require_positive
from kvxfer.storage.keys import BlockKey, make_block_key

DIGEST_BYTES = 16
"""Bytes of a digest: nobody finds two prompts with the same one in fewer than 2**64 attempts."""

TOKEN_BYTES = 8
"""Bytes of a token as it is hashed, int64 little-endian.

Engines also have negative token ids, for placeholders, and ids past 2**32, for hashes of images: 32
bits would refuse them or confuse two prompts, only to save some microseconds.
"""

_PERSON = b"kvxfer prompt v1"
_BLOCK = b"block".ljust(8)
_STATE = b"state".ljust(8)


class PromptKeys:
    """Content keys of the blocks of one prompt, from its tokens and scope alone.

    The key of a block is a digest of the scope, of every token up to the end of the block and of
    the index of its first token, followed by the group. So it does not depend on the size of other
    blocks, and a reader can compute the keys of a lender's blocks from its own copy of the prompt.

    The digest is BLAKE2b of 16 bytes: prompts come from strangers, and anyone who could find two
    prompts with the same key could read the blocks of others. Not thread-safe.

    Args:
        tokens: Token ids of the prompt, integers, `(num_tokens,)`; copied.
        scope: Whatever else changes the bytes of blocks at equal tokens, e.g. an adapter, a salt
            or hashes of images, in a form of the caller's.

    Raises:
        InvalidArgumentError: `tokens` are not integers in one dimension, or `scope` is not bytes.

    Source: https://www.rfc-editor.org/rfc/rfc7693, BLAKE2.
    """

    def __init__(self, tokens: ArrayLike, *, scope: bytes = b"") -> None:
        ids = require_integers("tokens", tokens)
        require_instance("scope", scope, bytes)
        self.num_tokens = len(ids)
        self._bytes = memoryview(ids.astype("<i8").tobytes())
        self._scope = hashlib.blake2b(digest_size=DIGEST_BYTES, person=_PERSON)
        self._scope.update(len(scope).to_bytes(8, "little") + scope)
        self._hasher, self._num_hashed = self._scope.copy(), 0
        self._digests: dict[tuple[bytes, int, int], bytes] = {}

    def block_keys(
        self, group: int, tokens_per_block: int, num_tokens: int, *, first_token: int = 0
    ) -> list[BlockKey]:
        """Make the keys of the blocks that have tokens from `first_token` to `num_tokens`.

        Args:
            group: KV-cache group of the blocks.
            tokens_per_block: Tokens of a whole block.
            num_tokens: Number of tokens in blocks; if they fill the last block only in part, its
                key covers the tokens that it has.
            first_token: First token of interest, whose whole block counts.

        Returns:
            Keys in the order of the prompt, from block `first_token // tokens_per_block` on; none
            if `first_token` is `num_tokens`.

        Raises:
            InvalidArgumentError: The prompt has fewer tokens, `tokens_per_block` is not positive,
                or the group is not a 32-bit unsigned number.
        """
        size = require_positive("tokens_per_block", tokens_per_block)
        stop = self._require_num_tokens(num_tokens)
        first = require_integer("first_token", first_token, maximum=stop)
        starts = range(first - first % size, stop, size) if first < stop else range(0)
        spans = [(_BLOCK, start, min(start + size, stop)) for start in starts]
        return [make_block_key(digest, group) for digest in self._digest(spans)]

    def state_key(self, group: int, num_tokens: int) -> BlockKey:
        """Make the key of the state of a recurrent layer after `num_tokens` tokens.

        Raises:
            InvalidArgumentError: The prompt has fewer tokens, or the group is not a 32-bit unsigned
                number.
        """
        stop = self._require_num_tokens(num_tokens)
        [digest] = self._digest([(_STATE, 0, stop)])
        return make_block_key(digest, group)

    def _require_num_tokens(self, num_tokens: int) -> int:
        expected = f"0 to {self.num_tokens}, the tokens of the prompt"
        return require_integer("num_tokens", num_tokens, maximum=self.num_tokens, expected=expected)

    def _digest(self, spans: Sequence[tuple[bytes, int, int]]) -> list[bytes]:
        """Digest spans of the prompt: kind, first token and end, in ascending order of ends."""
        for span in spans:
            if span not in self._digests:
                kind, start, stop = span
                if stop < self._num_hashed:
                    self._hasher, self._num_hashed = self._scope.copy(), 0
                tokens = self._bytes[self._num_hashed * TOKEN_BYTES : stop * TOKEN_BYTES]
                self._hasher.update(tokens)
                self._num_hashed = stop
                hasher = self._hasher.copy()
                hasher.update(kind + start.to_bytes(8, "little"))
                self._digests[span] = hasher.digest()
        return [self._digests[span] for span in spans]
