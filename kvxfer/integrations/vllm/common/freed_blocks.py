"""Freed blocks that stores may still read: nothing is loaded into them before the stores end.

vLLM stores a request's blocks one step after it computed them, when they may be free already. It
ends such stores before it computes another request in those blocks, or before the connector that
stores them loads into them, but does not see what another connector is about to load.
"""

from collections.abc import Iterable
from typing import Any

from kvxfer.errors import UnsupportedEngineError
from kvxfer.integrations.vllm.common.release import SUPPORTED, installed_version
from kvxfer.integrations.vllm.common.settings import locals_of_callers

_FENCED = "_current_batch_allocated_block_ids"


def writable(block: Any) -> int:
    """Return a block's id if a load may write to the block, 0 if it is the null block or shared."""
    return 0 if block.is_null or block.block_hash is not None else int(block.block_id)


def fence(connectors: Iterable[Any], blocks: Any = None) -> None:
    """Make connectors end the stores that read any of `blocks` before anything is loaded into them.

    Call it before the connectors plan their step. Without `blocks` it only checks that this release
    of vLLM can do that.
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
    """Make stores end before any connector of a MultiConnector loads into the blocks they read.

    Call it within a call of the MultiConnector, if there is one.
    """
    callers = locals_of_callers("self")
    multi = next((each for each in callers if _is_a("MultiConnector", each)), None)
    if multi is None:
        return
    fence(_connectors_and_tiers(multi))
    if "update_state_after_alloc" in vars(multi):
        return
    tell = multi.update_state_after_alloc

    def update_state_after_alloc(request: Any, blocks: Any, num_external_tokens: int) -> None:
        tell(request, blocks, num_external_tokens)
        if num_external_tokens:
            fence(_connectors_and_tiers(multi), blocks)

    multi.update_state_after_alloc = update_state_after_alloc


def _is_a(name: str, connector: object) -> bool:
    return name in [kind.__name__ for kind in type(connector).__mro__]


def _connectors_and_tiers(multi: Any) -> list[Any]:
    each = multi._connectors  # noqa: SLF001 - the public name is not in every release
    return [*each, *(getattr(one, "_tiers", None) for one in each)]
