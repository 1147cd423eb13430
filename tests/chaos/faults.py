"""Fault reports of a chaos run: lines in a process's log, which the conductor reads."""

import enum
import faulthandler
import json
import logging
import os
import re
from asyncio import AbstractEventLoop, all_tasks
from collections import Counter
from collections.abc import Iterable
from typing import NoReturn

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


# The last alternative is written by `faulthandler`'s watchdog, when even the event loop is stuck.
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
    logger.critical("%s: %s", kind, text.replace("\n", " | "), exc_info=exc)


def report_hang(what: str, loops: Iterable[AbstractEventLoop | None]) -> NoReturn:
    """Report a call that does not end, with all stacks, and end the process."""
    report(Kind.HANG, what)
    for loop in filter(None, loops):
        for task in all_tasks(loop):
            task.print_stack()
    faulthandler.dump_traceback(all_threads=True)
    os._exit(HUNG_STATUS)


def report_counts(counts: Counter[str]) -> None:
    logger.info("%s%s", COUNTS, json.dumps(counts))
    counts.clear()


def _is_news(record: logging.LogRecord) -> bool:
    """Whether a log record is unexpected: about another error than a backend that is gone."""
    exc = record.exc_info[1] if record.exc_info else None
    return not isinstance(exc, BackendUnavailableError)
