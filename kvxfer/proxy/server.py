"""Server of the proxy: a completion becomes a prefill leg and a decode leg."""

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from http import HTTPStatus
from typing import Any, Self

import aiohttp
import msgspec
from aiohttp import web

from kvxfer.endpoint import Endpoint
from kvxfer.errors import InvalidArgumentError, KVXferError
from kvxfer.proxy.client import Client, RefusedError, error_response
from kvxfer.proxy.config import ProxyConfig
from kvxfer.proxy.engine_client import EnginePoolClient, EngineTimeoutError
from kvxfer.proxy.engines import Engine, EngineFailedError
from kvxfer.proxy.legs import Completion, Lender, params_of_answer
from kvxfer.proxy.metrics import ProxyMetrics
from kvxfer.text import printable

LATE_PREFILL_S = 1.0
"""Seconds for the prefill leg after the decode leg has ended; then nobody needs it any more."""
MAX_LOGGED_ID = 64
PROMETHEUS = "text/plain; version=0.0.4"

logger = logging.getLogger(__name__)

# aiohttp would log what is malformed, word for word, with the keys in it.
_SILENT = logging.Logger("kvxfer.proxy.silent", logging.CRITICAL)  # noqa: LOG001 - in no tree


class NoParamsError(KVXferError):
    """Prefill leg whose answer is of no use to a decode engine.

    Attributes:
        reason: Why not, as a metric has it.
    """

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


