"""Prefill: the scheduler's side of P, which lends the pages of prompts."""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvxfer.integrations.vllm.prefill_decode.groups import Groups
from kvxfer.integrations.vllm.prefill_decode.interface import RequestStatus
from kvxfer.integrations.vllm.prefill_decode.prompts import Prompts
from kvxfer.integrations.vllm.prefill_decode.ticket import lease_of_router, wants_prefill
from kvxfer.integrations.vllm.prefill_decode.worker import Offer, StepData
from kvxfer.storage.keys import BlockKey
from kvxfer.storage.leases import make_ticket
from kvxfer.storage.prompt_keys import PromptKeys
from kvxfer.text import printable_id

MAX_NAMES = 1 << 16
"""Maximum number of lease names from routers to remember: when a name comes back after that many
others, no worker knows its lease any longer."""

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Early:
    """Request whose pages are lent while the rest of its prompt is computed."""

    request: Any
    num_preemptions: int  # when it was noted
    lease: str  # named by the router or by us
    keys: PromptKeys
    block_ids: list[list[int]]  # so far, for each group
    num_offered: list[int] = field(default_factory=list)  # blocks of each group

    @property
    def was_preempted(self) -> bool:
        """Whether vLLM took the request's blocks away since it was noted."""
        return bool(self.request.num_preemptions != self.num_preemptions)


