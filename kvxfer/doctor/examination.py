"""Examination: one table of checks, each of which is made within a deadline."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import msgspec

from kvxfer import runtime
from kvxfer.backends.file import FileConfig
from kvxfer.backends.host import HostConfig
from kvxfer.backends.host.segment import SHARED_MEMORY
from kvxfer.backends.mooncake import MooncakeConfig
from kvxfer.backends.nixl import NixlConfig
from kvxfer.backends.object import ObjectConfig
from kvxfer.backends.pool import PoolConfig
from kvxfer.connect import BackendChoice, parse_backend
from kvxfer.doctor import machine, places
from kvxfer.doctor.finding import Check, Finding, Result, Severity, error
from kvxfer.endpoint import Endpoint
from kvxfer.engine_side.vllm_keys import DEFAULT_HASH
from kvxfer.runtime import DaemonThreads
from kvxfer.text import printable

MAX_CHARACTERS = 500
"""Most characters of an error that a check did not expect."""


class Machine(NamedTuple):
    """This machine, and what an engine on it needs: see `examine`."""

    host_bytes: int
    held_bytes: int
    hashes: str

    @property
    def needed(self) -> int:
        """Bytes of memory that are asked for."""
        return self.host_bytes + self.held_bytes


class Peer(NamedTuple):
    """Peer of a backend, at one of its addresses."""

    config: NixlConfig
    endpoint: Endpoint


class Directory(NamedTuple):
    """Place at which holders are announced, and the time for its answers."""

    config: NixlConfig
    timeout_s: float


_Run = Callable[[Any], Result | Iterable[Result]]

CHECKS: Mapping[type, Sequence[tuple[Check, str, _Run]]] = {
    Machine: (
        (Check.HASH_SEED, "environment", lambda it: machine.check_hash_seed(hash_name=it.hashes)),
        (Check.OPEN_FILES, "limits", lambda _: machine.check_open_files()),
        (Check.LOCKED_MEMORY, "limits", lambda it: machine.check_locked_memory(it.needed)),
        (Check.CPUS, "control groups", lambda _: machine.check_cpus()),
        (Check.MEMORY, "control groups", lambda it: machine.check_memory(it.needed)),
        (
            Check.SHARED_MEMORY,
            str(SHARED_MEMORY),
            lambda it: machine.check_shared_memory(it.host_bytes),
        ),
        (Check.HUGE_PAGES, "kernel", lambda _: machine.check_huge_pages()),
        (Check.PACKAGE, "packages", lambda _: machine.check_packages()),
        (Check.NIXL, "package", lambda _: machine.check_nixl()),
        (Check.CUDA, "driver", lambda _: machine.check_cuda()),
        (Check.VLLM, "package", lambda _: machine.check_vllm()),
        (Check.VLLM_PLUGIN, "package", lambda _: machine.check_plugin()),
    ),
    FileConfig: (
        (Check.STORE_FOLDER, "", places.check_folder),
        (Check.STORE_SECRET, "", places.check_secret),
        (Check.STORE_SPACE, "", places.check_space),
        (Check.STORE_INODES, "", places.check_inodes),
        (Check.STORE_MEDIUM, "", places.check_medium),
        (Check.DIRECT_IO, "", places.check_direct_io),
        (Check.IO_URING, "", places.check_io_uring),
    ),
    Peer: ((Check.PEER, "", lambda it: places.check_peer(*it)),),
    Directory: ((Check.DISCOVERY, "", lambda it: places.check_discovery(*it)),),
    PoolConfig: ((Check.POOL, "", places.check_pool),),
    ObjectConfig: ((Check.BUCKET, "", places.check_bucket),),
    MooncakeConfig: ((Check.MOONCAKE, "", places.check_mooncake),),
}
"""Checks of each kind of thing: the name, the subject where that is not the thing's URL, and the
check itself."""

NUM_STEPS = {Check.PEER: 6, Check.BUCKET: 5}
"""Times that the deadline of a check may pass: two connections to a peer of three steps; of a
bucket a list, two stores, a removal, and one to spare."""


@dataclass(frozen=True, slots=True)
class PlannedCheck:
    """Check that is to be made.

    Attributes:
        name: Name of the check.
        subject: Thing that is examined.
        run: Makes the check; may block, and fail in any way.
        num_steps: Times that its deadline may pass.
    """

    name: Check
    subject: str
    run: Callable[[], Result | Iterable[Result]]
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
    things = [("", Machine(host_bytes, held_bytes, hash_name)), *_things(configs, timeout_s)]
    planned = [
        PlannedCheck(name, subject or url, partial(run, thing), NUM_STEPS.get(name, 1))
        for url, thing in things
        for kind, checks in CHECKS.items()
        if isinstance(thing, kind)
        for name, subject, run in checks
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


def _things(configs: Iterable[msgspec.Struct], timeout_s: float) -> Iterator[tuple[str, object]]:
    """List what is examined, with its URL: `host://` is part of the machine."""
    for config in configs:
        match config:
            case NixlConfig() if config.discover:
                yield config.discover, Directory(config, timeout_s)
            case NixlConfig():
                for endpoint in config.peers:
                    yield f"nixl://{endpoint}", Peer(places.hasten(config, timeout_s), endpoint)
            case FileConfig():
                yield f"file://{config.path}", config
            case PoolConfig():
                yield f"pool://{config.path}", config
            case ObjectConfig():
                yield config.url, msgspec.structs.replace(config, timeout_s=timeout_s)
            case MooncakeConfig():
                hurried = msgspec.structs.replace(config, lookup_timeout_s=timeout_s)
                yield f"mooncake://{config.address}", hurried


def _collect(check: PlannedCheck) -> list[Finding]:
    try:
        found = check.run()
        results = [found] if isinstance(found, Result) else list(found)
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
