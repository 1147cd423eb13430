"""Entry point `connect`: opens backends named by URLs or mappings, and an engine on top of them."""

import importlib.metadata
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import replace
from typing import Any, Protocol, TypeAlias
from urllib.parse import parse_qsl, unquote

import msgspec

from kvxfer import runtime
from kvxfer.backends.nixl import NixlConfig
from kvxfer.backends.object import ObjectConfig
from kvxfer.checks import require_instance, require_instances, require_positive
from kvxfer.endpoint import split_url
from kvxfer.errors import InvalidArgumentError, code_of
from kvxfer.kvcache.canonical import CanonicalKVCaches
from kvxfer.kvcache.portable import PageMapping, WorkerShard
from kvxfer.lending.prompt_exchange import PromptExchange
from kvxfer.runtime import begin_aside
from kvxfer.settings import convert_settings, is_credential, shown
from kvxfer.storage.backend import Backend
from kvxfer.storage.calls import naming
from kvxfer.storage.keys import GroupIdentity, Namespace
from kvxfer.storage.observer import Observer, Reports
from kvxfer.storage.portable_backend import PortableBackend, portable_namespace
from kvxfer.storage.staging_memory import DEFAULT_STAGING_BYTES
from kvxfer.telemetry.environment import environment_observers
from kvxfer.text import did_you_mean, find_control
from kvxfer.tiering.tiered_backend import TieredBackend, observe
from kvxfer.transfer.engine import DEFAULT_MAX_BYTES_IN_FLIGHT, DEFAULT_TIMEOUT_S, TransferEngine
from kvxfer.transfer.staged_backend import stage

logger = logging.getLogger(__name__)

ENTRY_POINT_GROUP = "kvxfer.backends"

BACKENDS = {
    "az": "kvxfer.backends.object:AZBackend",
    "file": "kvxfer.backends.file:FileBackend",
    "gs": "kvxfer.backends.object:GSBackend",
    "host": "kvxfer.backends.host:HostBackend",
    "mooncake": "kvxfer.backends.mooncake:MooncakeBackend",
    "nixl": "kvxfer.backends.nixl:NixlBackend",
    "pool": "kvxfer.backends.pool:PoolBackend",
    "s3": "kvxfer.backends.object:S3Backend",
}
"""Built-in backends, the same as the entry points in `pyproject.toml`, so that kvxfer finds them
when it runs from a folder without being installed."""

BackendChoice: TypeAlias = str | Mapping[str, Any]
"""A backend and its parameters, as a URL or as a mapping with a `type`."""


class BackendType(Protocol):
    """Backend class or factory, as an entry point of the group `kvxfer.backends` names it.

    Attributes:
        config_type: Struct whose fields are the parameters of the backend's URL.
    """

    config_type: type[msgspec.Struct]

    def __call__(self, config: Any, namespace: Namespace) -> Backend:
        """Open the backend."""


