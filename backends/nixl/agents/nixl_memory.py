"""Memory as NIXL has it described: its kind, and rows of address, length and device."""

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from kvxfer.backends.nixl.wire import (
    Words,
)
from kvxfer.errors import DeviceUnavailableError, TransferFailedError
from kvxfer.kvcache.memory_region import HOST, MemoryRegion


def register_memory(
    agent: Any, regions: Sequence[MemoryRegion], errors: tuple[type[Exception], ...]
) -> None:
    """Register memory of the host and of GPUs with a NIXL agent, all of it or none.

    Args:
        agent: The agent.
        regions: The memory.
        errors: Errors of NIXL.

    Raises:
        DeviceUnavailableError: NIXL cannot reach the memory of a GPU.
        TransferFailedError: NIXL cannot register host memory.
    """
    with contextlib.ExitStack() as undo:
        for device in dict.fromkeys(region.device for region in regions):
            on_device = [region for region in regions if region.device == device]
            try:
                registered = agent.register_memory(_rows(on_device), _kind(device))
            except errors as exc:
                raise _refusal(agent, device, exc) from exc
            undo.callback(_deregister, agent, registered, errors)
        undo.pop_all()


def export_host_memory(agent: Any, regions: Sequence[MemoryRegion], backend: str) -> bytes:
    """Make the metadata of a NIXL agent of which a GPU's memory was refused.

    The whole metadata lists no memory under the GPU's kind then, and NIXL 1.5.1 refuses that where
    a peer adds it.

    Args:
        agent: The agent.
        regions: Host memory that it has registered.
        backend: Backend that reaches it.
    """
    registered = agent.get_reg_descs(_rows(regions), "DRAM")
    exported: bytes = agent.get_partial_agent_metadata(
        registered, inc_conn_info=True, backends=[backend]
    )
    return exported


def describe(agent: Any, device: torch.device, addresses: Words, lengths: Words) -> Any:
    """Describe one side of a transfer."""
    rows = np.zeros((len(addresses), 3), np.uint64)
    rows[:, 0] = addresses
    rows[:, 1] = lengths
    rows[:, 2] = device.index or 0
    return agent.get_xfer_descs(rows, _kind(device))


def _deregister(agent: Any, registered: Any, errors: tuple[type[Exception], ...]) -> None:
    with contextlib.suppress(*errors):  # the error that led here says more
        agent.deregister_memory(registered)


def _rows(regions: Sequence[MemoryRegion]) -> list[tuple[int, int, int, str]]:
    return [(each.address, each.num_bytes, each.device.index or 0, "") for each in regions]


def _kind(device: torch.device) -> str:
    return "DRAM" if device.type == HOST.type else "VRAM"


def _refusal(
    agent: Any, device: torch.device, exc: Exception
) -> DeviceUnavailableError | TransferFailedError:
    if device.type == HOST.type:
        return TransferFailedError(agent.name, f"cannot register host memory: {exc}")
    return DeviceUnavailableError(
        device.index,
        f"NIXL cannot register its memory ({exc}); install the GPU's driver, and NIXL with a UCX "
        f"for CUDA as in its wheels, or let blocks pass through host memory",
    )
