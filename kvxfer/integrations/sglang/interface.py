"""Interface of SGLang's storage backends: all imports from SGLang.

What a release lacks is found out by looking for it, never by its version number.
"""

from dataclasses import dataclass
from typing import Any

from kvxfer.engine_side.harmless_words import default_of
from kvxfer.errors import UnsupportedEngineError
from kvxfer.extras import installed_version

SUPPORTED = "0.5.20 to 0.5.23"


try:
    from sglang.srt import runtime_context
    from sglang.srt.arg_groups.arg_utils import namespace_of, record_fields
    from sglang.srt.environ import envs
    from sglang.srt.mem_cache.hicache_storage import (
        HiCacheStorage,
        HiCacheStorageConfig,
        PoolHitPolicy,
        PoolName,
        PoolTransfer,
        PoolTransferResult,
    )
    from sglang.srt.observability.metrics_collector import StorageMetrics
except ImportError as exc:
    version = installed_version("sglang")
    raise UnsupportedEngineError("sglang", version, SUPPORTED, str(exc)) from exc


@dataclass(frozen=True, slots=True)
class PublishedSetting:
    """Setting of an engine, as SGLang resolved it."""

    group: str  # such as `model`; the outermost if groups are nested
    name: str
    value: Any
    is_default: bool  # whether the value is the release's default


def has_default(variable: str) -> bool:
    """Whether an environment variable is as if it were not set, in this release."""
    field = getattr(envs, variable, None)
    default = getattr(field, "default", None)
    return field is not None and field.get() == (default() if callable(default) else default)


def published_settings(*required: str) -> list[PublishedSetting]:
    """List all settings of the engine of this process; none outside of an engine.

    Raises:
        UnsupportedEngineError: The release lacks a required group, or exposes its settings
            differently.
    """
    context = runtime_context.get_context()
    if (declared := _declared(context)) is None:
        return []
    places = namespace_of(declared)
    groups = {place.partition(".")[0] for place in places.values()}
    if missing := [group for group in required if group not in groups]:
        raise _unsupported(f"its settings have no group {' and no group '.join(missing)}")
    defaults = {field.name: default_of(field) for field in record_fields(declared)}
    try:
        found = {name: _published(context, name, place) for name, place in places.items()}
    except AttributeError as exc:
        raise _unsupported(str(exc)) from exc
    return [
        PublishedSetting(places[name].partition(".")[0], name, value, value == defaults.get(name))
        for name, value in found.items()
    ]


def loaded_weights() -> tuple[Any, int]:
    """Read the weights' version, and count the updates from the disk since that named no new one.

    The version is None outside of an engine. A release without a log of changes counts no update.
    """
    context, num_unnamed = runtime_context.get_context(), 0
    for _, changed in getattr(context, "overrides_log", list)():
        num_unnamed = 0 if "weight_version" in changed else num_unnamed + ("model_path" in changed)
    place = namespace_of(_declared(context)).get("weight_version")
    return place and _published(context, "weight_version", place), num_unnamed


def _declared(context: Any) -> Any:
    """Find the class that declares the settings of this process; None outside of an engine."""
    try:
        return type(context.server_args)
    except ValueError:
        return None


def _published(context: Any, name: str, place: str) -> Any:
    """Read one setting, whose group may be nested, as in `exec.moe`."""
    group, *rooms = place.split(".")
    bag = context.config_bag(group)
    for room in rooms:
        bag = getattr(bag, room)
    return getattr(bag, name)


def _unsupported(detail: str) -> UnsupportedEngineError:
    return UnsupportedEngineError("sglang", installed_version("sglang"), SUPPORTED, detail)
