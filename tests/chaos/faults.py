"""Fault reports of a chaos run: lines in a process's log, which the conductor reads."""

import enum
import faulthandler
import json
import logging
import os
import re
import sys
from asyncio import AbstractEventLoop, Task, all_tasks
from collections import Counter
from collections.abc import Iterable
from typing import Any, NoReturn

from kvxfer.cli.service import LOG_FORMAT
from kvxfer.errors import BackendUnavailableError

logger = logging.getLogger("chaos")

HUNG_STATUS = 70
COUNTS = "counts "


class Kind(enum.StrEnum):
    """Fault: an event that must not happen."""

    WRONG = "wrong"
    HANG = "hang"
    EXCEPTION = "exception"


# A watchdog of `faulthandler` writes the last one, when not even the event loop goes on.
FAULT = re.compile(
    rf"^\S+ \S+ CRITICAL (?P<kind>{'|'.join(Kind)}): (?P<text>.*)"
    r"|^\S+ \S+ (?:ERROR|CRITICAL) (?P<error>.*)|^(?P<timeout>Timeout \(.*)"
)


def begin_log() -> None:
    """Log to the standard error, which the conductor reads, from warnings on."""
    logging.basicConfig(level=logging.WARNING, format=LOG_FORMAT)
    logger.setLevel(logging.INFO)
    for handler in logging.getLogger().handlers:
        handler.addFilter(_is_news)


def report(kind: Kind, text: str, *, exc: BaseException | None = None) -> None:
    """Report a fault."""
    logger.critical("%s: %s", kind, text.replace("\n", " | "), exc_info=exc)


def report_hang(what: str, loops: Iterable[AbstractEventLoop | None]) -> NoReturn:
    """Report a call that does not end, with all stacks, and end the process."""
    report(Kind.HANG, what)
    for loop in loops:
        if loop is not None:
            for task in all_tasks(loop):
                _print_awaited(task)
    faulthandler.dump_traceback(all_threads=True)
    os._exit(HUNG_STATUS)


def report_counts(counts: Counter[str]) -> None:
    """Report the counts to the conductor, and reset them."""
    logger.info("%s%s", COUNTS, json.dumps(counts))
    counts.clear()


def _is_news(record: logging.LogRecord) -> bool:
    """Whether a log record is unexpected: about another error than a backend that is gone."""
    exc = record.exc_info[1] if record.exc_info else None
    return not isinstance(exc, BackendUnavailableError)


def _print_awaited(task: Task[Any]) -> None:
    """Print a task and the chain of coroutines that it waits for."""
    sys.stderr.write(f"{task.get_name()}:\n")
    awaited: Any = task.get_coro()
    while awaited is not None:
        frame = getattr(awaited, "cr_frame", None) or getattr(awaited, "gi_frame", None)
        if frame is not None:
            code = frame.f_code
            sys.stderr.write(f"  {code.co_filename}:{frame.f_lineno} in {code.co_qualname}\n")
        else:
            sys.stderr.write(f"  {awaited!r:.300}\n")
        awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "gi_yieldfrom", None)
    sys.stderr.flush()
