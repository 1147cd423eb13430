"""Distributions: the wheel and the sdist hold all files that they should, and no others."""

import os
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BACKEND_FILES = {path.relative_to(ROOT).as_posix() for path in (ROOT / "backends").rglob("*.py")}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command that sees no source of this repository; return what it prints."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert not result.returncode, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the source distribution and, from it, the wheel; return their folder."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    return folder


@pytest.fixture(scope="module")
def clean_python(distributions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a Python with the wheel installed, which sees the dependencies but not the checkout.

    The packages of this environment are put at the end of its path as a plain folder, whose .pth
    files - the editable install of the checkout is one - are not read.
    """
    folder = tmp_path_factory.mktemp("clean")
    venv.create(folder, symlinks=True, with_pip=False)
    python = folder / "bin" / "python"
    (site_packages,) = folder.glob("lib/python*/site-packages")
    (wheel,) = distributions.glob("*.whl")
    install = ["-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index"]
    run(sys.executable, *install, wheel, cwd=folder)
    (site_packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def test_the_wheel_holds_every_backend_once_and_no_top_level_package(distributions: Path) -> None:
    (wheel,) = distributions.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert len(names) == len(set(names))
    assert {name.removeprefix("kvxfer/") for name in names} >= BACKEND_FILES
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"kvxfer"}
    assert "kvxfer/py.typed" in names


def test_the_source_distribution_holds_every_backend_exactly_once(distributions: Path) -> None:
    (sdist,) = distributions.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = archive.getnames()
    for file in BACKEND_FILES:
        assert [name.split("/", 1)[1] for name in names if name.endswith(f"/{file}")] == [
            f"kvxfer/{file}"
        ]


def test_every_backend_is_imported_from_the_installed_wheel(clean_python: Path) -> None:
    modules = [
        "kvxfer." + file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for file in sorted(BACKEND_FILES)
    ]
    code = f"import importlib\nfor m in {modules}: print(importlib.import_module(m).__file__)"
    files = run(clean_python, "-c", code, cwd=clean_python.parent).splitlines()
    assert len(files) == len(modules)
    assert all(file.startswith(str(clean_python.parents[1])) for file in files), files


def test_every_entry_point_loads_from_the_installed_wheel(clean_python: Path) -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    code = (
        "import importlib.metadata as metadata\n"
        "for point in metadata.distribution('kvxfer').entry_points:\n"
        "    if point.group == 'kvxfer.backends': print(point.name, point.load().__name__)"
    )
    loaded = run(clean_python, "-c", code, cwd=clean_python.parent).split("\n")
    expected = {
        f"{name} {value.split(':')[1]}" for name, value in declared["kvxfer.backends"].items()
    }
    assert set(filter(None, loaded)) == expected


def test_no_module_named_backends_is_installed(clean_python: Path) -> None:
    code = "import importlib.util; print(importlib.util.find_spec('backends'))"
    assert run(clean_python, "-c", code, cwd=clean_python.parent).strip() == "None"


def test_the_command_line_says_its_version(clean_python: Path) -> None:
    version = run(clean_python.parent / "kvxfer", "--version", cwd=clean_python.parent)
    assert version.startswith("kvxfer 0.")
