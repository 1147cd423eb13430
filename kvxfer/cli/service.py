"""What commands share that run for long: their log, and their end."""

import asyncio
import logging
import resource
import signal

from kvxfer.cli.command_line import CommandLine

LOG_FORMAT = "%(asctime)s %(levelname)s %(message)s"
LOG_LEVELS = ("debug", "info", "warning", "error")
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def add_log_level(parser: CommandLine) -> None:
    """Add the option for the level of the log."""
    parser.add_argument(
        "--log-level",
        default="info",
        choices=LOG_LEVELS,
        help="least severe lines that are logged; default info",
    )


def log_to_stderr(level: str) -> None:
    """Begin to log: lines of kvxfer from a level of `LOG_LEVELS` on, of others from warnings on."""
    logging.basicConfig(level=logging.WARNING, format=LOG_FORMAT)
    logging.getLogger("kvxfer").setLevel(level.upper())


def raise_descriptor_limit() -> None:
    """Let this process have as many descriptors as it may, as servers in Go have them at once."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def stop_signal() -> asyncio.Event:
    """Make an event of the running loop that the first SIGTERM or SIGINT sets.

    The second signal ends the process at once.
    """
    loop = asyncio.get_running_loop()
    asked_to_end = asyncio.Event()

    def end() -> None:
        asked_to_end.set()
        for number in STOP_SIGNALS:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)

    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, end)
    return asked_to_end
