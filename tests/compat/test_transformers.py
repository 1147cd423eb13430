"""`make compat`: the prefix cache's own tests, against other releases of transformers."""

import os

import pytest

from tests.installed_aside import REPOSITORY, count_passed, install_aside, run_aside

pytestmark = [pytest.mark.compat, pytest.mark.timeout(900)]

OTHERS = {"5.16.0": ["huggingface_hub>=1.5,<2"], "5.24.0": []}
"""Releases, and what each needs of another release than the tests."""

TESTS = "tests/integrations/test_transformers.py"


@pytest.mark.parametrize("release", OTHERS)
def test_prefixes_with_a_release(release: str) -> None:
    folder = REPOSITORY / "build" / "transformers" / release
    install_aside(folder, f"transformers=={release}", *OTHERS[release])
    environment = os.environ | {"PYTHONPATH": str(folder)}
    printed = run_aside(environment, "-c", "import transformers; print(transformers.__version__)")
    assert printed.strip() == release
    assert count_passed(environment, "--timeout=120", TESTS) > 60
