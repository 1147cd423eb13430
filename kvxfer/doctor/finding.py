"""Findings of `kvxfer doctor`: the subject of a check, its result, and the remedy."""

import enum

import msgspec

MAX_CHARACTERS = 300
"""Maximum length of a foreign text or value in a finding, also with `--json`."""


class Severity(enum.Enum):
    """Severity of a finding, worst first.

    `ERROR`: blocks are not found, not kept, or an engine does not start. `WARNING`: slower than the
    machine could be, or less is kept than configured.
    """

    ERROR = "error"
    WARNING = "warning"
    OK = "ok"


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one check; `of` names the check, and the thing that was examined, such as a URL.

    Attributes:
        why: What it costs; empty if all is well.
        mend: Line to type or to write that mends it; empty if all is well.
    """

    check: str = ""
    subject: str = ""
    severity: Severity
    found: str
    why: str = ""
    mend: str = ""

    def of(self, check: str, subject: str = "") -> "Finding":
        """Name the check, and the thing that was examined, unless they have names already."""
        named = {"check": self.check or check, "subject": self.subject or subject}
        return msgspec.structs.replace(self, **named)


def ok(found: str) -> Finding:
    """Make the finding that all is well."""
    return Finding(severity=Severity.OK, found=found)


def warning(found: str, *, why: str, mend: str) -> Finding:
    """Make the finding of something that is slower or smaller than it could be."""
    return Finding(severity=Severity.WARNING, found=found, why=why, mend=mend)


def error(found: str, *, why: str, mend: str) -> Finding:
    """Make the finding of something that costs all hits, or keeps an engine from starting."""
    return Finding(severity=Severity.ERROR, found=found, why=why, mend=mend)


def capacity_of(num_bytes: int) -> str:
    """Write a capacity as a parameter of a URL, in whole MiB unless it is smaller than one."""
    return f"capacity={num_bytes >> 20}MiB" if num_bytes >> 20 else f"capacity={num_bytes}"
