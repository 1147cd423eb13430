"""KV-cache configs: the number of blocks, the groups of layers, and tensors that layers share."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

import torch

from kvxfer.checks import (
    find_repeated,
    require_instance,
    require_instances,
    require_integer,
    require_positive,
    require_sequence,
    require_texts,
    set_counts,
)
from kvxfer.errors import InvalidArgumentError
from kvxfer.kvcache.spec import FullAttentionSpec, KVCacheSpec, KVQuantization


@dataclass(frozen=True, slots=True)
class KVCacheGroup:
    """Group of layers that share a block table.

    Attributes:
        spec: Spec of every layer, or a `UniformTypeKVCacheSpecs` with one spec per layer.
        layer_names: The layers, in the order in which their pages make up a block.
    """

    spec: KVCacheSpec
    layer_names: tuple[str, ...]

    def __post_init__(self) -> None:
        require_instance("spec", self.spec, KVCacheSpec)
        object.__setattr__(self, "layer_names", require_texts("layer_names", self.layer_names))
        if not self.layer_names or find_repeated(self.layer_names) is not None:
            raise InvalidArgumentError(
                "layer_names", self.layer_names, "at least one layer, each layer once"
            )
        for layer_name in self.layer_names:
            self.spec.for_layer(layer_name)


@dataclass(frozen=True, slots=True)
class KVCacheConfig:
    """One worker's KV cache as the engine planned it.

    Attributes:
        num_blocks: Blocks in the block pool, the null block included.
        groups: KV-cache groups; an index into them is the group index everywhere.
        shared_tensors: Layers whose bytes each shared tensor (position) holds; empty if unknown.
        shared_tensor_sizes_bytes: Bytes that the engine planned for each shared tensor; empty if
            unknown.
        null_block_id: Id of the null block, a placeholder that is never loaded into; None if the
            engine has none.

    Raises:
        InvalidArgumentError: A number, a layer or a tensor is invalid; the error names it.
    """

    num_blocks: int
    groups: tuple[KVCacheGroup, ...]
    shared_tensors: tuple[tuple[str, ...], ...] = field(default=())
    shared_tensor_sizes_bytes: tuple[int, ...] = field(default=())
    null_block_id: int | None = None

    def __post_init__(self) -> None:
        require_instances("groups", self.groups, KVCacheGroup, at_least_one=True)
        object.__setattr__(self, "groups", tuple(self.groups))
        require_sequence("shared_tensors", self.shared_tensors, "names of layers for each tensor")
        shared_tensors = tuple(
            require_texts(f"shared_tensors[{index}]", names)
            for index, names in enumerate(self.shared_tensors)
        )
        object.__setattr__(self, "shared_tensors", shared_tensors)
        set_counts(self, "num_blocks")
        if self.null_block_id is not None:
            null = require_integer("null_block_id", self.null_block_id, maximum=self.num_blocks - 1)
            object.__setattr__(self, "null_block_id", null)
        require_sequence("shared_tensor_sizes_bytes", self.shared_tensor_sizes_bytes)
        sizes = tuple(
            require_positive(f"shared_tensor_sizes_bytes[{index}]", size)
            for index, size in enumerate(self.shared_tensor_sizes_bytes)
        )
        object.__setattr__(self, "shared_tensor_sizes_bytes", sizes)
        names = self.layer_names
        if (repeated := find_repeated(names)) is not None:
            raise InvalidArgumentError("groups", repeated, "each layer in one group only")
        shared = [name for names in self.shared_tensors for name in names]
        if unknown := set(shared).difference(names):
            name = next(name for name in shared if name in unknown)
            raise InvalidArgumentError("shared_tensors", name, "a layer of one of the groups")
        if (repeated := find_repeated(shared)) is not None:
            raise InvalidArgumentError("shared_tensors", repeated, "each layer at most once")
        if sizes and len(sizes) != len(self.shared_tensors):
            expected = f"one size for each of {len(self.shared_tensors)} shared tensors"
            raise InvalidArgumentError("shared_tensor_sizes_bytes", sizes, expected)

    @classmethod
    def uniform(
        cls,
        num_blocks: int,
        layer_names: Sequence[str] | Mapping[str, object],
        *,
        tokens_per_block: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        head_dim_v: int | None = None,
        quantization: KVQuantization = KVQuantization.NONE,
        null_block_id: int | None = None,
    ) -> Self:
        """Describe the one-group cache of a model whose layers all have the same full attention.

        Args:
            num_blocks: Blocks in the block pool, the null block included.
            layer_names: The layers, in the order in which their pages make up a block; or the
                mapping from layers to tensors that `canonicalize` takes.
            tokens_per_block: Tokens of a block.
            num_kv_heads: KV heads on this worker; see `AttentionSpec`.
            head_dim: Width of a key.
            dtype: Type of the cached elements.
            head_dim_v: Width of a value; `head_dim` unless given.
            quantization: How the elements are scaled.
            null_block_id: Id of the null block; None if the engine has none.

        Raises:
            InvalidArgumentError: A number or a layer is invalid; the error names it.
        """
        spec = FullAttentionSpec(
            tokens_per_block=tokens_per_block,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            dtype=dtype,
            head_dim_v=head_dim_v,
            quantization=quantization,
        )
        names = [*layer_names] if isinstance(layer_names, Mapping) else layer_names
        group = KVCacheGroup(spec, require_texts("layer_names", names))
        return cls(num_blocks, (group,), null_block_id=null_block_id)

    @property
    def layer_names(self) -> tuple[str, ...]:
        """Every layer, group by group."""
        return tuple(name for group in self.groups for name in group.layer_names)

    @property
    def layer_positions(self) -> tuple[tuple[str, ...], ...]:
        """Layers at each position of a block: one each in a single group without shared tensors."""
        if self.shared_tensors or len(self.groups) > 1:
            return self.shared_tensors
        return tuple((name,) for name in self.layer_names)
