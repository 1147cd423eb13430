"""KV caches of an engine on a GPU, for tests."""

import contextlib
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from kvxfer import Namespace, make_block_key
from kvxfer.copy_engine.cuda_driver import CudaDriver, CudaStream
from kvxfer.errors import DeviceLostError
from kvxfer.kvcache.canonical import canonicalize
from kvxfer.kvcache.config import KVCacheConfig, KVCacheGroup
from kvxfer.kvcache.spec import FullAttentionSpec
from tests.cuda.simulated_gpu import SimulatedGpu, say_on_device

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
        # Only a torch with CUDA makes views of a device's memory; those of the host's are alike.
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
        """Give the stream something to do that takes many steps."""
        column = np.ones(times, np.uint64)
        to, from_, lengths = (column * np.uint64(n) for n in (destination, source, num_bytes))
        self.driver.copy_each(to, from_, lengths, CudaStream(self.cuda_stream))

    def close(self) -> None:
        with contextlib.suppress(DeviceLostError):
            self.driver.close_stream(CudaStream(self.cuda_stream))
            self.driver.close()
