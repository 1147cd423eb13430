"""Scheduler of a single engine that computes prompts in the steps of P and D."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler


class LastTokenAlone(Scheduler):
    """Scheduler that leaves the last token of a prompt to a step of its own.

    With recurrent states, P computes the prompt without that token, and D computes the token. A
    single engine that does the same rounds as they do, and gives the same bits.
    """

    def _mamba_block_aligned_split(
        self, request: Any, num_new_tokens: int, *num_more_computed: int, **named: int
    ) -> int:
        plan: Callable[..., int] = super()._mamba_block_aligned_split
        stop = request.num_prompt_tokens - 1
        start = sum((request.num_computed_tokens, *num_more_computed, *named.values()))
        if start >= stop:
            return plan(request, num_new_tokens, *num_more_computed, **named)
        shorter: Any = SimpleNamespace(
            num_computed_tokens=request.num_computed_tokens,
            num_prompt_tokens=stop,
            num_tokens=stop,
            shared_prefix_boundary=request.shared_prefix_boundary,
        )
        return plan(shorter, min(num_new_tokens, stop - start), *num_more_computed, **named)
