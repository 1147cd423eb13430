"""Options of the command `kvxfer serve`."""

import argparse
from typing import TYPE_CHECKING

from kvxfer.cli.command_line import CommandLine, exit_statuses
from kvxfer.cli.service import add_log_level
from kvxfer.errors import InvalidArgumentError

if TYPE_CHECKING:
    from kvxfer.backends.nixl.config import Transport
    from kvxfer.telemetry.events import HashForm

TRANSPORTS: "tuple[Transport, ...]" = ("auto", "nixl", "socket")
HASH_FORMS: "tuple[HashForm, ...]" = ("int64", "bytes")
OF_PEERS = (
    *("data_port", "transport", "secret_file", "tls_cert", "tls_key", "tls_ca", "max_connections"),
    *("discover", "advertise", "etcd_user_file", "etcd_ca", "etcd_cert", "etcd_key"),
)
"""Options that are fields of `NixlConfig`; like its times they have no meaning for a host pool."""


def make_parser() -> CommandLine:
    """Make the parser of the command line."""
    parser = CommandLine(
        prog="kvxfer serve",
        description="Hold blocks for engines: for those that name this process as "
        "nixl://HOST:PORT, with --listen, or for those of this machine that attach to its memory "
        "as pool:///PATH, with --pool. Without --namespace the first engine that connects "
        "determines the model. SIGTERM or Ctrl-C ends the process once no block is being moved "
        "any more, a second signal at once.",
        epilog=exit_statuses("when a signal ended it"),
    )
    _add_addresses(parser)
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
        help="blocks to bring from the first file tier into memory before this process is ready, "
        "those that were used last; needs --namespace",
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


def require_for_pool(arguments: argparse.Namespace) -> None:
    """Check that no option is given which has no meaning for a host pool.

    Raises:
        InvalidArgumentError: There is one.
    """
    defaults = make_parser().parse_args(["--pool", arguments.pool, "--capacity", "1MiB"])
    for name in ("lease", "timeout", *OF_PEERS):
        value = getattr(arguments, name)
        if value != getattr(defaults, name):
            raise InvalidArgumentError(name.replace("_", "-"), value, "none with --pool")


def _add_addresses(parser: CommandLine) -> None:
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


def _add_events(parser: CommandLine) -> None:
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


def _add_authentication(parser: CommandLine) -> None:
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


def _add_discovery(parser: CommandLine) -> None:
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


def _add_times(parser: CommandLine) -> None:
    for option, default, meaning in (
        ("lease", "8s", "time for which blocks stay pinned for a peer that is silent"),
        ("timeout", "10s", "time that the bytes of blocks may take through sockets"),
        ("drain-timeout", "20s", "time to wait at the end for blocks that are being moved"),
        ("warm-timeout", "60s", "time that --warm may take; the rest stays below"),
    ):
        explained = f"{meaning}; default {default}"
        parser.add_argument(f"--{option}", default=default, metavar="TIME", help=explained)
