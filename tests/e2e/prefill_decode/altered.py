"""Pages that land altered: they fail the load of a request, and never change its tokens."""

import torch

from tests.e2e.handover_audit import Sign, planted
from tests.e2e.prefill_decode.deployment import Deployment, wait_until
from tests.e2e.prefill_decode.engines import Failure
from tests.e2e.prefill_decode.scenarios import require_clean, require_works

LENGTHS = (300, 1300)
CORRUPT = "vllm:kvxfer_pd_missing_total{corrupt}"
COUNT_LIMIT_S = 5.0


async def altered(deployment: Deployment) -> str:
    """Blocks that are altered, or swapped, after their checksums were made: D computes them.

    At last D's verification is turned off, which the audit has to find out.
    """
    if torch.cuda.is_available() and deployment.shape.decodes[0].integrity is None:
        return "not run: kvxfer fences blocks of a GPU, and hashes none of them"
    notes = [await _refused(deployment, sign) for sign in (Sign.ALTER_LENT, Sign.SWAP_LENT)]
    with planted(deployment.audit_directory, Sign.ALTER_LENT, Sign.SKIP_VERIFICATION):
        await deployment.hand_over(deployment.prompt(LENGTHS[0]))
    if not (await deployment.audit()).different:
        raise Failure("the audit passes a page that D should not have taken")
    deployment.forget_audit()
    await require_works(deployment)
    return "; ".join(notes)


async def _refused(deployment: Deployment, sign: Sign) -> str:
    """Hand prompts over with a fault at P; D must find every page of it."""
    prompts = [deployment.prompt(length) for length in LENGTHS]
    num_before, before = await _num_corrupt(deployment), await deployment.counts()
    with planted(deployment.audit_directory, sign):
        answers = [await deployment.hand_over(prompt) for prompt in prompts]

    async def has_grown() -> bool:
        return await _num_corrupt(deployment) >= num_before + len(prompts)

    await deployment.require_true(prompts, answers)
    if not await wait_until(has_grown, limit_s=COUNT_LIMIT_S):
        number = await _num_corrupt(deployment) - num_before
        raise Failure(f"{sign.value}: {number} pages counted as corrupt, of {len(prompts)} prompts")
    await deployment.require_audited(0)
    note = await require_clean(deployment)
    return f"{sign.value}: {await deployment.counts() - before}{note}"


async def _num_corrupt(deployment: Deployment) -> float:
    return sum([(await engine.metrics()).get(CORRUPT, 0) for engine in deployment.decodes])
