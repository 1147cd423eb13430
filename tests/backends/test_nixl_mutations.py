"""Mutated messages at every stage of the protocol: no crash, no hang, no wrong byte.

A peer that knows the secret and its holder garble what they say to each other before they seal it.
A sample in the normal run, 20,000 calls of each stage in `make exhaustive`. What is changed on the
way is for the seals: see test_nixl_wire_frames.py.
"""

import asyncio
import random
import weakref
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvxfer.backends.nixl import Exchange, NixlConfig
from kvxfer.backends.nixl.agents.nixl_module import import_nixl
from kvxfer.backends.nixl.client import Client
from kvxfer.backends.nixl.wire import messages as wire
from kvxfer.backends.nixl.wire.frames import FrameCodec
from kvxfer.errors import KVXferError
from kvxfer.testing.conformance.suite import make_keys
from kvxfer.testing.payloads import make_payload, read_payloads, write_payloads
from tests.backends.nixl_proven import (
    LIMIT_S,
    MEMORY,
    NAMESPACE,
    asking,
    endpoint_of,
    holding,
    require_quiet_log,
    require_served,
    until_alone,
)
from tests.backends.recording_desk import RecordingDesk

NUM_CALLS = [
    pytest.param(300, id="some"),
    pytest.param(20_000, id="many", marks=[pytest.mark.exhaustive, pytest.mark.timeout(1800)]),
]
HONEST_EVERY = 100
STAGES: dict[str, tuple[type[wire.Message], ...]] = {
    "greetings": (wire.Hello, wire.Proof, wire.Reach, wire.Ready),
    "requests": (wire.Lookup, wire.Pin, wire.Pull, wire.Publish, wire.Delete, wire.Cancel),
    "answers": (wire.Found, wire.Pinned, wire.Pulled),
    "tickets": (wire.Describe, wire.Described, wire.Hold, wire.HeldTicket, wire.Release),
    "data": (wire.Attach, wire.Read, wire.Reading),
}
THEIRS = make_keys(3, first=500)
"""Keys that no few mutations make those of honest peers."""
OURS = make_keys(1, first=900)
SIZE = MEMORY.chunk_size_bytes(0)

Rng = random.Random


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    """Import NIXL beforehand: it would block an event loop for too long."""
    import_nixl(otherwise="skip these tests")


def mutate(data: bytes, rng: Rng) -> bytes:
    """Change some bytes; mostly one or two, so that much of the rest stays legal."""
    changed = bytearray(data)
    while changed == data:
        for _ in range(rng.choice([1, 1, 1, 2, 5])):
            at = rng.randrange(len(changed) + 1)
            kind = rng.randrange(6)
            if kind < 2 and at < len(changed):
                changed[at] ^= 1 << rng.randrange(8)
            elif kind == 2 and at < len(changed):
                changed[at] = rng.choice([0, 0x7F, 0x80, 0xC0, 0xC1, 0xCF, 0xDF, 0xFF])
            elif kind == 3:
                del changed[at : at + rng.randint(1, 9)]
            elif kind == 4:
                changed[at:at] = rng.randbytes(rng.randint(1, 9))
            else:
                changed[at:at] = changed[at : at + rng.randint(1, 40)]
    return bytes(changed)


class Liars:
    """Connections that lie: those that speak for the first time while it is on.

    Attributes:
        rng: Chooses the mutations; None as long as nobody lies.
        num_lies: Mutated messages so far.
    """

    def __init__(self, kinds: tuple[type[wire.Message], ...]) -> None:
        self.rng: Rng | None = None
        self.num_lies = 0
        self._kinds = kinds
        self._lies: weakref.WeakKeyDictionary[FrameCodec, bool] = weakref.WeakKeyDictionary()
        self._encode = FrameCodec.encode

    def encode(self, codec: FrameCodec, message: wire.Message) -> bytearray:
        """Encode a message in place of `FrameCodec.encode`; mutate every other one of a liar."""
        lies = self._lies.setdefault(codec, self.rng is not None)
        if self.rng and lies and isinstance(message, self._kinds) and self.rng.random() < 0.5:
            self.num_lies += 1
            lie = msgspec.Raw(mutate(msgspec.msgpack.encode(message), self.rng))
            return self._encode(codec, lie)  # type: ignore[arg-type]
        return self._encode(codec, message)


