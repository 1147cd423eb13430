"""Scenario of the proxy of prefill and decode: engines that fail, hang and break off."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from typing import Any, ClassVar
from unittest.mock import patch

import aiohttp
from aiohttp import web, web_app

from examples.proxy.config import ProxyConfig
from examples.proxy.engines import MAX_BACK_OFF_S
from examples.proxy.server import LATE_PREFILL_S, Proxy
from kvxfer import runtime
from kvxfer.testing.simulation import ProcessRun, Scenario, Simulation, Step

HOST = "127.0.0.1"
PORT = 8000
FIRST_PORT = 8100
KINDS = ("prefill", "decode")
MOST_ENGINES = 2
FAULTS = {
    "hang": 3,
    "status": 3,
    "break_off": 3,
    "slow": 2,
    "unwell": 2,
    "no_params": 1,
    "garbage": 1,
    "kill": 2,
    "stop": 2,
    "cut": 2,
    "partition": 2,
    "refuse": 2,
}
OF_NETWORK = ("kill", "stop", "cut", "partition", "refuse")
NUM_PIECES = 3
TIMEOUT_S, PREFILL_TIMEOUT_S, CONNECT_TIMEOUT_S, DRAIN_S = 12.0, 3.0, 1.0, 4.0
ARRIVAL_S = 0.2
"""Virtual time in which bytes of an engine reach the proxy, without faults of the network."""
SLACK_S = 0.5
"""Virtual time that network and processes may take beyond the promised limits."""
QUIET_S = 2 * MAX_BACK_OFF_S + 2 * TIMEOUT_S
ERRORS = {502, 504}
"""Statuses of the proxy's own answers when engines fail."""


