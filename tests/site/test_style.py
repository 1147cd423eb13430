"""The language of the documentation: short sentences, and one word for each thing."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    *ROOT.glob("*.md"),
    *ROOT.glob(".github/*.md"),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "benchmarks").glob("*.md")),
]
DOCS = sorted((ROOT / "docs").rglob("*.md"))
MAX_WORDS = 35
MAX_PAGES, MAX_WORDS_OF_ALL = 35, 40_000
BEGINNINGS = ("With this page you can ", "With this page you know ", "After this page you know ")
# Names that begin a sentence although they are written small.
SMALL = "vLLM|kvxfer|etcd|fio"
# Words that stand for one of the glossary in docs/concepts.md, which is used instead.
OTHER_WORDS = {
    "lender": "holder",
    "back end": "backend",
    "key-value cache": "KV cache",
    "name space": "namespace",
    "time-out": "deadline",
    "memory pool": "host pool",
}
BESIDE_PROSE = ("#", "|", "<", "!!!", "![", ":::")


def paragraphs(text: str) -> Iterator[str]:
    """Find the paragraphs and items of a page, without code, tables and headings."""
    text = re.sub(r"\A---\n.*?\n---\n", "", text, flags=re.DOTALL)
    text = re.sub(r"^( *)(```|~~~).*?^\1\2\s*$", "", text, flags=re.DOTALL | re.MULTILINE)
    lines: list[str] = []
    for line in map(str.strip, [*text.splitlines(), ""]):
        item = re.match(r"(?:[-*]|\d+\.) (.*)", line)
        if not line or item or line.startswith(BESIDE_PROSE):
            if lines:
                yield " ".join(lines)
            lines = [item[1]] if item else []
        else:
            lines.append(line)


def sentences(paragraph: str) -> list[str]:
    """Divide a paragraph; code counts as one word, and a link as its text."""
    text = re.sub(r"`[^`]*`", "CODE", paragraph)
    text = re.sub(r"!?\[([^\]]*)\](?:\([^)]*\)|\[[^\]]*\])", r"\1", text)
    return re.split(rf"(?<=[.!?:;])[\"*)]*\s+(?=[A-Z*\"(]|{SMALL})", text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_sentences_are_short_and_a_thing_has_one_word(page: Path) -> None:
    texts = [*paragraphs(page.read_text())]
    found = [each for text in texts for each in sentences(text)]
    assert found
    assert not [each for each in found if len(re.findall(r"[\w'/-]+", each)) > MAX_WORDS]
    prose = " ".join(texts).lower()
    assert not {
        word: f"say {better}"
        for word, better in OTHER_WORDS.items()
        if re.search(rf"\b{re.escape(word)}s?\b", prose)
    }


def test_the_glossary_is_sorted_and_says_each_word_once() -> None:
    table = (ROOT / "docs" / "concepts.md").read_text().partition("\n## Glossary\n")[2]
    words = re.findall(r"^\| (?!word|-)([\w, ]+) \|", table, re.MULTILINE)
    assert len(words) > 20
    assert words == sorted(set(words))


def test_the_documentation_is_short() -> None:
    assert len(DOCS) <= MAX_PAGES
    assert sum(len(page.read_text().split()) for page in DOCS) <= MAX_WORDS_OF_ALL


@pytest.mark.parametrize("page", DOCS, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_begins_with_what_one_can_do_after_it(page: Path) -> None:
    assert next(paragraphs(page.read_text())).startswith(BEGINNINGS)
