"""Dictionary backend: the reference model of a backend, simple enough to be obviously correct."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from kvxfer.configuration import Configuration
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.storage.backend import DONE, MISSING, NO_ROOM_REASON, Backend, Outcome, Status
from kvxfer.storage.call_guard import CallGuard
from kvxfer.storage.keys import BlockKey, Namespace
from kvxfer.testing.payloads import read_payloads, write_payloads


class DictConfig(Configuration, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Configuration of a `DictBackend`.

    Attributes:
        max_blocks: Maximum number of blocks; the oldest one is evicted. None for no bound.
    """

    max_blocks: int | None = None


@dataclass(slots=True)
class _Stored:
    start: int
    payload: bytes
    checksum: int

    def covers(self, start: int, num_bytes: int) -> bool:
        """Whether these bytes of the chunk are stored."""
        return self.start <= start and start + num_bytes <= self.start + len(self.payload)


class DictBackend(Backend):
    """Backend that keeps blocks in a dictionary: the reference model of a backend, for tests.

    Copies run on the event loop; each store and load yields to other tasks once. Every instance
    keeps its own blocks, whatever its namespace.
    """

    config_type = DictConfig
    outlives_process = False

    def __init__(self, config: DictConfig | None, namespace: Namespace) -> None:
        self.namespace = namespace
        self._max_blocks = (config or DictConfig()).max_blocks
        self._blocks: dict[BlockKey, _Stored] = {}
        self._guard = CallGuard("dict backend")

    async def lookup(self, keys: Sequence[BlockKey]) -> list[bool]:
        """See `Backend.lookup`."""
        self._guard.check_batch(keys)
        return [key in self._blocks for key in keys]

    async def store(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        """See `Backend.store`. Blocks without room are `FAILED`."""
        self._guard.check_batch(keys, blocks)
        payloads = read_payloads(blocks)
        outcomes = []
        for key, payload, start in zip(keys, payloads, blocks.payload_starts.tolist(), strict=True):
            stored = self._blocks.get(key)
            if stored is None or not stored.covers(start, len(payload)):
                self._blocks.pop(key, None)
                if not self._make_room(keys):
                    outcomes.append(Outcome(Status.FAILED, reason=NO_ROOM_REASON))
                    continue
                self._blocks[key] = _Stored(start, payload, xxhash.xxh3_64_intdigest(payload))
            outcomes.append(DONE)
        await asyncio.sleep(0)
        return outcomes

    async def load(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        """See `Backend.load`."""
        self._guard.check_batch(keys, blocks)
        await asyncio.sleep(0)
        return [self._load(key, blocks.select(i, i + 1)) for i, key in enumerate(keys)]

    async def delete(self, keys: Sequence[BlockKey]) -> list[bool]:
        """See `Backend.delete`."""
        self._guard.check_batch(keys)
        return [self._blocks.pop(key, None) is not None for key in keys]

    async def aclose(self) -> None:
        """See `Backend.aclose`."""
        self._guard.close()
        self._blocks.clear()

    def corrupt(self, key: BlockKey) -> None:
        """Flip a bit of the stored bytes of `key`, as a bad medium would."""
        stored = self._blocks[key]
        stored.payload = bytes([stored.payload[0] ^ 1]) + stored.payload[1:]

    def _load(self, key: BlockKey, block: Descriptors) -> Outcome:
        stored = self._blocks.get(key)
        if stored is None:
            return MISSING
        start = int(block.payload_starts[0])
        if not stored.covers(start, block.num_bytes):
            return MISSING
        if xxhash.xxh3_64_intdigest(stored.payload) != stored.checksum:
            del self._blocks[key]
            return Outcome(Status.CORRUPT, reason=f"checksum of {key.hex()} differs")
        first = start - stored.start
        write_payloads(block, [stored.payload[first : first + block.num_bytes]])
        return DONE

    def _make_room(self, batch: Sequence[BlockKey]) -> bool:
        if self._max_blocks is None or len(self._blocks) < self._max_blocks:
            return True
        victim = next((key for key in self._blocks if key not in batch), None)
        if victim is None:
            return False
        del self._blocks[victim]
        return True
