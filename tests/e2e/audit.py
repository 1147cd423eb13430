"""Report of an engine's audit, see `tests.e2e.audited_spec`; read without importing vLLM."""

import enum
import json
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DIRECTORY = "KVXFER_E2E_AUDIT_DIRECTORY"
"""Environment variable: directory that the audit writes to."""
HOOKS = "KVXFER_E2E_AUDIT_HOOKS"
"""Environment variable: values of `Hook`, separated by commas."""

SPEC = {"spec_name": "AuditedSpec", "spec_module_path": "tests.e2e.audited_spec"}
"""The spec of an engine under audit, in its connector's configuration."""


class Log:
    """Log of one process in the directory of the audit: a JSON line per event."""

    def __init__(self, name: str) -> None:
        self._path = Path(os.environ[DIRECTORY], f"{name}-{os.getpid()}.jsonl")

    def write(self, event: str, **values: Any) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps({"event": event, **values}) + "\n")


class Forwarding:
    """Wrapper that passes every attribute of the wrapped object through."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class Hook(enum.Enum):
    FLIP_LOADED_BIT = "flip-loaded-bit"
    """Flip the top bit of an exponent in a device page after each load, before the audit."""


def hooks() -> frozenset[Hook]:
    return frozenset(Hook(name) for name in os.environ.get(HOOKS, "").split(",") if name)


@dataclass(slots=True)
class Audit:
    """Report of an audit: how many pages were loaded and compared, and which are wrong.

    Attributes:
        num_tokens: Tokens of hand-overs to rank 0, of the group with most of them.
        different: Pages that were loaded with other bytes than were stored or offered.
        unknown: Pages that were loaded and never stored or offered.
    """

    num_pages: int = 0
    num_tokens: int = 0
    ranks: set[int] = field(default_factory=set)
    different: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)

    @property
    def problem(self) -> str:
        """What is wrong; empty when nothing is."""
        if self.different or self.unknown:
            named = ", ".join([*self.different, *self.unknown][:3])
            return f"{len(self.different)} pages altered, {len(self.unknown)} unknown: {named}"
        return ""

    @property
    def clean(self) -> bool:
        """Whether pages were loaded, each with the bytes that were stored."""
        return self.num_pages > 0 and not self.problem


def environment(directory: Path, hooks: Collection[Hook] = ()) -> dict[str, str]:
    """Environment variables of an engine whose audit writes to a directory."""
    return {DIRECTORY: str(directory), HOOKS: ",".join(hook.value for hook in hooks)}


def flip_a_bit(file: Path) -> None:
    """Change one byte of the data in the file of a block."""
    with file.open("r+b") as block:
        block.seek(file.stat().st_size * 2 // 3)
        (byte,) = block.read(1)
        block.seek(-1, 1)
        block.write(bytes([byte ^ 4]))


def lines_of(directory: Path, name: str) -> Iterator[Any]:
    """Read the events of some logs, without those that a killed process has not ended."""
    for path in sorted(directory.glob(f"{name}*.jsonl")):
        for text in path.read_text().splitlines(keepends=True):
            if text.endswith("\n"):
                yield json.loads(text)


def read(directory: Path) -> Audit:
    audit = Audit()
    for line in lines_of(directory, "rank"):
        if line["event"] == "load":
            audit.num_pages += line["pages"]
            audit.ranks.add(line["rank"])
            audit.different += line["different"]
            audit.unknown += line["unknown"]
    return audit
