"""Storages of caches: detection of memory that the engine freed or resized."""

from collections.abc import Iterator

import torch

from kvxfer.kvcache.canonical import CanonicalKVCaches


class CacheStorages:
    """Storages of caches, compared with their first addresses and sizes to detect changes.

    The storages are kept alive, but the engine can still resize or empty them: addresses that were
    computed before then point to memory in other use, or unmapped.

    Args:
        caches: The caches, as they are now.
    """

    def __init__(self, caches: CanonicalKVCaches) -> None:
        self._caches = caches
        self._storages = [each.tensor.untyped_storage() for each in caches.tensors]
        self._places = list(self._find())

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

    def _find(self) -> Iterator[tuple[int, int]]:
        """List the address and the bytes of each storage."""
        addresses = map(torch.UntypedStorage.data_ptr, self._storages)
        return zip(addresses, map(torch.UntypedStorage.nbytes, self._storages), strict=True)

    def _layer_names(self, tensor_idx: int) -> list[str]:
        refs = (ref for refs in self._caches.group_data_refs for ref in refs)
        names = (name for ref in refs if ref.tensor_idx == tensor_idx for name in ref.layer_names)
        return list(dict.fromkeys(names))
