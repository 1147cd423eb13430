"""SGLang's own storage `HiCacheFile`, as a backend."""

import contextlib
from collections.abc import Sequence
from pathlib import Path

import torch

with contextlib.suppress(ImportError):  # in kvxfer's repository: stubs of packages not needed here
    import tests.sglang.import_stubs  # noqa: F401
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig

from examples.storages.wrapper import WrappedStorage
from kvxfer import BlockKey, Namespace
from kvxfer.storage import group_of


class HiCacheFiles(WrappedStorage):
    """SGLang's storage in files, whose names contain that of the model."""

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

    def put(self, names: Sequence[str], values: Sequence[bytes]) -> list[bool]:
        """See `BytesBackend.put`."""
        pairs = zip(names, values, strict=True)
        return [self._storage.set(name, _tensor(bytearray(value))) for name, value in pairs]

    def get(self, names: Sequence[str]) -> list[bytes | None]:
        """See `BytesBackend.get`. An error counts as a missing page, as in SGLang's controller."""
        return [self._get_one(name) for name in names]

    def has(self, names: Sequence[str]) -> list[bool]:
        """See `BytesBackend.has`."""
        return [self._storage.exists(name) for name in names]

    def remove(self, names: Sequence[str]) -> None:
        """See `BytesBackend.remove`. SGLang itself can only clear the whole storage."""
        for name in names:
            for path in self.folder.glob(f"{name}*"):
                path.unlink(missing_ok=True)  # another task may have removed it

    def _get_one(self, name: str) -> bytes | None:
        page = bytearray(self.namespace.chunk_size_bytes(group_of(BlockKey(bytes.fromhex(name)))))
        try:
            found = self._storage.get(name, _tensor(page))
        except OSError:
            return None
        return None if found is None else bytes(page)


def _tensor(page: bytearray) -> torch.Tensor:
    return torch.frombuffer(page, dtype=torch.uint8)
