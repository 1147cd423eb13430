"""FragmentKernel against a loop over slices, in Triton's interpreter, and its compiled code."""

import itertools
import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kvxfer.copy_engine.triton import NUM_WARPS, FragmentKernel, open_kernel
from kvxfer.errors import BackendUnavailableError, DeviceError, InvalidArgumentError
from tests.copy_engine.test_cpu import Copy, Side

pytest.importorskip("triton", reason="needs triton, which CUDA builds of torch bring along")

CPU = torch.device("cpu")
TILE_BYTES = 4096
NO_STREAM = 0


def lay_out(
    lengths: Sequence[int], residues: Sequence[int], generator: np.random.Generator
) -> Side:
    """Lay fragments out in random bytes, in any order, at residues modulo 16, with gaps."""
    starts = [0] * len(lengths)
    position = 32
    for index in generator.permutation(len(lengths)).tolist():
        starts[index] = position + residues[index]
        position = -(-(starts[index] + lengths[index]) // 16) * 16 + 16
    memory = generator.integers(0, 256, position + 32, np.uint8)
    aligned = -memory.ctypes.data % 16
    return Side(memory[aligned : aligned + position], starts)


def make_copy(lengths: Sequence[int], from_: Sequence[int], to: Sequence[int]) -> Copy:
    generator = np.random.default_rng(0)
    source, destination = (lay_out(lengths, side, generator) for side in (from_, to))
    return Copy(source, destination, list(lengths))


def aligned_copy(lengths: Sequence[int]) -> Copy:
    return make_copy(lengths, [0] * len(lengths), [0] * len(lengths))


def make_table(copy: Copy) -> NDArray[np.uint64]:
    lengths = np.array(copy.lengths, np.uint64)
    return np.stack([copy.source.addresses, copy.destination.addresses, lengths])


def check(copy: Copy, *, num_programs: int = 4, num_warps: int = NUM_WARPS) -> None:
    """Copy it, and compare every byte of both buffers, those between the fragments included."""
    kernel = FragmentKernel(CPU, num_programs=num_programs, num_warps=num_warps)
    copy.check(lambda: kernel.launch(make_table(copy), NO_STREAM))


LENGTHS = [*range(1, 34), 255, 256, 257, 511, 512, 513, 1023, 2047, 2048, 2049, 4095, 6000]


@pytest.mark.parametrize(("num_programs", "num_warps"), [(1, 1), (7, 4), (128, 1)])
def test_every_length_is_copied_by_any_number_of_programs(
    num_programs: int, num_warps: int
) -> None:
    tile = num_warps * TILE_BYTES
    about_tiles = [count * tile + excess for count in (1, 2, 5) for excess in (-16, 0, 16)]
    check(
        aligned_copy([*LENGTHS, *about_tiles, 64, 20 * tile, 64, 0]),
        num_programs=num_programs,
        num_warps=num_warps,
    )
    check(aligned_copy([0, 0]))
    FragmentKernel(CPU).launch(np.empty((3, 0), np.uint64), NO_STREAM)


def test_every_alignment_of_either_side_is_copied() -> None:
    from_, to = np.divmod(np.arange(256), 16)
    lengths = np.random.default_rng(1).integers(1, 2 * TILE_BYTES, 256)
    check(make_copy(lengths.tolist(), from_.tolist(), to.tolist()))


@pytest.fixture
def store_widths(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Collect the bytes of stores of single threads; check that each access is aligned.

    An unaligned access stops a GPU for good, but a CPU does not notice it.
    """
    from triton.runtime.interpreter import InterpreterBuilder

    widths: set[int] = set()
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def width_of(pointers: Any, mask: Any) -> int:
        word_bytes: int = pointers.get_element_ty().primitive_bitwidth // 8
        words = 2 if pointers.data.size == 16 * 32 * NUM_WARPS else 1  # to a thread and access
        made = np.broadcast_to(mask.data, pointers.data.shape)
        assert np.array_equal(made[::words], made[words - 1 :: words])
        assert not (pointers.data[::words][made[::words]] % (words * word_bytes)).any()
        return words * word_bytes

    def checked_load(builder: Any, pointers: Any, mask: Any, *others: Any) -> Any:
        width_of(pointers, mask)
        return load(builder, pointers, mask, *others)

    def checked_store(builder: Any, pointers: Any, value: Any, mask: Any, *others: Any) -> Any:
        widths.add(width_of(pointers, mask))
        return store(builder, pointers, value, mask, *others)

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", checked_load)
    monkeypatch.setattr(InterpreterBuilder, "create_masked_store", checked_store)
    return widths


@pytest.mark.parametrize("num_bytes", [160, 200, 207])
def test_accesses_are_as_wide_as_addresses_and_length_allow(
    store_widths: set[int], num_bytes: int
) -> None:
    for from_, to in itertools.product([0, 1, 4, 8, 12], repeat=2):
        store_widths.clear()
        check(make_copy([num_bytes], [from_], [to]))
        bits = 16 | from_ | to | num_bytes
        assert store_widths == {bits & -bits}


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        *(
            (lambda table=table: FragmentKernel(CPU).launch(table, NO_STREAM), "table")
            for table in (
                np.zeros((3, 4), np.int64),
                np.zeros((2, 4), np.uint64),
                np.zeros(12, np.uint64),
                np.zeros((4, 3), np.uint64).T,
                np.zeros((3, 8), np.uint64)[:, :4],
            )
        ),
        (lambda: FragmentKernel(torch.device("meta")), "device"),
        (lambda: FragmentKernel(torch.device("cuda")), "device"),
        (lambda: FragmentKernel(CPU, num_programs=0), "num_programs"),
        (lambda: FragmentKernel(CPU, num_warps=3), "num_warps"),
    ],
)
def test_what_cannot_be_launched_is_refused(call: Callable[[], object], argument: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        call()
    assert caught.value.argument == argument


def test_a_missing_triton_is_said_and_done_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delitem(sys.modules, "kvxfer.copy_engine.fragment_kernel", raising=False)
    monkeypatch.setitem(sys.modules, "triton.language", None)
    with pytest.raises(BackendUnavailableError, match="install triton"):
        FragmentKernel(CPU)
    with caplog.at_level(logging.WARNING):
        assert open_kernel(CPU) is None
    assert "small fragments will be copied slowly on cpu" in caplog.text


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_missing_device_is_found_when_the_kernel_is_opened() -> None:
    with pytest.raises(BackendUnavailableError, match="cuda:0"):
        FragmentKernel(torch.device("cuda", 0))


def test_a_launch_that_the_driver_refuses_is_an_error_of_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*args: object, **kwargs: object) -> NoReturn:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    kernel = FragmentKernel(CPU)
    kernel.device = torch.device("cuda", 3)
    monkeypatch.setattr(torch.cuda, "ExternalStream", refuse)
    with pytest.raises(DeviceError, match="illegal memory access") as caught:
        kernel.launch(make_table(aligned_copy([16])), NO_STREAM)
    assert caught.value.device_index == 3
