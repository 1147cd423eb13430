"""Page store: the pages of SGLang's host pools in a backend, and when it is opened."""

import logging
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import islice
from typing import Any

import torch

from kvxfer import runtime
from kvxfer.connect import open_backend, start_engine
from kvxfer.copy_engine.cpu import CPUCopyEngine
from kvxfer.errors import InvalidArgumentError
from kvxfer.face import RowPool, RowStore
from kvxfer.integrations.sglang.host_pools import HostPages, read_pool
from kvxfer.integrations.sglang.identity import page_namespace, started_adapters
from kvxfer.integrations.sglang.interface import HiCacheStorageConfig, weight_version
from kvxfer.integrations.sglang.settings import StorageSettings
from kvxfer.kvcache.canonical import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor
from kvxfer.kvcache.describer import BlockDescriber
from kvxfer.kvcache.portable import PageMapping, WorkerShard, map_caches
from kvxfer.runtime import CLOSE_TIMEOUT_S, Pause, begin_aside
from kvxfer.storage.keys import BlockKey, Namespace, make_block_key
from kvxfer.storage.portable_backend import PortableBackend, portable_namespace
from kvxfer.storage.staging_memory import aligned, allocate_aligned
from kvxfer.transfer.engine import TransferEngine
from kvxfer.transfer.job import Direction

MIN_ROWS = 2

logger = logging.getLogger(__name__)


class PageStore(RowStore):
    """Store of the pages of host pools in a backend, by SGLang's names; a group for each pool.

    Loads and stores have rows of their own: SGLang has a thread for each. The memory of the rows is
    bounded by the settings, but there are two rows in each direction. The namespace has no groups.
    """

    def __init__(
        self,
        pools: Mapping[str, tuple[HostPages, PageMapping]],
        namespace: Namespace,
        settings: StorageSettings,
        replica: int,
    ) -> None:
        mappings, timeout_s = [mapping for _, mapping in pools.values()], settings.timeout_s
        self._names, self._pages = [*pools], [pages for pages, _ in pools.values()]
        self._describers = [
            BlockDescriber(pages.caches, mappings=[mapping]) for pages, mapping in pools.values()
        ]
        self._sizes = sizes = [mapping.num_bytes for mapping in mappings]
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
        self._copy_engine = CPUCopyEngine()
        make = partial(TransferEngine, rows, timeout_s=timeout_s, close_timeout_s=CLOSE_TIMEOUT_S)
        engine = start_engine(
            open_backend(settings.backend, complete, replica=replica),
            lambda backend: make(PortableBackend(backend, mappings)),
            timeout_s,
        )
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

    def find_pages(
        self, keys: Sequence[str], names: Sequence[str], deadline: float
    ) -> dict[str, list[bool]]:
        """Look up pages under the same keys in some pools, with one question to the backend."""
        known = [name for name in names if name in self._names]
        groups = [self._names.index(name) for name in known]
        found = iter(
            self.lookup([_block_key(k, group) for group in groups for k in keys], deadline)
        )
        return {name: list(islice(found, len(keys))) for name in known}

    def move_pages(
        self,
        direction: Direction,
        name: str,
        keys: Sequence[str],
        host_indices: torch.Tensor | None,
        deadline: float,
    ) -> list[bool]:
        """Store pages of a pool, or load them; return for each whether that was done.

        `host_indices` has all rows of each page. A page that was not loaded stays as it was.
        """
        if name not in self._names:
            logger.error("nothing is stored of the pool %s, which was not registered", name)
            return [False] * len(keys)
        group = self._names.index(name)
        pages = _page_ids(self._pages[group].rows_per_page, len(keys), host_indices)

        def copy(some: Sequence[int], rows: Sequence[int]) -> None:
            pool = self._describers[group].describe(0, [pages[index] for index in some])
            ours = self._rows.describe(group, rows)
            ends = (pool, ours) if direction is Direction.STORE else (ours, pool)
            self._copy_engine.copy(*ends)

        block_keys = [_block_key(key, group) for key in keys]
        return self.move(direction, block_keys, copy, deadline, group=group)

    def page_bytes(self, name: str) -> int:
        """Return the bytes of a page of a registered pool."""
        return self._sizes[self._names.index(name)]

    def close(self) -> None:
        """Close the backend; ends in time even if that hangs."""
        try:
            super().close()
        except Exception as exc:  # noqa: BLE001 - SGLang closes it while the process ends
            logger.warning("the storage cannot be closed: %r", exc)
        self._copy_engine.close()


