"""Trace recorder: writes the requests of a live engine to a file, in the background."""

import contextlib
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import IO, Annotated, Self

import msgspec
import xxhash

from kvxfer import runtime
from kvxfer.checks import INT64_MAX
from kvxfer.telemetry.journal import CLOSE_TIMEOUT_S, append_whole

DEFAULT_TOKENS_PER_BLOCK = 512
"""Tokens of a block in Mooncake's traces.

Source: https://github.com/kvcache-ai/Mooncake, `FAST25-release/traces`.
"""

MAX_TOKENS_PER_BLOCK = 10**9
"""Maximum tokens of a block, so that those of all prompts together fit in 64 bits."""

VARIABLE = "KVXFER_TRACE"
"""Environment variable: file to which an engine appends its requests."""

MAX_WAITING = 10_000
"""Maximum number of requests that wait to be written; further ones are left out."""

MAX_BYTES = 1 << 30
"""Size at which recording to a file stops, so that a forgotten recording fills no disk."""

_Count = Annotated[int, msgspec.Meta(ge=0, le=INT64_MAX)]
_Tokens = Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS_PER_BLOCK)]

logger = logging.getLogger(__name__)


class TraceLine(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a trace; other fields of a line are ignored.

    Attributes:
        timestamp: Arrival in milliseconds.
        input_length: Tokens of the prompt.
        output_length: Tokens that were generated.
        hash_ids: Number of each block of the prompt. Equal numbers are equal prefixes up to there.
        tokens_per_block: Tokens of a block; kvxfer's own field, 512 if it is missing.
    """

    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: _Count
    output_length: _Count
    hash_ids: list[_Count]
    tokens_per_block: _Tokens = DEFAULT_TOKENS_PER_BLOCK


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """Request of an engine.

    Attributes:
        arrival_s: Time of its arrival, in seconds since the epoch.
        block_hashes: Hash of each whole block of the prompt, chained: equal for equal prefixes.
    """

    arrival_s: float
    num_tokens: int
    tokens_per_block: int
    block_hashes: Sequence[bytes]


class TraceRecorder:
    """Recorder that appends requests to a file, one per line, from a thread of its own.

    It never raises, makes its caller wait for a disk, or grows without bounds: requests that cannot
    be written are left out, and the log says so. Several engines may append to one file, in
    Mooncake's format, until it has `max_bytes`.
    """

    def __init__(self, path: str, *, max_bytes: int = MAX_BYTES) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._num_left_out = 0
        self._has_ended = False
        self._waiting: SimpleQueue[RecordedRequest | None] = runtime.queue()
        self._thread = runtime.start_thread(self._write_all, name="kvxfer-trace")

    @classmethod
    def from_environment(cls) -> Self | None:
        """Open the recorder of the file that `KVXFER_TRACE` names; None if it is not set."""
        path = os.environ.get(VARIABLE)
        return cls(path) if path else None

    def record(self, request: RecordedRequest) -> None:
        """Queue a request to be written; it is left out if too many wait."""
        if self._has_ended or self._waiting.qsize() >= MAX_WAITING:
            self._num_left_out += not self._has_ended  # the log already says that it has ended
        else:
            self._waiting.put(request)

    def close(self) -> None:
        """Write all waiting requests, for at most `CLOSE_TIMEOUT_S`; may be called again."""
        self._waiting.put(None)
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._num_left_out:
            text = "left %d requests out of the trace %s: they came too fast"
            logger.warning(text, self._num_left_out, self._path)
            self._num_left_out = 0

    def _write_all(self) -> None:
        try:
            with open(self._path, "ab", buffering=0) as file:  # noqa: PTH123 - a name, from outside
                self._append(file)
        except Exception as exc:  # noqa: BLE001 - an engine goes on without its trace
            logger.warning("not recording requests in %s: %s", self._path, exc)
        self._has_ended = True
        with contextlib.suppress(Empty):  # queued requests would stay in memory with the engine
            while True:
                self._waiting.get_nowait()

    def _append(self, file: IO[bytes]) -> None:
        """Append requests until closed; those that wait together are written together."""
        is_last = False
        while not is_last:
            requests = [self._waiting.get()]
            while not self._waiting.empty():
                requests.append(self._waiting.get())
            is_last = None in requests
            lines = b"".join(_line(request) for request in requests if request is not None)
            if file.tell() + len(lines) > self._max_bytes:
                text = "stopped recording requests in %s: it has reached %d bytes"
                logger.warning(text, self._path, self._max_bytes)
                return
            append_whole(file, lines)


def _line(request: RecordedRequest) -> bytes:
    line = TraceLine(
        timestamp=round(request.arrival_s * 1000, 3),
        input_length=request.num_tokens,
        output_length=0,
        # 63 bits, because other readers of the format take numbers as signed.
        hash_ids=[xxhash.xxh3_64_intdigest(each) >> 1 for each in request.block_hashes],
        tokens_per_block=request.tokens_per_block,
    )
    return msgspec.json.encode(line) + b"\n"
