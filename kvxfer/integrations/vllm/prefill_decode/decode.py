"""Decode: the scheduler's side of D, which asks P for the pages of a prompt."""

import logging
import math
from collections.abc import Coroutine, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from kvxfer import runtime
from kvxfer.endpoint import Endpoint
from kvxfer.errors import InvalidArgumentError, KVXferError
from kvxfer.integrations.vllm.common.freed_blocks import writable
from kvxfer.integrations.vllm.prefill_decode.groups import Groups
from kvxfer.integrations.vllm.prefill_decode.metrics import Counters, Reason
from kvxfer.integrations.vllm.prefill_decode.prompts import Prompts
from kvxfer.integrations.vllm.prefill_decode.settings import Settings
from kvxfer.integrations.vllm.prefill_decode.ticket import Ticket, read_ticket, wants_decode
from kvxfer.integrations.vllm.prefill_decode.worker import Fetch
from kvxfer.lending.handover import Handover
from kvxfer.lending.reader import Found, Wanted
from kvxfer.storage.keys import BlockKey
from kvxfer.storage.observer import Reports, Requested
from kvxfer.storage.prompt_keys import PromptKeys
from kvxfer.text import printable, printable_id

T = TypeVar("T")

MAX_REASON_CHARACTERS = 500

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Asked:
    """Request that P was asked about."""

    ticket: Ticket
    keys: PromptKeys
    answer: "Future[Found]"
    deadline: float  # of the answer, on the clock of `runtime.monotonic`
    found: Found | None = None  # the answer, once it was used
    num_local_tokens: int = 0  # that were here when it was used


