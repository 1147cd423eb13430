"""Quantization of cached elements: where the scales are that make numbers of them."""

from enum import Enum

SCALE_SIZE_BYTES = 4
"""One scale, a float32. Source: vLLM, `TritonAttentionBackend.customize_spec`."""


class KVQuantization(Enum):
    """How cached elements are scaled."""

    NONE = "none"
    """Elements are numbers by themselves."""

    PER_TENSOR = "per tensor"
    """One scale for all of a layer; it belongs to the model and is not in the cache."""

    PER_TOKEN_HEAD = "per token and head"  # noqa: S105 - a token of text
    """Two scales for each token and head. Each of the key and the value ends in its own, a latent
    ends in both."""

    @property
    def scale_bytes_per_token_head(self) -> int:
        """Bytes of the scales that one token and head has in the cache."""
        return 2 * SCALE_SIZE_BYTES if self is KVQuantization.PER_TOKEN_HEAD else 0