class ProxyScenario(Scenario):
    """Proxy between clients that disconnect and engines that fail, each in its own process."""

    name: ClassVar[str] = "proxy"

    def plan(self, random: Random) -> list[Step]:
        steps, length_s = [], random.choice((0.5, 4.0, 20.0))
        for number in range(random.choice((3, 8, 20))):
            request = {
                "number": number,
                "is_streamed": random.random() < 0.5,
                "leaves_s": random.choice((None, None, None, random.random() * 2.0)),
                "is_slow": random.random() < 0.1,
            }
            steps.append(Step(random.random() * length_s, "request", request))
        moments = [step.at_s for step in steps]
        kinds = random.choice((KINDS, KINDS, ("prefill",)))
        for _ in range(random.choice((0, 1, 3, 8))):
            fault = {
                "kind": random.choice(kinds),
                "engine": random.randrange(MOST_ENGINES),
                "for_s": random.choice((0.1, 1.0, 5.0, 20.0)),
            }
            what = random.choices(list(FAULTS), list(FAULTS.values()))[0]
            if what == "break_off" and len(kinds) > 1:
                fault["kind"] = "decode"  # only decode engines answer in pieces
            at_s = max(0.0, random.choice(moments) + (random.random() - 0.5) * 0.2)
            steps.append(Step(at_s, what, fault))
        if random.random() < 0.3:
            steps.append(Step(random.random() * length_s, "close"))
        return sorted(steps, key=lambda step: step.at_s)

    def run(self, simulation: Simulation, steps: Sequence[Step]) -> None:
        """See `Scenario.run`; the patch keeps aiohttp from opening real sockets."""
        network = simulation.runtime.network

        async def connect(
            addr_infos: Any, *, loop: asyncio.AbstractEventLoop, **_: Any
        ) -> socket.socket:
            made: Any = network.open(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            try:
                await loop.sock_connect(made, addr_infos[0][4])
            except BaseException:
                made.close()
                raise
            return made  # type: ignore[no-any-return]

        with patch("aiohappyeyeballs.start_connection", connect):
            simulation.run(_Run(simulation, steps).run())
        web_app._cached_build_middleware.cache_clear()  # else it keeps the worlds of 1000 seeds


@dataclass(slots=True, eq=False)
class _Leg:
    """Leg that runs at an engine.

    Attributes:
        params: Parameters of the transfer that came with it.
        ended_at: Time at which the leg ended at the engine; None before.
        is_whole: Whether the engine sent its whole answer.
        has_begun: Whether a part of the answer has reached the proxy, on a network without faults.
    """

    number: int
    kind: str
    engine: str
    params: Any
    began_at: float
    ended_at: float | None = None
    is_whole: bool = False
    has_begun: bool = False


class _Engine:
    """Engine that answers like vLLM, and fails as the plan says."""

    def __init__(self, run: "_Run", kind: str, number: int) -> None:
        self.name = f"{kind} {number}"
        self.kind = kind
        self.port = FIRST_PORT + KINDS.index(kind) * MOST_ENGINES + number
        self.faults: dict[str, float] = {}
        self._run = run

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def has(self, fault: str) -> bool:
        return self.faults.get(fault, 0.0) > self._run.now

    async def serve(self) -> None:
        application = web.Application()
        health, complete = self._health, self._complete
        application.add_routes([web.get("/health", health), web.post("/v1/completions", complete)])
        self._runner = web.AppRunner(
            application, handler_cancellation=True, access_log=None, shutdown_timeout=0.1
        )
        await self._runner.setup()
        listening = runtime.listen((HOST, self.port), family=socket.AF_INET, backlog=100)
        listening.setblocking(False)
        assert self._runner.server is not None
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._runner.server, sock=listening)

    async def aclose(self) -> None:
        self._server.close()
        await self._runner.cleanup()

    async def _health(self, _: web.Request) -> web.Response:
        if self.has("hang"):
            await asyncio.sleep(self.faults["hang"] - self._run.now)
        return web.Response(status=503 if self.has("unwell") else 200)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        params = body.get("kv_transfer_params")
        leg = _Leg(body["number"], self.kind, self.name, params, self._run.now)
        self._run.legs.append(leg)
        try:
            return await self._answer(request, body, leg)
        finally:
            leg.ended_at = self._run.now

    async def _answer(
        self, request: web.Request, body: dict[str, Any], leg: _Leg
    ) -> web.StreamResponse:
        random = self._run.random_of(leg)
        await asyncio.sleep(random.random() * random.choice((0.0, 0.01, 1.5)))
        if self.has("slow"):
            await asyncio.sleep(random.random() * 5.0)
        if self.has("hang"):
            await asyncio.sleep(3600.0)
        if self.has("status") or self.has("unwell"):
            return web.Response(status=500)
        if self.kind == "prefill":
            if self.has("garbage"):
                return web.Response(body=b'{"kv_transfer_params": [')
            leg.is_whole = True
            params = None if self.has("no_params") else self._params(body)
            return web.json_response({"kv_transfer_params": params})
        response = web.StreamResponse()
        await response.prepare(request)
        for at in range(NUM_PIECES):
            await response.write(_piece(leg.number, self.name, at))
            if self.has("break_off"):
                await asyncio.sleep(ARRIVAL_S)
                leg.has_begun = True
                assert request.transport is not None
                request.transport.abort()
            if self.has("hang"):
                await asyncio.sleep(3600.0)
            await asyncio.sleep(random.random() * random.choice((0.0, 0.001, 1.0)))
        await response.write_eof()
        leg.is_whole = True
        return response

    def _params(self, body: dict[str, Any]) -> dict[str, Any]:
        """Make parameters for the decode leg, unique to this request."""
        chosen = body["kv_transfer_params"].get("remote_request_id")
        return {
            "do_remote_prefill": True,
            "remote_request_id": chosen or f"ticket {body['number']} of {self.name}",
            "remote_host": HOST,
            "remote_port": self.port,
            "tp_size": 1,
        }


@dataclass(slots=True)
class _Asked:
    """Request of a client: the answer, and when the client was done with it."""

    number: int
    began_at: float
    left_at: float | None = None
    ended_at: float | None = None
    answers: list[tuple[int, bytes]] = field(default_factory=list)
    broke_off: str = ""