def calls_of(client: Client, *, verifies: bool) -> list[Callable[[], Awaitable[None]]]:
    """List what a peer asks; each call checks what it gets."""

    async def look_up() -> None:
        assert len(await client.lookup(THEIRS)) == len(THEIRS)

    async def load() -> None:
        target = MEMORY.describe(0, range(3))
        outcomes = await client.load(THEIRS, target)
        for outcome, key, read in zip(outcomes, THEIRS, read_payloads(target), strict=True):
            assert outcome.reason.isprintable()
            assert not (verifies and outcome.done) or read == make_payload(key, SIZE)

    async def store() -> None:
        source = MEMORY.describe(0, range(3, 6))
        write_payloads(source, [make_payload(key, SIZE) for key in THEIRS])
        assert len(await client.store(THEIRS, source)) == len(THEIRS)

    async def delete() -> None:
        assert len(await client.delete(THEIRS[:1])) == 1

    async def describe() -> None:
        assert isinstance(await client.describe(), bytes)

    async def hold() -> None:
        assert len((await client.hold("theirs", THEIRS)).there) == len(THEIRS)

    async def release() -> None:
        await client.release(["theirs", "nobody's"])

    return [look_up, load, load, store, store, delete, describe, hold, release]


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("num_calls", NUM_CALLS)
@pytest.mark.parametrize("grade", ["full", "fenced"])
@pytest.mark.parametrize("stage", STAGES)
async def test_mutated_messages_cost_who_says_them_and_nobody_else(
    stage: str,
    grade: str,
    num_calls: int,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng, desk, liars = Rng(stage), RecordingDesk({"ours": OURS}), Liars(STAGES[stage])

    def encode(codec: FrameCodec, message: wire.Message) -> bytearray:
        return liars.encode(codec, message)

    monkeypatch.setattr(FrameCodec, "encode", encode)
    quick: dict[str, Any] = {"timeout_s": 0.2, "handshake_timeout_s": 0.2, "integrity": grade}
    secret = str(tmp_path / "secret")
    async with (
        holding(tmp_path, desk, transport="socket") as holder,
        asking(tmp_path, holder, transport="socket") as honest,
    ):
        await require_served(honest)
        config = NixlConfig(transport="socket", secret_file=secret, **quick)
        async with Exchange(config, NAMESPACE, largest_block_bytes=SIZE) as exchange:
            client = exchange.peer(endpoint_of(holder))
            calls = calls_of(client, verifies=grade == "full")
            for number in range(num_calls):
                liars.rng = rng
                if stage in {"greetings", "data"}:
                    client.disconnect()
                client._pause.reset()
                async with asyncio.timeout(LIMIT_S):
                    try:
                        await rng.choice(calls)()
                    except (KVXferError, TimeoutError) as exc:
                        assert str(exc).isprintable()  # noqa: PT017 - any may come, or none
                liars.rng = None
                if number % HONEST_EVERY == 0:
                    await require_served(honest, 10 + 4 * (number // HONEST_EVERY % 10))
            assert liars.num_lies > num_calls // 10
        await until_alone(holder, num_peers=1)
        assert not desk.held, "tickets of peers that are gone"
        assert len(set(desk.dropped)) == len(desk.dropped)
        assert desk.tickets == {"ours": OURS}
        assert holder.server is not None
        async with asyncio.timeout(LIMIT_S):
            while holder.server.num_unproven:  # noqa: ASYNC110 - it notices by itself
                await asyncio.sleep(0)
        async with asking(tmp_path, holder, transport="socket") as newcomer:
            await require_served(newcomer, 60)
    require_quiet_log(caplog)
