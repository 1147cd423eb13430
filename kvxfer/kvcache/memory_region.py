"""Memory regions: contiguous ranges of a device's memory, to be registered with hardware."""

from dataclasses import dataclass

import torch

from kvxfer.errors import InvalidArgumentError

HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True, eq=False)
class MemoryRegion:
    """Contiguous range of memory from and to which blocks are moved.

    The `owner` keeps the memory alive, and is itself kept while the region is registered.
    """

    address: int
    num_bytes: int
    owner: object
    device: torch.device = HOST


def require_device(name: str, device: torch.device | str) -> torch.device:
    """Find the device that an argument names, or raise `InvalidArgumentError`."""
    expected = "a device of this machine, such as 'cpu'"
    if not isinstance(device, (str, torch.device)) or str(device).startswith("meta"):  # type: ignore[redundant-expr]
        raise InvalidArgumentError(name, device, expected)
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, NotImplementedError) as exc:
        raise InvalidArgumentError(name, device, expected) from exc
