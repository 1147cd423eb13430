"""Text of others, made fit for logs, terminals and errors."""


def printable(value: object, max_characters: int | None = None) -> str:
    """Escape control characters, which a terminal would obey, and leave out what is too long.

    Args:
        value: Text of an untrusted file or process, or an error that quotes some.
        max_characters: Most characters of the text that are kept, before they are escaped.
    """
    text = str(value)[:max_characters]
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )
