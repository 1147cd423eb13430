"""Strangers at the ports of a peer: health checks, browsers, and text made for terminals."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

import msgspec
import pytest

from kvxfer.backends.host import HostBackend, HostConfig
from kvxfer.backends.nixl import NixlConfig, StandalonePeer, server
from kvxfer.backends.nixl.wire.frames import FrameCodec
from kvxfer.backends.nixl.wire.messages import (
    MAX_TEXT_CHARACTERS,
    OLDEST_VERSION,
    PROTOCOL_VERSION,
    Hello,
    Message,
    Refusal,
)
from kvxfer.testing import BlockMemory
from kvxfer.units import ByteSize
from tests.clock import Clock

HOST = "127.0.0.1"
CAPACITY = ByteSize(1 << 20)
CONFIG = NixlConfig(listen=f"{HOST}:0", capacity=CAPACITY, transport="socket")
NAMESPACE = BlockMemory([[4096]], num_blocks=1).namespace()
GET = b"GET / HTTP/1.1\r\nHost: kvxfer\r\n\r\n"
ATTACK = "\x1b[2J\x07\u202e\r\nERROR a line of its own " + "x" * 1000
LIMIT_S = 10.0


@contextlib.asynccontextmanager
async def listening(caplog: pytest.LogCaptureFixture) -> AsyncIterator[StandalonePeer]:
    """Peer of a namespace that is settled."""
    caplog.set_level(logging.DEBUG, "kvxfer")
    config = HostConfig(capacity=CAPACITY)
    peer = StandalonePeer(CONFIG, lambda named: HostBackend(config, named), namespace=NAMESPACE)
    async with contextlib.aclosing(peer):
        await peer.start()
        yield peer


async def say(port: int, said: bytes, caplog: pytest.LogCaptureFixture) -> logging.LogRecord:
    """Connect, say something and hang up; return the record that it leaves in the log."""
    reader, writer = await asyncio.open_connection(HOST, port)
    stranger = f"{HOST}:{writer.get_extra_info('sockname')[1]}"
    writer.write(said)
    if said:
        with contextlib.suppress(ConnectionError):
            await reader.read()  # until the peer hangs up
    writer.close()
    async with asyncio.timeout(LIMIT_S):
        while True:
            for record in caplog.records:
                if stranger in record.getMessage():
                    return record
            await asyncio.sleep(0)


@pytest.mark.parametrize("said", [b"", GET], ids=["connect and close", "GET"])
async def test_a_health_check_at_either_port_is_no_warning(
    caplog: pytest.LogCaptureFixture, said: bytes
) -> None:
    async with listening(caplog) as peer:
        for port in (peer.endpoint.port, peer.data_port):
            record = await say(port, said, caplog)
            assert record.levelno <= logging.INFO, record.getMessage()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    "message",
    [
        Refusal(field=ATTACK, ours=ATTACK, theirs=ATTACK),
        Refusal(field=f"namespace.{ATTACK}", ours=ATTACK, theirs=ATTACK),
        Hello(
            version=PROTOCOL_VERSION,
            oldest_version=OLDEST_VERSION,
            incarnation=b"0123456789abcdef",
            nonce=bytes(32),
            namespace=msgspec.structs.replace(NAMESPACE, model=ATTACK),
        ),
    ],
    ids=["refusal", "refusal of the namespace", "namespace"],
)
async def test_text_of_a_stranger_is_one_short_line_without_control_characters(
    caplog: pytest.LogCaptureFixture, message: Message
) -> None:
    async with listening(caplog) as peer:
        before = len(caplog.records)
        frame = bytes(FrameCodec("peer").encode(message))
        reader, writer = await asyncio.open_connection(HOST, peer.endpoint.port)
        writer.write(frame)
        await reader.read()
        writer.close()
        async with asyncio.timeout(LIMIT_S):
            while len(caplog.records) == before:  # noqa: ASYNC110 - a log has no event
                await asyncio.sleep(0)
        [record] = caplog.records[before:]
    said = record.getMessage()
    assert "ERROR a line of its own" in said
    assert said.isprintable()
    assert len(said) < 4 * MAX_TEXT_CHARACTERS


OLD = bytes(
    FrameCodec("peer").encode(Hello(version=1, oldest_version=1, incarnation=b"", namespace=None))
)


async def be_refused(peer: StandalonePeer, num: int, source: str = HOST) -> None:
    """Connect, speak another version of the protocol, and wait for the end of the connection."""
    for _ in range(num):
        reader, writer = await asyncio.open_connection(
            HOST, peer.endpoint.port, local_addr=(source, 0)
        )
        writer.write(OLD)
        with contextlib.suppress(ConnectionError):
            await reader.read()
        writer.close()
    async with asyncio.timeout(LIMIT_S):
        while peer._server.num_unproven:  # noqa: ASYNC110 - the log is written when it is over
            await asyncio.sleep(0)


async def test_who_is_refused_again_and_again_writes_a_line_a_second_with_the_number_left_out(
    caplog: pytest.LogCaptureFixture, clock: Clock
) -> None:
    async with listening(caplog) as peer:
        caplog.set_level(logging.INFO, "kvxfer")
        caplog.clear()
        await be_refused(peer, 50)
        await be_refused(peer, 50, source="127.0.0.2")
        clock.now += 1
        await be_refused(peer, 1)
    said = [each.getMessage() for each in caplog.records if each.name == server.__name__]
    assert [line.count("refused a peer") for line in said] == [1, 1, 1]
    assert [HOST in said[0], "127.0.0.2" in said[1], HOST in said[2]] == [True] * 3
    assert [line.rpartition("(")[2] for line in said[1:]] == [
        "49 more were left out)",
        "49 more were left out)",
    ]


def test_any_number_of_addresses_fills_neither_the_log_nor_the_memory(
    caplog: pytest.LogCaptureFixture, clock: Clock
) -> None:
    log = server.RefusalLog()
    caplog.set_level(logging.INFO, "kvxfer")
    for second in range(3):
        for number in range(5000):
            log.note(logging.INFO, "refused: %s", f"[2001:db8::{number:x}:{second:x}]:1", "no")
        assert len(caplog.records) == server.MAX_ADDRESSES + 1
        assert len(log._quiet_until) == server.MAX_ADDRESSES + 1
        caplog.clear()
        clock.now += 1
