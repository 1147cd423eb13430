"""Scenarios of ordinary use: every engine runs, and no client is malicious.

A scenario returns notes for the table, and raises `Failure` if something is wrong.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Sequence
from typing import TypeVar

from tests.e2e.engine_process import Generation
from tests.e2e.prefill_decode.deployment import Counts, Deployment, Prompt
from tests.e2e.prefill_decode.engines import Engine, Failure, Metrics

T = TypeVar("T")

LENGTHS = (1, 2, 127, 128, 129, 255, 257, 640, 1300, 3795)
NUM_MANY = 16
NUM_AT_ONCE = 8
NUM_ABORTED = 10
ABORT_WITHIN_S = 0.6
NUM_HEAD_BLOCKS = 5
TIERS_BYTES, P_BYTES = "vllm:kv_offload_load_bytes_total", "vllm:kvxfer_pd_loaded_bytes_total"
ABORTED_TOKENS = 200
"""Output tokens, so many that some clients disconnect while tokens arrive."""
RECOVERY_LIMIT_S = 10.0
"""Time in which engines find each other again."""


async def basic(deployment: Deployment) -> str:
    """Prompts of many lengths, one after the other, through both legs."""
    prompts = [deployment.prompt(length) for length in LENGTHS]
    before = await deployment.counts()
    answers = [await deployment.hand_over(prompt) for prompt in prompts]
    return await require_handed_over(deployment, prompts, answers, before)


async def suffix(deployment: Deployment) -> str:
    """A prompt twice, and continuations of it: only blocks that D does not have are loaded."""
    head = deployment.prompt(512)
    prompts = [head, head, [*head, *deployment.prompt(300)], [*head, *deployment.prompt(129)]]
    prefill, decode = deployment.prefills[0], deployment.decodes[0]
    before = await deployment.counts()
    answers = [
        await deployment.hand_over(prompt, prefill=prefill, decode=decode) for prompt in prompts
    ]
    note = await require_handed_over(deployment, prompts, answers, before)
    if (await deployment.counts() - before).local == 0:
        raise Failure(f"D loaded what it had: {note}")
    return note


async def salt(deployment: Deployment) -> str:
    """A prompt with the salt of one tenant and the parameters of another tenant."""
    prompt = deployment.prompt(700)
    params = await deployment.prefill(prompt, cache_salt="one")
    before = await deployment.counts()
    answer = await deployment.decode(prompt, params, cache_salt="other")
    return await _require_true(deployment, [prompt], [answer], before, may_load=False)


async def many(deployment: Deployment) -> str:
    prompts = [deployment.prompt(deployment.chance.randrange(2, 1000)) for _ in range(NUM_MANY)]
    before = await deployment.counts()
    answers = await at_once([deployment.hand_over(prompt) for prompt in prompts])
    return await require_handed_over(deployment, prompts, answers, before)


async def abort(deployment: Deployment) -> str:
    """Clients that disconnect at random moments, half of them during the first leg."""

    async def leave(index: int, prompt: Prompt, after_s: float) -> None:
        prefill, decode = deployment.pair()
        params = await deployment.prefill(prompt, engine=prefill) if index % 2 else None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(after_s):
                params = params or await deployment.prefill(prompt, engine=prefill)
                await deployment.decode(prompt, params, engine=decode, max_tokens=ABORTED_TOKENS)

    moments = [deployment.chance.uniform(0.0, ABORT_WITHIN_S) for _ in range(NUM_ABORTED)]
    prompts = [deployment.prompt(deployment.chance.randrange(300, 3000)) for _ in moments]
    numbered = enumerate(zip(prompts, moments, strict=True))
    await at_once([leave(index, *pair) for index, pair in numbered])
    seconds = await deployment.require_free(*deployment.engines)
    await require_works(deployment)
    return f"free after {seconds:.1f} s"


async def late(deployment: Deployment) -> str:
    """D asks only after the lease is over, and every block of P has been reused."""
    prompts = [deployment.prompt(length) for length in (700, 2000)]
    prefill, decode = deployment.prefills[0], deployment.decodes[0]
    params = [await deployment.prefill(prompt, engine=prefill) for prompt in prompts]
    await deployment.require_free(prefill)
    await deployment.reuse_blocks(prefill)
    before = await deployment.counts()
    answers = [
        await deployment.decode(prompt, told, engine=decode)
        for prompt, told in zip(prompts, params, strict=True)
    ]
    note = await _require_true(deployment, prompts, answers, before)
    await require_works(deployment)
    return note


async def refused(deployment: Deployment) -> str:
    """P and D do not fit: D computes by itself, and logs the differing field with both values."""
    decode, prefill = deployment.decodes[0], deployment.prefills[0]
    prompts = [deployment.prompt(length) for length in (129, 700)]
    before = await deployment.counts()
    answers = [await deployment.hand_over(prompt) for prompt in prompts]
    note = await _require_true(deployment, prompts, answers, before, may_load=False)
    log = decode.log() + prefill.log()  # whole logs: the engines connected when they started
    names = (decode.shape.dtype, prefill.shape.dtype)
    if not any(all(name in line for name in names) for line in log.splitlines()):
        raise Failure(f"no line of a log names {' and '.join(names)}")
    return note


async def tiers(deployment: Deployment) -> str:
    """The head of a prompt is in the host tier of D: the rest comes from P, or is computed."""
    prefill, decode = deployment.prefills[0], deployment.decodes[0]
    head = deployment.prompt(NUM_HEAD_BLOCKS * decode.shape.tokens_per_block)
    prompts = [[*head, *deployment.prompt(300)] for _ in range(2)]
    await deployment.decode([*head, *deployment.prompt(9)], None)
    await deployment.reuse_blocks(decode)

    params, before = await deployment.prefill(prompts[0]), await deployment.counts()
    metrics = await decode.metrics()
    answer = await deployment.decode(prompts[0], params)
    note = await require_handed_over(
        deployment, prompts[:1], [answer], before, num_from_tiers=len(head)
    )
    bytes_per_block = (decode.shape.cache_mib << 20) // int(metrics["num_blocks"])
    shares = await _blocks_since(decode, metrics, bytes_per_block)
    expected = {TIERS_BYTES: NUM_HEAD_BLOCKS, P_BYTES: -(-300 // prefill.shape.tokens_per_block)}
    if shares != expected:
        raise Failure(f"D loaded blocks {shares}, not {expected}")

    await deployment.reuse_blocks(decode)
    params = await deployment.prefill(deployment.prompt(300))
    before, metrics = await deployment.counts(), await decode.metrics()
    answer = await deployment.decode(prompts[1], params)
    counts = await deployment.counts() - before
    await deployment.require_true(prompts[1:], [answer])
    shares = await _blocks_since(decode, metrics, bytes_per_block)
    if shares != {TIERS_BYTES: NUM_HEAD_BLOCKS, P_BYTES: 0} or counts.loaded != len(head):
        raise Failure(f"with the ticket of another prompt {counts}, blocks {shares}")
    return f"{note}; without P {counts}{await require_clean(deployment)}"


async def altered(deployment: Deployment) -> str:
    """Pages that change in D after they were verified: proves that the audit can fail."""
    await deployment.hand_over(deployment.prompt(300))
    if not deployment.audit().different:
        raise Failure("the audit passes a page that was altered")
    deployment.forget_audit()
    return "found by the audit"


async def _require_true(
    deployment: Deployment,
    prompts: Sequence[Prompt],
    answers: Sequence[Generation],
    before: Counts,
    *,
    may_load: bool = True,
) -> str:
    """Fail unless answers are correct, and no block stays in use."""
    counts = await deployment.counts() - before
    await deployment.require_true(prompts, answers)
    if counts.loaded and not may_load:
        raise Failure(f"{counts}, of another tenant's cache, or of caches that do not fit")
    return f"{counts}{await require_clean(deployment)}"


async def _blocks_since(engine: Engine, before: Metrics, bytes_per_block: int) -> dict[str, float]:
    """Count the blocks that an engine has loaded, from the tiers and from P."""
    after = await engine.metrics()
    return {
        name: (after.get(name, 0) - before.get(name, 0)) / bytes_per_block
        for name in (TIERS_BYTES, P_BYTES)
    }


async def require_handed_over(
    deployment: Deployment,
    prompts: Sequence[Prompt],
    answers: Sequence[Generation],
    before: Counts,
    *,
    num_from_tiers: int = 0,
) -> str:
    """Fail unless answers are correct, D computed at most a token of each, and no block is kept.

    Tokens from tiers of D's own are not audited here.
    """
    counts = await deployment.counts() - before
    await deployment.require_true(prompts, answers)
    if counts.computed > len(prompts):
        total = sum(map(len, prompts))
        raise Failure(f"{counts}, of {len(prompts)} prompts with {total} tokens")
    audited = await deployment.require_audited(counts.loaded - num_from_tiers)
    return f"{counts}{audited}{await require_clean(deployment)}"


async def require_clean(deployment: Deployment, *engines: Engine) -> str:
    """Fail unless engines run and have no block in use within a lease; say how long it took."""
    seconds = await deployment.require_free(*(engines or deployment.engines))
    return f", free after {seconds:.1f} s" if seconds > 1 else ""


async def require_works(deployment: Deployment) -> None:
    """Fail unless each pair of engines soon hands a request over again."""
    deadline_s = time.monotonic() + RECOVERY_LIMIT_S
    while True:
        num_pairs = len(deployment.prefills) * len(deployment.decodes)
        prompts = [deployment.prompt(300) for _ in range(num_pairs)]
        before = await deployment.counts()
        answers = [await deployment.hand_over(prompt) for prompt in prompts]
        try:
            await require_handed_over(deployment, prompts, answers, before)
        except Failure as exc:
            if time.monotonic() > deadline_s or "wrong tokens" in str(exc):
                raise Failure(f"afterwards: {exc}") from exc
        else:
            return


async def at_once(requests: Sequence[Awaitable[T]]) -> list[T]:
    """Run requests, several at a time, and wait for all of them; raise the first exception."""
    room = asyncio.Semaphore(NUM_AT_ONCE)

    async def run(request: Awaitable[T]) -> T:
        async with room:
            return await request

    results = await asyncio.gather(*map(run, requests), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]
