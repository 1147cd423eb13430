"""Command `kvxfer serve`: a stand-alone peer that holds blocks for other processes."""

import argparse
import asyncio
import contextlib
import functools
import logging
import signal
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvxfer.cli.text import exit_statuses
from kvxfer.units import ByteSize, Duration

if TYPE_CHECKING:
    from kvxfer.backends.nixl.config import Transport
    from kvxfer.backends.nixl.peers import Endpoint
    from kvxfer.backends.nixl.standalone import StandalonePeer

LOG_FORMAT = "%(asctime)s %(levelname)s %(message)s"
TRANSPORTS: "tuple[Transport, ...]" = ("auto", "nixl", "socket")
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)

logger = logging.getLogger(__name__)


def main(argv: Sequence[str]) -> int:
    """Hold blocks for other processes until SIGTERM or SIGINT; return 0."""
    parser = argparse.ArgumentParser(
        prog="kvxfer serve",
        description="Hold blocks for engines that name this process as nixl://HOST:PORT. The first "
        "engine that connects determines the model. SIGTERM or Ctrl-C ends the process once no "
        "block is being moved any more, a second signal at once.",
        epilog=exit_statuses("when a signal ended it"),
    )
    parser.add_argument(
        "--listen",
        required=True,
        metavar="HOST:PORT",
        help="address that peers connect to; port 0 chooses a free port",
    )
    parser.add_argument(
        "--capacity", required=True, metavar="SIZE", help="host memory for blocks, such as 8GiB"
    )
    parser.add_argument(
        "--tier",
        action="append",
        default=[],
        metavar="URL",
        help="tier below host memory, such as file:///var/cache/kv?capacity=200GiB; "
        "may be given several times, fastest first",
    )
    parser.add_argument(
        "--secret-file",
        default="",
        metavar="FILE",
        help="file with the secret that all peers share; default: the variable KVXFER_SECRET",
    )
    for name, content in (
        ("cert", "certificate of this process"),
        ("key", "private key of that certificate"),
        ("ca", "certificate of the authority that signs those of all peers"),
    ):
        parser.add_argument(f"--tls-{name}", default="", metavar="FILE", help=f"{content}, PEM")
    parser.add_argument(
        "--transport",
        default="auto",
        choices=TRANSPORTS,
        help="transport of blocks; auto, the default, chooses one for each peer",
    )
    parser.add_argument(
        "--ready",
        metavar="HOST:PORT",
        help="address that answers GET /ready: 200, or 503 while draining",
    )
    parser.add_argument(
        "--drain-timeout",
        default="20s",
        metavar="TIME",
        help="time to wait at the end for blocks that are being moved; default 20s",
    )
    arguments = parser.parse_args(argv)

    from kvxfer.backends.nixl.config import NixlConfig
    from kvxfer.backends.nixl.peers import Endpoint
    from kvxfer.backends.nixl.standalone import StandalonePeer
    from kvxfer.connect import open_backend, parse_backend

    for tier in arguments.tier:
        parse_backend(tier)  # reports a bad URL now, not when the first peer connects
    capacity = ByteSize.parse(arguments.capacity)
    config = NixlConfig(
        listen=arguments.listen,
        capacity=capacity,
        secret_file=arguments.secret_file,
        tls_cert=arguments.tls_cert,
        tls_key=arguments.tls_key,
        tls_ca=arguments.tls_ca,
        transport=arguments.transport,
    )
    tiers = [{"type": "host", "capacity": capacity}, *arguments.tier]
    peer = StandalonePeer(config, functools.partial(open_backend, tiers))
    ready = Endpoint.parse("ready", arguments.ready) if arguments.ready else None
    drain_timeout_s = Duration.parse(arguments.drain_timeout)
    logging.basicConfig(level=logging.WARNING, format=LOG_FORMAT)
    logging.getLogger("kvxfer").setLevel(logging.INFO)
    asyncio.run(_serve(peer, ready, drain_timeout_s))
    return 0


async def _serve(peer: "StandalonePeer", ready: "Endpoint | None", drain_timeout_s: float) -> None:
    from kvxfer.cli.readiness import Readiness

    loop = asyncio.get_running_loop()
    asked_to_end = asyncio.Event()
    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, asked_to_end.set)
    async with contextlib.AsyncExitStack() as stack:
        if ready is not None:
            await stack.enter_async_context(Readiness(ready, lambda: peer.is_ready))
        await stack.enter_async_context(contextlib.aclosing(peer))
        await peer.start()
        await asked_to_end.wait()
        for number in STOP_SIGNALS:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)  # a second signal ends the process at once
        await peer.drain(drain_timeout_s)
    logger.info("ended")
