"""CudaCopyEngine on a GPU: the tests that the simulated GPU of `tests/cuda` must pass, too."""

from collections.abc import Iterator

import pytest

from tests.cuda.copies import CopyContract
from tests.cuda.gpu import Gpu


@pytest.mark.gpu
class TestGpu(CopyContract):
    @pytest.fixture
    def gpu(self) -> Iterator[Gpu]:
        gpu = Gpu()
        yield gpu
        gpu.release()
