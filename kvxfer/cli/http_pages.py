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

MAX_REQUEST_BYTES = 8192
"""Bytes of a request at most, the limit of nginx and Apache for its head."""

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
        self._timeout_s = timeout_s
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        """Begin to listen.

        Raises:
            BackendUnavailableError: The address is in use, or is not one of this machine.
        """
        host, port = self.endpoint.host, self.endpoint.port
        try:
            self._server = await asyncio.start_server(
                self._answer, host, port, limit=MAX_REQUEST_BYTES
            )
        except OSError as exc:
            raise BackendUnavailableError(f"cannot listen at {self.endpoint}: {exc}") from exc
        self.endpoint = Endpoint(host, self._server.sockets[0].getsockname()[1])
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Stop listening; may be called again."""
        if self._server is not None:
            self._server.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # A request that is empty, too slow or too large is not answered.
        with contextlib.suppress(OSError, EOFError, asyncio.LimitOverrunError):
            async with asyncio.timeout(self._timeout_s):
                request = await reader.readuntil(b"\r\n\r\n")
                writer.write(_response(self._page(request)))
                await writer.drain()
        writer.close()

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
