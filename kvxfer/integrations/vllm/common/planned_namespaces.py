"""Planned namespaces: what an engine's arguments alone say about its namespaces.

Run as a program, because vLLM logs and may end the process: the first argument is a JSON file with
the arguments of an engine, the second the file to write the namespaces to.
"""

import inspect
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from kvxfer.errors import InvalidArgumentError
from kvxfer.integrations.vllm.common.model_identity import (
    chosen_order,
    handover_namespace,
    identify_model,
    require_telling_keys,
)
from kvxfer.integrations.vllm.common.plugin import CONNECTORS
from kvxfer.integrations.vllm.common.settings import EXPLICIT, find_settings
from kvxfer.storage.keys import Namespace

OF_THE_MODEL = ("model", "revision", "dtype", "quantization", "config_hash")
"""Fields that do not depend on the layout of the caches, which only a running engine knows."""
BRIDGED = ("layout", "blocks_per_chunk", "parallel", "instruction_set")
"""Fields that namespaces of portable pages leave empty; see `portable_namespace`."""
SIZES = {
    "world_size": "world_size",
    "tp_size": "tensor_parallel_size",
    "pp_size": "pipeline_parallel_size",
    "pcp_size": "prefill_context_parallel_size",
    "dcp_size": "decode_context_parallel_size",
}
"""Parts of `parallel` that the arguments state, and vLLM's names for them."""

HANDED_OVER, TIERS, SECONDARY = "hand-over", "tiers", "secondary tier"
"""Kinds of namespaces: for pages handed over between engines, for tiers below host memory, and for
a secondary tier of vLLM."""
OF_THE_CACHES = "the layers and the layout of the caches"


class PlannedNamespace(msgspec.Struct, frozen=True, kw_only=True):
    """Namespace of an engine that is not running."""

    kind: str  # one of `HANDED_OVER`, `TIERS`, `SECONDARY`
    namespace: Namespace  # as far as it is known
    fields: tuple[str, ...]  # the known ones; "parallel.tp_size" is a part of one
    keys: dict[str, str | int | None] = {}  # what else its keys depend on, by name
    unknown: str = ""  # what only a running engine shows, for people


def plan_namespaces(arguments: Mapping[str, Any]) -> list[PlannedNamespace]:
    """Plan the namespaces of an engine: for what it hands over, and for each kind of tiers.

    Names of arguments have underscores; those of the server, such as a port, are ignored.
    """
    from vllm.engine.arg_utils import EngineArgs

    known = inspect.signature(EngineArgs).parameters
    chosen = {name: value for name, value in arguments.items() if name in known}
    config = EngineArgs(**chosen).create_engine_config()
    transfer = arguments.get("kv_transfer_config", {})
    planned = [
        PlannedNamespace(
            kind=HANDED_OVER,
            namespace=handover_namespace(config, extra.get("revision", "")),
            fields=tuple(Namespace.__struct_fields__),
            unknown=f"whether one can read {OF_THE_CACHES} of the other",
        )
        for name, extra in _connectors(transfer)
        if name == "KVXferConnector"
    ]
    for _, extra in _connectors(transfer):
        if "backend" in extra:
            model = config.model_config.model
            planned.append(
                PlannedNamespace(
                    kind=TIERS,
                    namespace=identify_model(config, model=model, dtype=_dtype(config)),
                    fields=(*OF_THE_MODEL, *BRIDGED),
                    keys=_keys(config, extra),
                    unknown=f"groups ({OF_THE_CACHES}; of layers whose pages are not portable also "
                    "the release of vLLM, the parallel sizes and the processor)",
                )
            )
        planned += [
            _of_secondary_tier(config, extra, str(tier.get("revision", "")))
            for tier in extra.get("secondary_tiers", [])
            if "backend" in tier
        ]
    if not planned:
        wanted = "KVXferConnector, or a connector with a backend"
        raise InvalidArgumentError("kv_transfer_config", transfer, wanted)
    return planned


def _of_secondary_tier(config: Any, extra: Mapping[str, Any], revision: str) -> PlannedNamespace:
    """Plan the namespace that `row_namespace` will make, as far as it is known."""
    require_telling_keys(config)
    return PlannedNamespace(
        kind=SECONDARY,
        namespace=Namespace(
            model=config.model_config.model,
            revision=revision,
            dtype=_dtype(config),
            config_hash=chosen_order(config),
            parallel={ours: getattr(config.parallel_config, each) for ours, each in SIZES.items()},
        ),
        fields=(*OF_THE_MODEL, "blocks_per_chunk", *(f"parallel.{name}" for name in SIZES)),
        keys=_keys(config, extra),
        unknown=f"groups and layout ({OF_THE_CACHES}, with the release of vLLM), the bytes of a "
        "block, and instruction_set (the processor)",
    )


def _dtype(config: Any) -> str:
    """Name the data type of the caches. Source: vLLM's `build_offloading_config`."""
    cache_dtype = config.cache_config.cache_dtype
    dtype = config.model_config.dtype if cache_dtype == "auto" else cache_dtype
    return str(dtype).removeprefix("torch.")


def _keys(config: Any, extra: Mapping[str, Any]) -> dict[str, str | int | None]:
    """Collect what vLLM's keys of chunks depend on. Source: its `build_offloading_config`."""
    cache = config.cache_config
    tokens = cache.block_size * config.parallel_config.decode_context_parallel_size
    num_blocks = int(extra.get("blocks_per_chunk") or 1)
    return {
        "tokens_per_block": tokens,
        "tokens_per_chunk": int(extra.get("block_size") or tokens * num_blocks),
        "prefix_caching_hash_algo": str(cache.prefix_caching_hash_algo),
    }


def _connectors(transfer: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """List the names and settings of a connector, and of those within a MultiConnector."""
    name, extra = transfer.get("kv_connector", ""), transfer.get(EXPLICIT, {})
    yield name, find_settings(extra).values if name in CONNECTORS else extra
    for each in extra.get("connectors", []):
        yield from _connectors(each)


def main(given: Path, answer: Path) -> None:
    """Read a file of arguments and write a file of namespaces, or exit with a one-line reason."""
    try:
        planned = plan_namespaces(json.loads(given.read_bytes()))
    except Exception as exc:  # noqa: BLE001 - whatever vLLM says of the arguments
        sys.exit(f"{type(exc).__name__}: {' '.join(str(exc).split())}")
    answer.write_bytes(msgspec.json.encode(planned))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
