"""Conformance suite of backends: tests of everything that the docstring of `Backend` promises."""

import pytest

from kvxfer.testing.conformance.contention import ContentionTests
from kvxfer.testing.conformance.medium import MediumTests
from kvxfer.testing.conformance.moving import StoreLoadTests
from kvxfer.testing.conformance.seeing import VisibilityTests


@pytest.mark.asyncio
class BackendTests(StoreLoadTests, VisibilityTests, ContentionTests, MediumTests):
    """Tests that every backend must pass; subclass them as `TestMyBackend` with `make_backend`.

    `kvxfer.testing.conformance.suite.BackendSuite` lists what can be overridden. Every test has
    an instance of its own: an autouse fixture may set attributes, such as a temporary folder, for
    `make_backend`.

    Examples:
        ```python
        class TestMyBackend(BackendTests):
            async def make_backend(self, namespace: Namespace) -> Backend:
                return MyBackend(MyConfig(), namespace)
        ```
    """
