"""Examination: the checks of a machine and of backends, each run within a deadline."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import TypeAlias

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
from kvxfer.doctor.finding import MAX_CHARACTERS, Finding, Severity, error
from kvxfer.engine_side.vllm_keys import DEFAULT_HASH
from kvxfer.runtime import DaemonThreads
from kvxfer.text import printable

MAX_TIMEOUT_S = 86400.0

STEPS_OF_PEER, STEPS_OF_BUCKET = 6, 5
"""Multiples of the timeout that a check may take: two connections to a peer, of three steps each;
for a bucket a list, two stores, a removal, and one to spare."""

Run: TypeAlias = Callable[[], Finding | Iterable[Finding]]
"""Runs a check; may block, and raise anything."""


@dataclass(frozen=True, slots=True)
class Check:
    """Check to run, with a name that stays the same from release to release.

    It may take `num_steps` times the timeout.
    """

    name: str
    subject: str
    run: Run
    num_steps: int = 1


def examine(
    backends: Sequence[BackendChoice], *, timeout_s: float, hash_name: str = DEFAULT_HASH
) -> list[Finding]:
    """Examine this machine, and the backends of an engine on it.

    Args:
        backends: URLs or mappings, as for `kvxfer.connect`; may be empty.
        timeout_s: Time for each check.
        hash_name: The engine's `--prefix-caching-hash-algo`, if it is vLLM.

    Returns:
        All findings, the worst first.

    Raises:
        InvalidArgumentError: A URL or mapping cannot be used.
    """
    configs = [parse_backend(each)[1] for each in backends]
    return run_checks([*plan_checks(configs, timeout_s, hash_name)], timeout_s=timeout_s)


def run_checks(planned: Sequence[Check], *, timeout_s: float) -> list[Finding]:
    """Run all checks at once; one that fails or hangs is a finding, too. The worst comes first."""
    threads = DaemonThreads("kvxfer-doctor", max(1, len(planned)))
    began = runtime.monotonic()
    running = [threads.submit(_collect, check) for check in planned]
    findings: list[Finding] = []
    for check, future in zip(planned, running, strict=True):
        stop = began + timeout_s * check.num_steps
        try:
            found = runtime.result(future, runtime.left_s(stop))
        except TimeoutError:
            found = [_late(check, timeout_s)]
        findings += found
    threads.shutdown()
    return sorted(findings, key=lambda finding: [*Severity].index(finding.severity))


def plan_checks(
    configs: Sequence[msgspec.Struct], timeout_s: float, hash_name: str = DEFAULT_HASH
) -> Iterator[Check]:
    """List all checks: of the machine that is to have these backends, and of each backend."""
    host_bytes = sum(each.capacity for each in configs if isinstance(each, HostConfig))
    lent_bytes = sum(each.capacity or 0 for each in configs if isinstance(each, NixlConfig))
    needed = host_bytes + lent_bytes
    shared = partial(machine.check_shared_memory, host_bytes)
    yield Check("hash-seed", "environment", partial(machine.check_hash_seed, hash_name=hash_name))
    yield Check("open-files", "limits", machine.check_open_files)
    yield Check("locked-memory", "limits", partial(machine.check_locked_memory, needed))
    yield Check("cpus", "control groups", machine.check_cpus)
    yield Check("memory", "control groups", partial(machine.check_memory, needed))
    yield Check("shared-memory", str(SHARED_MEMORY), shared)
    yield Check("huge-pages", "kernel", machine.check_huge_pages)
    yield Check("package", "packages", machine.check_packages)
    yield Check("nixl", "package", machine.check_nixl)
    yield Check("cuda", "driver", machine.check_cuda)
    yield Check("vllm", "package", machine.check_vllm)
    yield Check("vllm-plugin", "package", machine.check_plugin)
    for config in configs:
        yield from _checks_of_backend(config, timeout_s)


def _checks_of_backend(config: msgspec.Struct, timeout_s: float) -> Iterator[Check]:
    if isinstance(config, NixlConfig) and not config.peers:  # else `check_peer` tries the secret
        place = config.discover or f"nixl://?listen={config.listen}"
        yield Check("store-secret", place, partial(places.check_secret, config))
    match config:
        case FileConfig() as store:
            url, folder = f"file://{store.path}", cache(partial(places.check_folder, store))

            def inside(check: Callable[[FileConfig], Finding]) -> list[Finding]:
                """Run a check unless the folder has a fault, which this one would repeat."""
                return [check(store)] if folder().severity is Severity.OK else []

            yield Check("store-folder", url, folder)
            yield Check("store-secret", url, partial(places.check_secret, store))
            yield Check("store-space", url, partial(inside, places.check_space))
            yield Check("store-inodes", url, partial(inside, places.check_inodes))
            yield Check("store-medium", url, partial(inside, places.check_medium))
            yield Check("direct-io", url, partial(inside, places.check_direct_io))
            yield Check("io-uring", url, partial(places.check_io_uring, store))
        case NixlConfig() if config.discover:
            check = partial(places.check_discovery, config, timeout_s)
            yield Check("discovery", config.discover, check)
        case NixlConfig():
            hasty = places.limit_handshake(config, timeout_s)
            for each in config.peers:
                reach = partial(places.check_peer, hasty, each)
                yield Check("peer", f"nixl://{each}", reach, STEPS_OF_PEER)
        case PoolConfig():
            yield Check("pool", f"pool://{config.path}", partial(places.check_pool, config))
        case ObjectConfig():
            timed = msgspec.structs.replace(config, timeout_s=timeout_s)
            yield Check("store-secret", config.url, partial(places.check_secret, config))
            yield Check("bucket", config.url, partial(places.check_bucket, timed), STEPS_OF_BUCKET)
        case MooncakeConfig():
            short = msgspec.structs.replace(config, lookup_timeout_s=timeout_s)
            check = partial(places.check_mooncake, short)
            yield Check("mooncake", f"mooncake://{config.address}", check)


def _collect(check: Check) -> list[Finding]:
    try:
        found = check.run()
        results = [found] if isinstance(found, Finding) else list(found)
    except Exception as exc:  # noqa: BLE001 - a check that fails is a finding of its own
        said = printable(f"{type(exc).__name__}: {exc}", MAX_CHARACTERS)
        why = "An engine may fail in the same way."
        mend = "mend what the error names, or report it with this line"
        results = [error(f"cannot be examined: {said}", why=why, mend=mend)]
    return [result.of(check.name, check.subject) for result in results]


def _late(check: Check, timeout_s: float) -> Finding:
    longer_s = min(10 * timeout_s, MAX_TIMEOUT_S)
    return error(
        f"does not answer within {timeout_s * check.num_steps:.7g} s",
        why="What hangs here hangs in an engine, too: its requests wait for a deadline.",
        mend=f"kvxfer doctor --timeout {longer_s:.7g}s ...  # if it is only slow",
    ).of(check.name, check.subject)
