"""Choice of engines: the least busy one, ejection, and the way back."""

import asyncio
from collections import Counter

import pytest

from examples.proxy.engines import Engine, EnginePool
from tests.proxy.fake_engines import LIMIT_S, routed

URLS = ("http://a", "http://b", "http://c")


@pytest.fixture
def ejected() -> list[str]:
    return []


@pytest.fixture
def pool(ejected: list[str]) -> EnginePool:
    return EnginePool(URLS, lambda engine: ejected.append(engine.url))


def chosen(engine: Engine | None) -> str:
    return engine.url if engine else ""


def test_engines_that_are_equally_busy_take_turns(pool: EnginePool) -> None:
    assert Counter(chosen(pool.choose()) for _ in range(9)) == dict.fromkeys(URLS, 3)


def test_the_engine_with_the_least_requests_is_chosen(pool: EnginePool) -> None:
    a, b, c = pool.engines
    with a.under_way(), b.under_way(), b.under_way(), c.under_way():
        assert {chosen(pool.choose()) for _ in range(6)} == {"http://a", "http://c"}
        with a.under_way(), c.under_way(), c.under_way():
            assert {chosen(pool.choose()) for _ in range(6)} == {"http://a", "http://b"}
    assert [engine.num_requests for engine in pool.engines] == [0, 0, 0]


def test_an_ejected_engine_is_not_chosen_until_it_is_back(
    pool: EnginePool, ejected: list[str]
) -> None:
    a = pool.engines[0]
    pool.failed(a, "as told", 10.0)
    assert {chosen(pool.choose()) for _ in range(6)} == {"http://b", "http://c"}
    a.bring_back()
    assert {chosen(pool.choose()) for _ in range(6)} == set(URLS)
    assert ejected == ["http://a"]


def test_the_ejected_engine_whose_time_is_next_is_chosen_where_no_other_is_left(
    pool: EnginePool,
) -> None:
    a, b, c = pool.engines
    for engine, now_s in ((b, 1.0), (c, 2.0), (a, 3.0)):
        pool.failed(engine, "as told", now_s)
    assert pool.choose() is None
    assert not pool.is_healthy
    assert pool.choose_any([]) is b
    assert pool.choose_any([b]) is c
    assert pool.choose_any([b, c]) is a
    assert pool.choose_any([a, b, c]) is None
    a.bring_back()
    assert pool.choose_any([]) is a
    assert pool.choose_any([a]) is b


def test_the_back_off_doubles_up_to_half_a_minute_and_begins_anew_after_a_success() -> None:
    engine = Engine("http://a")
    waits = []
    for _ in range(9):
        engine.eject("as told", 100.0)
        waits.append(engine.retry_at_s - 100.0)
        engine.bring_back()
    assert waits == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]
    engine.succeeded()
    engine.eject("as told", 100.0)
    assert engine.retry_at_s == 100.5


def test_requests_that_fail_together_eject_an_engine_once(
    pool: EnginePool, ejected: list[str]
) -> None:
    a = pool.engines[0]
    for _ in range(5):
        pool.failed(a, "as told", 10.0)
    assert a.retry_at_s == 10.5
    assert ejected == ["http://a"]


async def test_requests_are_divided_among_engines_of_both_kinds() -> None:
    async with routed(num_prefill=2, num_decode=2) as it:
        await asyncio.gather(*(it.post() for _ in range(20)))
        assert [len(engine.asked) for engine in (*it.prefill, *it.decode)] == [10, 10, 10, 10]


async def test_a_busy_engine_gets_no_more_requests_while_another_is_idle() -> None:
    async with routed(num_decode=2) as it:
        busy, idle = it.decode
        busy.hangs = idle.hangs = True
        stuck = asyncio.create_task(it.post())
        waits = {asyncio.create_task(each.is_asked.wait()) for each in it.decode}
        _, left = await asyncio.wait(waits, timeout=LIMIT_S, return_when=asyncio.FIRST_COMPLETED)
        (left.pop()).cancel()
        if idle.asked:
            busy, idle = idle, busy
        idle.hangs = False
        for _ in range(5):
            assert await it.post() == (200, {"by": idle.url})
        stuck.cancel()
    assert len(busy.asked) == 1


@pytest.mark.parametrize("kind", ["prefill", "decode"])
async def test_an_engine_that_failed_is_probed_and_comes_back(kind: str) -> None:
    async with routed(num_prefill=2, num_decode=2) as it:
        failing, other = it.prefill if kind == "prefill" else it.decode
        failing.status = failing.health = 503
        await asyncio.gather(*(it.post() for _ in range(4)))
        ejected = f'engine_ejected{{engine="{failing.url}",leg="{kind}"}}'
        assert (await it.samples())[ejected] == 1
        num_asked = len(failing.asked)
        await asyncio.wait_for(failing.probed.wait(), LIMIT_S)  # and not well
        await it.post()
        assert len(failing.asked) == num_asked
        failing.status = failing.health = 200
        await it.until(ejected, 0)
        await asyncio.gather(*(it.post() for _ in range(4)))
        assert len(failing.asked) == num_asked + 2
        samples = await it.samples()
        assert samples[f'ejections_total{{engine="{failing.url}",leg="{kind}"}}'] == 1
        assert f'ejections_total{{engine="{other.url}",leg="{kind}"}}' not in samples


async def test_an_engine_that_was_started_again_comes_back() -> None:
    async with routed() as it:
        (engine,) = it.decode
        await engine.__aexit__()
        assert (await it.post())[0] == 502
        await engine.__aenter__()
        await it.until(f'engine_ejected{{engine="{engine.url}",leg="decode"}}', 0)
        assert (await it.post())[0] == 200
