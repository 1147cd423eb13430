"""Replays of events: batches that subscribers ask for again, sent as fast as each takes them."""

import logging
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

import zmq

from kvxfer import runtime
from kvxfer.runtime import Pause

SEQUENCE_BYTES = 8
END_OF_REPLAY = (-1).to_bytes(SEQUENCE_BYTES, "big", signed=True)
MAX_REQUEST_BYTES = 64
"""Bytes of a part of a request for replay, which is a sequence number."""

MAX_REPLAYS = 64
"""Subscribers that are sent a replay at one time; further ones wait for their turn."""
MAX_QUEUED_MESSAGES = 16
"""Messages that wait in memory for one subscriber to take them."""
BATCHES_PER_TURN = 64
"""Batches that a subscriber is sent before it is the turn of others, and of new events."""
REPLAY_TIMEOUT_S = 10.0
"""Time after which a subscriber that takes nothing is given up."""
MIN_PAUSE_S, MAX_PAUSE_S = 0.001, 0.1
"""Delays before retrying a subscriber whose queue was full."""

Sent: TypeAlias = deque[tuple[int, bytes]]
"""Batches that were sent last, and the sequence number of each, without a gap."""

logger = logging.getLogger(__name__)


def pack(sequence: int) -> bytes:
    """Write a sequence number as in messages."""
    return sequence.to_bytes(SEQUENCE_BYTES, "big")


@dataclass(slots=True)
class _Replay:
    """Replay to one subscriber.

    Attributes:
        took_s: When the subscriber took a message, on the clock of `runtime.monotonic`.
        pause: Pause since it could take nothing.
    """

    next_sequence: int
    last_sequence: int
    took_s: float
    pause: Pause = field(default_factory=partial(Pause, MIN_PAUSE_S, MAX_PAUSE_S))


class EventReplays:
    """Replays on one ROUTER socket, on one thread.

    A subscriber that does not read costs `MAX_QUEUED_MESSAGES` in memory, and is given up after
    `REPLAY_TIMEOUT_S`; others, and those who read slowly, are served meanwhile.

    Args:
        socket: The socket, which is not bound yet.
        sent: Batches that can be asked for.
    """

    def __init__(self, socket: "zmq.Socket[bytes]", sent: Sent, topic: bytes) -> None:
        # A message that a subscriber has no room for is an error, and is not dropped.
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.SNDHWM, MAX_QUEUED_MESSAGES)
        socket.setsockopt(zmq.RCVHWM, MAX_QUEUED_MESSAGES)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
        self.socket = socket
        self._sent = sent
        self._topic = topic
        self._replays: dict[bytes, _Replay] = {}

    @property
    def may_begin(self) -> bool:
        """Whether a further subscriber may be sent a replay."""
        return len(self._replays) < MAX_REPLAYS

    @property
    def timeout_s(self) -> float | None:
        """Time after which `go_on` is to be called; None where nothing is to be sent."""
        now = runtime.monotonic()
        return min((each.pause.left_s(now) for each in self._replays.values()), default=None)

    def begin(self) -> None:
        """Receive a request for the batches from a sequence number on.

        A subscriber that asks again, though its replay has not ended, gets the new one alone.
        """
        try:
            parts = self.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.ZMQError as exc:  # whoever asked is gone
            logger.debug("a request for replay cannot be read: %s", exc)
            return
        if len(parts) != 3:
            logger.debug("a request for replay has %d parts, not 3", len(parts))
            return
        client, _, start = parts
        last = self._sent[-1][0] if self._sent else -1
        self._replays[client] = _Replay(int.from_bytes(start, "big"), last, runtime.monotonic())

    def go_on(self) -> None:
        """Send each subscriber what it takes now."""
        for client, replay in list(self._replays.items()):
            try:
                has_ended = self._send(client, replay)
            except zmq.ZMQError as exc:
                has_ended = self._is_given_up(replay, exc)
            if has_ended:
                del self._replays[client]

    def _send(self, client: bytes, replay: _Replay) -> bool:
        """Send some batches; whether they were the last."""
        for _ in range(BATCHES_PER_TURN):
            first = self._sent[0][0] if self._sent else replay.last_sequence + 1
            sequence = max(replay.next_sequence, first)  # what is no longer kept is left out
            if sequence > replay.last_sequence:
                self._send_message(client, replay, [b"", END_OF_REPLAY, b""])
                return True
            payload = self._sent[sequence - first][1]
            self._send_message(client, replay, [self._topic, pack(sequence), payload])
            replay.next_sequence = sequence + 1
        return False

    def _send_message(self, client: bytes, replay: _Replay, parts: list[bytes]) -> None:
        self.socket.send_multipart([client, b"", *parts], zmq.NOBLOCK)
        replay.took_s = runtime.monotonic()
        replay.pause.reset()

    def _is_given_up(self, replay: _Replay, exc: zmq.ZMQError) -> bool:
        if exc.errno != zmq.EAGAIN:
            logger.debug("a replay ends, since whoever asked is gone: %s", exc)
            return True
        if runtime.monotonic() - replay.took_s > REPLAY_TIMEOUT_S:
            logger.debug(
                "a replay ends, since whoever asked took nothing in %g s", REPLAY_TIMEOUT_S
            )
            return True
        replay.pause.begin(runtime.monotonic())
        return False
