"""Command `kvxfer serve`: a process that holds blocks for engines, as a peer or as a host pool."""

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

from kvxfer import runtime
from kvxfer.cli import service
from kvxfer.cli.command_line import CommandLine, exit_statuses
from kvxfer.endpoint import Endpoint
from kvxfer.errors import InvalidArgumentError
from kvxfer.extras import require_extra
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
PEER_OPTIONS = (
    *("data_port", "transport", "secret_file", "tls_cert", "tls_key", "tls_ca", "max_connections"),
    *("discover", "advertise", "etcd_user_file", "etcd_ca", "etcd_cert", "etcd_key"),
)
"""Options that are fields of `NixlConfig`; like its times, they mean nothing to a host pool."""

MIN_LEASE_S = 4.0  # two heartbeats of engines
_OPTIONS: Mapping[str, str] = {
    "--data-port PORT 0": "second port that peers connect to, for blocks that NIXL does not move; "
    "0, the default, chooses a free port",
    "--max-connections N 1024": "maximum number of peer connections: one each if NIXL moves the "
    "blocks, up to five each through sockets; default 1024",
    "--namespace FILE": "namespace.json of a file store: only engines with this model and layout "
    "are served, and memory is reserved at once; default: those of the first engine that connects",
    "--warm N 0": "number of most recently used blocks of the first file tier to load into memory "
    "before this process is ready; needs --namespace",
    "--secret-file FILE": "file with the secret of all peers; default: the variable KVXFER_SECRET",
    "--tls-cert FILE": "certificate of this process, PEM",
    "--tls-key FILE": "private key of that certificate, PEM",
    "--tls-ca FILE": "certificate of the authority that signs those of all peers, PEM",
    "--discover URL": "etcd://HOST:PORT/PREFIX at which this process announces itself, for engines "
    "that find their peers there; commas separate the members of a cluster",
    "--advertise HOST:PORT": "address at which engines reach this process; default: that of "
    "--listen, with the real port in place of 0",
    "--etcd-user-file FILE": "file with NAME:PASSWORD for etcd",
    "--etcd-ca FILE": "certificate of the authority of etcd, PEM",
    "--etcd-cert FILE": "certificate that proves this process to etcd, PEM",
    "--etcd-key FILE": "private key of that certificate, PEM",
    "--lease TIME 8s": "time for which blocks stay pinned for a silent peer; default 8s",
    "--timeout TIME 10s": "time that the bytes of blocks may take through sockets; default 10s",
    "--drain-timeout TIME 20s": "time to wait at the end for blocks being moved; default 20s",
    "--warm-timeout TIME 60s": "time that --warm may take before it skips the rest; default 60s",
    "--ready HOST:PORT": "address that answers GET /ready: 200, or 503 while starting and draining",
    "--metrics HOST:PORT": "address of GET /metrics for Prometheus; may be that of --ready",
    "--events ADDRESS": "address such as tcp://127.0.0.1:5557, at which routers subscribe to the "
    "blocks that come and go; a ZMQ socket that speaks vLLM's KV events",
    "--events-replay ADDRESS": "address at which routers ask for events that they have lost",
}
"""Help of each option that takes a text or a number, by its name, its value and its default."""

_PAGE_NAMES = {"/ready": "readiness", "/metrics": "metrics"}

logger = logging.getLogger(__name__)


def main(argv: Sequence[str]) -> int:
    """Hold blocks for other processes until SIGTERM, SIGHUP or SIGINT; return 0."""
    with contextlib.ExitStack() as opened:
        opened.enter_context(contextlib.suppress(KeyboardInterrupt))
        opened.enter_context(service.ending_by_signals())
        arguments = make_parser().parse_args(argv)
        service.log_to_stderr(arguments.log_level)
        service.raise_descriptor_limit()
        metrics = _make_metrics() if arguments.metrics else None
        drain_timeout_s = Duration.parse(arguments.drain_timeout, name="drain-timeout")
        if arguments.events_replay and not arguments.events:
            raise InvalidArgumentError("events-replay", arguments.events_replay, "--events as well")
        events = opened.enter_context(_publish_events(arguments)) if arguments.events else None
        observers = [each for each in (metrics, events) if each is not None]
        holder = _make_holder(arguments, observers)
        runtime.run(_serve(holder, _make_pages(arguments, holder, metrics), drain_timeout_s))
    return 0


