"""Watched processes: real answers, none, late and wrong ones, and processes that come back."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from http import HTTPStatus

import aiohttp
import pytest

from kvxfer.cli.http_pages import HTTPPages, Page
from kvxfer.endpoint import Endpoint
from kvxfer.top import WatchedProcess, ask_all
from tests.top import recorded

HOST = "127.0.0.1"
TIMEOUT_S = 5.0


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


def shown(
    make: Callable[[], bytes], port: int = 0, status: HTTPStatus = HTTPStatus.OK
) -> HTTPPages:
    return HTTPPages(Endpoint(HOST, port), {"/metrics": lambda: Page(status, make())})


def known(process: WatchedProcess) -> tuple[bool, bool]:
    """Whether the present metrics are known, and rates."""
    return process.latest is not None, process.window is not None


async def test_an_address_that_dies_and_comes_back(session: aiohttp.ClientSession) -> None:
    metrics = recorded.watched()
    recorded.work(metrics)
    async with shown(metrics.text) as pages:
        endpoint = pages.endpoint
        process = WatchedProcess(endpoint)
        await process.ask(session, TIMEOUT_S)
        assert known(process) == (True, False)
        await process.ask(session, TIMEOUT_S)
        assert known(process) == (True, True)
        assert process.answered_in_s > 0
    await process.ask(session, TIMEOUT_S)
    assert process.error == "Connection refused"
    assert known(process) == (False, False)
    since_s = process.failing_since_s
    await process.ask(session, TIMEOUT_S)
    assert process.failing_since_s == since_s <= time.monotonic()
    async with shown(metrics.text, endpoint.port):
        await process.ask(session, TIMEOUT_S)
        assert (process.error, process.restarted_at_s) == ("", None), "the same run of the process"
        assert known(process) == (True, False), "a rate over the outage is none of now"
        await process.ask(session, TIMEOUT_S)
        assert known(process) == (True, True)
    async with shown(recorded.watched().text, endpoint.port):
        await process.ask(session, TIMEOUT_S)
        assert process.restarted_at_s is not None
        assert known(process) == (True, False)


async def test_an_address_that_never_answers_is_late_and_delays_no_other(
    session: aiohttp.ClientSession,
) -> None:
    @contextlib.asynccontextmanager
    async def silent() -> AsyncIterator[Endpoint]:
        ended = asyncio.Event()

        async def wait(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await ended.wait()
            writer.close()

        async with await asyncio.start_server(wait, HOST, 0) as server:
            yield Endpoint(HOST, server.sockets[0].getsockname()[1])
            ended.set()

    async with silent() as endpoint, shown(recorded.watched().text) as pages:
        late, other = WatchedProcess(endpoint), WatchedProcess(pages.endpoint)
        await ask_all([late, other], session, 0.5)
    assert late.error == "no answer within 0.5 s"
    assert other.latest is not None


@pytest.mark.parametrize(
    ("body", "status", "error"),
    [
        (b"", HTTPStatus.NOT_FOUND, "answers GET /metrics with 404 Not Found"),
        (b"up 1\n", HTTPStatus.OK, "answers, but has no metrics of kvxfer's tiers"),
        (b"kvxfer_leases \xff\n", HTTPStatus.OK, "its metrics are not in Prometheus' text format"),
        (b"#" * ((32 << 20) + 1), HTTPStatus.OK, "its answer has more than 33554432 bytes"),
    ],
)
async def test_a_wrong_answer_is_an_error_of_that_address(
    session: aiohttp.ClientSession, body: bytes, status: HTTPStatus, error: str
) -> None:
    async with shown(lambda: body, status=status) as pages:
        process = WatchedProcess(pages.endpoint)
        await process.ask(session, TIMEOUT_S)
    assert process.error.startswith(error)
    assert process.latest is None


async def test_a_host_without_an_address_and_a_server_of_another_protocol(
    session: aiohttp.ClientSession,
) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"SSH-2.0\r\n\r\n")
        writer.close()

    unknown = WatchedProcess(Endpoint("no-such-host.invalid", 80))
    async with await asyncio.start_server(answer, HOST, 0) as server:
        foreign = WatchedProcess(Endpoint(HOST, server.sockets[0].getsockname()[1]))
        impossible = WatchedProcess(Endpoint("x" * 70 + ".invalid", 80))  # no label is that long
        await ask_all([unknown, foreign, impossible], session, TIMEOUT_S)
    for process in (unknown, foreign, impossible):
        assert process.error
        assert "\n" not in process.error
