"""KV-cache specs: what a layer's blocks contain, by type of layer, and how specs merge."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import Any, ClassVar

import torch

from kvxfer.checks import (
    require_instance,
    require_instances,
    require_positive,
    require_sequence,
    require_text,
    set_counts,
)
from kvxfer.errors import InvalidArgumentError, SpecMergeError
from kvxfer.kvcache.layout import (
    ATTENTION_LAYOUTS,
    LATENT_LAYOUTS,
    SEPARATE_LAYOUTS,
    CacheTensorForm,
)

SCALE_SIZE_BYTES = 4
"""Bytes of one scale, a float32. Source: vLLM, `TritonAttentionBackend.customize_spec`."""


class KVQuantization(Enum):
    """Scaling of cached elements."""

    NONE = "none"
    """No scale: elements are the numbers themselves."""

    PER_TENSOR = "per tensor"
    """One scale for a whole layer; it belongs to the model and is not in the cache."""

    PER_TOKEN_HEAD = "per token and head"  # noqa: S105 - a token of text
    """Two scales for each token and head, one at the end of the key and one at the end of the
    value; both at the end of a latent."""

    @property
    def encoding(self) -> str:
        """Name of the scaling, as the encoding of stored bytes; empty without scales."""
        return "" if self is KVQuantization.NONE else f"scaled {self.value}"

    @property
    def scale_bytes_per_token_head(self) -> int:
        """Bytes of the scales of one token and head in the cache."""
        return 2 * SCALE_SIZE_BYTES if self is KVQuantization.PER_TOKEN_HEAD else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheSpec(ABC):
    """Spec of one layer's cache: the content and the size of a block.

    Implementors must define the tensors that an engine registers for a layer; code outside the
    class does not depend on the type of layer.

    Attributes:
        tokens_per_block: Tokens that one block of the block table counts.
        page_size_padded: Bytes of one block of this layer if pages are padded.
    """

    ONE_FOR_ALL: ClassVar[tuple[str, ...]] = ()
    """Fields of which at most one is set; a merge applies a value of some specs to all."""

    tokens_per_block: int
    page_size_padded: int | None = None

    def __post_init__(self) -> None:
        for each in fields(self):  # every integer in a spec is a count
            if each.type in (int, int | None):
                set_counts(self, each.name, optional=each.type is not int)
        if self.page_size_bytes < self.unpadded_page_size_bytes:
            raise InvalidArgumentError(
                "page_size_padded", self.page_size_padded, f">= {self.unpadded_page_size_bytes}"
            )

    @property
    @abstractmethod
    def cache_tensors(self) -> tuple[CacheTensorForm, ...]:
        """Forms of the tensors that an engine registers for a layer, in the order of a page."""

    @property
    def separate_cache_tensors(self) -> tuple[CacheTensorForm, ...]:
        """Forms of a layer's tensors if an engine registers its parts separately."""
        return ()

    @property
    def unpadded_page_size_bytes(self) -> int:
        """Bytes of one block of this layer that carry data."""
        return sum(form.page_size_bytes for form in self.cache_tensors)

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block of this layer, padding included."""
        return self.page_size_padded or self.unpadded_page_size_bytes

    def for_layer(self, layer_name: str) -> "KVCacheSpec":  # noqa: ARG002 - only collections look
        """Return the spec of one layer: this one, unless each layer has its own."""
        return self

    @staticmethod
    def merge(specs: "Sequence[KVCacheSpec]") -> "KVCacheSpec":
        """Merge the specs of layers that are to share one group; the inputs stay unchanged.

        Equal specs merge. Full-attention specs also merge if only some have a window or a chunk:
        a single value applies to all, two different ones are refused.

        Raises:
            InvalidArgumentError: There is no spec.
            SpecMergeError: The specs differ; the error names the field and the values.
        """
        require_instances("specs", specs, KVCacheSpec, at_least_one=True)
        if len({type(spec) for spec in specs}) > 1:
            raise SpecMergeError("type", [type(spec).__name__ for spec in specs])
        shared = {name: _one_value(name, specs) for name in specs[0].ONE_FOR_ALL}
        if sum(value is not None for value in shared.values()) > 1:
            raise SpecMergeError(" and ".join(shared), [*shared.values()])
        alike = [replace(spec, **shared) for spec in specs]
        for name in (f.name for f in fields(alike[0])):
            values = [getattr(spec, name) for spec in alike]
            if any(value != values[0] for value in values):
                raise SpecMergeError(name, values)
        return alike[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec(KVCacheSpec):
    """Spec of attention: keys and values of every token of a block.

    Attributes:
        num_kv_heads: KV heads on this worker.
        head_dim: Width of a key in stored elements: two packed 4-bit numbers are one uint8.
        dtype: Type of the cached elements.
        head_dim_v: Width of a value, elements; `head_dim` unless given.
        quantization: How the elements are scaled; scales in the cache are part of the page.
    """

    LAYOUTS: ClassVar[tuple[str, ...]] = ATTENTION_LAYOUTS

    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    head_dim_v: int | None = None
    quantization: KVQuantization = KVQuantization.NONE

    def __post_init__(self) -> None:
        require_instance("dtype", self.dtype, torch.dtype)
        require_instance("quantization", self.quantization, KVQuantization)
        if self.quantization is not KVQuantization.NONE and self.dtype.itemsize != 1:
            raise InvalidArgumentError("dtype", self.dtype, "8 bits in a quantized cache")
        KVCacheSpec.__post_init__(self)

    @property
    def _axis_sizes(self) -> dict[str, int]:
        sizes = {"token": self.tokens_per_block, "head": self.num_kv_heads}
        scales = self.quantization.scale_bytes_per_token_head
        if self.head_dim_v is None or self.head_dim_v == self.head_dim:
            return sizes | {"kv": 2, "dim": self.head_dim + scales // 2}
        return sizes | {"kv*dim": self.head_dim + self.head_dim_v + scales}

    @property
    def cache_tensors(self) -> tuple[CacheTensorForm, ...]:
        """One tensor that holds keys and values."""
        form = CacheTensorForm(
            dtype=self.dtype,
            axis_sizes=self._axis_sizes,
            layouts=self.LAYOUTS,
            parts=self._parts,
            encoding=self.quantization.encoding,
        )
        return (form,)

    @property
    def separate_cache_tensors(self) -> tuple[CacheTensorForm, ...]:
        """A tensor of keys and one of values."""
        sizes = {"token": self.tokens_per_block, "head": self.num_kv_heads}
        return tuple(
            CacheTensorForm(
                dtype=self.dtype,
                axis_sizes=sizes | {"dim": width},
                layouts=SEPARATE_LAYOUTS,
                parts=((part, width),),
                encoding=self.quantization.encoding,
            )
            for part, width in self._parts
        )

    @property
    def _parts(self) -> tuple[tuple[str, int], ...]:
        """Names and widths of keys and values, scales included."""
        scales = self.quantization.scale_bytes_per_token_head
        widths = {"k": self.head_dim, "v": self.head_dim_v or self.head_dim}
        return tuple((part, width + scales // 2) for part, width in widths.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class FullAttentionSpec(AttentionSpec):
    """Spec of full attention: blocks are kept for all tokens.

    Attributes:
        sliding_window: Tokens that a layer attends to, if the engine still keeps the older ones.
        attention_chunk_tokens: Tokens of a local-attention chunk, if the engine still keeps all.
    """

    ONE_FOR_ALL = ("sliding_window", "attention_chunk_tokens")

    sliding_window: int | None = None
    attention_chunk_tokens: int | None = None

    def __post_init__(self) -> None:
        AttentionSpec.__post_init__(self)
        chunk = self.attention_chunk_tokens
        if self.sliding_window is not None and chunk is not None:
            expected = "no chunk in a layer that has a sliding window"
            raise InvalidArgumentError("attention_chunk_tokens", chunk, expected)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlidingWindowSpec(AttentionSpec):
    """Spec of sliding-window attention: blocks are freed when they leave the window.

    Attributes:
        sliding_window: Tokens that a layer attends to; specs of different windows never merge.
    """

    sliding_window: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkedLocalAttentionSpec(AttentionSpec):
    """Spec of attention within chunks: blocks are freed with their chunk.

    Attributes:
        attention_chunk_tokens: Tokens of one chunk.
    """

    attention_chunk_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossAttentionSpec(AttentionSpec):
    """Spec of attention to the encoder's tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _LatentSpec(AttentionSpec):
    """Spec of one latent vector per token instead of keys and values; `head_dim` is its width."""

    LAYOUTS: ClassVar[tuple[str, ...]] = LATENT_LAYOUTS

    num_kv_heads: int = 1

    def __post_init__(self) -> None:
        AttentionSpec.__post_init__(self)
        if self.head_dim_v is not None:
            raise InvalidArgumentError("head_dim_v", self.head_dim_v, "None: there are no values")

    @property
    def separate_cache_tensors(self) -> tuple[CacheTensorForm, ...]:
        """Empty: a latent has no parts."""
        return ()

    @property
    def _axis_sizes(self) -> dict[str, int]:
        ((_, width),) = self._parts
        return {"token": self.tokens_per_block, "head": self.num_kv_heads, "dim": width}

    @property
    def _parts(self) -> tuple[tuple[str, int], ...]:
        return (("latent", self.head_dim + self.quantization.scale_bytes_per_token_head),)


