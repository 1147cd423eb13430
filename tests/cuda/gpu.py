"""Access of tests to memory of a GPU."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from cuda.bindings import driver
from numpy.typing import NDArray


class Gpu:
    """GPU memory for tests: allocated, read and written through the driver, plainly and slowly."""

    def __init__(self) -> None:
        self._allocated: list[tuple[int, int]] = []
        self._pinned: list[int] = []
        self._call("cuInit", 0)
        self._contexts = [
            self._call("cuDevicePrimaryCtxRetain", index)
            for index in range(self._call("cuDeviceGetCount"))
        ]

    def release(self) -> None:
        for device_index, address in self._allocated:
            with self._current(device_index):
                self._call("cuMemFree", address)
        self._allocated.clear()
        with self._current(0):
            for address in self._pinned:
                self._call("cuMemFreeHost", address)
        self._pinned.clear()

    def allocate(self, num_bytes: int, *, device_index: int = 0) -> int:
        """Allocate memory of a device, filled with zeros; return its address."""
        with self._current(device_index):
            address = int(self._call("cuMemAlloc", num_bytes))
        self._allocated.append((device_index, address))
        self.write(address, bytes(num_bytes))
        return address

    def allocate_pinned(self, num_bytes: int) -> NDArray[np.uint8]:
        """Allocate host memory that the driver has pinned, as torch does."""
        with self._current(0):
            address = int(self._call("cuMemHostAlloc", num_bytes, 0))
        self._pinned.append(address)
        return np.frombuffer(
            memoryview((ctypes.c_char * num_bytes).from_address(address)), np.uint8
        )

    def write(self, address: int, data: bytes) -> None:
        with self._current(0):
            self._call("cuMemcpyHtoD", address, data, len(data))

    def read(self, address: int, num_bytes: int) -> bytes:
        data = bytearray(num_bytes)
        with self._current(0):
            self._call("cuMemcpyDtoH", data, address, num_bytes)
        return bytes(data)

    @contextmanager
    def _current(self, device_index: int) -> Iterator[None]:
        self._call("cuCtxPushCurrent", self._contexts[device_index])
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent")

    def _call(self, name: str, *args: Any) -> Any:
        result, *values = getattr(driver, name)(*args)
        assert result == driver.CUresult.CUDA_SUCCESS, f"{name}: {result}"
        return values[0] if values else None
