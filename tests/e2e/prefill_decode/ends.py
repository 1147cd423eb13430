"""Engines that stop, die and come back: scenarios of what is left of a request then."""

import asyncio
import contextlib
import signal
from collections.abc import Awaitable, Callable
from typing import Any

from tests.e2e import handover_audit
from tests.e2e.prefill_decode.deployment import Deployment, Prompt, wait_until
from tests.e2e.prefill_decode.engines import TIMEOUT_S, Answer, Engine, Failure
from tests.e2e.prefill_decode.scenarios import at_once, require_clean, require_works

ANSWER_WITHIN_S = TIMEOUT_S + 10.0
"""The connector's own limit, and some time to compute the prompt instead."""
NUM_LARGE = 2
LARGE_TOKENS = 3500
"""Two of them just fit in P's cache."""
NOTED_WITHIN_S = 3.0
"""Time for the audit of an offer, well within a lease."""
DELAYS_S = (0.0, 0.005, 0.02, 0.05, 0.1)
"""From sending the requests to what happens in their loads."""


async def stop(deployment: Deployment) -> str:
    """P stands still between the legs."""
    prefill = deployment.prefills[0]
    prompts, params = await _prefilled(deployment)
    with _stopped(prefill):
        answers = await _decode(deployment, prompts, params)
    return await _judge(deployment, prompts, answers)


async def stopmid(deployment: Deployment) -> str:
    """P stands still at different moments of large loads."""
    prefill = deployment.prefills[0]
    slowest_s = 0.0
    for delay_s in DELAYS_S:
        prompts, params = await _prefilled(deployment, tokens=LARGE_TOKENS)
        decoding = asyncio.create_task(_decode(deployment, prompts, params))
        await asyncio.sleep(delay_s)
        with _stopped(prefill):
            answers = await decoding
        await deployment.require_true(prompts, answers)
        await require_clean(deployment)
        slowest_s = max(slowest_s, _require_in_time(answers))
    await require_works(deployment)
    return f"slowest answer {slowest_s:.1f} s"


async def kill(deployment: Deployment) -> str:
    """P dies between the legs, and comes back at the same address."""
    prefill = deployment.prefills[0]
    prompts, params = await _prefilled(deployment)
    prefill.close()
    answers = await _decode(deployment, prompts, params)
    await deployment.start([prefill])
    again = await deployment.decode(prompts[0], params[0])  # of an engine that is no more
    return await _judge(deployment, [*prompts, prompts[0]], [*answers, again])


async def killmid(deployment: Deployment) -> str:
    """P dies at different moments of large loads."""
    prefill = deployment.prefills[0]
    notes = []
    for delay_s in DELAYS_S:
        prompts, params = await _prefilled(deployment, tokens=LARGE_TOKENS)
        decoding = asyncio.create_task(_decode(deployment, prompts, params))
        await asyncio.sleep(delay_s)
        prefill.close()
        answers = await decoding
        await deployment.require_true(prompts, answers)
        await require_clean(deployment, *deployment.decodes)
        await deployment.start([prefill])
        notes.append(await _judge(deployment, prompts, answers))
    return "; ".join(notes)


async def killd(deployment: Deployment) -> str:
    """D dies at different moments of large loads."""
    decode = deployment.decodes[0]
    slowest_s = 0.0
    for delay_s in DELAYS_S:
        prompts, params = await _prefilled(deployment, tokens=LARGE_TOKENS)
        decoding = asyncio.create_task(_decode(deployment, prompts, params))
        await asyncio.sleep(delay_s)
        decode.close()
        with contextlib.suppress(Failure):
            await decoding
        slowest_s = max(slowest_s, await deployment.require_free(*deployment.prefills))
        await deployment.start([decode])
        await require_works(deployment)
    return f"P free after {slowest_s:.1f} s"


async def _prefilled(
    deployment: Deployment, *, tokens: int = 1000
) -> tuple[list[Prompt], list[dict[str, Any]]]:
    """Have the first P compute prompts for D; when it dies then, the audit knows its pages."""
    num_before = handover_audit.num_offered(deployment.audit_directory)
    prompts = [deployment.prompt(tokens) for _ in range(NUM_LARGE)]
    params = [await deployment.prefill(prompt) for prompt in prompts]

    async def is_noted() -> bool:
        number = handover_audit.num_offered(deployment.audit_directory) - num_before
        return number >= len(prompts) or deployment.connector != "kvxfer"

    if not await wait_until(is_noted, limit_s=NOTED_WITHIN_S):
        raise Failure(f"{deployment.prefills[0].name} offers nothing")
    return prompts, params


async def _decode(
    deployment: Deployment, prompts: list[Prompt], params: list[dict[str, Any]]
) -> list[Answer]:
    """Let the first D go on with prompts, all at once."""
    pairs = zip(prompts, params, strict=True)
    return await at_once([deployment.decode(prompt, told) for prompt, told in pairs])


def _require_in_time(answers: list[Answer]) -> float:
    """Check that each answer came in time; return the seconds of the slowest."""
    slowest_s = max(answer.seconds for answer in answers)
    if slowest_s > ANSWER_WITHIN_S:
        raise Failure(f"an answer took {slowest_s:.1f} s")
    return slowest_s


async def _judge(deployment: Deployment, prompts: list[Prompt], answers: list[Answer]) -> str:
    await deployment.require_true(prompts, answers)
    slowest_s = _require_in_time(answers)
    note = await require_clean(deployment)
    await require_works(deployment)
    return f"slowest answer {slowest_s:.1f} s{note}"


@contextlib.contextmanager
def _stopped(engine: Engine) -> Any:
    engine.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        engine.signal(signal.SIGCONT)


END_SCENARIOS: dict[str, Callable[[Deployment], Awaitable[str]]] = {
    function.__name__: function for function in (stop, stopmid, killd, kill, killmid)
}