@dataclass(frozen=True, slots=True, kw_only=True)
class MLASpec(_LatentSpec):
    """Spec of multi-head latent attention: one latent vector of `head_dim` elements per token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlidingWindowMLASpec(_LatentSpec):
    """Spec of latent attention whose blocks are freed when they leave the window.

    Attributes:
        sliding_window: Tokens that a layer attends to; specs of different windows never merge.
    """

    sliding_window: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaSpec(KVCacheSpec):
    """Spec of a Mamba or linear-attention layer: a block holds each of its states once.

    Attributes:
        shapes: Shape of each state.
        dtypes: Type of each state.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]

    def __post_init__(self) -> None:
        require_sequence("shapes", self.shapes, "a shape for each state")
        require_instances("dtypes", self.dtypes, torch.dtype)
        for index, shape in enumerate(self.shapes):
            require_sequence(f"shapes[{index}]", shape, "sizes of a state")
        shapes = tuple(
            tuple(require_positive(f"shapes[{index}]", size) for size in shape)
            for index, shape in enumerate(self.shapes)
        )
        object.__setattr__(self, "shapes", shapes)
        object.__setattr__(self, "dtypes", tuple(self.dtypes))
        if not self.shapes or len(self.shapes) != len(self.dtypes):
            raise InvalidArgumentError("dtypes", self.dtypes, f"one for each of {self.shapes!r}")
        KVCacheSpec.__post_init__(self)

    @property
    def cache_tensors(self) -> tuple[CacheTensorForm, ...]:
        """One tensor `(num_blocks, *shape)` per state, all in one page; axes are `s0`, `s1`, ..."""
        return tuple(
            CacheTensorForm(
                dtype=dtype,
                axis_sizes={f"s{axis}": size for axis, size in enumerate(shape)},
                layouts=(" ".join(("block", *(f"s{axis}" for axis in range(len(shape))))),),
                parts=((f"state{index}", shape[-1] if shape else 1),),
            )
            for index, (shape, dtype) in enumerate(zip(self.shapes, self.dtypes, strict=True))
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class UniformTypeKVCacheSpecs(KVCacheSpec):
    """Collection of specs of one type that differ from layer to layer inside one group.

    Attributes:
        layer_specs: Spec by layer name; all have one type and one `tokens_per_block`.
    """

    layer_specs: Mapping[str, KVCacheSpec]

    def __post_init__(self) -> None:
        set_counts(self, "tokens_per_block")
        require_instance("layer_specs", self.layer_specs, Mapping)
        if not self.layer_specs:
            raise InvalidArgumentError("layer_specs", self.layer_specs, "a spec for each layer")
        object.__setattr__(self, "layer_specs", dict(self.layer_specs))
        specs = list(self.layer_specs.values())
        for name, spec in self.layer_specs.items():
            require_instance(f"layer_specs[{name!r}]", spec, KVCacheSpec)
            if type(spec) is not type(specs[0]):
                raise InvalidArgumentError(
                    f"layer_specs[{name!r}]", spec, f"a {type(specs[0]).__name__} like the first"
                )
            if spec.tokens_per_block != self.tokens_per_block:
                field = f"layer_specs[{name!r}].tokens_per_block"
                expected = f"{self.tokens_per_block} like the whole group"
                raise InvalidArgumentError(field, spec.tokens_per_block, expected)
        if self.page_size_padded is not None:
            raise InvalidArgumentError(
                "page_size_padded", self.page_size_padded, "None: each layer has its own"
            )
        KVCacheSpec.__post_init__(self)

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block of all layers together, padding included."""
        return sum(spec.page_size_bytes for spec in self.layer_specs.values())

    @property
    def cache_tensors(self) -> tuple[CacheTensorForm, ...]:
        """The tensors of all layers, layer by layer."""
        return tuple(form for spec in self.layer_specs.values() for form in spec.cache_tensors)

    def for_layer(self, layer_name: str) -> KVCacheSpec:
        """Return the spec of one layer.

        Raises:
            InvalidArgumentError: The layer has no spec here.
        """
        if require_text("layer_name", layer_name) not in self.layer_specs:
            raise InvalidArgumentError("layer_name", layer_name, f"one of {list(self.layer_specs)}")
        return self.layer_specs[layer_name]


def _one_value(name: str, specs: Sequence[KVCacheSpec]) -> Any:
    values = {getattr(spec, name) for spec in specs} - {None}
    if len(values) > 1:
        raise SpecMergeError(name, [getattr(spec, name) for spec in specs])
    return next(iter(values), None)
