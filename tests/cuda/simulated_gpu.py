"""Simulated GPU for machines without one: NVIDIA's bindings over a driver that tests control."""

import ctypes
import importlib.metadata
import subprocess
from pathlib import Path

import torch

from tests.cuda.gpu import Gpu

SOURCE = Path(__file__).with_name("simulated_driver.c")
NAME = "libcuda.so.1"
COUNTS = ("num_contexts", "num_live_streams", "num_live_events", "registered_bytes")
DEFAULTS = {
    "version": 13000,
    "numa_node": -1,
    "bytes_that_may_be_registered": 1 << 60,
    "delay_us": 0,
    "paused": 0,
    "refuse_records": 0,
    "strange_result": 0,
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


class SimulatedGpu(Gpu):
    """Control of the simulated driver, with access to the memory of its devices."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        self._library.sim_get.restype = ctypes.c_ulong
        super().__init__()

    def set(self, name: str, value: int) -> None:
        """Change how the driver behaves; see `sim_set`."""
        self._library.sim_set(name.encode(), ctypes.c_long(value))

    def get(self, name: str) -> int:
        """Read a count of the driver; see `sim_get`."""
        return int(self._library.sim_get(name.encode()))

    def wait_for_more(self, name: str, than: int) -> None:
        """Block until a count of the driver is above a value."""
        while self.get(name) <= than:
            pass

    def reset(self) -> None:
        """Free all allocations and reset the driver's behaviour."""
        for name, value in DEFAULTS.items():
            self.set(name, value)
        for device_index in (0, 1):
            self.set("found", device_index)
        self.release()

    def tensor(self, *shape: int, dtype: torch.dtype, device_index: int = 0) -> torch.Tensor:
        """Make a tensor of device memory, all zeros: reading an element kills the process."""
        num_elements = int(torch.Size(shape).numel())
        address = self.allocate(num_elements * dtype.itemsize, device_index=device_index)
        memory = (ctypes.c_char * (num_elements * dtype.itemsize)).from_address(address)
        flat = torch.frombuffer(memory, dtype=dtype)
        return say_on_device(flat.view(shape), device_index)


def say_on_device(tensor: torch.Tensor, device_index: int) -> torch.Tensor:
    """Make the same tensor, labelled as memory of a GPU."""
    return tensor.as_subclass((_TensorOfDevice0, _TensorOfDevice1)[device_index])


class _TensorOfDevice0(torch.Tensor):
    """Tensor labelled as on a GPU, which a build of torch without CUDA cannot make."""

    device = torch.device("cuda", 0)


class _TensorOfDevice1(torch.Tensor):
    device = torch.device("cuda", 1)
