"""Untrusted text, made safe for logs, terminals and errors."""

import difflib
import unicodedata
from collections.abc import Container, Iterable, Iterator, Sequence

MAX_LINE_CHARACTERS = 2000
"""Maximum length of a log line about a peer, before control characters are escaped."""

MAX_ID_CHARACTERS = 100
"""Maximum length of a request id in a log; those of vLLM have fewer than 60 characters."""


def printable(value: object, max_characters: int | None = None) -> str:
    """Truncate untrusted text, and escape its control characters, which a terminal would obey."""
    text = str(value)[:max_characters]
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


def printable_id(request_id: object) -> str:
    """Truncate and escape the id of a request, which the client may have chosen."""
    return printable(request_id, MAX_ID_CHARACTERS)


def align(rows: Sequence[Sequence[str]], to_right: Container[int] = ()) -> Iterator[str]:
    """Align the columns of a table to the left, those of the indexes `to_right` to the right."""
    widths = [max(map(_width, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = []
        for index, (cell, width) in enumerate(zip(row, widths, strict=True)):
            space = " " * (width - _width(cell))
            cells.append(space + cell if index in to_right else cell + space)
        yield "  ".join(cells).rstrip()


def _width(text: str) -> int:
    """Count the columns of a terminal: two for a wide character, none for a combining one."""
    narrow = [each for each in text if unicodedata.category(each) not in ("Mn", "Me")]
    return len(narrow) + sum(unicodedata.east_asian_width(each) in "FW" for each in narrow)


def find_control(text: str) -> str:
    """Name the first control character, such as a NUL or a line end; empty if there is none."""
    found = next((each for each in text if unicodedata.category(each) == "Cc"), "")
    return "NUL" if found == "\0" else found and repr(found)


def did_you_mean(name: str, known: Iterable[str], *, likeness: float = 0.6) -> str:
    """Suggest the known name that is most like an unknown one; empty if none is like enough."""
    by_letters = {each.lower(): each for each in known}
    near = difflib.get_close_matches(name.lower(), by_letters, n=1, cutoff=likeness)
    return f" (did you mean {by_letters[near[0]]!r}?)" if near else ""
