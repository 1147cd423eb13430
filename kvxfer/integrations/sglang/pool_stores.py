"""Stores of the pages of SGLang's host pools in a backend: one for all pools that are known."""

import logging
import math
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch

from kvxfer import runtime
from kvxfer.connect import backend_choices, open_backend, start_engine
from kvxfer.copy_engine.cpu import CPUCopyEngine
from kvxfer.errors import InvalidArgumentError, UnsupportedEngineError
from kvxfer.face import RowPool, RowStore
from kvxfer.integrations.sglang.host_pools import HostPages, read_pool
from kvxfer.integrations.sglang.identity import page_namespace, started_adapters
from kvxfer.integrations.sglang.interface import HiCacheStorageConfig, loaded_weights
from kvxfer.integrations.sglang.settings import StorageSettings
from kvxfer.kvcache.canonical import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor
from kvxfer.kvcache.describer import BlockDescriber
from kvxfer.kvcache.portable import PageMapping, WorkerShard, map_caches
from kvxfer.runtime import CLOSE_TIMEOUT_S, Pause, begin_aside
from kvxfer.storage.keys import BlockKey, Namespace
from kvxfer.storage.portable_backend import PortableBackend, portable_namespace
from kvxfer.storage.staging_memory import aligned, allocate_aligned
from kvxfer.transfer.engine import TransferEngine
from kvxfer.transfer.job import Direction

PERMANENT_ERRORS = (InvalidArgumentError, UnsupportedEngineError)
"""Errors of an opening that another attempt would raise, too."""

logger = logging.getLogger(__name__)


class PageStore(RowStore):
    """Store of the pages of host pools in a backend, with a group for each pool.

    Loads and stores have rows of their own, as SGLang has a thread for each. The settings limit the
    memory of the rows, but each direction has at least two, and one more for each further tier.

    Raises:
        Exception: As `kvxfer.connect.open_backend`, and as the backend when it starts.
    """

    def __init__(
        self,
        pools: Sequence[tuple[HostPages, PageMapping]],
        namespace: Namespace,
        settings: StorageSettings,
        replica: int,
    ) -> None:
        self._pools = [BlockDescriber(each.caches, mappings=[mapping]) for each, mapping in pools]
        mappings, timeout_s = [mapping for _, mapping in pools], settings.timeout_s
        sizes = [mapping.num_bytes for mapping in mappings]
        row_bytes = aligned(max(sizes))
        least = 1 + len(backend_choices(settings.backend))
        num_rows = max(least, settings.staging // row_bytes // len(Direction))
        memory = torch.from_numpy(allocate_aligned(num_rows * len(Direction) * row_bytes))
        staging = memory.view(torch.int8).view(-1, row_bytes)
        rows = CanonicalKVCaches(
            tensors=[CanonicalKVCacheTensor(staging, row_bytes)],
            group_data_refs=[[CanonicalKVCacheRef(0, size)] for size in sizes],
        )
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
                each: RowPool(range(each * num_rows, (each + 1) * num_rows), waits_for_late=True)
                for each in Direction
            },
            name="kvxfer's storage of SGLang",
            describer=BlockDescriber(rows),
            timeout_s=timeout_s,
            pause_s=settings.pause_s,
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
            ours = self._describer.describe(group, rows)
            ends = (pool, ours) if direction is Direction.STORE else (ours, pool)
            self._copy_engine.copy(*ends)

        return self.move(direction, keys, copy, deadline, group=group)

    def close(self) -> None:
        """Close the backend; ends in time even if the backend hangs."""
        super().close()
        self._copy_engine.close()


