"""Reasons that are part of namespaces keep their words.

The encoding of an opaque page has the text of the `PageMappingError` by which it is opaque, with
the values that engines must have in common. Another text is another namespace, which hides the
pages that earlier releases stored.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import kvxfer
from kvxfer.errors import PageMappingError

RECORDED = Path(__file__).with_name("reasons.txt")
PACKAGE = Path(kvxfer.__file__).parent


def templates(expression: ast.expr, function: ast.FunctionDef) -> list[str]:
    """List the texts that an expression may have, with `{}` for each value."""
    if isinstance(expression, ast.Constant):
        return [str(expression.value)]
    if isinstance(expression, ast.JoinedStr):
        parts = (
            each.value if isinstance(each, ast.Constant) else "{}" for each in expression.values
        )
        return ["".join(map(str, parts))]
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


def reasons() -> Iterator[str]:
    """Yield each reason of the library, as `axis | actual | expected`."""
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text())
        for function in (each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef)):
            for call in (each for each in ast.walk(function) if isinstance(each, ast.Call)):
                if ast.unparse(call.func) == PageMappingError.__name__:
                    axis, actual, expected = (templates(each, function) for each in call.args)
                    yield from (f"{a} | {b} | {c}" for a in axis for b in actual for c in expected)


def test_reasons_keep_their_words() -> None:
    """New reasons are added to `reasons.txt`; a line leaves it only with its check."""
    assert sorted(set(reasons())) == RECORDED.read_text().splitlines()


def test_the_text_of_a_reason_keeps_its_words() -> None:
    expected = "pages cannot be mapped along 'head': 3; expected 4 per worker"
    assert str(PageMappingError("head", 3, "4 per worker")) == expected
