"""The etcd of the simulation behaves like the real one."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aetcd import rpc

from kvxfer import runtime
from kvxfer.backends.nixl.discovery import (
    CompactedError,
    EtcdConfig,
    EtcdError,
    open_session,
    own_loop,
)
from kvxfer.endpoint import Endpoint
from kvxfer.testing.simulation import Simulation
from tests import needs
from tests.backends.etcd_server import HOST, EtcdServer
from tests.simulation.etcd import SimulatedEtcd

PREFIX = b"/kvxfer/test/"
TTL_S = 1
TIMEOUT_S = 2.0

Check = Callable[[Any, Callable[[], None]], Awaitable[None]]
Run = Callable[[Check], None]


@pytest.fixture(
    params=["simulated", pytest.param("real", marks=[needs.etcd, pytest.mark.processes])]
)
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Run]:
    """Run a check with a session, and with a function that compacts all revisions."""
    if request.param == "simulated":
        simulation = Simulation(0)
        with runtime.use(simulation.runtime):
            server = SimulatedEtcd(simulation)

            async def work(check: Check) -> None:
                async with server.open_session(None, None, TIMEOUT_S) as session:
                    await check(session, server.compact)

            yield lambda check: simulation.runtime.scheduler.run(
                lambda: simulation.run(work(check))
            )
        return
    with EtcdServer(tmp_path) as real:
        config = EtcdConfig((Endpoint(HOST, real.port),), "/kvxfer/test/")

        def compact() -> None:
            revision = real.call(rpc.KVStub, "Range", rpc.RangeRequest(key=b"k")).header.revision
            real.call(rpc.KVStub, "Compact", rpc.CompactionRequest(revision=revision))

        async def work_at_real(check: Check) -> None:
            async with open_session(config, config.endpoints[0], TIMEOUT_S) as session:
                await check(session, compact)

        loop = own_loop()  # after a loop is closed, gRPC raises its leftovers in other loops
        yield lambda check: asyncio.run_coroutine_threadsafe(work_at_real(check), loop).result()


async def _until_gone(session: Any, revision: int, name: bytes) -> list[Any]:
    seen: list[Any] = []
    async with contextlib.aclosing(session.changes(PREFIX, revision)) as changes:
        async for changed in changes:
            seen += list(changed.items())
            if changed.get(name, b"") is None:
                return seen
    raise AssertionError("the watch has ended")


def test_an_entry_is_there_as_long_as_its_lease(run: Run) -> None:
    async def check(session: Any, _: Callable[[], None]) -> None:
        before, entries = await session.entries(PREFIX)
        assert entries == {}
        lease = await session.grant(TTL_S)
        await session.put(PREFIX + b"a", b"1", lease)
        await session.put(PREFIX + b"a", b"2", lease)
        assert await session.has(PREFIX + b"a")
        assert not await session.has(PREFIX + b"b")
        assert (await session.entries(PREFIX))[1] == {b"a": b"2"}
        assert await session.renew(lease)
        seen = await _until_gone(session, before + 1, b"a")
        assert seen[-2:] == [(b"a", b"2"), (b"a", None)]
        assert (await session.entries(PREFIX))[1] == {}
        assert not await session.renew(lease)

    run(check)


def test_a_lease_that_is_gone_takes_no_entry_and_is_not_revoked_again(run: Run) -> None:
    async def check(session: Any, _: Callable[[], None]) -> None:
        lease = await session.grant(60)
        await session.put(PREFIX + b"a", b"1", lease)
        await session.revoke(lease)
        assert not await session.has(PREFIX + b"a")
        with pytest.raises(EtcdError, match="lease not found"):
            await session.revoke(lease)
        with pytest.raises(EtcdError, match="lease not found"):
            await session.put(PREFIX + b"a", b"1", lease)

    run(check)


def test_an_entry_belongs_to_the_last_lease_that_it_was_put_with(run: Run) -> None:
    async def check(session: Any, _: Callable[[], None]) -> None:
        first, second = await session.grant(60), await session.grant(60)
        await session.put(PREFIX + b"a", b"1", first)
        await session.put(PREFIX + b"a", b"1", second)
        await session.revoke(first)
        assert await session.has(PREFIX + b"a")

    run(check)


def test_a_watch_from_a_compacted_revision_is_refused(run: Run) -> None:
    async def check(session: Any, compact: Callable[[], None]) -> None:
        before, _ = await session.entries(PREFIX)
        lease = await session.grant(60)
        for value in (b"1", b"2"):
            await session.put(PREFIX + b"a", value, lease)
        compact()
        with pytest.raises(CompactedError):
            await _until_gone(session, before + 1, b"a")
        now, _ = await session.entries(PREFIX)
        async with contextlib.aclosing(session.changes(PREFIX, now + 1)) as changes:
            assert await anext(changes) == {}

    run(check)
