"""Tiers that fail, hang or return wrong bytes, and the closing of all of them."""

from collections.abc import Sequence

import pytest

from kvxfer.errors import InvalidArgumentError
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.storage.backend import Outcome, Status
from kvxfer.storage.eviction.retention import Retention
from kvxfer.storage.keys import BlockKey, Namespace, make_block_key
from kvxfer.testing import (
    BlockMemory,
    DictBackend,
)
from kvxfer.tiering import TieredBackend, TierTimeouts
from tests.tiering.opened_tiers import (
    KEYS,
    open_dict,
)


@pytest.fixture
def memory() -> BlockMemory:
    return BlockMemory([[48, 16]], num_blocks=32)


class Answering(DictBackend):
    """Backend that answers every load with one outcome."""

    def __init__(self, namespace: Namespace, outcome: Outcome) -> None:
        super().__init__(None, namespace)
        self.outcome = outcome

    async def load(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        return [self.outcome] * len(keys)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("missing failed", "failed"),
        ("failed missing", "failed"),
        ("timed_out missing", "timed_out"),
        ("failed corrupt", "corrupt"),
        ("corrupt timed_out", "corrupt"),
        ("corrupt failed missing", "corrupt"),
        ("missing failed done", "done"),
        ("corrupt done", "done"),
    ],
)
async def test_of_several_outcomes_the_most_telling_one_is_given(
    memory: BlockMemory, given: str, expected: str
) -> None:
    namespace = memory.namespace()
    tiers = [Answering(namespace, Outcome(Status(status))) for status in given.split()]
    async with TieredBackend(tiers, namespace) as backend:
        [outcome] = await backend.load(KEYS[:1], memory.describe(0, [0]))
        assert outcome == Outcome(Status(expected))


async def test_every_tier_is_closed_even_if_one_cannot_be(memory: BlockMemory) -> None:
    class Unclosable(DictBackend):
        async def aclose(self) -> None:
            await super().aclose()
            raise OSError(self)

    namespace = memory.namespace()
    tiers = [Unclosable(None, namespace) for _ in range(3)]
    backend = TieredBackend(tiers, namespace)
    with pytest.raises(OSError, match="Unclosable"):
        await backend.aclose()
    assert all(tier._guard.closed for tier in tiers)


def test_tiers_that_cannot_be_are_refused(memory: BlockMemory) -> None:
    class OnlyCuda(DictBackend):
        memory_kinds = frozenset({"cuda"})

    namespace = memory.namespace()
    tier = open_dict(namespace)
    with pytest.raises(InvalidArgumentError, match="at least one backend"):
        TieredBackend([], namespace)
    with pytest.raises(InvalidArgumentError, match=r"namespace\.groups"):
        TieredBackend([tier], Namespace(model="model"))
    with pytest.raises(InvalidArgumentError, match="'cpu' in each"):
        TieredBackend([tier, OnlyCuda(None, namespace)], namespace)
    with pytest.raises(InvalidArgumentError, match="staging_bytes"):
        TieredBackend([tier], namespace, staging_bytes=0)
    with pytest.raises(InvalidArgumentError, match="lookup_s is '5'"):
        TierTimeouts(lookup_s="5")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match=r"s is None; expected seconds, 0 or more$"):
        TierTimeouts(move_s=None)  # type: ignore[arg-type]


def test_memory_is_reached_directly_when_every_tier_does(memory: BlockMemory) -> None:
    class Both(DictBackend):
        memory_kinds = frozenset({"cpu", "cuda"})

    namespace = memory.namespace()
    both, only_host = Both(None, namespace), open_dict(namespace)
    assert TieredBackend([both, both], namespace).memory_kinds == {"cpu", "cuda"}
    assert TieredBackend([both, only_host], namespace).memory_kinds == {"cpu"}


async def test_a_block_or_key_that_the_namespace_does_not_know_is_refused(
    memory: BlockMemory,
) -> None:
    larger = BlockMemory([[1000]], num_blocks=8)
    namespace = memory.namespace()
    async with TieredBackend([open_dict(namespace), open_dict(namespace)], namespace) as backend:
        with pytest.raises(InvalidArgumentError, match="1000"):
            await backend.store(KEYS[:1], larger.describe(0, [0]))
        with pytest.raises(InvalidArgumentError, match="group"):
            await backend.lookup([make_block_key(b"block", 1)])


async def test_a_wish_that_a_tier_fails_to_note_reaches_the_next(
    memory: BlockMemory, caplog: pytest.LogCaptureFixture
) -> None:
    class Wishing(DictBackend):
        wishes: tuple[BlockKey, ...] = ()

        def retain(self, keys: Sequence[BlockKey], retention: Retention) -> None:
            if self is first:
                raise RuntimeError("no wishes today")
            self.wishes += tuple(keys)

        def retentions(self, keys: Sequence[BlockKey]) -> list[Retention]:
            return [Retention()] * len(keys)

    namespace = memory.namespace()
    first, lower = Wishing(None, namespace), Wishing(None, namespace)
    async with TieredBackend([first, lower], namespace) as backend:
        backend.retain(KEYS[:2], Retention(priority=1))
    assert lower.wishes == tuple(KEYS[:2])
    assert "the wish for 2 blocks cannot be noted" in caplog.text
