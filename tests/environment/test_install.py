"""The set-up: which torch is taken, and what is said of a machine that cannot have it."""

import functools
import http.server
import os
import socket
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.environment import install

TAG = "cp{}{}".format(*sys.version_info)
TORCH = f"torch-2.13.0+cpu-{TAG}-none-any.whl"
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
def wheels(tmp_path: Path) -> Path:
    """Make a folder of the form of PyTorch's index, with a wheel for this Python."""
    folder = tmp_path / "whl" / "torch"
    folder.mkdir(parents=True)
    info = "torch-2.13.0+cpu.dist-info"
    with zipfile.ZipFile(folder / TORCH, "w") as wheel:
        wheel.writestr("torch.py", "")
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0+cpu\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {TAG}-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    name = TORCH.replace("+", "%2B")
    (folder / "index.html").write_text(f'<!DOCTYPE html><a href="{name}">{TORCH}</a>')
    return folder


@pytest.fixture
def index(wheels: Path) -> Iterator[str]:
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=wheels.parent)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_torch_comes_from_where_pip_is_told_to_look(
    venv: Path, wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    assert install.find_torch(venv) == [["torch==2.13.0+cpu"]]


@pytest.mark.parametrize("index_hangs", [False, True])
def test_else_it_is_the_build_for_cuda_with_its_libraries_and_its_size_is_said(
    venv: Path,
    index_hangs: bool,  # noqa: FBT001 - a case of pytest
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        if index_hangs:
            monkeypatch.setattr(install, "CPU_INDEX", f"http://127.0.0.1:{deaf.getsockname()[1]}")
            monkeypatch.setattr(install, "INDEX_TIMEOUT_S", 0.1)
        assert install.find_torch(venv) == CUDA
    (line,) = capsys.readouterr().out.splitlines()
    assert install.CPU_INDEX in line
    assert install.CUDA_DOWNLOAD in line


def test_a_machine_with_a_gpu_gets_the_build_for_cuda_whatever_there_is(
    venv: Path, wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setattr(install, "has_gpu", lambda: True)
    assert install.find_torch(venv) == CUDA


def test_libraries_of_cuda_are_installed_once() -> None:
    shared = {name for name, _ in install.parse_pins(install.CUDA_LIBRARIES.read_text())} & {
        pin.partition("==")[0] for pin in install.read_pins("all")
    }
    libraries, *shares = install.shares_of(install.read_pins("all"), CUDA)[1:]
    assert shared
    assert libraries == CUDA[1]
    assert not shared & {pin.partition("==")[0] for share in shares for pin in share}


@pytest.mark.parametrize("version", [(3, 10, 12), (3, 14, 0)])
def test_a_python_for_which_there_are_no_wheels_is_refused_by_name(
    version: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "version_info", version)
    with pytest.raises(install.CannotInstallError) as caught:
        install.require_python()
    assert "is Python {}.{}.{}".format(*version) in str(caught.value)
    assert "make PYTHON=" in str(caught.value)


def test_libnuma_that_may_not_be_installed_is_named_with_the_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(install, "has_library", lambda _: False)
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(install.CannotInstallError, match="sudo apt-get install libnuma1"):
        install.provide_libnuma()
