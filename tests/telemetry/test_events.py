"""Events: their form on the wire is that of vLLM, and an index that is built from them is right."""

import logging
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest
import zmq

from kvxfer.errors import BackendUnavailableError, InvalidArgumentError
from kvxfer.storage.observer import Added, Removal, Removed
from kvxfer.telemetry import events
from kvxfer.telemetry.events import BLOCKS_PER_BATCH, MAX_SUBSCRIPTION_BYTES, EventPublisher
from kvxfer.testing.conformance.suite import make_keys
from tests.telemetry.event_subscriber import END, EventSubscriber

ANY_PORT = "tcp://127.0.0.1:0"
KEYS = make_keys(8)


@pytest.fixture
def publisher() -> Iterator[EventPublisher]:
    with EventPublisher(ANY_PORT, replay=ANY_PORT, hashes="bytes") as publisher:
        yield publisher


@pytest.fixture
def subscriber(publisher: EventPublisher) -> Iterator[EventSubscriber]:
    with EventSubscriber.opened(publisher.endpoint, publisher.replay) as subscriber:
        yield subscriber


def test_a_subscriber_that_comes_late_is_told_everything_again(
    publisher: EventPublisher, subscriber: EventSubscriber
) -> None:
    publisher.note(Added("host", KEYS[:3]))
    publisher.note(Removed("host", KEYS[1:2], Removal.EVICTED))
    subscriber.read_until(lambda: subscriber.kept["host"] == {KEYS[0], KEYS[2]})
    first = msgspec.msgpack.decode(subscriber.payloads[0])
    assert first[1:] == [[{"type": "AllBlocksCleared"}], None]


def test_many_blocks_come_in_several_batches(
    publisher: EventPublisher, subscriber: EventSubscriber
) -> None:
    keys = make_keys(2 * BLOCKS_PER_BATCH + 1)
    publisher.note(Added("file", keys))
    subscriber.read_until(lambda: subscriber.kept["file"] == set(keys))
    assert len(subscriber.payloads) == 1 + 3
    assert not subscriber.mistakes


@contextmanager
def asking(publisher: EventPublisher, number: int) -> Iterator[list["zmq.Socket[bytes]"]]:
    """Ask for replays of everything, by sockets that take it only when they are read."""
    context = zmq.Context()
    sockets = [context.socket(zmq.DEALER) for _ in range(number)]
    for each in sockets:
        each.setsockopt(zmq.RCVHWM, 1)
        each.connect(publisher.replay)
        each.send_multipart([b"", bytes(8)])
    try:
        yield sockets
    finally:
        context.destroy(linger=0)


NUM_BATCHES = 1000


@pytest.fixture
def told(publisher: EventPublisher, subscriber: EventSubscriber) -> EventSubscriber:
    keys = make_keys(BLOCKS_PER_BATCH)
    for _ in range(NUM_BATCHES):
        publisher.note(Added("host", keys))
    subscriber.read_until(lambda: subscriber._next == 1 + NUM_BATCHES)
    subscriber._next = 0
    return subscriber


def test_a_slow_subscriber_costs_little_memory_and_gets_its_whole_replay(
    publisher: EventPublisher, told: EventSubscriber
) -> None:
    numbers: list[int] = []
    with asking(publisher, 1) as (slow,):
        assert slow.poll(5000)
        time.sleep(0.3)
        assert publisher._replays  # has more than the queues have room for
        while numbers[-1:] != [END]:
            assert slow.poll(5000)
            numbers.append(int.from_bytes(slow.recv_multipart()[2], "big"))
    assert numbers == [*range(1 + NUM_BATCHES), END]


def test_who_does_not_read_is_given_up_for_who_waits_for_a_turn(
    publisher: EventPublisher, told: EventSubscriber, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "MAX_REPLAYS", 2)
    monkeypatch.setattr(events, "REPLAY_TIMEOUT_S", 0.5)
    with asking(publisher, 5):
        assert len(told.catch_up()) == 1 + NUM_BATCHES


