"""Settings of the connectors, from vLLM's configuration or else from the environment."""

import contextlib
import inspect
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from kvxfer.backends.host import HostBackend, HostConfig
from kvxfer.connect import BackendType, backend_choices, parse_backend
from kvxfer.errors import InvalidArgumentError
from kvxfer.extras import require_extra
from kvxfer.named_files import read_named_file
from kvxfer.settings import shown, warn_of_misspelt_variables
from kvxfer.storage.backend import can_purge_all
from kvxfer.text import did_you_mean
from kvxfer.transfer.load_or_compute import LoadOrCompute

EXPLICIT = "kv_connector_extra_config"
URLS, FILE = "KVXFER_BACKEND", "KVXFER_CONFIG"
OFFLOAD_SETTINGS = ("backend", "max_load_ratio", "prefill_tokens_per_s", "purge_on_reset")
MISSPELT_LIKENESS = 0.8


class OffloadSettings(NamedTuple):
    """Settings of an engine that offloads."""

    host: HostConfig
    lower: list[tuple[BackendType, msgspec.Struct]]  # the backends below host memory
    loads: LoadOrCompute | None  # None to load whatever is found
    purges: bool  # a reset of vLLM's cache deletes everything in the backends below


logger = logging.getLogger("vllm.kvxfer")
"""Child of vLLM's logger: vLLM shows only warnings of loggers outside its own tree."""


@dataclass(frozen=True, slots=True)
class FoundSettings:
    """Settings of a connector, as in `kv_connector_extra_config`, and the source of each."""

    values: dict[str, Any]
    origins: dict[str, str]

    def __str__(self) -> str:
        """Name each setting and its source, without its value, which may be a secret."""
        found = [f"{name} from {origin}" for name, origin in self.origins.items()]
        return ", ".join(found) or f"none in {EXPLICIT}, {URLS} or {FILE}"

    @contextlib.contextmanager
    def checked(self) -> Iterator[None]:
        """Add the source of a setting to an error about it that is raised within."""
        try:
            yield
        except InvalidArgumentError as exc:
            origin = self.origins.get(exc.argument)
            if origin == EXPLICIT:
                raise
            where = f" (it is from {origin})" if origin else f"; {self}"
            raise InvalidArgumentError(exc.argument, exc.value, exc.expected + where) from exc

    def check_tiers(self) -> None:
        """Check the settings of `KVXferOffload`; errors name the source. vLLM checks its own."""
        with self.checked():
            parse_offload(self.values)


def configs_of_callers() -> Iterator[Any]:
    """Yield the configurations of the engine under construction on the call stack, innermost first.

    vLLM passes only a part or a copy of its configuration to connectors, specs and tiers.
    """
    return (each for each in locals_of_callers("vllm_config") if hasattr(each, "lora_config"))


def locals_of_callers(name: str) -> Iterator[Any]:
    """Yield a local variable of each function on the call stack, innermost first, None if unset."""
    frame = inspect.currentframe()
    while frame is not None:
        yield frame.f_locals.get(name)
        frame = frame.f_back


def find_settings(
    explicit: Mapping[str, Any], environ: Mapping[str, str] = os.environ
) -> FoundSettings:
    """Find the settings of `KVXferOffload` or `KVXferConnector`; the first source of each wins.

    Sources are, in this order, `kv_connector_extra_config`, `KVXFER_BACKEND`, which has URLs
    separated by spaces, and `KVXFER_CONFIG`, which names a YAML or JSON file of settings.
    """
    warn_of_misspelt_variables(environ)
    sources: list[tuple[str, Mapping[str, Any]]] = [(EXPLICIT, explicit)]
    if urls := environ.get(URLS, "").split():
        sources.append((URLS, {"backend": urls}))
    if path := environ.get(FILE, ""):
        sources.append((f"{FILE}={path}", _read_file(path)))
    found = FoundSettings({}, {})
    for origin, values in sources:
        for name, value in values.items():
            if name not in found.values:
                found.values[name], found.origins[name] = value, origin
    return found


def _read_file(path: str) -> Mapping[str, Any]:
    form = f"a file with the settings of {EXPLICIT} by name, as YAML or JSON"
    require_extra("vllm", "yaml", what=FILE)
    import yaml

    try:
        found = yaml.safe_load(read_named_file(path).data)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as exc:
        reason = getattr(exc, "strerror", None) or " ".join(str(exc).split())
        raise InvalidArgumentError(FILE, path, f"{form}: {reason}") from exc
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise InvalidArgumentError(FILE, path, form)
    return found


def parse_offload(extra_config: Mapping[str, Any], replica: int = 0) -> OffloadSettings:
    """Read the settings of a replica that offloads; unknown names may be vLLM's own."""
    for name in [each for each in extra_config if each not in OFFLOAD_SETTINGS]:
        if hint := did_you_mean(name, OFFLOAD_SETTINGS, likeness=MISSPELT_LIKENESS):
            raise InvalidArgumentError("setting", name, f"the name of a setting{hint}")
    loads, ratio = None, extra_config.get("max_load_ratio")
    if ratio is not None:
        stated = extra_config.get("prefill_tokens_per_s")
        loads = LoadOrCompute(ratio, prefill_tokens_per_s=stated)
    backend: Any = extra_config.get("backend")
    parsed = [parse_backend(tier, replica) for tier in backend_choices(backend)]
    (backend_type, config), *lower = parsed
    if backend_type is not HostBackend or not isinstance(config, HostConfig):
        raise InvalidArgumentError("backend", shown(backend), "a host:// pool first")
    purges = extra_config.get("purge_on_reset", False)
    if not isinstance(purges, bool):
        raise InvalidArgumentError("purge_on_reset", purges, "true or false")
    if purges and not any(can_purge_all(kind) for kind, _ in lower):
        rule = "false, unless a tier below can be purged, such as file://"
        raise InvalidArgumentError("purge_on_reset", purges, rule)
    return OffloadSettings(config, lower, loads, purges)