def make_parser() -> CommandLine:
    """Make the parser of the command line."""
    parser = CommandLine(
        prog="kvxfer serve",
        description="Hold blocks for engines: for those that name this process as "
        "nixl://HOST:PORT, with --listen, or for those of this machine that attach to its memory "
        "as pool:///PATH, with --pool. Without --namespace the first engine that connects "
        "determines the model. SIGTERM or Ctrl-C ends the process once no block is being moved; a "
        "second signal ends it at once.",
        epilog=exit_statuses("when a signal ended it"),
    )
    at = parser.add_mutually_exclusive_group(required=True)
    listen = "address that peers connect to; port 0 chooses a free port"
    at.add_argument("--listen", default="", metavar="HOST:PORT", help=listen)
    pool = "socket that engines of this user and machine attach to; their blocks are in shared "
    pool += "memory of this process, and outlive them"
    at.add_argument("--pool", default="", metavar="PATH", help=pool)
    capacity = "host memory for blocks, such as 8GiB"
    parser.add_argument("--capacity", required=True, metavar="SIZE", help=capacity)
    tier = "tier below host memory, such as file:///var/cache/kv?capacity=200GiB; may be given "
    tier += "several times, fastest first"
    parser.add_argument("--tier", action="append", default=[], metavar="URL", help=tier)
    for option, meaning in _OPTIONS.items():
        name, value, *default = option.split()
        kind = int if value in ("N", "PORT") else str
        parser.add_argument(name, metavar=value, default="".join(default), type=kind, help=meaning)
    transport = "transport of blocks; auto, the default, chooses one for each peer"
    parser.add_argument("--transport", default="auto", choices=TRANSPORTS, help=transport)
    hashes = "form of hashes in events; default int64, their last 8 bytes, as in vLLM"
    parser.add_argument("--events-hashes", default="int64", choices=HASH_FORMS, help=hashes)
    service.add_log_level(parser)
    return parser


def _require_for_pool(arguments: argparse.Namespace) -> None:
    """Refuse options that mean nothing to a host pool."""
    defaults = make_parser().parse_args(["--pool", arguments.pool, "--capacity", "1MiB"])
    for name in ("lease", "timeout", *PEER_OPTIONS):
        if (value := getattr(arguments, name)) != getattr(defaults, name):
            raise InvalidArgumentError(name.replace("_", "-"), value, "none with --pool")


def _make_metrics() -> "Metrics":
    require_extra("metrics", "prometheus_client", what="--metrics")
    from kvxfer.telemetry.metrics import Metrics

    return Metrics()


def _publish_events(arguments: argparse.Namespace) -> "EventPublisher":
    require_extra("events", "zmq", what="--events")
    from kvxfer.telemetry.events import EventPublisher

    events = EventPublisher(
        arguments.events, replay=arguments.events_replay, hashes=arguments.events_hashes
    )
    again = f", and replays them at {events.replay}" if events.replay else ""
    logger.info("publishes events at %s%s", events.endpoint, again)
    return events


def _make_pages(
    arguments: argparse.Namespace, holder: "Holder", metrics: "Metrics | None"
) -> "dict[Endpoint, dict[str, Callable[[], Page]]]":
    """Make the pages of each address; one address may have all of them."""
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
    from kvxfer.connect import open_backend
    from kvxfer.pages.texts import load_namespace
    from kvxfer.storage.observer import Reports
    from kvxfer.telemetry.journal import journal_observers

    for tier in arguments.tier:  # fail now, not when the first peer connects
        _require_tier(tier, arguments)
    capacity = ByteSize.parse(arguments.capacity, name="capacity")
    namespace = load_namespace(arguments.namespace) if arguments.namespace else None
    host = {"type": "host", "capacity": capacity, "shared": bool(arguments.pool)}
    opening = functools.partial(open_backend, [host, *arguments.tier], observers=observers)
    kept = {"namespace": namespace, "prepare": _make_warming(arguments, namespace)}
    holder = _open_holder(arguments, capacity, opening, kept)
    observers = [*observers, *journal_observers()]
    holder.observe(Reports(observers, "pool" if arguments.pool else "nixl"))
    return holder