def connect(
    backend: BackendChoice | Sequence[BackendChoice],
    caches: CanonicalKVCaches,
    *,
    namespace: Namespace,
    blocks_per_chunk: int = 1,
    mappings: Sequence[PageMapping] = (),
    max_bytes_in_flight: int = DEFAULT_MAX_BYTES_IN_FLIGHT,
    timeout_s: float | None = DEFAULT_TIMEOUT_S,
    staging_bytes: int = DEFAULT_STAGING_BYTES,
    observers: Sequence[Observer] = (),
) -> TransferEngine:
    """Open a backend and an engine that moves blocks of `caches` to and from it.

    Args:
        backend: A URL such as `host://?capacity=4GiB`, or the same as a mapping:
            `{"type": "host", "capacity": "4GiB"}`. Several, fastest first, are the tiers of a
            `TieredBackend`.
        caches: The caches whose blocks are moved.
        namespace: Identity of the stored bytes. The caches define its groups; if it has groups,
            they must be the same. Its revision may be empty with `host://` alone.
        blocks_per_chunk: Blocks stored under one key.
        mappings: Page mappings from `map_caches`. With them each key names a portable page, which
            engines of another layout, block size or parallelism can load.
        max_bytes_in_flight: See `TransferEngine`.
        timeout_s: See `TransferEngine`.
        staging_bytes: See `TransferEngine`.
        observers: Told what happens to blocks, such as `kvxfer.telemetry.metrics.Metrics`.

    Returns:
        The engine, to be used as an asynchronous context manager or closed.

    Raises:
        InvalidArgumentError: There is no backend, a backend or parameter is unknown or invalid, or
            blocks outlive the process and the namespace has no revision.
        NamespaceMismatchError: The namespace's groups are not those of the caches.
        PageMappingError: This worker holds only a part of some shard of the portable pages.
        CapacityError: Less memory or disk is available than was configured.
        DeviceUnavailableError: The caches are on a GPU that cannot be used.
    """
    require_instances("mappings", mappings, PageMapping)
    require_instances("observers", observers, Observer)
    complete = complete_namespace(namespace, caches, blocks_per_chunk)
    require_revision("namespace.revision", namespace.revision, backend)
    parsed = [parse_backend(choice) for choice in backend_choices(backend)]
    if len(mappings):
        complete = portable_namespace(complete, mappings, caches.group_specs)
    with ExitStack() as undo:
        observers = [*observers, *environment_observers(complete)]
        opened = open_tiers(parsed, complete, observers)
        undo.callback(_close, [opened])
        if len(mappings):
            # Stage below `PortableBackend`: a shard that another worker stores is then not copied.
            shard_bytes = max(complete.chunk_size_bytes(g) for g in range(len(complete.groups)))
            staged = stage(opened, caches, shard_bytes, undo, staging_bytes=staging_bytes)
            if not _find_lasting(backend):  # no other worker stores into this process
                mappings = [replace(each, num_writers=1, writer_index=0) for each in mappings]
            opened = PortableBackend(staged, mappings)
        engine = TransferEngine(
            caches,
            opened,
            blocks_per_chunk=blocks_per_chunk,
            mappings=mappings,
            max_bytes_in_flight=max_bytes_in_flight,
            timeout_s=timeout_s,
            staging_bytes=staging_bytes,
        )
        undo.pop_all()
    return engine


def exchange(
    backend: BackendChoice,
    caches: CanonicalKVCaches,
    *,
    namespace: Namespace,
    shard: WorkerShard | None = None,
    advertise: str = "",
    observers: Sequence[Observer] = (),
) -> PromptExchange:
    """Open an exchange of prompts: one engine computes their blocks, another continues from them.

    Args:
        backend: A URL such as `nixl://?listen=127.0.0.1:7100`, or the same as a mapping; without
            `listen` this engine only reads. See `NixlConfig`.
        caches: Caches of this worker, from `canonicalize` or `allocate_canonical`.
        namespace: Identity of the model and, by the revision, of its weights; without groups.
            Engines with another namespace are refused.
        shard: Position of this worker in its model; default: the only worker.
        advertise: Host at which other engines reach `listen`; default: the host of `listen`.
        observers: Told which blocks were fetched, and asked for leases and connected peers.

    Returns:
        The exchange, to be used as an asynchronous context manager.

    Raises:
        InvalidArgumentError: The backend is not `nixl`, a parameter is invalid, or the namespace
            has no revision.
        PageMappingError: The meaning of a group's bytes is not known.
    """
    require_instances("observers", observers, Observer)
    _, config = parse_backend(backend)
    if not isinstance(config, NixlConfig):
        raise InvalidArgumentError("backend", shown(backend), "a backend of type nixl")
    require_instance("namespace", namespace, Namespace)
    require_revision("namespace.revision", namespace.revision, backend)
    return PromptExchange(
        config,
        caches,
        namespace,
        shard=shard,
        advertise=advertise,
        observers=[*observers, *environment_observers(namespace)],
    )


def open_backend(
    backend: BackendChoice | Sequence[BackendChoice],
    namespace: Namespace,
    *,
    observers: Sequence[Observer] = (),
    replica: int = 0,
) -> Backend:
    """Open the backend that a URL or mapping names, or the tiers that several name.

    Unlike `connect`, this only warns if blocks outlive the process and the namespace has no
    revision. Errors are those of `connect`, and leave nothing open.
    """
    require_instances("observers", observers, Observer)
    require_instance("namespace", namespace, Namespace)
    if (lasting := _find_lasting(backend)) and not namespace.revision:
        text = "%s: give the namespace of %r a revision: other weights of the name share its blocks"
        logger.warning(text, lasting, namespace.model)
    parsed = [parse_backend(choice, replica) for choice in backend_choices(backend)]
    return open_tiers(parsed, namespace, [*observers, *environment_observers(namespace)])


