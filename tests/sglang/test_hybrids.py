"""Pools of hybrid models: all of them in one store, each with a hit policy of its own."""

from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

from kvxfer.errors import LayoutError
from kvxfer.integrations.sglang import KVXferStorage
from tests.sglang.pools import (
    INDEX_PAGE,
    attention_pool,
    fill,
    index_page,
    index_pool,
    latent_pool,
    logical_page,
    state_pool,
)
from tests.sglang.storages import KEYS, PAGES, extra_config, file_url, opened, rows_of

KV, SWA, MAMBA = PoolName.KV, PoolName.SWA, PoolName.MAMBA


def make_pools(*, first: int = 0) -> dict[str, Any]:
    """Make the pools of a model with full attention, sliding windows and recurrent states."""
    pools = {
        KV: attention_pool("page_first", heads=4),
        SWA: attention_pool("page_first_direct", heads=2),
    }
    for pool in pools.values():
        fill(pool, first=first)
    return {**pools, MAMBA: state_pool(first=first)}


def transfer(name: PoolName, keys: list[str], rows: torch.Tensor, policy: Any = None) -> Any:
    return PoolTransfer(
        name=name, keys=keys, host_indices=rows, hit_policy=policy or PoolHitPolicy.ALL_PAGES
    )


def store(
    storage: KVXferStorage, pools: dict[str, Any], *, swa: list[int], mamba: list[int]
) -> None:
    """Store all pages of the keys and values, and those of the others at these positions."""
    assert storage.batch_set_v1(KEYS, rows_of(pools[KV])) == [True] * 4
    given = [
        transfer(SWA, [KEYS[i] for i in swa], rows_of(pools[SWA], [PAGES[i] for i in swa])),
        transfer(MAMBA, [KEYS[i] for i in mamba], torch.tensor([PAGES[i] for i in mamba])),
    ]
    assert storage.batch_set_v2(given) == {SWA: [True] * len(swa), MAMBA: [True] * len(mamba)}


def test_every_pool_comes_back_bit_for_bit(tmp_path: Path) -> None:
    extra = extra_config(file_url(tmp_path))
    source, target = make_pools(), make_pools(first=50)
    with opened(source, extra) as storage:
        store(storage, source, swa=[2, 3], mamba=[3])
    with opened(target, extra) as storage:
        assert storage.batch_get_v1(KEYS, rows_of(target[KV])) == [True] * 4
        windows = transfer(SWA, KEYS[1:], rows_of(target[SWA], [1, 2, 3]))
        states = transfer(MAMBA, KEYS[3:], torch.tensor([5]))
        assert storage.batch_get_v2([windows, states]) == {SWA: [False, True, True], MAMBA: [True]}
    for page in PAGES:
        assert torch.equal(logical_page(target[KV], page), logical_page(source[KV], page))
    for page, stored in ((2, PAGES[2]), (3, PAGES[3])):
        assert torch.equal(logical_page(target[SWA], page), logical_page(source[SWA], stored))
    for name in ("temporal_buffer", "conv_buffer"):
        ours, theirs = getattr(target[MAMBA], name), getattr(source[MAMBA], name)
        pairs = zip(ours, theirs, strict=True) if isinstance(ours, list) else [(ours, theirs)]
        assert all(torch.equal(our[5], their[PAGES[3]]) for our, their in pairs)


def test_a_prefix_can_be_restored_where_every_pool_allows_it(tmp_path: Path) -> None:
    pools = make_pools()
    with opened(pools, extra_config(file_url(tmp_path))) as storage:
        store(storage, pools, swa=[0, 1, 3], mamba=[1, 3])
        trailing = PoolHitPolicy.TRAILING_PAGES
        none = torch.zeros(0, dtype=torch.int64)

        def find(*transfers: Any) -> tuple[int, dict[Any, int], list[int] | None]:
            found = storage.batch_exists_v2([*KEYS, "00" * 32], list(transfers))
            return found.kv_hit_pages, found.extra_pool_hit_pages, found.restorable_prefix_pages

        assert find() == (4, {KV: 4}, [1, 2, 3, 4])
        last_two = transfer(SWA, KEYS[:2], none, trailing)
        assert find(last_two) == (2, {KV: 4, SWA: 2}, [1, 2])
        last_state = transfer(MAMBA, KEYS[:1], none, trailing)
        assert find(last_state) == (4, {KV: 4, MAMBA: 4}, [2, 4])
        assert find(last_two, last_state) == (2, {KV: 4, SWA: 2, MAMBA: 4}, [2])
        assert find(transfer(SWA, KEYS, none)) == (2, {KV: 4, SWA: 2}, [1, 2])
        another_form = transfer(PoolName.INDEXER, KEYS, none, "block_groups")  # from 0.5.23 on
        assert find(another_form) == (4, {KV: 4}, [1, 2, 3, 4])
        unknown = transfer(PoolName.INDEXER, KEYS, none)
        assert find(unknown) == (0, {KV: 4}, [])
        assert storage.batch_get_v2([unknown]) == {PoolName.INDEXER: [False] * 4}


