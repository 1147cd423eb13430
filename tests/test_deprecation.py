"""A deprecated name works with one warning, and is gone with the release that the warning named."""

import ast
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.version import Version

import kvxfer
from kvxfer.deprecation import warn_deprecated

ROOT = Path(__file__).parents[1]
FILES = [path for folder in ("kvxfer", "backends") for path in (ROOT / folder).rglob("*.py")]


def deprecations(source: str) -> Iterator[dict[str, str]]:
    """Find the deprecations of a module: their name, its replacement and the release."""
    for node in ast.walk(ast.parse(source)):
        function = node.func if isinstance(node, ast.Call) else None
        if function is not None and ast.unparse(function).endswith("warn_deprecated"):
            [name] = node.args  # type: ignore[attr-defined]
            found = {"name": ast.literal_eval(name)}
            yield found | {
                each.arg: ast.literal_eval(each.value)
                for each in node.keywords  # type: ignore[attr-defined]
            }


def overdue(source: str, version: str) -> list[str]:
    """Names of a module that should have gone with a release or an earlier one."""
    return [
        each["name"]
        for each in deprecations(source)
        if Version(each["gone_in"]) <= Version(Version(version).base_version)
    ]


def test_what_should_have_gone_with_this_release_is_gone() -> None:
    sources = {path: path.read_text() for path in FILES}
    found = {
        path: overdue(source, kvxfer.__version__)
        for path, source in sources.items()
        if "warn_deprecated(" in source and path.stem != "deprecation"
    }
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize(
    ("version", "is_overdue"),
    [("0.2.9", False), ("0.3.0.dev7+g1234567", True), ("0.3.0", True), ("0.4.0", True)],
)
def test_a_deprecation_whose_release_has_come_is_found(
    version: str,
    is_overdue: bool,  # noqa: FBT001 - a case of pytest
) -> None:
    source = "warn_deprecated('a(old=)', replacement='a(new=)', gone_in='0.3.0')"
    assert overdue(source, version) == (["a(old=)"] if is_overdue else [])


def deprecated_function() -> int:
    warn_deprecated("deprecated_function()", replacement="another()", gone_in="99.0.0")
    return 7


def test_a_deprecated_name_works_and_warns_its_caller_once() -> None:
    with warnings.catch_warnings(record=True, action="always") as caught:
        assert [deprecated_function(), deprecated_function()] == [7, 7]
    [warning] = caught
    assert str(warning.message) == (
        "deprecated_function() is deprecated, and gone in kvxfer 99.0.0; use another()"
    )
    assert warning.category is FutureWarning
    assert warning.filename == __file__
