"""Cache memory: guards against freed caches, and orders transfers after GPU work."""

import contextlib
import dataclasses
from contextlib import ExitStack

import torch

from kvxfer.copy_engine.compute_stream import ComputeStream
from kvxfer.copy_engine.cuda_driver import CudaDriver
from kvxfer.errors import DeviceError
from kvxfer.kvcache.canonical import CanonicalKVCaches
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.kvcache.storages import CacheStorages


class CacheMemory:
    """Memory of caches: detects that it was freed or moved, and orders transfers after GPU work.

    Args:
        caches: The caches; kept alive.

    Raises:
        DeviceUnavailableError: The caches are on a GPU that cannot be used.
    """

    def __init__(self, caches: CanonicalKVCaches) -> None:
        self._storages = CacheStorages(caches)
        devices = {each.tensor.device for each in caches.tensors}
        with ExitStack() as stack:
            self._streams = {
                device: _open_stream(device.index, stack)
                for device in devices
                if device.type == "cuda"
            }
            self._opened = stack.pop_all()

    def order(self, blocks: Descriptors) -> Descriptors:
        """Order a transfer of blocks after the work on the current stream.

        To be called on the thread whose current stream computes with the blocks.

        Returns:
            The same blocks, with the mark that the transfer has to wait for.

        Raises:
            DeviceError: The driver refused.
        """
        if (stream := self._streams.get(blocks.device)) is None:
            return blocks
        return dataclasses.replace(blocks, after=stream.mark())

    def describe_change(self) -> str:
        """See `CacheStorages.describe_change`."""
        return self._storages.describe_change()

    def close(self) -> None:
        """Release the devices; may be called again."""
        self._opened.close()


def _open_stream(device_index: int, stack: ExitStack) -> ComputeStream:
    driver = CudaDriver(device_index)
    stack.callback(_close, driver)
    stream = ComputeStream(driver, torch.device("cuda", device_index))
    stack.callback(stream.close)
    return stream


def _close(driver: CudaDriver) -> None:
    with contextlib.suppress(DeviceError):  # a lost device has released everything
        driver.close()
