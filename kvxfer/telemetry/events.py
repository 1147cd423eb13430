"""Events: an observer that publishes added and removed blocks in the form of vLLM's KV events."""

import contextlib
import logging
import os
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, TypeAlias, get_args

import msgspec
import zmq

from kvxfer import runtime
from kvxfer.checks import require_integer, require_text
from kvxfer.endpoint import Endpoint, remove_abandoned
from kvxfer.errors import BackendUnavailableError, InvalidArgumentError
from kvxfer.storage.keys import GROUP_INDEX_BYTES, BlockKey, group_of
from kvxfer.storage.observer import Added, Event, Observer, Removed
from kvxfer.telemetry.places import place_of

DEFAULT_BUFFER_BATCHES = 10_000
"""Batches that are kept for replay, as many as in vLLM."""
INT_MAX = (1 << 31) - 1  # ZMQ's options are C ints
BLOCKS_PER_BATCH = 100
"""Maximum blocks in a batch, so that the buffer is bounded in bytes, too."""
CLOSE_S = 1.0
"""How long `close` waits for the last batches to reach subscribers, as in vLLM."""

SEQUENCE_BYTES = 8
END_OF_REPLAY = (-1).to_bytes(SEQUENCE_BYTES, "big", signed=True)
MAX_REQUEST_BYTES = 64
"""Maximum bytes in each part of a replay request, which holds a sequence number."""

MAX_SUBSCRIPTION_BYTES = 4096
"""Maximum bytes of a subscription, which names a topic; a longer one closes the connection."""

MAX_REPLAYS = 16
"""Maximum number of concurrent replays; further subscribers wait for their turn."""
MAX_QUEUED_MESSAGES = 64
"""Maximum messages that wait in memory for one subscriber of a replay, some 20 kB each."""
BATCHES_PER_TURN = 64
"""Batches sent to one subscriber before other subscribers and new events get their turn."""
REPLAY_TIMEOUT_S = 10.0
"""How long a subscriber may accept no message before its replay ends."""
REPLAY_PAUSE_MS = 5
"""Delay before retrying a subscriber whose queue was full."""

HashForm: TypeAlias = Literal["int64", "bytes"]
"""Form of hashes: the last 8 bytes as a number, which is vLLM's default, or all bytes."""

Hash: TypeAlias = int | bytes

logger = logging.getLogger(__name__)


