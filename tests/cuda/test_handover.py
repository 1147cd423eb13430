"""Hand-over between caches on a GPU: directly if NIXL reaches them, else through host memory."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from kvxfer.backends.nixl import Endpoint, NixlConfig, local_node
from kvxfer.copy_engine.copy_stream import ComputeStream
from kvxfer.errors import BackendUnavailableError, DeviceUnavailableError
from kvxfer.kvcache import WorkerShard
from kvxfer.kvcache.memory_region import HOST, MemoryRegion
from kvxfer.kvcache.portable import describe_caches
from kvxfer.lending import Fetched
from kvxfer.lending.handover import Handover
from kvxfer.storage import Namespace, PromptKeys
from kvxfer.storage.leases import CacheLender
from kvxfer.testing import FakeNixlAgent
from tests.cuda.simulated_gpu import Compute, EngineCaches, SimulatedGpu

TOKENS = list(range(200))
"""A prompt of twelve blocks and a half."""

THEIRS, OURS = [*range(13)], [*range(30, 43)]
LIMIT_S = 30.0
BLIND = "without CUDA"
STRAIGHT, THROUGH_HOST = "go straight", "pass through host memory"


class BlindAgent(FakeNixlAgent):
    """Agent of a NIXL without CUDA."""

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        for region in regions:
            if region.device != HOST:
                raise DeviceUnavailableError(region.device.index, f"NIXL is {BLIND}")
        super().register(regions)


@pytest.fixture
def stack(gpu: SimulatedGpu) -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


class Side:
    """Engine on a GPU: its caches, and its hand-over."""

    def __init__(
        self,
        stack: ExitStack,
        gpu: SimulatedGpu,
        *,
        agent: Any,
        device_index: int = 0,
        **config: Any,
    ) -> None:
        self.caches = EngineCaches(gpu, device_index=device_index)
        self.before = self.caches.blocks
        description = describe_caches(self.caches.caches, WorkerShard(num_kv_heads=4))
        self.handover = Handover(
            NixlConfig(**config),
            Namespace(model="model"),
            description,
            self.caches.caches,
            make_agent=agent,
        )
        stack.callback(self.handover.close)
        self.handover.start()

    def get(self, call: Any) -> Any:
        return self.handover.submit(call).result(LIMIT_S)


def start_pair(
    stack: ExitStack, gpu: SimulatedGpu, agent: Callable[[], FakeNixlAgent], **config: Any
) -> tuple[Side, Side]:
    prefill = Side(stack, gpu, agent=agent, listen="127.0.0.1:0", **config)
    decode = Side(stack, gpu, agent=agent, **config)
    for row, each in enumerate((prefill, decode)):
        for tensor in each.caches.tensors.values():
            gpu.write(tensor.data_ptr(), bytes([row + 1]) * 7)
        each.before = each.caches.blocks
    return prefill, decode


def hand_over(prefill: Side, decode: Side) -> Fetched:
    keys = PromptKeys(TOKENS)
    prefill.handover.offer("ticket", keys.block_keys(0, 16, len(TOKENS)), THEIRS)
    at, reader = Endpoint("127.0.0.1", prefill.handover.port), decode.handover.reader
    found = decode.get(reader.ask(at, "ticket", keys, [None]))
    assert found.num_tokens == len(TOKENS)
    fetched = decode.get(reader.fetch(at, found.wanted(keys, 0, len(TOKENS), [OURS])))
    assert isinstance(fetched, Fetched)
    return fetched


@pytest.mark.parametrize(
    ("has_card", "agent", "config", "way", "why"),
    [
        (True, FakeNixlAgent, {}, STRAIGHT, ""),
        (True, FakeNixlAgent, {"integrity": "fenced"}, STRAIGHT, ""),
        (True, BlindAgent, {}, THROUGH_HOST, BLIND),
        (True, BlindAgent, {"transport": "nixl"}, THROUGH_HOST, BLIND),
        (True, BlindAgent, {"integrity": "full"}, THROUGH_HOST, "integrity=full"),
        (True, BlindAgent, {"transport": "socket"}, THROUGH_HOST, "transport=socket"),
        # Even registered memory may be out of reach: on an H100, no bytes arrived.
        (False, FakeNixlAgent, {}, THROUGH_HOST, "no network card"),
        (False, FakeNixlAgent, {"transport": "nixl", "integrity": "fenced"}, STRAIGHT, ""),
    ],
)
def test_blocks_go_straight_unless_told_otherwise_where_nixl_reaches_them(
    stack: ExitStack,
    gpu: SimulatedGpu,
    compute: Compute,
    monkeypatch: pytest.MonkeyPatch,
    *,
    has_card: bool,
    agent: type[FakeNixlAgent],
    config: dict[str, Any],
    way: str,
    why: str,
) -> None:
    monkeypatch.setattr(local_node, "has_active_port", lambda: has_card)
    prefill, decode = start_pair(stack, gpu, agent, **config)
    for side in (prefill, decode):
        assert side.handover.way.startswith(f"blocks on cuda:0 {way}")
        assert why in side.handover.way
    fetched = hand_over(prefill, decode)
    assert fetched.bad_blocks == [[]]
    assert fetched.num_verified == len(THEIRS)
    expected = decode.before.copy()
    expected[:, OURS] = prefill.before[:, THEIRS]
    assert np.array_equal(decode.caches.blocks, expected)


def test_a_nixl_that_is_demanded_for_a_gpu_and_cannot_is_refused_by_name(
    stack: ExitStack, gpu: SimulatedGpu, compute: Compute
) -> None:
    with pytest.raises(BackendUnavailableError, match=f"cuda:0.*{BLIND}"):
        start_pair(stack, gpu, BlindAgent, transport="nixl", integrity="fenced")


def test_what_the_engine_computes_meanwhile_is_over_before_blocks_are_written(
    stack: ExitStack, gpu: SimulatedGpu, compute: Compute
) -> None:
    """Kernels of a request whose blocks are reused may still be running."""
    prefill, decode = start_pair(stack, gpu, FakeNixlAgent)
    tensor = next(iter(decode.caches.tensors.values()))
    size = tensor.nbytes // len(tensor)
    at = tensor.data_ptr()
    gpu.set("delay_us", 1000)
    compute.copy(at + OURS[0] * size, at, size, times=1000)
    fetched = hand_over(prefill, decode)
    computed = ComputeStream(compute.driver, torch.device("cuda", 0)).mark()
    while not computed.has_passed():
        pass
    assert fetched.bad_blocks == [[]]
    assert np.array_equal(decode.caches.blocks[:, OURS], prefill.before[:, THEIRS])


@pytest.mark.parametrize("lost", [0, 1])
def test_blocks_that_the_device_does_not_copy_are_bad(
    stack: ExitStack, gpu: SimulatedGpu, monkeypatch: pytest.MonkeyPatch, lost: int
) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Mock(cuda_stream=0))
    config: dict[str, Any] = {"transport": "socket"}
    prefill = Side(stack, gpu, agent=BlindAgent, listen="127.0.0.1:0", **config)
    decode = Side(stack, gpu, agent=BlindAgent, device_index=1, **config)
    lend = CacheLender.lend

    def lose(*args: Any, **how: Any) -> Any:
        gpu.set("lost", lost)  # P copies afterwards, and then D
        return lend(*args, **how)

    monkeypatch.setattr(CacheLender, "lend", lose)
    fetched = hand_over(prefill, decode)
    assert fetched.bad_blocks == [OURS]
    assert f"cuda:{lost}" in fetched.reason
