"""Command `kvxfer serve`: a process that holds blocks for others, as a peer or as a host pool."""

import argparse
import asyncio
import contextlib
import functools
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from kvxfer.cli.exit_statuses import exit_statuses
from kvxfer.cli.service import add_log_level, log_to_stderr, stop_signal
from kvxfer.endpoint import Endpoint
from kvxfer.errors import InvalidArgumentError
from kvxfer.extras import needing
from kvxfer.units import ByteSize, Duration

if TYPE_CHECKING:
    from kvxfer.backends.nixl.config import Transport
    from kvxfer.backends.nixl.standalone import StandalonePeer
    from kvxfer.backends.pool import PoolServer
    from kvxfer.cli.http_pages import Page
    from kvxfer.storage.backend import Backend
    from kvxfer.storage.keys import Namespace
    from kvxfer.storage.observer import Observer
    from kvxfer.telemetry.events import EventPublisher, HashForm
    from kvxfer.telemetry.metrics import Metrics

    Holder: TypeAlias = StandalonePeer | PoolServer

TRANSPORTS: "tuple[Transport, ...]" = ("auto", "nixl", "socket")
HASH_FORMS: "tuple[HashForm, ...]" = ("int64", "bytes")
_OF_PEERS = (
    *("data_port", "transport", "secret_file", "tls_cert", "tls_key", "tls_ca"),
    *("lease", "timeout", "max_connections"),
    *("discover", "advertise", "etcd_user_file", "etcd_ca", "etcd_cert", "etcd_key"),
)
"""Options without a meaning for a host pool."""

_PAGE_NAMES = {"/ready": "readiness", "/metrics": "metrics"}

logger = logging.getLogger(__name__)


def main(argv: Sequence[str]) -> int:
    """Hold blocks for other processes until SIGTERM or SIGINT; return 0."""
    arguments = _parser().parse_args(argv)
    log_to_stderr(arguments.log_level)
    metrics = _make_metrics() if arguments.metrics else None
    drain_timeout_s = Duration.parse(arguments.drain_timeout)
    if arguments.events_replay and not arguments.events:
        raise InvalidArgumentError("events-replay", arguments.events_replay, "--events beside it")
    with contextlib.ExitStack() as opened:
        events = opened.enter_context(_publish_events(arguments)) if arguments.events else None
        observers = [each for each in (metrics, events) if each is not None]
        holder = _make_holder(arguments, observers)
        pages = _make_pages(arguments, holder, metrics)
        asyncio.run(_serve(holder, pages, drain_timeout_s))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvxfer serve",
        description="Hold blocks for engines: for those that name this process as "
        "nixl://HOST:PORT, with --listen, or for those of this machine that attach to its memory "
        "as pool:///PATH, with --pool. Without --namespace the first engine that connects "
        "determines the model. SIGTERM or Ctrl-C ends the process once no block is being moved "
        "any more, a second signal at once.",
        epilog=exit_statuses("when a signal ended it"),
    )
    at = parser.add_mutually_exclusive_group(required=True)
    at.add_argument(
        "--listen",
        default="",
        metavar="HOST:PORT",
        help="address that peers connect to; port 0 chooses a free port",
    )
    at.add_argument(
        "--pool",
        default="",
        metavar="PATH",
        help="socket that engines of this user and machine attach to; their blocks are in shared "
        "memory of this process, and outlive them",
    )
    parser.add_argument(
        "--data-port",
        type=int,
        default=0,
        metavar="PORT",
        help="second port that peers connect to, for blocks that NIXL does not move; 0, the "
        "default, chooses a free port",
    )
    parser.add_argument(
        "--max-connections",
        type=int,
        default=1024,
        metavar="N",
        help="most connections of peers: one of each where NIXL moves the blocks, up to five "
        "through sockets; default 1024",
    )
    parser.add_argument(
        "--capacity", required=True, metavar="SIZE", help="host memory for blocks, such as 8GiB"
    )
    parser.add_argument(
        "--namespace",
        default="",
        metavar="FILE",
        help="namespace.json of a file store: only engines with this model and layout are served, "
        "and memory is reserved at once; default: those of the first engine that connects",
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
        "--warm",
        type=int,
        default=0,
        metavar="N",
        help="blocks to bring from the tiers into memory before this process is ready, those that "
        "were used last; needs --namespace",
    )
    parser.add_argument(
        "--transport",
        default="auto",
        choices=TRANSPORTS,
        help="transport of blocks; auto, the default, chooses one for each peer",
    )
    _add_authentication(parser)
    _add_discovery(parser)
    _add_times(parser)
    parser.add_argument(
        "--ready",
        metavar="HOST:PORT",
        help="address that answers GET /ready: 200, or 503 while starting and draining",
    )
    parser.add_argument(
        "--metrics",
        metavar="HOST:PORT",
        help="address that answers GET /metrics for Prometheus; may be that of --ready",
    )
    _add_events(parser)
    add_log_level(parser)
    return parser


