"""The conformance suite of backends: everything the docstring of `Backend` promises."""

import pytest

from kvxfer.testing.conformance.contention import ContentionTests
from kvxfer.testing.conformance.medium import MediumTests
from kvxfer.testing.conformance.moving import MovingTests
from kvxfer.testing.conformance.seeing import SeeingTests


@pytest.mark.asyncio
class BackendTests(MovingTests, SeeingTests, ContentionTests, MediumTests):
    """Tests that every backend passes; subclass it as `TestMyBackend` and say how to open one.

    What to override is in `kvxfer.testing.conformance.suite.BackendSuite`. A new instance is made
    for every test: an autouse fixture may set attributes, such as a temporary folder, that
    `make_backend` reads.

    Examples:
        class TestMyBackend(BackendTests):
            async def make_backend(self, namespace: Namespace) -> Backend:
                return MyBackend(MyConfig(), namespace)
    """
