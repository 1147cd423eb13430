"""Planned namespaces: what is known of an engine's namespaces by its arguments alone.

Run as a program, because vLLM logs and may end the process: the first argument is a file with the
arguments of an engine as JSON, the second one a file for the namespaces.
"""

import inspect
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from kvxfer.errors import InvalidArgumentError
from kvxfer.integrations.vllm.common.model_identity import handover_namespace, identify_model
from kvxfer.storage.keys import Namespace

OF_THE_MODEL = ("model", "revision", "dtype", "quantization", "config_hash")
"""Fields that do not depend on the layout of the caches, which an engine finds when it starts."""


class PlannedNamespace(msgspec.Struct, frozen=True, kw_only=True):
    """Namespace of an engine that does not run.

    Attributes:
        namespace: The namespace, as far as it is known.
        fields: Names of the fields that are known.
    """

    namespace: Namespace
    fields: tuple[str, ...]


def plan_namespaces(arguments: Mapping[str, Any]) -> list[PlannedNamespace]:
    """Plan the namespaces of an engine: of what it hands over, and of its tiers below host memory.

    Args:
        arguments: Arguments of vLLM's engine, with underscores; those that are not of the engine,
            such as the port of its server, are ignored.

    Raises:
        InvalidArgumentError: No connector of kvxfer is in them, or the model cannot be identified.
    """
    from vllm.engine.arg_utils import EngineArgs

    known = inspect.signature(EngineArgs).parameters
    chosen = {name: value for name, value in arguments.items() if name in known}
    config = EngineArgs(**chosen).create_engine_config()
    transfer = arguments.get("kv_transfer_config", {})
    planned = [
        PlannedNamespace(
            namespace=handover_namespace(config, extra.get("revision", "")),
            fields=tuple(Namespace.__struct_fields__),
        )
        for name, extra in _connectors(transfer)
        if name == "KVXferConnector"
    ]
    if any("backend" in extra for _, extra in _connectors(transfer)):
        planned.append(PlannedNamespace(namespace=_of_tiers(config), fields=OF_THE_MODEL))
    if not planned:
        raise InvalidArgumentError(
            "kv_transfer_config", transfer, "KVXferConnector, or a connector with a backend"
        )
    return planned


def _of_tiers(config: Any) -> Namespace:
    """Make what is known of `row_namespace`. Source: vLLM's `build_offloading_config`."""
    identity, cache_dtype = identify_model(config), config.cache_config.cache_dtype
    dtype = config.model_config.dtype if cache_dtype == "auto" else cache_dtype
    return Namespace(
        model=config.model_config.model,
        revision=identity.revision,
        dtype=str(dtype).removeprefix("torch."),
        quantization=identity.quantization,
        config_hash=identity.config_hash,
    )


def _connectors(transfer: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """List the names and settings of a connector, and of those within a MultiConnector."""
    extra = transfer.get("kv_connector_extra_config", {})
    yield transfer.get("kv_connector", ""), extra
    for each in extra.get("connectors", []):
        yield from _connectors(each)


def main(given: Path, answer: Path) -> None:
    """Answer a file of arguments by a file of namespaces, or end with the reason in one line."""
    try:
        planned = plan_namespaces(json.loads(given.read_bytes()))
    except Exception as exc:  # noqa: BLE001 - whatever vLLM says of the arguments
        sys.exit(f"{type(exc).__name__}: {' '.join(str(exc).split())}")
    answer.write_bytes(msgspec.json.encode(planned))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
