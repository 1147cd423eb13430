"""Distributions: their content, and that they work when nothing else is installed.

`KVXFER_DIST` names the folder that they are built in, as `make release` does.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from kvxfer.cli import _COMMANDS
from tests import needs
from tests.environment import install

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
    named = os.environ.get("KVXFER_DIST")
    folder = (ROOT / named) if named else tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    return folder


@pytest.fixture(scope="module")
def version(distributions: Path) -> str:
    (wheel,) = distributions.glob("*.whl")
    return wheel.name.split("-")[1]


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


def test_both_are_of_one_version_and_an_index_can_show_them(
    distributions: Path, version: str
) -> None:
    files = sorted([*distributions.glob("*.whl"), *distributions.glob("*.tar.gz")])
    assert [file.name for file in files] == [
        f"kvxfer-{version}-py3-none-any.whl",
        f"kvxfer-{version}.tar.gz",
    ]
    run(sys.executable, "-m", "twine", "check", "--strict", *files, cwd=distributions)


NUM_TESTS_OF_A_BACKEND = 40
CORE = ("aiofiles", "msgspec", "nixl", "numpy", "torch", "tqdm", "xxhash")
SERVE = ("serve", "--listen", "127.0.0.1:0", "--capacity", "1MiB")
BARE_COMMANDS = {
    ("--version",): "",
    ("ls", "STORE"): "",
    ("fsck", "STORE"): "",
    ("gc", "STORE"): "",
    ("inspect", "STORE"): "",
    ("vllm-args", "host://?capacity=1GiB"): "",
    ("replay", "--synthetic", "rag,requests=50"): "",
    ("explain", "cmpl-1", "--journal", "STORE"): "files of a journal",
    ("doctor",): "",
    ("bench", "host://?capacity=128MiB", "--seconds", "0.01s"): "",
    ("doctor", "nixl://127.0.0.1:9", "pool://STORE/pool"): "",
    ("bench", "file://STORE?capacity=64MiB&integrity=keyed&secret_file=SECRET"): "kvxfer[keyed]",
    ("bench", "file://STORE?capacity=64MiB&integrity=sealed&secret_file=SECRET"): "kvxfer[sealed]",
    ("bench", "nixl://?discover=etcd://127.0.0.1:9/x"): "kvxfer[etcd]",
    ("bench", "s3://bucket"): "kvxfer[object]",
    ("bench", "gs://bucket"): "kvxfer[object]",
    ("bench", "az://container?endpoint=http://127.0.0.1:9"): "kvxfer[object]",
    ("bench", "mooncake://127.0.0.1:9"): "kvxfer[mooncake]",
    ("benchmarks", "describe"): "kvxfer[bench]",
    ("benchmarks", "vllm"): "kvxfer[bench]",
    ("benchmarks", "transformers"): "kvxfer[bench]",
    ("benchmarks", "mooncake"): "kvxfer[mooncake]",
    (*SERVE, "--metrics", "127.0.0.1:0"): "kvxfer[metrics]",
    (*SERVE, "--events", "tcp://127.0.0.1:0"): "kvxfer[events]",
    (*SERVE, "--discover", "etcd://127.0.0.1:1/x"): "kvxfer[etcd]",
    (*SERVE, "--tier", "s3://bucket"): "kvxfer[object]",
    (*SERVE, "--tier", "mooncake://127.0.0.1:9"): "kvxfer[mooncake]",
}
"""Commands in an environment with nothing but the core, and what their one line names, mostly an
extra; empty where they work. Benchmarks are those of the checkout."""

RUN_ALL = """
import contextlib, io, json, sys
from benchmarks.command import PROGRAM, main as benchmark
from kvxfer.cli import main
from kvxfer.cli.command_line import run_command

told = []
for command in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        if command[0] == "benchmarks":
            status = run_command(PROGRAM, lambda: benchmark(command[1:]))
        else:
            status = main(command)
    told.append([status, err.getvalue()])
