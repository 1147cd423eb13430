"""The README and the documentation are true: code runs, and quoted names and texts exist."""

import ast
import contextlib
import pkgutil
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kvxfer.storage.backend import Status
from kvxfer.storage.observer import Cause, Operation, Removal
from kvxfer.telemetry.metrics import COUNTERS, GAUGES, HISTOGRAMS

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LANGUAGES = {"python", "bash", "toml", ""}
EXCERPT = re.compile(r'python title="(.+)"')
SERVER_LIMIT_S = 60
SOURCES = [path for folder in ("kvxfer", "backends") for path in (ROOT / folder).rglob("*.py")]
METRIC = re.compile(r"vllm:kvxfer_\w+")
NAME = re.compile(r"`(kvxfer(?:\.[A-Za-z]\w*)+)[`(]")
PATH = re.compile(r"`((?:kvxfer|backends|benchmarks|tests|examples)/[\w/.]*)`")
MAX_LINES_OF_TUTORIAL = 250
MIN_WORDS = 2
MAX_WORDS_OF_A_VALUE = 2


def fences(page: Path) -> list[re.Match[str]]:
    return list(FENCE.finditer(page.read_text()))


def run_blocks(page: Path) -> ModuleType:
    """Run the Python blocks of a page in order, as one module with the page's line numbers."""
    module = ModuleType(page.stem)
    text = page.read_text()
    for fence in FENCE.finditer(text):
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
    if page.name == "transformers.md":
        pytest.importorskip("transformers")
    with other_terminal(page):
        run_blocks(page)


def test_the_readme_and_the_guides_have_code() -> None:
    names = {page.name for page in PAGES_WITH_CODE}
    guides = {"concepts.md", "backends.md", "testing.md", "peers.md"}
    assert {"README.md", "index.md"} | guides <= names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_block_is_in_a_language_that_this_test_would_overlook(page: Path) -> None:
    others = {fence[1] for fence in fences(page)} - LANGUAGES
    assert not [language for language in others if not EXCERPT.fullmatch(language)]


def excerpts(page: Path) -> Iterator[tuple[str, str]]:
    """Find the blocks of a page that show a part of a file: its name, and the part."""
    for fence in fences(page):
        if found := EXCERPT.fullmatch(fence[1]):
            yield found[1], fence[2]


def test_pages_quote_files_as_they_are() -> None:
    quoted = [excerpt for page in PAGES for excerpt in excerpts(page)]
    assert quoted
    assert not [(name, part) for name, part in quoted if part not in (ROOT / name).read_text()]


def test_the_tutorial_has_parts_of_its_engine_in_order() -> None:
    found = list(excerpts(ROOT / "docs/own-engine.md"))
    ((name, text),) = {(name, (ROOT / name).read_text()) for name, _ in found}
    places = [text.index(part) for _, part in found]
    assert len(places) > 3
    assert places == sorted(places)
    assert len((ROOT / name).read_text().splitlines()) <= MAX_LINES_OF_TUTORIAL


def test_the_files_that_pages_name_exist() -> None:
    named = {name for page in PAGES for name in PATH.findall(page.read_text())}
    assert "kvxfer/connect.py" in named
    assert not [name for name in sorted(named) if not (ROOT / name).exists()]


def test_the_names_that_docstrings_give_in_full_can_be_imported() -> None:
    named = {name for path in SOURCES for name in NAME.findall(path.read_text())}
    missing = set()
    for name in named - {"kvxfer.NAME"}:
        try:
            pkgutil.resolve_name(name)
        except (AttributeError, ImportError):
            missing.add(name)
    assert named
    assert missing == set()


def test_the_readme_links_every_guide() -> None:
    """Pages of a folder are found by its index."""
    linked = set(re.findall(r"\]\((docs/[\w/.-]+)", (ROOT / "README.md").read_text()))
    guides = {*(ROOT / "docs").glob("*.md"), *(ROOT / "docs").glob("*/index.md")}
    assert {str(page.relative_to(ROOT)) for page in guides} - linked == set()
    assert not [name for name in sorted(linked) if not (ROOT / name).exists()]


