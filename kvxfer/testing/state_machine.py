"""State machine: random sequences of calls on a backend, compared with a dictionary."""

import asyncio
from collections.abc import Coroutine
from typing import Any, ClassVar, TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from kvxfer import runtime
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.storage.backend import Backend, Outcome, Status
from kvxfer.storage.keys import BlockKey, Namespace, group_of, make_block_key
from kvxfer.testing.block_memory import BlockMemory
from kvxfer.testing.payloads import make_payload, read_payloads, write_payloads

T = TypeVar("T")

NUM_HASHES = 6
MAX_KEYS = 4
BLOCKS_PER_CHUNK = 2
SENTINEL = 0xA5

KEYS = [make_block_key(f"block-{n}".encode(), group) for n in range(NUM_HASHES) for group in (0, 1)]
SOME_KEYS = st.lists(st.sampled_from(KEYS), min_size=1, max_size=MAX_KEYS, unique=True)


class BackendStateMachine(RuleBasedStateMachine):
    """State machine of a backend, on a private event loop; subclass it with `make_backend`.

    `TestMyMachine = MyMachine.TestCase` makes a test of it. The model is a dictionary of the
    versions that a key may hold. A miss is allowed only in a bounded backend, wrong bytes never.

    Attributes:
        bounded: Whether blocks may disappear and stores may fail for lack of room.
        persistent: Whether blocks survive closing the backend and opening it again.
    """

    bounded: ClassVar[bool] = False
    persistent: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        self.memory = BlockMemory(
            [[96, 33], [64]],
            num_blocks=2 * MAX_KEYS * BLOCKS_PER_CHUNK,
            blocks_per_chunk=BLOCKS_PER_CHUNK,
        )
        self.model: dict[BlockKey, set[int]] = {}
        self._runner = asyncio.Runner(loop_factory=runtime.new_event_loop)
        self.backend = self.run(self.make_backend(self.memory.namespace()))

    async def make_backend(self, namespace: Namespace) -> Backend:
        """Open a backend; unless bounded, with room for 12 chunks of the largest group."""
        raise NotImplementedError

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end on the private event loop."""
        return self._runner.run(coroutine)

    def teardown(self) -> None:
        """Compare all blocks once more and close the backend."""
        try:
            for first in range(0, len(KEYS), MAX_KEYS):
                self._load(KEYS[first : first + MAX_KEYS], first_block_index=0)
        finally:
            self.run(self.backend.aclose())
            self._runner.close()

    @rule(keys=SOME_KEYS)
    def lookup(self, keys: list[BlockKey]) -> None:
        """Look keys up: a key is found if, and only if, it was stored."""
        for key, there in zip(keys, self.run(self.backend.lookup(keys)), strict=True):
            if there:
                assert key in self.model, f"{key!r} was never stored"
            else:
                self._expect_missing(key)

    @rule(keys=SOME_KEYS, version=st.integers(0, 2))
    def store(self, keys: list[BlockKey], version: int) -> None:
        """Store blocks: a new key gets the new bytes, a present key keeps its own."""
        blocks = self._describe(keys, first_block_index=0)
        payloads = [self._payload(key, version) for key in keys]
        write_payloads(blocks, payloads)
        outcomes = self.run(self.backend.store(keys, blocks))
        assert read_payloads(blocks) == payloads, "store changed its source"
        assert len(outcomes) == len(keys)
        for key, outcome in zip(keys, outcomes, strict=True):
            self._expect_stored(key, version, outcome)

    @rule(keys=SOME_KEYS, first_block_index=st.integers(0, BLOCKS_PER_CHUNK - 1))
    def load(self, keys: list[BlockKey], first_block_index: int) -> None:
        """Load blocks: those that are done have the stored bytes; no other memory is touched."""
        self._load(keys, first_block_index=first_block_index)

    @rule(keys=SOME_KEYS)
    def delete(self, keys: list[BlockKey]) -> None:
        """Delete keys: the answer says which were present, and none is found afterwards."""
        deleted = self.run(self.backend.delete(keys))
        for key, was_there in zip(keys, deleted, strict=True):
            if was_there:
                assert key in self.model, f"{key!r} was never stored"
            else:
                self._expect_missing(key)
            self.model.pop(key, None)
        assert self.run(self.backend.lookup(keys)) == [False] * len(keys)

    @precondition(lambda self: self.persistent)
    @rule()
    def reopen(self) -> None:
        """Close the backend and open it again: no block is lost."""
        self.run(self.backend.aclose())
        self.backend = self.run(self.make_backend(self.memory.namespace()))

    def _load(self, keys: list[BlockKey], *, first_block_index: int) -> None:
        self.memory.fill(SENTINEL)
        before = self.memory.snapshot()
        blocks = self._describe(keys, first_block_index=first_block_index)
        untouched = read_payloads(blocks)
        outcomes = self.run(self.backend.load(keys, blocks))
        loaded = read_payloads(blocks)
        assert len(outcomes) == len(keys)
        for index, (key, outcome) in enumerate(zip(keys, outcomes, strict=True)):
            assert outcome.memory_safe
            if outcome.done:
                self._expect_loaded(key, loaded[index])
            else:
                assert outcome.status is Status.MISSING, outcome
                assert loaded[index] == untouched[index], "a missing block was written"
                self._expect_missing(key)
        write_payloads(blocks, untouched)
        assert self.memory.snapshot() == before, "bytes around the blocks were written"

    def _describe(self, keys: list[BlockKey], *, first_block_index: int) -> Descriptors:
        """Describe one chunk per key, each in blocks of its own, in the order of the keys."""
        per_chunk = BLOCKS_PER_CHUNK - first_block_index
        chunks = []
        for index, key in enumerate(keys):
            first = index * BLOCKS_PER_CHUNK
            ids = [first + 1, first] if per_chunk == BLOCKS_PER_CHUNK else [first]
            group = group_of(key)
            chunks.append(self.memory.describe(group, ids, first_block_index=first_block_index))
        return Descriptors.concatenate(chunks)

    def _expect_stored(self, key: BlockKey, version: int, outcome: Outcome) -> None:
        assert outcome.memory_safe
        if not outcome.done:
            assert self.bounded, f"an unbounded backend refused a block: {outcome}"
            assert outcome.status is Status.FAILED, outcome
            return
        if self.bounded:  # if the old block was evicted, the new one took its place
            self.model.setdefault(key, set()).add(version)
        else:
            self.model.setdefault(key, {version})

    def _expect_loaded(self, key: BlockKey, loaded: bytes) -> None:
        versions = self.model.get(key, set())
        fitting = {v for v in versions if self._payload(key, v).endswith(loaded)}
        assert fitting, f"the bytes of {key!r} match none of the versions {sorted(versions)}"
        self.model[key] = fitting

    def _expect_missing(self, key: BlockKey) -> None:
        assert self.bounded or key not in self.model, f"{key!r} was stored and is gone"
        self.model.pop(key, None)

    def _payload(self, key: BlockKey, version: int) -> bytes:
        size = self.memory.chunk_size_bytes(group_of(key))
        return make_payload(key, size, version=version)
