"""Text of others, made fit for logs, terminals and errors."""

import difflib
import unicodedata
from collections.abc import Iterable


def printable(value: object, max_characters: int | None = None) -> str:
    """Escape control characters of untrusted text, which a terminal would obey, and cut it."""
    text = str(value)[:max_characters]
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


def find_control(text: str) -> str:
    """Find the first control character, such as a NUL or a line end, by its name; empty if none."""
    found = next((each for each in text if unicodedata.category(each) == "Cc"), "")
    return "NUL" if found == "\0" else found and repr(found)


def did_you_mean(name: str, known: Iterable[str], *, likeness: float = 0.6) -> str:
    """Suggest the known name that is most like an unknown one; empty when none is so like it."""
    by_letters = {each.lower(): each for each in known}
    near = difflib.get_close_matches(name.lower(), by_letters, n=1, cutoff=likeness)
    return f" (did you mean {by_letters[near[0]]!r}?)" if near else ""