def test_states_belong_to_their_rank(tmp_path: Path) -> None:
    pools = make_pools()
    extra = extra_config(file_url(tmp_path))
    with opened(pools, extra, tp_size=2, tp_rank=0) as storage:
        store(storage, pools, swa=[0], mamba=[0])
    with opened(pools, extra, tp_size=2, tp_rank=1) as storage:
        of_the_other = transfer(MAMBA, KEYS[:1], torch.tensor([1]))
        assert storage.batch_get_v2([of_the_other]) == {MAMBA: [False]}


def test_a_pool_that_comes_late_is_stored_too_and_never_taken_for_another_one(
    tmp_path: Path,
) -> None:
    kv, draft = (attention_pool("page_first") for _ in range(2))  # of the same shape
    with opened(kv, extra_config(file_url(tmp_path))) as storage:
        storage.register_mem_host_pool_v2(draft, PoolName.DRAFT)
        given = [transfer(PoolName.DRAFT, KEYS, rows_of(draft))]
        assert storage.batch_set_v2(given) == {PoolName.DRAFT: [True] * 4}
        assert storage.batch_exists(KEYS) == 0
        assert storage.batch_set_v1(KEYS[:2], rows_of(kv, PAGES[:2])) == [True] * 2
        assert storage.batch_exists_v2(KEYS, given).kv_hit_pages == 2


def pools_of_sparse_attention(layout: str, *, first: int = 0) -> dict[str, Any]:
    """Make the pools of a model with latents and an indexer of sparse attention."""
    latents = latent_pool(layout, page=INDEX_PAGE)
    fill(latents, first=first)
    return {KV: latents, PoolName.INDEXER: index_pool(layout, first=first)}


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
def test_keys_of_an_indexer_come_back_byte_for_byte_on_every_rank(
    layout: str, tmp_path: Path
) -> None:
    extra, indexer = extra_config(file_url(tmp_path)), PoolName.INDEXER
    source = pools_of_sparse_attention(layout)
    target = pools_of_sparse_attention(layout, first=77)
    before = [index_page(target[indexer], page) for page in range(6)]

    def transfers(pools: dict[str, Any], pages: list[int]) -> list[Any]:
        return [transfer(name, KEYS, rows_of(pool, pages)) for name, pool in pools.items()]

    both = {KV: [True] * 4, indexer: [True] * 4}
    with opened(source, extra, is_mla_model=True) as storage:
        assert storage.batch_set_v2(transfers(source, PAGES)) == both
    with opened(target, extra, is_mla_model=True, tp_size=2, tp_rank=1) as storage:
        found = storage.batch_exists_v2(KEYS, transfers(target, PAGES)[1:])
        assert found.kv_hit_pages == 4
        assert storage.batch_get_v2(transfers(target, PAGES[::-1])) == both
    for page, stored in zip(PAGES[::-1], PAGES, strict=True):
        assert torch.equal(index_page(target[indexer], page), index_page(source[indexer], stored))
    for page in {*range(6)}.difference(PAGES):
        assert torch.equal(index_page(target[indexer], page), before[page])


def test_keys_of_an_indexer_in_another_layout_are_not_found(tmp_path: Path) -> None:
    """Their bytes have no meaning here, so that they cannot be brought into another order."""
    extra, indexer = extra_config(file_url(tmp_path)), PoolName.INDEXER
    source = pools_of_sparse_attention("page_first")
    given = [transfer(indexer, KEYS, rows_of(source[indexer]))]
    with opened(source, extra, is_mla_model=True) as storage:
        assert storage.batch_set_v2(given) == {indexer: [True] * 4}
    with opened(pools_of_sparse_attention("layer_first"), extra, is_mla_model=True) as storage:
        assert storage.batch_get_v2(given) == {indexer: [False] * 4}


def test_a_rank_whose_indexer_or_states_have_no_bytes_is_refused_by_name() -> None:
    latents, states = latent_pool("page_first", page=INDEX_PAGE), state_pool()
    states.temporal_buffer, states.conv_buffer = torch.zeros(6, 0), []
    indexer = index_pool("page_first", is_dummy=True)
    for name, pool in (("indexer", indexer), ("mamba", states)):
        refused = pytest.raises(LayoutError, match=f"'{name}', a .*PoolHost, has no bytes on this")
        extra, pools = extra_config("host://?capacity=64MiB"), {KV: latents, PoolName(name): pool}
        with refused, opened(pools, extra, is_mla_model=True):
            pass
