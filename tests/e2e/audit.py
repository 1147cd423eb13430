"""Report of an engine's audit, see `tests.e2e.audited_spec`; read without importing vLLM."""

import enum
import json
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]

DIRECTORY = "KVXFER_E2E_AUDIT_DIRECTORY"
"""Environment variable: directory that the audit writes to."""
HOOKS = "KVXFER_E2E_AUDIT_HOOKS"
"""Environment variable: values of `Hook`, separated by commas."""

SPEC = {"spec_name": "AuditedSpec", "spec_module_path": "tests.e2e.audited_spec"}
"""The spec of an engine under audit, in its connector's configuration."""


class Log:
    """Log of one process in the directory of the audit: a JSON line per event.

    Args:
        name: Beginning of the file's name.
    """

    def __init__(self, name: str) -> None:
        self._path = Path(os.environ[DIRECTORY], f"{name}-{os.getpid()}.jsonl")

    def write(self, event: str, **values: Any) -> None:
        """Append an event."""
        with self._path.open("a") as file:
            file.write(json.dumps({"event": event, **values}) + "\n")


class Forwarding:
    """Wrapper that passes every attribute of the wrapped object through."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class Hook(enum.Enum):
    """Fault to inject."""

    FLIP_LOADED_BIT = "flip-loaded-bit"
    """Flip the top bit of an exponent in a device page after each load, before the audit."""


def hooks() -> frozenset[Hook]:
    """Faults to inject in this process."""
    return frozenset(Hook(name) for name in os.environ.get(HOOKS, "").split(",") if name)


@dataclass(frozen=True, slots=True)
class Audit:
    """Report of an audit.

    Attributes:
        num_loaded: Pages that were loaded and compared, over all ranks.
        different: Pages that were loaded with other bytes than were stored.
        unknown: Pages that were loaded and never stored.
        ranks: Ranks that loaded pages.
        groups: Groups of which pages were loaded.
    """

    num_loaded: int = 0
    different: Sequence[str] = ()
    unknown: Sequence[str] = ()
    ranks: frozenset[int] = frozenset()
    groups: frozenset[int] = frozenset()

    @property
    def clean(self) -> bool:
        """Whether pages were loaded, each with the bytes that were stored."""
        return self.num_loaded > 0 and not self.different and not self.unknown


def environment(directory: Path, hooks: Collection[Hook] = ()) -> dict[str, str]:
    """Environment variables of an engine under audit.

    Args:
        directory: Where the audit writes.
        hooks: Faults to inject.
    """
    path = [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        DIRECTORY: str(directory),
        HOOKS: ",".join(hook.value for hook in hooks),
    }


def flip_a_bit(file: Path) -> None:
    """Change one byte of the data in the file of a block."""
    with file.open("r+b") as block:
        block.seek(file.stat().st_size * 2 // 3)
        (byte,) = block.read(1)
        block.seek(-1, 1)
        block.write(bytes([byte ^ 4]))


def read(directory: Path) -> Audit:
    """Read the reports of all processes of one engine."""
    lines = [
        json.loads(line)
        for path in sorted(directory.glob("*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    loads = [line for line in lines if line["event"] == "load"]
    return Audit(
        num_loaded=sum(line["pages"] for line in loads),
        different=[page for line in loads for page in line["different"]],
        unknown=[page for line in loads for page in line["unknown"]],
        ranks=frozenset(line["rank"] for line in loads if line["pages"]),
        groups=frozenset(group for line in loads for group in line["groups"]),
    )