class PoolStores:
    """Stores of the host pools of one engine, by SGLang's names of the pools.

    All pools that are known when the backend is opened share one store. It is opened on a thread of
    its own, so that no caller waits longer than its deadline. A failed opening is tried again after
    a pause, unless its error is one of `PERMANENT_ERRORS`. Thread-safe.

    Attributes:
        pools: Registered pools, and the mappings of their pages to those in the backend.
    """

    def __init__(self, config: HiCacheStorageConfig, settings: StorageSettings) -> None:
        self._config = config
        self._settings = settings
        self.pools: dict[str, tuple[HostPages, PageMapping]] = {}
        self._stores: dict[str, tuple[PageStore, int] | None] = {}
        self._retired: list[PageStore] = []
        self._adapters = started_adapters()
        self._num_replaced = 0  # pools that were registered again, with other memory
        self._version: tuple[Any, int] = loaded_weights(), 0
        self._thread_state = threading.local()  # weights of the pages that each thread stores
        self._lock = runtime.lock()  # held for a few lines, never while a store is opened
        self._opening: Future[None] | None = None
        self._is_late = False
        self._failed: set[str] = set()  # pools whose opening is tried again after the pause
        self._pause = Pause(settings.pause_s)
        self._closed = False
        self._num_purges = 0
        self._purged: dict[str, int] = {}  # number of the last purge done in a pool's store

    def register(self, name: str, pool: Any) -> None:
        """Announce a pool; errors as `KVXferStorage.register_mem_pool_host`."""
        pages = read_pool(name, pool)
        mapping = self._map(pages)
        with self._lock:
            known = self.pools.get(name)
            self._num_replaced += known is not None and known[0].places != pages.places
            self.pools[name] = pages, mapping
            if self._stores.get(name) is None:  # asked for before it was registered
                self._stores.pop(name, None)

    def open(self) -> None:
        """Open the store of pools that have none; errors as `on_host_pools_registered`."""
        while opening := self._begin_opening():
            runtime.result(opening)

    def find(self, name: str, deadline: float) -> tuple[PageStore, int] | None:
        """Find the store of a pool, and its group there; None if it is not open by the deadline.

        Pools may be registered after `open`, which some releases do not call. After one wait in
        vain, calls return at once until the store is open. `deadline` is on `runtime.monotonic`.
        """
        while True:
            self._retire()
            with self._lock:
                if self._closed or name in self._stores:
                    return None if self._closed else self._stores[name]
                if name not in self.pools:
                    text = "no page of pool %s is stored or found: SGLang did not register the pool"
                    logger.error(text, name)
                    self._stores[name] = None
                    return None
                if name in self._failed and self._pause.is_on(runtime.monotonic()):
                    return None
                wait_s = 0.0 if self._is_late else runtime.left_s(deadline)
            if (opening := self._begin_opening()) and not self._wait(opening, name, wait_s):
                return None

    def find_to_store(self, name: str, deadline: float) -> tuple[PageStore, int] | None:
        """Find the store of a pool, as `find`, for pages that the calling thread stores.

        After an update of the weights, there is none: SGLang has queued pages for this thread that
        older weights computed. A flush of SGLang's cache drops them, and starts another thread.
        """
        thread = self._thread_state
        if not hasattr(thread, "weights"):
            thread.weights, thread.is_stale = loaded_weights(), False
        place = self.find(name, deadline)
        with self._lock:
            weights, _ = self._version
        if weights != thread.weights and not thread.is_stale:
            thread.is_stale = True  # even if another update brings the old weights back
            logger.warning("no page is stored until SGLang's cache is flushed: the weights changed")
        return None if thread.is_stale else place

    def purge(self, deadline: float) -> None:
        """Forget every page, even in stores that are not open yet: no earlier one will be found."""
        self._retire()
        with self._lock:
            self._num_purges += 1
            done = [name for name, place in self._stores.items() if place is not None]
            self._purged |= dict.fromkeys(done, self._num_purges)
        for store in self._open_stores():
            store.purge(deadline)

    def close(self) -> None:
        """Close all stores; may be called again. From then on, `find` returns None."""
        with self._lock:
            self._closed = True
        for store in self._open_stores():
            _close(store)

    @property
    def _rank(self) -> int:
        """Index of this process among those of the engine, each of which opens a backend."""
        config, rank = self._config, getattr(self._config, "dp_rank", 0)
        rank = rank * config.pp_size + config.pp_rank
        rank = rank * config.attn_cp_size + config.attn_cp_rank
        return int(rank * config.tp_size + config.tp_rank)

    def _map(self, pages: HostPages) -> PageMapping:
        """Map the pages of a pool to portable pages; a replicated page has one writer."""
        config = self._config
        shard, num_shards = WorkerShard(num_kv_heads=1), 1
        if pages.num_kv_heads is not None:
            num_heads = pages.num_kv_heads * config.tp_size
            shard = WorkerShard(num_kv_heads=num_heads, rank=config.tp_rank, tp_size=config.tp_size)
            num_shards = math.gcd(num_heads, config.tp_lcm_size or config.tp_size)
        (mapping,) = map_caches(pages.caches, shard, num_shards=num_shards, opaque=pages.opaque)
        return mapping

    def _begin_opening(self) -> Future[None] | None:
        """Begin, or join, the opening of a store for the pools that have none; None if all have."""
        with self._lock:
            names = [name for name in self.pools if name not in self._stores]
            if self._opening is not None or not names or self._closed:
                return self._opening
            opening = self._opening = Future[None]()
        begin_aside("kvxfer-open", partial(self._open, names, opening))
        return opening

    def _wait(self, opening: Future[None], name: str, wait_s: float) -> bool:
        """Wait for an opening to end; return whether to look for the store again."""
        try:
            runtime.result(opening, wait_s)
        except Exception as exc:
            if not opening.done():
                text = "no page of pool %s is stored or found: its store is still opening"
                logger.log(logging.DEBUG if self._is_late else logging.WARNING, text, name)
                self._is_late = True
                return False
            logger.exception("the store of pool %s cannot be opened", name, exc_info=exc)
            return name not in self._failed
        return True

    def _open(self, names: list[str], opening: Future[None]) -> None:
        """Open a store of pools; callers that wait for it get its error.

        After one of `PERMANENT_ERRORS`, there is no store until the weights or a pool change. After
        any other error, no caller waits for the next attempt: the backend may take long again.
        """
        store: PageStore | None = None
        failure: BaseException | None = None
        version: Any = None
        try:
            self._retire()  # before the namespace is made, which has the version of the weights
            with self._lock:
                retired, self._retired, version = self._retired, [], self._version
            for each in retired:
                _close(each)
            revision = self._settings.revision
            namespace = page_namespace(self._config, revision, names, self._adapters)
            pools = [self.pools[name] for name in names]
            store = PageStore(pools, namespace, self._settings, self._rank)
        except BaseException as exc:  # noqa: BLE001 - callers that wait get it
            failure = exc
        while not self._publish(names, store, failure, version):
            assert store is not None
            store.purge(runtime.monotonic() + self._settings.timeout_s)
        if failure is None:
            opening.set_result(None)
        else:
            opening.set_exception(failure)

    def _publish(
        self, names: list[str], store: PageStore | None, failure: BaseException | None, version: Any
    ) -> bool:
        """End an opening; return False if `purge` was called meanwhile: purge the store first.

        If the engine's weights or memory changed meanwhile, the next opening closes the store.
        """
        with self._lock:
            num_purges = min(self._purged.get(name, 0) for name in names)
            is_current = version == self._version
            if store is not None and is_current and num_purges < self._num_purges:
                self._purged |= dict.fromkeys(names, self._num_purges)
                return False
            if store is None and isinstance(failure, PERMANENT_ERRORS):
                self._stores |= dict.fromkeys(names)
            elif store is not None and is_current:
                self._stores |= {name: (store, group) for group, name in enumerate(names)}
            elif store is not None:
                self._retired.append(store)
            self._failed = set(names) - self._stores.keys() if store is None else set()
            self._pause.begin(runtime.monotonic())
            self._opening, self._is_late = None, bool(self._failed)
            closed = self._closed
        if closed and store is not None:
            _close(store)
        return True

    def _retire(self) -> None:
        """Retire the stores once the engine has other weights, or a pool other memory.

        The next opening closes them, and opens others in the namespace of the new weights; if there
        was a purge, these are purged, too.
        """
        weights = loaded_weights()
        with self._lock:
            version = weights, self._num_replaced
            if version != self._version and not self._closed:
                self._retired += dict.fromkeys(each[0] for each in self._stores.values() if each)
                self._stores.clear()
                self._purged.clear()
                self._version = version

    def _open_stores(self) -> Iterable[PageStore]:
        with self._lock:
            found = [each[0] for each in self._stores.values() if each is not None]
        return dict.fromkeys([*found, *self._retired])


def _close(store: PageStore) -> None:
    try:
        store.close()
    except Exception as exc:  # noqa: BLE001 - SGLang closes it while the process ends
        logger.warning("kvxfer's storage of SGLang cannot be closed: %r", exc)
