"""Fragment kernel: copies of many small fragments at once, by Triton."""

import importlib
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from math import isqrt
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvxfer.errors import BackendUnavailableError, DeviceError, InvalidArgumentError

logger = logging.getLogger(__name__)

# Measured on an H100 by `make bench NAME=copy`: 32 programs copy fragments of 4 to 16 KiB 1.1 to
# 1.7 times as fast as 16 do, and matrix products beside them take no longer (1.23 times as long as
# alone; 1.19 beside 12). 64 of one warp gain little more, and make that 1.45: see docs/gpu.md.
NUM_PROGRAMS, NUM_WARPS = 32, 4

# Triton's interpreter keeps the position in the grid, and its replacements of `triton.language`,
# in global variables.
_interpreting = threading.Lock()


class FragmentKernel:
    """Kernel that copies small fragments between device memory and pinned host memory.

    The kernel reads and writes host memory directly, at the host's own addresses, so a fragment
    costs no more than its bytes. Each fragment is copied by accesses of 16, 8, 4, 2 or 1 bytes,
    the widest that divides its addresses and its length; an odd fragment does not slow the others.
    The kernel is compiled here, which blocks for a second or so the first time, and never again,
    whatever the fragments are. On `cpu` Triton's interpreter runs it, slowly, on any memory.

    `BackendUnavailableError`: Triton is missing, or cannot compile or run the kernel.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        num_programs: int = NUM_PROGRAMS,
        num_warps: int = NUM_WARPS,
    ) -> None:
        if device.type != "cpu" and (device.type != "cuda" or device.index is None):
            raise InvalidArgumentError("device", str(device), "cpu, or cuda with an index")
        if num_programs < 1:
            raise InvalidArgumentError("num_programs", num_programs, "one program or more")
        if num_warps not in {1 << exponent for exponent in range(6)}:
            raise InvalidArgumentError("num_warps", num_warps, "a power of two, up to 32")
        self.device = device
        self.num_programs, self.num_warps = num_programs, num_warps
        try:
            self._module: Any = importlib.import_module("kvxfer.copy_engine.fragment_kernel")
        except ImportError as exc:
            raise BackendUnavailableError(
                f"Triton cannot be imported ({exc}); install triton, or copy without a kernel"
            ) from exc
        is_cpu = device.type == "cpu"
        self._kernel = self._module.interpret_kernel() if is_cpu else self._module.compile_kernel()
        try:
            # A run without fragments, so that slow or failing steps happen here.
            with _interpreting if is_cpu else torch.cuda.device(device):
                self._run((1, 1), 0, 0)
        except Exception as exc:
            raise BackendUnavailableError(
                f"Triton cannot run a kernel on {device} ({exc}); copy without a kernel"
            ) from exc

    def launch(self, table: NDArray[np.uint64], stream: int) -> None:
        """Enqueue the copies of a batch in a stream, and return before they are made.

        The caller owns the table and all memory that it names until the stream has passed this
        point. No byte may be both read and written, or written twice. On `cpu` the copies are
        made when this returns.

        The table is uint64 `(3, num_fragments)` in pinned memory: sources, destinations, bytes. A
        fragment may have no bytes, a batch no fragments. `DeviceError`: none of the copies is made.
        """
        if table.dtype != np.uint64 or table.ndim != 2 or len(table) != 3:
            raise InvalidArgumentError("table", f"{table.dtype} {table.shape}", "uint64 (3, n)")
        if not table.flags.c_contiguous:
            raise InvalidArgumentError("table", f"strides {table.strides}", "C-contiguous memory")
        if table.size:
            with self._on(stream):
                self._run(self._choose_grid(table[2]), table.ctypes.data, table.shape[1])

    def _choose_grid(self, lengths: NDArray[np.uint64]) -> tuple[int, int]:
        """Choose the rows of programs, and the programs that share each fragment.

        With more shares, a long fragment is done sooner, but every program visits more fragments
        that have no tile for it. The square root balances the two.
        """
        num_tiles = -(-int(lengths.max()) // (self.num_warps * self._module.WARP_BYTES))
        shares = isqrt(num_tiles * self.num_programs // len(lengths))
        shares = max(1, min(shares, num_tiles, self.num_programs))
        return min(len(lengths), self.num_programs // shares), shares

    @contextmanager
    def _on(self, stream: int) -> Iterator[None]:
        if self.device.type == "cpu":
            with _interpreting:
                yield
            return
        try:
            # Triton launches on torch's current stream of this thread.
            current = torch.cuda.ExternalStream(stream, self.device)  # type: ignore[no-untyped-call]
            with torch.cuda.stream(current):
                yield
        except RuntimeError as exc:
            raise DeviceError(self.device.index, "the launch of a kernel", str(exc)) from exc

    def _run(self, grid: tuple[int, int], table: int, num_fragments: int) -> None:
        options = {"num_warps": self.num_warps, **self._module.LAUNCH_OPTIONS}
        self._kernel[grid](table, num_fragments, num_threads=32 * self.num_warps, **options)


def open_kernel(device: torch.device) -> FragmentKernel | None:
    """Open the kernel of a device; if Triton cannot run it, log a warning and return None."""
    try:
        return FragmentKernel(device)
    except BackendUnavailableError as exc:
        logger.warning("small fragments will be copied slowly on %s: %s", device, exc)
        return None
