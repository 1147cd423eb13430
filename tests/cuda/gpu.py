"""Access of tests to memory of a GPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from cuda.bindings import driver


class Gpu:
    """GPU memory for tests: allocated, read and written through the driver, plainly and slowly."""

    def __init__(self) -> None:
        self._allocated: list[tuple[int, int]] = []
        self._call("cuInit", 0)
        self._contexts = [
            self._call("cuDevicePrimaryCtxRetain", index)
            for index in range(self._call("cuDeviceGetCount"))
        ]

    def release(self) -> None:
        """Free all allocations."""
        for device_index, address in self._allocated:
            with self._current(device_index):
                self._call("cuMemFree", address)
        self._allocated.clear()

    def allocate(self, num_bytes: int, *, device_index: int = 0) -> int:
        """Allocate memory of a device, filled with zeros; return its address."""
        with self._current(device_index):
            address = int(self._call("cuMemAlloc", num_bytes))
        self._allocated.append((device_index, address))
        self.write(address, bytes(num_bytes))
        return address

    def write(self, address: int, data: bytes) -> None:
        """Write memory of a device."""
        with self._current(0):
            self._call("cuMemcpyHtoD", address, data, len(data))

    def read(self, address: int, num_bytes: int) -> bytes:
        """Read memory of a device."""
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