def parse_backend(backend: BackendChoice, replica: int = 0) -> tuple[BackendType, msgspec.Struct]:
    """Find the backend that a URL or mapping names, and check its parameters.

    Processes that are given the same `backend` each listen at a port of their own: the configured
    one plus `replica`, the index of the process.

    Raises:
        InvalidArgumentError: The backend is unknown, or a parameter is unknown or invalid.
    """
    name, parameters = _split_url(backend) if isinstance(backend, str) else _split(backend)
    backend_type = _find_backend(name)
    if issubclass(backend_type.config_type, ObjectConfig):
        _refuse_credentials(backend, name, parameters)
    names = backend_type.config_type.__struct_fields__
    if "address" in parameters and "address" not in names:
        form = f"{name}:///PATH" if "path" in names else f"{name}://"
        wanted = f"a {name} backend, which has no address, as in {form}"
        raise InvalidArgumentError("backend", shown(backend), wanted)
    for parameter, value in parameters.items():
        if isinstance(value, str) and (control := find_control(value)):
            wanted = f"no {control} in its {parameter}"
            raise InvalidArgumentError("backend", shown(backend), wanted)
    config = convert_settings(
        "backend", parameters, backend_type.config_type, what=f"a {name} backend", shown_as=backend
    )
    if isinstance(config, NixlConfig):
        config = config.at_rank(replica)
    return backend_type, config


def require_revision(
    argument: str, revision: str, backend: BackendChoice | Sequence[BackendChoice]
) -> None:
    """Check that the weights have a revision if other or later processes can load the blocks.

    Raises:
        InvalidArgumentError: `revision` is empty, and the blocks of a backend outlive the process.
    """
    if (lasting := _find_lasting(backend)) and not revision:
        kept = f"the blocks of {lasting!r} outlive the engine"
        wanted = f"the revision of the weights, such as a commit or a hash of files, since {kept}"
        raise InvalidArgumentError(argument, revision, wanted)


def _find_lasting(backend: BackendChoice | Sequence[BackendChoice]) -> str:
    """Name the first backend whose blocks outlive the process, without secrets; empty if none."""
    kinds = [(choice, parse_backend(choice)[0]) for choice in backend_choices(backend)]
    lasting = (shown(c) for c, kind in kinds if getattr(kind, "outlives_process", True))
    return str(next(lasting, ""))


def complete_namespace(
    namespace: Namespace, caches: CanonicalKVCaches, blocks_per_chunk: int
) -> Namespace:
    """Give a namespace the groups of the caches; if it has groups already, they must be equal."""
    require_instance("namespace", namespace, Namespace)
    require_instance("caches", caches, CanonicalKVCaches)
    blocks_per_chunk = require_positive("blocks_per_chunk", blocks_per_chunk)
    groups = tuple(
        GroupIdentity(
            spec=repr(caches.group_specs[index]) if caches.group_specs else "",
            layouts=tuple(ref.layout for ref in refs),
            layer_names=tuple(name for ref in refs for name in ref.layer_names),
            page_sizes_bytes=tuple(ref.page_size_bytes for ref in refs),
        )
        for index, refs in enumerate(caches.group_data_refs)
    )
    complete = msgspec.structs.replace(namespace, groups=groups, blocks_per_chunk=blocks_per_chunk)
    if namespace.groups:
        namespace.require_same(complete)
    return complete


def open_tiers(
    parsed: Sequence[tuple[BackendType, msgspec.Struct]],
    namespace: Namespace,
    observers: Sequence[Observer] = (),
) -> Backend:
    """Open backends, several of them as tiers; if one cannot be opened, close the others again."""
    opened: list[Backend] = []
    try:
        for backend_type, config in parsed:
            name = getattr(backend_type, "__name__", repr(backend_type))
            with naming(name):
                made = backend_type(config, namespace)
            require_instance(name, made, Backend)
            opened.append(made)
        if len(opened) > 1:
            opened = [TieredBackend(opened, namespace)]
        reports = Reports(observers, chunk_sizes=namespace.chunk_sizes)
        return observe(opened[0], reports) if observers else opened[0]
    except BaseException:
        _close(opened)
        raise


