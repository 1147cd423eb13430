"""Discovery by etcd: holders announce themselves under a lease, and engines watch who is there."""

import asyncio
import contextlib
import itertools
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

from kvxfer import runtime
from kvxfer.backends.nixl.discovery.announcement import Announcement
from kvxfer.backends.nixl.discovery.discovery import Discovery
from kvxfer.backends.nixl.discovery.etcd_config import EtcdConfig
from kvxfer.backends.nixl.discovery.etcd_session import (
    CLOSE_TIMEOUT_S,
    CompactedError,
    EtcdError,
    EtcdSession,
    import_aetcd,
    open_session,
)
from kvxfer.backends.nixl.discovery.own_loop import own_loop, run_there
from kvxfer.backends.nixl.discovery.roster import Roster
from kvxfer.endpoint import Endpoint
from kvxfer.runtime import Pause, end_tasks, uniform
from kvxfer.storage.gauge import Gauge
from kvxfer.text import printable

LEASE_S = 5
"""Lease of an announcement: a holder that ends without a word is gone after it."""

FIRST_LIST_S = 1.0
"""Time that opening waits for the first list of holders; without it there are none at first."""

FIRST_RETRY_S = 0.1
"""Pause after the first attempt that failed; each later one is twice as long, up to a lease."""

WITHDRAW_TIMEOUT_S = 2.0
"""Time that the end of an announcement may take; it ends with its lease all the same."""

MAX_FAILURES = 8
"""Most reasons that the log tells until etcd answers again, each once."""

END_TIMEOUT_S = 5.0
"""Time for which a caller waits for any end, also of gRPC's calls that hang."""

_MAX_CHARACTERS = 300

logger = logging.getLogger(__name__)


async def look_once(config: EtcdConfig, timeout_s: float) -> Mapping[bytes, bytes]:
    """List what is announced, by name, for those who look only once.

    Args:
        config: Where etcd is.
        timeout_s: Time for each step.

    Raises:
        InvalidArgumentError: The credentials cannot be read.
        MissingExtraError: aetcd is not installed.
        EtcdError: No member answers; of the last one that was asked.
    """
    import_aetcd()
    config.check()
    failure: EtcdError | None = None
    for endpoint in config.endpoints:
        try:
            found = await run_there(_list_at(config, endpoint, timeout_s), 4 * timeout_s)
        except EtcdError as exc:
            failure = exc
        else:
            if found is not None:
                return found
    raise failure or EtcdError(f"no answer within {4 * timeout_s:.2g} s")


async def _list_at(config: EtcdConfig, endpoint: Endpoint, timeout_s: float) -> dict[bytes, bytes]:
    async with open_session(config, endpoint, timeout_s) as session:
        _, entries = await session.entries(config.prefix.encode())
        return entries


class EtcdDiscovery(Discovery):
    """Discovery by etcd, on a thread of its own: nobody waits for etcd to move a block.

    While etcd cannot be asked, those known last are the peers, however long that takes; and so they
    are, for two leases, once it answers again and does not list them: see `Roster`.

    Args:
        config: Where etcd is.
        namespace: Fingerprint of the blocks' namespace, empty for a holder that looks for nobody.
        require: Checks that an address may be connected to; raises `InvalidArgumentError` if not.
        lease_s: Lease of the announcement; renewed by a third of it, which every call may take.

    Raises:
        InvalidArgumentError: The credentials cannot be read.
        MissingExtraError: aetcd is not installed.
    """

    def __init__(
        self,
        config: EtcdConfig,
        *,
        namespace: str = "",
        require: Callable[[Endpoint], None] = lambda _: None,
        lease_s: int = LEASE_S,
    ) -> None:
        import_aetcd()
        config.check()
        self._config = config
        self._lease_s = lease_s
        self._follower = _Follower(config, namespace, require, lease_s)
        self._announcer: _Announcer | None = None
        self._waits_until: float | None = None
        self._is_closed = False

    async def peers(self) -> Sequence[Endpoint]:
        """See `PeerDirectory.peers`."""
        return self._follower.roster.endpoints

    async def follow(self) -> None:
        """See `Discovery.follow`."""
        if self._is_closed or self._follower.is_tried:
            return
        now = runtime.monotonic()
        if self._waits_until is None:
            self._waits_until = now + FIRST_LIST_S
            self._follower.start()
        if now < self._waits_until:  # later calls wait no longer, whatever hangs
            await run_there(self._follower.wait_until_tried(), self._waits_until - now)

    async def announce(self, at: Endpoint, describe: Callable[[], Announcement]) -> None:
        """See `Discovery.announce`."""
        if self._announcer is None and not self._is_closed:
            self._announcer = _Announcer(self._config, at, describe, self._lease_s)
            self._announcer.start()

    async def withdraw(self) -> None:
        """See `Discovery.withdraw`."""
        if self._announcer is not None:
            await run_there(self._announcer.withdraw(), END_TIMEOUT_S)

    async def aclose(self) -> None:
        """See `Discovery.aclose`."""
        self._is_closed = True
        await self.withdraw()
        if self._follower.is_begun:
            await run_there(self._follower.end(), END_TIMEOUT_S)

    def gauges(self) -> Mapping[Gauge, float]:
        """See `Discovery.gauges`."""
        tasks: list[_EtcdTask] = [self._follower]
        tasks += [self._announcer] if self._announcer is not None else []
        gauges = {Gauge.DISCOVERY_FAILING: float(any(each.is_failing for each in tasks))}
        if self._follower.is_begun:
            gauges[Gauge.PEERS_KNOWN] = len(self._follower.roster.endpoints)
        return gauges


