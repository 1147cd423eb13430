"""Reasons that are part of namespaces keep their words.

The encoding of an opaque page has the text of the `LayoutError` by which it is opaque, with the
values that engines must have in common. Another text is another namespace, which hides the pages
that earlier releases stored.
"""

import ast
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import kvxfer
from kvxfer.errors import (
    AmbiguousLayoutError,
    LayoutError,
    OverlapError,
    PageBoundsError,
    PageMappingError,
    UnknownLayoutError,
)

RECORDED = Path(__file__).with_name("reasons.txt")
PACKAGE = Path(kvxfer.__file__).parent
FOLDERS = ("kvcache", "integrations/vllm")
EXAMPLES = (
    AmbiguousLayoutError("layer", "bytes", ["a b", "b a"]),
    LayoutError("text"),
    OverlapError(["one", "two"], "all"),
    PageBoundsError("layer", 3, 2),
    PageMappingError("head", 3, "4 per worker"),
    UnknownLayoutError("layer", "bytes", ["a b", "b a"]),
)
"""An error of each kind, for the words that its class adds."""
ERRORS = {type(each).__name__ for each in EXAMPLES}


def templates(expression: ast.expr, function: ast.FunctionDef) -> list[str]:
    """List the texts that an expression may have, with `{}` or `{!r}` for each value."""
    if isinstance(expression, ast.Constant):
        return [str(expression.value)]
    if isinstance(expression, ast.JoinedStr):
        return ["".join(map(_template, expression.values))]
    if isinstance(expression, ast.Name):
        assigned = [
            template
            for node in ast.walk(function)
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == expression.id
            if isinstance(node.value, (ast.Constant, ast.JoinedStr))
            for template in templates(node.value, function)
        ]
        return assigned or ["{}"]
    return ["{}"]


def _template(part: ast.expr) -> str:
    if isinstance(part, ast.Constant):
        return str(part.value)
    assert isinstance(part, ast.FormattedValue)
    return "{}" if part.conversion < 0 else f"{{!{chr(part.conversion)}}}"


def reasons() -> Iterator[str]:
    """Yield each reason of the library, as `error: argument | argument`."""
    for path in (each for folder in FOLDERS for each in (PACKAGE / folder).rglob("*.py")):
        tree = ast.parse(path.read_text())
        for function in (each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef)):
            for call in (each for each in ast.walk(function) if isinstance(each, ast.Call)):
                if (name := ast.unparse(call.func)) in ERRORS:
                    for texts in product(*(templates(each, function) for each in call.args)):
                        yield f"{name}: {' | '.join(texts)}"


def test_reasons_keep_their_words() -> None:
    """New reasons are added to `reasons.txt`; a line leaves it only with its check."""
    texts = [f"{type(each).__name__}: {each}" for each in EXAMPLES]
    assert [*sorted(set(reasons())), *texts] == RECORDED.read_text().splitlines()
