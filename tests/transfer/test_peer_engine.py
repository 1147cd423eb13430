"""Peer engine: keys of blocks on another engine's workers, also of one of another release."""

import msgspec
import torch

from kvxfer.kvcache.page_box import Digit, PageBox
from kvxfer.kvcache.portable import CacheDescription, GroupDescription, WorkerShard
from kvxfer.lending.reader import PeerEngine, worker_keys
from kvxfer.storage.keys import BlockKey

BOX = PageBox(layer_name="0", part="k", dtype=torch.int16, digits=(Digit("token", 4, 2),))
GROUP = GroupDescription(tokens_per_block=4, payload_size_bytes=8, boxes=(BOX,))
TOLD = CacheDescription(shard=WorkerShard(num_kv_heads=2, tp_size=2), groups=(GROUP,))
KEYS = [BlockKey(b"one"), BlockKey(b"other")]


def test_keys_are_those_under_which_each_worker_offers_its_blocks() -> None:
    engine = PeerEngine(TOLD.encode())
    for rank in range(2):
        assert engine.worker_keys(rank, KEYS) == worker_keys(TOLD.at_rank(rank), KEYS)
    assert engine.worker_keys(0, KEYS) != engine.worker_keys(1, KEYS)


def test_an_engine_of_a_release_with_fewer_fields_offers_under_the_keys_that_are_asked_for() -> (
    None
):
    words = msgspec.msgpack.decode(TOLD.encode())
    del words["groups"][0]["has_states"], words["groups"][0]["boxes"][0]["encoding"]
    older = msgspec.msgpack.encode(words)
    engine = PeerEngine(older)
    assert engine.description == TOLD
    offered = worker_keys(Older(older), KEYS)  # type: ignore[arg-type] # as that release does
    assert engine.worker_keys(0, KEYS) == offered != worker_keys(TOLD, KEYS)


class Older:
    """Description as another release encodes it."""

    def __init__(self, encoded: bytes) -> None:
        self.encoded = encoded

    def encode(self) -> bytes:
        return self.encoded
