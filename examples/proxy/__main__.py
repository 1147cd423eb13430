"""`python -m examples.proxy`: a router for prefill and decode in separate engines."""

import argparse
import contextlib
import logging
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvxfer import runtime
from kvxfer.cli.command_line import CommandLine, exit_statuses, run_command
from kvxfer.cli.service import (
    add_log_level,
    ending_by_signals,
    log_to_stderr,
    raise_descriptor_limit,
    stop_signal,
)
from kvxfer.errors import KVXferError
from kvxfer.units import ByteSize, Duration

if TYPE_CHECKING:
    from examples.proxy.server import Proxy

PROGRAM = "python -m examples.proxy"

logger = logging.getLogger("examples.proxy")


def main(argv: Sequence[str]) -> int:
    """Route requests until SIGTERM, SIGHUP or SIGINT; return 0.

    Raises:
        KVXferError: aiohttp is not installed, or an argument cannot be used.
    """
    with contextlib.suppress(KeyboardInterrupt), ending_by_signals():
        _start(_parser().parse_args(argv))
    return 0


def _start(arguments: argparse.Namespace) -> None:
    try:
        from examples.proxy.config import ProxyConfig
        from examples.proxy.server import Proxy
    except ModuleNotFoundError as exc:
        wanted = "pip install aiohttp prometheus_client"
        raise KVXferError(f"needs the package {exc.name}: {wanted}") from exc

    log_to_stderr(arguments.log_level)
    logging.getLogger("examples").setLevel(arguments.log_level.upper())
    raise_descriptor_limit()
    config = ProxyConfig(
        prefill=tuple(arguments.prefill),
        decode=tuple(arguments.decode),
        listen=arguments.listen,
        overlap=arguments.overlap,
        timeout_s=Duration.parse(arguments.timeout, name="timeout"),
        prefill_timeout_s=Duration.parse(arguments.prefill_timeout, name="prefill-timeout"),
        drain_timeout_s=Duration.parse(arguments.drain_timeout, name="drain-timeout"),
        max_body_bytes=ByteSize.parse(arguments.max_body, name="max-body"),
    )
    runtime.run(_route(Proxy(config)))


def _parser() -> CommandLine:
    parser = CommandLine(
        prog=PROGRAM,
        description="Route requests for completions to vLLM's OpenAI servers: the prompt is "
        "computed by a prefill engine and continued by a decode engine. SIGTERM or Ctrl-C ends "
        "the process once no request is in progress; a second signal ends it at once.",
        epilog=exit_statuses("when a signal ended it"),
    )
    for option, task in (("prefill", "compute prompts"), ("decode", "continue them")):
        parser.add_argument(
            f"--{option}",
            required=True,
            nargs="+",
            action="extend",
            metavar="URL",
            help=f"servers of the engines that {task}, such as http://node-1:8000",
        )
    parser.add_argument(
        "--listen",
        default="127.0.0.1:8000",
        metavar="HOST:PORT",
        help="address that clients connect to; port 0 chooses a free port; default 127.0.0.1:8000",
    )
    parser.add_argument(
        "--overlap",
        action="store_true",
        help="begin both at once: the decode engine reads the first pages of a prompt while the "
        "prefill engine computes the next; only with engines that use KVXferConnector",
    )
    for option, default, meaning in (
        ("timeout", "600s", "time for a whole request"),
        ("prefill-timeout", "60s", "time for its prompt; then the decode engine computes it"),
        ("drain-timeout", "20s", "time for requests in progress after a first signal"),
    ):
        explained = f"{meaning}; default {default}"
        parser.add_argument(f"--{option}", default=default, metavar="TIME", help=explained)
    max_body = "largest body of a request; default 64MiB"
    parser.add_argument("--max-body", default="64MiB", metavar="SIZE", help=max_body)
    add_log_level(parser)
    return parser


async def _route(proxy: "Proxy") -> None:
    asked_to_end = stop_signal()
    async with proxy:
        await asked_to_end.wait()
    logger.info("the proxy has ended")


if __name__ == "__main__":
    sys.exit(run_command(PROGRAM, lambda: main(sys.argv[1:])))