def _add_events(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--events",
        default="",
        metavar="ADDRESS",
        help="address such as tcp://127.0.0.1:5557, at which routers subscribe to the blocks that "
        "come and go; a ZMQ socket that speaks vLLM's KV events",
    )
    parser.add_argument(
        "--events-replay",
        default="",
        metavar="ADDRESS",
        help="address at which routers ask again for events that they lost",
    )
    parser.add_argument(
        "--events-hashes",
        default="int64",
        choices=HASH_FORMS,
        help="form of hashes in events; default int64, their last 8 bytes, as in vLLM",
    )


def _add_authentication(parser: argparse.ArgumentParser) -> None:
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


def _add_discovery(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--discover",
        default="",
        metavar="URL",
        help="etcd://HOST:PORT/PREFIX at which this process announces itself, for engines that "
        "find their peers there; several members of a cluster with commas between",
    )
    parser.add_argument(
        "--advertise",
        default="",
        metavar="HOST:PORT",
        help="address by which engines reach this process; default: that of --listen, and its port "
        "in place of port 0",
    )
    for name, content in (
        ("user-file", "NAME:PASSWORD for etcd; default: the variables ETCDCTL_USER and _PASSWORD"),
        ("ca", "certificate of the authority of etcd, PEM; default: ETCDCTL_CACERT"),
        ("cert", "certificate by which etcd knows this process, PEM; default: ETCDCTL_CERT"),
        ("key", "private key of that certificate, PEM; default: ETCDCTL_KEY"),
    ):
        parser.add_argument(
            f"--etcd-{name}", default="", metavar="FILE", help=f"file with {content}"
        )


def _add_times(parser: argparse.ArgumentParser) -> None:
    for option, default, meaning in (
        ("lease", "8s", "time for which blocks stay pinned for a peer that is silent"),
        ("timeout", "10s", "time that the bytes of blocks may take through sockets"),
        ("drain-timeout", "20s", "time to wait at the end for blocks that are being moved"),
        ("warm-timeout", "60s", "time that --warm may take; the rest stays below"),
    ):
        explained = f"{meaning}; default {default}"
        parser.add_argument(f"--{option}", default=default, metavar="TIME", help=explained)


def _make_metrics() -> "Metrics":
    with needing("metrics", "prometheus_client", what="--metrics"):
        from kvxfer.telemetry.metrics import Metrics
    return Metrics()


def _publish_events(arguments: argparse.Namespace) -> "EventPublisher":
    with needing("events", "zmq", what="--events"):
        from kvxfer.telemetry.events import EventPublisher
    events = EventPublisher(
        arguments.events, replay=arguments.events_replay, hashes=arguments.events_hashes
    )
    again = f", again at {events.replay}" if events.replay else ""
    logger.info("events at %s%s", events.endpoint, again)
    return events


def _make_pages(
    arguments: argparse.Namespace, holder: "Holder", metrics: "Metrics | None"
) -> "dict[Endpoint, dict[str, Callable[[], Page]]]":
    """Make the pages of each address: with one address for all, it has them all."""
    from kvxfer.cli.http_pages import Page

    pages: dict[Endpoint, dict[str, Callable[[], Page]]] = defaultdict(dict)
    if arguments.ready:
        states = HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.OK
        at = Endpoint.parse("ready", arguments.ready)
        pages[at]["/ready"] = lambda: Page(states[holder.is_ready])
    if metrics is not None:
        from prometheus_client import CONTENT_TYPE_LATEST

        at = Endpoint.parse("metrics", arguments.metrics)
        pages[at]["/metrics"] = lambda: Page(HTTPStatus.OK, metrics.text(), CONTENT_TYPE_LATEST)
    return pages


def _make_holder(arguments: argparse.Namespace, observers: "Sequence[Observer]") -> "Holder":
    from kvxfer.backends.file import load_namespace
    from kvxfer.connect import open_backend
    from kvxfer.storage.observer import Reports
    from kvxfer.telemetry.journal import journal_observers

    for tier in arguments.tier:  # now, not when the first peer connects
        _require_tier(tier, arguments)
    capacity = ByteSize.parse(arguments.capacity)
    namespace = load_namespace(arguments.namespace) if arguments.namespace else None
    host = {"type": "host", "capacity": capacity, "shared": bool(arguments.pool)}
    opening = functools.partial(open_backend, [host, *arguments.tier], observers=observers)
    kept = {"namespace": namespace, "prepare": _warming(arguments, namespace)}
    make = _make_pool if arguments.pool else _make_peer
    holder = make(arguments, capacity, opening, kept)
    observers = [*observers, *journal_observers()]
    holder.observe(Reports(observers, "pool" if arguments.pool else "nixl"))
    return holder


