"""Triton kernel of `FragmentKernel`; importing this module imports Triton."""

from typing import Any

import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

WARP_BYTES = 4096
"""Bytes that one warp moves at a time if addresses and lengths are multiples of 16: eight accesses
by each of its 32 threads."""

LAUNCH_OPTIONS = {"enable_fp_fusion": False}
"""Compile options; Triton warns unless one of them is about floating point."""


def compile_kernel() -> Any:
    """Make the kernel for GPUs, compiled once for each device that it is launched on."""
    # By default Triton compiles again for counts of one, for multiples of 16, and for others.
    return JITFunction(copy_fragments, do_not_specialize=["table", "num_fragments"])


def interpret_kernel() -> Any:
    """Make the kernel for the CPU, run by Triton's interpreter without `TRITON_INTERPRET`."""
    return InterpretedFunction(copy_fragments)


def copy_fragments(table: tl.int64, num_fragments: tl.int32, num_threads: tl.constexpr) -> None:
    """Copy every fragment of a table; runs as a grid of `(rows, shares)` programs.

    Each row of programs takes every `rows`-th fragment, and each program of the row every
    `shares`-th tile of that fragment. Only builtins of `triton.language` are called: its standard
    library, e.g. `tl.cdiv`, is interpreted only with `TRITON_INTERPRET` in the environment.

    Args:
        table: Address of int64 `(3, num_fragments)`: sources, destinations, bytes.
        num_fragments: Columns of the table; may be 0.
        num_threads: Threads of a program.
    """
    # The interpreter gives an integer only as many bits as its value needs.
    sources = table.to(tl.int64).to(tl.pointer_type(tl.int64))
    destinations = sources + num_fragments
    lengths = destinations + num_fragments
    for index in range(tl.program_id(0), num_fragments, tl.num_programs(0)):
        source = tl.load(sources + index)
        destination = tl.load(destinations + index)
        length = tl.load(lengths + index)
        # The lowest bit set in any of the three is the largest power of two that divides them all.
        bits = source | destination | length
        widest = tl.minimum(bits & -bits, 16)
        for exponent in tl.static_range(5):
            if widest == 1 << exponent:
                # Triton has no type of 16 bytes: a thread takes two words of 8 at once.
                word = (tl.int8, tl.int16, tl.int32, tl.int64, tl.int64)[exponent]
                words_per_access = 2 if exponent == 4 else 1
                # Eight accesses of each thread are under way at a time.
                words_per_tile = 8 * num_threads * words_per_access
                words = tl.arange(0, (16 if exponent == 4 else 8) * num_threads)
                # This hint makes the accesses wide. It sticks to the value that it is given for:
                # on `source` it would hold for every width.
                from_ = tl.multiple_of(source.to(tl.pointer_type(word)), 1 << exponent)
                to = tl.multiple_of(destination.to(tl.pointer_type(word)), 1 << exponent)
                num_words = (length >> exponent) * words_per_access
                first = tl.program_id(1) * words_per_tile
                for start in range(first, num_words, tl.num_programs(1) * words_per_tile):
                    mine = start + words < num_words
                    values = tl.load(from_ + start + words, mask=mine)
                    tl.store(to + start + words, values, mask=mine)
