"""Tiers that a server holds for other processes, opened for the first namespace requested."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

from kvxfer.backends.host.backend import HostBackend
from kvxfer.runtime import Threads
from kvxfer.storage.backend import Backend
from kvxfer.storage.keys import Namespace
from kvxfer.storage.observer import Gauge
from kvxfer.tiering.tiered_backend import tiers_of
from kvxfer.units import format_size

ABANDON_AFTER_S = 0.2
"""How long closing waits for memory that is being reserved, at about 1 GiB per second, before it
abandons it: no block is in it yet."""

DRAIN_POLL_S = 0.05
"""Pause between two checks of the sessions while a server drains."""

logger = logging.getLogger(__name__)


class HeldTiers:
    """Tiers of one namespace: the given one, or the first that a client asks for.

    Without a namespace, the size of a block is unknown, so the memory is reserved when the first
    client asks, on a thread. If that takes longer than the client waits, its next attempt finds the
    memory reserved. `prepare` is called with the opened backend before any client uses it.

    Attributes:
        namespace: Namespace of the blocks; None as long as any is accepted.
    """

    def __init__(
        self,
        open_backend: Callable[[Namespace], Backend],
        namespace: Namespace | None = None,
        *,
        prepare: Callable[[Backend], Awaitable[None]] | None = None,
    ) -> None:
        self.namespace = namespace
        self._open_backend = open_backend
        self._prepare = prepare
        self._opening = Threads("kvxfer-open", 1)
        self._settling = asyncio.Lock()
        self._opened: tuple[Namespace, Backend] | None = None

    @property
    def is_open(self) -> bool:
        """Whether the backend was opened."""
        return self._opened is not None

    @property
    def backend(self) -> Backend:
        """The backend; must be open."""
        assert self._opened is not None
        return self._opened[1]

    @property
    def host(self) -> HostBackend:
        """The first tier; must be host memory."""
        host = tiers_of(self.backend)[0].provide(HostBackend)
        assert host is not None
        return host

    async def settle(self, namespace: Namespace) -> Backend:
        """Open the backend for the first namespace, and refuse others."""
        async with self._settling:
            if self.namespace is not None:
                self.namespace.require_same(namespace)
            await self._opening.ask(self._open, namespace)
            assert self._opened is not None
            settled, backend = self._opened
            settled.require_same(namespace)  # a caller that gave up may have opened another one
            self.namespace = settled
            if self._prepare is not None:
                await self._prepare(backend)
                self._prepare = None
            return backend

    async def aclose(self, close_users: Callable[[], Awaitable[None]] | None = None) -> None:
        """Close the users of the backend, then the backend; may be called again.

        Memory that is still being reserved stays until the process ends.
        """
        await self._opening.aclose(ABANDON_AFTER_S)
        if close_users is not None:
            await close_users()
        if self._opened is not None:
            await self.backend.aclose()

    def _open(self, namespace: Namespace) -> None:
        """Open the backend; the next call finds it open even if this one's caller was cancelled."""
        if self._opened is not None:
            return
        self._opened = namespace, self._open_backend(namespace)
        tiers = tiers_of(self.backend)
        hosts = filter(None, (tier.provide(HostBackend) for tier in tiers))
        logger.info(
            "settled namespace %s of %r: %d slots of %s in host memory, %d tiers below",
            namespace.fingerprint,
            namespace.model,
            sum(host.num_slots for host in hosts),
            format_size(max(namespace.chunk_sizes)),
            len(tiers) - 1,
        )


class Session(Protocol):
    """Session of a process that blocks are held for."""

    draining: bool = False

    @property
    def num_pins(self) -> int:
        """Number of batches that the session has pinned."""

    @property
    def is_idle(self) -> bool:
        """Whether the session is neither reading nor storing."""

    def drain(self) -> None:
        """Refuse new requests; let those under way end."""
        self.draining = True


def gauges_of(sessions: Sequence[Session]) -> Mapping[Gauge, float]:
    """Count sessions and their pins, for observers."""
    return {Gauge.PEERS: len(sessions), Gauge.PINS: sum(each.num_pins for each in sessions)}


async def drain_sessions(
    what: str, sessions: Callable[[], Sequence[Session]], timeout_s: float
) -> None:
    """Drain sessions, and wait until all are idle; log a warning if some are not in time."""
    logger.info("draining: no new %s are accepted, %d are connected", what, len(sessions()))
    for session in sessions():
        session.drain()
    try:
        async with asyncio.timeout(timeout_s):
            while not all(each.is_idle for each in sessions()):  # noqa: ASYNC110 - once a life
                await asyncio.sleep(DRAIN_POLL_S)
    except TimeoutError:
        logger.warning("%s: blocks are still in use after %g s; closing anyway", what, timeout_s)
