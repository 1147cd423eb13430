"""KV caches of an engine on a GPU, for tests."""

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from kvxfer.kvcache.canonical import canonicalize
from kvxfer.kvcache.config import KVCacheConfig, KVCacheGroup
from kvxfer.kvcache.spec import FullAttentionSpec
from tests.cuda.simulated_gpu import SimulatedGpu, say_on_device

NUM_BLOCKS = 64
SHAPE = (NUM_BLOCKS, 2, 16, 4, 32)
"""Blocks, K and V, tokens, heads, dim."""


class EngineCaches:
    """Caches of three layers, block-first, filled with random bytes.

    Attributes:
        caches: The canonical caches.
        tensors: The tensors that the engine registered.
    """

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
