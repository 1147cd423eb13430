"""Arrays that the host writes and the device reads."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvxfer.errors import InvalidArgumentError


def require_device(name: str, device: torch.device | str) -> torch.device:
    """Find the device that an argument names.

    Raises:
        InvalidArgumentError: It names none, or one that this machine does not have.
    """
    expected = "a device of this machine, such as 'cpu'"
    if not isinstance(device, (str, torch.device)):
        raise InvalidArgumentError(name, device, expected)
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, NotImplementedError) as exc:
        raise InvalidArgumentError(name, device, expected) from exc


class DeviceArray:
    """A host array and its copy on a device, which changes at `commit` only.

    A commit does not wait for the device: it copies to pinned staging memory, so the host array
    may be changed at once, and the device copies from there in the order of its stream. Only a
    commit that comes while the one before is still being copied waits for that one.

    Args:
        shape: Elements along each dimension.
        dtype: Type of the elements.
        device: Where the copy lives.

    Attributes:
        host: Zeroed.
        device: Zeroed; on the CPU, too, other memory than `host`.
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
        # By numpy: torch wakes threads for 100 KB, and on a busy machine waits long for them.
        np.copyto(self._staged_array[:stop], self.host[:stop])
        if self._copied is not None:
            shown.copy_(self._staged[:stop], non_blocking=True)
            self._copied.record(torch.accelerator.current_stream(shown.device))
        return shown