class BlockStored(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """Block that a tier stored.

    A tier knows the hash of a block but not its tokens, so all fields about tokens are empty, as
    in vLLM for blocks whose tokens it does not know. Several hashes would mean a chain, so there
    is one.

    Source: `vllm/distributed/kv_events.py`, as for all names of fields here.
    """

    block_hashes: tuple[Hash]
    parent_block_hash: Hash | None
    token_ids: tuple[()]
    block_size: int
    lora_id: None
    medium: str
    lora_name: None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class BlockRemoved(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """Blocks of one group that are no longer in a tier."""

    block_hashes: list[Hash]
    medium: str
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, tag=True):
    """Event that voids all events before it; the first event of every publisher."""


class EventBatch(msgspec.Struct, frozen=True, array_like=True):
    """Events of one moment.

    Attributes:
        ts: Seconds since the epoch.
        events: The events, in order.
        data_parallel_rank: Rank of the publisher, if there are several.
    """

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class _Change(NamedTuple):
    """Change of a tier that has not been published yet."""

    sequence: int
    ts: float
    event: Added | Removed | None  # None: all blocks cleared
    keys: Sequence[BlockKey]


@dataclass(slots=True)
class _Replay:
    """Replay to one subscriber of the batches that were sent before its request."""

    next_sequence: int
    last_sequence: int
    stop_s: float


def pack(sequence: int) -> bytes:
    """Encode a sequence number in the form of the messages."""
    return sequence.to_bytes(SEQUENCE_BYTES, "big")


class EventPublisher(Observer):
    """Publisher of added and removed blocks, for routers that send requests to where blocks are.

    It observes one engine or backend, so that the names of tiers are unambiguous. Messages are
    those of vLLM: topic, sequence number, and a batch in msgpack. `note` only appends to a buffer;
    a thread encodes and sends. A sequence number that a subscriber misses was lost on the way, and
    can be replayed from the buffer. The exception: if changes overflow the buffer before the thread
    can send them, the oldest are lost, and their numbers are missing in replays, too.

    Blocks of other namespaces, which a file store also evicts, are not published.

    Args:
        endpoint: Address that subscribers connect to, such as `tcp://127.0.0.1:5557`; port 0
            chooses a free port.
        replay: Address for requests to replay batches, of the same form; empty for none.
        topic: Topic of all messages.
        hashes: Form of the hashes.
        buffer_batches: Batches that are kept, each of at most `BLOCKS_PER_BATCH` blocks.
        data_parallel_rank: Rank of the publisher, if there are several.

    Attributes:
        endpoint, replay: As given, with the port that was chosen.

    Raises:
        InvalidArgumentError: An address or a parameter is invalid.
        BackendUnavailableError: An address is in use, or not one of this machine.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        replay: str = "",
        topic: str = "",
        hashes: HashForm = "int64",
        buffer_batches: int = DEFAULT_BUFFER_BATCHES,
        data_parallel_rank: int | None = None,
    ) -> None:
        if hashes not in get_args(HashForm):
            raise InvalidArgumentError("hashes", hashes, "'int64' or 'bytes'")
        buffer_batches = require_integer(
            "buffer_batches", buffer_batches, minimum=1, maximum=INT_MAX
        )
        self._topic = require_text("topic", topic).encode()
        self._whole_hashes = hashes == "bytes"
        rank = data_parallel_rank
        self._rank = None if rank is None else require_integer("data_parallel_rank", rank)
        self._lock = runtime.lock()
        self._pending: deque[_Change] = deque(maxlen=buffer_batches)
        # The batches that were sent last, with sequence numbers that have no gap.
        self._sent: deque[tuple[int, bytes]] = deque(maxlen=buffer_batches)
        self._next_sequence = 0
        self._closing = False
        self._is_woken = False
        self._encoder = msgspec.msgpack.Encoder()
        self._replay_socket: zmq.Socket[bytes] | None = None
        self._replays: dict[bytes, _Replay] = {}  # by subscriber
        with contextlib.ExitStack() as opened:  # closes everything if a later step fails
            self._wake_reader, self._wake_writer = os.pipe()
            opened.callback(self._close_pipe)
            os.set_blocking(self._wake_reader, False)
            self._context = zmq.Context()
            opened.callback(self._context.destroy, linger=0)
            self._publish_socket = self._context.socket(zmq.PUB)
            self._publish_socket.set_hwm(buffer_batches)
            self._publish_socket.setsockopt(zmq.MAXMSGSIZE, MAX_SUBSCRIPTION_BYTES)
            self.endpoint = _bind("endpoint", self._publish_socket, endpoint)
            self.replay = ""
            if replay:
                self._replay_socket = self._context.socket(zmq.ROUTER)
                # A message to a subscriber with a full queue must raise, not be dropped.
                self._replay_socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
                self._replay_socket.set_hwm(MAX_QUEUED_MESSAGES)
                self._replay_socket.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
                self.replay = _bind("replay", self._replay_socket, replay)
            self._append(None, [])
            self._thread = runtime.start_thread(self._run, name="kvxfer-events")
            opened.pop_all()

    def __enter__(self) -> Self:
        """Return the publisher, which is closed on exit."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the publisher."""
        self.close()

    def note(self, event: Event) -> None:
        """See `Observer.note`; events after `close` are dropped."""
        is_foreign = isinstance(event, Removed) and event.namespace
        if isinstance(event, (Added, Removed)) and not is_foreign:
            for start in range(0, len(event.keys), BLOCKS_PER_BATCH):
                self._append(event, event.keys[start : start + BLOCKS_PER_BATCH])

    def close(self) -> None:
        """Send the noted events, as far as `CLOSE_S` allows, and end; may be called again."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            self._wake_thread()
        self._thread.join()
        self._close_pipe()

    def _close_pipe(self) -> None:
        os.close(self._wake_reader)
        os.close(self._wake_writer)

    def _append(self, event: Added | Removed | None, keys: Sequence[BlockKey]) -> None:
        with self._lock:
            if not self._closing:
                self._pending.append(_Change(self._next_sequence, runtime.wall_time(), event, keys))
                self._next_sequence += 1
                self._wake_thread()

    def _wake_thread(self) -> None:
        if not self._is_woken:
            self._is_woken = True
            os.write(self._wake_writer, b"\0")

    def _run(self) -> None:
        """Send batches and replays until closed; only this thread uses the sockets."""
        poller = zmq.Poller()
        poller.register(self._wake_reader, zmq.POLLIN)
        replay_socket, is_last = self._replay_socket, False
        while not is_last:
            if replay_socket is not None:
                may_begin = len(self._replays) < MAX_REPLAYS
                poller.register(replay_socket, zmq.POLLIN if may_begin else 0)
            ready = dict(poller.poll(REPLAY_PAUSE_MS if self._replays else None))
            if self._wake_reader in ready:
                is_last = self._publish()
            if replay_socket is not None:
                if replay_socket in ready:
                    self._begin_replay(replay_socket)
                for client, replay in [*self._replays.items()]:
                    if self._continue_replay(replay_socket, client, replay):
                        del self._replays[client]
        self._context.destroy(linger=int(CLOSE_S * 1000))

    def _begin_replay(self, socket: "zmq.Socket[bytes]") -> None:
        """Receive a request to replay from a number on; it replaces the subscriber's last one."""
        try:
            parts = socket.recv_multipart(zmq.NOBLOCK)
        except zmq.ZMQError as exc:  # the subscriber is gone
            logger.debug("cannot read a request for a replay: %s", exc)
            return
        if len(parts) != 3:
            logger.debug("ignoring a request for a replay: it has %d parts, not 3", len(parts))
            return
        client, _, start = parts
        stop_s = runtime.monotonic() + REPLAY_TIMEOUT_S
        self._replays[client] = _Replay(int.from_bytes(start, "big"), self._sent[-1][0], stop_s)

    def _continue_replay(self, socket: "zmq.Socket[bytes]", client: bytes, replay: _Replay) -> bool:
        """Send a subscriber more batches; return whether its replay has ended."""
        first = self._sent[0][0]
        begin = max(first, replay.next_sequence)
        end = min(begin + BATCHES_PER_TURN, replay.last_sequence + 1)
        try:
            for sequence in range(begin, end):
                payload = self._sent[sequence - first][1]
                parts = [client, b"", self._topic, pack(sequence), payload]
                socket.send_multipart(parts, zmq.NOBLOCK)
                replay.next_sequence = sequence + 1
                replay.stop_s = runtime.monotonic() + REPLAY_TIMEOUT_S
            if end <= replay.last_sequence:
                return False
            socket.send_multipart([client, b"", b"", END_OF_REPLAY, b""], zmq.NOBLOCK)
        except zmq.ZMQError as exc:
            is_full = exc.errno == zmq.EAGAIN and runtime.monotonic() < replay.stop_s
            if not is_full:
                logger.debug("ending a replay: its subscriber is gone or reads nothing: %s", exc)
            return not is_full
        return True

    def _publish(self) -> bool:
        """Send the noted events; return whether the publisher is closing."""
        with self._lock:
            os.read(self._wake_reader, 1)
            self._is_woken = False
            noted, is_last = list(self._pending), self._closing
            self._pending.clear()
        for each in noted:
            expected = self._sent[-1][0] + 1 if self._sent else each.sequence
            if each.sequence != expected:
                text = "lost %d batches of KV events: they came too fast for `buffer_batches`"
                logger.warning(text, each.sequence - expected)
                self._sent.clear()  # replays have no gaps: they begin after the lost batches
            payload = self._encoder.encode(self._batch(each))
            self._publish_socket.send_multipart([self._topic, pack(each.sequence), payload])
            self._sent.append((each.sequence, payload))
        return is_last

    def _batch(self, noted: _Change) -> EventBatch:
        events: list[BlockStored | BlockRemoved | AllBlocksCleared] = []
        if isinstance(noted.event, Added):
            where = _place_fields(noted.event.tier)
            events += [self._stored(key, where) for key in noted.keys]
        elif isinstance(noted.event, Removed):
            events += self._removed(noted.keys, _place_fields(noted.event.tier))
        else:
            events.append(AllBlocksCleared())
        return EventBatch(noted.ts, events, self._rank)

    def _stored(self, key: BlockKey, where: Mapping[str, Any]) -> BlockStored:
        return BlockStored(
            block_hashes=(self._hash(key),),
            parent_block_hash=None,
            token_ids=(),
            block_size=0,
            lora_id=None,
            lora_name=None,
            group_idx=group_of(key),
            **where,
        )

    def _removed(self, keys: Sequence[BlockKey], where: Mapping[str, Any]) -> list[BlockRemoved]:
        groups: dict[int, list[Hash]] = defaultdict(list)
        for key in keys:
            groups[group_of(key)].append(self._hash(key))
        return [
            BlockRemoved(block_hashes=hashes, group_idx=group, **where)
            for group, hashes in groups.items()
        ]

    def _hash(self, key: BlockKey) -> Hash:
        content_hash = key[:-GROUP_INDEX_BYTES]
        return content_hash if self._whole_hashes else int.from_bytes(content_hash[-8:], "big")


def _place_fields(tier: str) -> dict[str, Any]:
    medium, locality = place_of(tier)
    return {"medium": medium, "locality": locality, "ownership": tier}


def _bind(argument: str, socket: "zmq.Socket[bytes]", address: str) -> str:
    """Bind a socket to an address; return the address with the chosen port."""
    scheme, _, place = require_text(argument, address).partition("://")
    if scheme == "tcp":
        host = Endpoint.parse(argument, place.replace("*", "0.0.0.0", 1)).host  # noqa: S104 - asked
        socket.setsockopt(zmq.IPV6, ":" in host)
    elif scheme != "ipc" or not place:
        raise InvalidArgumentError(argument, address, "an address such as 'tcp://127.0.0.1:5557'")
    elif not place.startswith("@"):  # a path, at which ZMQ would replace whatever is there
        try:
            remove_abandoned(Path(place))
        except (OSError, ValueError) as exc:  # ValueError: a NUL in the path
            raise BackendUnavailableError(f"cannot listen at {address!r}: {exc}") from exc
    try:
        socket.bind(address)
    except zmq.ZMQError as exc:
        reason = zmq.strerror(exc.errno or 0)
        raise BackendUnavailableError(f"cannot listen at {address}: {reason}") from exc
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)
