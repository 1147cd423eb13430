"""`make bench NAME=copy` on a GPU measures what it says; its figures mean nothing on this one."""

from functools import partial

import pytest

from benchmarks import copy_cuda
from kvxfer.copy_engine import devices
from kvxfer.copy_engine.calibration import measure_methods
from kvxfer.copy_engine.cuda_driver import CudaDriver
from tests.cuda.simulated_gpu import SimulatedGpu
from tests.cuda.test_cuda import KernelOfTheDriver

COUNTS = ("num_contexts", "num_live_streams", "num_live_events", "registered_bytes")


@pytest.mark.parametrize("has_kernel", [False, True])
def test_every_goal_of_the_gpu_has_a_row(
    gpu: SimulatedGpu, monkeypatch: pytest.MonkeyPatch, *, has_kernel: bool
) -> None:
    before = [gpu.get(name) for name in COUNTS]
    kernel = KernelOfTheDriver(CudaDriver(0))
    for module in (devices, copy_cuda):
        monkeypatch.setattr(module, "open_kernel", lambda device: kernel if has_kernel else None)
        monkeypatch.setattr(
            module, "measure_methods", partial(measure_methods, sample_bytes=1 << 20)
        )
    rows = copy_cuda.run(quick=True, num_bytes=2 << 20, max_fragments=1000)
    kernel.close()
    goals = {row.case: row.goal for row in rows if row.goal}
    for direction in ("to device", "to host"):
        for size, goal in ((4, ">= 0.7"), (16, ">= 0.85"), (64, ">= 0.95"), (2048, ">= 0.98")):
            (found,) = (
                goals[case]
                for case in goals
                if case.startswith(f"{direction}, scattered, {size} KiB, by ")
            )
            assert found == goal
    assert goals["both directions at once"] == ">= 1.6"
    assert sum("budget" in case for case in goals) == 2
    cases = [row.case for row in rows]
    for part in ("kernel against batch", "calibration, which finds to_device="):
        assert any(part in case for case in cases) == has_kernel
    assert sum("waited for against looked at" in case for case in cases) == 2
    assert [gpu.get(name) for name in COUNTS] == before
