"""Text that commands show on a terminal."""


def exit_statuses(done: str, bad: str = "") -> str:
    """Say in the help of a command what its exit statuses mean.

    Args:
        done: When it is 0.
        bad: When it is 1, if it ever is.
    """
    statuses = [f"0 {done}", f"1 {bad}" if bad else "", "2 when it cannot do what it was asked to"]
    return f"exit status: {'; '.join(filter(None, statuses))}"


def printable(text: str) -> str:
    """Escape text of files that anybody may have written: what is not shown but obeyed."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )
