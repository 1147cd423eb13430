"""How vLLM's CPU attention arranges the keys and the values of a block: as data.

In the cache of a layer, `(num_blocks, num_kv_heads, tokens_per_block, 2 * head_dim)`, a head of a
block is a plane of keys and then a plane of values, whatever the last dimension says. What order
each plane has is the kernel's business, which vLLM picks by an instruction set. Only orders that
were measured are told here; any other plane is bytes without a meaning.
"""

import inspect
import platform
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

TOKEN_UNITS = {"vec": 32, "vec16": 16, "amx": 32}
"""Measured instruction sets, and what a block has to be a multiple of for their kernel."""
MEASURED_ITEMSIZES = {"vec": (2, 4), "vec16": (2, 4), "amx": (2,)}
"""float16, bfloat16 and float32 are copied bit by bit; eight bits are quantized on the way."""
AMX_ROWS, AMX_PAIR = 16, 2
"""Rows of a tile, and the elements of two bytes in each of its columns.

Source: https://github.com/vllm-project/vllm, `csrc/cpu/cpu_attn_amx.hpp`, `AMX_TILE_ROW_NUM` and
`reshape_and_cache`.
"""
KERNEL_FEATURES = ("avx512", "avx512_bf16", "amx_tile")
"""What vLLM picks a build of its kernels by, and an instruction set among those of the build.

Source: https://github.com/vllm-project/vllm, `vllm/platforms/cpu.py`, `import_kernels`, and
`vllm/v1/attention/backends/cpu_attn.py`, `_get_attn_isa`.
"""
ISA_QUESTION = ("dtype", "block_size", "head_size", "kv_cache_dtype")
"""What vLLM 0.22 to 0.33 derives the instruction set from; a new parameter is a new rule."""


@dataclass(frozen=True, slots=True)
class PackedPlane:
    """The order in memory of the keys, or of the values, of one head in one block.

    An element's token is the sum of value times step over the digits `token`, and so is its
    dimension; its place is what the values of all digits count, the last one fastest.

    Attributes:
        digits: Axis, step and size of each, outermost first; an axis is `token` or `dim`.
    """

    digits: tuple[tuple[str, int, int], ...]

    def elements(self) -> npt.NDArray[np.int64]:
        """Token and dimension of each place, in order of memory: `(places, 2)`."""
        elements = np.zeros((1, 2), np.int64)
        for axis, step, size in self.digits:
            values = np.zeros((size, 2), np.int64)
            values[:, ("token", "dim").index(axis)] = np.arange(size) * step
            elements = (elements[:, None] + values).reshape(-1, 2)
        return elements

    @property
    def has_rows(self) -> bool:
        """Whether elements that are neighbours along one axis lie next to each other."""
        return len(self.digits) == len({axis for axis, _, _ in self.digits})


def cpu_packing(
    isa: str, *, tokens_per_block: int, head_dim: int, itemsize: int
) -> tuple[PackedPlane, PackedPlane] | None:
    """Say how the keys and the values of one head lie in a block of the CPU attention.

    The same instruction set is compiled several times, for AVX2, AVX-512 and other processors:
    `kernel_packs_as` proves the answer for the kernel of this process.

    Args:
        isa: Instruction set, as vLLM names it.
        tokens_per_block: Of the kernel's blocks: of the tensor, not of the block table.
        head_dim: Elements of a key, and of a value.
        itemsize: Bytes of an element of the cache.

    Returns:
        The plane of keys and the plane of values; None where the order is not known.
    """
    unit = TOKEN_UNITS.get(isa)
    if unit is None or itemsize not in MEASURED_ITEMSIZES[isa] or tokens_per_block % unit:
        return None
    if isa == "amx":
        return _amx_packing(tokens_per_block, head_dim)
    token, dim = ("token", 1, tokens_per_block), ("dim", 1, head_dim)
    return PackedPlane((dim, token)), PackedPlane((token, dim))


