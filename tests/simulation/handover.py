"""Scenario of prefill and decode in separate engines of vLLM, whose leases run out."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any, ClassVar
from unittest.mock import patch

from kvxfer import runtime
from kvxfer.integrations.vllm.prefill_decode import connector as connector_module
from kvxfer.kvcache.descriptors import Descriptors, overlap
from kvxfer.lending.handover import Handover
from kvxfer.runtime import begin_aside
from kvxfer.testing.fake_nixl_agent import FakeNixlAgent
from kvxfer.testing.simulation import ProcessRun, Scenario, Simulation, Step
from tests.simulation.fleet_scenario import require_no_sockets
from tests.simulation.lending import StuckAgent, forget, mend
from tests.simulation.offloading import SLOT_BYTES, leftovers_of_manager
from tests.simulation.vllm_engine import BLOCK, DeadEngineError, ModelEngine, Prefixes

PORT = 7100
MOST_TOKENS = 48
MOST_OUTPUTS = 16
IDLE_S = (0.02, 0.08)
"""Shortest and longest virtual time between two steps of an idle engine."""
LOOK_S = 0.01
ANSWER_S = 60.0
"""Virtual time in which a request ends at a running engine, whatever the other engine does."""
GIVE_UP_S = 20.0
"""Virtual time that the router waits for the first leg."""
CLOSE_S = 65.0
RESET_S = 30.0
QUIET_S = 40.0
HELD_S = 3.0
"""Virtual time after which not even a restart of NIXL has ended a held read."""
CROWD = 8
"""Number of requests in a crowd; half of them are lent while they are computed."""
AGENT_DELAYS_S = (0.0, 0.001, 0.2)
LONG_DELAYS_S = (0.5, 2.5, 8.0)
KINDS = {"handover": 9, "twice": 2, "lost": 2, "overlap": 6, "forged": 1, "p": 3, "d": 3}
"""Kinds of requests: the two legs one after the other, with two second legs, or with none; both
legs at a time; with a forged ticket; and with one engine alone."""
FAULTS = {
    "kill_p": 2,
    "kill_d": 2,
    "stop_p": 2,
    "stop_d": 2,
    "partition": 3,
    "cut": 3,
    "refuse": 1,
    "late_reads": 4,
    "failing_reads": 2,
    "held_reads": 4,
    "reset": 1,
}


class HandoverScenario(Scenario):
    """Two engines of vLLM and a router: aborts, preemption, restarts, cuts, and late reads."""

    name: ClassVar[str] = "handover"
    share: ClassVar[float] = 0.2

    def plan(self, random: Random) -> list[Step]:
        steps, length_s = [], random.choice((0.3, 2.0, 6.0))
        moments = [random.random() * length_s for _ in range(random.choice((0, 1, 3)))]
        for number in range(random.choice((2, 8, 20))):
            at_s = random.random() * length_s
            if moments and random.random() < 0.7:
                at_s = random.choice(moments) + random.random() * 0.02
            request: dict[str, Any] = {
                "number": number,
                "kind": random.choices(list(KINDS), list(KINDS.values()))[0],
                "family": random.randrange(3),
                "length": random.randint(1, MOST_TOKENS - 8),
                "tail": random.choice((0, 0, random.randint(1, 8))),
                "max_tokens": random.choice((1, 2, MOST_OUTPUTS)),
                "delay_s": random.choice((0.0, 0.0, 0.01, 0.5, 2.0)),
            }
            for leg in "pd":
                after_s = random.choice((0.01, 0.1, 1.0)) * random.random()
                request[f"abort_{leg}_s"] = after_s if random.random() < 0.15 else None
            steps.append(Step(at_s, "request", request))
        if random.random() < 0.35:
            steps += self._plan_crowd(random, random.random() * length_s, len(steps))
        begins = [step.at_s for step in steps]
        for _ in range(random.choice((0, 1, 2, 5))):
            what = random.choices(list(FAULTS), list(FAULTS.values()))[0]
            fault = {
                "for_s": random.choice((0.05, 0.5, 2.0, 5.0)),
                "share": random.choice((0.3, 1.0)),
            }
            at_s = random.choice(begins) + random.random() * random.choice((0.02, 0.2, 2.0))
            steps.append(Step(at_s, what, fault))
        return sorted(steps, key=lambda step: step.at_s)

    def _plan_crowd(self, random: Random, at_s: float, first: int) -> list[Step]:
        """Plan growing requests that preempt prompts which are lent early."""
        steps = []
        for number in range(first, first + CROWD):
            is_early = number >= first + CROWD // 2
            request: dict[str, Any] = {
                "number": number,
                "kind": random.choice(("overlap", "handover")) if is_early else "p",
                "family": 2 if is_early else number % 2,
                "length": random.randint(12, 28),
                "tail": 4 + number % 4,
                "max_tokens": MOST_OUTPUTS,
                "delay_s": 0.0,
                "abort_p_s": None,
                "abort_d_s": None,
            }
            steps.append(Step(at_s + is_early * random.random() * 0.1, "request", request))
        return steps

    def run(self, simulation: Simulation, steps: Sequence[Step]) -> None:
        run = _Run(simulation, steps)
        opened = partial(Handover, make_agent=run.make_agent)
        with patch.object(connector_module, "Handover", opened):
            simulation.run(run.run())


@dataclass(slots=True)
class _Life:
    """Life of an engine, from its start to its end."""

    process: ProcessRun
    engine: "LendingEngine"
    work: list[Callable[[], object]] = field(default_factory=list)
    is_closing: bool = False
    has_closed: "Future[None]" = field(default_factory=Future)

    @property
    def has_ended(self) -> bool:
        return self.has_closed.done()


class LendingEngine(ModelEngine):
    """Engine that lends and reads blocks, and never frees a block that it lends."""

    @property
    def handover(self) -> Any:
        return self.worker._handover

    @property
    def is_starved(self) -> bool:
        """Whether vLLM waits for blocks of ended loads, but never looks at those loads.

        A request whose load failed returns its blocks, and is computed once enough are free. With a
        window, it then needs more blocks than before, and vLLM schedules no request behind it: a
        known limit of recomputing, see vLLM's pull request 57841.
        """
        worker = self.worker._worker
        has_loads = worker._loads or worker._ending or self.worker._loads._open
        has_ended = self.scheduler.finished_recving_kv_req_ids
        return bool(has_ended and not (has_loads or self.scheduler.running))

    def note_prepared(self) -> None:
        """Check that no offered block is free."""
        if self.handover._lender is not None:
            pool, book = self.scheduler.kv_cache_manager.block_pool, self.handover._lender.book
            for slot in book._offers:
                if not pool.blocks[self._block(slot)].ref_cnt:
                    self._simulation.fail("an offered block is free", self._block(slot))

    def note_ended(self, done: Any) -> None:
        """Check that no block of an ended load or lease is read, or offered by that lease alone."""
        flights = [each for agent in FakeNixlAgent._agents.values() for each in agent._flights]
        reads = [each for flight in flights for *_, each in flight.groups]
        targets = [Descriptors.of_pieces(each.local, each.lengths) for each in reads]
        for name in sorted(done.finished_recving or ()):
            if any(overlap(self.blocks_of(name), each) for each in targets):
                self._simulation.fail("received while a read goes on", name)
        if self.handover._lender is None:
            return
        pool, book = self.scheduler.kv_cache_manager.block_pool, self.handover._lender.book
        per_group = self.handover._lender._slots_per_group
        for name in sorted(done.finished_sending or ()):
            for group, ids in enumerate(self.scheduler.kv_cache_manager.get_block_ids(name)):
                slots = {group * per_group + each: each for each in ids if each}
                # A block that another request shares is not freed, and its lease allows reads.
                last = [slot for slot in slots if pool.blocks[slots[slot]].ref_cnt == 1]
                if read := sorted({*last} & book._pins.keys() - book._offers.keys()):
                    self._simulation.fail("freed while it is read", f"{name}: {read}")
                if offered := [slot for slot in last if slot in book._offers]:
                    self._simulation.fail("freed while it is offered", f"{name}: {offered}")

    def leftovers(self) -> list[str]:
        """Describe what an idle engine should have released."""
        connector, worker = self.connector, self.worker._worker
        decode, prefill = connector._decode, connector._prefill
        counts = {
            "requests": len(self.scheduler.requests),
            "requests of D": len(decode._asked.keys() | decode._settled),
            "loads that were planned": len(decode._fetches),
            "loads": len(worker._loads),
            "unsafe loads": len(worker._ending),
            "leases of the worker": len(worker._request_ids),
            "shares": len(connector._matched_tokens),
            "heads": len(connector._by_tiers),
            "bad blocks": len(connector._bad_blocks),
            "loads that the worker waits for": len(self.worker._loads._open),
            "stores that the worker waits for": len(self.worker._saves._open),
        }
        if prefill is not None:
            book = self.handover._lender.book
            counts |= {
                "leases": prefill.num_leases,
                "early leases": len(prefill._early),
                "tickets": book.num_tickets,
                "pins": len(book._pins),
                "offers": len(book._offers),
            }
        staging = self.handover._exchange.staging
        counts["missing staging buffers"] = staging.num_buffers - len(staging._idle)
        return [f"{count} {what}" for what, count in counts.items() if count]

    def _block(self, slot: int) -> int:
        return int(slot % self.handover._lender._slots_per_group)


class _Run:
    """One run of the scenario: two engines, and the router before them."""

    def __init__(self, simulation: Simulation, steps: Sequence[Step]) -> None:
        self._simulation = simulation
        self._network = simulation.runtime.network
        self._steps = steps
        self._random = random = simulation.random("engines")
        self._prefixes = Prefixes()
        self._agents: list[tuple[Any, FakeNixlAgent]] = []
        self._has_window = random.random() < 0.3
        most = (MOST_TOKENS + MOST_OUTPUTS) // BLOCK + 2
        self._least_blocks = most * (1 + self._has_window) + 2
        self._lease_s = random.choice((0.3, 1.0, 3.0))
        self._common: dict[str, Any] = {
            "revision": "r",
            "transport": random.choice(("auto", "auto", "socket")),
            "integrity": random.choice(("full", "fenced")),
            "lease_s": self._lease_s,
            "heartbeat_s": min(0.5, self._lease_s / 3),
            "timeout_s": random.choice((0.5, 2.0)),
            "ask_timeout_s": random.choice((0.2, 1.0)),
            "on_failure": random.choice(("recompute", "recompute", "fail")),
        }
        self._tiers = random.choice(((), ("d",), ("p", "d")))
        self._reads_outlast = random.random() < 0.5
        self._lives: dict[str, _Life] = {}
        self._killed: list[_Life] = []
        self._weights = 0
        self._is_open = asyncio.Event()  # cleared to hold requests back while weights change
        self._starting = asyncio.Lock()

    def make_agent(self) -> FakeNixlAgent:
        """Open the agent of a process; see `TransferAgent`."""
        agent = StuckAgent(outlasts_end=self._reads_outlast)
        agent.delay_s = self._simulation.random(f"agent {len(self._agents)}").choice(AGENT_DELAYS_S)
        self._agents.append((self._simulation.runtime.scheduler.current.process, agent))
        return agent

    async def run(self) -> None:
        for name in "pd":
            await self._start(name)
        self._is_open.set()
        running = [asyncio.create_task(self._carry_out(step)) for step in self._steps]
        if left := (await asyncio.wait(running, timeout=600.0))[1] if running else set():
            self._simulation.fail("never ended", self._simulation.stacks())
        for task in left:
            task.cancel()
        self._network.heal()
        mend(self._agents)
        await asyncio.sleep(QUIET_S)
        if not self._simulation.violations:
            for name, life in self._lives.items():
                await self._look_at_the_end(name, life)
        for life in self._lives.values():
            await self._close(life)
        self._simulation.require_no_threads()
        require_no_sockets(self._simulation)
        verdict, trace = len(self._simulation.violations), len(self._simulation.trace)
        for life in self._killed:
            life.is_closing = True
            await life.process.bury(partial(self._give_back, life))
            life.process.loop.stop()
        del self._simulation.violations[verdict:], self._simulation.trace[trace:]

    async def _carry_out(self, step: Step) -> None:
        await asyncio.sleep(step.at_s)
        self._simulation.note(f"-> {step}")
        if step.what == "request":
            self._simulation.num_calls += 1
            await self._request(**step.arguments)
        else:
            await self._fault(step.what, **step.arguments)

    # The router.

    async def _request(
        self,
        *,
        number: int,
        kind: str,
        family: int,
        length: int,
        tail: int,
        max_tokens: int,
        delay_s: float,
        abort_p_s: float | None,
        abort_d_s: float | None,
    ) -> None:
        tokens = [100 + 60 * family + at for at in range(length)]
        tokens += [1000 + 10 * tail + at for at in range(tail)]
        name, params = f"request {number}", None
        if kind == "overlap":
            ticket = f"ticket-of-the-router-{number}"
            first = {"do_remote_decode": True, "remote_request_id": ticket}
            await asyncio.gather(
                self._leg("p", name, tokens, 1, first, abort_p_s),
                self._leg("d", name, tokens, max_tokens, _ticket(ticket, "overlap"), abort_d_s),
            )
            return
        if kind == "p":
            await self._leg("p", name, tokens, max_tokens, None, abort_p_s)
            return
        if kind == "forged":
            params = _ticket(f"nobody-gave-this-ticket-{number}", "pull")
        elif kind != "d":
            first = {"do_remote_decode": True}
            params = await self._leg("p", name, tokens, 1, first, abort_p_s)
            await asyncio.sleep(delay_s)
        if kind != "lost":
            legs = [name, f"{name} again"] if kind == "twice" else [name]
            await asyncio.gather(
                *(self._leg("d", each, tokens, max_tokens, params, abort_d_s) for each in legs)
            )

    async def _leg(
        self,
        at: str,
        name: str,
        tokens: list[int],
        max_tokens: int,
        params: Any,
        abort_s: float | None,
    ) -> Any:
        """Send a leg to an engine, and wait for its end; return the parameters that it gives."""
        await self._is_open.wait()
        life = self._lives.get(at)
        if life is None:
            return None
        engine, began = life.engine, self._simulation.now
        life.work.append(lambda: engine.add(name, tokens, max_tokens=max_tokens, params=params))
        stood_s = starved_s = 0.0
        while name not in engine.ended:
            await asyncio.sleep(LOOK_S)
            if life.has_ended or not life.process.is_alive:
                return None
            stood_s += LOOK_S * life.process.process.is_stopped
            starved_s += LOOK_S * engine.is_starved
            took_s = self._simulation.now - began - stood_s - starved_s
            if abort_s is not None and took_s >= abort_s:
                abort_s = None
                life.work.append(lambda: engine.abort(name))
                return None
            if (at == "p" and took_s > GIVE_UP_S) or starved_s > GIVE_UP_S:
                life.work.append(lambda: engine.abort(name))
                return None
            if took_s > ANSWER_S:
                self._simulation.fail("never ended", f"{name} at {at}: {self._simulation.stacks()}")
                return None
        return engine.ended[name]

    # Faults.

    async def _fault(self, what: str, *, for_s: float, share: float) -> None:
        match what.split("_"):
            case ["kill", name]:
                await self._kill(name, for_s, share)
            case ["stop", name]:
                await self._stop(name, for_s)
            case ["partition"]:
                self._network.partition("engine d", "engine p", for_s)
            case ["cut"]:
                self._network.cut("engine d", "engine p", share)
            case ["refuse"]:
                self._network.refuse("engine p", for_s)
            case ["late", "reads"]:
                random = self._simulation.random(f"late {self._simulation.now}")
                delay_s = random.choice(LONG_DELAYS_S)
                await self._trouble(lambda agent: setattr(agent, "delay_s", delay_s), for_s)
            case ["failing", "reads"]:
                await self._trouble(lambda agent: setattr(agent, "failing", True), for_s)
            case ["held", "reads"]:
                await self._trouble(lambda agent: agent.hold(), for_s + HELD_S)
            case _:
                await self._reset()

    async def _kill(self, name: str, for_s: float, share: float) -> None:
        async with self._starting:
            if life := self._lives.pop(name, None):
                life.process.kill(for_s if share < 1 else None)
                forget(self._agents, life.process)
                self._killed.append(life)
                await asyncio.sleep(for_s)
                await self._start(name)

    async def _stop(self, name: str, for_s: float) -> None:
        life = self._lives.get(name)
        if life is not None and not life.process.process.is_stopped:
            life.process.stop()
            await asyncio.sleep(for_s)
            life.process.go_on()

    async def _trouble(self, begin: Callable[[FakeNixlAgent], object], for_s: float) -> None:
        agents = [*self._agents]
        for _, agent in agents:
            begin(agent)
        await asyncio.sleep(for_s)
        mend(agents)

    async def _reset(self) -> None:
        """Change the weights of both engines, as training does: nothing is computed meanwhile."""
        async with self._starting:
            self._is_open.clear()
            for life in self._lives.values():
                engine = life.engine
                life.work.append(lambda engine=engine: self._abort_all(engine))  # type: ignore[misc]
            ends_at, open_lives = self._simulation.now + RESET_S, list(self._lives.values())
            while open_lives and self._simulation.now < ends_at:
                done: list[bool] = []
                for life in open_lives:
                    life.work.append(partial(self._reset_one, life.engine, done))
                await asyncio.sleep(0.3)
                if len(done) == len(open_lives) and all(done):
                    self._weights += 1
                    for life in open_lives:
                        life.engine.weights = self._weights
                    break
            self._is_open.set()

    def _abort_all(self, engine: LendingEngine) -> None:
        for name in list(engine.scheduler.requests):
            engine.abort(name)

    def _reset_one(self, engine: LendingEngine, done: list[bool]) -> None:
        done.append(engine.reset(also_running=False, has_new_weights=False))

    # The lives of engines.

    async def _start(self, name: str) -> None:
        process = ProcessRun(self._simulation, f"engine {name}")
        life = await process.call(lambda: _Life(process, self._open(name)))
        life.engine.weights = self._weights
        drive = partial(begin_aside, f"steps of {name}", partial(_drive, life))
        process.loop.loop.call_soon_threadsafe(drive)
        self._lives[name] = life

    def _open(self, name: str) -> LendingEngine:
        random = self._simulation.random(f"engine {name} {self._simulation.now}")
        extra = dict(self._common)
        if name == "p" or random.random() < 0.3:
            extra["listen"] = f"127.0.0.1:{PORT + (name == 'd')}"
        if name in self._tiers:
            slots = random.choice((3, 8, 40))
            extra["backend"] = [f"host://?capacity={slots * SLOT_BYTES + 8192}"]
        return LendingEngine(
            self._simulation,
            name,
            self._prefixes,
            connector="KVXferConnector",
            extra=extra,
            num_blocks=self._least_blocks + random.choice((0, 3, 12)),
            has_window=self._has_window,
            batch_tokens=random.choice((8, 32)),
            step_s=random.choice((0.003, 0.03)),
        )

    async def _look_at_the_end(self, name: str, life: _Life) -> None:
        engine = life.engine
        for what in engine.leftovers():
            self._simulation.fail("left", f"{what} at {name}")
        pool = engine.scheduler.kv_cache_manager.block_pool
        if num_kept := pool.num_gpu_blocks - 1 - engine.num_free:
            self._simulation.fail("left", f"{num_kept} blocks in use at {name}")
        if name in self._tiers:
            for what in leftovers_of_manager(engine.connector._tiers.connector_scheduler.manager):
                self._simulation.fail("left", f"{what} at {name}")

    async def _close(self, life: _Life) -> None:
        life.is_closing = True
        try:
            async with asyncio.timeout(CLOSE_S):
                await asyncio.wrap_future(life.has_closed)
        except TimeoutError:
            name = life.process.process.name
            self._simulation.fail("late", f"the end of {name}{self._simulation.stacks()}")
        await asyncio.sleep(1.0)
        life.process.loop.stop()

    async def _give_back(self, life: _Life) -> None:
        """Give back the memory of a killed engine, in its process."""
        await asyncio.wrap_future(begin_aside("last", life.engine.close))


def _drive(life: _Life) -> None:
    """Make the steps of an engine, on a thread of its process."""
    engine, idle_s = life.engine, IDLE_S[0]
    try:
        while not life.is_closing:
            work, life.work = life.work, []
            for each in work:
                each()
            if engine.has_work:
                engine.step()
            idle_s = IDLE_S[0] if work or engine.is_computing else min(2 * idle_s, IDLE_S[1])
            if not engine.is_computing:
                runtime.sleep(idle_s)
        if not life.process.process.has_ended:
            engine.close()
    except DeadEngineError:
        pass
    life.has_closed.set_result(None)


def _ticket(name: str, mode: str) -> dict[str, Any]:
    return {
        "do_remote_prefill": True,
        "remote_request_id": name,
        "remote_host": "127.0.0.1",
        "remote_port": PORT,
        "transfer_mode": mode,
    }
