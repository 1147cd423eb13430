"""etcd of a simulation: leases, revisions and watches, with the interface of `EtcdSession`."""

import asyncio
import contextlib
import enum
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from kvxfer.backends.nixl.discovery import CompactedError, EtcdError
from kvxfer.runtime import LoopThread
from kvxfer.testing.simulation import Simulation
from kvxfer.testing.simulation.scheduler import SimulatedProcess

LATENCY_S = 0.01

T = TypeVar("T")


class EtcdFault(enum.StrEnum):
    """Fault of etcd in a window of time, or at one moment.

    Attributes:
        DOWN: It refuses calls, and ends watches.
        SILENT: It answers nothing, and nothing reaches it.
        UNANSWERED: Calls take effect, but their answers are lost.
        LATE: Calls take effect after their callers have given up.
        REPEATED: Calls take effect twice.
        CUT: It ends all watches, once.
        COMPACTED: It forgets former revisions, and ends all watches, once.
        FORGETFUL: It restarts without data, as from an empty disk.
    """

    DOWN = "down"
    SILENT = "silent"
    UNANSWERED = "unanswered"
    LATE = "late"
    REPEATED = "repeated"
    CUT = "cut"
    COMPACTED = "compacted"
    FORGETFUL = "forgetful"


@dataclass(slots=True)
class _Lease:
    ttl_s: float
    ends_at: float


class SimulatedEtcd:
    """One etcd that all processes of a simulation call, each from an event loop of its own."""

    def __init__(self, simulation: Simulation) -> None:
        self.random = simulation.random("etcd")
        self._simulation = simulation
        self._loops: dict[SimulatedProcess, LoopThread] = {}
        self._watching: dict[asyncio.Event, asyncio.AbstractEventLoop] = {}
        self._faults: list[tuple[EtcdFault, float, float]] = []
        self.num_cuts = self._num_leases = 0
        self._start()

    def _start(self) -> None:
        self.revision, self.compacted = 1, 0
        self._entries: dict[bytes, tuple[bytes, int]] = {}
        self._leases: dict[int, _Lease] = {}
        self._changes: list[tuple[int, bytes, bytes | None]] = []

    @property
    def now(self) -> float:
        return self._simulation.now

    def own_loop(self) -> asyncio.AbstractEventLoop:
        """See `kvxfer.backends.nixl.discovery.own_loop`: one for each process."""
        process = self._simulation.runtime.scheduler.current.process
        if process not in self._loops:
            self._loops[process] = LoopThread("kvxfer-etcd")
        return self._loops[process].loop

    @contextlib.asynccontextmanager
    async def open_session(
        self, config: Any, endpoint: Any, timeout_s: float
    ) -> AsyncIterator["SimulatedEtcdSession"]:
        yield SimulatedEtcdSession(self, timeout_s)

    # Faults.

    def begin_fault(self, fault: EtcdFault, for_s: float, share: float) -> None:
        """Inject a fault into a share of the calls within the next `for_s` seconds."""
        self._simulation.note(f"etcd is {fault} for {for_s:g} s")
        if fault is EtcdFault.FORGETFUL:
            self._start()
        elif fault is EtcdFault.COMPACTED:
            self.compact()
        elif fault not in (EtcdFault.CUT, EtcdFault.DOWN):
            self._faults.append((fault, self.now + for_s, share))
            return
        if fault is EtcdFault.DOWN:
            self._faults.append((fault, self.now + for_s, 1.0))
        self.num_cuts += 1
        self._wake()

    def end_faults(self) -> None:
        self._faults.clear()

    def draw_fault(self) -> EtcdFault | None:
        """Draw the fault of a call, or that of a watch at some moment."""
        self._faults = [each for each in self._faults if each[1] > self.now]
        for fault, _, share in self._faults:
            if share == 1.0 or self.random.random() < share:
                return fault
        return None

    # Entries and leases.

    def compact(self) -> None:
        self.compacted = self.revision
        self._changes.clear()

    def entries(self, prefix: bytes) -> dict[bytes, bytes]:
        """List entries without their prefix, sorted as etcd does."""
        self.expire()
        found = sorted(each for each in self._entries if each.startswith(prefix))
        return {key[len(prefix) :]: self._entries[key][0] for key in found}

    def put(self, key: bytes, value: bytes, lease: int) -> None:
        self.expire()
        if lease not in self._leases:
            raise EtcdError("not_found: etcdserver: requested lease not found")
        self._entries[key] = value, lease
        self._change([(key, value)])

    def grant(self, ttl_s: int) -> int:
        self._num_leases += 1
        self._leases[self._num_leases] = _Lease(ttl_s, self.now + ttl_s)
        return self._num_leases

    def renew(self, lease: int) -> bool:
        self.expire()
        if lease not in self._leases:
            return False
        self._leases[lease].ends_at = self.now + self._leases[lease].ttl_s
        return True

    def revoke(self, lease: int) -> None:
        """End a lease, and remove its entries."""
        self.expire()
        if lease not in self._leases:
            raise EtcdError("not_found: etcdserver: requested lease not found")
        self._end(lease)

    def changed(self, prefix: bytes, since: int) -> dict[bytes, bytes | None]:
        """Return the changes of entries from a revision on, the last one of each."""
        self.expire()
        return {
            key[len(prefix) :]: value
            for revision, key, value in self._changes
            if revision >= since and key.startswith(prefix)
        }

    def expire(self) -> None:
        """End the leases that have expired."""
        for lease in [each for each, kept in self._leases.items() if kept.ends_at <= self.now]:
            self._end(lease)

    def _end(self, lease: int) -> None:
        del self._leases[lease]
        gone = [key for key, (_, holds) in self._entries.items() if holds == lease]
        for key in gone:
            del self._entries[key]
        if gone:
            self._change([(key, None) for key in gone])

    def _change(self, changes: list[tuple[bytes, bytes | None]]) -> None:
        self.revision += 1
        self._changes += [(self.revision, key, value) for key, value in changes]
        self._wake()

    def _wake(self) -> None:
        for event, loop in list(self._watching.items()):
            with contextlib.suppress(RuntimeError):  # of a process that has ended
                loop.call_soon_threadsafe(event.set)

    async def wait_for_change(self, until: float) -> None:
        """Wait until something may have changed, no longer than some time."""
        event = asyncio.Event()
        self._watching[event] = asyncio.get_running_loop()
        limit_s = min([until, *(each.ends_at for each in self._leases.values())]) - self.now
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, limit_s)):
                    await event.wait()
        finally:
            del self._watching[event]


