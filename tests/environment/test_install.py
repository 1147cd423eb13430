"""The set-up: which torch is taken, and what is said of a machine that cannot have it."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.environment import install

TAG = "cp{}{}".format(*sys.version_info)
CUDA = [["torch==2.13.0"], ["-r", str(install.CUDA_LIBRARIES)]]

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def venv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("environment") / "venv"
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    return folder


@pytest.fixture(autouse=True)
def _machine_without_gpu_and_indexes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(install, "has_gpu", lambda: False)
    monkeypatch.setattr(install, "CPU_INDEX", "http://127.0.0.1:9")  # discard: nobody listens
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nothing"))
    (tmp_path / "constraints").write_text("torch<=2.14.1\n")
    monkeypatch.setenv("PIP_CONSTRAINT", str(tmp_path / "constraints"))


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a folder in which pip finds a wheel for this Python."""
    info = "torch-2.13.0+cpu.dist-info"
    with zipfile.ZipFile(tmp_path / f"torch-2.13.0+cpu-{TAG}-none-any.whl", "w") as wheel:
        named = "Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0+cpu\n"
        wheel.writestr(f"{info}/METADATA", named)
        wheel.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nTag: {TAG}-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))


@pytest.mark.usefixtures("wheels")
def test_torch_comes_from_where_pip_is_told_to_look_unless_there_is_a_gpu(
    venv: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert install.find_torch(venv) == [["torch==2.13.0+cpu"]]
    monkeypatch.setattr(install, "has_gpu", lambda: True)
    assert install.find_torch(venv) == CUDA


def test_else_it_is_the_build_for_cuda_with_its_libraries_and_its_size_is_said(
    venv: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert install.find_torch(venv) == CUDA
    (line,) = capsys.readouterr().out.splitlines()
    assert install.CPU_INDEX in line
    assert install.CUDA_DOWNLOAD in line


def test_libraries_of_cuda_are_installed_once() -> None:
    shared = {name for name, _ in install.parse_pins(install.CUDA_LIBRARIES.read_text())} & {
        pin.partition("==")[0] for pin in install.read_pins("all")
    }
    libraries, *shares = install.shares_of(install.read_pins("all"), CUDA)[1:]
    assert shared
    assert libraries == CUDA[1]
    assert not shared & {pin.partition("==")[0] for share in shares for pin in share}


def test_what_a_machine_lacks_is_named_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ((3, 10, 12), (3, 14, 0)):
        monkeypatch.setattr(sys, "version_info", version)
        told = r"is Python {}\.{}\.{}.*make PYTHON=".format(*version)
        with pytest.raises(install.CannotInstallError, match=told):
            install.require_python()
    monkeypatch.setattr(install, "has_library", lambda _: False)
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(install.CannotInstallError, match="sudo apt-get install libnuma1"):
        install.provide_libnuma()
