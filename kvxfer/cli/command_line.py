"""Command line: the parser of every command, and what its help says about exit statuses."""

import argparse
import contextlib
import json
import os
import signal
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import msgspec

from kvxfer.errors import KVXferError
from kvxfer.text import printable

FAILED = 2
"""Exit status of a command that failed, or was given what it cannot use."""
INTERRUPTED, PIPE_CLOSED = 130, 141
"""Exit statuses after SIGINT, and after the reader closed the pipe: 128 + signal, as in shells."""
WIDTH = 80


class CommandLine(argparse.ArgumentParser):
    """Parser of a command line that complains in one line, as commands do about everything."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse arguments, which a program may give that calls `main`: none may have a NUL."""
        for each in args or ():
            if "\0" in each:
                self.error(f"{each!r} has a NUL, which no path or address has")
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """End the process with status 2 and one line that names what cannot be used."""
        self.exit(FAILED, f"{self.prog}: {printable(message)}; see {self.prog} --help\n")


def print_json(value: object) -> None:
    """Print a value as JSON; what is not UTF-8 in the name of a file is escaped."""
    try:
        text = msgspec.json.encode(value).decode()
    except UnicodeEncodeError:
        text = json.dumps(msgspec.to_builtins(value))
    print(text)


def wrap(text: str, head: str) -> list[str]:
    """Break a text into lines for a terminal, of which the first begins with `head`."""
    return textwrap.wrap(
        text, WIDTH, initial_indent=head, subsequent_indent=" " * len(head), break_on_hyphens=False
    )


def exit_statuses(done: str, bad: str = "") -> str:
    """Format the meaning of a command's exit statuses for its help.

    Args:
        done: Condition of status 0.
        bad: Condition of status 1; empty if there is none.
    """
    statuses = [f"0 {done}", f"1 {bad}" if bad else "", f"{FAILED} when the command failed"]
    return f"exit status: {'; '.join(filter(None, statuses))}"


def run_command(program: str, command: Callable[[], int]) -> int:
    """Run a command and return its exit status; an error is printed as one line."""
    try:
        status = command()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader closed the pipe; nothing more must be written to it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as exc:
        said = f"{exc.filename}: {exc.strerror}" if exc.filename else str(exc)
    except KVXferError as exc:
        said = str(exc)
    else:
        return status
    sys.stderr.write(f"{program}: {printable(said)}\n")
    return FAILED


@contextlib.contextmanager
def ending_by_sigterm() -> Iterator[None]:
    """End as by Ctrl-C when SIGTERM comes: what was started or written for a while goes, too."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