class SimulatedEtcdSession:
    """Session with the interface of `EtcdSession`.

    Args:
        etcd: The etcd.
        timeout_s: Time for each call.
    """

    def __init__(self, etcd: SimulatedEtcd, timeout_s: float) -> None:
        self._etcd = etcd
        self._timeout_s = timeout_s

    async def entries(self, prefix: bytes) -> tuple[int, dict[bytes, bytes]]:
        def look() -> tuple[int, dict[bytes, bytes]]:
            entries = self._etcd.entries(prefix)
            return self._etcd.revision, entries

        return await self._call(look)

    async def has(self, key: bytes) -> bool:
        return await self._call(lambda: b"" in self._etcd.entries(key))

    async def put(self, key: bytes, value: bytes, lease: int) -> None:
        await self._call(lambda: self._etcd.put(key, value, lease))

    async def grant(self, ttl_s: int) -> int:
        return await self._call(lambda: self._etcd.grant(ttl_s))

    async def renew(self, lease: int) -> bool:
        return await self._call(lambda: self._etcd.renew(lease))

    async def revoke(self, lease: int) -> None:
        await self._call(lambda: self._etcd.revoke(lease))

    async def changes(
        self, prefix: bytes, revision: int
    ) -> AsyncGenerator[Mapping[bytes, bytes | None], None]:
        etcd, num_cuts = self._etcd, self._etcd.num_cuts
        await self._call(lambda: None)
        if revision < etcd.compacted:
            raise CompactedError(f"changes up to revision {etcd.compacted} are gone")
        yield {}
        heard_at = etcd.now
        while True:
            if etcd.num_cuts != num_cuts:
                raise EtcdError("etcd ended the stream")
            changed = etcd.changed(prefix, revision)
            is_silent = etcd.draw_fault() is EtcdFault.SILENT
            if is_silent and etcd.now >= heard_at + 2 * self._timeout_s:
                raise EtcdError(f"no answer within {self._timeout_s:.2g} s")
            if not is_silent and (changed or etcd.now >= heard_at + self._timeout_s):
                heard_at, revision = etcd.now, etcd.revision + 1
                yield changed
                continue
            await etcd.wait_for_change(etcd.now + self._timeout_s)

    async def _call(self, do: Callable[[], T]) -> T:
        """Call etcd; with a fault, the answer comes late or never."""
        etcd, fault = self._etcd, self._etcd.draw_fault()
        await asyncio.sleep(etcd.random.random() * LATENCY_S)
        if fault is EtcdFault.DOWN:
            raise EtcdError("unavailable: connection refused")
        if fault is EtcdFault.LATE:
            late_s = self._timeout_s * (1.0 + etcd.random.random())
            asyncio.get_running_loop().call_later(late_s, _do_late, do)
        if fault is EtcdFault.UNANSWERED:
            do()
        if fault in (EtcdFault.LATE, EtcdFault.UNANSWERED, EtcdFault.SILENT):
            await asyncio.sleep(self._timeout_s)
            raise EtcdError(f"no answer within {self._timeout_s:.2g} s")
        if fault is EtcdFault.REPEATED:
            do()
        answer = do()
        await asyncio.sleep(etcd.random.random() * LATENCY_S)
        return answer


def _do_late(do: Callable[[], object]) -> None:
    with contextlib.suppress(EtcdError):
        do()
