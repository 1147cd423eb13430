"""Freed blocks, which stores may still read: what is loaded into them waits.

vLLM stores a request's blocks in the step after they were computed, when they may be free. It ends
such stores when it gives the blocks to a request that it computes, or that the connector of the
stores itself loads, and does not see what another connector is about to load.
"""

from collections.abc import Iterable
from typing import Any

from kvxfer.errors import UnsupportedEngineError
from kvxfer.integrations.vllm.common.release import SUPPORTED, installed_version
from kvxfer.integrations.vllm.common.settings import locals_of_callers

_FENCED = "_current_batch_allocated_block_ids"


def writable(block: Any) -> int:
    """Return the id of a block that a load may write; 0 for the null block, and for shared ones."""
    return 0 if block.is_null or block.block_hash is not None else int(block.block_id)


def fence(connectors: Iterable[Any], blocks: Any = None) -> None:
    """Have stores of connectors end before something is loaded into `blocks`, if they read any.

    To be called before the connectors plan their step; without `blocks`, to check that this release
    of vLLM can do it.
    """
    groups = () if blocks is None else blocks.blocks
    written = {writable(block) for ids in groups for block in ids} - {0}
    for each in connectors:
        if not _is_a("OffloadingConnector", each):
            continue
        fenced = getattr(each.connector_scheduler, _FENCED, None)
        if fenced is None:
            detail = f"it has no {_FENCED}"
            raise UnsupportedEngineError("vllm", installed_version(), SUPPORTED, detail)
        fenced.update(written)


def fence_loads_of_others() -> None:
    """Have stores end before any connector of a MultiConnector loads into the blocks they read.

    To be called within a call of the MultiConnector, if there is one.
    """
    callers = locals_of_callers("self")
    multi = next((each for each in callers if _is_a("MultiConnector", each)), None)
    if multi is None:
        return
    fence(_stores(multi))
    if "update_state_after_alloc" in vars(multi):
        return
    tell = multi.update_state_after_alloc

    def update_state_after_alloc(request: Any, blocks: Any, num_external_tokens: int) -> None:
        tell(request, blocks, num_external_tokens)
        if num_external_tokens:
            fence(_stores(multi), blocks)

    multi.update_state_after_alloc = update_state_after_alloc


def _is_a(name: str, connector: object) -> bool:
    return name in [kind.__name__ for kind in type(connector).__mro__]


def _stores(multi: Any) -> list[Any]:
    each = multi._connectors  # noqa: SLF001 - the public name is not in every release
    return [*each, *(getattr(one, "_tiers", None) for one in each)]
