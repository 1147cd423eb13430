"""`make compat`: the plug's own tests, against other releases of SGLang."""

import re
import subprocess
import sys

import pytest

from tests.sglang.releases import OTHERS, REPOSITORY, environment, install

pytestmark = [pytest.mark.compat, pytest.mark.timeout(3600)]


def run_tests(release: str, *arguments: str) -> int:
    """Run the plug's tests with a release; return how many of them passed."""
    install(release)
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *arguments, "tests/sglang"],
        cwd=REPOSITORY,
        env=environment(release),
        capture_output=True,
        text=True,
        check=False,
    )
    assert not ended.returncode, ended.stdout + ended.stderr
    passed = re.search(r"(\d+) passed", ended.stdout)
    return int(passed.group(1)) if passed else 0


@pytest.mark.parametrize("release", OTHERS)
def test_pages_of_the_host_pools_of_a_release(release: str) -> None:
    assert run_tests(release, "--timeout=120", "-m", "not e2e") > 50


@pytest.mark.parametrize("release", OTHERS)
def test_an_engine_of_a_release_answers_from_the_store(release: str) -> None:
    assert run_tests(release, "-m", "e2e and not exhaustive") == 1
