"""Frame channels: messages are waited for and not lost, and end with the other side."""

import asyncio
import socket
import struct

import msgspec
import pytest

from kvxfer.backends.nixl import client_context, server_context
from kvxfer.backends.nixl.wire import frames
from kvxfer.backends.nixl.wire.frames import (
    HEADER_BYTES,
    MAX_UNPROVEN_FRAME_BYTES,
    FrameChannel,
    FrameCodec,
    RateLimit,
)
from kvxfer.backends.nixl.wire.handshake import Role, Session
from kvxfer.backends.nixl.wire.messages import Ping, Proof
from kvxfer.errors import (
    InvalidArgumentError,
    PeerClosedError,
    PeerTimeoutError,
    ProtocolError,
)
from tests.backends.nixl_wire import Authority, Ends, connected
from tests.clock import Clock

PING: msgspec.msgpack.Decoder[Ping] = msgspec.msgpack.Decoder(Ping)
PROOF: msgspec.msgpack.Decoder[Proof] = msgspec.msgpack.Decoder(Proof)
LARGE = Proof(mac=bytes(MAX_UNPROVEN_FRAME_BYTES - 100))


def pings(num: int) -> list[Ping]:
    return [Ping(request_id=number) for number in range(num)]


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "authority")


def secure(ends: Ends) -> None:
    ends.client.secure(Session(Role.ASKING, session_id=b"", key=b"").frame_keys())
    ends.server.secure(Session(Role.SERVING, session_id=b"", key=b"").frame_keys())


async def send_large(end: FrameChannel, num: int) -> None:
    """Send more than the kernel's buffers hold, in messages numbered from 100."""
    for _ in range(num):
        await end.send(LARGE)


@pytest.mark.parametrize("encrypted", ["plain", "TLS"])
async def test_messages_of_any_size_arrive_in_order(encrypted: str, authority: Authority) -> None:
    config = authority.config()
    tls = (client_context(config), server_context(config)) if encrypted == "TLS" else (None, None)
    async with connected(tls=tls, frame_timeout_s=10) as ends:
        secure(ends)
        sizes = [0, 1, 1 << 16, 1 << 20, 3 << 20, 7]

        async def send() -> None:
            for size in sizes:
                await ends.client.send(Proof(mac=bytes(size)))

        sending = asyncio.create_task(send())
        assert [len((await ends.server.receive(PROOF)).mac) for _ in sizes] == sizes
        await sending


async def test_a_cancelled_receive_loses_nothing() -> None:
    async with connected() as ends:
        *frame, last = FrameCodec("a peer").encode(Ping(request_id=1))
        for index, byte in enumerate(frame):
            receiving = asyncio.create_task(ends.server.receive(PING))
            ends.asking.writer.write(bytes([byte]))
            while len(ends.server._buffer) <= index:  # noqa: ASYNC110 - a channel has no event for it
                await asyncio.sleep(0)
            receiving.cancel()
            await asyncio.wait([receiving])
            assert receiving.cancelled()
        ends.asking.writer.write(bytes([last]))
        assert await ends.server.receive(PING) == Ping(request_id=1)


async def test_a_peer_that_reads_nothing_is_given_up() -> None:
    async with connected(frame_timeout_s=0.2) as ends:
        with pytest.raises(
            PeerTimeoutError, match=r"taking a frame took longer than 0\.2 s"
        ) as one:
            await send_large(ends.client, 200)
        with pytest.raises(PeerTimeoutError) as two:
            await ends.client.send(Ping(request_id=1))
        assert one.value is two.value


@pytest.mark.parametrize(
    "limit",
    [RateLimit(frames_per_second=20), RateLimit(bytes_per_second=20 * 1000)],
    ids=["frames", "bytes"],
)
def test_a_second_worth_may_come_at_once_and_silence_saves_no_more(
    limit: RateLimit, clock: Clock
) -> None:
    pace = frames._Pace(limit)
    for _ in range(2):
        for _ in range(20):
            assert pace.ahead_s() <= 1e-9
            pace.count(1000)
        for _ in range(5):
            pace.count(1000)
        assert pace.ahead_s() == pytest.approx(5 / 20)
        clock.now += 3600


@pytest.mark.parametrize("how", ["closes", "resets"])
async def test_a_peer_that_ends_the_connection_is_gone_for_all_calls(how: str) -> None:
    async with connected() as ends:
        receiving = asyncio.create_task(ends.server.receive(PING))
        await asyncio.sleep(0)
        if how == "resets":
            plain = ends.asking.writer.get_extra_info("socket")
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        await ends.client.aclose()
        with pytest.raises(PeerClosedError) as first:
            await receiving
        for call in (ends.server.receive(PING), ends.server.send(Ping(request_id=1))):
            with pytest.raises(PeerClosedError) as again:
                await call
            assert again.value is first.value


@pytest.mark.parametrize("length", [1, HEADER_BYTES, HEADER_BYTES + 1])
async def test_a_peer_that_ends_the_connection_within_a_frame_breaks_the_protocol(
    length: int,
) -> None:
    async with connected() as ends:
        ends.asking.writer.write(FrameCodec("a peer").encode(Ping(request_id=1))[:length])
        await ends.client.aclose()
        with pytest.raises(ProtocolError, match="in the middle of a frame"):
            await ends.server.receive(PING)


async def test_a_message_that_is_too_large_leaves_the_connection_as_it_is() -> None:
    async with connected() as ends:
        with pytest.raises(InvalidArgumentError, match="size of a message Proof"):
            await ends.client.send(Proof(mac=bytes(MAX_UNPROVEN_FRAME_BYTES)))
        await ends.client.send(Ping(request_id=1))
        assert await ends.server.receive(PING) == Ping(request_id=1)
