"""Log, limits and signals of commands that run for long."""

import asyncio
import contextlib
import logging
import resource
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import FrameType

from kvxfer.cli.command_line import CommandLine

LOG_FORMAT = "%(asctime)s %(levelname)s %(message)s"
LOG_LEVELS = ("debug", "info", "warning", "error")
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def add_log_level(parser: CommandLine) -> None:
    """Add the option `--log-level`."""
    meaning = "lowest level of logged lines; default info"
    parser.add_argument("--log-level", default="info", choices=LOG_LEVELS, help=meaning)


def log_to_stderr(level: str) -> None:
    """Log lines of kvxfer from `level` on, one of `LOG_LEVELS`, and warnings of other packages."""
    logging.basicConfig(level=logging.WARNING, format=LOG_FORMAT)
    logging.getLogger("kvxfer").setLevel(level.upper())


def raise_descriptor_limit() -> None:
    """Raise the soft limit on file descriptors to the hard limit, as Go programs do at start."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # a hard limit that the kernel does not grant
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def stop_signal() -> asyncio.Event:
    """Make an event of the running loop that the first signal of `STOP_SIGNALS` sets.

    A second signal ends the process at once. A SIGHUP that `nohup` ignores stays ignored.
    """
    loop = asyncio.get_running_loop()
    asked_to_end = asyncio.Event()
    numbers = _stop_signals()

    def end() -> None:
        asked_to_end.set()
        for number in numbers:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)

    for number in numbers:
        loop.add_signal_handler(number, end)
    return asked_to_end


def ending_by_signals() -> AbstractContextManager[None]:
    """Treat every signal of `STOP_SIGNALS` as Ctrl-C, so that files and processes are removed."""
    return _handling(signal.default_int_handler)


@contextlib.contextmanager
def stopping_between_steps() -> Iterator[Callable[[], None]]:
    """Hold back signals that end the process until the next step of its work.

    Yields:
        Function to call between two steps, which ends the process if a signal has arrived. A
        second signal ends it at once.
    """
    received: list[int] = []

    def note(number: int, _: object) -> None:
        received.append(number)
        for each in _stop_signals():
            signal.signal(each, signal.SIG_DFL)

    def check() -> None:
        if received[:1] == [signal.SIGINT]:
            raise KeyboardInterrupt
        if received:
            sys.exit(128 + received[0])  # as shells report a signal

    with _handling(note):
        yield check


@contextlib.contextmanager
def _handling(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Handle the signals that end the process, except on threads, which cannot handle any."""
    is_main = threading.current_thread() is threading.main_thread()
    before = [(each, signal.signal(each, handler)) for each in _stop_signals() if is_main]
    try:
        yield
    finally:
        for number, inherited in before:
            signal.signal(number, inherited)


def _stop_signals() -> list[signal.Signals]:
    return [each for each in STOP_SIGNALS if signal.getsignal(each) != signal.SIG_IGN]
