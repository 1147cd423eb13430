"""Arrays that the host writes and the device reads."""

import torch


class DeviceArray:
    """A host tensor and its copy on a device, which changes at `commit` only.

    A commit does not wait for the device: it copies to pinned staging memory, so the host tensor
    may be changed at once, and the device copies from there in the order of its stream. Only a
    commit that comes while the one before is still being copied waits for that one.

    Args:
        shape: Elements along each dimension.
        dtype: Type of the elements.
        device: Where the copy lives.

    Attributes:
        host: Zeroed, on the CPU.
        device: Zeroed, on the device; other memory than `host` on the CPU, too.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.host = torch.zeros(shape, dtype=dtype)
        self.device = torch.zeros(shape, dtype=dtype, device=device)
        self._staged: torch.Tensor | None = None
        if device.type != "cpu":
            self._staged = torch.zeros(shape, dtype=dtype, pin_memory=True)
            self._copied = torch.Event(device)

    def commit(self, stop: int) -> torch.Tensor:
        """Copy `host[:stop]` to the device.

        Returns:
            `device[:stop]`, a view.
        """
        source, target = self.host[:stop], self.device[:stop]
        if self._staged is None:
            return target.copy_(source)
        self._copied.synchronize()
        source = self._staged[:stop].copy_(source)
        target.copy_(source, non_blocking=True)
        self._copied.record(torch.accelerator.current_stream(target.device))
        return target
