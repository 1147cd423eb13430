"""Text that commands show on a terminal."""


def exit_statuses(done: str, bad: str = "") -> str:
    """Format the meaning of a command's exit statuses for its help.

    Args:
        done: Condition of status 0.
        bad: Condition of status 1; empty if there is none.
    """
    statuses = [f"0 {done}", f"1 {bad}" if bad else "", "2 when the command failed"]
    return f"exit status: {'; '.join(filter(None, statuses))}"
