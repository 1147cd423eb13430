"""HTTP pages: their answers, and the requests that are not answered."""

import asyncio
import contextlib
from http import HTTPStatus

import pytest

from kvxfer.backends.nixl import Endpoint
from kvxfer.cli.http_pages import MAX_CONNECTIONS, MAX_REQUEST_BYTES, HTTPPages, Page

ANY_PORT = Endpoint("127.0.0.1", 0)
PAGES = {"/ready": lambda: Page(HTTPStatus.OK)}


async def ask(endpoint: Endpoint, request: bytes) -> bytes:
    """Send a request; return the status line, empty without an answer."""
    reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port)
    writer.write(request)
    answer = b""
    with contextlib.closing(writer), contextlib.suppress(ConnectionError):  # it did not read all
        answer = await reader.read()
    return answer.partition(b"\r\n")[0]


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        (b"GET /ready HTTP/1.1\r\nHost: peer\r\n\r\n", b"HTTP/1.1 200 OK"),
        (b"GET /ready?verbose HTTP/1.1\r\n\r\n", b"HTTP/1.1 200 OK"),
        (b"GET /other HTTP/1.1\r\n\r\n", b"HTTP/1.1 404 Not Found"),
        (b"POST /ready HTTP/1.1\r\n\r\n", b"HTTP/1.1 405 Method Not Allowed"),
        (b"\r\n\r\n", b"HTTP/1.1 405 Method Not Allowed"),
        (bytes(2 * MAX_REQUEST_BYTES), b""),
    ],
)
async def test_only_a_question_for_a_page_is_answered(request_line: bytes, status: bytes) -> None:
    async with HTTPPages(ANY_PORT, PAGES) as ready:
        assert await ask(ready.endpoint, request_line) == status


@pytest.mark.parametrize("sent", [b"", b"GET /ready"])
async def test_who_asks_nothing_makes_room_for_others(sent: bytes) -> None:
    async with HTTPPages(ANY_PORT, PAGES) as ready, contextlib.AsyncExitStack() as stack:
        endpoint = ready.endpoint
        for _ in range(2 * MAX_CONNECTIONS):
            _, writer = await asyncio.open_connection(endpoint.host, endpoint.port)
            stack.callback(writer.close)
            writer.write(sent)
        assert await ask(endpoint, b"GET /ready HTTP/1.1\r\n\r\n") == b"HTTP/1.1 200 OK"


async def test_who_does_not_read_the_answer_is_not_waited_for() -> None:
    long = {"/ready": lambda: Page(HTTPStatus.OK, bytes(64 << 20))}
    async with HTTPPages(ANY_PORT, long, timeout_s=0.2) as ready:
        _, writer = await asyncio.open_connection(ready.endpoint.host, ready.endpoint.port)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(b"GET /ready HTTP/1.1\r\n\r\n")
        async with asyncio.timeout(5):
            while len(ready._listener.tasks) != 1:  # noqa: ASYNC110 - of a server
                await asyncio.sleep(0.01)
            while ready._listener.tasks:  # noqa: ASYNC110 - of a server
                await asyncio.sleep(0.01)
        writer.close()


async def test_a_page_that_cannot_be_made_is_an_error_of_this_page_alone() -> None:
    def fail() -> Page:
        raise RuntimeError("no page")

    async with HTTPPages(ANY_PORT, {**PAGES, "/broken": fail}) as pages:
        answer = await ask(pages.endpoint, b"GET /broken HTTP/1.1\r\n\r\n")
        assert answer == b"HTTP/1.1 500 Internal Server Error"
        assert await ask(pages.endpoint, b"GET /ready HTTP/1.1\r\n\r\n") == b"HTTP/1.1 200 OK"
