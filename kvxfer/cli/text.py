"""Text from files that anybody may have written, on a terminal."""


def printable(text: str) -> str:
    """Escape what would not be shown but obeyed, such as control sequences."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )
