"""Server of the proxy: a completion becomes a prefill leg and a decode leg."""

import asyncio
import logging
import resource
import secrets
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any, Self

import aiohttp
import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from examples.proxy.client import Client, RefusedError, error_response
from examples.proxy.config import ProxyConfig
from examples.proxy.engine_client import EnginePool, EngineTimeoutError
from examples.proxy.engines import Engine, EngineFailedError
from examples.proxy.legs import Completion, Lender, params_of_answer
from examples.proxy.listener import Listener
from examples.proxy.metrics import ProxyMetrics
from kvxfer.errors import InvalidArgumentError, KVXferError
from kvxfer.runtime import end_tasks
from kvxfer.text import printable

MAX_DESCRIPTORS = 1 << 20
"""Maximum number of descriptors if the process has no limit: Linux's default, `fs.nr_open`."""
HEAD_TIMEOUT_S = 20.0
"""Seconds for the head of the first request of a connection, as in Apache's mod_reqtimeout."""
IDLE_TIMEOUT_S = 75.0
"""Seconds from one answer of a connection to the head of its next request, as in nginx."""
NUM_SPARE_DESCRIPTORS = 32
"""Descriptors not for requests but for the event loop, the log, and probes of engines."""

LATE_PREFILL_S = 1.0
"""Seconds by which a prefill leg may outlast its decode leg; after that, nobody needs it."""
MAX_LOGGED_ID = 64
PROMETHEUS = "text/plain; version=0.0.4"

logger = logging.getLogger(__name__)

# aiohttp would log malformed requests word for word, with the API keys in them.
_SILENT = logging.Logger("examples.proxy.silent", logging.CRITICAL)  # noqa: LOG001 - in no tree


class NoParamsError(KVXferError):
    """Prefill leg that gave no parameters for the decode leg.

    Attributes:
        reason: Cause, as a label of a metric.
    """

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


