"""Engines of one leg: chooses one, sends it a request, and tracks its health."""

import asyncio
import contextlib
import errno
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from http import HTTPStatus
from typing import Literal, TypeVar

import aiohttp
from multidict import CIMultiDict
from yarl import URL

from examples.proxy.engines import Engine, EngineFailedError
from examples.proxy.metrics import ProxyMetrics
from kvxfer.errors import KVXferError
from kvxfer.text import printable

Leg = Literal["prefill", "decode"]
T = TypeVar("T")

MAX_REASON = 200
"""Characters of a reason in the log."""

# Errors of the request, not of the engine: vLLM answers so if its model does not have the task.
_HEALTHY_ERRORS = {HTTPStatus.NOT_IMPLEMENTED}
_NO_DESCRIPTOR = {errno.EMFILE, errno.ENFILE}


class _RequestFailedError(EngineFailedError):
    """Healthy engine that failed at this request, or one for which we had no descriptor left."""


class EngineTimeoutError(KVXferError, TimeoutError):
    """Engine that did not answer in time."""


class EnginePool:
    """Engines of one leg, each with its share of the requests.

    Each connection is closed after its request: engines close idle connections, and a request sent
    at that moment would look like a failure.
    """

    def __init__(
        self, leg: Leg, urls: Sequence[str], connect_timeout_s: float, metrics: ProxyMetrics
    ) -> None:
        self.engines = tuple(map(Engine, urls))
        self._turn = 0
        self._leg = leg
        self._connect_timeout_s = connect_timeout_s
        self._metrics = metrics
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None, connect=connect_timeout_s),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("Accept-Encoding", "User-Agent"),
        )
        self._probing = [asyncio.create_task(self._keep_probing(each)) for each in self.engines]

    @property
    def is_healthy(self) -> bool:
        """Whether at least one engine is not ejected."""
        return not all(engine.ejected.is_set() for engine in self.engines)

    def choose(self) -> Engine | None:
        """Choose the engine with the fewest requests that is not ejected; None if all are ejected.

        Engines with equally few requests take turns.
        """
        return self._least_busy([each for each in self.engines if not each.ejected.is_set()])

    def choose_any(self, tried: Collection[Engine]) -> Engine | None:
        """Choose an engine that was not tried, as `choose` does; None if all were tried.

        If only ejected engines are left, choose the one that is probed next.
        """
        left = [each for each in self.engines if each not in tried]
        healthy = [each for each in left if not each.ejected.is_set()]
        return self._least_busy(healthy) or min(
            left, key=lambda engine: engine.retry_at_s, default=None
        )

    async def aclose(self) -> None:
        """Stop probing and close connections; may be called again."""
        for task in self._probing:
            task.cancel()
        await asyncio.wait(self._probing)
        await self._session.close()

    @contextlib.asynccontextmanager
    async def ask(
        self,
        engine: Engine,
        method: str,
        path: str,
        *,
        headers: CIMultiDict[str],
        body: bytes | None,
        deadline_s: float,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request; leaving the context ends it. The deadline is a time of the event loop.

        Raises:
            EngineFailedError: The engine is unreachable or broke off, and is ejected; or it sent an
                error. Then a good `/health` spares it: some requests fail at every engine.
            EngineTimeoutError: The deadline passed; the engine is ejected if no answer had begun.
        """
        outcome, has_answered = "cancelled", False
        try:
            with engine.under_way():
                async with asyncio.timeout_at(deadline_s):
                    url = URL(engine.url + path, encoded=True)
                    async with await _reach(
                        lambda: self._session.request(
                            method, url, headers=headers, data=body, allow_redirects=False
                        )
                    ) as answer:
                        if answer.status >= 500 and answer.status not in _HEALTHY_ERRORS:
                            await self._probe(engine)
                            raise _RequestFailedError(f"answered with status {answer.status}")
                        engine.succeeded()
                        has_answered = True
                        yield answer
                        outcome = "done" if answer.status < 400 else "refused"
        except EngineFailedError as exc:
            outcome = "failed"
            if not isinstance(exc, _RequestFailedError):
                self._failed(engine, exc.reason)
            raise
        except TimeoutError as exc:
            outcome = "timed_out"
            if not has_answered:
                self._failed(engine, "no answer in time")
            raise EngineTimeoutError("an engine did not answer in time") from exc
        finally:
            self._metrics.legs.labels(self._leg, engine.url, outcome).inc()

    def _least_busy(self, engines: Sequence[Engine]) -> Engine | None:
        if not engines:
            return None
        fewest = min(engine.num_requests for engine in engines)
        idlest = [engine for engine in engines if engine.num_requests == fewest]
        self._turn += 1
        return idlest[self._turn % len(idlest)]

    def _failed(self, engine: Engine, reason: str) -> None:
        """Eject an engine once, though all its requests in progress fail at the same time."""
        if not engine.ejected.is_set():
            now_s = asyncio.get_running_loop().time()
            engine.eject(printable(reason, MAX_REASON), now_s)
            self._metrics.ejections.labels(self._leg, engine.url).inc()

    async def _keep_probing(self, engine: Engine) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await engine.ejected.wait()
            await asyncio.sleep(max(engine.retry_at_s - loop.time(), 0))
            if not engine.ejected.is_set() or loop.time() < engine.retry_at_s:
                continue  # it has answered a request meanwhile, and may have failed again
            try:
                await self._probe(engine)
            except EngineFailedError as exc:
                if engine.ejected.is_set():
                    engine.eject(printable(exc.reason, MAX_REASON), loop.time())
            else:
                engine.bring_back()

    async def _probe(self, engine: Engine) -> None:
        """Ask an engine for its health; raise EngineFailedError if it is not healthy."""
        timeout = aiohttp.ClientTimeout(total=self._connect_timeout_s)
        async with await _reach(
            lambda: self._session.get(f"{engine.url}/health", timeout=timeout)
        ) as answer:
            if answer.status != HTTPStatus.OK:
                raise EngineFailedError(f"/health answered with status {answer.status}")


async def _reach(call: Callable[[], Awaitable[T]]) -> T:
    """Await a call of aiohttp's client; what it raises becomes an EngineFailedError."""
    try:
        return await call()
    except (aiohttp.ClientError, OSError) as exc:
        reason = str(exc) or type(exc).__name__
        if isinstance(exc, OSError) and exc.errno in _NO_DESCRIPTOR:
            raise _RequestFailedError(reason) from exc
        raise EngineFailedError(reason) from exc
