"""Findings of `kvxfer doctor`: what was examined, what was found, and how to mend it."""

import enum
from typing import NamedTuple

import msgspec


class Severity(enum.Enum):
    """Severity of a finding, worst first.

    `ERROR`: blocks are not found, not kept, or an engine does not start. `WARNING`: slower than the
    machine could be, or less is kept than was asked for.
    """

    ERROR = "error"
    WARNING = "warning"
    OK = "ok"


class Check(enum.Enum):
    """Names of the checks, which stay the same from release to release."""

    HASH_SEED = "hash-seed"
    OPEN_FILES = "open-files"
    LOCKED_MEMORY = "locked-memory"
    CPUS = "cpus"
    MEMORY = "memory"
    SHARED_MEMORY = "shared-memory"
    HUGE_PAGES = "huge-pages"
    PACKAGE = "package"
    NIXL = "nixl"
    CUDA = "cuda"
    VLLM = "vllm"
    VLLM_PLUGIN = "vllm-plugin"
    STORE_FOLDER = "store-folder"
    STORE_SECRET = "store-secret"  # noqa: S105 - the name of a check
    STORE_SPACE = "store-space"
    STORE_INODES = "store-inodes"
    STORE_MEDIUM = "store-medium"
    DIRECT_IO = "direct-io"
    IO_URING = "io-uring"
    PEER = "peer"
    PEER_CARRIER = "peer-carrier"
    DISCOVERY = "discovery"
    POOL = "pool"
    BUCKET = "bucket"
    MOONCAKE = "mooncake"
    SHARING = "sharing"


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one check.

    Attributes:
        check: Name of the check.
        subject: Thing that was examined, such as a URL.
        severity: See `Severity`.
        found: What was found.
        why: What it costs; empty where all is well.
        mend: Line that mends it, as it is typed or written; empty where all is well.
    """

    check: Check
    subject: str
    severity: Severity
    found: str
    why: str = ""
    mend: str = ""


class Result(NamedTuple):
    """What a check finds; fields as those of `Finding`, of which `run_checks` makes one.

    Attributes:
        subject, check: Where they are not those of the table of checks.
    """

    severity: Severity
    found: str
    why: str = ""
    mend: str = ""
    subject: str = ""
    check: Check | None = None

    def of(self, check: Check, subject: str) -> Finding:
        """Make the finding of a check and the thing that was examined."""
        named = {"check": self.check or check, "subject": self.subject or subject}
        return Finding(**self._asdict() | named)


def ok(found: str) -> Result:
    """Make the result that all is well."""
    return Result(Severity.OK, found)


def warning(found: str, *, why: str, mend: str) -> Result:
    """Make the result of what is slower or less than it could be."""
    return Result(Severity.WARNING, found, why, mend)


def error(found: str, *, why: str, mend: str) -> Result:
    """Make the result of what costs all hits, or keeps an engine from starting."""
    return Result(Severity.ERROR, found, why, mend)