class PrefillScheduler:
    """Scheduler's side of P; `make_params` builds the parameters for D, as `ticket.make_params`."""

    def __init__(
        self, *, groups: Groups, prompts: Prompts, make_params: Callable[..., dict[str, Any]]
    ) -> None:
        self._groups = groups
        self._prompts = prompts
        self._make_params = make_params
        self._early: dict[str, _Early] = {}
        self._leases: dict[str, str] = {}  # of requests whose blocks vLLM keeps for us
        self._names: dict[str, None] = {}  # that routers gave, the oldest first
        self._step = StepData()  # the next one, as far as it is planned

    @property
    def num_leases(self) -> int:
        """Requests whose blocks are lent, in part or as a whole, or not free yet."""
        return len(self._early) + len(self._leases)

    def on_new_request(self, request: Any) -> None:
        """Prepare a request that is to be handed over."""
        if wants_prefill(request.kv_transfer_params):
            self._prompts.leave_out_last(request)

    def on_alloc(self, request: Any) -> None:
        """Note a request that is about to be computed; called again after a preemption."""
        params, known = request.kv_transfer_params, self._early.get(request.request_id)
        if not wants_prefill(params) or (known is not None and not known.was_preempted):
            return
        if known is not None:
            self._step.revoked.append(known.lease)
        elif request.num_computed_tokens:  # a reset ended its lease while it was loading
            return
        if why := self._prompts.why_not(request):
            logger.warning("request %s is not lent: %s", printable_id(request.request_id), why)
        elif (keys := self._prompts.keys(request)) is not None:
            lease = self._name(lease_of_router(params))
            blocks: list[list[int]] = [[] for _ in self._groups.windows]
            early = _Early(request, request.num_preemptions, lease, keys, blocks)
            self._early[request.request_id] = early
            # Without blocks for now: D may ask before the step that offers them.
            self._offer(early, (), is_complete=False)

    def plan(self, output: Any) -> StepData:
        """Plan a step, which also offers chunks that earlier steps computed."""
        for request_id, early in list(self._early.items()):
            if early.was_preempted:  # its blocks are gone
                del self._early[request_id]
                self._step.revoked.append(early.lease)
        for data in output.scheduled_new_reqs:
            self._advance(data.req_id, data.block_ids, data.num_computed_tokens, replaces=True)
        cached = output.scheduled_cached_reqs
        rows = zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True)
        for request_id, block_ids, num_computed in rows:
            replaces = request_id in cached.resumed_req_ids
            self._advance(request_id, block_ids, num_computed, replaces=replaces)
        step, self._step = self._step, StepData()
        return step

    def finish(
        self, request: Any, block_ids: Sequence[Sequence[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Lend the blocks of a request that is finished.

        Returns:
            Whether vLLM is to keep the blocks until the workers report the request, and the
            parameters for D, None if nothing is lent.
        """
        early = self._early.pop(request.request_id, None)
        if early is None:  # nothing of it can be lent
            return False, None
        ends = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)
        num_further = request.num_computed_tokens - request.num_prompt_tokens
        is_whole = num_further >= 0 and not (num_further and any(self._groups.has_states))
        # The prompt of a vLLM session grows; from then on, its blocks have other keys.
        is_same = early.keys.num_tokens == request.num_prompt_tokens
        is_same = is_same and not self._prompts.why_not(request)  # its adapter may have changed
        if request.status not in ends or not (is_whole and is_same):
            return self._give_up(early), None
        self._offer(early, self._pairs(early.keys, block_ids), is_complete=True)
        self._leases[request.request_id] = early.lease
        return True, self._make_params(early.lease, num_tokens=request.num_prompt_tokens)

    def on_sent(self, request_ids: Sequence[str]) -> None:
        """Note requests whose leases are over and whose blocks vLLM frees now."""
        for request_id in request_ids:
            self._leases.pop(request_id, None)

    def reset(self) -> None:
        """End all leases: their pages may be those of old weights.

        A running request is no longer lent, unless vLLM computes it again.
        """
        given_up = [*self._step.given_up, *self._leases.values()]
        self._step.given_up = list(dict.fromkeys(given_up))
        for request_id, early in list(self._early.items()):
            if not early.was_preempted:
                self._step.revoked.append(self._early.pop(request_id).lease)

    def _give_up(self, early: _Early) -> bool:
        """End a request's lease early; return whether vLLM is to keep the request's blocks."""
        if early.was_preempted:  # vLLM has its blocks already
            self._step.revoked.append(early.lease)
            return False
        self._step.given_up.append(early.lease)
        if not any(early.num_offered):
            return False
        # Readers may read its first pages: vLLM frees them when the workers report that none does.
        self._leases[early.request.request_id] = early.lease
        self._offer(early, (), is_complete=True)
        return True

    def _advance(
        self,
        request_id: str,
        block_ids: Sequence[Sequence[int]] | None,
        num_computed: int,
        *,
        replaces: bool,
    ) -> None:
        """Note the blocks of a request, and offer those that earlier steps have filled."""
        early = self._early.get(request_id)
        if early is None:
            return
        for group, ids in enumerate(early.block_ids):
            if replaces:
                ids.clear()
            if block_ids is not None:
                ids.extend(block_ids[group])
        if replaces:  # shared blocks may be computed for another request in this very step
            early.num_offered = [0] * len(early.block_ids)
            return
        num_computed = min(num_computed, early.keys.num_tokens)
        pairs: list[tuple[BlockKey, int]] = []
        for group, ids in enumerate(early.block_ids):
            size = self._groups.tokens_per_block[group]
            full, done = num_computed // size, early.num_offered[group]
            if full <= done or self._groups.windows[group] is not None:
                continue
            found = early.keys.block_keys(group, size, full * size, first_token=done * size)
            pairs += zip(found, ids[done:full], strict=False)
            early.num_offered[group] = full
        if pairs and not self._prompts.why_not(early.request):
            self._offer(early, pairs, is_complete=False)

    def _offer(
        self, early: _Early, pairs: Iterable[tuple[BlockKey, int]], *, is_complete: bool
    ) -> None:
        """Offer blocks of a request by their keys, except null blocks."""
        kept = [pair for pair in pairs if pair[1]]
        keys, block_ids = [key for key, _ in kept], [block_id for _, block_id in kept]
        request_id = early.request.request_id
        offer = Offer(request_id, early.lease, keys, block_ids, is_complete=is_complete)
        self._step.offers.append(offer)

    def _pairs(
        self, keys: PromptKeys, block_ids: Sequence[Sequence[int]]
    ) -> list[tuple[BlockKey, int]]:
        pairs, num_tokens = list[tuple[BlockKey, int]](), keys.num_tokens
        for group, size in enumerate(self._groups.tokens_per_block):
            ids = block_ids[group]
            if self._groups.has_states[group]:
                found = [keys.state_key(group, num_tokens)]
                ids = ids[(num_tokens - 1) // size :]
            else:
                found = keys.block_keys(group, size, num_tokens)
            pairs += zip(found, ids, strict=False)  # there may be blocks for later tokens
        return pairs

    def _name(self, given: str | None) -> str:
        """Name a lease as its router did, or by a new name if the router's was given before.

        Workers report the end of a lease by its name alone, some time after it was revoked or given
        up. Another lease of that name would be mistaken for it, and its blocks freed while lent.
        """
        ours = self._leases.values(), [each.lease for each in self._early.values()]
        if given is None or any(given in names for names in (self._names, *ours)):
            return make_ticket()
        self._names[given] = None
        if len(self._names) > MAX_NAMES:
            del self._names[next(iter(self._names))]
        return given
