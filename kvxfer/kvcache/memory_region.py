"""Stretches of memory, as hardware wants them registered."""

from dataclasses import dataclass

from kvxfer.kvcache.canonical import CanonicalKVCaches


@dataclass(frozen=True, slots=True, eq=False)
class MemoryRegion:
    """One stretch of host memory that blocks will be moved from and to.

    Attributes:
        address: Of its first byte.
        num_bytes: Its length.
        owner: What keeps the memory alive; whoever registers the region keeps it.
    """

    address: int
    num_bytes: int
    owner: object


def memory_regions(caches: CanonicalKVCaches) -> list[MemoryRegion]:
    """The host memory of caches, each byte in one region; none of what a device holds."""
    tensors = [each.tensor for each in caches.tensors if each.tensor.device.type == "cpu"]
    spans = sorted(
        (tensor.data_ptr(), tensor.data_ptr() + (len(tensor) - 1) * tensor.stride(0) + row_bytes)
        for tensor in tensors
        for row_bytes in [tensor.shape[1]]
    )
    joined: list[tuple[int, int]] = []
    for start, stop in spans:
        if joined and start < joined[-1][1]:  # rows of several tensors interleave
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        else:
            joined.append((start, stop))
    return [MemoryRegion(start, stop - start, caches) for start, stop in joined]
