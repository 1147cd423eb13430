"""A release on this machine: `python -m tests.release [VERSION]`, first step of `make release`.

With a version, it joins the changelog, writes the golden files, and commits and tags them. Then, or
for a tag that HEAD already has, it writes the notes of the release to `dist/NOTES.md`. Nothing is
pushed or uploaded.
"""

import ast
import datetime as dt
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from packaging.version import InvalidVersion, Version

START = "<!-- towncrier release notes start -->\n"
UNRELEASED = "## [Unreleased]"
VERSIONED = ("CITATION.cff", "examples/chart/Chart.yaml")
VERSION_LINE = re.compile(r"^(version: |appVersion: ).*$", re.MULTILINE)


class CannotReleaseError(Exception):
    """Reason why there is no release, and what to do about it."""


def main(arguments: Sequence[str]) -> int:
    """Make the release of the checkout in this folder; 1 when there can be none."""
    root = Path.cwd()
    try:
        require_clean(root)
        if any(arguments):
            prepare(root, arguments[0])
        version = tagged_version(root)
    except CannotReleaseError as exc:
        print(exc, file=sys.stderr)
        return 1
    shutil.rmtree(root / "dist", ignore_errors=True)
    (root / "dist").mkdir()
    (root / "dist" / "NOTES.md").write_text(notes_of(root, version))
    taken_back = f"git tag --delete v{version}, and git reset --hard HEAD~ where it made a commit"
    print(f"kvxfer {version} is tagged; dist/NOTES.md has its notes. To take it back: {taken_back}")
    return 0


def prepare(root: Path, text: str) -> None:
    """Write what a release changes, commit it and tag it."""
    version = _parse(text)
    tags = [Version(tag[1:]) for tag in _git(root, "tag", "--list", "v[0-9]*").split()]
    if tags and version <= max(tags):
        raise CannotReleaseError(f"VERSION is {version}, and v{max(tags)} is there already")
    if names := overdue(root, text):
        raise CannotReleaseError(
            f"{', '.join(names)}: to be removed before {version}, see upgrade.md"
        )
    join_changelog(root, text)
    for name in VERSIONED:
        path = root / name
        path.write_text(VERSION_LINE.sub(rf"\g<1>{text}", path.read_text()))
    _run(root, sys.executable, "-m", "tests.golden", f"tests/golden/{text}")
    _git(root, "add", "--all")
    _git(root, "commit", "--quiet", "--message", f"Release {text}")
    _git(root, "tag", "--annotate", "--message", f"kvxfer {text}", f"v{text}")


def require_clean(root: Path) -> None:
    """Check that everything is committed, so that the build matches the tag."""
    if changes := _git(root, "status", "--porcelain"):
        raise CannotReleaseError(f"not committed:\n{changes}")


def tagged_version(root: Path) -> str:
    tags = _git(root, "tag", "--points-at", "HEAD", "v[0-9]*").split()
    if len(tags) != 1:
        wanted = "one tag such as v0.1.0: make release VERSION=0.1.0 makes it"
        raise CannotReleaseError(f"HEAD has {' and '.join(tags) or 'no tag'}; it needs {wanted}")
    return tags[0][1:]


def join_changelog(root: Path, version: str) -> None:
    """Make the section of a release from `[Unreleased]`, or else from the fragments."""
    path = root / "CHANGELOG.md"
    text = path.read_text()
    if UNRELEASED not in text:
        _run(root, sys.executable, "-m", "towncrier", "build", "--yes", "--version", version)
        return
    head, _, rest = text.partition(START)
    heading = f"## [{version}] - {dt.datetime.now(dt.UTC).date()}"
    intro = head.partition(" Nothing has been released yet")[0]
    path.write_text(f"{intro}\n\n{START}{rest.replace(UNRELEASED, heading, 1)}")


def notes_of(root: Path, version: str) -> str:
    """Read the section of a release in the changelog, without its heading."""
    _, _, text = (root / "CHANGELOG.md").read_text().partition(START)
    found = re.search(
        rf"^## \[{re.escape(version)}\][^\n]*\n(.*?)(?=^## \[|\Z)", text, re.DOTALL | re.MULTILINE
    )
    assert found is not None, f"the changelog has no section {version}"
    return f"{found[1].strip()}\n"


def overdue(root: Path, version: str) -> list[str]:
    """List deprecated names that this release or an earlier one should have removed."""
    now = Version(Version(version).base_version)
    files = [path for folder in ("kvxfer", "backends") for path in (root / folder).rglob("*.py")]
    found = (each for path in files for each in _deprecations(path.read_text()))
    return [name for name, gone_in in found if gone_in <= now]


def _deprecations(source: str) -> Iterator[tuple[str, Version]]:
    """Find the calls of `warn_deprecated`: the name, and the release without it."""
    if "warn_deprecated(" not in source:
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("warn_deprecated"):
            given = {each.arg: ast.literal_eval(each.value) for each in node.keywords}
            yield ast.literal_eval(node.args[0]), Version(given["gone_in"])


def _parse(text: str) -> Version:
    try:
        version = Version(text)
    except InvalidVersion:
        version = None
    if (
        version is None
        or str(version) != text
        or len(version.release) != 3
        or version.is_devrelease
    ):
        raise CannotReleaseError(f"VERSION is {text!r}; it has to be like 0.1.0 or 0.1.0rc1")
    return version


def _git(root: Path, *arguments: str) -> str:
    return _run(root, "git", *arguments)


def _run(root: Path, *command: str) -> str:
    ended = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise CannotReleaseError(f"{' '.join(command)} failed:\n{ended.stdout}{ended.stderr}")
    return ended.stdout


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
