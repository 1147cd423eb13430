"""Step data: what the scheduler tells the workers in one step of the engine."""

from dataclasses import dataclass, field
from typing import Any

from kvxfer.backends.nixl import Endpoint
from kvxfer.integrations.vllm.prefill_decode.interface import KVConnectorMetadata
from kvxfer.lending.reader import Wanted
from kvxfer.storage.keys import BlockKey


@dataclass(frozen=True, slots=True)
class Offer:
    """Blocks of a request at P that may be read by others.

    Attributes:
        request_id: The request, which vLLM keeps the blocks of.
        lease: Name of its lease.
        keys: Keys of the blocks.
        block_ids: One for each key.
        is_complete: Whether these are the last blocks of the request; its lease begins to run.
    """

    request_id: str
    lease: str
    keys: list[BlockKey]
    block_ids: list[int]
    is_complete: bool


@dataclass(frozen=True, slots=True)
class Fetch:
    """Pages of a request at D to read.

    Attributes:
        request_id: The request.
        endpoint: Endpoint of P's worker of rank 0.
        lease: Name of the lease.
        wanted: The pages, and our blocks for them.
        waits: Whether pages that are not there yet are waited for.
    """

    request_id: str
    endpoint: Endpoint
    lease: str
    wanted: Wanted
    waits: bool


@dataclass(slots=True)
class StepData(KVConnectorMetadata):
    """Step data.

    Attributes:
        offers: Blocks to lend.
        revoked: Leases to end before the step: vLLM is about to write to their blocks.
        given_up: Leases to end after the offers of the step: vLLM keeps their blocks until the
            request is reported, if they have any.
        fetches: Pages to read.
        tiers: Step data of the engine's own tiers; None without any.
        loaded_by_both: Requests that begin to load from P and from the tiers in this step.
        kept_by_both: Finished requests whose blocks are lent and still being stored.
    """

    offers: list[Offer] = field(default_factory=list)
    revoked: list[str] = field(default_factory=list)
    given_up: list[str] = field(default_factory=list)
    fetches: list[Fetch] = field(default_factory=list)
    tiers: Any = None
    loaded_by_both: set[str] = field(default_factory=set)
    kept_by_both: set[str] = field(default_factory=set)
