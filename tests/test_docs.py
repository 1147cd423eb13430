"""Documentation: the Python blocks of the README and of every page run unchanged."""

import contextlib
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LANGUAGES = {"python", "bash", "toml", ""}
SERVER_LIMIT_S = 60


def fences(page: Path) -> list[re.Match[str]]:
    """Find the fenced blocks of a page."""
    return list(FENCE.finditer(page.read_text()))


def run_blocks(page: Path) -> ModuleType:
    """Run the Python blocks of a page in order, as one module with the page's line numbers."""
    module = ModuleType(page.stem)
    text = page.read_text()
    for fence in fences(page):
        if fence[1] == "python":
            lines_before = text.count("\n", 0, fence.start(2))
            code = compile("\n" * lines_before + fence[2], page, "exec")
            exec(code, module.__dict__)  # noqa: S102 - to run them is what this file is for
    return module


@contextlib.contextmanager
def other_terminal(page: Path) -> Iterator[None]:
    """Run the peer that the page about peers starts first."""
    if page.name != "peers.md":
        yield
        return
    program, *arguments = shlex.split(next(f[2] for f in fences(page) if f[1] == "bash"))
    assert program == "kvxfer"
    command = [sys.executable, "-c", "import sys; from kvxfer.cli import main; sys.exit(main())"]
    with subprocess.Popen([*command, *arguments], stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        try:
            assert any("listening at" in line for line in server.stderr)
            yield
            server.terminate()
            assert server.wait(SERVER_LIMIT_S) == 0, server.stderr.read()
        finally:
            server.kill()


PAGES_WITH_CODE = [page for page in PAGES if any(fence[1] == "python" for fence in fences(page))]


@pytest.mark.timeout(2 * SERVER_LIMIT_S)
@pytest.mark.parametrize("page", PAGES_WITH_CODE, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_python_blocks_of_a_page_run(page: Path) -> None:
    with other_terminal(page):
        run_blocks(page)


def test_the_readme_and_the_guides_have_code() -> None:
    names = {page.name for page in PAGES_WITH_CODE}
    assert {"README.md", "index.md", "concepts.md", "backends.md", "peers.md"} <= names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_block_is_in_a_language_that_this_test_would_overlook(page: Path) -> None:
    assert {fence[1] for fence in fences(page)} <= LANGUAGES


# The backend of the guide is held to the contract that it explains.
TestBackendOfTheGuide = run_blocks(ROOT / "docs" / "backends.md").TestMemoryBackend
