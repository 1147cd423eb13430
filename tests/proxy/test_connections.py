"""Connections to the proxy: partial requests, idle ones, too many of them, and HTTP/1.0."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

import pytest

from examples.proxy import client, server
from kvxfer.endpoint import Endpoint
from tests.proxy.fake_engines import BODY, COMPLETIONS, LIMIT_S, PIECES, routed

HALF_HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nX-A: "
HALF_BODY = b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: 9\r\n\r\n{"
NO_JSON = b"POST /v1/messages/count_tokens HTTP/1.1\r\nHost: h\r\nContent-Length: 9\r\n\r\n{"
HEALTH = b"GET /health HTTP/1.1\r\nHost: h\r\n\r\n"
SHORT_S = 0.05


@contextlib.asynccontextmanager
async def connected(endpoint: Endpoint, sent: bytes) -> AsyncIterator[asyncio.StreamReader]:
    reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port)
    try:
        writer.write(sent)
        async with asyncio.timeout(LIMIT_S):
            yield reader
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def read_to_the_end(reader: asyncio.StreamReader) -> bytes:
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := await reader.read(1 << 16):
            received += piece
    return received


@pytest.mark.parametrize("sent", [HALF_BODY, NO_JSON])
async def test_half_a_body_is_refused_long_before_the_time_of_a_request(
    sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "BODY_TIMEOUT_S", SHORT_S)
    async with routed(timeout_s=600.0) as it, connected(it.proxy.endpoint, sent) as reader:
        assert (await reader.readline()).startswith(b"HTTP/1.1 408 ")


async def test_an_idle_connection_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "IDLE_TIMEOUT_S", SHORT_S)
    async with routed() as it:
        for more in (b"", HALF_HEAD):  # not mistaken for the beginning of a request
            async with connected(it.proxy.endpoint, HEALTH + more) as reader:
                assert (await read_to_the_end(reader)).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("sent", [b"", HALF_HEAD, HALF_BODY, HEALTH])
async def test_silent_connections_make_room_and_requests_under_way_go_on(
    sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_max_connections", lambda: 4)
    async with routed() as it, contextlib.AsyncExitStack() as stack:
        it.decode[0].may_go_on.clear()
        body = json.dumps({**BODY, "stream": True})
        response = await stack.enter_async_context(it.session.post(it.url + COMPLETIONS, data=body))
        silent = [
            await stack.enter_async_context(connected(it.proxy.endpoint, sent)) for _ in range(12)
        ]
        async with connected(it.proxy.endpoint, HEALTH) as reader:
            assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
        await read_to_the_end(silent[0])  # it was closed, as the oldest
        it.decode[0].may_go_on.set()
        assert await response.read() == b"".join(PIECES)


@pytest.mark.parametrize("kept", [b"X-A: b", b"Connection: keep-alive"])
@pytest.mark.parametrize("stream", [True, False])
async def test_the_end_of_an_answer_is_seen_by_a_client_of_http_1_0(
    kept: bytes, *, stream: bool
) -> None:
    async with routed() as it:
        body = json.dumps({**BODY, "stream": stream}).encode()
        head = b"POST /v1/completions HTTP/1.0\r\n%b\r\nContent-Length: %d\r\n\r\n"
        async with connected(it.proxy.endpoint, head % (kept, len(body)) + body) as reader:
            told, _, content = (await reader.readuntil(b"\r\n\r\n")).lower().partition(b"\r\n\r\n")
            if b"content-length: " in told:
                length = int(told.partition(b"content-length: ")[2].split(b"\r\n")[0])
                assert json.loads(await reader.readexactly(length))
            else:
                assert stream
                assert content + await reader.read() == b"".join(PIECES)
