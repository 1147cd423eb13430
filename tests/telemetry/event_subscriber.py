"""Subscriber of events, like a router's: an index of blocks, built from messages alone."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import msgspec
import zmq

from kvxfer.storage.keys import BlockKey, make_block_key
from kvxfer.telemetry.events import pack

LIMIT_S = 10.0
END = (1 << 64) - 1


class EventSubscriber:
    """Subscriber that notices lost messages by their numbers, and asks for them again."""

    def __init__(self, endpoint: str, replay: str) -> None:
        self.kept: dict[str, set[BlockKey]] = defaultdict(set)
        self.mistakes: list[Any] = []
        self.payloads: list[bytes] = []
        self._next = 0
        self._context = zmq.Context()
        self._live = self._context.socket(zmq.SUB)
        self._live.subscribe(b"")
        self._live.connect(endpoint)
        self._replay = self._context.socket(zmq.DEALER)
        self._replay.connect(replay)

    @classmethod
    @contextmanager
    def opened(cls, endpoint: str, replay: str) -> Iterator[Self]:
        subscriber = cls(endpoint, replay)
        try:
            yield subscriber
        finally:
            subscriber._context.destroy(linger=0)

    def read(self) -> None:
        """Read the messages that have arrived; ask for missing ones."""
        while self._live.poll(0):
            _, sequence, payload = self._live.recv_multipart()
            number = int.from_bytes(sequence, "big")
            if number < self._next:
                continue
            if number > self._next:
                self.catch_up()
            if number == self._next:
                self._take(number, payload)

    def catch_up(self) -> list[int]:
        """Ask for all batches from the next one on; return the numbers of those that came."""
        self._replay.send_multipart([b"", pack(self._next)])
        came: list[int] = []
        while True:
            assert self._replay.poll(int(LIMIT_S * 1000))
            _, _, sequence, payload = self._replay.recv_multipart()
            number = int.from_bytes(sequence, "big")
            if number == END:
                return came
            came.append(number)
            if number >= self._next:
                self._take(number, payload)

    def read_until(self, condition: Callable[[], object]) -> None:
        """Read, and ask for the last messages, which may be lost, until a condition holds."""
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            assert time.monotonic() < deadline, (self.kept, self._next)
            self._live.poll(20)
            self.read()
            if not condition():
                self.catch_up()

    def _take(self, number: int, payload: bytes) -> None:
        self.payloads.append(payload)
        self._next = number + 1
        _, events = msgspec.msgpack.decode(payload)[:2]
        for event in events:
            if event["type"] == "AllBlocksCleared":
                self.kept.clear()
                continue
            kept = self.kept[event.get("ownership") or event["medium"]]
            group = event.get("group_idx") or 0
            hashes = [
                each if isinstance(each, bytes) else pack(each) for each in event["block_hashes"]
            ]
            keys = {make_block_key(each, group) for each in hashes}
            is_stored = event["type"] == "BlockStored"
            if not (kept.isdisjoint(keys) if is_stored else kept.issuperset(keys)):
                self.mistakes.append(event)
            (kept.update if is_stored else kept.difference_update)(keys)
