"""Real text for prompts: documents of this repository, in tokens of SmolLM2."""

import ast
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer

from tests.e2e.engine_process import REPOSITORY

QUESTIONS = (
    "What is a block, and what is a page?",
    "How does a backend report that a block is missing?",
    "Who owns the memory while a transfer runs?",
    "Name three things that change the bytes behind a key.",
    "What happens to a transfer whose deadline has passed?",
    "Why is a corrupt block never served?",
    "Which process decides what is evicted?",
    "How are loads and stores ordered?",
)


def prompts(tokenizer_file: Path, number: int, *, shared_tokens: int) -> list[list[int]]:
    """Token ids of questions about this repository; all begin with the same text of it."""
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    shared: list[int] = []
    for text in _texts():
        shared += tokenizer.encode(text).ids
        if len(shared) >= shared_tokens:
            break
    if len(shared) < shared_tokens or number > len(QUESTIONS):
        raise ValueError(f"there are {len(shared)} tokens and {len(QUESTIONS)} questions")
    return [
        shared[:shared_tokens] + tokenizer.encode(f"\n\nQuestion: {question}\nAnswer:").ids
        for question in QUESTIONS[:number]
    ]


def _texts() -> Iterator[str]:
    """Read the documentation, and then the docstrings of the source."""
    for path in [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]:
        yield path.read_text(encoding="utf-8")
    for path in sorted((REPOSITORY / "kvxfer").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                yield (ast.get_docstring(node) or "") + "\n\n"