class CurrentStore:
    """Store of all host pools that an engine has at present, of the weights that it has.

    It is opened on a thread of its own, so whoever needs it waits no longer than its deadline. An
    opening that failed is tried again after a pause. Once the engine has other weights, another
    pool, or a pool over other memory, the store is taken out of use; the next opening closes it,
    and opens another one. Thread-safe.
    """

    def __init__(self, config: HiCacheStorageConfig, settings: StorageSettings) -> None:
        self._config = config
        self._settings = settings
        self._adapters = started_adapters()
        self._pools: dict[str, tuple[HostPages, PageMapping]] = {}
        self._num_registered = 0  # pools, and pools again over other memory
        self._version: tuple[Any, int] = weight_version(), 0
        self._lock = runtime.lock()  # held for a few lines, never while something is opened
        self._store: PageStore | None = None
        self._former: list[PageStore] = []
        self._opening: Future[None] | None = None
        self._is_late = False  # nobody waits for an opening that others waited for in vain
        self._pause = Pause(settings.pause_s)
        self._closed = False
        self._num_purges = 0

    def register(self, name: str, pool: Any) -> None:
        """Announce a pool; errors as `KVXferStorage.register_mem_pool_host`."""
        pages = read_pool(name, pool)
        mapping = self._map(pages)
        with self._lock:
            known = self._pools.get(name)
            self._num_registered += known is None or known[0].places != pages.places
            self._pools[name] = pages, mapping

    def open(self) -> None:
        """Open the store; errors are those of `KVXferStorage.on_host_pools_registered`."""
        while opening := self._begin_opening():
            runtime.result(opening)

    def find(self, deadline: float) -> PageStore | None:
        """Find the store; None if it is not open by the deadline, on `runtime.monotonic`.

        Some releases do not call `open`, and pools may come later.
        """
        while True:
            self._replace()
            with self._lock:
                if self._closed or self._store is not None:
                    return None if self._closed else self._store
                now = runtime.monotonic()
                wait_s = 0.0 if self._is_late else max(0.0, deadline - now)
                is_paused = self._opening is None and self._pause.is_on(now)
            opening = None if is_paused else self._begin_opening()
            if opening is None or not self._wait(opening, wait_s):
                return None

    def purge(self, deadline: float) -> None:
        """Forget every page, also where the store is not open yet: none of before will be found."""
        self._replace()
        with self._lock:
            self._num_purges += 1
        for store in self._stores():
            store.purge(deadline)

    def close(self) -> None:
        """Close the store; may be called again. Later there is none."""
        with self._lock:
            self._closed = True
        for store in self._stores():
            store.close()

    @property
    def _rank(self) -> int:
        """Index of this process among those of the engine, each of which opens a backend."""
        config, rank = self._config, 0
        for index, size in (
            (getattr(config, "dp_rank", 0), 1),
            (config.pp_rank, config.pp_size),
            (config.attn_cp_rank, config.attn_cp_size),
            (config.tp_rank, config.tp_size),
        ):
            rank = rank * size + index
        return rank

    def _map(self, pages: HostPages) -> PageMapping:
        """Map the pages of a pool to portable pages; of a replicated one there is one writer."""
        config = self._config
        shard, num_shards = WorkerShard(num_kv_heads=1), 1
        if pages.num_kv_heads is not None:
            num_heads = pages.num_kv_heads * config.tp_size
            shard = WorkerShard(num_kv_heads=num_heads, rank=config.tp_rank, tp_size=config.tp_size)
            num_shards = math.gcd(num_heads, config.tp_lcm_size or config.tp_size)
        (mapping,) = map_caches(pages.caches, shard, num_shards=num_shards, opaque=pages.opaque)
        return mapping

    def _begin_opening(self) -> Future[None] | None:
        """Begin to open the store, or find out that this has begun; None: there is none to open."""
        with self._lock:
            is_done = self._store is not None or self._closed
            if self._opening is not None or is_done or not self._pools:
                return self._opening
            opening = self._opening = Future[None]()
        begin_aside("kvxfer-open", partial(self._open, opening))
        return opening

    def _wait(self, opening: Future[None], wait_s: float) -> bool:
        """Wait until the store was opened or could not be; return whether to look for it again."""
        try:
            runtime.result(opening, wait_s)
        except Exception as exc:
            if opening.done():
                logger.exception("nothing is stored", exc_info=exc)
                return False
            text = "nothing is stored or found: the store is still opening"
            logger.log(logging.DEBUG if self._is_late else logging.WARNING, text)
            self._is_late = True
            return False
        return True

    def _open(self, opening: Future[None]) -> None:
        """Open the store; whoever waits gets its error.

        After an error nobody waits for the next attempt: it is the backend that lets them wait.
        """
        failure: BaseException | None = None
        try:
            self._open_current()
        except BaseException as exc:  # noqa: BLE001 - whoever waits gets it
            failure = exc
        with self._lock:
            self._opening, self._is_late = None, failure is not None
            if failure is None:
                opening.set_result(None)
            else:
                self._pause.begin(runtime.monotonic())
                opening.set_exception(failure)

    def _open_current(self) -> None:
        self._replace()  # before the namespace is made of the version
        with self._lock:
            former, self._former = self._former, []
            version, pools = self._version, dict(self._pools)
        for each in former:
            each.close()
        revision = self._settings.revision
        namespace = page_namespace(self._config, revision, [*pools], self._adapters)
        store = PageStore(pools, namespace, self._settings, self._rank)
        num_purges = 0
        while not self._publish(store, version, num_purges):
            num_purges = self._num_purges
            store.purge(runtime.monotonic() + self._settings.timeout_s)

    def _publish(self, store: PageStore, version: Any, num_purges: int) -> bool:
        """Put a store into use, or close it; return False if it has to be purged first."""
        with self._lock:
            is_current = version == self._version and not self._closed
            if is_current and num_purges < self._num_purges:
                return False
            self._store = store if is_current else None
        if not is_current:
            store.close()
        return True

    def _replace(self) -> None:
        """Take the store out of use if the engine has other weights, or other pools."""
        weights = weight_version()
        with self._lock:
            version = weights, self._num_registered
            if version != self._version and not self._closed:
                self._former += [] if self._store is None else [self._store]
                self._store, self._version = None, version

    def _stores(self) -> list[PageStore]:
        with self._lock:
            return [*self._former, *([] if self._store is None else [self._store])]


def _page_ids(rows_per_page: int, num_pages: int, host_indices: torch.Tensor | None) -> list[int]:
    """Find the pages that rows of a pool make up, page after page."""
    num_rows = 0 if host_indices is None else host_indices.numel()
    if host_indices is None or num_rows != num_pages * rows_per_page:
        raise InvalidArgumentError("host_indices", num_rows, f"{num_pages} x {rows_per_page}")
    firsts = host_indices[::rows_per_page].tolist()
    for first in firsts:
        if first % rows_per_page:
            raise InvalidArgumentError("host_indices", first, f"a multiple of {rows_per_page}")
    return [first // rows_per_page for first in firsts]


def _block_key(key: str, group: int) -> BlockKey:
    return make_block_key(bytes.fromhex(key), group)