def test_blocks_of_other_namespaces_are_not_told(
    publisher: EventPublisher, subscriber: EventSubscriber
) -> None:
    publisher.note(Added("file", KEYS[:1]))
    publisher.note(Removed("file", KEYS[:1], Removal.EVICTED, namespace="ab" * 16))
    publisher.note(Added("file", KEYS[1:2]))
    subscriber.read_until(lambda: len(subscriber.kept["file"]) == 2)


def test_a_replay_of_what_is_no_longer_kept_begins_later(caplog: pytest.LogCaptureFixture) -> None:
    with (
        EventPublisher(ANY_PORT, replay=ANY_PORT, hashes="bytes", buffer_batches=3) as publisher,
        EventSubscriber.opened(publisher.endpoint, publisher.replay) as subscriber,
    ):
        for key in KEYS:
            publisher.note(Added("host", [key]))
        subscriber.read_until(lambda: subscriber._next == 1 + len(KEYS))
        subscriber._next = 0
        assert subscriber.catch_up() == [6, 7, 8]
    assert not [each for each in caplog.records if each.levelno > logging.WARNING]


@pytest.mark.parametrize("parts", [[b"", b"x", b"y"], [b"", b"much too long" * 100], [b""]])
def test_a_wrong_request_for_replay_disturbs_nobody(
    publisher: EventPublisher, subscriber: EventSubscriber, parts: list[bytes]
) -> None:
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.connect(publisher.replay)
    stranger.send_multipart(parts)
    publisher.note(Added("host", KEYS[:1]))
    subscriber.read_until(lambda: subscriber.kept["host"] == {KEYS[0]})
    context.destroy(linger=0)


def test_a_subscription_that_is_no_topic_is_not_kept_in_memory(
    publisher: EventPublisher, subscriber: EventSubscriber
) -> None:
    context = zmq.Context()
    try:
        stranger = context.socket(zmq.SUB)
        stranger.subscribe(bytes(MAX_SUBSCRIPTION_BYTES))
        cut = stranger.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        stranger.connect(publisher.endpoint)
        assert cut.poll(5000)
    finally:
        context.destroy(linger=0)
    publisher.note(Added("host", KEYS))
    subscriber.read_until(lambda: subscriber.kept["host"] == set(KEYS))


def test_what_was_noted_before_the_end_is_sent() -> None:
    publisher = EventPublisher(ANY_PORT, replay=ANY_PORT, hashes="bytes")
    with EventSubscriber.opened(publisher.endpoint, publisher.replay) as subscriber:
        subscriber.read_until(lambda: subscriber.payloads)
        publisher.note(Added("host", KEYS))
        publisher.close()
        publisher.close()
        publisher.note(Added("host", make_keys(9)))
        assert subscriber._live.poll(5000)
        subscriber.read()
    assert subscriber.kept["host"] == set(KEYS)


def test_an_address_that_is_taken_is_said_so(publisher: EventPublisher) -> None:
    with pytest.raises(BackendUnavailableError, match=f"at {publisher.endpoint}: .* in use"):
        EventPublisher(publisher.endpoint)
    with pytest.raises(BackendUnavailableError, match=f"at {publisher.replay}: .* in use"):
        EventPublisher(ANY_PORT, replay=publisher.replay)


