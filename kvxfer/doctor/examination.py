"""Examination: all checks of this machine and of what URLs name, each within a deadline."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec

from kvxfer import runtime
from kvxfer.backends.file import FileConfig
from kvxfer.backends.host import HostConfig
from kvxfer.backends.mooncake import MooncakeConfig
from kvxfer.backends.nixl import NixlConfig
from kvxfer.backends.object import ObjectConfig
from kvxfer.backends.pool import PoolConfig
from kvxfer.connect import BackendChoice, parse_backend
from kvxfer.doctor import memory, packages, peers, process, stores
from kvxfer.doctor.buckets import check_bucket
from kvxfer.doctor.discovery import check_discovery
from kvxfer.doctor.finding import Check, Examined, Finding, Severity
from kvxfer.doctor.mooncake import check_mooncake
from kvxfer.doctor.pools import check_pool
from kvxfer.engine_side.vllm_keys import DEFAULT_HASH
from kvxfer.runtime import DaemonThreads
from kvxfer.text import printable

STEPS_OF_A_PEER = 6
"""Steps to reach a peer, each with the time of a check: two connections of three steps."""

STEPS_OF_DISCOVERY = 5
"""Steps to list the holders: credentials, a token, the list, the end of the connection, and one to
spare."""

STEPS_OF_A_BUCKET = 5
"""Steps to examine a bucket: a list, two stores, a removal, and one to spare."""

MAX_CHARACTERS = 500
"""Most characters of an error that a check did not expect."""


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
    planned = _plan_machine(host_bytes, held_bytes, hash_name)
    for config in configs:
        planned += _plan_backend(config, timeout_s)
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


def _plan_machine(host_bytes: int, held_bytes: int, hash_name: str) -> list[PlannedCheck]:
    needed_bytes = host_bytes + held_bytes
    return [
        PlannedCheck(
            Check.HASH_SEED, "environment", partial(process.check_hash_seed, hash_name=hash_name)
        ),
        PlannedCheck(Check.OPEN_FILES, "limits", process.check_open_files),
        PlannedCheck(
            Check.LOCKED_MEMORY, "limits", partial(process.check_locked_memory, needed_bytes)
        ),
        PlannedCheck(Check.CPUS, "control groups", process.check_cpus),
        PlannedCheck(Check.MEMORY, "control groups", partial(memory.check_memory, needed_bytes)),
        PlannedCheck(
            Check.SHARED_MEMORY, "memory", partial(memory.check_shared_memory, host_bytes)
        ),
        PlannedCheck(Check.HUGE_PAGES, "kernel", memory.check_huge_pages),
        PlannedCheck(Check.PACKAGE, "packages", packages.check_packages),
        PlannedCheck(Check.NIXL, "package", packages.check_nixl),
        PlannedCheck(Check.CUDA, "driver", packages.check_cuda),
        PlannedCheck(Check.VLLM, "package", packages.check_vllm),
        PlannedCheck(Check.VLLM_PLUGIN, "package", packages.check_plugin),
    ]


def _plan_backend(config: msgspec.Struct, timeout_s: float) -> list[PlannedCheck]:
    if isinstance(config, FileConfig):
        checks: list[tuple[Check, Callable[[str, FileConfig], Finding]]] = [
            (Check.STORE_FOLDER, stores.check_folder),
            (Check.STORE_SECRET, stores.check_secret),
            (Check.STORE_SPACE, stores.check_space),
            (Check.STORE_INODES, stores.check_inodes),
            (Check.STORE_MEDIUM, stores.check_medium),
            (Check.DIRECT_IO, stores.check_direct_io),
            (Check.IO_URING, stores.check_io_uring),
        ]
        url = f"file://{config.path}"
        return [PlannedCheck(name, url, partial(run, url, config)) for name, run in checks]
    if isinstance(config, NixlConfig) and config.discover:
        run_check = partial(check_discovery, config, timeout_s=timeout_s / STEPS_OF_DISCOVERY)
        return [PlannedCheck(Check.DISCOVERY, config.discover, run_check)]
    if isinstance(config, NixlConfig):
        return [
            PlannedCheck(
                Check.PEER,
                f"nixl://{endpoint}",
                partial(peers.check_peer, config, endpoint, timeout_s=timeout_s),
                STEPS_OF_A_PEER,
            )
            for endpoint in config.peers
        ]
    if isinstance(config, PoolConfig):
        return [PlannedCheck(Check.POOL, f"pool://{config.path}", partial(check_pool, config))]
    if isinstance(config, ObjectConfig):
        check = partial(check_bucket, config, timeout_s=timeout_s)
        return [PlannedCheck(Check.BUCKET, config.url, check, STEPS_OF_A_BUCKET)]
    if isinstance(config, MooncakeConfig):
        url = f"mooncake://{config.address}"
        check = partial(check_mooncake, config, timeout_s=timeout_s)
        return [PlannedCheck(Check.MOONCAKE, url, check)]
    return []  # host:// is part of the machine; what others offer, only they can examine


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
