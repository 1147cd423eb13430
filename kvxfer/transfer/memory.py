"""The memory of caches, as transfers find it."""

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
    """Whether caches are where they were, and what their devices have to do before a transfer.

    Args:
        caches: The caches; kept alive.

    Raises:
        DeviceUnavailableError: They are on a GPU that cannot be used.
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
        """Have a transfer wait for all that the device was given to do until now.

        To be called on the thread whose current stream computes with the blocks.

        Raises:
            DeviceError: The device does not take it.
        """
        if (stream := self._streams.get(blocks.device)) is None:
            return blocks
        return dataclasses.replace(blocks, after=stream.mark())

    def describe_change(self) -> str:
        """See `CacheStorages.describe_change`."""
        return self._storages.describe_change()

    def close(self) -> None:
        """Let go of the devices; may be called again."""
        self._opened.close()


def _open_stream(device_index: int, stack: ExitStack) -> ComputeStream:
    driver = CudaDriver(device_index)
    stack.callback(_close, driver)
    stream = ComputeStream(driver, torch.device("cuda", device_index))
    stack.callback(stream.close)
    return stream


def _close(driver: CudaDriver) -> None:
    with contextlib.suppress(DeviceError):  # nothing is left to be let go of
        driver.close()
