"""Findings of `kvxfer doctor`: what was examined, what was found, and how to mend it."""

import enum
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class Examined:
    """Thing that a check examines, which makes the findings about it.

    Attributes:
        check: Name of the check.
        subject: The thing.
    """

    check: Check
    subject: str

    def ok(self, found: str) -> Finding:
        """Make the finding that all is well."""
        return self._make(Severity.OK, found, "", "")

    def warning(self, found: str, *, why: str, mend: str) -> Finding:
        """Make the finding of what is slower or less than it could be."""
        return self._make(Severity.WARNING, found, why, mend)

    def error(self, found: str, *, why: str, mend: str) -> Finding:
        """Make the finding of what costs all hits, or keeps an engine from starting."""
        return self._make(Severity.ERROR, found, why, mend)

    def _make(self, severity: Severity, found: str, why: str, mend: str) -> Finding:
        check, subject = self.check, self.subject
        return Finding(
            check=check, subject=subject, severity=severity, found=found, why=why, mend=mend
        )