class _EtcdTask(ABC):
    """Task with a session of etcd, which is opened again, at the next member, when it fails.

    Its coroutines run on the loop of discovery, see `own_loop`.

    Attributes:
        is_begun: Whether it was started.
    """

    def __init__(self, config: EtcdConfig, lease_s: int) -> None:
        self.is_begun = self._is_working = self._is_ended = False
        self._config = config
        self._lease_s = lease_s
        self._timeout_s = lease_s / 3
        self._task: asyncio.Task[None] | None = None
        self._tried = asyncio.Event()
        self._failures: set[str] = set()
        self._pause = Pause(FIRST_RETRY_S, lease_s, uniform=uniform)

    @property
    def is_failing(self) -> bool:
        """Whether the last call was not answered, or there was none yet."""
        return self.is_begun and not (self._is_working or self._is_ended)

    @property
    def is_tried(self) -> bool:
        """Whether etcd has answered, or failed to."""
        return self._tried.is_set()

    def start(self) -> None:
        """Start, once, from any thread."""
        self.is_begun = True
        own_loop().call_soon_threadsafe(self._start)

    def _start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def wait_until_tried(self) -> None:
        await self._tried.wait()

    async def end(self) -> None:
        """End the task; whatever hangs in gRPC is left behind."""
        await end_tasks(filter(None, [self._task]), 2 * CLOSE_TIMEOUT_S)
        self._is_ended = True

    @abstractmethod
    async def _work(self, session: EtcdSession) -> None:
        """Do what the task is for; call `_succeed` whenever etcd has answered.

        Raises:
            CompactedError: It is done again at once.
            EtcdError: It is done again, in a new session, after a pause.
        """

    @abstractmethod
    def _meanwhile(self) -> str:
        """What is done while etcd fails, for the log."""

    def _succeed(self) -> None:
        if self._failures:
            logger.info("%s answers again", self._config)
            self._failures.clear()
        self._is_working = True
        self._pause.reset()
        self._tried.set()

    async def _run(self) -> None:
        for endpoint in itertools.cycle(self._config.endpoints):
            try:
                async with open_session(self._config, endpoint, self._timeout_s) as session:
                    await self._work(session)
            except CompactedError as exc:
                logger.debug("%s: %s", endpoint, exc)
                continue
            except EtcdError as exc:
                self._fail(endpoint, str(exc))
            except Exception as exc:  # noqa: BLE001 - gRPC's may be any; the next session may do
                self._fail(endpoint, printable(repr(exc), _MAX_CHARACTERS))
            await asyncio.sleep(self._pause.next_s())

    def _fail(self, endpoint: Endpoint, reason: str) -> None:
        if reason not in self._failures and len(self._failures) < MAX_FAILURES:
            self._failures.add(reason)
            logger.warning(
                "discovery by etcd at %s failed: %s; %s", endpoint, reason, self._meanwhile()
            )
        self._is_working = False
        self._tried.set()


class _Follower(_EtcdTask):
    """Task that keeps the roster: it lists the holders, and then watches them."""

    def __init__(
        self,
        config: EtcdConfig,
        namespace: str,
        require: Callable[[Endpoint], None],
        lease_s: int,
    ) -> None:
        super().__init__(config, lease_s)
        # A holder tries again after a lease at the latest, and its calls take two thirds of one.
        self.roster = Roster(namespace, require, grace_s=2 * lease_s)

    async def _work(self, session: EtcdSession) -> None:
        prefix = self._config.prefix.encode()
        revision, entries = await session.entries(prefix)
        self.roster.replace(entries, runtime.monotonic())
        async with contextlib.aclosing(session.changes(prefix, revision + 1)) as changes:
            async for changed in changes:
                now = runtime.monotonic()
                self.roster.change(changed, now)
                self.roster.settle(now)
                self._succeed()

    def _meanwhile(self) -> str:
        num_peers = len(self.roster.endpoints)
        return f"{num_peers} holders are known" if num_peers else "no holder is known yet"


class _Announcer(_EtcdTask):
    """Task that keeps the announcement of this process, and its lease."""

    def __init__(
        self, config: EtcdConfig, at: Endpoint, describe: Callable[[], Announcement], lease_s: int
    ) -> None:
        super().__init__(config, lease_s)
        self._at = at
        self._describe = describe
        self._lease: int | None = None

    async def withdraw(self) -> None:
        """End the task, and the lease if etcd answers; without that it ends by itself."""
        await self.end()
        lease, self._lease = self._lease, None
        if lease is None:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WITHDRAW_TIMEOUT_S):
                for endpoint in self._config.endpoints:
                    if await self._revoke(endpoint, lease):
                        return
        logger.warning(
            "etcd does not answer; %s is announced up to %d s longer", self._at, self._lease_s
        )

    async def _revoke(self, endpoint: Endpoint, lease: int) -> bool:
        try:
            async with open_session(self._config, endpoint, CLOSE_TIMEOUT_S) as session:
                await session.revoke(lease)
        except EtcdError as exc:
            logger.debug("cannot end the lease at %s: %s", endpoint, exc)
            return False
        logger.info("%s is not announced any more", self._at)
        return True

    async def _work(self, session: EtcdSession) -> None:
        key = f"{self._config.prefix}{self._at}".encode()
        announced = b""
        while True:
            if self._lease is None or not await session.renew(self._lease):
                self._lease = await session.grant(self._lease_s)
                announced = b""
            value = self._describe().encode()
            if value != announced or not await session.has(key):
                await session.put(key, value, self._lease)
                logger.info("announced %s at %s", self._at, self._config)
                announced = value
            self._succeed()
            await asyncio.sleep(self._timeout_s)

    def _meanwhile(self) -> str:
        return f"{self._at} is not announced until it answers"
