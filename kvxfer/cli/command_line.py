"""Command line: the parser of every command, and what its help says about exit statuses."""

import argparse
import contextlib
import io
import json
import os
import signal
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, TypeVar

import msgspec

from kvxfer.errors import KVXferError
from kvxfer.text import printable

FAILED = 2
"""Exit status of a command that failed, or was given what it cannot use."""
INTERRUPTED, PIPE_CLOSED = 130, 141
"""Exit statuses after SIGINT, and after the reader closed the pipe: 128 + signal, as in shells."""
WIDTH = 80

T = TypeVar("T")


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


def show(result: T, form: Callable[[T], str], *, as_json: bool) -> None:
    """Print a result as JSON, or in its form for people."""
    if as_json:
        print_json(result)
    else:
        print(form(result))


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
    """Format the meaning of a command's exit statuses 0 and 1, if it has that, for its help."""
    statuses = [f"0 {done}", f"1 {bad}" if bad else "", f"{FAILED} when the command failed"]
    return f"exit status: {'; '.join(filter(None, statuses))}"


def run_command(program: str, command: Callable[[], int]) -> int:
    """Run a command and return its exit status; an error is printed as one line.

    What the output's encoding lacks is escaped. Nothing is printed where the output was closed.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    said = ""
    try:
        status = command()
    except BrokenPipeError:  # the reader closed the pipe
        status = PIPE_CLOSED
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as exc:
        status, said = FAILED, f"{exc.filename}: {exc.strerror}" if exc.filename else str(exc)
    except (KVXferError, MemoryError) as exc:
        status, said = FAILED, str(exc) or "there is not enough memory"
    try:
        print(end="", flush=True)
    except OSError as exc:  # nothing more must be written to it, at the end of the process either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = FAILED
        if isinstance(exc, BrokenPipeError):
            status = PIPE_CLOSED
        elif not said:
            said = str(exc)
    if said and sys.stderr is not None:
        with contextlib.suppress(OSError):  # of a reader that is gone: the status says it, too
            sys.stderr.write(f"{program}: {printable(said)}\n")
    return status


@contextlib.contextmanager
def ending_by_sigterm() -> Iterator[None]:
    """End as by Ctrl-C when SIGTERM comes: what was started or written for a while goes, too."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
