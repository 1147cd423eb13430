"""Requests of the simulated bucket are those that the real backend makes for the same trace."""

import itertools
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from benchmarks.object_servers import BUCKET, REGION, ObjectServer
from kvxfer.backends.object import Bucket, S3Backend
from kvxfer.connect import open_backend
from kvxfer.replay import MultiTurn, make_synthetic, plan_tiers, replay_on, simulate
from kvxfer.replay.block_size import opaque_namespace
from kvxfer.replay.real import BLOCK_BYTES
from kvxfer.replay.simulation import SimulatedBucket
from kvxfer.storage.keys import BlockKey

pytestmark = pytest.mark.processes

CHATS = MultiTurn(requests=40, requests_per_s=4, system_tokens=300)
_numbers = itertools.count()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Requests that real buckets make, by kind; what a lookup begins ends with it."""
    kinds: Counter[str] = Counter()
    request, lookup = Bucket._request, S3Backend.lookup

    async def count(self: Bucket, what: str, ask: Callable[[], Awaitable[Any]], *args: Any) -> Any:
        kinds[what] += 1
        return await request(self, what, ask, *args)

    async def look_up(self: S3Backend, keys: Sequence[BlockKey]) -> list[bool]:
        await self._texts.read()
        found = await lookup(self, keys)
        assert self._listing is not None
        await self._listing
        return found

    monkeypatch.setattr(Bucket, "_request", count)
    monkeypatch.setattr(S3Backend, "lookup", look_up)
    return kinds


@pytest.mark.parametrize("host", [[], ["host://?capacity=128KiB"]], ids=["alone", "below host"])
@pytest.mark.parametrize("ttl_s", [1e6, 0.0], ids=["known", "never known"])
async def test_the_model_has_the_requests_of_the_real_backend(
    seaweedfs_server: ObjectServer,
    s3_credentials: None,
    asked: Counter[str],
    host: list[str],
    ttl_s: float,
) -> None:
    trace = make_synthetic(CHATS, seed=5, tokens_per_block=128)
    url = (
        f"s3://{BUCKET}/requests/{next(_numbers)}?endpoint={seaweedfs_server.endpoint}"
        f"&region={REGION}&timeout_s=60&lookup_timeout_s=60"
        f"&found_ttl_s={ttl_s}&missing_ttl_s={ttl_s}"
    )
    async with open_backend([*host, url], opaque_namespace(BLOCK_BYTES)) as backend:
        num_hits = await replay_on(backend, trace)
    modelled = simulate(trace, plan_tiers([*host, url], BLOCK_BYTES))
    bucket = modelled.tiers[-1]
    assert isinstance(bucket, SimulatedBucket)
    assert dict(asked) == {kind: number for kind, number in bucket.requests.items() if number}
    assert num_hits == modelled.num_hits
    assert len(host) == 0 or modelled.tiers[0].num_evicted > 0
