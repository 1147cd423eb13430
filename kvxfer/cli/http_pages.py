"""HTTP pages of long-running commands: readiness for orchestrators, metrics for Prometheus."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Self

from kvxfer.endpoint import Endpoint
from kvxfer.errors import BackendUnavailableError
from kvxfer.listener import Listener, listen_at
from kvxfer.runtime import LogPause

MAX_REQUEST_BYTES = 8192
"""Maximum size of a request, the limit of nginx and Apache for its head."""

MAX_CONNECTIONS = 64
"""Maximum number of connections to an endpoint; one more closes the oldest."""

LOG_PAUSE_S = 60.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Page:
    """Answer to a request."""

    status: HTTPStatus
    body: bytes = b""
    content_type: str = "text/plain; charset=utf-8"


class HTTPPages:
    """Endpoint that answers `GET` over HTTP with a few pages, each made on request.

    Args:
        endpoint: Endpoint to listen at.
        pages: For each path, a function that makes its page and must not block.
        timeout_s: Deadline for a request to arrive and its answer to leave.

    Attributes:
        endpoint: As given; port 0 becomes the real port.
    """

    def __init__(
        self, endpoint: Endpoint, pages: Mapping[str, Callable[[], Page]], *, timeout_s: float = 5.0
    ) -> None:
        self.endpoint = endpoint
        self._pages = pages
        self._timeout_s = timeout_s
        self._listener = Listener(self._note_failure, max_unproven=MAX_CONNECTIONS)
        self._log_pause = LogPause(LOG_PAUSE_S)

    async def __aenter__(self) -> Self:
        """Begin to listen."""
        try:
            listening, self.endpoint = await listen_at(self.endpoint)
        except OSError as exc:
            raise BackendUnavailableError(f"cannot listen at {self.endpoint}: {exc}") from exc
        for each in listening:
            self._listener.add(each, self._answer)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop listening, and cancel the answers under way."""
        self._listener.stop()
        await self._listener.wait_closed()

    def _note_failure(self, exc: OSError) -> None:
        """Close the oldest connection to free a descriptor; log at most once a minute."""
        self._listener.cut_oldest()
        text = "cannot accept connections to %s now: %s"
        self._log_pause.log(logger, logging.WARNING, text, self.endpoint, exc)

    async def _answer(self, connection: socket.socket, _: object) -> None:
        """Answer a request, unless it is empty, too large or too slow."""
        loop, request = asyncio.get_running_loop(), b""
        with connection, contextlib.suppress(OSError):
            async with asyncio.timeout(self._timeout_s):
                while b"\r\n\r\n" not in request:
                    data = await loop.sock_recv(connection, MAX_REQUEST_BYTES + 1 - len(request))
                    request += data
                    if not data or len(request) > MAX_REQUEST_BYTES:
                        return
                await loop.sock_sendall(connection, _response(self._page(request)))

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
            logger.exception("cannot make the page %s", path)
            return Page(HTTPStatus.INTERNAL_SERVER_ERROR)


def _response(page: Page) -> bytes:
    head = (
        f"HTTP/1.1 {page.status.value} {page.status.phrase}\r\n"
        f"Content-Type: {page.content_type}\r\nContent-Length: {len(page.body)}\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode() + page.body
