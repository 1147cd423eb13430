"""Clients that go before the end: the engines that work for them are told at once."""

import asyncio
import json

import aiohttp
import pytest

from tests.proxy.fake_engines import BODY, COMPLETIONS, LIMIT_S, PIECES, SOON_S, routed


async def test_a_client_that_goes_during_the_prefill_leg_ends_it() -> None:
    async with routed() as it:
        it.prefill[0].hangs = True
        asking = asyncio.create_task(it.post())
        await asyncio.wait_for(it.prefill[0].is_asked.wait(), LIMIT_S)
        asking.cancel()
        await asyncio.wait_for(it.prefill[0].is_left.wait(), SOON_S)
        await it.until('requests_total{outcome="cancelled"}', 1)
        samples = await it.samples()
        assert not it.decode[0].asked
    assert (
        samples[f'legs_total{{engine="{it.prefill[0].url}",leg="prefill",outcome="cancelled"}}']
        == 1
    )
    assert samples["requests_under_way"] == 0
    assert samples[f'engine_ejected{{engine="{it.prefill[0].url}",leg="prefill"}}'] == 0


async def test_a_client_that_goes_during_the_stream_ends_it() -> None:
    async with routed() as it:
        it.decode[0].may_go_on.clear()
        body = json.dumps({**BODY, "stream": True})
        async with it.session.post(it.url + COMPLETIONS, data=body) as response:
            assert await response.content.readany() == PIECES[0]
            response.close()
        await asyncio.wait_for(it.decode[0].is_left.wait(), SOON_S)
        await it.until('requests_total{outcome="cancelled"}', 1)
        assert (await it.get("/health"))[0] == 200


async def test_a_client_that_goes_during_overlapping_legs_ends_both() -> None:
    async with routed(overlap=True) as it:
        await it.post()  # the proxy learns where blocks are lent
        engines = (it.prefill[0], it.decode[0])
        for engine in engines:
            engine.hangs = True
            engine.is_asked.clear()
        asking = asyncio.create_task(it.post())
        for engine in engines:
            await asyncio.wait_for(engine.is_asked.wait(), LIMIT_S)
        asking.cancel()
        for engine in engines:
            await asyncio.wait_for(engine.is_left.wait(), SOON_S)
        await it.until('requests_total{outcome="cancelled"}', 1)


async def test_requests_under_way_end_well_when_the_proxy_ends() -> None:
    async with routed(drain_timeout_s=LIMIT_S) as it:
        it.decode[0].may_go_on.clear()
        body = json.dumps({**BODY, "stream": True})
        async with it.session.post(it.url + COMPLETIONS, data=body) as response:
            ending = asyncio.create_task(it.proxy.aclose())
            await it.until_closed()
            it.decode[0].may_go_on.set()
            assert await response.read() == b"".join(PIECES)
        await asyncio.wait_for(ending, LIMIT_S)


async def test_requests_that_are_late_are_cut_off_when_the_proxy_ends() -> None:
    async with routed(drain_timeout_s=0.1) as it:
        it.decode[0].may_go_on.clear()
        body = json.dumps({**BODY, "stream": True})
        async with it.session.post(it.url + COMPLETIONS, data=body) as response:
            await asyncio.wait_for(it.proxy.aclose(), LIMIT_S)
            with pytest.raises(aiohttp.ClientPayloadError):
                await response.read()
        await asyncio.wait_for(it.decode[0].is_left.wait(), SOON_S)
