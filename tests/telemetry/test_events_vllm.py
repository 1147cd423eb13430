"""Events are those of vLLM: its own classes decode them, and its hashes are ours."""

from typing import Any

import msgspec
import pytest

from kvxfer.storage.observer import Added, Removal, Removed
from kvxfer.telemetry.events import EventPublisher, HashForm
from kvxfer.testing.conformance.suite import make_keys
from tests.telemetry.event_subscriber import EventSubscriber

pytest.importorskip("vllm.distributed.kv_events", reason="needs vLLM")

from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

ANY_PORT = "tcp://127.0.0.1:0"
KEYS = make_keys(2)
HASHES = [key[:-4] for key in KEYS]
NO_TOKENS: dict[str, Any] = {
    "parent_block_hash": None,
    "token_ids": [],
    "block_size": 0,
    "lora_id": None,
    "lora_name": None,
    "group_idx": 0,
}


def publish(
    *events: Added | Removed, hashes: HashForm = "bytes", rank: int | None = None
) -> list[bytes]:
    """Publish events; return the batches that a subscriber gets."""
    with (
        EventPublisher(
            ANY_PORT, replay=ANY_PORT, hashes=hashes, data_parallel_rank=rank
        ) as publisher,
        EventSubscriber.opened(publisher.endpoint, publisher.replay) as subscriber,
    ):
        for event in events:
            publisher.note(event)
        subscriber.read_until(lambda: len(subscriber.payloads) == 1 + len(events))
        return subscriber.payloads


def test_vllm_decodes_what_is_sent() -> None:
    payloads = publish(
        Added("file", KEYS), Removed("host_2", KEYS, Removal.DELETED), Added("tape", KEYS[:1])
    )
    decoder = msgspec.msgpack.Decoder(KVEventBatch)
    batches = [decoder.decode(payload) for payload in payloads]
    of_file = {"medium": "STORAGE", "locality": "LOCAL", "ownership": "file"}
    of_host = {"medium": "CPU", "locality": "LOCAL", "ownership": "host_2"}
    assert [batch.events for batch in batches] == [
        [AllBlocksCleared()],
        [BlockStored([each], **of_file, **NO_TOKENS) for each in HASHES],
        [BlockRemoved(HASHES, group_idx=0, **of_host)],
        [BlockStored(HASHES[:1], medium="STORAGE", ownership="tape", **NO_TOKENS)],
    ]
    assert {batch.data_parallel_rank for batch in batches} == {None}


def test_hashes_are_numbers_as_vllm_makes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "1")
    _, payload = publish(Added("host", KEYS[:1]), hashes="int64", rank=3)
    batch = msgspec.msgpack.decode(payload, type=KVEventBatch)
    assert batch.events[0].block_hashes == [maybe_convert_block_hash(HASHES[0])]
    assert batch.data_parallel_rank == 3