class Proxy:
    """Router for engines that compute prompts and engines that continue them.

    Attributes:
        endpoint: Endpoint that it listens at; port 0 becomes the real port.
    """

    def __init__(self, config: ProxyConfig) -> None:
        self.endpoint = config.endpoint
        self.metrics = ProxyMetrics()
        self._config = config
        self._under_way: set[asyncio.Task[Any]] = set()
        self._legs: set[asyncio.Task[Any]] = set()  # prefill legs that overlap a decode leg
        self._is_ending = False
        self._is_closed = False
        self._closing = asyncio.Lock()

    async def __aenter__(self) -> Self:
        """Begin to listen.

        Raises:
            InvalidArgumentError: The address is in use, or is not one of this machine.
        """
        connect_timeout_s = self._config.connect_timeout_s
        self._prefill = EnginePool("prefill", self._config.prefill, connect_timeout_s, self.metrics)
        self._decode = EnginePool("decode", self._config.decode, connect_timeout_s, self.metrics)
        self._runner = web.AppRunner(
            self._application(),
            handler_cancellation=True,
            access_log=None,
            logger=_SILENT,
            shutdown_timeout=0.1,
            keepalive_timeout=IDLE_TIMEOUT_S,
        )
        await self._runner.setup()
        assert self._runner.server is not None
        self._listener = Listener(
            self.endpoint,
            self._runner.server,
            timeout_s=HEAD_TIMEOUT_S,
            max_connections=_max_connections(),
        )
        try:
            await self._listener.start()
        except OSError as exc:
            await self.aclose()
            expected = f"an address to listen at: {exc}"
            raise InvalidArgumentError("listen", str(self.endpoint), expected) from exc
        self.endpoint = self._listener.endpoint
        engines = len(self._config.prefill), len(self._config.decode)
        logger.info("listening at http://%s (prefill: %d, decode: %d)", self.endpoint, *engines)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Stop listening, drain requests in progress, and cancel those that are left.

        May be called again; concurrent calls wait for the same end.
        """
        async with self._closing:
            if not self._is_closed:
                await self._close()
                self._is_closed = True

    async def _close(self) -> None:
        self._is_ending = True
        self._listener.stop()
        if self._under_way:
            timeout_s = self._config.drain_timeout_s
            logger.info("draining for %g s; requests: %d", timeout_s, len(self._under_way))
            _, late = await asyncio.wait(self._under_way, timeout=timeout_s)
            for task in late:
                task.cancel()
            if late:
                logger.warning("cancelled requests still in progress: %d", len(late))
                await asyncio.wait(late)
        await end_tasks(self._legs)
        await self._runner.cleanup()
        await self._prefill.aclose()
        await self._decode.aclose()

    def _application(self) -> web.Application:
        application = web.Application(
            client_max_size=self._config.max_body_bytes, middlewares=[self._timed]
        )
        application.add_routes(
            [
                web.post("/v1/completions", self._counted(self._complete)),
                web.post("/v1/chat/completions", self._counted(self._complete)),
                web.post("/v1/responses", self._counted(self._complete)),
                web.post("/v1/messages", self._counted(self._complete)),
                web.post("/v1/messages/count_tokens", self._counted(self._pass_body_on)),
                web.get("/v1/{path:.+}", self._counted(self._get), allow_head=False),
                web.get("/health", self._health),
                web.get("/metrics", self._show_metrics),
                web.route("*", "/{path:.*}", self._not_found),
            ]
        )
        return application

    @web.middleware
    async def _timed(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Let a request that has arrived take its time, and limit the wait for the next one."""
        if request.can_read_body:
            # A body has deadlines of its own; until it has arrived, its connection can be closed.
            self._listener.expect(request.transport, self._config.timeout_s + IDLE_TIMEOUT_S)
        else:
            self._listener.begin(request.transport)
        try:
            return await handler(request)
        finally:
            self._listener.expect(request.transport, IDLE_TIMEOUT_S)

    async def _health(self, _: web.Request) -> web.Response:
        is_healthy = self._decode.is_healthy and not self._is_ending
        return web.Response(status=200 if is_healthy else 503)

    async def _show_metrics(self, _: web.Request) -> web.Response:
        engines = {"prefill": self._prefill.engines, "decode": self._decode.engines}
        content_type = {"Content-Type": PROMETHEUS}
        return web.Response(body=self.metrics.text(engines), headers=content_type)

    async def _not_found(self, request: web.Request) -> web.Response:
        message = f"the proxy does not serve {request.method} {request.path}"
        return error_response(HTTPStatus.NOT_FOUND, message, request.path)

    def _counted(
        self, handle: Callable[[Client, float], Awaitable[None]]
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        """Wrap a handler of a client and a deadline: count its requests, and answer its errors."""

        async def answer(request: web.Request) -> web.StreamResponse:
            client, outcome = Client(request), "cancelled"
            task = asyncio.current_task()
            assert task is not None
            self._under_way.add(task)
            self.metrics.num_under_way += 1
            try:
                outcome, response = await self._answer(client, handle)
                return response
            finally:
                self._under_way.discard(task)
                self.metrics.num_under_way -= 1
                self.metrics.requests.labels("done" if client.is_answered else outcome).inc()

        return answer

    async def _answer(
        self, client: Client, handle: Callable[[Client, float], Awaitable[None]]
    ) -> tuple[str, web.StreamResponse]:
        """Answer a request; return its outcome, as a label of a metric, and the answer."""
        deadline_s = asyncio.get_running_loop().time() + self._config.timeout_s
        if self._is_ending:
            status = HTTPStatus.SERVICE_UNAVAILABLE
            return "refused", client.refuse(status, "the proxy is shutting down")
        try:
            await handle(client, deadline_s)
        except RefusedError as exc:
            outcome = "refused" if exc.status < 500 else "failed"
            return outcome, client.refuse(exc.status, exc.message)
        except EngineFailedError as exc:
            return "broken", client.refuse(HTTPStatus.BAD_GATEWAY, exc.reason)
        except TimeoutError:
            message = f"no complete answer within {self._config.timeout_s:g} s"
            return "timed_out", client.refuse(HTTPStatus.GATEWAY_TIMEOUT, message)
        except ConnectionResetError:
            assert client.answer is not None  # it was being written
            return "cancelled", client.answer
        except Exception:
            logger.exception("a request failed in the proxy")
            status = HTTPStatus.INTERNAL_SERVER_ERROR
            return "failed", client.refuse(status, "the proxy failed")
        assert client.answer is not None
        return "done", client.answer

    async def _get(self, client: Client, deadline_s: float) -> None:
        await self._pass_on(client, None, deadline_s)

    async def _pass_body_on(self, client: Client, deadline_s: float) -> None:
        body = await client.read(deadline_s)
        self._listener.begin(client.request.transport)
        await self._pass_on(client, body, deadline_s)

    async def _complete(self, client: Client, deadline_s: float) -> None:
        body = await client.read(deadline_s)
        self._listener.begin(client.request.transport)
        try:
            completion = Completion.parse(body, client.request.path)
        except InvalidArgumentError as exc:
            raise RefusedError(HTTPStatus.BAD_REQUEST, str(exc)) from exc
        if alone := completion.needs_one_engine:
            await self._decode_alone(client, completion, deadline_s, alone)
            return
        engine = self._prefill.choose()
        if engine is None:
            await self._decode_alone(client, completion, deadline_s, "ejected")
        elif self._config.overlap and engine.lender is not None:
            await self._overlap(client, completion, deadline_s, engine, engine.lender)
        else:
            try:
                params = await self._lend(client, completion.prefill_body(), deadline_s, engine)
            except NoParamsError as exc:
                await self._decode_alone(client, completion, deadline_s, exc.reason)
            else:
                await self._pass_on(client, completion.decode_body(params), deadline_s)

    async def _overlap(
        self,
        client: Client,
        completion: Completion,
        deadline_s: float,
        engine: Engine,
        lender: Lender,
    ) -> None:
        """Begin both legs at once, with a ticket that no client can guess."""
        ticket = secrets.token_hex(16)
        lending = self._lend(client, completion.prefill_body(ticket), deadline_s, engine)
        leg = asyncio.create_task(lending)
        self._legs.add(leg)
        leg.add_done_callback(self._end_leg)
        late_s = 0.0
        try:
            await self._pass_on(client, completion.decode_body(lender.params(ticket)), deadline_s)
            late_s = LATE_PREFILL_S
        finally:  # the client has its answer: do not keep it waiting for the prefill engine
            asyncio.get_running_loop().call_later(late_s, leg.cancel)

    def _end_leg(self, leg: "asyncio.Task[msgspec.Raw]") -> None:
        """Forget a prefill leg that overlapped a decode leg; its failure is no error."""
        self._legs.discard(leg)
        if not leg.cancelled() and (exc := leg.exception()) is not None:
            logger.debug("the prefill leg of an overlapped request failed: %s", exc)

    async def _decode_alone(
        self, client: Client, completion: Completion, deadline_s: float, reason: str
    ) -> None:
        self.metrics.decoded_alone.labels(reason).inc()
        request_id = printable(client.request_id, MAX_LOGGED_ID)
        logger.info("decoding request %s without prefilled blocks: %s", request_id, reason)
        await self._pass_on(client, completion.decode_body(None), deadline_s)

    async def _lend(
        self, client: Client, body: bytes, deadline_s: float, engine: Engine
    ) -> msgspec.Raw:
        """Run a prefill leg; return the parameters for the decode leg.

        Raises:
            NoParamsError: There are none, or the engine failed, refused, or was too slow.
        """
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        try:
            async with self._prefill.ask(
                engine,
                "POST",
                client.request.path_qs,
                headers=client.headers,
                body=body,
                deadline_s=min(deadline_s, started_s + self._config.prefill_timeout_s),
            ) as answer:
                status, content = answer.status, await _read(answer)
        except EngineFailedError as exc:
            raise NoParamsError("failed") from exc
        except EngineTimeoutError as exc:
            raise NoParamsError("timed_out") from exc
        if status != HTTPStatus.OK:
            raise NoParamsError("refused")
        params = params_of_answer(content)
        if params is None:
            raise NoParamsError("no_params")
        if (lender := Lender.of(params)) is not None and len(engine.lenders) < 2:
            engine.lenders.add(lender)
        self.metrics.prefill_seconds.observe(loop.time() - started_s)
        return params

    async def _pass_on(self, client: Client, body: bytes | None, deadline_s: float) -> None:
        """Run the decode leg, with one engine after the other until one begins to answer.

        Raises:
            RefusedError: Every decode engine failed or could not be reached.
            EngineFailedError: The engine broke off its answer.
            EngineTimeoutError: The deadline passed.
        """
        tried: list[Engine] = []
        reason = ""
        while (engine := self._decode.choose_any(tried)) is not None:
            tried.append(engine)
            try:
                async with self._decode.ask(
                    engine,
                    client.request.method,
                    client.request.path_qs,
                    headers=client.headers,
                    body=body,
                    deadline_s=deadline_s,
                ) as answer:
                    await client.pass_on(answer)
                    return
            except EngineFailedError as exc:
                if client.answer is not None:
                    raise
                reason = exc.reason
        logger.warning("no decode engine answered; tried: %d, last failure: %s", len(tried), reason)
        message = f"none of {len(tried)} decode engines answered"
        raise RefusedError(HTTPStatus.BAD_GATEWAY, message)


def _max_connections() -> int:
    """Compute how many clients to accept: each may need a connection to an engine of either leg."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        limit = MAX_DESCRIPTORS
    return max(1, (limit - NUM_SPARE_DESCRIPTORS) // 3)


async def _read(answer: aiohttp.ClientResponse) -> bytes:
    try:
        return await answer.read()
    except (aiohttp.ClientError, OSError) as exc:
        raise EngineFailedError(f"broke off its answer: {exc}") from exc
