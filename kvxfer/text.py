"""Text of others, made fit for logs, terminals and errors."""

import difflib
import unicodedata
from collections.abc import Iterable

MAX_ID_CHARACTERS = 100
"""Most characters of the id of a request in a log: those of vLLM have fewer than 60."""


def printable(value: object, max_characters: int | None = None) -> str:
    """Escape control characters of untrusted text, which a terminal would obey, and cut it."""
    text = str(value)[:max_characters]
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


def printable_id(request_id: object) -> str:
    """Escape and cut the id of a request, which its client may have chosen."""
    return printable(request_id, MAX_ID_CHARACTERS)


def find_control(text: str) -> str:
    """Find the first control character, such as a NUL or a line end, by its name; empty if none."""
    found = next((each for each in text if unicodedata.category(each) == "Cc"), "")
    return "NUL" if found == "\0" else found and repr(found)


def did_you_mean(name: str, known: Iterable[str], *, likeness: float = 0.6) -> str:
    """Suggest the known name that is most like an unknown one; empty when none is so like it."""
    by_letters = {each.lower(): each for each in known}
    near = difflib.get_close_matches(name.lower(), by_letters, n=1, cutoff=likeness)
    return f" (did you mean {by_letters[near[0]]!r}?)" if near else ""
