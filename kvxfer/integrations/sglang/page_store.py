"""Page store: the pages of SGLang's host pools in a backend."""

from collections.abc import Sequence
from contextlib import ExitStack

import torch

from kvxfer import runtime
from kvxfer.connect import BackendChoice, open_backend
from kvxfer.copy_engine.cpu import CPUCopyEngine
from kvxfer.face import RowPool, RowStore
from kvxfer.integrations.sglang.settings import StorageSettings
from kvxfer.kvcache.canonical import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
)
from kvxfer.kvcache.describer import BlockDescriber
from kvxfer.kvcache.portable import PageMapping
from kvxfer.runtime import CLOSE_TIMEOUT_S
from kvxfer.storage.keys import BlockKey, Namespace
from kvxfer.storage.portable_backend import PortableBackend, portable_namespace
from kvxfer.storage.staging_memory import aligned, allocate_aligned
from kvxfer.transfer.engine import TransferEngine
from kvxfer.transfer.job import Direction

MIN_ROWS = 2


class PageStore(RowStore):
    """Store of the pages of host pools in a backend; a group for each pool.

    Loads and stores have rows of their own: SGLang has a thread for each.

    The pools have one group each, and the namespace has none. The memory of the rows is bounded by
    the settings, but there are two rows in each direction.

    Raises:
        Exception: As `kvxfer.connect.open_backend`, and as the backend when it starts.
    """

    def __init__(
        self,
        pools: Sequence[tuple[CanonicalKVCaches, PageMapping]],
        backends: Sequence[BackendChoice],
        namespace: Namespace,
        settings: StorageSettings,
    ) -> None:
        self._pools = [BlockDescriber(caches, mappings=[mapping]) for caches, mapping in pools]
        mappings, timeout_s = [mapping for _, mapping in pools], settings.timeout_s
        sizes = [mapping.num_bytes for mapping in mappings]
        row_bytes = aligned(max(sizes))
        num_rows = max(MIN_ROWS, settings.staging // row_bytes // len(Direction))
        memory = torch.from_numpy(allocate_aligned(num_rows * len(Direction) * row_bytes))
        rows = CanonicalKVCaches(
            tensors=[
                CanonicalKVCacheTensor(memory.view(torch.int8).view(-1, row_bytes), row_bytes)
            ],
            group_data_refs=[[CanonicalKVCacheRef(0, size)] for size in sizes],
        )
        self._rows = BlockDescriber(rows)
        complete = portable_namespace(namespace, mappings)
        with ExitStack() as undo:
            self._copy_engine = CPUCopyEngine()
            undo.callback(self._copy_engine.close)
            engine = TransferEngine(
                rows,
                PortableBackend(open_backend(backends, complete), mappings),
                timeout_s=timeout_s,
                close_timeout_s=CLOSE_TIMEOUT_S,
            )
            undo.callback(engine.close)
            runtime.result(engine.submit_call(engine.backend.start()), timeout_s)
            undo.pop_all()
        super().__init__(
            engine,
            {
                direction: RowPool(range(direction * num_rows, (direction + 1) * num_rows))
                for direction in Direction
            },
            name="kvxfer's storage of SGLang",
            timeout_s=timeout_s,
            pause_s=settings.pause_s,
            waits_for_rows=True,
            num_groups=len(sizes),
        )

    def move_pages(
        self,
        direction: Direction,
        group: int,
        keys: Sequence[BlockKey],
        pages: Sequence[int],
        deadline: float,
    ) -> list[bool]:
        """Store pages of a pool, or load them; return for each whether that was done.

        A page that was not loaded stays as it was.
        """

        def copy(some: Sequence[int], rows: Sequence[int]) -> None:
            pool = self._pools[group].describe(0, [pages[index] for index in some])
            ours = self._rows.describe(group, rows)
            ends = (pool, ours) if direction is Direction.STORE else (ours, pool)
            self._copy_engine.copy(*ends)

        return self.move(direction, keys, copy, deadline, group=group)

    def close(self) -> None:
        """Close the backend; ends in time even if that hangs."""
        super().close()
        self._copy_engine.close()
