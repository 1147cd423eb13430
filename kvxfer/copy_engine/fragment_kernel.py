"""The kernel behind `FragmentKernel`; importing this module imports Triton."""

from typing import Any

import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

TILE_BYTES = 4096
"""What one program moves at a time where everything is a multiple of 16 bytes."""

LAUNCH_OPTIONS = {"num_warps": 1, "enable_fp_fusion": False}
"""How it is compiled; Triton warns where nothing is said about floating point."""


def compile_kernel() -> Any:
    """The kernel for the device that is current when it is launched, compiled once for each."""
    # Otherwise Triton compiles anew for counts of one, for multiples of 16, and for the others.
    return JITFunction(copy_fragments, do_not_specialize=["table", "num_fragments"])


def interpret_kernel() -> Any:
    """The kernel for the CPU, run by Triton's interpreter, whatever the environment says."""
    return InterpretedFunction(copy_fragments)


def copy_fragments(table: tl.int64, num_fragments: tl.int32) -> None:
    """Copy every fragment of a table; runs as a grid of `(rows, shares)` programs of one warp.

    Each row of programs takes every `rows`-th fragment, and each program of the row every
    `shares`-th tile of that fragment. Only builtins of `triton.language` are called: its
    standard library, `tl.cdiv` for one, is interpreted only where the environment says so.

    Args:
        table: Address of int64 `(3, num_fragments)`: sources, destinations, bytes.
        num_fragments: Columns of the table; may be 0.
    """
    # The interpreter takes an integer for as many bits as its value needs.
    sources = table.to(tl.int64).to(tl.pointer_type(tl.int64))
    destinations = sources + num_fragments
    lengths = destinations + num_fragments
    for index in range(tl.program_id(0), num_fragments, tl.num_programs(0)):
        source = tl.load(sources + index)
        destination = tl.load(destinations + index)
        length = tl.load(lengths + index)
        # The lowest bit that is set in any of the three is what all of them are multiples of.
        bits = source | destination | length
        widest = tl.minimum(bits & -bits, 16)
        for exponent in tl.static_range(5):
            if widest == 1 << exponent:
                # Triton has no type of 16 bytes: a thread takes two words of 8 at once.
                word = (tl.int8, tl.int16, tl.int32, tl.int64, tl.int64)[exponent]
                words_per_access = 2 if exponent == 4 else 1
                # Eight accesses of each thread are under way at a time.
                words_per_tile = 256 * words_per_access
                words = tl.arange(0, 512 if exponent == 4 else 256)
                # The hint is what makes the accesses wide. It sticks to the operation that it is
                # given: on `source` it would be believed for every width.
                from_ = tl.multiple_of(source.to(tl.pointer_type(word)), 1 << exponent)
                to = tl.multiple_of(destination.to(tl.pointer_type(word)), 1 << exponent)
                num_words = (length >> exponent) * words_per_access
                first = tl.program_id(1) * words_per_tile
                for start in range(first, num_words, tl.num_programs(1) * words_per_tile):
                    mine = start + words < num_words
                    values = tl.load(from_ + start + words, mask=mine)
                    tl.store(to + start + words, values, mask=mine)
