"""DictBackend: the reference model passes the conformance suite itself."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.storage.backend import DONE, MISSING, Backend, Outcome
from kvxfer.storage.keys import BlockKey, Namespace
from kvxfer.testing import BackendStateMachine, BackendTests, DictBackend, DictConfig
from kvxfer.testing.payloads import read_payloads, write_payloads
from tests.examples import examples

Blocks = dict[BlockKey, Any]


class TestDictBackend(BackendTests):
    max_blocks = 5

    async def make_backend(self, namespace: Namespace) -> Backend:
        return DictBackend(None, namespace)

    async def make_bounded_backend(self, namespace: Namespace) -> Backend:
        return DictBackend(DictConfig(max_blocks=self.max_blocks), namespace)

    async def corrupt(self, backend: Backend, key: BlockKey) -> None:
        assert isinstance(backend, DictBackend)
        backend.corrupt(key)


class KeptBackend(DictBackend):
    """DictBackend that keeps the blocks of a namespace when it is closed."""

    def __init__(self, shelf: dict[str, Blocks], namespace: Namespace) -> None:
        super().__init__(None, namespace)
        self._blocks = shelf.setdefault(namespace.fingerprint, {})

    async def aclose(self) -> None:
        self._blocks = {}
        await super().aclose()


class TestKeptBackend(TestDictBackend):
    persistent = True

    @pytest.fixture(autouse=True)
    def _empty_shelf(self) -> None:
        self.shelf: dict[str, Blocks] = {}

    async def make_backend(self, namespace: Namespace) -> Backend:
        return KeptBackend(self.shelf, namespace)


async def test_the_suite_catches_a_backend_that_says_it_persists_and_does_not() -> None:
    class Liar(TestDictBackend):
        persistent = True

    with pytest.raises(AssertionError):
        await Liar().test_stored_blocks_outlive_a_persistent_backend()


@dataclass
class Shelf:
    """Places for blocks, which are used again."""

    payloads: dict[int, bytes] = field(default_factory=dict)
    places: dict[BlockKey, int] = field(default_factory=dict)


class Remembering(DictBackend):
    """Faulty backend that loads what is by now at the place where a lookup found a block."""

    def __init__(self, shelf: Shelf, namespace: Namespace) -> None:
        super().__init__(None, namespace)
        self._shelf = shelf
        self._seen: dict[BlockKey, int] = {}

    async def lookup(self, keys: Sequence[BlockKey]) -> list[bool]:
        places = self._shelf.places
        self._seen |= {key: places[key] for key in keys if key in places}
        return [key in places for key in keys]

    async def store(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        places = self._shelf.places
        for key, payload in zip(keys, read_payloads(blocks), strict=True):
            if key not in places:
                places[key] = next(at for at in range(99) if at not in places.values())
                self._shelf.payloads[places[key]] = payload
        return [DONE] * len(keys)

    async def load(self, keys: Sequence[BlockKey], blocks: Descriptors) -> list[Outcome]:
        await asyncio.sleep(0)
        found = [self._seen.get(key, self._shelf.places.get(key)) for key in keys]
        for index, place in enumerate(found):
            if place is not None:
                write_payloads(blocks.select(index, index + 1), [self._shelf.payloads[place]])
        return [MISSING if place is None else DONE for place in found]

    async def delete(self, keys: Sequence[BlockKey]) -> list[bool]:
        return [self._shelf.places.pop(key, None) is not None for key in keys]


async def test_the_suite_catches_a_backend_that_takes_a_block_for_the_one_before() -> None:
    shelf = Shelf()

    class Late(TestDictBackend):
        persistent = True
        max_blocks = None  # type: ignore[assignment]

        async def make_backend(self, namespace: Namespace) -> Backend:
            return Remembering(shelf, namespace)

    with pytest.raises(AssertionError, match="is wrong"):
        await Late().test_a_block_that_another_user_replaces_is_never_loaded_as_the_one_before()


class DictMachine(BackendStateMachine):
    async def make_backend(self, namespace: Namespace) -> Backend:
        return DictBackend(None, namespace)


class BoundedDictMachine(BackendStateMachine):
    bounded = True

    async def make_backend(self, namespace: Namespace) -> Backend:
        return DictBackend(DictConfig(max_blocks=3), namespace)


TestDictMachine = DictMachine.TestCase
TestDictMachine.settings = examples(25, steps=25)
TestBoundedDictMachine = BoundedDictMachine.TestCase
TestBoundedDictMachine.settings = examples(25, steps=25)
