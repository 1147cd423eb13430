"""`make release`: notes, golden files and a tag, from which a build takes the version."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import release
from tests.release import CannotReleaseError

ROOT = Path(__file__).parents[1]
FRAGMENT = ".github/changes/+full-disk.fixed.md"

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a checkout"),
]


def git(root: Path, *arguments: str) -> str:
    name = ["-c", "user.name=A", "-c", "user.email=a@example.org"]
    return subprocess.check_output(["git", *name, *arguments], cwd=root, text=True)


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Clone the checkout as a CI does: its last commit, and no tags."""
    for each in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{each}_NAME", "A")
        monkeypatch.setenv(f"GIT_{each}_EMAIL", "a@example.org")
    folder = tmp_path / "clone"
    source = ["--depth=1", "--no-tags", "--quiet", f"file://{ROOT}", str(folder)]
    git(tmp_path, "clone", *source)
    shutil.rmtree(folder / "tests" / "golden")  # another test writes golden files
    (folder / "tests" / "golden").mkdir()
    (folder / "tests" / "golden" / "__main__.py").write_text(
        "import pathlib, sys\npathlib.Path(sys.argv[1]).mkdir()\n"
        "pathlib.Path(sys.argv[1], 'written').touch()\n"
    )
    git(folder, "commit", "--all", "--quiet", "--message=golden files", "--allow-empty")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--amend", "--no-edit")
    return folder


def version_of(root: Path) -> str:
    """Ask the build for the version, as pip does."""
    command = [sys.executable, "-m", "hatchling", "version"]
    return subprocess.check_output(command, cwd=root, text=True).strip()


def test_the_version_is_that_of_the_tag_and_a_clone_without_tags_has_one(clone: Path) -> None:
    assert re.fullmatch(r"0\.dev\d+\+g\w+", version_of(clone))
    git(clone, "tag", "v7.8.9")
    assert version_of(clone) == "7.8.9"
    git(clone, "commit", "--allow-empty", "--quiet", "--message=next")
    assert re.fullmatch(r"7\.8\.10\.dev1\+g\w+", version_of(clone))
    shutil.rmtree(clone / ".git")
    assert version_of(clone) == "0.dev0", "of the files alone"


def test_a_release_joins_the_changelog_and_tags_what_it_wrote(clone: Path) -> None:
    release.prepare(clone, "0.1.0")
    assert release.tagged_version(clone) == version_of(clone) == "0.1.0"
    text = (clone / "CHANGELOG.md").read_text()
    assert "Unreleased" not in text
    assert "Nothing has been released" not in text
    first = release.notes_of(clone, "0.1.0")
    assert first.startswith("### Added\n")
    assert git(clone, "ls-files", "tests/golden/0.1.0").split() == ["tests/golden/0.1.0/written"]

    (clone / FRAGMENT).parent.mkdir(parents=True)
    (clone / FRAGMENT).write_text("Files: a full disk evicts blocks.\n")
    with pytest.raises(CannotReleaseError, match="not committed"):
        release.require_clean(clone)
    git(clone, "add", "--all")
    git(clone, "commit", "--quiet", "--message=Evict blocks on a full disk")
    with pytest.raises(
        CannotReleaseError, match=r"HEAD has no tag; it needs one tag such as v0\.1\.0"
    ):
        release.tagged_version(clone)

    release.prepare(clone, "0.2.0rc1")
    release.require_clean(clone)
    assert release.tagged_version(clone) == version_of(clone) == "0.2.0rc1"
    assert "version: 0.2.0rc1\n" in (clone / "CITATION.cff").read_text()
    chart = (clone / "examples" / "chart" / "Chart.yaml").read_text()
    assert "apiVersion: v2\n" in chart
    assert chart.endswith("version: 0.2.0rc1\nappVersion: 0.2.0rc1\n")
    assert "- Files: a full disk evicts blocks." in release.notes_of(clone, "0.2.0rc1")
    assert release.notes_of(clone, "0.1.0") == first
    assert not (clone / FRAGMENT).exists()
    for version in ("0.1.1", "0.2.0rc1"):
        with pytest.raises(CannotReleaseError, match=r"v0\.2\.0rc1 is there already"):
            release.prepare(clone, version)


def test_a_version_that_is_none_and_what_should_have_gone_keep_a_release_from_being_made(
    clone: Path,
) -> None:
    for version in ("", "v0.1.0", "0.1", "0.1.0.dev1", "0.01.0", "next"):
        with pytest.raises(CannotReleaseError, match="it has to be like"):
            release.prepare(clone, version)
    with (clone / "kvxfer" / "units.py").open("a") as file:
        file.write("\n\nwarn_deprecated('Bytes', replacement='ByteSize', gone_in='0.1.0')\n")
    with pytest.raises(CannotReleaseError, match="Bytes: to be removed before 0"):
        release.prepare(clone, "0.1.0")
    assert git(clone, "tag") == ""