print(json.dumps(told))
"""


@dataclass(frozen=True, slots=True)
class Bare:
    python: Path
    wheel: Path
    is_linked: bool

    @property
    def folder(self) -> Path:
        """Folder of its commands, from which nothing of the checkout is seen."""
        return self.python.parent

    def install(self, extra: str = "") -> None:
        wanted = f"{self.wheel}[{extra}]" if extra else f"{self.wheel}"
        if not self.is_linked:
            run(self.python, "-m", "pip", "install", "--no-compile", wanted, cwd=self.folder)
            return
        pip = ["-m", "pip", "--python", str(self.python), "install", "--no-deps", "--no-index"]
        run(sys.executable, *pip, self.wheel, cwd=self.folder)
        (site_packages,) = self.folder.parent.glob("lib/python*/site-packages")
        for top in _tops([*CORE, *EXTRAS.get(extra, ())]):
            if not os.path.lexists(site_packages / top.name):
                (site_packages / top.name).symlink_to(top)


def _tops(names: Iterable[str]) -> Iterator[Path]:
    """Find the folders and modules of packages, and of all that they require."""
    left, known = list(names), set[str]()
    while left:
        name = left.pop()
        if name in known or not (found := list(metadata.distributions(name=name))):
            continue
        known.add(name)
        for each in found[0].requires or ():
            requirement = Requirement(each)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                left.append(requirement.name)
        for top in {file.parts[0] for file in found[0].files or ()} - {"..", "__pycache__"}:
            yield Path(str(found[0].locate_file(top)))


EXTRAS = {
    name: [Requirement(each).name for each in wanted]
    for name, wanted in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ].items()
}


@pytest.fixture(
    scope="module",
    params=[
        "linked",
        *(
            pytest.param(
                each, marks=[needs.python(each), pytest.mark.exhaustive, pytest.mark.timeout(3600)]
            )
            for each in ("3.11", "3.12", "3.13")
        ),
    ],
)
def bare(
    request: pytest.FixtureRequest, distributions: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Bare]:
    """Make an environment with the wheel and what its core depends on."""
    folder = tmp_path_factory.mktemp("bare")
    (wheel,) = distributions.glob("*.whl")
    made = Bare(folder / "bin" / "python", wheel, is_linked=request.param == "linked")
    if made.is_linked:
        venv.create(folder, symlinks=True, with_pip=False)
    else:
        python = needs.find_python(request.param)
        assert python is not None
        run(python, "-m", "venv", folder, cwd=folder)
        for arguments in install.find_torch(folder):  # for CPUs, where there is such a build
            run(*install.pip(folder), *arguments, cwd=ROOT)
    made.install()
    yield made
    shutil.rmtree(folder)  # 6 GB with torch for CUDA


def test_every_command_works_bare_or_names_the_extra_that_it_needs(
    bare: Bare, tmp_path: Path
) -> None:
    assert {command[0] for command in BARE_COMMANDS} == {"--version", "benchmarks", *_COMMANDS}
    (bare.folder / "benchmarks").symlink_to(ROOT / "benchmarks")
    (tmp_path / "usage.ledger").touch()
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef0123456789abcdef")
    secret.chmod(0o600)
    places = {"STORE": str(tmp_path), "SECRET": str(secret)}
    commands = [
        [re.sub("STORE|SECRET", lambda found: places[found[0]], part) for part in each]
        for each in BARE_COMMANDS
    ]
    told = json.loads(
        run(bare.python, "-c", RUN_ALL, json.dumps(commands), cwd=bare.folder).splitlines()[-1]
    )
    for command, (status, err), extra in zip(commands, told, BARE_COMMANDS.values(), strict=True):
        if extra:
            assert (status, err.count("\n"), extra in err) == (2, 1, True), (command, err)
        else:
            assert status in {0, 1}, (command, err)


def test_what_is_installed_is_the_package_its_command_and_its_backends(
    bare: Bare, version: str
) -> None:
    def say(*command: str | Path) -> str:
        return run(*command, cwd=bare.folder)

    assert say(bare.folder / "kvxfer", "--version") == f"kvxfer {version}\n"
    assert say(bare.python, "-m", "kvxfer", "--version") == f"kvxfer {version}\n"
    torch_is_late = "import kvxfer, sys; print(kvxfer.__version__, 'torch' in sys.modules)"
    assert say(bare.python, "-c", torch_is_late) == f"{version} False\n"
    not_there = "import importlib.util; print(importlib.util.find_spec('backends'))"
    assert say(bare.python, "-c", not_there) == "None\n"
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    loaded = (
        "from importlib.metadata import distribution as installed\n"
        "for each in installed('kvxfer').entry_points.select(group='kvxfer.backends'):\n"
        "    print(each.name, each.load().__name__)"
    )
    assert sorted(say(bare.python, "-c", loaded).splitlines()) == sorted(
        f"{name} {value.partition(':')[2]}" for name, value in declared["kvxfer.backends"].items()
    )


def blocks_of(page: str, language: str) -> str:
    """Join the blocks of a page that are in a language, without those of the simulation."""
    text, *_ = (ROOT / page).read_text().partition("\n## Every order of events\n")
    found = re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert found, f"{page} has no block of {language}"
    return "\n".join(found)


@pytest.mark.parametrize("page", ["README.md", "docs/concepts.md"])
def test_the_first_program_of_a_stranger_runs(bare: Bare, page: str, tmp_path: Path) -> None:
    program = tmp_path / "first.py"
    program.write_text(blocks_of(page, "python"))
    run(bare.python, program, cwd=tmp_path)


def test_a_backend_of_a_stranger_passes_the_conformance_suite_by_the_commands_of_the_guide(
    bare: Bare, tmp_path: Path
) -> None:
    """The last test of the file: it installs more than the core."""
    install_it, test_it = blocks_of("docs/backends.md", "bash").splitlines()
    wanted = re.fullmatch(r"pip install 'kvxfer\[(\w+)\]'", install_it)
    assert wanted
    bare.install(wanted[1])
    program, name = test_it.split()
    assert program == "pytest"
    (tmp_path / name).write_text(blocks_of("docs/backends.md", "python"))
    said = run(bare.python, "-m", program, "-p", "no:cacheprovider", name, cwd=tmp_path)
    passed = re.search(r"(\d+) passed", said)
    assert passed
    assert int(passed[1]) > NUM_TESTS_OF_A_BACKEND, said
    assert "failed" not in said
