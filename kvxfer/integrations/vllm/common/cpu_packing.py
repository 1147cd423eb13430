"""CPU packing: the order of keys and values within a block of vLLM's CPU attention, as data.

In the cache of a layer, `(num_blocks, num_kv_heads, tokens_per_block, 2 * head_dim)`, each head of
a block is a plane of keys followed by a plane of values, despite the shape. The order within a
plane depends on the kernel, which vLLM picks by instruction set. Only measured orders are listed
here; any other plane is opaque bytes.
"""

import inspect
import platform
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

MEASURED = {"vec": (32, (2, 4)), "vec16": (16, (2, 4)), "amx": (32, (2,))}
"""Measured instruction sets: the number that `tokens_per_block` must be a multiple of, and the
sizes of elements that kernels copy bit for bit. They quantize elements of one byte."""
AMX_ROWS, AMX_PAIR = 16, 2
"""Rows of a tile, and the two-byte elements in each of its columns.

Source: https://github.com/vllm-project/vllm, `csrc/cpu/cpu_attn_amx.hpp`, `AMX_TILE_ROW_NUM` and
`reshape_and_cache`.
"""
KERNEL_FEATURES = ("avx512", "avx512_bf16", "amx_tile")
"""Features of a processor by which vLLM picks a build of its kernels and an instruction set.

Source: https://github.com/vllm-project/vllm, `vllm/platforms/cpu.py`, `import_kernels`, and
`vllm/v1/attention/backends/cpu_attn.py`, `_get_attn_isa`.
"""
ISA_QUESTION = ("dtype", "block_size", "head_size", "kv_cache_dtype")
"""Parameters by which vLLM chooses an instruction set, 0.22 to 0.33; a new one means a new rule."""


@dataclass(frozen=True, slots=True)
class PackedPlane:
    """Order in memory of the keys, or of the values, of one head in one block.

    The values of all digits form an element's place, a number whose last digit changes fastest. Its
    token is the sum of value times step over the `token` digits; likewise its dimension.
    """

    digits: tuple[tuple[str, int, int], ...]  # axis (`token` or `dim`), step, size; outermost first

    def elements(self) -> npt.NDArray[np.int64]:
        """List the token and the dimension of each place, in memory order: `(num_places, 2)`."""
        elements = np.zeros((1, 2), np.int64)
        for axis, step, size in self.digits:
            values = np.zeros((size, 2), np.int64)
            values[:, ("token", "dim").index(axis)] = np.arange(size) * step
            elements = (elements[:, None] + values).reshape(-1, 2)
        return elements

    @property
    def has_rows(self) -> bool:
        """Whether each axis is one digit, so that neighbours along the last axis are adjacent."""
        return len(self.digits) == len({axis for axis, _, _ in self.digits})


def cpu_packing(
    isa: str, *, tokens_per_block: int, head_dim: int, itemsize: int
) -> tuple[PackedPlane, PackedPlane] | None:
    """Return the planes of keys and of values of one head in a block; None if they are not known.

    vLLM compiles an instruction set several times, for AVX2, AVX-512 and other processors;
    `kernel_packs_as` proves the answer for the kernel of this process. `tokens_per_block` is that
    of the tensor, not of the block table.
    """
    unit, itemsizes = MEASURED.get(isa, (1, ()))
    if itemsize not in itemsizes or tokens_per_block % unit:
        return None
    if isa == "amx":
        return _amx_packing(tokens_per_block, head_dim)
    token, dim = ("token", 1, tokens_per_block), ("dim", 1, head_dim)
    return PackedPlane((dim, token)), PackedPlane((token, dim))


def _amx_packing(tokens_per_block: int, head_dim: int) -> tuple[PackedPlane, PackedPlane] | None:
    """Return the order of AMX tiles: pairs along the summed axis, 16 rows along the other."""
    if head_dim % (AMX_ROWS * AMX_PAIR):
        return None

    def tiles(rows: tuple[str, int], summed: tuple[str, int]) -> PackedPlane:
        of_rows = (rows[0], AMX_ROWS, rows[1] // AMX_ROWS)
        of_pairs = (summed[0], AMX_PAIR, summed[1] // AMX_PAIR)
        return PackedPlane((of_rows, of_pairs, (rows[0], 1, AMX_ROWS), (summed[0], 1, AMX_PAIR)))

    token, dim = ("token", tokens_per_block), ("dim", head_dim)
    return tiles(token, dim), tiles(dim, token)


def is_cpu() -> bool:
    """Whether vLLM runs on a CPU."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def cpu_kernels() -> str:
    """Name the features of this processor by which vLLM picks its kernels.

    `torch.backends.cpu.get_cpu_capability()` does not answer this: it has no name for AMX, and
    `ATEN_CPU_CAPABILITY` lowers it without affecting vLLM's kernels.
    """
    found = (
        name for name in KERNEL_FEATURES if getattr(torch.cpu, f"_is_{name}_supported", bool)()
    )
    return " ".join((platform.machine(), *found))


def cpu_attention_isa(
    *, dtype: torch.dtype, tokens_per_block: int, head_dim: int, kv_cache_dtype: str = "auto"
) -> str | None:
    """Ask vLLM which instruction set its `CPU_ATTN` uses on this machine.

    None if vLLM does not run on a CPU, refuses such a cache, or chooses by other parameters.
    """
    if not is_cpu():
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
    """Test whether the kernel of this process packs keys and values in the order of `planes`.

    The kernel writes distinct keys and values to a scratch block, where every element must be in
    its place, bit for bit. A kernel without this instruction set or head dimension raises.
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
