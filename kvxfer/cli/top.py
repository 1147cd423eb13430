"""Command `kvxfer top`: what metrics count, live in a terminal."""

import asyncio
import signal
import sys
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING

from kvxfer import runtime
from kvxfer.cli.command_line import CommandLine, exit_statuses
from kvxfer.endpoint import Endpoint
from kvxfer.errors import InvalidArgumentError
from kvxfer.extras import require_extra
from kvxfer.units import Duration

if TYPE_CHECKING:
    import aiohttp
    from rich.console import Console, RenderableType

    from kvxfer.top import WatchedProcess

MIN_INTERVAL_S, MAX_INTERVAL_S = 0.1, 86400.0
MIN_TIMEOUT_S, MAX_TIMEOUT_S = 1.0, 5.0
TERMINATED = 143  # 128 + SIGTERM, as shells have it


def main(argv: Sequence[str]) -> int:
    """Show what the metrics of processes count, until Ctrl-C; one picture without a terminal.

    Returns:
        0, or 1 when an address of a single picture did not answer.

    Raises:
        InvalidArgumentError: An argument cannot be used.
        KVXferError: A package of the extra is not installed.
    """
    arguments = _parser().parse_args(argv)
    endpoints = dict.fromkeys(Endpoint.parse("address", each) for each in arguments.address)
    if any(not endpoint.port for endpoint in endpoints):
        raise InvalidArgumentError("address", arguments.address, "ports from 1 on")
    interval_s = Duration.parse(
        arguments.interval, name="interval", minimum_s=MIN_INTERVAL_S, maximum_s=MAX_INTERVAL_S
    )
    require_extra("top", "aiohttp", "prometheus_client", "rich")
    from rich.console import Console

    from kvxfer.top import WIDTH, WatchedProcess

    processes = [WatchedProcess(endpoint) for endpoint in endpoints]
    console = Console()
    if arguments.once or not sys.stdout.isatty() or console.is_dumb_terminal:
        once = console if sys.stdout.isatty() else Console(width=WIDTH)
        runtime.run(_show_once(processes, once, interval_s))
        return int(any(process.error for process in processes))
    runtime.run(_show_live(processes, console, interval_s))
    return 0


def _parser() -> CommandLine:
    parser = CommandLine(
        prog="kvxfer top",
        description="Show what the metrics of processes count, live in a terminal: those of "
        "kvxfer serve, of a program with kvxfer.telemetry.metrics, of vLLM's server. "
        "Without a terminal it shows one picture. Ctrl-C ends it.",
        epilog=exit_statuses("after one picture", "when an address did not answer for that picture")
        + "; 130 after Ctrl-C",
    )
    parser.add_argument(
        "address",
        nargs="+",
        metavar="HOST:PORT",
        help="address that answers GET /metrics; one that does not is asked again",
    )
    parser.add_argument(
        "--interval",
        default="2s",
        metavar="TIME",
        help="time between two pictures, which their rates are of; default 2s",
    )
    parser.add_argument(
        "--once", action="store_true", help="show one picture, after one interval, and end"
    )
    return parser


async def _show_once(
    processes: "Sequence[WatchedProcess]", console: "Console", interval_s: float
) -> None:
    async with _session() as session:
        await _ask(processes, session, interval_s)
        await asyncio.sleep(interval_s)
        await _ask(processes, session, interval_s)
    console.print(_drawing(processes, interval_s)(), end="")


async def _show_live(
    processes: "Sequence[WatchedProcess]", console: "Console", interval_s: float
) -> None:
    from rich.live import Live

    # Whatever ends it, the terminal shows again what it showed before.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, sys.exit, TERMINATED)
    draw = _drawing(processes, interval_s)
    async with _session() as session:
        with Live(draw(), console=console, screen=True, auto_refresh=False) as live:
            while True:
                began_s = runtime.monotonic()
                await _ask(processes, session, interval_s)
                live.update(draw(), refresh=True)
                await asyncio.sleep(max(0.0, began_s + interval_s - runtime.monotonic()))


def _session() -> "aiohttp.ClientSession":
    import aiohttp

    # An answer on a connection that was open before says nothing about new ones.
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True))


async def _ask(
    processes: "Sequence[WatchedProcess]", session: "aiohttp.ClientSession", interval_s: float
) -> None:
    from kvxfer.top import ask_all

    await ask_all(processes, session, min(max(interval_s, MIN_TIMEOUT_S), MAX_TIMEOUT_S))


def _drawing(
    processes: "Sequence[WatchedProcess]", interval_s: float
) -> "Callable[[], RenderableType]":
    from kvxfer.top import picture

    def draw() -> "RenderableType":
        when = datetime.now().astimezone()
        return picture(processes, interval_s=interval_s, when=when, now_s=runtime.monotonic())

    return draw
