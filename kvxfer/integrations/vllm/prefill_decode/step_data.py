"""Step data: what the scheduler tells the workers in one step of the engine."""

from dataclasses import dataclass, field
from typing import Any

from kvxfer.backends.nixl import Endpoint
from kvxfer.integrations.vllm.prefill_decode.interface import KVConnectorMetadata
from kvxfer.lending.reader import Wanted
from kvxfer.storage.keys import BlockKey


@dataclass(frozen=True, slots=True)
class Offer:
    """Blocks of a request at P that may be read by others, under a lease."""

    request_id: str
    lease: str
    keys: list[BlockKey]
    block_ids: list[int]
    is_complete: bool  # these are the last blocks of the request: its lease begins to run


@dataclass(frozen=True, slots=True)
class Fetch:
    """Pages of a request at D to read."""

    request_id: str
    endpoint: Endpoint  # of P's worker of rank 0
    lease: str
    wanted: Wanted
    waits: bool  # for pages that are not there yet


@dataclass(slots=True)
class StepData(KVConnectorMetadata):
    """Step data.

    Attributes:
        revoked: Leases to end before the step: vLLM is about to write to their blocks.
        given_up: Leases to end after the offers of the step: vLLM keeps their blocks until the
            request is reported, if they have any.
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
