"""Worker: lends the blocks of P's prompts, and reads the pages of D's, as the scheduler plans."""

import logging
from collections import Counter, defaultdict
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from kvxfer import runtime
from kvxfer.errors import KVXferError
from kvxfer.integrations.vllm.prefill_decode.interface import KVConnectorMetadata
from kvxfer.integrations.vllm.prefill_decode.metrics import Counters
from kvxfer.integrations.vllm.prefill_decode.ticket import Ticket
from kvxfer.lending.handover import Handover
from kvxfer.lending.reader import Fetched, Wanted
from kvxfer.storage.keys import BlockKey
from kvxfer.storage.observer import Removal, Reports
from kvxfer.text import printable_id

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Offer:
    """Blocks of a request at P that other engines may read under a lease."""

    request_id: str
    lease: str
    keys: list[BlockKey]
    block_ids: list[int]
    is_complete: bool  # these are the last blocks of the request: its lease begins to run


@dataclass(frozen=True, slots=True)
class Fetch:
    """Pages of a request at D to read."""

    request_id: str
    ticket: Ticket
    wanted: Wanted
    waits: bool  # for pages that are not there yet


@dataclass(slots=True)
class StepData(KVConnectorMetadata):
    """Plan of one step, sent from the scheduler to the workers."""

    offers: list[Offer] = field(default_factory=list)
    # Leases to end before the step: vLLM is about to write to their blocks.
    revoked: list[str] = field(default_factory=list)
    # Leases to end after its offers: vLLM keeps their blocks, if any, until the workers report.
    given_up: list[str] = field(default_factory=list)
    fetches: list[Fetch] = field(default_factory=list)
    tiers: Any = None  # plan of the engine's own tiers
    loaded_by_both: set[str] = field(default_factory=set)  # from P and from the tiers
    kept_by_both: set[str] = field(default_factory=set)  # lent and still being stored


@dataclass(slots=True)
class Ended:
    """Requests whose transfers ended since the last look."""

    sent: set[str] = field(default_factory=set)  # their leases are over, no block is pinned
    received: set[str] = field(default_factory=set)  # whether loads succeeded or not
    # Blocks here that were not loaded, of each group of these requests.
    bad_blocks: dict[str, list[list[int]]] = field(default_factory=dict)


class PrefillDecodeWorker:
    """Worker's side of P and of D, called from the engine's thread; `reports` gets lent blocks."""

    def __init__(
        self,
        handover: Handover,
        counters: Counters,
        reports: Reports = Reports(),  # noqa: B008 - without observers it does nothing
    ) -> None:
        self._handover = handover
        self._counters = counters
        self._reports = reports
        self._lent_keys: dict[str, dict[BlockKey, None]] = defaultdict(dict)  # blocks of each lease
        self._num_leases: Counter[BlockKey] = Counter()  # of each of these blocks
        self._request_ids: dict[str, str] = {}  # request of each lease that vLLM keeps blocks for
        self._num_expired = 0
        self._loads: dict[str, tuple[Fetch, Future[Fetched], float]] = {}
        # Of loads that ended: bad blocks, and the drain of a late read, which may still write.
        self._ending: dict[str, tuple[list[list[int]], Future[None] | None]] = {}

    def prepare(self, step: StepData) -> None:
        """Do what the scheduler planned to happen before a step's computation.

        End leases whose blocks vLLM is about to write to, and wait until nobody finds the blocks.
        Lend at once what earlier steps computed: D may be about to ask, and a step may take long.
        """
        if step.revoked:
            self._handover.revoke(step.revoked)
        for each in step.offers:
            keys, block_ids = each.keys, each.block_ids
            if self._handover.is_on_device and not each.is_complete:
                keys, block_ids = [], []  # kernels may still run; the last offer has all blocks
            if each.is_complete:
                self._request_ids[each.lease] = each.request_id
            if self._reports:
                new = [key for key in keys if key not in self._lent_keys[each.lease]]
                self._lent_keys[each.lease].update(dict.fromkeys(new))
                self._num_leases.update(new)
                self._reports.added([key for key in new if self._num_leases[key] == 1])
            self._handover.offer(each.lease, keys, block_ids, is_complete=each.is_complete)

    def begin(self, step: StepData) -> None:
        """Begin a step's loads and end the leases that it gives up; call it after `prepare`."""
        if step.given_up:
            self._handover.give_up(step.given_up)
        for fetch in step.fetches:
            ticket, waits_for = fetch.ticket, fetch.ticket.lease if fetch.waits else None
            call = self._handover.reader.fetch(ticket.endpoint, fetch.wanted, waits_for=waits_for)
            loading = self._handover.submit(call)
            self._loads[fetch.request_id] = fetch, loading, runtime.monotonic()

    def take_ended(self) -> Ended:
        """Return what ended since the last call; each request once."""
        ended = Ended()
        for lease in self._handover.take_ended():
            told = self._lent_keys.pop(lease, {})
            self._num_leases -= Counter(told.keys())
            gone = [key for key in told if key not in self._num_leases]
            self._reports.removed(gone, Removal.LEASE_OVER)
            if request_id := self._request_ids.pop(lease, None):
                ended.sent.add(request_id)
        num_expired = self._handover.num_expired
        self._counters.add("expired", num_expired - self._num_expired)
        self._num_expired = num_expired
        for request_id in [each for each, (_, load, _) in self._loads.items() if load.done()]:
            fetch, load, began = self._loads[request_id]
            fetched, quiet = self._count(fetch, load, runtime.monotonic() - began), None
            if not fetched.memory_safe:
                text = "request %s waits: a read that NIXL cannot end may still write to its blocks"
                logger.warning(text, printable_id(request_id))
                quiet = self._handover.submit(self._handover.reader.drain(fetch.wanted))
            self._ending[request_id] = fetched.bad_blocks, quiet
            del self._loads[request_id]
        for request_id, (bad, quiet) in list(self._ending.items()):
            if quiet is None or quiet.done():
                del self._ending[request_id]
                ended.received.add(request_id)
                ended.bad_blocks |= {request_id: bad} if any(bad) else {}
        return ended

    def _count(self, fetch: Fetch, load: "Future[Fetched]", seconds: float) -> Fetched:
        """Count a load that has ended, and return its result; one that failed has no good block."""
        request_id = printable_id(fetch.request_id)
        try:
            fetched = load.result()
        except Exception as exc:
            level = logging.WARNING if isinstance(exc, KVXferError) else logging.ERROR
            logger.log(level, "load of request %s failed: %r", request_id, exc, exc_info=level > 30)
            self._counters.add("missing", sum(map(len, fetch.wanted.keys)), reason="error")
            return Fetched([[block for block in ids if block] for ids in fetch.wanted.block_ids])
        if fetched.num_verified:
            self._counters.add_load(seconds)
        self._counters.add("loaded_bytes", fetched.num_bytes)
        self._counters.add("pages_verified", fetched.num_verified)
        for reason, number in fetched.missing.items():
            self._counters.add("missing", number, reason=reason)
        if fetched.reason:
            logger.warning("request %s recomputes pages: %s", request_id, fetched.reason)
        return fetched