def _require_tier(tier: str, arguments: argparse.Namespace) -> None:
    """Check a tier, which must not be this process, as it would wait for itself."""
    from kvxfer.backends.nixl.config import NixlConfig
    from kvxfer.backends.pool import PoolConfig
    from kvxfer.doctor import require_openable

    config = require_openable("tier", tier)
    own: set[object] = {arguments.discover, *(Path(at).resolve() for at in [arguments.pool] if at)}
    own |= {Endpoint.parse("address", at) for at in (arguments.listen, arguments.advertise) if at}
    named: set[object] = set()
    if isinstance(config, PoolConfig):
        named = {Path(config.path).resolve()}
    elif isinstance(config, NixlConfig):
        named = {config.discover, *config.peers}
    if own & named - {""}:
        raise InvalidArgumentError("tier", tier, "a process other than this one")


def _open_holder(
    arguments: argparse.Namespace,
    capacity: ByteSize,
    opening: "Callable[[Namespace], Backend]",
    kept: "Mapping[str, Any]",
) -> "Holder":
    if arguments.pool:
        from kvxfer.backends.pool import PoolServer

        _require_for_pool(arguments)
        return PoolServer(Path(arguments.pool), capacity, opening, **kept)
    from kvxfer.backends.nixl.config import NixlConfig
    from kvxfer.backends.nixl.standalone import StandalonePeer

    lease_s = Duration.parse(arguments.lease, name="lease", minimum_s=MIN_LEASE_S)
    config = NixlConfig(
        **{name: getattr(arguments, name) for name in ("listen", *PEER_OPTIONS)},
        capacity=capacity,
        timeout_s=Duration.parse(arguments.timeout, name="timeout"),
        lease_s=lease_s,
        heartbeat_s=lease_s / 4,  # sent only by processes that ask
    )
    return StandalonePeer(config, opening, **kept)


def _make_warming(
    arguments: argparse.Namespace, namespace: "Namespace | None"
) -> "Callable[[Backend], Awaitable[None]] | None":
    """Make the function that preloads blocks before the first engine is served; None without."""
    from kvxfer.connect import parse_backend
    from kvxfer.tiering.tiered_backend import RemembersUse, preload, tiers_of

    timeout_s = Duration.parse(arguments.warm_timeout, name="warm-timeout")
    if not arguments.warm:
        return None
    if arguments.warm < 0 or namespace is None or not arguments.tier:
        wanted = "a number of blocks, with --namespace and --tier"
        raise InvalidArgumentError("warm", arguments.warm, wanted)
    if not any(isinstance(parse_backend(tier)[0], RemembersUse) for tier in arguments.tier):
        wanted = "a file:// --tier as well, which knows the most recently used blocks"
        raise InvalidArgumentError("warm", arguments.warm, wanted)

    async def warm(backend: "Backend") -> None:
        from kvxfer.backends.host import HostBackend

        host = tiers_of(backend)[0].provide(HostBackend)
        assert host is not None
        await preload(backend, min(arguments.warm, host.num_slots), timeout_s)

    return warm


async def _serve(
    holder: "Holder",
    pages: "Mapping[Endpoint, Mapping[str, Callable[[], Page]]]",
    drain_timeout_s: float,
) -> None:
    from kvxfer.cli.http_pages import HTTPPages

    asked_to_end = service.stop_signal()
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
        else:  # nobody is served yet, so there is nothing to drain
            await runtime.end_tasks([starting])
    logger.info("kvxfer serve has ended")
