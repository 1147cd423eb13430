"""Scenario of engines with several workers and different shapes that hand prompts over."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from functools import partial
from random import Random
from typing import Any, ClassVar, TypeVar
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray

from kvxfer.backends.nixl import Endpoint, NixlConfig
from kvxfer.errors import ClosedError, InvalidArgumentError, KVXferError
from kvxfer.lending import Fetched, PromptExchange, handover, prompt_exchange
from kvxfer.lending.handover import CLOSE_S, Handover
from kvxfer.storage import Namespace, PromptKeys
from kvxfer.storage.leases import CacheLender
from kvxfer.storage.lending import BlockParts, LentBlocks
from kvxfer.testing import FakeNixlAgent
from kvxfer.testing.simulation import ProcessRun, Scenario, Simulation, Step
from kvxfer.units import ByteSize
from tests.simulation.fleet_scenario import require_no_sockets
from tests.transfer import handover_engines
from tests.transfer.handover_engines import HND, NHD, NULL, NUM_BLOCKS, Engine

PORT = 7300
FAMILIES = 4
"""Number of different prompts; those that are handed over are beginnings of them."""
MOST_TOKENS = 24
DELAYS_S = (0.0, 0.001, 0.2)
LONG_DELAYS_S = (0.8, 4.0)
SLACK_S = 4.5
"""Virtual time that a fetch may take beyond its deadline to end stalled reads."""
REST_S = 30.0
HELD_S = 4.0
"""Virtual time after which not even a restart of NIXL has ended a held read."""
MOST_S = 300.0
KINDS = {"hand_over": 8, "revoke": 3, "twice": 2, "forged": 1, "early": 3}
EXCHANGES = 0.3
"""Share of plans in which prompts are exchanged by a `PromptExchange`."""
TWICE = 0.3
"""Share of prompts whose first offer is made by two calls at once, under one ticket."""
CANCELLED = ("offer", "rest", "fetch", "release")
CANCELS_S = (None, None, 0.0, 0.001, 0.05, 0.5)
"""Calls of an exchange that are given up, and after how long."""
FAULTS = ("kill", "cut", "refuse", "partition", "late_reads", "failing_reads", "stuck_reads")


T = TypeVar("T")


class StuckAgent(FakeNixlAgent):
    """Agent whose close may wait for the reads that it holds.

    Args:
        outlasts_end: Whether held reads outlast a close, which then waits.
    """

    def __init__(self, *, outlasts_end: bool = True) -> None:
        super().__init__()
        self._outlasts_end = outlasts_end

    async def aclose(self) -> None:
        while self._outlasts_end and self._holding and self.in_flight:  # noqa: ASYNC110 - rare
            await asyncio.sleep(0.05)
        await super().aclose()


def mend(agents: Sequence[tuple[object, FakeNixlAgent]]) -> None:
    """End held reads, delays and failures of agents."""
    for _, agent in agents:
        agent.delay_s, agent.failing = 0.0, False
        agent.release()


def forget(agents: Sequence[tuple[object, FakeNixlAgent]], process: ProcessRun) -> None:
    """Make the memory of a killed process unreadable for other agents."""
    for owner, agent in agents:
        if owner is process.process:
            FakeNixlAgent._agents.pop(agent.name, None)


class WatchedLender(CacheLender):
    """Lender that records which of its blocks are being lent.

    Attributes:
        lent: Number of current loans of each address.
    """

    def __init__(self, *args: Any, **how: Any) -> None:
        super().__init__(*args, **how)
        self.lent: Counter[int] = Counter()

    @asynccontextmanager
    async def lend(self, wanted: BlockParts, *, fenced: bool = False) -> AsyncIterator[LentBlocks]:
        async with super().lend(wanted, fenced=fenced) as lent:
            addresses = [] if lent.blocks is None else lent.blocks.addresses.tolist()
            self.lent.update(addresses)
            try:
                yield lent
            finally:
                self.lent.subtract(addresses)

    def find_lent(self, blocks: Sequence[int]) -> list[int]:
        """Return those blocks that are being lent."""
        each = {block: self._describe([block]).addresses.tolist() for block in blocks}
        return [block for block, addresses in each.items() if any(map(self.lent.get, addresses))]


class LendingScenario(Scenario):
    """An engine lends the blocks of its prompts, and one of another shape fetches them."""

    name: ClassVar[str] = "lending"
    share: ClassVar[float] = 0.12

    def plan(self, random: Random) -> list[Step]:
        steps, length_s = [], random.choice((0.5, 4.0))
        for number in range(random.choice((3, 10, 20))):
            kind = random.choices(list(KINDS), list(KINDS.values()))[0]
            given = {
                "number": number,
                "kind": kind,
                "family": random.randrange(FAMILIES),
                "length": random.randint(1, MOST_TOKENS),
                "first": random.choice((0, 0, 4, 8)),
                "after_s": random.choice((0.0, 0.002, 0.05, 0.5)) * random.random(),
                # From the answer to the fetch: longer than any lease.
                "queued_s": 2.5 * (random.random() < (0.5 if kind == "revoke" else 0.25)),
                "is_released": random.random() < 0.5,
            }
            steps.append(Step(random.random() * length_s, "request", given))
        for _ in range(random.choice((0, 0, 1, 3))):
            fault = {"fault": random.choice(FAULTS), "for_s": random.choice((0.05, 0.5, 5.0))}
            steps.append(Step(random.random() * length_s, "trouble", fault))
        if random.random() < EXCHANGES:  # drawn last, so that the other plans stay the same
            steps = self._plan_exchanges(random, length_s)
        return sorted(steps, key=lambda step: step.at_s)

    def _plan_exchanges(self, random: Random, length_s: float) -> list[Step]:
        """Plan prompts that are exchanged by calls which their callers may give up."""
        steps = []
        for number in range(random.choice((3, 10, 20))):
            given = {
                "number": number,
                "family": random.randrange(2),
                "length": random.randint(1, MOST_TOKENS),
                "first": random.choice((0, 0, 4, 8)),
                "is_new": random.random() < 0.5,
                "is_early": random.random() < 0.3,
                "after_s": random.choice((0.0, 0.002, 0.05, 0.5)) * random.random(),
                "cancels_s": {name: random.choice(CANCELS_S) for name in CANCELLED},
                "gives_up": random.random() < 0.3,
                "is_released": random.random() < 0.5,
            }
            steps.append(Step(random.random() * length_s, "prompt", given))
        for _ in range(random.choice((0, 0, 1, 3))):
            fault = {"fault": random.choice(FAULTS[1:]), "for_s": random.choice((0.05, 0.5, 5.0))}
            steps.append(Step(random.random() * length_s, "trouble", fault))
        if random.random() < 0.2:
            steps.append(
                Step(random.random() * length_s, "close_exchange", {"name": random.choice("pd")})
            )
        return steps

    def run(self, simulation: Simulation, steps: Sequence[Step]) -> None:
        has_exchanges = any(step.what == "prompt" for step in steps)
        run = _ExchangeRun(simulation, steps) if has_exchanges else _Run(simulation, steps)
        opened = partial(Handover, make_agent=run.make_agent)
        most = simulation.random("clients").choice((1, handover.MAX_CLIENTS))
        with (
            patch.object(handover_engines, "Handover", opened),
            patch.object(handover, "CacheLender", WatchedLender),
            patch.object(handover, "MAX_CLIENTS", most),
        ):
            simulation.run(run.run())


class _Run:
    """One run: the two engines, their blocks, and the expected contents."""

    def __init__(self, simulation: Simulation, steps: Sequence[Step]) -> None:
        self._simulation = simulation
        self._steps = steps
        self._agents: list[tuple[object, StuckAgent]] = []
        self._killed: list[tuple[ProcessRun, Engine]] = []
        random = simulation.random("engines")
        self._common: dict[str, Any] = {
            "transport": random.choice(("auto", "auto", "socket")),
            "integrity": random.choice(("full", "fenced")),
            "lease_s": random.choice((0.3, 2.0)),
            "heartbeat_s": 0.1,
            "timeout_s": random.choice((0.5, 2.0)),
            "staging": ByteSize(1 << 16),
        }
        self._timeout_s = self._common["timeout_s"]
        self._shapes: dict[str, dict[str, Any]] = {
            name: {
                "tp_size": random.choice((1, 2, 2, 4)),
                "layout": random.choice((NHD, HND)),
                "tokens_per_block": random.choice((4, 4, 8)),
            }
            for name in "pd"
        }
        if random.random() < 0.3:  # equal shapes: blocks are read directly into place
            self._shapes["d"] = self._shapes["p"]
        self._processes: dict[str, ProcessRun] = {}
        self._engines: dict[str, Engine] = {}
        self._endpoint = Endpoint("127.0.0.1", PORT)
        self._memory_of_d: list[NDArray[np.int32]] = []  # a row for each block, by layer
        self._free = {name: list(range(1, NUM_BLOCKS)) for name in "pd"}
        self._lent: dict[str, list[int]] = {}
        self._num_ended: dict[str, int] = {}
        self._watched: dict[int, int] = {}  # free blocks of D, and a number in their bytes
        self._num_lives = 0
        self._is_calm = all(step.what == "request" for step in steps)
        self._has_stuck_reads = any(step.arguments.get("fault") == "stuck_reads" for step in steps)
        self._closed: list[str] = []  # exchanges

    def make_agent(self) -> StuckAgent:
        agent = StuckAgent()
        name = f"agent {len(self._agents)}"
        agent.delay_s = self._simulation.random(name).choice(DELAYS_S)
        self._agents.append((self._simulation.runtime.scheduler.current.process, agent))
        return agent

    async def run(self) -> None:
        for name in "pd":
            await self._start(name)
        self._mark(self._free["d"])
        running = [asyncio.create_task(self._carry_out(step)) for step in self._steps]
        watching = asyncio.create_task(self._watch())
        if left := (await asyncio.wait(running, timeout=MOST_S))[1] if running else set():
            self._simulation.fail("never ended", self._simulation.runtime.scheduler.stacks())
        mend(self._agents)
        await asyncio.sleep(REST_S)
        for task in (*left, watching):
            task.cancel()
        self._look()
        self._collect()
        for what in self._leftovers():
            self._simulation.fail("left", what)
        for name in "dp":
            await self._close(name)
        require_no_sockets(self._simulation)
        verdict, trace = len(self._simulation.violations), len(self._simulation.trace)
        for process, engine in self._killed:
            await process.bury(partial(process.call, engine.close))
            process.loop.stop()
        del self._simulation.violations[verdict:], self._simulation.trace[trace:]

    async def _carry_out(self, step: Step) -> None:
        await asyncio.sleep(step.at_s)
        self._simulation.note(f"-> {step}")
        try:
            await getattr(self, f"_{step.what}")(**step.arguments)
        except Exception as exc:  # noqa: BLE001 - that is what is looked for
            self._simulation.fail("undocumented error", repr(exc))

    async def _request(
        self,
        *,
        number: int,
        kind: str,
        family: int,
        length: int,
        first: int,
        after_s: float,
        **how: Any,
    ) -> None:
        """Compute a prompt at P, lend it, and fetch it at D."""
        self._simulation.num_calls += 1
        life, ticket = self._num_lives, f"ticket of request {number}"
        tokens = handover_engines.prompt(MOST_TOKENS, family)[:length]
        p, size = self._engines["p"], self._shapes["p"]["tokens_per_block"]
        blocks = self._take("p", -(-length // size))
        if not self._processes["p"].is_alive:
            blocks = []
        if blocks and kind != "forged":
            p.compute(tokens, [blocks])
            self._lent[ticket], self._num_ended[ticket] = blocks, 0
            if kind == "early":
                p.offer(ticket, tokens, [blocks], num_tokens=length // 2, is_complete=False)
                ending = asyncio.create_task(self._complete(ticket, tokens, blocks, after_s))
            else:
                p.offer(ticket, tokens, [blocks])
        if kind == "revoke":
            ending = asyncio.create_task(self._revoke(ticket, after_s))
        legs = [self._leg(ticket, tokens, first, kind, **how) for _ in range(1 + (kind == "twice"))]
        await asyncio.gather(*legs)
        if kind in ("revoke", "early") and (kind == "revoke" or blocks):
            await ending
        if life == self._num_lives and kind == "forged":
            self._free["p"] += blocks

    async def _complete(
        self, ticket: str, tokens: Sequence[int], blocks: list[int], after_s: float
    ) -> None:
        """Offer the rest of a prompt."""
        life = self._num_lives
        await asyncio.sleep(after_s)
        if life == self._num_lives:
            self._engines["p"].offer(ticket, tokens, [blocks])

    async def _revoke(self, ticket: str, after_s: float) -> None:
        """Revoke a lease, check that none of its blocks is still offered, and use them at once."""
        await asyncio.sleep(after_s)
        engine, process = self._engines["p"], self._processes["p"]
        if not process.is_alive:
            return
        await process.call(lambda: engine.revoke(ticket))
        others = {block for name, ids in self._lent.items() if name != ticket for block in ids}
        for worker in engine.workers:
            offered = worker._lender.book._offers.keys()  # type: ignore[union-attr]
            if found := sorted({*self._lent.get(ticket, [])} & offered - others):
                self._simulation.fail("offered although it was revoked", found)
        if (blocks := self._lent.get(ticket)) is not None:
            self._overwrite(blocks)
            self._free["p"], self._lent[ticket] = blocks + self._free["p"], []

    async def _leg(
        self,
        ticket: str,
        tokens: list[int],
        first: int,
        kind: str,
        *,
        queued_s: float,
        is_released: bool,
    ) -> None:
        """Ask for a prompt at D, fetch it on every worker, and check the bytes that arrive."""
        d, size = self._engines["d"], self._shapes["d"]["tokens_per_block"]
        blocks = self._take("d", -(-len(tokens) // size))
        if not blocks:
            return
        must_be_there = self._is_calm and kind == "hand_over" and ticket in self._lent
        must_be_there &= self._common["lease_s"] > 1  # shorter ones end before D has connected
        try:
            worker, made, at = d.workers[0], PromptKeys(tokens), self._endpoint
            asking = worker.reader.ask(at, ticket, made, d.windows, waits=kind == "early")
            found = await asyncio.wrap_future(worker.submit(asking))
        except (KVXferError, TimeoutError) as exc:
            self._note(f"{ticket}: {exc!r}", is_wrong=must_be_there)
            await self._end(ticket, is_released=is_released)
            self._give_back(blocks)
            return
        stop = found.num_tokens
        if must_be_there and stop < len(tokens):
            self._simulation.fail("not found", f"{stop} of {len(tokens)} tokens of {ticket}")
        first = min(first, stop) // size * size
        ids = [NULL] * (first // size) + blocks[first // size : -(-stop // size)]
        waits = None if found.is_complete else ticket
        await asyncio.sleep(queued_s)
        began, safe = self._simulation.now, True
        loads = d.begin_fetch(
            at, found, tokens, [ids], first_token=first, num_tokens=stop, waits_for=waits
        )
        for rank, loading in enumerate(loads):
            try:
                fetched = await asyncio.wrap_future(loading)
            except (KVXferError, TimeoutError) as exc:
                self._simulation.note(f"   {ticket}: worker {rank}: {exc!r}")
                continue
            self._judge(rank, fetched, tokens, ids, first, stop)
            if must_be_there and (num_missing := fetched.missing["missing"]):
                self._simulation.fail("missing", f"{num_missing} blocks of {ticket} at {rank}")
            safe &= fetched.memory_safe
        if not safe:
            self._note(f"{ticket}: its blocks are not safe", is_wrong=not self._has_stuck_reads)
            wanted = found.wanted(made, first, stop, [ids])
            for each in d.workers:
                await asyncio.wrap_future(each.submit(each.reader.drain(wanted)))
        elif self._simulation.now - began > self._timeout_s + SLACK_S:
            self._simulation.fail("late", f"a fetch took {self._simulation.now - began:.3f} s")
        await self._end(ticket, is_released=is_released)
        self._give_back(blocks)

    def _note(self, refusal: str, *, is_wrong: bool) -> None:
        self._simulation.note(f"   {refusal}")
        if is_wrong:
            self._simulation.fail("unexpected", refusal)

    def _judge(
        self,
        rank: int,
        fetched: Fetched,
        tokens: Sequence[int],
        ids: Sequence[int],
        first: int,
        stop: int,
    ) -> None:
        """Check the bytes of the blocks that have arrived."""
        if not fetched.memory_safe:
            return
        good = self._engines["d"].good(tokens[:stop], [ids])[rank][0]
        size, bad = self._shapes["d"]["tokens_per_block"], {*fetched.bad_blocks[0]}
        for index in range(first // size, len(ids)):
            if ids[index] not in bad and not good[index]:
                self._simulation.fail("wrong bytes", f"block {index} of {len(ids)} at {rank}")

    async def _end(self, ticket: str, *, is_released: bool) -> None:
        """Release a ticket, or only leave it, so that its lease runs out."""
        worker = self._engines["d"].workers[0]
        end = worker.reader.release if is_released else worker.reader.leave
        await asyncio.wrap_future(worker.submit(end(self._endpoint, ticket)))

    # Blocks.

    def _take(self, name: str, num_blocks: int) -> list[int]:
        """Take free blocks of an engine; none if there are too few."""
        if name == "d":
            self._look()
        free = self._free[name]
        if len(free) < num_blocks:
            return []
        taken, self._free[name] = free[:num_blocks], free[num_blocks:]
        for block in taken if name == "d" else []:
            del self._watched[block]
        return taken

    def _give_back(self, blocks: list[int]) -> None:
        """Give blocks of D back: nothing may write to them from now on."""
        self._free["d"] += blocks
        self._mark(blocks)

    def _mark(self, blocks: Sequence[int]) -> None:
        number = self._simulation.runtime.scheduler.num_steps
        self._watched |= dict.fromkeys(blocks, number)
        for view in self._views_of("d"):
            view[blocks] = number

    def _look(self) -> None:
        """Check that the free blocks of D are untouched."""
        if not (blocks := list(self._watched)):
            return
        numbers = np.array(list(self._watched.values()), np.int32)[:, None]
        touched: dict[int, None] = {}
        for memory in self._memory_of_d:
            if (differs := memory[blocks] != numbers).any():
                touched |= dict.fromkeys(blocks[at] for at in np.flatnonzero(differs.any(axis=1)))
        for block in touched:
            self._simulation.fail("safe memory was touched", f"block {block}")
            self._mark([block])

    def _views_of(self, name: str) -> list[torch.Tensor]:
        return [view for views in self._engines[name].views for view in views[0]]

    async def _watch(self) -> None:
        """Repeatedly check D's free blocks, and compute into P's blocks whose leases are over."""
        while True:
            await asyncio.sleep(0.2)
            self._look()
            self._collect()

    def _collect(self) -> None:
        """Take back the blocks of tickets that have ended on every worker, and overwrite them."""
        engine = self._engines["p"]
        for ended in engine.take_ended():
            for ticket in ended:
                if ticket not in self._lent:
                    continue
                self._num_ended[ticket] += 1
                if self._num_ended[ticket] < engine.tp_size:
                    continue
                self._take_back(ticket)

    def _take_back(self, ticket: str) -> None:
        """Take back the blocks of a ticket that has ended, which nobody may read any longer."""
        blocks = self._lent.pop(ticket)
        for rank, worker in enumerate(self._engines["p"].workers):
            if lent := worker._lender.find_lent(blocks):  # type: ignore[union-attr]
                self._simulation.fail("ended while it is read", f"{lent} at {rank}")
        self._overwrite(blocks)
        self._free["p"] += blocks

    def _overwrite(self, blocks: list[int]) -> None:
        for view in self._views_of("p"):
            view[blocks] = -2

    def _leftovers(self) -> list[str]:
        left = [f"{ticket} has not ended" for ticket in self._lent]
        if "d" not in self._closed:  # closing ends every hold
            left += [f"{each} is kept" for each in self._engines["d"].workers[0].reader._keepers]
        for rank, worker in enumerate(self._engines["p"].workers):
            book = worker._lender.book  # type: ignore[union-attr]
            if any(counts := (book.num_tickets, len(book._offers), len(book._pins))):
                left.append(f"tickets, offers, pins {counts} at worker {rank}")
        for name in "pd":
            for worker in self._engines[name].workers:
                staging = worker._exchange.staging
                if missing := staging.num_buffers - len(staging._idle):
                    left.append(f"{missing} staging buffers of {name}")
        return left

    # Faults.

    async def _trouble(self, *, fault: str, for_s: float) -> None:
        network = self._simulation.runtime.network
        if fault == "kill":
            await self._kill(for_s)
        elif fault == "cut":
            network.cut("engine d", "engine p", 0.5)
        elif fault == "refuse":  # one worker of P; its others are reachable
            rank = self._simulation.random("refuse").randrange(self._engines["p"].tp_size)
            network.refuse(("127.0.0.1", PORT + rank), for_s)
            stop = self._simulation.now + for_s
            while self._simulation.now < stop:
                network.cut("engine d", "engine p", 1.0)
                await asyncio.sleep(0.1)
        elif fault == "partition":
            network.partition("engine d", "engine p", for_s)
        else:
            for _, agent in self._agents:
                agent.failing = fault == "failing_reads"
                if fault == "late_reads":
                    agent.delay_s = LONG_DELAYS_S[for_s > 1]
                elif fault == "stuck_reads":
                    agent.hold()
            await asyncio.sleep(for_s + HELD_S * (fault == "stuck_reads"))
            mend(self._agents)

    async def _kill(self, for_s: float) -> None:
        """Kill P, and start it again, with other bytes in its blocks."""
        process = self._processes["p"]
        if not process.is_alive:
            return
        self._num_lives += 1
        process.kill(None)
        self._killed.append((process, self._engines["p"]))
        forget(self._agents, process)
        self._lent, self._free["p"] = {}, []
        await asyncio.sleep(for_s)
        await self._start("p")
        self._free["p"] = list(range(1, NUM_BLOCKS))

    async def _start(self, name: str) -> None:
        process = self._processes[name] = ProcessRun(self._simulation, f"engine {name}")
        given = {**self._common, **self._shapes[name], "port": PORT, "lends": name == "p"}
        self._engines[name] = await process.call(lambda: Engine(**given))
        if name == "d":
            sizes = [(view, view[0].numel()) for view in self._views_of("d")]
            self._memory_of_d = [
                view.as_strided((NUM_BLOCKS, size), (size, 1)).numpy() for view, size in sizes
            ]

    async def _close(self, name: str) -> None:
        process, engine = self._processes[name], self._engines[name]
        began = self._simulation.now
        await asyncio.gather(*(process.call(engine.close) for _ in range(2)))
        took_s = self._simulation.now - began
        if took_s > CLOSE_S * engine.tp_size:
            self._simulation.fail("late", f"the end of {name} took {took_s:.3f} s")
        process.loop.stop()


class _ExchangeRun(_Run):
    """One run with an exchange at each engine, whose callers give some calls up."""

    def __init__(self, simulation: Simulation, steps: Sequence[Step]) -> None:
        super().__init__(simulation, steps)
        for shape in self._shapes.values():
            shape["tp_size"] = 1
        self._is_calm = all(step.what == "prompt" for step in steps)
        self._exchanges: dict[str, PromptExchange] = {}
        self._ended: dict[str, None] = {}  # tickets

    async def _start(self, name: str) -> None:
        await super()._start(name)
        worker = self._engines[name].workers[0]
        listen: dict[str, Any] = {"listen": f"127.0.0.1:{PORT}"} if name == "p" else {}
        config, caches = NixlConfig(**self._common, **listen), worker.reader._describer.caches
        with patch.object(prompt_exchange, "Handover", lambda *_: worker):
            self._exchanges[name] = PromptExchange(config, caches, Namespace(model="m"))

    async def _prompt(
        self,
        *,
        number: int,
        family: int,
        length: int,
        is_new: bool,
        is_early: bool,
        after_s: float,
        cancels_s: dict[str, float | None],
        gives_up: bool,
        **how: Any,
    ) -> None:
        """Compute and offer a prompt at P, fetch it at D, and perhaps give its ticket up."""
        self._simulation.num_calls += 1
        tokens = handover_engines.prompt(MOST_TOKENS, family)[:length]
        blocks = self._take("p", -(-length // self._shapes["p"]["tokens_per_block"]))
        if not blocks:
            return
        exchange, offers = self._exchanges["p"], partial(self._exchanges["p"].offer, tokens)
        ticket = "" if is_new else f"{self._endpoint}/lease-{number}"
        parts: dict[int | None, float | None] = {length // 2 if is_early else None: None}
        if ticket and self._simulation.random(f"twice {number}").random() < TWICE:
            is_early, parts = False, {length // 2: None, None: cancels_s["rest"]}
        for cancel_s in (cancels_s["offer"], None):
            self._engines["p"].compute(tokens, [blocks])
            parts[next(iter(parts))] = cancel_s
            calls = [
                self._call("p", offers([blocks], ticket=ticket, num_computed_tokens=part), limit_s)
                for part, limit_s in parts.items()
            ]
            if any(offered := await asyncio.gather(*calls)):
                break
            self._overwrite(blocks)  # since nothing is lent
            await asyncio.sleep(after_s)
        if not any(offered):
            self._free["p"] += blocks
            return
        ticket, gives_up = next(filter(None, offered)), gives_up or offered[-1] is None
        self._lent[ticket] = blocks
        fetching = asyncio.create_task(self._fetch(ticket, tokens, cancels_s=cancels_s, **how))
        await asyncio.sleep(after_s)
        if is_early:
            rest = await self._call("p", offers([blocks], ticket=ticket), cancels_s["rest"])
            gives_up |= rest is None
        if gives_up:
            with contextlib.suppress(ClosedError):
                exchange.give_up(ticket)
        await fetching

    async def _fetch(
        self,
        ticket: str,
        tokens: list[int],
        *,
        first: int,
        cancels_s: dict[str, float | None],
        is_released: bool,
    ) -> None:
        """Fetch a prompt at D; once the call has ended, nothing may write to its blocks."""
        exchange, size = self._exchanges["d"], self._shapes["d"]["tokens_per_block"]
        blocks = self._take("d", -(-len(tokens) // size))
        if not blocks:
            return
        first = min(first, len(tokens)) // size * size
        ids, began = [NULL] * (first // size) + blocks[first // size :], self._simulation.now
        fetch = exchange.fetch(ticket, tokens, [ids], first_token=first)
        fetched = await self._call("d", fetch, cancels_s["fetch"])
        took_s = self._simulation.now - began
        if fetched is not None:
            self._judge(0, fetched, tokens, ids, first, len(tokens))
            if took_s > 2 * self._timeout_s + SLACK_S:
                self._simulation.fail("late", f"a fetch took {took_s:.3f} s")
            if not fetched.memory_safe:
                await asyncio.sleep(REST_S / 2)
        self._give_back(blocks)
        if is_released:
            await self._call("d", exchange.release(ticket), cancels_s["release"])

    async def _call(
        self, name: str, call: Coroutine[Any, Any, T], cancel_s: float | None
    ) -> T | None:
        """Make a call, perhaps give it up; None if it was cancelled or has failed."""
        made = await self._processes[name].run(_give_up_after(call, cancel_s))
        if made.cancelled():
            return None
        if (error := made.exception()) is None:
            return made.result()
        # A ticket whose offer was given up may still be read, and is refused until it has ended.
        is_lending = name == "p" and not isinstance(error, InvalidArgumentError)
        if not isinstance(error, KVXferError | TimeoutError) or (is_lending and self._is_calm):
            self._simulation.fail("undocumented error", repr(error))
        return None

    async def _close_exchange(self, name: str) -> None:
        self._closed.append(name)
        await self._processes[name].run(self._exchanges[name].aclose())

    def _collect(self) -> None:
        """Take back the blocks of tickets that have ended, and overwrite them."""
        for ticket in self._exchanges["p"].take_ended():
            if ticket in self._ended:
                self._simulation.fail("ended twice", ticket)
            self._ended[ticket] = None
        for ticket in self._ended.keys() & self._lent.keys():
            self._take_back(ticket)

    def _leftovers(self) -> list[str]:
        left = [f"{each} of the exchange" for each in self._exchanges["p"]._lent]
        return left + super()._leftovers()


async def _give_up_after(call: Coroutine[Any, Any, T], cancel_s: float | None) -> "asyncio.Task[T]":
    """Make a call, and cancel it after `cancel_s`; return its task, which has ended."""
    task = asyncio.create_task(call)
    await asyncio.wait([task], timeout=cancel_s)
    if not task.done():
        task.cancel()
        await asyncio.wait([task])
    return task


SCENARIO = LendingScenario