class _Run:
    def __init__(self, simulation: Simulation, steps: Sequence[Step]) -> None:
        self._simulation = simulation
        self._network = simulation.runtime.network
        self._steps = steps
        random = simulation.random("proxy")
        counts = [random.randint(1, MOST_ENGINES) for _ in KINDS]
        self._engines = [
            _Engine(self, kind, number)
            for kind, count in zip(KINDS, counts, strict=True)
            for number in range(count)
        ]
        self._overlaps = random.random() < 0.4
        self._processes: dict[str, ProcessRun] = {}
        self._asked: list[_Asked] = []
        faults = [step for step in steps if step.what not in ("request", "close")]
        self._has_faults = bool(faults)
        self._decodes_well = all(step.arguments["kind"] == "prefill" for step in faults)
        self._is_hindered = any(step.what in OF_NETWORK for step in faults)
        self._hindered: list[tuple[str, float, float]] = []  # engines that are cut off, and when
        self._closing_at: float | None = None
        self._num_of: dict[str, int] = {}
        self.legs: list[_Leg] = []

    @property
    def now(self) -> float:
        return self._simulation.now

    def random_of(self, leg: _Leg) -> Random:
        """Make the random numbers of a leg, independent of other legs."""
        name = f"{leg.kind} {leg.number}"
        self._num_of[name] = self._num_of.get(name, 0) + 1
        return self._simulation.random(f"{name} {self._num_of[name]}")

    async def run(self) -> None:
        for engine in self._engines:
            await self._start(engine)
        self._process = ProcessRun(self._simulation, "proxy")
        prefill, decode = (
            tuple(each.url for each in self._engines if each.kind == kind) for kind in KINDS
        )
        config = ProxyConfig(
            listen=f"{HOST}:{PORT}",
            overlap=self._overlaps,
            timeout_s=TIMEOUT_S,
            prefill_timeout_s=PREFILL_TIMEOUT_S,
            connect_timeout_s=CONNECT_TIMEOUT_S,
            drain_timeout_s=DRAIN_S,
            prefill=prefill,
            decode=decode,
        )
        self._proxy = Proxy(config)
        await self._process.run(self._proxy.__aenter__())
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(connector=connector) as self._session:
            running = [asyncio.create_task(self._carry_out(step)) for step in self._steps]
            left = (await asyncio.wait(running, timeout=600.0))[1] if running else set()
            for task in left:
                self._simulation.fail("never ended", task)
                task.cancel()
            await self._look_at_the_end()
        await self._close()
        for asked in self._asked:
            self._judge(asked)
        for engine in self._engines:
            process = self._processes[engine.name]
            await process.run(engine.aclose())
            process.loop.stop()
        self._process.loop.stop()
        await asyncio.sleep(1.0)
        self._simulation.require_no_threads()

    async def _start(self, engine: _Engine) -> None:
        process = self._processes[engine.name] = ProcessRun(self._simulation, engine.name)
        await process.run(engine.serve())

    async def _carry_out(self, step: Step) -> None:
        await asyncio.sleep(step.at_s)
        self._simulation.note(f"-> {step}")
        given = dict(step.arguments)
        if step.what == "request":
            await self._request(**given)
        elif step.what == "close":
            await self._close()
        else:
            names = [f"{given['kind']} {number}" for number in (given["engine"], 0)]
            engine = next(each for name in names for each in self._engines if each.name == name)
            if step.what in OF_NETWORK:
                await self._hinder(step.what, engine, given["for_s"])
            else:
                engine.faults[step.what] = self.now + given["for_s"]

    # Clients.

    async def _request(
        self, *, number: int, is_streamed: bool, leaves_s: float | None, is_slow: bool
    ) -> None:
        asked = _Asked(number, self.now)
        self._asked.append(asked)
        self._simulation.num_calls += 1
        asking = asyncio.create_task(self._ask(asked, is_streamed=is_streamed, is_slow=is_slow))
        await asyncio.wait([asking], timeout=leaves_s)
        if not asking.done() and leaves_s is not None:
            asked.left_at = self.now
            asking.cancel()
            await asyncio.wait([asking])
        asked.ended_at = self.now

    async def _ask(self, asked: _Asked, *, is_streamed: bool, is_slow: bool) -> None:
        content = json.dumps({"prompt": "p", "number": asked.number, "stream": is_streamed})

        async def slowly() -> AsyncIterator[bytes]:
            for each in content:
                await asyncio.sleep(0.01)
                yield each.encode()

        try:
            async with self._session.post(
                f"http://{HOST}:{PORT}/v1/completions", data=slowly() if is_slow else content
            ) as answer:
                asked.answers.append((answer.status, await answer.read()))
        except (aiohttp.ClientError, OSError) as exc:
            asked.broke_off = repr(exc)
        self._simulation.note(f"<- {asked}")

    # Faults.

    async def _hinder(self, what: str, engine: _Engine, for_s: float) -> None:
        process, name = self._processes[engine.name], engine.name
        if what in ("stop", "partition"):
            self._hindered.append((name, self.now, self.now + for_s))
        if what == "kill":
            if process.is_alive:
                process.kill()
                for leg in self.legs:
                    if leg.engine == name and leg.ended_at is None:
                        leg.ended_at = self.now
                await asyncio.sleep(for_s)
                await self._start(engine)
        elif what == "stop":
            if not process.process.is_stopped:
                process.stop()
                await asyncio.sleep(for_s)
                process.go_on()
        elif what == "cut":
            self._network.cut("proxy", name, 1.0)
        elif what == "partition":
            self._network.partition("proxy", name, for_s)
        else:
            self._network.refuse(name, for_s)

    # What must hold.

    async def _look_at_the_end(self) -> None:
        """End all faults; then every engine must get requests again, and none may be left."""
        self._network.heal()
        for engine in self._engines:
            engine.faults.clear()
        await asyncio.sleep(QUIET_S)
        if self._closing_at is not None:
            return
        for pool in (self._proxy._prefill, self._proxy._decode):
            for each in pool.engines:
                if each.ejected.is_set():
                    self._simulation.fail("left", f"{each.url} is ejected still")
                if each.num_requests:
                    self._simulation.fail("left", f"{each.num_requests} at {each.url}")
        if num := self._proxy.metrics.num_under_way:
            self._simulation.fail("left", f"{num} requests under way")
        await self._request(number=1000, is_streamed=False, leaves_s=None, is_slow=False)
        if [status for status, _ in self._asked[-1].answers] != [200]:
            self._simulation.fail("not answered when all is well", self._asked[-1])

    async def _close(self) -> None:
        if self._closing_at is not None:
            return
        began = self._closing_at = self.now
        await self._process.run(self._proxy.aclose())
        if self.now - began > DRAIN_S + SLACK_S:
            self._simulation.fail("late", f"the end took {self.now - began:.3f} s")

    def _judge(self, asked: _Asked) -> None:
        """Check the answer of a request, and that its legs have ended with it."""
        legs = [each for each in self.legs if each.number == asked.number]
        self._judge_legs(asked, legs)
        if asked.left_at is not None:
            return
        ended_at = asked.ended_at or self.now
        if ended_at - asked.began_at > TIMEOUT_S + SLACK_S:
            self._simulation.fail("late", f"{asked}")
        if self._closing_at is not None and ended_at >= self._closing_at:
            return
        if asked.broke_off and self._decodes_well:
            self._simulation.fail("broken off without a fault", asked)
        for status, body in asked.answers:
            self._judge_answer(asked, legs, status, body)
        if not asked.answers and not asked.broke_off:
            self._simulation.fail("no answer", asked)
        is_as_planned = [each.kind for each in legs] == list(KINDS)
        if not (self._has_faults or self._overlaps or is_as_planned):
            self._simulation.fail("legs", f"{asked}: {legs}")

    def _judge_answer(self, asked: _Asked, legs: Sequence[_Leg], status: int, body: bytes) -> None:
        num_whole = sum(each.kind == "decode" and each.is_whole for each in legs)
        if status != 200:
            if status not in ERRORS or self._decodes_well:
                self._simulation.fail("undocumented error", f"{asked}")
        elif not any(body == _whole(asked.number, each.name) for each in self._engines):
            self._simulation.fail("wrong answer", asked)
        # The network may have lost a whole answer before the proxy saw any of it.
        elif not (num_whole == 1 or (num_whole and self._is_hindered)):
            self._simulation.fail("number of answers", f"{asked}: {legs}")

    def _judge_legs(self, asked: _Asked, legs: list[_Leg]) -> None:
        limit = (asked.left_at or asked.ended_at or self.now) + SLACK_S
        for leg in legs:
            allowed = limit + (LATE_PREFILL_S if leg.kind == "prefill" else 0.0)
            for name, _, ends_at in self._hindered:
                if name == leg.engine and ends_at >= leg.began_at - SLACK_S:
                    allowed = max(allowed, ends_at + SLACK_S)
            if (leg.ended_at or self.now) > allowed:
                self._simulation.fail("a leg goes on", f"{leg} of {asked}")
            named = leg.params and leg.params.get("remote_request_id")
            is_named = named and str(named).startswith("ticket ")
            if is_named and not str(named).startswith(f"ticket {asked.number} of"):
                self._simulation.fail("parameters of another request", f"{leg}")
        decoding = [each for each in legs if each.kind == "decode"]
        decoding.sort(key=lambda each: each.began_at)
        for earlier, later in pairwise(decoding):
            was_seen = (earlier.is_whole or earlier.has_begun) and not self._is_hindered
            if was_seen or self._decodes_well:
                self._simulation.fail("decoded twice", f"{earlier}, {later}")


def _piece(number: int, name: str, at: int) -> bytes:
    return f"{number} by {name}, piece {at}\n".encode()


def _whole(number: int, name: str) -> bytes:
    return b"".join(_piece(number, name, at) for at in range(NUM_PIECES))
