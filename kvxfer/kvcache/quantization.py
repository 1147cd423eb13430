"""Quantization of cached elements: the place of their scales."""

from enum import Enum

SCALE_SIZE_BYTES = 4
"""Bytes of one scale, a float32. Source: vLLM, `TritonAttentionBackend.customize_spec`."""


class KVQuantization(Enum):
    """Scaling of cached elements."""

    NONE = "none"
    """No scale: elements are numbers by themselves."""

    PER_TENSOR = "per tensor"
    """One scale for a whole layer; it belongs to the model and is not in the cache."""

    PER_TOKEN_HEAD = "per token and head"  # noqa: S105 - a token of text
    """Two scales for each token and head, one at the end of the key and one at the end of the
    value; both at the end of a latent."""

    @property
    def encoding(self) -> str:
        """Name of the scaling in the encoding of stored bytes; empty without one."""
        return "" if self is KVQuantization.NONE else f"scaled {self.value}"

    @property
    def scale_bytes_per_token_head(self) -> int:
        """Bytes of the scales of one token and head in the cache."""
        return 2 * SCALE_SIZE_BYTES if self is KVQuantization.PER_TOKEN_HEAD else 0
