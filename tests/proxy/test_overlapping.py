"""Both legs at once: the ticket that the proxy makes, and engines that fail meanwhile."""

import asyncio

import pytest

from tests.proxy.fake_engines import BODY, LIMIT_S, PARAMS, routed


async def test_both_legs_begin_at_once_with_one_ticket_once_the_lender_is_known() -> None:
    async with routed(overlap=True) as it:
        assert (await it.post())[0] == 200
        assert it.decode[0].asked[0].params == PARAMS
        it.prefill[0].hangs = True  # so only a decode leg that does not wait for it can end
        assert await it.post() == (200, {"by": it.decode[0].url})
        lent, params = it.prefill[0].asked[1].params, it.decode[0].asked[1].params
    ticket = params["remote_request_id"]
    assert len(ticket) == 32
    assert int(ticket, 16) >= 0
    assert lent["remote_request_id"] == ticket
    assert lent["do_remote_decode"] is True
    assert params == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_request_id": ticket,
        "remote_engine_id": "",
        "remote_host": "10.0.0.7",
        "remote_port": 7100,
        "remote_block_ids": [[0]],
        "tp_size": 2,
        "transfer_mode": "overlap",
    }


async def test_no_two_requests_have_the_same_ticket() -> None:
    async with routed(overlap=True) as it:
        await it.post()
        await asyncio.gather(*(it.post() for _ in range(8)))
        tickets = {asked.params["remote_request_id"] for asked in it.decode[0].asked[1:]}
    assert len(tickets) == 8


async def test_one_leg_comes_after_the_other_where_the_lender_is_not_known() -> None:
    async with routed(overlap=True) as it:
        it.prefill[0].params = {**PARAMS, "remote_port": None}
        for _ in range(2):
            await it.post()
        assert [asked.params for asked in it.decode[0].asked] == [it.prefill[0].params] * 2


async def test_the_lender_of_one_engine_is_not_taken_for_that_of_another() -> None:
    async with routed(num_prefill=2, overlap=True) as it:
        it.prefill[1].params = {**PARAMS, "remote_host": "10.0.0.8"}
        for _ in range(4):
            await it.post()
        hosts = [asked.params["remote_host"] for asked in it.decode[0].asked]
        modes = [asked.params.get("transfer_mode") for asked in it.decode[0].asked]
        tickets = {e.params["remote_host"]: e.asked[1].params for e in it.prefill}
        assert sorted(hosts) == ["10.0.0.7"] * 2 + ["10.0.0.8"] * 2
        assert modes == [None, None, "overlap", "overlap"]
        for asked in it.decode[0].asked[2:]:
            params = asked.params
            assert (
                tickets[params["remote_host"]]["remote_request_id"] == params["remote_request_id"]
            )


async def test_one_leg_comes_after_the_other_where_an_engine_lends_at_several_places() -> None:
    async with routed(overlap=True) as it:
        for port in (7100, 7200, 7100, 7200):  # as replicas behind one server do
            it.prefill[0].params = {**PARAMS, "remote_port": port}
            await it.post()
        params = [asked.params for asked in it.decode[0].asked]
    assert [each["remote_port"] for each in params] == [7100, 7100, 7100, 7200]
    assert [each.get("transfer_mode") for each in params] == [None, "overlap", None, None]


async def test_a_prefill_leg_that_fails_is_no_error_and_its_lender_is_asked_anew() -> None:
    async with routed(overlap=True) as it:
        await it.post()
        it.prefill[0].status = it.prefill[0].health = 500
        assert (await it.post())[0] == 200
        ejected = f'engine_ejected{{engine="{it.prefill[0].url}",leg="prefill"}}'
        await it.until(ejected, 1)
        it.prefill[0].status = it.prefill[0].health = 200
        await it.until(ejected, 0)
        moved = {**PARAMS, "remote_port": 7200}
        it.prefill[0].params = moved
        assert (await it.post())[0] == 200
        assert it.decode[0].asked[2].params == moved


@pytest.mark.parametrize("status", [400, 500])
async def test_the_prefill_leg_ends_when_no_decode_engine_answers(status: int) -> None:
    async with routed(overlap=True) as it:
        await it.post()
        it.prefill[0].hangs = True
        it.decode[0].status = status
        assert (await it.post(BODY))[0] == (502 if status == 500 else 400)
        await asyncio.wait_for(it.prefill[0].is_left.wait(), LIMIT_S)