def _amx_packing(tokens_per_block: int, head_dim: int) -> tuple[PackedPlane, PackedPlane] | None:
    """Tiles of what is multiplied: pairs along the axis that is summed over, 16 of the other."""
    if head_dim % (AMX_ROWS * AMX_PAIR):
        return None

    def tiles(rows: tuple[str, int], summed: tuple[str, int]) -> PackedPlane:
        return PackedPlane(
            (
                (rows[0], AMX_ROWS, rows[1] // AMX_ROWS),
                (summed[0], AMX_PAIR, summed[1] // AMX_PAIR),
                (rows[0], 1, AMX_ROWS),
                (summed[0], 1, AMX_PAIR),
            )
        )

    token, dim = ("token", tokens_per_block), ("dim", head_dim)
    return tiles(token, dim), tiles(dim, token)


def cpu_kernels() -> str:
    """What this processor has of that by which vLLM picks its kernels.

    `torch.backends.cpu.get_cpu_capability()` is something else: it knows of no AMX, and
    `ATEN_CPU_CAPABILITY` lowers it, which changes none of vLLM's kernels.
    """
    found = (
        name for name in KERNEL_FEATURES if getattr(torch.cpu, f"_is_{name}_supported", bool)()
    )
    return " ".join((platform.machine(), *found))


def cpu_attention_isa(
    *, dtype: torch.dtype, tokens_per_block: int, head_dim: int, kv_cache_dtype: str = "auto"
) -> str | None:
    """Ask vLLM which instruction set its CPU attention uses on this machine.

    It is told of a layer whose backend is `CPU_ATTN`, and of no other one.

    Args:
        dtype: Of the model.
        tokens_per_block: Of the kernel's blocks.
        head_dim: Elements of a key, and of a value.
        kv_cache_dtype: As in vLLM's `CacheConfig.cache_dtype`.

    Returns:
        vLLM's name of it. None where this vLLM runs on something else than a CPU, refuses such a
        cache, or does not tell in the way that is known here.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return None
    from vllm.v1.attention.backends import cpu_attn

    ask = getattr(cpu_attn, "_get_attn_isa", None)
    if ask is None or tuple(inspect.signature(ask).parameters) != ISA_QUESTION:
        return None
    try:
        return str(ask(dtype, tokens_per_block, head_dim, kv_cache_dtype))
    except NotImplementedError:
        return None


def kernel_packs_as(planes: tuple[PackedPlane, PackedPlane], isa: str, dtype: torch.dtype) -> bool:
    """Try whether the kernel of this process packs as `planes` say.

    It is given a block of memory of its own, in which no two keys or values are alike.

    Args:
        planes: What `cpu_packing` says.
        isa: Instruction set that the kernel is to use.
        dtype: Of the cache.

    Returns:
        Whether every element was in its place, bit by bit.

    Raises:
        RuntimeError: The kernel has no such instruction set or head dimension.
    """
    from vllm import _custom_ops

    orders = [plane.elements() for plane in planes]
    tokens, head_dim = (int(size) for size in orders[0].max(axis=0) + 1)
    ids = torch.arange(1, 2 * tokens * head_dim + 1, dtype=torch.int32)  # zero: not written
    as_int = torch.int16 if dtype.itemsize == 2 else torch.int32
    for patterns in ids.view(as_int).reshape(2, tokens, head_dim, -1).unbind(-1):
        expected = [part[*order.T] for part, order in zip(patterns, orders, strict=True)]
        key, value = patterns.contiguous().view(dtype).unsqueeze(2)
        cache = torch.zeros(1, 1, 2 * tokens, head_dim, dtype=dtype)
        key_cache, value_cache = cache.chunk(2, dim=2)
        slots = torch.arange(tokens)
        _custom_ops.cpu_attn_reshape_and_cache(key, value, key_cache, value_cache, slots, isa)
        if not torch.equal(cache.view(as_int).flatten(), torch.cat(expected)):
            return False
    return True
