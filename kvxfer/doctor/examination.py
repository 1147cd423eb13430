"""Examination: one table of checks, each of which is made within a deadline."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import msgspec

from kvxfer import runtime
from kvxfer.backends.file import FileConfig
from kvxfer.backends.host import HostConfig
from kvxfer.backends.mooncake import MooncakeConfig
from kvxfer.backends.nixl import NixlConfig
from kvxfer.backends.object import ObjectConfig
from kvxfer.backends.pool import PoolConfig
from kvxfer.connect import BackendChoice, parse_backend
from kvxfer.doctor import machine, places
from kvxfer.doctor.finding import Check, Examined, Finding, Severity
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


_Run = Callable[[Any, str, float], Finding | Iterable[Finding]]

CHECKS: dict[type, tuple[tuple[Check, str, _Run], ...]] = {
    Machine: (
        (
            Check.HASH_SEED,
            "environment",
            lambda it, *_: machine.check_hash_seed(hash_name=it.hashes),
        ),
        (Check.OPEN_FILES, "limits", lambda *_: machine.check_open_files()),
        (Check.LOCKED_MEMORY, "limits", lambda it, *_: machine.check_locked_memory(it.needed)),
        (Check.CPUS, "control groups", lambda *_: machine.check_cpus()),
        (Check.MEMORY, "control groups", lambda it, *_: machine.check_memory(it.needed)),
        (Check.SHARED_MEMORY, "memory", lambda it, *_: machine.check_shared_memory(it.host_bytes)),
        (Check.HUGE_PAGES, "kernel", lambda *_: machine.check_huge_pages()),
        (Check.PACKAGE, "packages", lambda *_: machine.check_packages()),
        (Check.NIXL, "package", lambda *_: machine.check_nixl()),
        (Check.CUDA, "driver", lambda *_: machine.check_cuda()),
        (Check.VLLM, "package", lambda *_: machine.check_vllm()),
        (Check.VLLM_PLUGIN, "package", lambda *_: machine.check_plugin()),
    ),
    FileConfig: (
        (Check.STORE_FOLDER, "", lambda it, url, _: places.check_folder(url, it)),
        (Check.STORE_SECRET, "", lambda it, url, _: places.check_secret(url, it)),
        (Check.STORE_SPACE, "", lambda it, url, _: places.check_space(url, it)),
        (Check.STORE_INODES, "", lambda it, url, _: places.check_inodes(url, it)),
        (Check.STORE_MEDIUM, "", lambda it, url, _: places.check_medium(url, it)),
        (Check.DIRECT_IO, "", lambda it, url, _: places.check_direct_io(url, it)),
        (Check.IO_URING, "", lambda it, url, _: places.check_io_uring(url, it)),
    ),
    Peer: ((Check.PEER, "", lambda it, _, time_s: places.check_peer(*it, timeout_s=time_s)),),
    NixlConfig: ((Check.DISCOVERY, "", lambda it, _, s: places.check_discovery(it, timeout_s=s)),),
    PoolConfig: ((Check.POOL, "", lambda it, *_: places.check_pool(it)),),
    ObjectConfig: ((Check.BUCKET, "", lambda it, _, s: places.check_bucket(it, timeout_s=s)),),
    MooncakeConfig: (
        (Check.MOONCAKE, "", lambda it, _, s: places.check_mooncake(it, timeout_s=s)),
    ),
}
"""Checks of each kind of thing: the name, the subject where that is not the thing's URL, and the
check itself of the thing, its URL and the time for one step."""

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
    things = [("", Machine(host_bytes, held_bytes, hash_name)), *_things(configs)]
    planned = [
        PlannedCheck(
            name, subject or url, partial(run, thing, url, timeout_s), NUM_STEPS.get(name, 1)
        )
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
    return sort_findings(findings)


def sort_findings(findings: Iterable[Finding]) -> list[Finding]:
    """Sort findings by severity, the worst first, otherwise as they are."""
    order = list(Severity)
    return sorted(findings, key=lambda finding: order.index(finding.severity))


def _things(configs: Iterable[msgspec.Struct]) -> Iterator[tuple[str, object]]:
    """List what is examined, with its URL: `host://` is part of the machine."""
    for config in configs:
        match config:
            case NixlConfig() if config.discover:
                yield config.discover, config
            case NixlConfig():
                for endpoint in config.peers:
                    yield f"nixl://{endpoint}", Peer(config, endpoint)
            case FileConfig():
                yield f"file://{config.path}", config
            case PoolConfig():
                yield f"pool://{config.path}", config
            case ObjectConfig():
                yield config.url, config
            case MooncakeConfig():
                yield f"mooncake://{config.address}", config


def _collect(check: PlannedCheck) -> list[Finding]:
    try:
        found = check.run()
        return [found] if isinstance(found, Finding) else list(found)
    except Exception as exc:  # noqa: BLE001 - a check that fails is a finding of its own
        return [
            Examined(check.name, check.subject).error(
                f"cannot be examined: {printable(f'{type(exc).__name__}: {exc}', MAX_CHARACTERS)}",
                why="An engine may fail in the same way.",
                mend="see what the error names; else report it, with this line",
            )
        ]


def _late(check: PlannedCheck, timeout_s: float) -> Finding:
    return Examined(check.name, check.subject).error(
        f"does not answer within {timeout_s:g} s",
        why="Whatever hangs here hangs in an engine, too: its requests wait for a deadline.",
        mend=f"kvxfer doctor --timeout {10 * timeout_s:g}s ...  # if it is only slow",
    )
