"""Examination: one table of checks, each of which is made within a deadline."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec

from kvxfer import runtime
from kvxfer.backends.file import FileConfig
from kvxfer.backends.host import HostConfig
from kvxfer.backends.host.memory import SHARED_MEMORY
from kvxfer.backends.mooncake import MooncakeConfig
from kvxfer.backends.nixl import NixlConfig
from kvxfer.backends.object import ObjectConfig
from kvxfer.backends.pool import PoolConfig
from kvxfer.connect import BackendChoice, parse_backend
from kvxfer.doctor import machine, places
from kvxfer.doctor.finding import Check, Finding, Severity, error
from kvxfer.engine_side.vllm_keys import DEFAULT_HASH
from kvxfer.runtime import DaemonThreads
from kvxfer.text import printable

MAX_CHARACTERS = 500
"""Most characters of an error that a check did not expect."""


_Run = Callable[..., Finding | Iterable[Finding]]

CHECKS: Mapping[str, Sequence[tuple[Check, str, _Run]]] = {
    "machine": (
        (
            Check.HASH_SEED,
            "environment",
            lambda *given: machine.check_hash_seed(hash_name=given[2]),
        ),
        (Check.OPEN_FILES, "limits", lambda *_: machine.check_open_files()),
        (
            Check.LOCKED_MEMORY,
            "limits",
            lambda host, held, _: machine.check_locked_memory(host + held),
        ),
        (Check.CPUS, "control groups", lambda *_: machine.check_cpus()),
        (Check.MEMORY, "control groups", lambda host, held, _: machine.check_memory(host + held)),
        (
            Check.SHARED_MEMORY,
            str(SHARED_MEMORY),
            lambda host, *_: machine.check_shared_memory(host),
        ),
        (Check.HUGE_PAGES, "kernel", lambda *_: machine.check_huge_pages()),
        (Check.PACKAGE, "packages", lambda *_: machine.check_packages()),
        (Check.NIXL, "package", lambda *_: machine.check_nixl()),
        (Check.CUDA, "driver", lambda *_: machine.check_cuda()),
        (Check.VLLM, "package", lambda *_: machine.check_vllm()),
        (Check.VLLM_PLUGIN, "package", lambda *_: machine.check_plugin()),
    ),
    "file": (
        (Check.STORE_FOLDER, "", places.check_folder),
        (Check.STORE_SECRET, "", places.check_secret),
        (Check.STORE_SPACE, "", places.check_space),
        (Check.STORE_INODES, "", places.check_inodes),
        (Check.STORE_MEDIUM, "", places.check_medium),
        (Check.DIRECT_IO, "", places.check_direct_io),
        (Check.IO_URING, "", places.check_io_uring),
    ),
    "peer": ((Check.PEER, "", places.check_peer),),
    "directory": ((Check.DISCOVERY, "", places.check_discovery),),
    "pool": ((Check.POOL, "", places.check_pool),),
    "bucket": ((Check.BUCKET, "", places.check_bucket),),
    "mooncake": ((Check.MOONCAKE, "", places.check_mooncake),),
}
"""Checks of each kind of thing: the name, the subject where that is not the thing's URL, and the
check itself, of what `_things` lists: of the machine, the bytes that an engine keeps in host memory
and lends, and the hash of its keys."""

NUM_STEPS = {Check.PEER: 6, Check.BUCKET: 5}
"""Times that the deadline of a check may pass: two connections to a peer of three steps; of a
bucket a list, two stores, a removal, and one to spare."""


@dataclass(frozen=True, slots=True)
class PlannedCheck:
    """Check that is to be made.

    Attributes:
        run: Makes the check; may block, and fail in any way.
        num_steps: Times that its deadline may pass.
    """

    name: Check
    subject: str
    run: Callable[[], Finding | Iterable[Finding]]
    num_steps: int = 1


def examine(
    backends: Sequence[BackendChoice], *, timeout_s: float, hash_name: str = DEFAULT_HASH
) -> list[Finding]:
    """Examine this machine, and the backends of an engine on it.

    Args:
        backends: URLs or mappings, as for `kvxfer.connect`; may be none.
        timeout_s: Time for each check.
        hash_name: The engine's `--prefix-caching-hash-algo`, if it is one of vLLM.

    Returns:
        All findings, the worst first.

    Raises:
        InvalidArgumentError: A URL or mapping cannot be used.
    """
    configs = [parse_backend(each)[1] for each in backends]
    host_bytes = sum(each.capacity for each in configs if isinstance(each, HostConfig))
    held_bytes = sum(each.capacity or 0 for each in configs if isinstance(each, NixlConfig))
    this = ("machine", "", (host_bytes, held_bytes, hash_name))
    planned = [
        PlannedCheck(name, subject or url, partial(run, *given), NUM_STEPS.get(name, 1))
        for kind, url, given in (this, *_things(configs, timeout_s))
        for name, subject, run in CHECKS[kind]
    ]
    return run_checks(planned, timeout_s=timeout_s)


def run_checks(planned: Sequence[PlannedCheck], *, timeout_s: float) -> list[Finding]:
    """Make all checks at once; what fails or does not end is a finding, too.

    Returns:
        All findings, the worst first.
    """
    threads = DaemonThreads("kvxfer-doctor", max(1, len(planned)))
    began = runtime.monotonic()
    running = [threads.submit(_collect, check) for check in planned]
    findings: list[Finding] = []
    for check, future in zip(planned, running, strict=True):
        stop = began + timeout_s * check.num_steps
        try:
            found = runtime.result(future, max(0.0, stop - runtime.monotonic()))
        except TimeoutError:
            found = [_late(check, timeout_s * check.num_steps)]
        findings += found
    threads.shutdown()
    order = list(Severity)
    return sorted(findings, key=lambda finding: order.index(finding.severity))


def _things(
    configs: Iterable[msgspec.Struct], timeout_s: float
) -> Iterator[tuple[str, str, tuple[object, ...]]]:
    """List the kind and URL of what is examined, and what its checks take."""
    for config in configs:
        match config:
            case NixlConfig() if config.discover:
                yield "directory", config.discover, (config, timeout_s)
            case NixlConfig():
                hasty = places.hasten(config, timeout_s)
                yield from (("peer", f"nixl://{each}", (hasty, each)) for each in config.peers)
            case FileConfig():
                yield "file", f"file://{config.path}", (config,)
            case PoolConfig():
                yield "pool", f"pool://{config.path}", (config,)
            case ObjectConfig():
                hurried = msgspec.structs.replace(config, timeout_s=timeout_s)
                yield "bucket", config.url, (hurried,)
            case MooncakeConfig():
                short = msgspec.structs.replace(config, lookup_timeout_s=timeout_s)
                yield "mooncake", f"mooncake://{config.address}", (short,)


def _collect(check: PlannedCheck) -> list[Finding]:
    try:
        found = check.run()
        results = [found] if isinstance(found, Finding) else list(found)
    except Exception as exc:  # noqa: BLE001 - a check that fails is a finding of its own
        said = printable(f"{type(exc).__name__}: {exc}", MAX_CHARACTERS)
        results = [
            error(
                f"cannot be examined: {said}",
                why="An engine may fail in the same way.",
                mend="see what the error names; else report it, with this line",
            )
        ]
    return [result.of(check.name, check.subject) for result in results]


def _late(check: PlannedCheck, timeout_s: float) -> Finding:
    return error(
        f"does not answer within {timeout_s:g} s",
        why="Whatever hangs here hangs in an engine, too: its requests wait for a deadline.",
        mend=f"kvxfer doctor --timeout {10 * timeout_s:g}s ...  # if it is only slow",
    ).of(check.name, check.subject)
