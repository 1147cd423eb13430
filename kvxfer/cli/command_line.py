"""Command line: the parser, output and exit statuses of every command."""

import argparse
import contextlib
import io
import json
import os
import sys
import textwrap
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TextIO, TypeVar

import msgspec

from kvxfer.errors import KVXferError
from kvxfer.text import printable

FAILED = 2
"""Exit status of a command that failed, or whose arguments are invalid."""
INTERRUPTED, PIPE_CLOSED = 130, 141
"""Exit statuses after SIGINT, and after the reader closed the pipe: 128 + signal, as in shells."""
WIDTH = 80

T = TypeVar("T")


class CommandLine(argparse.ArgumentParser):
    """Parser of a command line that reports an error in one line, as all commands do."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse arguments; refuse a NUL, which a program that calls `main` could pass."""
        for each in args or ():
            if "\0" in each:
                self.error(f"{each!r} has a NUL, which no path or address has")
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Raise an error that names the argument that cannot be used."""
        raise KVXferError(f"{message}; see {self.prog} --help")

    def _print_message(self, message: str, file: Any = None) -> None:
        """Write help or the version; raise if that fails, which argparse ignores."""
        (file or sys.stderr).write(message)


def show(result: T, form: Callable[[T], str], *, as_json: bool) -> None:
    """Print a result as JSON, or in its form for people."""
    if as_json:
        print_json(result)
    else:
        print(form(result))


def print_json(value: object) -> None:
    """Print a value as JSON; escape bytes of file names that are not UTF-8."""
    try:
        text = msgspec.json.encode(value).decode()
    except UnicodeEncodeError:
        text = json.dumps(msgspec.to_builtins(value))
    print(text)


def wrap(text: str, head: str) -> list[str]:
    """Break a text into lines for a terminal, the first of which begins with `head`."""
    return textwrap.wrap(
        text, WIDTH, initial_indent=head, subsequent_indent=" " * len(head), break_on_hyphens=False
    )


def exit_statuses(done: str, bad: str = "") -> str:
    """Format the exit statuses of a command for its help; without `bad`, it has no status 1."""
    statuses = [f"0 {done}", f"1 {bad}" if bad else "", f"{FAILED} when the command failed"]
    return f"exit status: {'; '.join(filter(None, statuses))}"


def run_command(program: str, command: Callable[[], int]) -> int:
    """Run a command and return its exit status; an error is printed as one line.

    Characters that the output's encoding lacks are escaped. A command that prints to an output that
    was closed fails.
    """
    _open_closed_outputs()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    said = ""
    try:
        try:
            status = command()
        except SystemExit as exc:  # a parser has printed its help or the version
            status = int(exc.code or 0)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader closed the pipe
        status = PIPE_CLOSED
    except KeyboardInterrupt:
        status = INTERRUPTED
    except OSError as exc:
        status, said = FAILED, f"{exc.filename}: {exc.strerror}" if exc.filename else str(exc)
    except (KVXferError, MemoryError) as exc:
        status, said = FAILED, str(exc) or "out of memory"
    except Exception:  # noqa: BLE001 - Python's own status, 1, would say that a block is bad
        status = FAILED
        with contextlib.suppress(OSError):
            traceback.print_exc()
    if said:
        with contextlib.suppress(OSError):  # the reader is gone: the status still tells
            sys.stderr.write(f"{program}: {printable(said)}\n")
    _flush_or_discard(sys.stdout, sys.stderr)
    return status


def _open_closed_outputs() -> None:
    """Replace outputs that Python sets to None if they were closed: packages such as tqdm use them.

    A write to the standard output fails then, as one to a closed descriptor; errors are discarded.
    """
    for name, mode in (("stdout", os.O_RDONLY), ("stderr", os.O_WRONLY)):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, mode), "w"))


def _flush_or_discard(*streams: TextIO) -> None:
    for stream in streams:
        try:
            stream.flush()
        except OSError:  # the flush at exit would fail, too, and change the exit status
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