@pytest.mark.parametrize("call", ["os.pipe", "runtime.start_thread"])
def test_an_address_stays_free_where_something_else_cannot_be_opened(
    monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    with EventPublisher(ANY_PORT) as publisher:
        address = publisher.endpoint
    with monkeypatch.context() as patched:
        fail = mock.Mock(side_effect=OSError("too many open files"))
        patched.setattr(f"kvxfer.telemetry.events.{call}", fail)
        with pytest.raises(OSError, match="too many open files"):
            EventPublisher(address)
    EventPublisher(address).close()


@pytest.mark.parametrize("address", ["here", "tcp://127.0.0.1", "tcp://a:99999", "udp://a:1", ""])
def test_an_address_of_no_use_is_said_so(address: str) -> None:
    with pytest.raises(InvalidArgumentError, match="endpoint is"):
        EventPublisher(address)


@pytest.mark.parametrize("num_batches", [0, 1 << 31])
def test_a_buffer_that_cannot_be_is_said_so(num_batches: int) -> None:
    with pytest.raises(InvalidArgumentError, match="buffer_batches is"):
        EventPublisher("tcp://127.0.0.1:0", buffer_batches=num_batches)


def test_a_path_of_another_process_or_a_file_is_not_taken(tmp_path: Path) -> None:
    taken, file = tmp_path / "events", tmp_path / "precious.txt"
    file.write_text("precious")
    refused = pytest.raises(BackendUnavailableError, match="another process serves")
    with EventPublisher(f"ipc://{taken}"), refused:
        EventPublisher(f"ipc://{taken}")
    with pytest.raises(BackendUnavailableError, match="is not a socket"):
        EventPublisher(f"ipc://{file}")
    with pytest.raises(BackendUnavailableError, match="embedded null"):
        EventPublisher(f"ipc://{tmp_path}/\0")
    assert file.read_text() == "precious"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(str(tmp_path / "left"))
    with EventPublisher(f"ipc://{tmp_path}/left"):
        pass


# The same decoded by vLLM

HASHES = [key[:-4] for key in KEYS[:2]]
NO_TOKENS: dict[str, Any] = {
    **dict.fromkeys(("parent_block_hash", "lora_id", "lora_name")),
    "token_ids": [],
    "block_size": 0,
    "group_idx": 0,
}


@pytest.fixture
def vllm_events() -> Any:
    return pytest.importorskip("vllm.distributed.kv_events", reason="needs vLLM")


def publish(*events: Added | Removed, **how: Any) -> list[bytes]:
    with (
        EventPublisher(ANY_PORT, replay=ANY_PORT, **how) as publisher,
        EventSubscriber.opened(publisher.endpoint, publisher.replay) as subscriber,
    ):
        for event in events:
            publisher.note(event)
        subscriber.read_until(lambda: len(subscriber.payloads) == 1 + len(events))
        return subscriber.payloads


def test_vllm_decodes_what_is_sent(vllm_events: Any) -> None:
    events = Added("file", KEYS[:2]), Removed("host_2", KEYS[:2], Removal.DELETED)
    payloads = publish(*events, Added("tape", KEYS[:1]), hashes="bytes")
    decoder = msgspec.msgpack.Decoder(vllm_events.KVEventBatch)
    batches = [decoder.decode(payload) for payload in payloads]
    stored = vllm_events.BlockStored
    of_file = {"medium": "STORAGE", "locality": "LOCAL", "ownership": "file"}
    of_host = {"medium": "CPU", "locality": "LOCAL", "ownership": "host_2"}
    assert [batch.events for batch in batches] == [
        [vllm_events.AllBlocksCleared()],
        [stored([each], **of_file, **NO_TOKENS) for each in HASHES],
        [vllm_events.BlockRemoved(HASHES, group_idx=0, **of_host)],
        [stored(HASHES[:1], medium="STORAGE", ownership="tape", **NO_TOKENS)],
    ]
    assert {batch.data_parallel_rank for batch in batches} == {None}


def test_hashes_are_numbers_as_vllm_makes_them(
    vllm_events: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "1")
    _, payload = publish(Added("host", KEYS[:1]), hashes="int64", data_parallel_rank=3)
    batch = msgspec.msgpack.decode(payload, type=vllm_events.KVEventBatch)
    assert batch.events[0].block_hashes == [maybe_convert_block_hash(HASHES[0])]
    assert batch.data_parallel_rank == 3
