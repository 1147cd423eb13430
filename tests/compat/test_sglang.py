"""`make compat`: the plug's own tests, against other releases of SGLang."""

import pytest

from tests.installed_aside import count_passed
from tests.sglang.releases import OTHERS, environment, install

pytestmark = [pytest.mark.compat, pytest.mark.timeout(3600)]


def run_tests(release: str, *arguments: str) -> int:
    """Run the plug's tests with a release; return how many of them passed."""
    install(release)
    return count_passed(environment(release), *arguments, "tests/sglang")


@pytest.mark.parametrize("release", OTHERS)
def test_pages_of_the_host_pools_of_a_release(release: str) -> None:
    assert run_tests(release, "--timeout=120", "-m", "not e2e") > 50


@pytest.mark.parametrize("release", OTHERS)
def test_an_engine_of_a_release_answers_from_the_store(release: str) -> None:
    assert run_tests(release, "-m", "e2e and not exhaustive") == 1
