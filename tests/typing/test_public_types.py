"""Public types: mypy, seeing kvxfer as users do, knows its types and rejects wrong calls."""

import ast
import re
from pathlib import Path

import pytest

from kvxfer import public
from tests.interpreter import run_python

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CACHE = ROOT / ".mypy_cache" / "typing"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def errors_in(file: Path, folder: Path) -> set[tuple[int, str]]:
    """Check a file from another folder, so that kvxfer is found as an installed package."""
    options = ["--strict", "--config-file=", f"--cache-dir={CACHE}"]
    result = run_python("-m", "mypy", *options, str(file), folder=folder)
    assert result.returncode in {0, 1}, result.stdout + result.stderr
    errors = re.findall(r"^(.+?):(\d+): error: .*\[([\w-]+)\]$", result.stdout, re.MULTILINE)
    assert len(errors) == result.stdout.count(": error: "), result.stdout
    assert {Path(folder, name).resolve() for name, _, _ in errors} <= {file}, result.stdout
    return {(int(line), code) for _, line, code in errors}


def test_every_public_type_is_known(tmp_path: Path) -> None:
    assert errors_in(HERE / "accepted.py", tmp_path) == set()


def test_the_documented_backends_are_typed(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "backends.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    file = tmp_path / "documented.py"
    file.write_text("\n".join(blocks))
    assert errors_in(file, tmp_path) == set()


def test_exactly_the_marked_calls_are_refused(tmp_path: Path) -> None:
    file = HERE / "rejected.py"
    marked = {
        (number, line.rpartition("# E: ")[2])
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if "# E: " in line
    }
    assert marked
    assert errors_in(file, tmp_path) == marked


def test_pyright_takes_the_modules_below_for_public_too() -> None:
    """It does so only for an import under the same name, which mypy does not ask for."""
    tree = ast.parse((ROOT / "kvxfer" / "__init__.py").read_text())
    names = [
        each for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for each in node.names
    ]
    exported = {each.name for each in names if each.asname == each.name}
    assert exported == set(re.findall(r"`kvxfer\.([a-z_]+)`", public.__doc__ or ""))
