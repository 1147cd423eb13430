"""Memory regions: contiguous ranges of memory, to be registered with hardware."""

from dataclasses import dataclass
from itertools import groupby

import torch

from kvxfer.kvcache.canonical import CanonicalKVCaches

HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True, eq=False)
class MemoryRegion:
    """Contiguous range of memory that blocks will be moved from and to.

    Attributes:
        address: Address of its first byte.
        num_bytes: Length of the region.
        owner: Object that keeps the memory alive; to be kept as long as the region is registered.
        device: Device on which the address is valid.
    """

    address: int
    num_bytes: int
    owner: object
    device: torch.device = HOST


def memory_regions(caches: CanonicalKVCaches) -> list[MemoryRegion]:
    """List the memory regions of caches, each byte in one region."""
    spans = sorted(
        (str(tensor.device), start, start + (len(tensor) - 1) * tensor.stride(0) + tensor.shape[1])
        for tensor in (each.tensor for each in caches.tensors)
        for start in [tensor.data_ptr()]
    )
    regions = []
    for device, on_device in groupby(spans, key=lambda span: span[0]):
        joined: list[tuple[int, int]] = []
        for _, start, stop in on_device:
            if joined and start < joined[-1][1]:  # rows of several tensors interleave
                joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
            else:
                joined.append((start, stop))
        place = torch.device(device)
        regions += [MemoryRegion(start, stop - start, caches, place) for start, stop in joined]
    return regions
