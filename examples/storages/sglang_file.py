"""SGLang's own storage `HiCacheFile`, as a backend."""

import contextlib
from collections.abc import Sequence
from pathlib import Path

import torch

with contextlib.suppress(ImportError):  # in kvxfer's repository: for packages not needed here
    import tests.sglang.import_stubs  # noqa: F401
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig

from examples.storages.wrapper import WrappedStorage
from kvxfer import BlockKey, Namespace


class HiCacheFiles(WrappedStorage):
    """SGLang's storage in files; its names have that of the model."""

    def __init__(self, folder: Path, namespace: Namespace) -> None:
        super().__init__(folder, namespace)
        config = HiCacheStorageConfig(
            tp_rank=0,
            tp_size=1,
            pp_rank=0,
            pp_size=1,
            attn_cp_rank=0,
            attn_cp_size=1,
            is_mla_model=False,
            enable_storage_metrics=False,
            is_page_first_layout=True,
            model_name=namespace.model,
        )
        self._storage = HiCacheFile(config, str(folder))

    def put(self, keys: Sequence[BlockKey], chunks: Sequence[torch.Tensor]) -> list[bool]:
        """See `WrappedStorage.put`."""
        return [self._storage.set(key.hex(), c) for key, c in zip(keys, chunks, strict=True)]

    def get(self, keys: Sequence[BlockKey], chunks: Sequence[torch.Tensor]) -> list[bool]:
        """See `WrappedStorage.get`. An error is what SGLang's controller makes of it: no page."""
        return [self._get_one(key, chunk) for key, chunk in zip(keys, chunks, strict=True)]

    def has(self, keys: Sequence[BlockKey]) -> list[bool]:
        """See `WrappedStorage.has`."""
        return [self._storage.exists(key.hex()) for key in keys]

    def remove(self, keys: Sequence[BlockKey]) -> None:
        """See `WrappedStorage.remove`. SGLang can only clear all of it."""
        for key in keys:
            for path in self.folder.glob(f"{key.hex()}*"):
                path.unlink(missing_ok=True)  # another task may have removed it

    def _get_one(self, key: BlockKey, chunk: torch.Tensor) -> bool:
        try:
            return self._storage.get(key.hex(), chunk) is not None
        except OSError:
            return False
