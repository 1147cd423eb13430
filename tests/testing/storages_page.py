"""Tables and lines of the page that `python -m examples.storages` prints."""

import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from examples.storages.injection import CALLERS, INJECTIONS, Injection
from examples.storages.probes import PROBES, in_folder, killed, two_writers
from examples.storages.storages import Storage

REPOSITORY = Path(__file__).parents[2]
TEXT = (REPOSITORY / "examples" / "storages" / "README.md").read_text()
SLOW = [pytest.mark.exhaustive, pytest.mark.timeout(300)]
MARKS = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning"),
]
EACH_PROBE = pytest.mark.parametrize(
    "each",
    [
        pytest.param(each, id=each.what, marks=SLOW if each.run in {killed, two_writers} else [])
        for each in PROBES
    ],
)
EACH_INJECTION = pytest.mark.parametrize("each", INJECTIONS, ids=lambda each: each.what)


def table(*, of: str) -> dict[tuple[str, str], str]:
    """Read the table with `of` in its head: the cell of each row and column."""
    lines = TEXT.splitlines()
    first = next(at for at, line in enumerate(lines) if line.startswith("| |") and of in line)
    rows = []
    for line in lines[first:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    head, _, *body = rows
    return {
        (row[0], name): cell for row in body for name, cell in zip(head[1:], row[1:], strict=True)
    }


def printed(section: str) -> list[str]:
    command = [sys.executable, "-m", "examples.storages", section]
    ended = subprocess.run(command, check=True, capture_output=True, text=True, cwd=REPOSITORY)
    return ended.stdout.rstrip().splitlines()


def require_told_of_faults(each: Injection, storage: Storage) -> None:
    """Check that the page says of a fault what callers of the storage see."""
    said = table(of="with a deadline")
    for caller, timeout_s in CALLERS.items():
        run = partial(each.run, storage, timeout_s=timeout_s)
        assert in_folder(run) == said[each.what, caller]
