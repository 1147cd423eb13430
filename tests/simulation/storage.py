"""Scenario of a storage of bytes, whose four methods block the threads that call them."""

from collections import Counter
from collections.abc import Collection, Sequence
from random import Random
from typing import Self

from kvxfer import runtime
from kvxfer.storage.bytes_backend import BytesBackend
from kvxfer.storage.integrity import Integrity
from kvxfer.storage.keys import Namespace
from kvxfer.testing.simulation import EngineScenario, FaultyTier, Opened, Simulation, Step
from kvxfer.testing.simulation.faults import TierFault
from kvxfer.testing.simulation.scheduler import FaultWindows
from kvxfer.transfer import TransferEngine
from tests.simulation.objects import delete_given_up
from tests.simulation.tiers import leftovers_of_engine

LATENCY_S = 0.02
GIVEN_UP = 2
"""Number of deletes that their callers give up, in some plans."""
FAULTS = (TierFault.SLOW, TierFault.HANG, TierFault.ERROR, TierFault.FAILED)


class StorageScenario(EngineScenario):
    """Engine over a `BytesBackend`, whose storage is slow, hangs, raises and refuses."""

    name = "bytes"
    stores_parts = False

    def plan(self, random: Random) -> list[Step]:
        """See `Scenario.plan`."""
        steps = super().plan(random)
        for _ in range(random.choice((0, 0, GIVEN_UP))):
            steps += delete_given_up(random, 0.2 + random.random() * steps[-1].at_s)
        return sorted(steps, key=lambda step: step.at_s)

    def open(self, simulation: Simulation, namespace: Namespace) -> Opened:
        self._storage = _Storage(simulation, namespace)
        tier = _FaultyStorage(self._storage, simulation, "bytes")
        return Opened(backend=tier, faulty={0: tier}, may_raise=True)

    def run(self, simulation: Simulation, steps: Sequence[Step]) -> None:
        """See `Scenario.run`; the storage must be closed once, after all of its calls."""
        super().run(simulation, steps)
        if self._storage.num_closed != 1:
            simulation.fail("storage", f"closed {self._storage.num_closed} times")

    def leftovers(self, engine: TransferEngine, opened: Opened) -> list[str]:
        return leftovers_of_engine(engine)


class _Storage(BytesBackend):
    """Storage in a dictionary whose calls begin and end late, and have faults in windows."""

    def __init__(self, simulation: Simulation, namespace: Namespace) -> None:
        self._simulation = simulation
        random = simulation.random("storage")
        integrity = random.choice((Integrity.FAST, Integrity.OFF))
        num_threads = random.choice((1, 2, 4))
        super().__init__(namespace, integrity=integrity, num_threads=num_threads)
        self.longer = random.choice((1, 1, 6))  # some calls hang for longer than a close waits
        self.windows = FaultWindows[TierFault]()
        self.num_closed = 0
        self._values: dict[str, bytes] = {}
        self._num_calls: Counter[tuple[str, ...]] = Counter()
        self._num_running = 0

    def put(self, names: Sequence[str], values: Sequence[bytes]) -> list[bool]:
        with _Call(self, "store", names) as call:
            kept = [call.keeps() for _ in names]
            pairs = zip(names, values, kept, strict=True)
            self._values |= {name: value for name, value, is_kept in pairs if is_kept}
            return kept

    def get(self, names: Sequence[str]) -> list[bytes | None]:
        with _Call(self, "load", names):
            return [self._values.get(name) for name in names]

    def has(self, names: Sequence[str]) -> list[bool]:
        with _Call(self, "lookup", names):
            return [name in self._values for name in names]

    def remove(self, names: Sequence[str]) -> None:
        with _Call(self, "delete", names):
            for name in names:
                self._values.pop(name, None)

    def close(self) -> None:
        if self._num_running:
            self._simulation.fail("closed during calls", self._num_running)
        self.num_closed += 1


class _Call:
    """Call of the storage: takes time before and after its work, and may have a fault."""

    def __init__(self, storage: _Storage, name: str, names: Sequence[str]) -> None:
        call = (name, *names)
        storage._num_calls[call] += 1
        self._storage = storage
        self._name = name
        self._random = storage._simulation.random(f"{call} {storage._num_calls[call]}")
        self._fault: TierFault | None = None

    def __enter__(self) -> Self:
        storage, random = self._storage, self._random
        if storage.num_closed:
            storage._simulation.fail("called after the end", self._name)
        storage._num_running += 1
        drawn = next(storage.windows.draw(storage._simulation.now, self._name, random), None)
        self._pause()
        if drawn is not None:
            self._fault, ends_at = drawn
            left_s = max(0.0, ends_at - storage._simulation.now)
            if self._fault is TierFault.SLOW:
                runtime.sleep(left_s * random.random())
            elif self._fault is TierFault.HANG:
                runtime.sleep(left_s)
            elif self._fault is TierFault.ERROR:
                storage._num_running -= 1
                raise OSError(5, "injected")
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._pause()
        self._storage._num_running -= 1

    def keeps(self) -> bool:
        return self._fault is not TierFault.FAILED or self._random.random() < 0.5

    def _pause(self) -> None:
        if self._random.random() > 0.35:
            runtime.sleep(self._random.random() * LATENCY_S)


class _FaultyStorage(FaultyTier):
    """Backend whose faults are injected into its storage."""

    def begin_fault(
        self, fault: TierFault, for_s: float, share: float, calls: Collection[str] = ()
    ) -> None:
        assert isinstance(self.inner, _Storage)
        if fault in FAULTS:
            ends_at = self._simulation.now + for_s * self.inner.longer
            self.inner.windows.begin(fault, ends_at, share, calls)
