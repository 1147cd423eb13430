"""DictBackend: the reference model passes the conformance suite itself."""

from typing import Any

import pytest

from kvxfer.storage.backend import Backend
from kvxfer.storage.keys import BlockKey, Namespace
from kvxfer.testing import BackendStateMachine, BackendTests, DictBackend, DictConfig
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


class KeptMachine(BackendStateMachine):
    persistent = True

    def __init__(self) -> None:
        self.shelf: dict[str, Blocks] = {}
        super().__init__()

    async def make_backend(self, namespace: Namespace) -> Backend:
        return KeptBackend(self.shelf, namespace)


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
TestKeptMachine = KeptMachine.TestCase
TestKeptMachine.settings = examples(25, steps=25)
