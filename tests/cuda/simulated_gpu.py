"""Simulated GPU for machines without one, and caches of an engine on it.

NVIDIA's bindings run over a driver that tests control.
"""

import contextlib
import ctypes
import importlib.metadata
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from kvxfer import Namespace, make_block_key
from kvxfer.copy_engine.cuda_driver import CudaDriver, CudaStream
from kvxfer.errors import DeviceLostError
from kvxfer.kvcache import FullAttentionSpec, KVCacheConfig, KVCacheGroup, canonicalize
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


NAMESPACE = Namespace(model="model", revision="1", dtype="bfloat16")
KEYS = [make_block_key(bytes([index]), 0) for index in range(60)]
NUM_BLOCKS = 64
SHAPE = (NUM_BLOCKS, 2, 16, 4, 32)
"""Blocks, K and V, tokens, heads, dim."""


class EngineCaches:
    """Caches of three layers, block-first, filled with random bytes."""

    def __init__(self, gpu: SimulatedGpu, *, device_index: int = 0) -> None:
        self._gpu = gpu
        self._device_index = device_index
        self.tensors = {
            f"layers.{i}": gpu.tensor(*SHAPE, dtype=torch.bfloat16, device_index=device_index)
            for i in range(3)
        }
        spec = FullAttentionSpec(
            tokens_per_block=16, num_kv_heads=4, head_dim=32, dtype=torch.bfloat16
        )
        groups = (KVCacheGroup(spec, tuple(self.tensors)),)
        config = KVCacheConfig(num_blocks=NUM_BLOCKS, groups=groups)
        # Only a torch with CUDA can view a device's memory; host views have the same layout.
        on_host = {name: each.as_subclass(torch.Tensor) for name, each in self.tensors.items()}
        caches = canonicalize(on_host, config)
        tensors = [
            replace(each, tensor=say_on_device(each.tensor, device_index))
            for each in caches.tensors
        ]
        self.caches = replace(caches, tensors=tensors)
        generator = np.random.default_rng(device_index)
        for tensor in self.tensors.values():
            gpu.write(tensor.data_ptr(), generator.bytes(tensor.nbytes))

    @property
    def blocks(self) -> NDArray[np.uint8]:
        """Read the device's present bytes: `(layers, blocks, bytes of a page)`."""
        layers = [self._gpu.read(each.data_ptr(), each.nbytes) for each in self.tensors.values()]
        return np.frombuffer(b"".join(layers), np.uint8).reshape(len(layers), NUM_BLOCKS, -1)


class Compute:
    """Compute stream of an engine: a torch without CUDA has no streams."""

    def __init__(self) -> None:
        self.driver = CudaDriver(0)
        self.cuda_stream: int = self.driver.open_stream()

    def current_stream(self, device: torch.device) -> "Compute":
        assert device == torch.device("cuda", 0)
        return self

    def copy(self, destination: int, source: int, num_bytes: int, *, times: int) -> None:
        """Give the stream work that takes many steps."""
        column = np.ones(times, np.uint64)
        to, from_, lengths = (column * np.uint64(n) for n in (destination, source, num_bytes))
        self.driver.copy_each(to, from_, lengths, CudaStream(self.cuda_stream))

    def close(self) -> None:
        with contextlib.suppress(DeviceLostError):
            self.driver.close_stream(CudaStream(self.cuda_stream))
            self.driver.close()
