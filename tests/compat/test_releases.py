"""`make compat`: the tests of the plugs, against other releases of the engines."""

import os
from pathlib import Path

import pytest

from tests.compat.releases import RELEASES, TRANSFORMERS, Release
from tests.e2e.prefill_decode.deployment import Deployment, Shape
from tests.e2e.prefill_decode.engines import EngineShape
from tests.e2e.prefill_decode.plan import run_one
from tests.installed_aside import count_passed, install_aside, run_aside
from tests.interpreter import REPOSITORY
from tests.sglang import releases as sglang

pytestmark = [pytest.mark.compat, pytest.mark.timeout(1800)]

ENGINES = ["gemma3-one-1-1", "llama-several-2-2"]
"""End-to-end cases: six groups in one process; two workers in processes, two blocks a chunk."""

WITH_SCHEDULER = [
    "tests/integrations/test_prefill_decode_scheduler.py",
    "tests/integrations/test_vllm_explain.py",
]
"""Tests with vLLM's own scheduler, whose configuration needs compiled code."""


@pytest.fixture
def release(request: pytest.FixtureRequest) -> Release:
    installed: Release = request.param
    installed.install()
    return installed


def of(*releases: Release) -> pytest.MarkDecorator:
    """Mark a test of releases."""
    return pytest.mark.parametrize("release", releases, ids=lambda each: each.number, indirect=True)


all_releases = of(*RELEASES)
with_spec = of(*(each for each in RELEASES if each.has_spec))
without_spec = of(*(each for each in RELEASES if not each.has_spec))
with_engine = of(*(each for each in RELEASES if each.has_engine))
"""An engine runs with the torch that is installed."""


def run_tests(release: Release, *arguments: str) -> int:
    """Run tests with this release; return how many of them passed."""
    return count_passed(release.environment, "--timeout=120", *arguments)


@all_releases
def test_a_process_finds_this_release_first(release: Release) -> None:
    code = "import vllm; print('found', vllm.__version__)"
    assert f"found {release.number}" in run_aside(release.environment, "-c", code)


@with_spec
def test_the_contract_holds_with_the_interface_of_a_release(release: Release) -> None:
    engines = [] if release.has_engine else [f"--ignore={each}" for each in WITH_SCHEDULER]
    assert run_tests(release, *engines, "tests/integrations") > 50


@with_spec
def test_connectors_are_known_by_name(release: Release) -> None:
    printed = run_aside(
        release.environment,
        "-c",
        "from vllm.plugins import load_general_plugins as load\n"
        "load()\n"
        "from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory\n"
        "for name in ('KVXferOffload', 'KVXferConnector'):\n"
        "    print('found', KVConnectorFactory.get_connector_class_by_name(name).__name__)",
    )
    assert "found KVXferOffload\nfound KVXferConnector\n" in printed


@with_engine
def test_an_engine_is_configured_by_the_environment_alone(release: Release) -> None:
    assert run_tests(release, "-m", "e2e", "-k", "one-process", "tests/e2e/test_settings.py") == 1


@without_spec
@pytest.mark.parametrize("name", ["KVXferOffloadingSpec", "KVXferOffload", "KVXferTier"])
def test_a_release_with_another_interface_is_refused_by_name(release: Release, name: str) -> None:
    with pytest.raises(AssertionError) as failed:
        run_aside(release.environment, "-c", f"from kvxfer.integrations.vllm import {name}")
    assert f"UnsupportedEngineError: vllm {release.number} is not supported" in str(failed.value)
    assert "supported: 0.26 to 0.33" in str(failed.value)


@all_releases
def test_every_hook_of_a_release_shows_the_bytes_that_vllm_moves(release: Release) -> None:
    assert run_tests(release, "tests/integrations/test_vllm_connector.py") >= 10


@all_releases
def test_an_engine_runs_where_its_torch_is_installed(release: Release) -> None:
    assert release.has_engine is release.wants_installed_torch()


@with_engine
@pytest.mark.parametrize("engine", ENGINES)
def test_what_an_engine_offloaded_comes_back(release: Release, engine: str) -> None:
    assert run_tests(release, "-m", "e2e", "-k", engine, "tests/e2e/test_models.py") == 1


@with_engine
@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_prompts_are_handed_over_between_engines_of_two_releases(
    release: Release, side: str, tmp_path: Path
) -> None:
    other = [EngineShape(release_folder=str(release.folder))]
    shape = Shape(prefills=other) if side == "prefill" else Shape(decodes=other)
    async with Deployment("kvxfer", shape, tmp_path) as engines:
        result = await run_one(engines, f"{side} {release.number}", "basic")
    assert not result.failure
    assert result.note.startswith("D computed 10, "), "the last token of each prompt, and no other"


@pytest.mark.parametrize("release", TRANSFORMERS)
def test_prefixes_with_a_release_of_transformers(release: str) -> None:
    folder = REPOSITORY / "build" / "transformers" / release
    install_aside(folder, f"transformers=={release}", *TRANSFORMERS[release])
    environment = os.environ | {"PYTHONPATH": str(folder)}
    printed = run_aside(environment, "-c", "import transformers; print(transformers.__version__)")
    assert printed.strip() == release
    assert (
        count_passed(environment, "--timeout=120", "tests/integrations/test_transformers.py") > 60
    )


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("release", sglang.OTHERS)
def test_the_plug_of_sglang_and_its_engine_with_a_release(release: str) -> None:
    sglang.install(release)
    environment = sglang.environment(release)
    engine = ("-m", "e2e and not exhaustive", "tests/sglang")
    assert count_passed(environment, "--timeout=120", "-m", "not e2e", "tests/sglang") > 50
    assert count_passed(environment, *engine) == 1
