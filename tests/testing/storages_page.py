"""Tables and lines of the page that `python -m examples.storages` prints."""

import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
TEXT = (REPOSITORY / "examples" / "storages" / "README.md").read_text()


def table(*, of: str) -> dict[tuple[str, str], str]:
    """Read the table with this in its head: what it says in a row and a column."""
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
