"""The NIXL backend keeps every promise of `Backend`, with holders in another process."""

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis.stateful import run_state_machine_as_test

from kvxfer.storage import Backend, BlockKey, Namespace
from kvxfer.testing import BackendStateMachine, BackendTests
from tests.backends.nixl_holders import HolderProcess, OpenHolder, open_client
from tests.backends.test_host import capacity_for
from tests.examples import examples

WAYS: dict[str, dict[str, Any]] = {
    "socket": {"transport": "socket"},
    "nixl": {"transport": "nixl"},
    "socket-fenced": {"transport": "socket", "integrity": "fenced"},
    "nixl-fenced": {"transport": "nixl", "integrity": "fenced"},
}


@pytest.fixture(scope="module")
def process() -> Iterator[HolderProcess]:
    process = HolderProcess()
    yield process
    assert process.close() == 0


@pytest.mark.processes
class TestNixlBackend(BackendTests):
    persistent = True
    max_blocks = 5

    @pytest.fixture(autouse=True, params=WAYS)
    def _holders(self, request: pytest.FixtureRequest, process: HolderProcess) -> Iterator[None]:
        self.process, self.fields = process, WAYS[request.param]
        self.holders: dict[tuple[str, int], OpenHolder] = {}
        yield
        for holder in self.holders.values():
            holder.close()

    async def make_backend(self, namespace: Namespace) -> Backend:
        return self._open(namespace, 64)

    async def make_bounded_backend(self, namespace: Namespace) -> Backend:
        return self._open(namespace, 5)

    async def corrupt(self, backend: Backend, key: BlockKey) -> None:
        if "integrity" in self.fields:
            pytest.skip("no generation tells of a bit that flips: see test_nixl_blocks.py")
        [holder] = self.holders.values()
        holder.corrupt(key)

    def _open(self, namespace: Namespace, num_blocks: int) -> Backend:
        place = namespace.fingerprint, num_blocks
        if place not in self.holders:
            capacity = int(capacity_for(namespace, num_blocks))
            self.holders[place] = self.process.open(namespace, capacity=capacity)
        return open_client(namespace, self.holders[place], **self.fields)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_random_sequences_of_calls_agree_with_a_dictionary(
    process: HolderProcess, way: str
) -> None:
    class Machine(BackendStateMachine):
        async def make_backend(self, namespace: Namespace) -> Backend:
            self.holder = process.open(namespace, capacity=int(capacity_for(namespace, 12)))
            return open_client(namespace, self.holder, **WAYS[way])

        def teardown(self) -> None:
            super().teardown()
            self.holder.close()

    run_state_machine_as_test(Machine, settings=examples(10, steps=20))