class DecodeScheduler:
    """Scheduler's side of D.

    Each request is asked about once, and its lease released once. Whatever goes wrong is logged and
    counted by reason, and D computes the prompt itself. D always computes the last token of a
    prompt, to get the next one. A ticket that names our `own` endpoint is a router's mistake.
    """

    def __init__(
        self,
        handover: Handover,
        settings: Settings,
        *,
        groups: Groups,
        prompts: Prompts,
        counters: Counters,
        own: Endpoint | None,
        reports: Reports,
    ) -> None:
        self._handover = handover
        self._settings = settings
        self._groups = groups
        self._prompts = prompts
        self._tokens_per_hit = math.lcm(*groups.tokens_per_block)
        self._counters = counters
        self._own = own
        self._has_warned_of_own = False
        self._reports = reports
        self._asked: dict[str, _Asked] = {}
        self._settled: set[str] = set()  # requests that P is not asked about again
        self._fetches: list[Fetch] = []

    def on_new_request(self, request: Any) -> None:
        """Begin to ask about a request as soon as it is known."""
        if wants_decode(request.kv_transfer_params):
            self._ask(request)

    def num_matched_tokens(self, request: Any, num_local_tokens: int) -> int | None:
        """Count the tokens that P has beyond those that are here; None until P has answered."""
        if not wants_decode(request.kv_transfer_params) or request.request_id in self._settled:
            return 0
        if getattr(request, "skip_reading_prefix_cache", False):  # it wants all log-probabilities
            return self._refuse(request, Reason.NOT_WANTED, "it does not read the cache")
        asked = self._asked.get(request.request_id) or self._ask(request)
        if asked is None:
            return 0
        if why := self._prompts.why_not(request):  # this may change after P was asked
            return self._refuse(request, Reason.NO_TOKENS, why)
        if asked.found is None and not asked.answer.done() and runtime.monotonic() < asked.deadline:
            return None
        return self._take_answer(request, asked, num_local_tokens)

    def on_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Plan the load of a request whose blocks are allocated, perhaps fewer than P has."""
        asked = self._asked.get(request.request_id)
        if asked is None or asked.found is None or request.request_id in self._settled:
            return
        if not num_external_tokens:  # another connector has more, or vLLM computes them after all
            self._settle(request.request_id)
            return
        first = asked.num_local_tokens
        num_tokens = first + num_external_tokens
        block_ids = [[writable(block) for block in ids] for ids in blocks.blocks]
        for group, size in enumerate(self._groups.tokens_per_block):
            if self._groups.has_states[group]:  # -1: without a writable block, the load fails
                state = block_ids[group][(num_tokens - 1) // size :]
                block_ids[group] = [(state[0] if state else 0) or -1]
        wanted = asked.found.wanted(asked.keys, first, num_tokens, block_ids)
        self._tell_wanted(request.request_id, asked.keys, wanted)
        waits = not asked.found.is_complete
        self._fetches.append(Fetch(request.request_id, asked.ticket, wanted, waits=waits))
        self._settled.add(request.request_id)

    def take_fetches(self) -> list[Fetch]:
        """Return the loads that were planned since the last call."""
        fetches, self._fetches = self._fetches, []
        return fetches

    def on_received(self, request_ids: Iterable[str]) -> None:
        """Release the leases of requests whose load has ended on every worker."""
        for request_id in request_ids:
            self._release(request_id)

    def finish(self, request: Any) -> None:
        """Forget a finished request; a load under way releases its lease when it ends."""
        request_id = request.request_id
        is_settled, is_asked = request_id in self._settled, request_id in self._asked
        self._settled.discard(request_id)
        if is_asked and not is_settled:
            self._release(request_id)
        elif not is_asked and not is_settled and wants_decode(request.kv_transfer_params):
            ticket = self._read_ticket(request)  # it was never queued: P need not wait for it
            if isinstance(ticket, Ticket):
                self._release_ticket(ticket)

    def _take_answer(self, request: Any, asked: _Asked, num_local_tokens: int) -> int:
        try:
            asked.found = asked.answer.result(timeout=0)
        except Exception as exc:  # noqa: BLE001 - whatever P says or does, or does not in time
            text = printable(str(exc) or "no answer in time", MAX_REASON_CHARACTERS)
            return self._refuse(request, Reason.of(exc), text)
        if asked.found.num_tokens == 0:
            return self._refuse(request, Reason.MISSING, "P has no page of the prompt")
        asked.num_local_tokens = num_local_tokens
        there, num_prompt_tokens = asked.found.num_tokens, int(request.num_prompt_tokens)
        is_whole = there >= num_prompt_tokens - self._prompts.num_last_tokens
        usable = num_prompt_tokens - 1 if is_whole else there - there % self._tokens_per_hit
        if usable <= num_local_tokens:  # all of it is here already
            self._settle(request.request_id)
        return max(0, usable - num_local_tokens)

    def _ask(self, request: Any) -> _Asked | None:
        ticket = self._read_ticket(request)
        if isinstance(ticket, InvalidArgumentError):
            self._refuse(request, Reason.INVALID, str(ticket))
            return None
        if ticket.endpoint == self._own:
            self._release_ticket(ticket)
            text = "the router sent both its legs to this engine; later cases are logged at DEBUG"
            level = logging.DEBUG if self._has_warned_of_own else logging.WARNING
            self._has_warned_of_own = True
            self._refuse(request, Reason.SAME_ENGINE, text, level=level)
            return None
        keys = self._prompts.keys_for_decode(request)
        if keys is None:
            self._release_ticket(ticket)
            why = self._prompts.why_not(request) or "the prompt has no tokens that can be loaded"
            self._refuse(request, Reason.NO_TOKENS, why)
            return None
        self._counters.add("tickets")
        ask, windows = self._handover.reader.ask, self._groups.windows
        asking = ask(ticket.endpoint, ticket.lease, keys, windows, waits=ticket.overlaps)
        answer = self._submit(asking)
        if answer is None:
            self._refuse(request, Reason.ERROR, "this engine is shutting down")
            return None
        asked = _Asked(ticket, keys, answer, runtime.monotonic() + self._settings.ask_timeout_s)
        self._asked[request.request_id] = asked
        return asked

    def _read_ticket(self, request: Any) -> Ticket | InvalidArgumentError:
        try:
            ticket = read_ticket(request.kv_transfer_params)
            self._settings.require_allowed(ticket.endpoint)
        except InvalidArgumentError as exc:
            return exc
        return ticket

    def _refuse(
        self, request: Any, reason: Reason, text: str, *, level: int = logging.WARNING
    ) -> int:
        """Let a request compute its prompt here; return the number of tokens to load: 0."""
        request_id = printable_id(request.request_id)
        logger.log(level, "request %s computes its prompt here: %s", request_id, text)
        self._counters.add("refused", reason=reason)
        self._tell_refused(request, text)
        self._settle(request.request_id)
        return 0

    def _tell_wanted(self, request_id: str, prompt: PromptKeys, wanted: Wanted) -> None:
        """Report which blocks of a request P is to provide; earlier ones are here."""
        if not self._reports:
            return
        keys: list[BlockKey] = []
        tiers: list[str | None] = []
        for group, given in enumerate(wanted.keys):
            size, first = wanted.tokens_per_block[group], wanted.first_blocks[group]
            if self._groups.windows[group] is None:
                keys += prompt.block_keys(group, size, first * size)
                tiers += [None] * first
            keys += given
            tiers += [self._reports.tier] * len(given)
        self._reports.tell(Requested(request_id, keys, tiers))

    def _tell_refused(self, request: Any, text: str) -> None:
        """Report that no block of a request comes from P, and why."""
        if not self._reports:
            return
        prompt, keys = self._prompts.keys_for_decode(request), list[BlockKey]()
        for group, size in enumerate(self._groups.tokens_per_block):
            if prompt is not None and self._groups.windows[group] is None:
                keys += prompt.block_keys(group, size, prompt.num_tokens)
        self._reports.tell(Requested(request.request_id, keys, [""] * len(keys), text))

    def _settle(self, request_id: str) -> None:
        self._settled.add(request_id)
        self._release(request_id)

    def _release(self, request_id: str) -> None:
        asked = self._asked.pop(request_id, None)
        if asked is not None:
            asked.answer.cancel()
            self._release_ticket(asked.ticket)

    def _release_ticket(self, ticket: Ticket) -> None:
        """Release a lease, unless other requests read under it, such as samples of one prompt."""
        if all(other.ticket != ticket for other in self._asked.values()):
            self._submit(self._handover.reader.release(ticket.endpoint, ticket.lease))

    def _submit(self, call: Coroutine[Any, Any, T]) -> "Future[T] | None":
        """Begin a call; None if the hand-over is closed."""
        try:
            return self._handover.submit(call)
        except KVXferError as exc:
            logger.debug("a call to P cannot begin: %s", exc)
            return None