class Proxy:
    """Router for engines that compute prompts and engines that continue them.

    Args:
        config: Engines and limits.

    Attributes:
        endpoint: Endpoint that it listens at; port 0 becomes the real port.
        metrics: What it counts.
    """

    def __init__(self, config: ProxyConfig) -> None:
        self.endpoint = config.endpoint
        self.metrics = ProxyMetrics()
        self._config = config
        self._under_way: set[asyncio.Task[Any]] = set()
        self._is_ending = False
        self._is_closed = False
        self._closing = asyncio.Lock()

    async def __aenter__(self) -> Self:
        """Begin to listen.

        Raises:
            InvalidArgumentError: The address is in use, or is not one of this machine.
        """
        connect_timeout_s = self._config.connect_timeout_s
        self._prefill = EnginePoolClient(
            "prefill", self._config.prefill, connect_timeout_s, self.metrics
        )
        self._decode = EnginePoolClient(
            "decode", self._config.decode, connect_timeout_s, self.metrics
        )
        self._runner = web.AppRunner(
            self._application(),
            handler_cancellation=True,
            access_log=None,
            logger=_SILENT,
            shutdown_timeout=0.1,
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, self.endpoint.host, self.endpoint.port)
        try:
            await site.start()
        except OSError as exc:
            await self.aclose()
            expected = f"an address to listen at: {exc}"
            raise InvalidArgumentError("listen", str(self.endpoint), expected) from exc
        self.endpoint = Endpoint(self.endpoint.host, self._runner.addresses[0][1])
        engines = len(self._config.prefill), len(self._config.decode)
        logger.info("listening at http://%s (prefill: %d, decode: %d)", self.endpoint, *engines)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Stop listening, give requests under way their time, and end those that are left.

        May be called again; a call while another one runs waits for the same end.
        """
        async with self._closing:
            if not self._is_closed:
                await self._close()
                self._is_closed = True

    async def _close(self) -> None:
        self._is_ending = True
        for site in list(self._runner.sites):
            await site.stop()
        if self._under_way:
            logger.info("draining: requests under way: %d", len(self._under_way))
            _, late = await asyncio.wait(self._under_way, timeout=self._config.drain_timeout_s)
            for task in late:
                task.cancel()
            if late:
                logger.warning("cut off requests still under way: %d", len(late))
                await asyncio.wait(late)
        await self._runner.cleanup()
        await self._prefill.aclose()
        await self._decode.aclose()

    def _application(self) -> web.Application:
        application = web.Application(client_max_size=self._config.max_body_bytes)
        application.add_routes(
            [
                web.post("/v1/completions", self._counted(self._complete)),
                web.post("/v1/chat/completions", self._counted(self._complete)),
                web.get("/v1/{path:.+}", self._counted(self._get), allow_head=False),
                web.get("/health", self._health),
                web.get("/metrics", self._show_metrics),
                web.route("*", "/{path:.*}", self._not_found),
            ]
        )
        return application

    async def _health(self, _: web.Request) -> web.Response:
        is_healthy = self._decode.pool.is_healthy and not self._is_ending
        return web.Response(status=200 if is_healthy else 503)

    async def _show_metrics(self, _: web.Request) -> web.Response:
        engines = {"prefill": self._prefill.pool.engines, "decode": self._decode.pool.engines}
        content_type = {"Content-Type": PROMETHEUS}
        return web.Response(body=self.metrics.text(engines), headers=content_type)

    async def _not_found(self, request: web.Request) -> web.Response:
        return error_response(
            HTTPStatus.NOT_FOUND, f"there is no {request.method} {request.path} here"
        )

    def _counted(
        self, handle: Callable[[Client, float], Awaitable[None]]
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        """Wrap a handler that gets the client and the deadline: counts, and answers errors."""

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
        """Answer a request; returns its outcome, as the metric has it, and the answer."""
        deadline_s = asyncio.get_running_loop().time() + self._config.timeout_s
        if self._is_ending:
            status = HTTPStatus.SERVICE_UNAVAILABLE
            return "refused", client.refuse(status, "the proxy is about to end")
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
            assert client.answer is not None  # which was being written
            return "cancelled", client.answer
        except Exception:
            logger.exception("a request failed in the proxy")
            status = HTTPStatus.INTERNAL_SERVER_ERROR
            return "failed", client.refuse(status, "the proxy failed")
        assert client.answer is not None
        return "done", client.answer

    async def _get(self, client: Client, deadline_s: float) -> None:
        await self._pass_on(client, None, deadline_s)

    async def _complete(self, client: Client, deadline_s: float) -> None:
        try:
            completion = Completion.parse(await client.read(deadline_s))
        except InvalidArgumentError as exc:
            raise RefusedError(HTTPStatus.BAD_REQUEST, str(exc)) from exc
        if completion.has_several_prompts:
            await self._decode_alone(client, completion, deadline_s, "several_prompts")
            return
        engine = self._prefill.pool.choose()
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
        async with _begun(lending) as leg:
            await self._pass_on(client, completion.decode_body(lender.params(ticket)), deadline_s)
            await asyncio.wait([leg], timeout=LATE_PREFILL_S)

    async def _decode_alone(
        self, client: Client, completion: Completion, deadline_s: float, reason: str
    ) -> None:
        self.metrics.decoded_alone.labels(reason).inc()
        request_id = printable(client.request_id, MAX_LOGGED_ID)
        logger.info("decoding %s alone: %s", request_id, reason)
        await self._pass_on(client, completion.decode_body(None), deadline_s)

    async def _lend(
        self, client: Client, body: bytes, deadline_s: float, engine: Engine
    ) -> msgspec.Raw:
        """Run a prefill leg; returns the parameters for the decode leg.

        Raises:
            NoParamsError: There are none; the engine failed, refused, or was too slow.
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
        """Run the decode leg, with another engine as long as none has begun to answer.

        Raises:
            RefusedError: No decode engine could be reached and did not fail.
            EngineFailedError: The engine broke off its answer.
            EngineTimeoutError: The deadline passed.
        """
        tried: list[Engine] = []
        reason = ""
        while (engine := self._decode.pool.choose_any(tried)) is not None:
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
        logger.warning("no decode engine answered; tried: %d, the last one: %s", len(tried), reason)
        message = f"none of {len(tried)} decode engines answered"
        raise RefusedError(HTTPStatus.BAD_GATEWAY, message)


async def _read(answer: aiohttp.ClientResponse) -> bytes:
    try:
        return await answer.read()
    except (aiohttp.ClientError, OSError) as exc:
        raise EngineFailedError(f"broke off its answer: {exc}") from exc


@contextlib.asynccontextmanager
async def _begun(leg: Coroutine[Any, Any, msgspec.Raw]) -> AsyncIterator[asyncio.Task[Any]]:
    """Run a leg beside the body of the context, and end it with that; its failure is no error."""
    task = asyncio.create_task(leg)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled() and (exc := task.exception()) is not None:
            logger.debug("the prefill leg of an overlapped request failed: %s", exc)
