"""Peers below vLLM: the lower tier listens from the start, and finds their blocks."""

import asyncio
import contextlib
import functools
import time
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

import numpy as np
import pytest

from kvxfer.backends.nixl import NixlBackend, NixlConfig, StandalonePeer
from kvxfer.connect import open_backend
from kvxfer.endpoint import free_ports
from kvxfer.errors import BackendUnavailableError, ClosedError, UnsupportedEngineError
from kvxfer.runtime import LoopThread
from kvxfer.storage.keys import GroupIdentity, Namespace
from kvxfer.units import ByteSize

pytest.importorskip("vllm.v1.kv_offload.tiering.manager", reason="needs vLLM")

from kvxfer.integrations.vllm.offloading import interface
from kvxfer.integrations.vllm.offloading.lower_tier import LowerTier
from tests.integrations.test_vllm_tier import HIT, MISS, NUM_CHUNKS, ROW_BYTES, Tiers, keys_of

T = TypeVar("T")

LIMIT_S = 10.0
NAMESPACE = Namespace(model="model", groups=(GroupIdentity(page_sizes_bytes=(ROW_BYTES,)),))
LISTENING = NixlConfig(listen="127.0.0.1:0", capacity=ByteSize(1 << 20), transport="socket")


class PeerThread:
    """Stand-alone peer with an event loop of its own."""

    def __init__(self) -> None:
        self._thread = LoopThread("peer")
        opened = functools.partial(open_backend, "host://?capacity=1MiB")
        self.peer = StandalonePeer(LISTENING, opened)
        self._run(self.peer.start())

    def end(self) -> None:
        self._run(self.peer.aclose())

    def stop(self) -> None:
        self.end()
        self._thread.stop()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._thread.loop).result(LIMIT_S)


@pytest.fixture
def peer() -> Iterator[PeerThread]:
    peer = PeerThread()
    yield peer
    peer.stop()


def require_tiering() -> None:
    try:
        interface.require_tiering()
    except UnsupportedEngineError as exc:
        pytest.skip(str(exc))


def make_rows() -> np.ndarray:
    return np.zeros((NUM_CHUNKS, ROW_BYTES), np.uint8)


def test_an_engine_whose_lower_tier_cannot_listen_does_not_start(peer: PeerThread) -> None:
    taken = str(peer.peer.endpoint)
    config = NixlConfig(listen=taken, capacity=ByteSize(1 << 20), transport="socket")
    backend = NixlBackend(config, NAMESPACE)
    with pytest.raises(BackendUnavailableError, match=f"cannot listen at {taken}"):
        LowerTier(make_rows(), 1, backend)
    with pytest.raises(ClosedError):
        asyncio.run(backend.lookup(keys_of(1)))


def test_replicas_of_an_engine_listen_one_after_the_other() -> None:
    require_tiering()
    port, keys = free_ports(2), keys_of(2)
    with contextlib.ExitStack() as stack:

        def start(url: str, replica: int = 0) -> Tiers:
            tiers = Tiers(f"kvxfer-test-{time.time_ns()}", url, replica=replica)
            stack.callback(tiers.manager.shutdown)
            return tiers

        for replica, key in enumerate(keys):
            url = f"nixl://?listen=127.0.0.1:{port}&capacity=1MiB&transport=socket"
            start(url, replica).store([key])
        for at, key in enumerate(keys):
            found = start(f"nixl://127.0.0.1:{port + at}?transport=socket").resolve(keys)
            assert found == [HIT if each == key else MISS for each in keys]
