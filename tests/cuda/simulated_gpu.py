"""A GPU for machines without one: NVIDIA's bindings over a driver that tests can steer."""

import ctypes
import importlib.metadata
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from cuda.bindings import driver

SOURCE = Path(__file__).with_name("simulated_driver.c")
NAME = "libcuda.so.1"
DEFAULTS = {
    "version": 13000,
    "numa_node": -1,
    "can_use_host_pointer": 1,
    "bytes_that_may_be_registered": 1 << 60,
    "delay_us": 0,
    "paused": 0,
}


def build(folder: Path) -> Path:
    """Compile the driver against NVIDIA's header, as the library that programs look for."""
    headers = importlib.metadata.files("nvidia-cuda-runtime") or []
    (header,) = (file for file in headers if file.name == "cuda.h")
    library = folder / NAME
    flags = ["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread"]
    include = f"-I{Path(str(header.locate())).parent}"
    command = ["gcc", *flags, f"-Wl,-soname,{NAME}"]
    subprocess.run([*command, include, "-o", library, SOURCE], check=True)
    return library


class SimulatedGpu:
    """Steers the simulated driver, and reaches the memory of its devices as nobody else can."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        self._library.sim_get.restype = ctypes.c_ulong
        self._allocated: list[tuple[int, int]] = []

    def set(self, name: str, value: int) -> None:
        """Change how the driver behaves; see `sim_set`."""
        self._library.sim_set(name.encode(), ctypes.c_long(value))

    def get(self, name: str) -> int:
        """What the driver counted; see `sim_get`."""
        return int(self._library.sim_get(name.encode()))

    def wait_for_more(self, name: str, than: int) -> None:
        """Block until the driver counted more than that."""
        while self.get(name) <= than:
            pass

    def reset(self) -> None:
        """Free what was allocated and behave well again."""
        for name, value in DEFAULTS.items():
            self.set(name, value)
        for device_index in (0, 1):
            self.set("found", device_index)
        for device_index, address in self._allocated:
            with self._current(device_index):
                self._call("cuMemFree", address)
        self._allocated.clear()

    def allocate(self, num_bytes: int, *, device_index: int = 0) -> int:
        """Memory of a device, filled with zeros; its address."""
        with self._current(device_index):
            address = int(self._call("cuMemAlloc", num_bytes))
        self._allocated.append((device_index, address))
        return address

    def write(self, address: int, data: bytes) -> None:
        """Change the memory of a device."""
        with self._current(0):
            self._call("cuMemcpyHtoD", address, data, len(data))

    def read(self, address: int, num_bytes: int) -> bytes:
        """What is in the memory of a device."""
        data = bytearray(num_bytes)
        with self._current(0):
            self._call("cuMemcpyDtoH", data, address, num_bytes)
        return bytes(data)

    def tensor(self, *shape: int, dtype: torch.dtype, device_index: int = 0) -> torch.Tensor:
        """A tensor of device memory, filled with zeros: to read an element kills the process."""
        num_elements = int(torch.Size(shape).numel())
        address = self.allocate(num_elements * dtype.itemsize, device_index=device_index)
        memory = (ctypes.c_char * (num_elements * dtype.itemsize)).from_address(address)
        flat = torch.frombuffer(memory, dtype=dtype)
        return say_on_device(flat.view(shape), device_index)

    @contextmanager
    def _current(self, device_index: int) -> Iterator[None]:
        context = self._call("cuDevicePrimaryCtxRetain", device_index)
        self._call("cuCtxPushCurrent", context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent")
            self._call("cuDevicePrimaryCtxRelease", device_index)

    def _call(self, name: str, *args: Any) -> Any:
        result, *values = getattr(driver, name)(*args)
        assert result == driver.CUresult.CUDA_SUCCESS, f"{name}: {result}"
        return values[0] if values else None


def say_on_device(tensor: torch.Tensor, device_index: int) -> torch.Tensor:
    """The same tensor, which says that its memory is that of a GPU."""
    return tensor.as_subclass((_TensorOfDevice0, _TensorOfDevice1)[device_index])


class _TensorOfDevice0(torch.Tensor):
    """What a build of torch without CUDA cannot make: a tensor that says it is on a GPU."""

    device = torch.device("cuda", 0)


class _TensorOfDevice1(torch.Tensor):
    device = torch.device("cuda", 1)