def _require_tier(tier: str, arguments: argparse.Namespace) -> None:
    """Check the URL of a tier, which must not name this process itself: it would wait for itself.

    Raises:
        InvalidArgumentError: It is no URL of a backend, or that of this process.
    """
    from kvxfer.backends.nixl.config import NixlConfig
    from kvxfer.backends.pool import PoolConfig
    from kvxfer.connect import parse_backend

    _, config = parse_backend(tier)
    own: set[object] = {arguments.discover}
    own |= {Path(arguments.pool).resolve()} if arguments.pool else set()
    own |= {Endpoint.parse("address", at) for at in (arguments.listen, arguments.advertise) if at}
    named: set[object] = set()
    if isinstance(config, PoolConfig):
        named = {Path(config.path).resolve()}
    elif isinstance(config, NixlConfig):
        named = {config.discover, *config.peers}
    if own & named - {""}:
        raise InvalidArgumentError("tier", tier, "another process than this one")


def _make_peer(
    arguments: argparse.Namespace,
    capacity: ByteSize,
    opening: "Callable[[Namespace], Backend]",
    kept: "Mapping[str, Any]",
) -> "StandalonePeer":
    from kvxfer.backends.nixl.config import NixlConfig
    from kvxfer.backends.nixl.standalone import StandalonePeer

    lease_s = Duration.parse(arguments.lease)
    config = NixlConfig(
        listen=arguments.listen,
        data_port=arguments.data_port,
        max_connections=arguments.max_connections,
        capacity=capacity,
        secret_file=arguments.secret_file,
        tls_cert=arguments.tls_cert,
        tls_key=arguments.tls_key,
        tls_ca=arguments.tls_ca,
        transport=arguments.transport,
        discover=arguments.discover,
        advertise=arguments.advertise,
        etcd_user_file=arguments.etcd_user_file,
        etcd_ca=arguments.etcd_ca,
        etcd_cert=arguments.etcd_cert,
        etcd_key=arguments.etcd_key,
        timeout_s=Duration.parse(arguments.timeout),
        lease_s=lease_s,
        heartbeat_s=lease_s / 4,  # which only processes that ask send
    )
    return StandalonePeer(config, opening, **kept)


def _make_pool(
    arguments: argparse.Namespace,
    capacity: ByteSize,
    opening: "Callable[[Namespace], Backend]",
    kept: "Mapping[str, Any]",
) -> "PoolServer":
    from kvxfer.backends.pool import PoolServer

    defaults = _parser().parse_args(["--pool", arguments.pool, "--capacity", "1MiB"])
    for name in _OF_PEERS:
        value = getattr(arguments, name)
        if value != getattr(defaults, name):
            raise InvalidArgumentError(name.replace("_", "-"), value, "none with --pool")
    return PoolServer(Path(arguments.pool), capacity, opening, **kept)


def _warming(
    arguments: argparse.Namespace, namespace: "Namespace | None"
) -> "Callable[[Backend], Awaitable[None]] | None":
    """Make the function that brings blocks into memory before the first engine is served."""
    timeout_s = Duration.parse(arguments.warm_timeout)
    if not arguments.warm:
        return None
    if arguments.warm < 0 or namespace is None or not arguments.tier:
        wanted = "a number of blocks, with --namespace and --tier"
        raise InvalidArgumentError("warm", arguments.warm, wanted)

    async def warm(backend: "Backend") -> None:
        from kvxfer.backends.host import HostBackend
        from kvxfer.tiering import TieredBackend
        from kvxfer.tiering.preloading import preload

        assert isinstance(backend, TieredBackend)
        host = backend.tiers[0]
        assert isinstance(host, HostBackend)
        await preload(backend, min(arguments.warm, host.num_slots), timeout_s)

    return warm


async def _serve(
    holder: "Holder",
    pages: "Mapping[Endpoint, Mapping[str, Callable[[], Page]]]",
    drain_timeout_s: float,
) -> None:
    from kvxfer.cli.http_pages import HTTPPages

    asked_to_end = stop_signal()
    async with contextlib.AsyncExitStack() as stack:
        for endpoint, of_endpoint in pages.items():
            at = (await stack.enter_async_context(HTTPPages(endpoint, of_endpoint))).endpoint
            for path in of_endpoint:
                logger.info("%s at http://%s%s", _PAGE_NAMES[path], at, path)
        await stack.enter_async_context(contextlib.aclosing(holder))
        starting = asyncio.ensure_future(holder.start())
        ending = asyncio.ensure_future(asked_to_end.wait())
        await asyncio.wait([starting, ending], return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            await starting
            await ending
            await holder.drain(drain_timeout_s)
        else:  # nobody is served yet, and nothing stored
            starting.cancel()
            await asyncio.wait([starting])
    logger.info("ended")
