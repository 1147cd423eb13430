"""Readiness endpoint: answers `GET /ready` over HTTP, for load balancers and orchestrators."""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from http import HTTPStatus
from types import TracebackType
from typing import Self

from kvxfer.endpoint import Endpoint
from kvxfer.errors import BackendUnavailableError

PATH = "/ready"
MAX_REQUEST_BYTES = 8192
"""Bytes of a request at most, the limit of nginx and Apache for its head."""

logger = logging.getLogger(__name__)


class Readiness:
    """Endpoint that answers `200 OK` while a process is ready, else `503 Service Unavailable`.

    Args:
        endpoint: Endpoint to listen at.
        is_ready: Returns whether the process is ready.
        timeout_s: Time for a request to arrive and its answer to leave.

    Attributes:
        endpoint: As given; port 0 becomes the real port.
    """

    def __init__(
        self, endpoint: Endpoint, is_ready: Callable[[], bool], *, timeout_s: float = 5.0
    ) -> None:
        self.endpoint = endpoint
        self._is_ready = is_ready
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
        logger.info("readiness at http://%s%s", self.endpoint, PATH)
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
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
                writer.write(_response(self._status(request)))
                await writer.drain()
        writer.close()

    def _status(self, request: bytes) -> HTTPStatus:
        method, _, rest = request.partition(b" ")
        if method != b"GET":
            return HTTPStatus.METHOD_NOT_ALLOWED
        if rest.split(b" ", 1)[0] != PATH.encode():
            return HTTPStatus.NOT_FOUND
        return HTTPStatus.OK if self._is_ready() else HTTPStatus.SERVICE_UNAVAILABLE


def _response(status: HTTPStatus) -> bytes:
    return (
        f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    ).encode()
