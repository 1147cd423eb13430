"""Servers that answer like vLLM's engines, or fail on demand, and a proxy in front of them."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import aiohttp
from aiohttp import web

from examples.proxy.config import ProxyConfig
from examples.proxy.server import Proxy

HOST = "127.0.0.1"
LIMIT_S = 10.0
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
BODY: Mapping[str, Any] = {"model": "m", "prompt": "once upon a time", "max_tokens": 7}
PIECES = (b'data: {"choices": [1]}\n\n', b'data: {"choices": [2]}\n\n', b"data: [DONE]\n\n")
PARAMS: Mapping[str, Any] = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[3, 1, 2]],
    "remote_engine_id": "engine-p",
    "remote_request_id": "cmpl-1",
    "remote_host": "10.0.0.7",
    "remote_port": 7100,
    "tp_size": 2,
}


@dataclass(frozen=True)
class Asked:
    method: str
    path: str
    headers: Mapping[str, str]
    body: dict[str, Any]

    @property
    def params(self) -> Any:
        return self.body.get("kv_transfer_params")


class FakeEngine:
    """Engine whose faults are set by its attributes."""

    def __init__(self) -> None:
        self.asked: list[Asked] = []
        self.status = self.health = 200
        self.params: Any = PARAMS
        self.hangs, self.raw = False, b""
        self.may_go_on = asyncio.Event()
        self.may_go_on.set()
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    async def __aenter__(self) -> Self:
        """Begin to listen; again at the same port after an end."""
        application = web.Application()
        application.router.add_get("/health", self._answer_probe)
        application.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(application, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, HOST, self.port).start()
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _answer_probe(self, _: web.Request) -> web.Response:
        return web.Response(status=self.health)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        content = await request.read()
        body = json.loads(content) if content else {}
        self.asked.append(Asked(request.method, request.path_qs, request.headers, body))
        if request.transport is not None and self.raw:
            request.transport.write(self.raw)
        if self.hangs or self.raw:
            await asyncio.Event().wait()
        if self.status != 200:
            return web.json_response({"error": {"message": "as told"}}, status=self.status)
        if body.get("stream"):
            return await self._stream(request)
        is_prefill = (body.get("kv_transfer_params") or {}).get("do_remote_decode")
        if is_prefill and isinstance(self.params, bytes):
            return web.Response(body=b'{"kv_transfer_params": %s}' % self.params)
        params = {"kv_transfer_params": self.params} if is_prefill else {}
        return web.json_response({"by": self.url, **params})

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(PIECES[0])
        await self.may_go_on.wait()
        for piece in PIECES[1:]:
            await response.write(piece)
        return response


@dataclass
class Routed:
    """Proxy with engines behind it, and a client of it."""

    proxy: Proxy
    prefill: Sequence[FakeEngine]
    decode: Sequence[FakeEngine]
    session: aiohttp.ClientSession

    @property
    def url(self) -> str:
        return f"http://{self.proxy.endpoint}"

    async def post(
        self,
        body: Mapping[str, Any] | bytes = BODY,
        path: str = COMPLETIONS,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[int, Any]:
        """Ask for a completion; returns status and decoded body."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.session.post(self.url + path, data=data, headers=headers) as response:
            return response.status, json.loads(await response.read())

    async def get(self, path: str) -> tuple[int, str]:
        async with self.session.get(self.url + path) as response:
            return response.status, await response.text()

    async def samples(self) -> dict[str, float]:
        """Read the metrics, by name with labels."""
        _, text = await self.get("/metrics")
        lines = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
        return {name.removeprefix("kvxfer_proxy_"): float(value) for name, value in lines}


@contextlib.asynccontextmanager
async def routed(num_decode: int = 1, **options: Any) -> AsyncIterator[Routed]:
    """Start engines and a proxy in front of them."""
    async with contextlib.AsyncExitStack() as stack:
        prefill, *decode = [
            await stack.enter_async_context(FakeEngine()) for _ in range(1 + num_decode)
        ]
        config = ProxyConfig(
            prefill=(prefill.url,),
            decode=tuple(engine.url for engine in decode),
            listen=f"{HOST}:0",
            **{"drain_timeout_s": 0.0, **options},
        )
        proxy = await stack.enter_async_context(Proxy(config))
        timeout = aiohttp.ClientTimeout(total=LIMIT_S)
        session = await stack.enter_async_context(aiohttp.ClientSession(timeout=timeout))
        yield Routed(proxy, [prefill], decode, session)
    assert proxy.metrics.num_under_way == 0