def start_engine(
    backend: Backend, make: Callable[[Backend], TransferEngine], timeout_s: float | None = None
) -> TransferEngine:
    """Make an engine over a newly opened backend, and start the backend; blocks.

    If `make` or the backend fails, or does not start within `timeout_s`, nothing is left open.
    """
    with ExitStack() as undo:
        undo.callback(_close, [backend])
        engine = make(backend)
        undo.pop_all()
        undo.callback(engine.close)
        runtime.result(engine.submit_call(engine.backend.start()), timeout_s)
        undo.pop_all()
    return engine


def backend_choices(backend: BackendChoice | Sequence[BackendChoice]) -> Sequence[BackendChoice]:
    """List the tiers of a `backend` argument, which names a single backend or several."""
    if not isinstance(backend, Sequence) or isinstance(backend, (str, bytes, bytearray)):
        return [backend]
    if not backend:
        raise InvalidArgumentError("backend", backend, "at least one URL or mapping")
    return backend


def _close(backends: Sequence[Backend]) -> None:
    """Close unused backends; blocks the calling thread, even if it runs an event loop."""

    async def close() -> None:
        async with AsyncExitStack() as stack:
            for backend in backends:
                stack.push_async_callback(backend.aclose)

    runtime.result(begin_aside("kvxfer-close", lambda: runtime.run(close())))


def _split_url(url: str) -> tuple[str, dict[str, Any]]:
    form = "a URL such as 'host://?capacity=4GiB'"
    try:
        parts = split_url(url)
    except ValueError:
        wanted = f"{form}, without control characters or spaces around it"
        raise InvalidArgumentError("backend", shown(url), wanted) from None
    if not parts.scheme:
        raise InvalidArgumentError("backend", shown(url), form)
    if parts.fragment:
        raise InvalidArgumentError("backend", shown(url), "no fragment after '#'")
    try:
        path = unquote(parts.path, errors="strict")
        query = parse_qsl(
            parts.query, keep_blank_values=True, strict_parsing=bool(parts.query), errors="strict"
        )
    except UnicodeDecodeError:  # strict, or different values would decode alike
        raise InvalidArgumentError("backend", shown(url), "UTF-8 after each '%'") from None
    except ValueError:
        raise InvalidArgumentError("backend", shown(url), "parameters as name=value") from None
    query += [(name, text) for name, text in (("address", parts.netloc), ("path", path)) if text]
    parameters: dict[str, Any] = dict(query)
    if len(parameters) < len(query):
        raise InvalidArgumentError("backend", shown(url), "each parameter once")
    return parts.scheme, parameters


def _split(backend: object) -> tuple[str, dict[str, Any]]:
    form = "a URL, or a mapping with a 'type' such as 'host'"
    parameters = dict(backend) if isinstance(backend, Mapping) else {}
    name = parameters.pop("type", None)
    if not isinstance(name, str):
        raise InvalidArgumentError("backend", shown(backend), form)
    return name, parameters


def _refuse_credentials(backend: BackendChoice, name: str, parameters: Mapping[str, Any]) -> None:
    """Refuse credentials, which belong in the environment; the error hides their values."""
    given = [repr(each) for each in parameters if is_credential(each)]
    given += ["user"] if "@" in code_of(parameters.get("address")) else []
    if given:
        wanted = f"no {given[0]}: {name}:// takes credentials from the environment only"
        raise InvalidArgumentError("backend", shown(backend), wanted)


def _find_backend(name: str) -> BackendType:
    found = {each.name: each for each in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)}
    for each, value in BACKENDS.items():
        found[each] = importlib.metadata.EntryPoint(each, value, ENTRY_POINT_GROUP)
    if name not in found:
        wanted = f"one of: {', '.join(sorted(found))}{did_you_mean(name, found)}"
        raise InvalidArgumentError("backend", name, wanted)
    try:
        backend_type: BackendType = found[name].load()
        msgspec.structs.fields(backend_type.config_type)
    except Exception as exc:
        wanted = f"a backend at {found[name].value}: {exc!r}"
        raise InvalidArgumentError("backend", name, wanted) from exc
    return backend_type
