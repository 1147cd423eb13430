"""Cache memory: guards against freed caches, and orders transfers after GPU work."""

import contextlib
from collections.abc import Iterator
from contextlib import ExitStack

import torch

from kvxfer.copy_engine.copy_stream import ComputeStream
from kvxfer.copy_engine.cuda_driver import CudaDriver
from kvxfer.errors import DeviceError
from kvxfer.kvcache.canonical import CanonicalKVCaches
from kvxfer.kvcache.descriptors import StreamMark


class CacheMemory:
    """Memory of caches: detects that it was freed or moved, and orders transfers after GPU work.

    The storages are kept alive, but the engine can still resize or empty them. Addresses computed
    before then point to unmapped memory, or to memory in other use.

    Raises:
        DeviceUnavailableError: The caches are on a GPU that cannot be used.
    """

    def __init__(self, caches: CanonicalKVCaches) -> None:
        self._caches = caches
        self._storages = [each.tensor.untyped_storage() for each in caches.tensors]
        self._places = list(self._find())
        devices = {each.tensor.device for each in caches.tensors}
        with ExitStack() as stack:
            gpus = [device for device in devices if device.type == "cuda"]
            self._streams = {device: _open_stream(device.index, stack) for device in gpus}
            self._opened = stack.pop_all()

    def mark(self, device: torch.device) -> StreamMark | None:
        """Mark the end of the work on this thread's current stream, for a transfer to wait for.

        None for host memory, which has no streams.
        """
        stream = self._streams.get(device)
        return None if stream is None else stream.mark()

    def describe_change(self) -> str:
        """Describe the first tensor whose storage was freed or resized; empty if there is none."""
        places = list(self._find())
        if places == self._places:
            return ""
        pairs = enumerate(zip(self._places, places, strict=True))
        index, before, now = next((index, *pair) for index, pair in pairs if pair[0] != pair[1])
        layers = ", ".join(self._layer_names(index))
        name = f"tensor {index} of the caches" + (f" ({layers})" if layers else "")
        (address, num_bytes), (new_address, new_num_bytes) = before, now
        if not new_address or not new_num_bytes:
            return f"{name}: its storage of {num_bytes} bytes was freed"
        return (
            f"{name}: its storage was resized from {num_bytes} bytes at {address:#x} to "
            f"{new_num_bytes} bytes at {new_address:#x}"
        )

    def close(self) -> None:
        """Release the devices; may be called again."""
        self._opened.close()

    def _find(self) -> Iterator[tuple[int, int]]:
        """List the address and the size of each storage."""
        addresses = map(torch.UntypedStorage.data_ptr, self._storages)
        return zip(addresses, map(torch.UntypedStorage.nbytes, self._storages), strict=True)

    def _layer_names(self, tensor_idx: int) -> list[str]:
        refs = (ref for refs in self._caches.group_data_refs for ref in refs)
        names = (name for ref in refs if ref.tensor_idx == tensor_idx for name in ref.layer_names)
        return list(dict.fromkeys(names))


def _open_stream(device_index: int, stack: ExitStack) -> ComputeStream:
    driver = CudaDriver(device_index)
    stack.callback(_close, driver)
    stream = ComputeStream(driver, torch.device("cuda", device_index))
    stack.callback(stream.close)
    return stream


def _close(driver: CudaDriver) -> None:
    with contextlib.suppress(DeviceError):  # a lost device has released everything
        driver.close()
