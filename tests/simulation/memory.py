"""Scenario of host memory in which bits flip, and of the scrubber that finds them."""

from collections.abc import Sequence
from itertools import compress
from random import Random
from typing import Any, ClassVar

import xxhash

from kvxfer import BlockKey, Namespace, TransferEngine
from kvxfer.backends.host import HostBackend, scrubber
from kvxfer.kvcache.descriptors import view_blocks
from kvxfer.storage.lending import BlockParts
from kvxfer.testing.simulation import EngineRun, EngineScenario, Opened, Simulation, Step
from kvxfer.testing.simulation.world import World
from tests.simulation.polled import BY_LINE
from tests.simulation.tiers import (
    LARGEST_CHUNK_BYTES,
    ROOM,
    late_copies,
    leftovers_of_engine,
    leftovers_of_host,
    open_host,
)

RATES = (1.0, 1 / 128)
"""Scrubbing rates in MiB per second: all blocks in one batch, or a few blocks."""
SLACK_S = 2.0
FEW_STEPS = 30
"""Maximum steps of a run in which threads also switch between lines, which is ten times slower."""


class MemoryScenario(EngineScenario):
    """Engine over host memory that does not verify blocks as they are stored and loaded.

    A flipped bit may be loaded until the scrubber has found it, in the round after the one in which
    it first saw the block. A bit that flipped before that round is never found. No intact block may
    be dropped.
    """

    name = "memory"
    num_faulty: ClassVar[int] = 0

    def plan(self, random: Random) -> list[Step]:
        """See `Scenario.plan`; the calls go on for several rounds of the scrubber."""
        rounds = random.choice((1, 6))
        steps = [
            Step(step.at_s + random.randrange(rounds) * scrubber.ROUND_S, step.what, step.arguments)
            for step in super().plan(random)
        ]
        calls = ["flip"] * random.choice((0, 1, 4)) + ["lend"] * random.choice((0, 4))
        for what in calls:
            at_s = random.random() * rounds * scrubber.ROUND_S
            steps.append(Step(at_s, what, {"number": random.randrange(1 << 20)}))
        return sorted(steps, key=lambda step: step.at_s)

    def open(self, simulation: Simulation, namespace: Namespace) -> Opened:
        random = simulation.random("memory")
        is_roomy = random.random() < 0.6
        num_blocks = ROOM if is_roomy else random.choice((2, 4, 8))
        rate = random.choice(RATES)
        copying = late_copies(simulation)
        backend = open_host(num_blocks, namespace, scrub_mib_per_s=rate, copying=copying)
        most_bytes = num_blocks * LARGEST_CHUNK_BYTES
        self._found_s = 2 * (scrubber.ROUND_S + most_bytes / (rate * (1 << 20))) + SLACK_S
        return Opened(backend=backend, is_roomy=is_roomy)

    def run(self, simulation: Simulation, steps: Sequence[Step]) -> None:
        world = World(simulation)
        opened = self.open(simulation, world.namespace)
        opened.excuse((), world.history)
        if len(steps) <= FEW_STEPS and simulation.random("lines").random() < 0.5:
            simulation.runtime.scheduler.switch_by_line(BY_LINE)
        run = _MemoryRun(self, simulation, world, opened, found_s=self._found_s)
        simulation.run(self._run(run, steps))

    def leftovers(self, engine: TransferEngine, opened: Opened) -> list[str]:
        assert isinstance(opened.backend, HostBackend)
        return leftovers_of_engine(engine) + leftovers_of_host(opened.backend)


class _MemoryRun(EngineRun):
    """Engine over memory in which bits flip.

    Args:
        found_s: Seconds within which a flipped bit is found, if the scrubber had seen its block.
    """

    def __init__(self, *given: Any, found_s: float) -> None:
        super().__init__(*given)
        self._found_s = found_s
        self._damaged: dict[BlockKey, None] = {}

    async def _flip(self, number: int) -> None:
        """Flip a bit of a block that is there, if any is."""
        host = self._host
        if (key := flip_bit(host, number)) is not None:
            slot = host._index.slot_of(key)
            age_s = self._simulation.now - self._world.history.last_stored(key)
            is_seen = int(host._scrubber._seen[slot]) == host.pool.generations.of(slot)
            is_seen |= age_s > self._found_s / 2  # even if the scrubber has no record of it
            self._damaged[key] = None
            self._world.history.note_damage(key, self._found_s if is_seen else None)

    async def _lend(self, number: int) -> None:
        """Lend a block to a reader that verifies it."""
        for key in _choose(self._host, number):
            async with self._host.lend(_whole(self._host, key)) as lent:
                if lent.blocks is None:
                    return
                found = [xxhash.xxh3_64_intdigest(view) for (view,) in view_blocks(lent.blocks)]
                if found != lent.checksums and key not in self._damaged:
                    self._simulation.fail("lent with another checksum", key.hex())

    @property
    def _host(self) -> HostBackend:
        host = self.opened.backend
        assert isinstance(host, HostBackend)
        return host


def flip_bit(host: HostBackend, number: int) -> BlockKey | None:
    """Flip a bit of a block of host memory, and return its key; None if no block is there."""
    for key in _choose(host, number):
        parts = _whole(host, key)
        byte = parts.starts[0] + number % parts.sizes[0]
        host.pool.slots[host._index.slot_of(key), 0, byte] ^= 1
        return key
    return None


def _choose(host: HostBackend, number: int) -> list[BlockKey]:
    """Choose a block that is there; none if there is none."""
    index = host._index
    there = list(compress(index.keys(), index.are_ready(index.keys())))
    return [there[number % len(there)]] if there else []


def _whole(host: HostBackend, key: BlockKey) -> BlockParts:
    slot = host._index.slot_of(key)
    _, start, stop, _ = host.pool._tags[slot, 0].tolist()
    return BlockParts([key], [start], [stop - start])
