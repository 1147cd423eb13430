"""Engines that stop, die and come back: scenarios of the requests that they leave behind."""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

from tests.e2e.engine_process import Generation
from tests.e2e.prefill_decode.deployment import Deployment, Prompt
from tests.e2e.prefill_decode.engines import TIMEOUT_S, Failure
from tests.e2e.prefill_decode.scenarios import at_once, require_clean, require_works

ANSWER_WITHIN_S = TIMEOUT_S + 10.0
"""The connector's own limit, and some time to compute the prompt instead."""
NUM_LARGE = 2
LARGE_TOKENS = 3500
"""Tokens of a large prompt; two such prompts just fit into P's cache."""
DELAYS_S = (0.0, 0.005, 0.02, 0.05, 0.1)
"""Delays between sending the requests and the event in their loads."""


async def stop(deployment: Deployment) -> str:
    """P stops between the legs, and at different moments of large loads."""
    return await _end(deployment, _stopped)


async def kill(deployment: Deployment) -> str:
    """P dies at those moments, and comes back at the same address."""
    return await _end(deployment, _killed)


async def killd(deployment: Deployment) -> str:
    """D dies at different moments of large loads."""
    decode = deployment.decodes[0]
    slowest_s = 0.0
    for delay_s in DELAYS_S:
        decoding = asyncio.create_task(_decode(deployment, *await _prefilled(deployment)))
        await asyncio.sleep(delay_s)
        decode.close()
        with contextlib.suppress(Failure):
            await decoding
        slowest_s = max(slowest_s, await deployment.require_free(*deployment.prefills))
        await deployment.start([decode])
        await require_works(deployment)
    return f"P free after {slowest_s:.1f} s"


@contextlib.asynccontextmanager
async def _stopped(deployment: Deployment) -> AsyncIterator[None]:
    prefill = deployment.prefills[0]
    prefill.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        prefill.signal(signal.SIGCONT)


@contextlib.asynccontextmanager
async def _killed(deployment: Deployment) -> AsyncIterator[None]:
    deployment.prefills[0].close()
    yield
    await require_clean(deployment, *deployment.decodes)
    await deployment.start(deployment.prefills[:1])


async def _end(
    deployment: Deployment, ended: Callable[[Deployment], AbstractAsyncContextManager[None]]
) -> str:
    """End the first P before D asks, or some time after; D must answer correctly and in time."""
    slowest_s = 0.0
    for delay_s in (None, *DELAYS_S):
        prompts, params = await _prefilled(deployment)
        decoding = _decode(deployment, prompts, params)
        if delay_s is not None:
            begun = asyncio.create_task(decoding)
            await asyncio.sleep(delay_s)
        async with ended(deployment):
            answers = await (decoding if delay_s is None else begun)
        again = await deployment.decode(prompts[0], params[0])  # perhaps from a P that has ended
        await deployment.require_true([*prompts, prompts[0]], [*answers, again])
        await require_clean(deployment)
        slowest_s = max(slowest_s, *(answer.last_token_s for answer in answers))
        if slowest_s > ANSWER_WITHIN_S:
            raise Failure(f"an answer took {slowest_s:.1f} s")
    await require_works(deployment)
    return f"slowest answer {slowest_s:.1f} s"


async def _prefilled(deployment: Deployment) -> tuple[list[Prompt], list[dict[str, Any]]]:
    """Let the first P compute prompts for D."""
    prompts = [deployment.prompt(LARGE_TOKENS) for _ in range(NUM_LARGE)]
    params = [await deployment.prefill(prompt) for prompt in prompts]
    if not all(params):
        raise Failure(f"{deployment.prefills[0].name} offers nothing")
    return prompts, params


async def _decode(
    deployment: Deployment, prompts: list[Prompt], params: list[dict[str, Any]]
) -> list[Generation]:
    """Let the first D continue prompts, all at once."""
    pairs = zip(prompts, params, strict=True)
    return await at_once([deployment.decode(prompt, told) for prompt, told in pairs])
