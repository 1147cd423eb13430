"""`kvxfer serve --events` as a process: an index from its events is that of its tiers."""

import asyncio
import re
from pathlib import Path

import pytest

from kvxfer.backends.nixl import NixlConfig
from kvxfer.cli import main
from tests.cli import peers
from tests.cli.peers import serving
from tests.telemetry.event_subscriber import EventSubscriber

pytestmark = pytest.mark.processes

ANY_PORT = "tcp://127.0.0.1:0"


def test_an_index_from_events_is_that_of_the_tiers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = set(peers.KEYS)
    options = ["--events", ANY_PORT, "--events-replay", ANY_PORT, "--events-hashes", "bytes"]
    tier = f"file://{tmp_path}?capacity=1MiB&min_free=1"
    with serving("--capacity", "1MiB", "--tier", tier, *options) as peer:
        addresses = re.search(r"events at (\S+), again at (\S+)", "".join(peer.said))
        assert addresses is not None
        with EventSubscriber.opened(addresses[1], addresses[2]) as subscriber:
            asyncio.run(store(NixlConfig(address=str(peer.endpoint))))
            subscriber.read_until(lambda: subscriber.kept == {"host": keys, "file": keys})
        assert peer.end() == 0
    assert main(["ls", str(tmp_path), "--keys"]) == 0
    listed = [line.split()[1] for line in capsys.readouterr().out.splitlines()]
    assert sorted(listed) == sorted(key.hex() for key in keys)


async def store(config: NixlConfig) -> None:
    async with peers.connected(config) as backend:
        assert all(outcome.done for outcome in await peers.store(backend))
