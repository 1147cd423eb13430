"""Interface of transformers: the only module that imports its caches, and checks what they have."""

import inspect
from typing import Any, TypeAlias

import transformers

from kvxfer.errors import UnsupportedEngineError

SUPPORTED = "5.16 to 5.23"

try:
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
except ImportError as exc:
    release = str(transformers.__version__)
    raise UnsupportedEngineError("transformers", release, SUPPORTED, str(exc)) from exc

Past: TypeAlias = Any
"""A `DynamicCache`, which is not typed."""

WHOLE_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer)
"""Layers whose keys and values a `DynamicCache()` without a configuration keeps whole: the masks of
the model see to the window."""


def require_interface() -> None:
    """Check that caches have what is used of them, whatever the release is called.

    Raises:
        UnsupportedEngineError: This release has another interface.
    """
    missing = [name for name in ("layers", "update", "get_seq_length") if not _has(name)]
    if missing:
        detail = f"DynamicCache has no {' and no '.join(missing)}"
        raise UnsupportedEngineError(
            "transformers", str(transformers.__version__), SUPPORTED, detail
        )


def planned_layers(config: Any) -> list[Any]:
    """List the layers of the cache that transformers would make for a configuration."""
    return list(DynamicCache(config=config).layers)


def is_whole(layer: Any) -> bool:
    """Whether a layer of a cache is a plain one, which keeps every token."""
    return type(layer) is DynamicLayer


def _has(name: str) -> bool:
    empty = DynamicCache()
    takes_config = "config" in inspect.signature(DynamicCache).parameters
    return takes_config and hasattr(empty, name)


__all__ = [
    "WHOLE_LAYERS",
    "DynamicCache",
    "Past",
    "is_whole",
    "planned_layers",
    "require_interface",
]
