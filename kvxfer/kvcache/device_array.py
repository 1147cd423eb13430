"""Device arrays: arrays that the host writes and a device reads."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvxfer.errors import InvalidArgumentError


def require_device(name: str, device: torch.device | str) -> torch.device:
    """Find the device that an argument names.

    Raises:
        InvalidArgumentError: The value is not a device, or this machine does not have it.
    """
    expected = "a device of this machine, such as 'cpu'"
    if not isinstance(device, (str, torch.device)):
        raise InvalidArgumentError(name, device, expected)
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, NotImplementedError) as exc:
        raise InvalidArgumentError(name, device, expected) from exc


class DeviceArray:
    """Host array with a copy on a device, which changes at `commit` only.

    A commit does not wait for the device: it copies to a pinned staging buffer, so the host array
    may be changed at once, and the device copies from there in the order of its stream. A commit
    waits only for the copy of the commit before it.

    Args:
        shape: Elements along each dimension.
        dtype: Type of the elements.
        device: Device of the copy.

    Attributes:
        host: The host array, zeroed.
        device: The device's copy, zeroed; separate memory from `host` also on the CPU.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.device = torch.zeros(shape, dtype=dtype, device=device)
        self._staged = self.device
        self._copied: torch.Event | None = None
        if device.type != "cpu":
            self._staged = torch.zeros(shape, dtype=dtype, pin_memory=True)
            self._copied = torch.Event(self.device.device)
        self._staged_array: NDArray[Any] = self._staged.numpy()
        self.host = np.zeros_like(self._staged_array)

    def commit(self, stop: int) -> torch.Tensor:
        """Copy `host[:stop]` to the device.

        Returns:
            `device[:stop]`, a view.
        """
        shown = self.device[:stop]
        if self._copied is not None:
            self._copied.synchronize()
        # By numpy: torch wakes threads for 100 KB, which is slow on a busy machine.
        np.copyto(self._staged_array[:stop], self.host[:stop])
        if self._copied is not None:
            shown.copy_(self._staged[:stop], non_blocking=True)
            self._copied.record(torch.accelerator.current_stream(shown.device))
        return shown
