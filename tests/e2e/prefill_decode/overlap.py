"""Both legs of a request at once: D reads chunk after chunk, while P computes the next ones."""

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Any

from tests.e2e import handover_audit
from tests.e2e.prefill_decode.deployment import ASK, Deployment, Prompt
from tests.e2e.prefill_decode.engines import Answer, Failure
from tests.e2e.prefill_decode.scenarios import (
    require_clean,
    require_handed_over,
    require_works,
)

LARGE_TOKENS = 3500
NUM_LARGE = 4
SMALL_TOKENS, SMALL_MAX_TOKENS = range(24, 128, 8), 160
"""Prompts of requests that P decodes itself. One of them needs a second block every eight steps: of
its 39 blocks, two are left beside them and a large prompt, which takes 25 steps."""
CROWDED_TOKENS, CROWDED_TRIES = 3000, 5


async def overlap(deployment: Deployment) -> str:
    """Both legs of large prompts at once, with tickets of the router."""
    sample = await deployment.prefill(deployment.prompt(300))
    before = await deployment.counts()
    prompts = [deployment.prompt(LARGE_TOKENS) for _ in range(NUM_LARGE)]
    answers, early = [], 0
    for prompt in prompts:
        began = time.time()
        answer, prefilled = await _both_legs(deployment, sample, prompt)
        answers.append(answer)
        early += handover_audit.num_landed(deployment.audit_directory, began, prefilled)
    if not early and deployment.connector == "kvxfer":
        raise Failure("D read no page before P had computed the last one")
    note = await require_handed_over(deployment, prompts, answers, before)
    return f"{note}, {early} of them before P was done"


async def preempted(deployment: Deployment) -> str:
    """P takes the blocks of a prompt that D reads, because older requests of its own need some."""
    prefill = deployment.prefills[0]
    sample = await deployment.prefill(deployment.prompt(300))
    num_preempted = num_tries = 0
    while not num_preempted:
        if num_tries == CROWDED_TRIES:
            raise Failure("P has preempted no prompt that it lent")
        num_tries += 1
        await require_clean(deployment)  # what is lent for longer leaves the next prompt no room
        num_before = handover_audit.num_begun(deployment.audit_directory)
        small = [deployment.prompt(length) for length in SMALL_TOKENS]
        decoding = [
            asyncio.create_task(prefill.complete(each, max_tokens=SMALL_MAX_TOKENS))
            for each in small
        ]
        prompt = deployment.prompt(CROWDED_TOKENS)
        answer, _ = await _both_legs(deployment, sample, prompt)
        await asyncio.gather(*decoding)
        await deployment.require_true([prompt], [answer])
        num_preempted = handover_audit.num_begun(deployment.audit_directory) - num_before - 1
    await deployment.require_audited(0)
    note = await require_clean(deployment)
    await require_works(deployment)
    return f"a lent prompt preempted in try {num_tries}{note}"


async def _both_legs(
    deployment: Deployment, sample: dict[str, Any], prompt: Prompt
) -> tuple[Answer, float]:
    """Send both legs of a request; return D's answer, and when P's came, in seconds since 1970."""
    ticket = {"remote_request_id": secrets.token_hex(16)}

    async def prefill() -> float:
        await deployment.prefills[0].complete(prompt, max_tokens=1, params=ASK | ticket)
        return time.time()

    prefilling = asyncio.create_task(prefill())
    answer = await deployment.decode(prompt, sample | ticket | {"transfer_mode": "overlap"})
    return answer, await prefilling


OVERLAP_SCENARIOS: dict[str, Callable[[Deployment], Awaitable[str]]] = {
    "overlap": overlap,
    "preempted": preempted,
}
