"""What a bucket tells of an object beside its bytes: its size, its version, its place in a list."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ListedObject:
    """Object in a list: its name, its size, and when it was stored, in seconds since the epoch."""

    name: str
    size_bytes: int
    stored_at: float

    @classmethod
    def of(cls, meta: Any) -> "ListedObject":
        """Translate what the client tells."""
        stored_at = meta["last_modified"].timestamp()
        return cls(str(meta["path"]), int(meta["size"]), stored_at)


@dataclass(frozen=True, slots=True)
class ObjectVersion:
    """Size of an object, and what tells it from those stored under its name before and after."""

    size_bytes: int
    version: dict[str, str]

    @classmethod
    def of(cls, meta: Any) -> "ObjectVersion":
        """Translate what the client tells."""
        version = {name: meta[name] for name in ("e_tag", "version") if meta[name] is not None}
        return cls(int(meta["size"]), version)
