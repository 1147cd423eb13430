"""HTTP pages of commands that run for long: readiness for orchestrators, metrics for Prometheus."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Self

from kvxfer.endpoint import Endpoint
from kvxfer.errors import BackendUnavailableError
from kvxfer.listener import Listener
from kvxfer.runtime import end_tasks

MAX_REQUEST_BYTES = 8192
"""Bytes of a request at most, the limit of nginx and Apache for its head."""

MAX_CONNECTIONS = 64
"""Connections of each address at a time."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Page:
    """Answer to a request."""

    status: HTTPStatus
    body: bytes = b""
    content_type: str = "text/plain; charset=utf-8"


class HTTPPages:
    """Endpoint that answers `GET` over HTTP with a few pages, each made when it is asked for.

    Args:
        endpoint: Endpoint to listen at.
        pages: Makes the page of each path; must not block.
        timeout_s: Time for a request to arrive and its answer to leave.

    Attributes:
        endpoint: As given; port 0 becomes the real port.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        pages: Mapping[str, Callable[[], Page]],
        *,
        timeout_s: float = 5.0,
    ) -> None:
        self.endpoint = endpoint
        self._pages = pages
        self._answering: set[asyncio.Task[None]] = set()
        self._listener = Listener(
            endpoint,
            lambda: asyncio.StreamReaderProtocol(
                asyncio.StreamReader(limit=MAX_REQUEST_BYTES), self._begin
            ),
            timeout_s=timeout_s,
            max_connections=MAX_CONNECTIONS,
        )

    async def __aenter__(self) -> Self:
        """Begin to listen.

        Raises:
            BackendUnavailableError: The address is in use, or is not one of this machine.
        """
        try:
            await self._listener.start()
        except OSError as exc:
            raise BackendUnavailableError(f"cannot listen at {self.endpoint}: {exc}") from exc
        self.endpoint = self._listener.endpoint
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop listening, and end the answers under way."""
        self._listener.stop()
        await end_tasks(self._answering)

    @property
    def num_connections(self) -> int:
        """Connections that are open."""
        return self._listener.num_connections

    def _begin(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._answer(reader, writer))
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # A request that is empty or too large is not answered; one that is too slow, or whose
        # answer is not read, is ended by the listener.
        with (
            contextlib.closing(writer),
            contextlib.suppress(OSError, EOFError, asyncio.LimitOverrunError),
        ):
            request = await reader.readuntil(b"\r\n\r\n")
            writer.write(_response(self._page(request)))
            await writer.drain()

    def _page(self, request: bytes) -> Page:
        method, _, rest = request.partition(b" ")
        if method != b"GET":
            return Page(HTTPStatus.METHOD_NOT_ALLOWED)
        path = rest.split(b" ", 1)[0].partition(b"?")[0].decode("latin-1")
        make = self._pages.get(path)
        if make is None:
            return Page(HTTPStatus.NOT_FOUND)
        try:
            return make()
        except Exception:
            logger.exception("the page %s cannot be made", path)
            return Page(HTTPStatus.INTERNAL_SERVER_ERROR)


def _response(page: Page) -> bytes:
    head = (
        f"HTTP/1.1 {page.status.value} {page.status.phrase}\r\n"
        f"Content-Type: {page.content_type}\r\nContent-Length: {len(page.body)}\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode() + page.body
