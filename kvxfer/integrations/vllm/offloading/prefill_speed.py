"""Prefill speed: what the engine computes of prompts in its steps, as the scheduler sees it."""

from collections import deque
from collections.abc import Sequence

from kvxfer import runtime
from kvxfer.storage.keys import BlockKey, group_of
from kvxfer.transfer.load_or_compute import LoadOrCompute

MAX_STEPS = 16
"""Most steps that have begun and not ended; more are not told that they end."""


class PrefillSpeed:
    """Measurement of the tokens of prompts that the engine computes, and of the time of its steps.

    The chunks that a step computes are passed to be stored right after it was planned, and vLLM
    asks for the metrics when the step has ended. With asynchronous scheduling a step is planned
    before the one before it has ended: then its time is that between the two ends. Only chunks of
    one group are counted, of `tokens_per_chunk` tokens; `loads` is told what was computed.
    """

    def __init__(self, loads: LoadOrCompute, group: int, tokens_per_chunk: int) -> None:
        self._group = group
        self._tokens_per_chunk = tokens_per_chunk
        self.loads = loads
        self._steps: deque[list[float]] = deque(maxlen=MAX_STEPS)  # begin, and tokens
        self._ended_s = 0.0

    def begin_step(self) -> None:
        """Note that a step was planned."""
        self._steps.append([runtime.monotonic(), 0])

    def compute(self, keys: Sequence[BlockKey]) -> None:
        """Note chunks that the last step computes."""
        if self._steps:
            self._steps[-1][1] += self._count_tokens(keys)

    def load_pays(self, keys: Sequence[BlockKey], num_bytes: int, *, queued_bytes: int) -> bool:
        """Whether to load chunks; see `LoadOrCompute.pays`."""
        num_tokens = self._count_tokens(keys)
        return not num_tokens or self.loads.pays(
            keys, num_bytes, num_tokens, queued_bytes=queued_bytes
        )

    def end_step(self) -> None:
        """Note that the first step has ended."""
        if not self._steps:
            return
        began_s, num_tokens = self._steps.popleft()
        now = runtime.monotonic()
        if num_tokens:
            self.loads.computed(int(num_tokens), now - max(began_s, self._ended_s))
        self._ended_s = now

    def _count_tokens(self, keys: Sequence[BlockKey]) -> int:
        return self._tokens_per_chunk * sum(group_of(key) == self._group for key in keys)
