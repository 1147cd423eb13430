"""Pages of SGLang's own host pools, byte by byte: layouts, parallelism, identity."""

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

from kvxfer.errors import InvalidArgumentError, LayoutError
from kvxfer.integrations.sglang import host_pools
from tests.sglang.pools import NUM_PAGES, attention_pool, fill, latent_pool, logical_page
from tests.sglang.storages import KEYS, PAGES, extra_config, file_url, opened, rows_of

Make = Callable[..., Any]
HOST = "host://?capacity=64MiB"


LATENT_LAYOUTS = ["layer_first", "page_first", "page_first_direct"]
ATTENTION_LAYOUTS = [*LATENT_LAYOUTS, "page_head"]
if find_spec("sglang.srt.mem_cache.pool_host.page_unified"):
    LATENT_LAYOUTS += ["page_unified"]
    ATTENTION_LAYOUTS += ["page_unified"]


@pytest.mark.parametrize(
    ("make", "layouts"), [(attention_pool, ATTENTION_LAYOUTS), (latent_pool, LATENT_LAYOUTS)]
)
def test_a_release_has_no_layout_that_is_not_tested(make: Make, layouts: list[str]) -> None:
    for layout in set(host_pools.ATTENTION_LAYOUTS).difference(layouts):
        with pytest.raises(ValueError, match="Unsupported layout"):
            make(layout)


@pytest.mark.parametrize(
    ("make", "wrote", "reads"),
    [
        *((attention_pool, *pair) for pair in product(ATTENTION_LAYOUTS, repeat=2)),
        *((latent_pool, *pair) for pair in product(LATENT_LAYOUTS, repeat=2)),
    ],
)
def test_pages_of_every_layout_come_back_in_every_layout_bit_for_bit(
    make: Make, wrote: str, reads: str, tmp_path: Path
) -> None:
    source, target = make(wrote), make(reads)
    fill(source)
    fill(target, first=99)
    before = target.kv_buffer.clone()
    extra = extra_config(file_url(tmp_path))
    is_mla = make is latent_pool
    with opened(source, extra, is_mla_model=is_mla) as storage:
        assert storage.batch_set_v1(KEYS, rows_of(source)) == [True] * 4
    with opened(target, extra, is_mla_model=is_mla) as storage:
        assert storage.batch_exists([*KEYS, "00" * 32]) == 4
        assert storage.batch_get_v1(KEYS[1:], rows_of(target, [5, 1, 2])) == [True] * 3
    for page, stored in ((5, PAGES[1]), (1, PAGES[2]), (2, PAGES[3])):
        assert torch.equal(logical_page(target, page), logical_page(source, stored))
    after, target.kv_buffer = target.kv_buffer, before
    untouched = {page: logical_page(target, page) for page in (0, 3, 4)}
    target.kv_buffer = after
    for page, bits in untouched.items():
        assert torch.equal(logical_page(target, page), bits)


@pytest.mark.parametrize("layout", ATTENTION_LAYOUTS)
def test_what_two_ranks_stored_one_rank_loads_and_the_reverse(layout: str, tmp_path: Path) -> None:
    whole, halves = attention_pool("page_first", heads=4), []
    extra = extra_config(file_url(tmp_path))
    for rank in range(2):
        half = attention_pool(layout, heads=2)
        fill(half, first=rank * 1000)
        with opened(half, extra, tp_rank=rank, tp_size=2, tp_lcm_size=2) as storage:
            assert storage.batch_set_v1(KEYS, rows_of(half)) == [True] * 4
        halves.append(half)
        with opened(whole, extra, tp_lcm_size=2) as storage:  # both must have stored it
            assert storage.batch_exists(KEYS) == 4 * rank
    with opened(whole, extra, tp_lcm_size=2) as storage:
        assert storage.batch_get_v1(KEYS, rows_of(whole)) == [True] * 4
        together = [torch.cat([logical_page(each, page) for each in halves], 3) for page in PAGES]
        for page, bits in zip(PAGES, together, strict=True):
            assert torch.equal(logical_page(whole, page), bits)
        fill(whole, first=7)
        others = [key[::-1] for key in KEYS]
        assert storage.batch_set_v1(others, rows_of(whole)) == [True] * 4
    for rank in range(2):
        half = attention_pool(layout, heads=2)
        with opened(half, extra, tp_rank=rank, tp_size=2, tp_lcm_size=2) as storage:
            assert storage.batch_get_v1(others, rows_of(half)) == [True] * 4
        for page in PAGES:
            share = logical_page(whole, page)[:, :, :, 2 * rank : 2 * rank + 2]
            assert torch.equal(logical_page(half, page), share)


