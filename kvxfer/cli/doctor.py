"""Command `kvxfer doctor`: finds what silently costs hits or speed, and says what mends it."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from kvxfer.cli.command_line import CommandLine, exit_statuses, show, wrap
from kvxfer.text import printable
from kvxfer.units import Duration

if TYPE_CHECKING:
    from kvxfer.connect import BackendChoice
    from kvxfer.doctor import Finding

NAME_WIDTH = 15
MIN_TIMEOUT_S = 0.1


def main(argv: Sequence[str]) -> int:
    """Examine this machine and backends, or compare two engines; return 1 unless all is well."""
    parser = CommandLine(
        prog="kvxfer doctor",
        description="Find what silently costs hits or speed: on this machine, in the environment "
        "of this process, and in the stores and peers that URLs name. Run it as the user, in the "
        "container and with the environment of the engine.",
        epilog="Two arguments that each are a namespace.json, the folder of a store (also as a "
        "file:// URL without parameters), a peer, or the arguments of vllm serve as JSON are "
        "compared instead: would two engines share blocks? "
        + exit_statuses("when nothing was found", "when something was found"),
    )
    parser.add_argument(
        "url",
        nargs="*",
        metavar="URL",
        help="backend as an engine names it, such as file:///var/cache/kv?capacity=200GiB, or a "
        "file with the kv-transfer-config of vLLM as JSON; without any, those of KVXFER_BACKEND or "
        "KVXFER_CONFIG, if they are set",
    )
    parser.add_argument(
        "--timeout", default="10s", metavar="TIME", help="time for each check; default 10s"
    )
    parser.add_argument("--json", action="store_true", help="print a list of objects")
    arguments = parser.parse_args(argv)

    from kvxfer import doctor
    from kvxfer.engine_side.vllm_keys import DEFAULT_HASH

    timeout_s = Duration.parse(
        arguments.timeout, name="timeout", minimum_s=MIN_TIMEOUT_S, maximum_s=doctor.MAX_TIMEOUT_S
    )
    names: list[str] = arguments.url
    if len(names) == 2 and all(map(doctor.is_comparable, names)):
        findings = doctor.compare(names, timeout_s=timeout_s)
    else:
        backends: list[BackendChoice] = [] if names else doctor.environment_backends()
        hash_name: str = DEFAULT_HASH
        for name in names:
            if "://" in name:
                backends.append(name)
            else:
                backends += doctor.read_backends(name)
                hash_name = doctor.read_hash_name(name)
        findings = doctor.examine(backends, timeout_s=timeout_s, hash_name=hash_name)
    show(findings, lambda found: "\n".join(_lines(found)), as_json=arguments.json)
    return int(any(finding.severity is not doctor.Severity.OK for finding in findings))


def _lines(findings: "Sequence[Finding]") -> Iterator[str]:
    """Format findings, which are sorted; do not wrap the lines that users copy."""
    for finding in findings:
        name, subject = str(finding.check), printable(finding.subject)
        found = printable(finding.found)
        if not finding.mend:
            head = f"{finding.severity.value:<8}{name:<{NAME_WIDTH}}"
            yield from wrap(f"{subject}: {found}", head)
            continue
        yield f"{finding.severity.value:<8}{name:<{NAME_WIDTH}}{subject}"
        yield from wrap(found, "    found  ")
        yield from wrap(finding.why, "    why    ")
        yield f"    mend   {printable(finding.mend)}"
        yield ""
    counts = Counter(finding.severity.value for finding in findings)
    yield ", ".join(f"{name}: {counts[name]}" for name in ("error", "warning", "ok"))
