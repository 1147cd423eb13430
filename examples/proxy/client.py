"""The client's side of one request: its headers for engines, its body, and its answer."""

import asyncio
import uuid
from collections.abc import Iterable
from http import HTTPStatus

import aiohttp
from aiohttp import HttpVersion11, web
from multidict import CIMultiDict

from examples.proxy.engines import EngineFailedError
from examples.proxy.legs import MESSAGES
from kvxfer.errors import KVXferError

REQUEST_ID = "X-Request-Id"
BODY_TIMEOUT_S, MIN_BODY_BYTES_PER_S = 20.0, 500
"""Seconds for a body, and the bytes that earn it one more, as in Apache's mod_reqtimeout."""

# Headers of one connection, not of the message. Source: RFC 9110, section 7.6.1
_OF_A_CONNECTION = {
    *("connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding"),
    *("upgrade", "proxy-authenticate", "proxy-authorization"),
}
# The proxy decodes the body of a request, and writes it anew.
_NOT_FOR_ENGINES = _OF_A_CONNECTION | {
    *("host", "content-length", "content-encoding", "accept-encoding", "expect"),
}
_NOT_FOR_CLIENTS = _OF_A_CONNECTION | {"date", "server"}


class RefusedError(KVXferError):
    """Request that the proxy itself answers with an error."""

    def __init__(self, status: HTTPStatus, message: str) -> None:
        self.status = status
        self.message = message
        super().__init__(message)


class Client:
    """Client of one request.

    Attributes:
        request_id: Id of the request, given by the client or else made here.
        answer: Answer to the request; None before it has begun.
        is_answered: Whether an engine's answer was passed on completely.
    """

    def __init__(self, request: web.Request) -> None:
        self.request = request
        self.request_id = request.headers.get(REQUEST_ID) or uuid.uuid4().hex
        self.answer: web.StreamResponse | None = None
        self.is_answered = False

    @property
    def headers(self) -> CIMultiDict[str]:
        """Headers for engines: those of the client, with the id of the request."""
        headers = _without(self.request.headers.items(), _NOT_FOR_ENGINES)
        headers[REQUEST_ID] = self.request_id
        return headers

    async def read(self, deadline_s: float) -> bytes:
        """Read the body.

        Args:
            deadline_s: Time of the event loop by which the body must have arrived.

        Raises:
            RefusedError: The body is too large, too slow, or not encoded as its headers say.
        """
        body = bytearray()
        began_s = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout_at(min(deadline_s, began_s + BODY_TIMEOUT_S)) as limit:
                while piece := await self.request.content.readany():
                    body += piece
                    if len(body) > self.request.client_max_size:
                        message = f"the body has more than {self.request.client_max_size} bytes"
                        raise RefusedError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message)
                    due_s = began_s + BODY_TIMEOUT_S + len(body) / MIN_BODY_BYTES_PER_S
                    limit.reschedule(min(deadline_s, due_s))
        except web.RequestPayloadError as exc:
            message = "the body cannot be decoded"
            raise RefusedError(HTTPStatus.BAD_REQUEST, message) from exc
        except TimeoutError as exc:
            message = "the body did not arrive in time"
            raise RefusedError(HTTPStatus.REQUEST_TIMEOUT, message) from exc
        return bytes(body)

    async def pass_on(self, answer: aiohttp.ClientResponse) -> None:
        """Pass an engine's answer on, each piece as it arrives.

        Raises:
            EngineFailedError: The engine broke off.
            ConnectionResetError: The client is gone.
        """
        headers = _without(answer.headers.items(), _NOT_FOR_CLIENTS)
        self.answer = web.StreamResponse(status=answer.status, headers=headers)
        if self.request.version < HttpVersion11 and self.answer.content_length is None:
            self.answer.force_close()  # the end of the connection marks the end of the answer
        await self.answer.prepare(self.request)
        while piece := await _read_piece(answer):
            await self.answer.write(piece)
        await self.answer.write_eof()
        self.is_answered = True

    def refuse(self, status: HTTPStatus, message: str) -> web.StreamResponse:
        """Answer with an error, or close the connection if an answer has already begun."""
        if self.answer is None:
            return error_response(status, message, self.request.path)
        if self.request.transport is not None:
            self.request.transport.close()
        return self.answer


def error_response(status: HTTPStatus, message: str, path: str) -> web.Response:
    """Make an error in the form of OpenAI's interface, or of Anthropic's for its paths."""
    if path.startswith(MESSAGES):
        kind = "invalid_request_error" if status < 500 else "api_error"
        told = {"type": "error", "error": {"type": kind, "message": message}}
    else:
        kind = "invalid_request_error" if status < 500 else "server_error"
        told = {"error": {"message": message, "type": kind, "param": None, "code": status.value}}
    return web.json_response(told, status=status)


async def _read_piece(answer: aiohttp.ClientResponse) -> bytes:
    """Read the bytes that have arrived; empty at the end."""
    try:
        return await answer.content.readany()
    except (aiohttp.ClientError, OSError) as exc:
        raise EngineFailedError(f"broke off its answer: {exc}") from exc


def _without(headers: Iterable[tuple[str, str]], names: Iterable[str]) -> CIMultiDict[str]:
    return CIMultiDict((name, value) for name, value in headers if name.lower() not in names)