def slugs(page: Path) -> set[str]:
    """Find the anchors of the headings of a page, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in headings}


def test_links_of_pages_beside_the_documentation_lead_somewhere() -> None:
    pages = [*ROOT.glob("*.md"), *ROOT.glob(".github/*.md")]
    link = re.compile(r"\]\((?!https?://)([^)#]*)#?([^)]*)\)")
    links = [(page, *found) for page in pages for found in link.findall(page.read_text())]
    assert links
    for page, name, anchor in links:
        target = page.parent / name if name else page
        assert target.exists(), (page.name, name)
        assert not anchor or anchor in slugs(target), (page.name, name, anchor)


def constants(path: Path) -> dict[str, Any]:
    """Read the literal constants of a module, without importing what it needs."""
    values = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            with contextlib.suppress(ValueError):
                values[ast.unparse(target)] = ast.literal_eval(node.value)
    return values


def test_the_metrics_that_pages_name_exist() -> None:
    named = {name for page in PAGES for name in METRIC.findall(page.read_text())}
    folder = ROOT / "kvxfer/integrations/vllm"
    ours = constants(folder / "offloading/metrics.py")
    of_vllm = {ours["PREFIX"] + ours[name] for name in ("PINNED", "IGNORED")}
    pd = constants(folder / "prefill_decode/metrics.py")
    names = *pd["COUNTERS"], *pd["COUNTERS_BY_REASON"], pd["LEASES"], pd["LOAD_SECONDS"]
    of_vllm |= {pd["PREFIX"] + name for name in names}
    everywhere = {ours["PREFIX"] + name for name in (*COUNTERS, *HISTOGRAMS, *GAUGES)}
    assert of_vllm - named == set()
    assert named - of_vllm - everywhere - {pd["PREFIX"], ours["PREFIX"]} == set()


def test_the_page_about_metrics_lists_those_that_the_registry_has() -> None:
    row = re.compile(r"^\| `kvxfer_(\w+)` \| (\w+) \| ([^|]*) \|", re.MULTILINE)
    page = row.findall((ROOT / "docs" / "metrics.md").read_text())
    listed = {name: (kind, set(re.findall(r"`(\w+)`", labels))) for name, kind, labels in page}
    exported = {name: ("counter", set(labels)) for name, (_, labels) in COUNTERS.items()}
    exported |= {name: ("histogram", set(labels)) for name, (_, labels) in HISTOGRAMS.items()}
    exported |= {gauge.value: ("gauge", {"tier"}) for gauge in GAUGES}
    assert listed == exported


def test_the_page_about_metrics_lists_every_value_of_a_label() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    values = {each.value for kind in (Cause, Operation, Removal, Status) for each in kind}
    assert values - set(re.findall(r"`(\w+)`", page)) == set()


def words(text: str) -> list[str]:
    """Find the words of a text, of three letters or more: no quoted values, no parts of paths."""
    return re.findall(r"(?<![-\w/])[a-z]{3,}\b(?!/)", re.sub("'[^']*'", "", text))


def message_patterns() -> list[re.Pattern[str]]:
    """Make patterns of the texts in the source, of those that have a few words of their own."""
    parts: list[list[str]] = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                literals = [v.value if isinstance(v, ast.Constant) else "\0" for v in node.values]
                parts.append("".join(map(str, literals)).split("\0"))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                parts.append(re.split(r"%[sdgr]", node.value))
    texts = [each for each in parts if len(words(" ".join(each))) >= MIN_WORDS]
    return [re.compile("(.+)".join(map(re.escape, each)) + "$") for each in texts]


def is_quoted(text: str, patterns: list[re.Pattern[str]]) -> bool:
    """Whether a text ends with a message of the source, and so do long values in the message."""
    for match in filter(None, (pattern.search(text) for pattern in patterns)):
        values = text[: match.start()], *match.groups()
        long = [value for value in values if len(words(value)) > MAX_WORDS_OF_A_VALUE]
        if all(is_quoted(value, patterns) for value in long):
            return True
    return False


def test_the_messages_that_the_page_about_failures_quotes_are_in_the_source() -> None:
    page = ROOT / "docs" / "failures.md"
    quoted = [line for fence in fences(page) if not fence[1] for line in fence[2].splitlines()]
    patterns = message_patterns()
    assert len(quoted) > 10
    assert not [line for line in quoted if not is_quoted(line, patterns)]
    assert not is_quoted(f"{quoted[0]} and something else that is wrong", patterns)


# The backends of the guide are held to the contract that it explains.
_GUIDE = run_blocks(ROOT / "docs" / "backends.md")
TestBackendOfTheGuide = _GUIDE.TestMemoryBackend
TestDirectBackendOfTheGuide = _GUIDE.TestDirectBackend
