"""Storage of SGLang's hierarchical cache, over any backends of kvxfer."""

import logging
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import torch

from kvxfer import runtime
from kvxfer.engine_side.plug import Plug
from kvxfer.errors import InvalidArgumentError
from kvxfer.face import count_leading
from kvxfer.integrations.sglang.interface import (
    SUPPORTED,
    HiCacheStorage,
    HiCacheStorageConfig,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
    StorageMetrics,
)
from kvxfer.integrations.sglang.pool_stores import PageStore, PoolStores
from kvxfer.integrations.sglang.settings import read_settings
from kvxfer.storage.keys import BlockKey, make_block_key
from kvxfer.transfer.job import Direction

KV = str(PoolName.KV)
"""Name of the pool that calls without a pool's name are for."""

BLOCK_GROUPS = "block_groups"
"""Policy, since SGLang 0.5.23, of a second form of the pages, which never limits the hit. No pool
of SGLang uses it yet."""

logger = logging.getLogger(__name__)


class KVXferStorage(Plug, HiCacheStorage):
    """Storage of SGLang's hierarchical cache in files, host memory, peers, or tiers of them.

    Pages are portable: an engine with the same keys can load them even if the layout of its host
    pools, or its tensor parallelism, is another. Every page is verified, and has a result of its
    own. No call raises, and each ends in time; SGLang computes the pages that it does not get.

    Two threads of SGLang may call it at the same time, one that stores and one that loads.

    Args:
        storage_config: What SGLang knows of the engine; `extra_config` has the settings, see
            `StorageSettings`.
        kwargs: Unused; empty in SGLang's releases so far.

    Raises:
        InvalidArgumentError: A setting is missing, unknown or invalid; or an adapter that the
            engine was started with is not a folder with readable files.
        UnsupportedEngineError: This release of SGLang requires methods that kvxfer does not have,
            or exposes its settings differently.
    """

    packages, supported = ("sglang",), SUPPORTED

    def __init__(
        self, storage_config: HiCacheStorageConfig, kwargs: Mapping[str, Any] | None = None
    ) -> None:
        del kwargs
        self._config = storage_config
        self._settings = read_settings(storage_config.extra_config)
        self._stores = PoolStores(storage_config, self._settings)
        self._stats = StorageMetrics()

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Announce the pool of the keys and values.

        Raises:
            LayoutError: The kind of the pool is not supported.
            InvalidArgumentError: Its heads cannot be divided into `tp_lcm_size`.
        """
        super().register_mem_pool_host(mem_pool_host)
        self._stores.register(KV, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: str) -> None:
        """Announce another pool of a hybrid model; errors as `register_mem_pool_host`."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        if str(host_pool_name) != KV:
            self._stores.register(str(host_pool_name), host_pool)

    def on_host_pools_registered(self) -> None:
        """Open the backend.

        Raises:
            InvalidArgumentError: The backend cannot be opened for these pools.
            CapacityError: Less memory or disk is available than was configured.
            BackendUnavailableError: The backend cannot start.
            UnsupportedEngineError: This release of SGLang exposes its settings differently.
        """
        self._stores.open()

    def batch_exists(self, keys: list[str], *_: Any, **__: Any) -> int:
        """Count the leading pages that are there, with one lookup for all keys."""
        return count_leading(self._look_up(keys, [KV])[KV])

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, *_: Any, **__: Any
    ) -> list[bool]:
        """Load pages; return for each whether it is there, verified."""
        return self._move(Direction.LOAD, KV, keys, host_indices, self._deadline())

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, *_: Any, **__: Any
    ) -> list[bool]:
        """Store pages; return for each whether that was done."""
        return self._move(Direction.STORE, KV, keys, host_indices, self._deadline())

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: list[PoolTransfer] | None = None, *_: Any, **__: Any
    ) -> PoolTransferResult:
        """Find the prefixes of a hybrid model that can be restored from all of its pools."""
        transfers = pool_transfers or []
        found = self._look_up(keys, [KV, *(str(each.name) for each in transfers)])
        num_pages = count_leading(found[KV])
        restorable = set(range(1, num_pages + 1))
        hits: dict[Any, int] = {PoolName.KV: num_pages} if num_pages else {}
        for transfer in transfers:
            if transfer.hit_policy == BLOCK_GROUPS:
                continue
            there = found[str(transfer.name)][:num_pages]
            if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
                fitting = set(range(1, count_leading(there) + 1))
            elif transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
                fitting = _ends(there, max(1, len(transfer.keys or ())))
            else:
                text = "no hit in pool %s: its hit policy %s is unknown"
                logger.warning(text, transfer.name, transfer.hit_policy)
                fitting = set()
            if fitting:
                hits[transfer.name] = max(fitting)
            restorable &= fitting
        return PoolTransferResult(max(restorable, default=0), hits, sorted(restorable))

    def batch_get_v2(
        self, transfers: list[PoolTransfer], *_: Any, **__: Any
    ) -> dict[str, list[bool]]:
        """Load pages of several pools; return for each pool the results of its pages."""
        return self._move_all(Direction.LOAD, transfers)

    def batch_set_v2(
        self, transfers: list[PoolTransfer], *_: Any, **__: Any
    ) -> dict[str, list[bool]]:
        """Store pages of several pools; return for each pool the results of its pages."""
        return self._move_all(Direction.STORE, transfers)

    def exists(self, key: str) -> bool:
        """Return whether a page is there."""
        return self.batch_exists([key]) == 1

    def get(self, *_: Any, **__: Any) -> torch.Tensor | None:
        """Return None: `batch_get_v1` loads pages, see `interface_v1`."""
        return None

    def batch_get(self, keys: list[str], *_: Any, **__: Any) -> list[torch.Tensor | None]:
        """Return None for every page, as `get`."""
        return [None] * len(keys)

    def set(self, *_: Any, **__: Any) -> bool:
        """Return False: `batch_set_v1` stores pages, see `interface_v1`."""
        return False

    def batch_set(self, *_: Any, **__: Any) -> bool:
        """Return False, as `set`."""
        return False

    def clear(self) -> None:
        """Forget every page of this model: none that was stored before will be found."""
        self._stores.purge(self._deadline())

    def get_stats(self) -> StorageMetrics:
        """Return the pages and GB/s of the moves since the previous call, for SGLang's metrics."""
        stats, self._stats = self._stats, StorageMetrics()
        return stats

    def close(self) -> None:
        """Close the backend; may be called again. Later calls find and store nothing."""
        self._stores.close()

    def _deadline(self) -> float:
        return runtime.monotonic() + self._settings.timeout_s

    def _look_up(self, keys: Sequence[str], names: Sequence[str]) -> dict[str, list[bool]]:
        """Look up all keys in some pools, with one lookup for each store."""
        found, deadline = {name: [False] * len(keys) for name in names}, self._deadline()
        asked: dict[PageStore, list[tuple[str, int]]] = {}
        try:
            for name in found:
                place = self._stores.find(name, deadline)
                if place is not None:
                    asked.setdefault(place[0], []).append((name, place[1]))
            for store, members in asked.items():
                wanted = [_block_key(key, group) for _, group in members for key in keys]
                answers = iter(store.lookup(wanted, deadline))
                found |= {name: list(islice(answers, len(keys))) for name, _ in members}
        except Exception:
            logger.exception("lookup of %d pages failed, so they are misses", len(keys))
        return found

    def _move_all(
        self, direction: Direction, transfers: Sequence[PoolTransfer]
    ) -> dict[str, list[bool]]:
        deadline = self._deadline()
        return {
            each.name: self._move(direction, str(each.name), each.keys, each.host_indices, deadline)
            for each in transfers
        }

    def _move(
        self,
        direction: Direction,
        name: str,
        keys: Sequence[str] | None,
        host_indices: torch.Tensor | None,
        deadline: float,
    ) -> list[bool]:
        """Move pages of a pool; `host_indices` has all rows of each page."""
        keys = keys or []
        try:
            stores = self._stores
            find = stores.find if direction is Direction.LOAD else stores.find_to_store
            place = find(name, deadline)
            if place is None or not keys:
                return [False] * len(keys)
            store, group = place
            pages = _page_ids(self._stores.pools[name][0].rows_per_page, len(keys), host_indices)
            block_keys = [_block_key(key, group) for key in keys]
            began = runtime.monotonic()
            done = store.move_pages(direction, group, block_keys, pages, deadline)
            self._count(direction, name, sum(done), runtime.monotonic() - began)
        except Exception:
            logger.exception("%s of %d pages of pool %s failed", direction.name, len(keys), name)
            return [False] * len(keys)
        return done

    def _count(self, direction: Direction, name: str, num_pages: int, seconds: float) -> None:
        if not self._config.enable_storage_metrics or not num_pages:
            return
        _, mapping = self._stores.pools[name]
        stats, rate = self._stats, num_pages * mapping.num_bytes / seconds / 1e9
        loading = direction is Direction.LOAD
        (stats.prefetch_pgs if loading else stats.backup_pgs).append(num_pages)
        (stats.prefetch_bandwidth if loading else stats.backup_bandwidth).append(rate)


