"""A GPU for every test in this folder: the simulated one.

The simulated driver is what every library of the process finds under the name of the real one, so
these tests run in a process of their own: `make test` starts one.
"""

import importlib
import sys
from collections.abc import Iterator

import pytest
import torch

from tests.cuda.simulated_gpu import Compute, EngineCaches, SimulatedGpu, build


@pytest.fixture(scope="session")
def simulated_gpu(tmp_path_factory: pytest.TempPathFactory) -> SimulatedGpu:
    if "nixl" in sys.modules:
        pytest.skip("UCX is in this process, and would find the simulated GPU: run them alone")
    if torch.version.cuda:
        pytest.skip("this torch may bring a real driver along; `pytest -m gpu` is for it")
    importlib.import_module("triton")  # takes a second, which a test's event loop must not
    return SimulatedGpu(build(tmp_path_factory.mktemp("driver")))


@pytest.fixture
def gpu(simulated_gpu: SimulatedGpu) -> Iterator[SimulatedGpu]:
    simulated_gpu.reset()
    yield simulated_gpu
    simulated_gpu.reset()


@pytest.fixture
def compute(gpu: SimulatedGpu, monkeypatch: pytest.MonkeyPatch) -> Iterator[Compute]:
    compute = Compute()
    monkeypatch.setattr(torch.cuda, "current_stream", compute.current_stream)
    yield compute
    compute.close()


@pytest.fixture
def engine_caches(gpu: SimulatedGpu, compute: Compute) -> EngineCaches:
    return EngineCaches(gpu)
