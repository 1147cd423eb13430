"""End of `kvxfer serve` under load: soon, and without a wrong byte."""

import asyncio
import time

import pytest

from kvxfer.backends.nixl import NixlBackend, NixlConfig, Transport
from tests.cli import peers
from tests.cli.peers import serving

pytestmark = pytest.mark.processes

NUM_LOADERS = 16
LOADS_BEFORE = 200
SOON_S = 5.0
"""It takes 0.3 s here; the time to drain is an hour."""


class Load:
    """Load on a peer that goes on while the peer ends.

    Attributes:
        num_done: Blocks that were loaded.
        wrong: Those with other bytes than were stored.
    """

    def __init__(self, backend: NixlBackend) -> None:
        self.num_done = 0
        self.wrong: list[bytes] = []
        self.enough = asyncio.Event()
        self.ended = asyncio.Event()
        self._backend = backend

    async def run(self) -> None:
        """Look up, load and store until the peer has ended."""
        async with asyncio.TaskGroup() as tasks:
            for _ in range(NUM_LOADERS):
                tasks.create_task(self._keep_loading())
            tasks.create_task(self._keep_storing())

    async def _keep_loading(self) -> None:
        while not self.ended.is_set():
            await self._backend.lookup(peers.KEYS)
            loaded = await peers.load(self._backend)
            done = [pair for pair in zip(loaded, peers.PAYLOADS, strict=True) if pair[0]]
            self.num_done += len(done)
            self.wrong += [found for found, stored in done if found and found != stored]
            if self.num_done >= LOADS_BEFORE:
                self.enough.set()
            await asyncio.sleep(0)  # calls to a peer that is gone return at once

    async def _keep_storing(self) -> None:
        while not self.ended.is_set():
            await self._backend.delete(peers.KEYS[:2])
            await peers.store(self._backend)
            await asyncio.sleep(0)


@pytest.mark.parametrize("transport", ["auto", "socket"])
async def test_a_peer_under_load_ends_soon_and_no_block_was_wrong(transport: Transport) -> None:
    with serving("--capacity", "1MiB", "--drain-timeout", "1h") as peer:
        config = NixlConfig(address=str(peer.endpoint), transport=transport)
        async with peers.connected(config) as backend:
            await peers.store(backend)
            load = Load(backend)
            running = asyncio.create_task(load.run())
            await load.enough.wait()
            peer.process.terminate()
            begun = time.monotonic()
            try:
                async with asyncio.timeout(SOON_S):
                    assert await asyncio.to_thread(peer.wait) == 0
            finally:
                took_s = time.monotonic() - begun
                peer.process.kill()
                load.ended.set()
                await running
        assert took_s < SOON_S
    assert load.wrong == []
    assert "still in use" not in "".join(peer.said)