def shift(pool: Any) -> Any:
    pool.start_layer = 3  # a later stage of a pipeline
    return pool


@pytest.mark.parametrize(
    ("extra", "config", "make"),
    [
        ({"revision": "2"}, {}, attention_pool),
        ({}, {"model_name": "another"}, attention_pool),
        ({}, {"pp_size": 2, "pp_rank": 0}, attention_pool),
        ({}, {"pp_size": 2, "pp_rank": 1}, attention_pool),
        ({}, {"attn_cp_size": 2, "attn_cp_rank": 1}, attention_pool),
        ({}, {"tp_size": 2}, attention_pool),
        ({}, {}, partial(attention_pool, heads=2)),
        ({}, {}, partial(attention_pool, dtype=torch.float16)),
        ({}, {}, lambda layout: shift(attention_pool(layout))),
    ],
)
def test_pages_of_another_identity_shape_or_data_type_are_not_found(
    extra: dict[str, Any], config: dict[str, Any], make: Make, tmp_path: Path
) -> None:
    pool = attention_pool("page_first")
    with opened(pool, extra_config(file_url(tmp_path))) as storage:
        assert storage.batch_set_v1(KEYS, rows_of(pool)) == [True] * 4
        assert storage.batch_exists(KEYS) == 4
    other = make("page_first")
    with opened(other, extra_config(file_url(tmp_path), **extra), **config) as storage:
        assert storage.batch_exists(KEYS) == 0


class MXFP8Host(MHATokenToKVPoolHost):  # type: ignore[misc]
    """Subclass that keeps scales elsewhere."""


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("__class__", MXFP8Host, "'kv' is a MXFP8Host; supported kinds are"),
        ("page_num", NUM_PAGES + 1, "'kv', layout 'page_first', should have a buffer"),
        ("layout", "page_first_kv_split", "'page_first_kv_split'; supported layouts are layer_f"),
    ],
)
def test_a_pool_of_another_kind_shape_or_layout_is_refused_by_name(
    name: str, value: Any, words: str
) -> None:
    pool = attention_pool("page_first")
    setattr(pool, name, value)
    with pytest.raises(LayoutError, match=words), opened(pool, extra_config(HOST)):
        pass


def test_heads_that_cannot_be_shared_are_divided_as_far_as_possible(tmp_path: Path) -> None:
    pool = attention_pool("page_first", heads=4)
    fill(pool)
    with opened(pool, extra_config(file_url(tmp_path)), tp_lcm_size=8) as storage:
        assert storage.batch_set_v1(KEYS, rows_of(pool)) == [True] * 4
        assert storage.batch_get_v1(KEYS, rows_of(pool)) == [True] * 4


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"interface_v1": 0}, "interface_v1"),
        ({"revision": ""}, "revision"),
        ({"backend": "nowhere://"}, "backend"),
        ({"time_out_s": 3}, "time_out_s"),
        ({"timeout_s": 0}, "timeout_s is 0"),
        ({"timeout_s": "soon"}, "timeout_s is 'soon'"),
        ({"pause_s": -1}, "pause_s is -1"),
        ({"pause_s": float("inf")}, "pause_s is inf"),
        ({"staging": "much"}, "staging"),
    ],
)
def test_a_setting_of_no_use_is_refused_by_name(
    changed: dict[str, Any], message: str, tmp_path: Path
) -> None:
    extra = extra_config(file_url(tmp_path)) | changed
    with (
        pytest.raises(InvalidArgumentError, match=message),
        opened(attention_pool("page_first"), extra),
    ):
        pass