def _page_ids(rows_per_page: int, num_pages: int, host_indices: torch.Tensor | None) -> list[int]:
    """Find the pages that rows of a pool make up, page after page.

    Raises:
        InvalidArgumentError: There are not as many rows as these pages have, or the rows of a page
            are not those of one page, in order.
    """
    num_rows = 0 if host_indices is None else host_indices.numel()
    if host_indices is None or num_rows != num_pages * rows_per_page:
        raise InvalidArgumentError("host_indices", num_rows, f"{num_pages} x {rows_per_page}")
    rows = host_indices.cpu().reshape(num_pages, rows_per_page)
    pages = rows[:, 0] // rows_per_page
    wrong = rows != pages[:, None] * rows_per_page + torch.arange(rows_per_page, device="cpu")
    if wrong.any():
        rule = f"whole pages of {rows_per_page} rows, each in order"
        raise InvalidArgumentError("host_indices", int(rows[wrong][0]), rule)
    return [int(page) for page in pages.tolist()]


def _block_key(key: str, group: int) -> BlockKey:
    return make_block_key(bytes.fromhex(key), group)


def _ends(found: Sequence[bool], num_trailing: int) -> set[int]:
    """Find the prefixes, in pages, of which the last `num_trailing` pages are there."""
    ends, run = set(), 0
    for end, is_there in enumerate(found, start=1):
        run = run + 1 if is_there else 0
        if run >= min(num_trailing, end):
            ends.add(end)
    return ends
