"""Prefill and decode engines side by side, and a single engine that gives the true answers."""

import asyncio
import itertools
import random
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from examples.proxy.legs import LEND
from tests.e2e import audit, handover_audit, models, oracle
from tests.e2e.engine_process import ON_SHARED_CORES, EngineConfig, EngineProcess, Generation
from tests.e2e.prefill_decode.engines import (
    LEASE_S,
    MAX_MODEL_LEN,
    POLL_S,
    Engine,
    EngineShape,
    Failure,
    Metrics,
)

MAX_TOKENS = 6
TOLERANCE = 5e-5
"""Maximum difference in float32 between a log-probability and that of a single engine."""
LAST_TOKEN_ALONE = "tests.e2e.prefill_decode.last_token_alone.LastTokenAlone"
FREE_LIMIT_S = LEASE_S + 3.0
"""One lease, and some time for a busy machine to count the blocks."""
WARM_UP_LIMIT_S = 180.0
SOURCE = "vllm:prompt_tokens_by_source_total"

Prompt = list[int]


@dataclass(frozen=True, slots=True)
class Shape:
    """Engines of a deployment.

    Attributes:
        leaves_last: P leaves the last token of each prompt to D. Answers have the bits of a single
            engine that computes that token in a step of its own, or together with the others.
        exact: Its tokens are those of a single engine. Otherwise only the bytes are compared, by
            the audit: the model is not deterministic even without a connector.
    """

    prefills: Sequence[EngineShape] = (EngineShape(),)
    decodes: Sequence[EngineShape] = (EngineShape(),)
    leaves_last: bool = False
    exact: bool = True


@dataclass(frozen=True, slots=True)
class Counts:
    """Prompt tokens of all decode engines by where they came from."""

    computed: int
    local: int
    loaded: int

    def __sub__(self, other: "Counts") -> "Counts":
        return Counts(
            self.computed - other.computed, self.local - other.local, self.loaded - other.loaded
        )

    def __str__(self) -> str:
        local = f", {self.local} there" if self.local else ""
        return f"D computed {self.computed}, loaded {self.loaded}{local}"


@dataclass(eq=False)
class Deployment:
    """Running engines, which write their logs to a directory; an asynchronous context manager."""

    connector: str
    shape: Shape
    directory: Path
    seed: int = 20
    prefills: list[Engine] = field(init=False)
    decodes: list[Engine] = field(init=False)
    chance: random.Random = field(init=False)
    _alone: dict[tuple[str, str | None], EngineProcess] = field(init=False, default_factory=dict)
    _turns: "itertools.count[int]" = field(init=False, default_factory=itertools.count)

    def __post_init__(self) -> None:
        def engines(letter: str, shapes: Sequence[EngineShape]) -> list[Engine]:
            return [
                Engine(f"{letter}{index}", self.connector, shape, self.directory)
                for index, shape in enumerate(shapes)
            ]

        self.prefills = engines("P", self.shape.prefills)
        self.decodes = engines("D", self.shape.decodes)
        self.chance = random.Random(self.seed)

    @property
    def engines(self) -> list[Engine]:
        """All engines but the single one."""
        return [*self.prefills, *self.decodes]

    async def __aenter__(self) -> Self:
        for engine in self.engines:
            engine.log_path.unlink(missing_ok=True)
        try:
            await self.start(self.engines)
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        for engine in self.engines:
            engine.close()
        for alone in self._alone.values():
            await asyncio.to_thread(alone.close)
        self._alone.clear()

    async def start(self, engines: Sequence[Engine]) -> None:
        """Start or restart engines, and let each pair connect."""
        for engine in engines:
            await asyncio.to_thread(engine.start)
        for engine in engines:
            await engine.wait_ready()
        for engine in engines:
            await engine.complete(self.prompt(9), max_tokens=2, limit_s=WARM_UP_LIMIT_S)
        for prefill, decode in itertools.product(self.prefills, self.decodes):
            if prefill in engines or decode in engines:
                await self.hand_over(
                    self.prompt(300), prefill=prefill, decode=decode, limit_s=WARM_UP_LIMIT_S
                )

    async def heal(self) -> None:
        """Make all engines run without blocks in use, however the last scenario ended."""
        for engine in self.engines:
            engine.signal(signal.SIGCONT)
        broken = [engine for engine in self.engines if not await engine.is_healthy()]
        if not broken:
            try:
                await self.require_free(*self.engines)
            except Failure:
                broken = self.engines
        if broken:
            await self.start(broken)

    def prompt(self, num_tokens: int) -> Prompt:
        """Make up a prompt that no engine has seen."""
        return [self.chance.randrange(3, models.VOCAB_SIZE) for _ in range(num_tokens)]

    def pair(self) -> tuple[Engine, Engine]:
        """Take the next prefill and decode engine; each meets each."""
        turn = next(self._turns)
        decode = turn // len(self.prefills) % len(self.decodes)
        return self.prefills[turn % len(self.prefills)], self.decodes[decode]

    async def prefill(
        self, prompt: Prompt, *, engine: Engine | None = None, **options: Any
    ) -> dict[str, Any]:
        """Let P compute a prompt, as a router does; return the parameters for D."""
        answer = await (engine or self.prefills[0]).complete(
            prompt, max_tokens=1, params=LEND, **options
        )
        return answer.params

    async def decode(
        self,
        prompt: Prompt,
        params: Mapping[str, Any] | None,
        *,
        engine: Engine | None = None,
        max_tokens: int = MAX_TOKENS,
        **options: Any,
    ) -> Generation:
        return await (engine or self.decodes[0]).complete(
            prompt, max_tokens=max_tokens, params=params, **options
        )

    async def hand_over(
        self,
        prompt: Prompt,
        *,
        prefill: Engine | None = None,
        decode: Engine | None = None,
        **options: Any,
    ) -> Generation:
        first, second = self.pair()
        params = await self.prefill(prompt, engine=prefill or first, **options)
        return await self.decode(prompt, params, engine=decode or second, **options)

    async def require_true(self, prompts: Sequence[Prompt], answers: Sequence[Generation]) -> None:
        """Fail unless answers are those of a single engine."""
        if not self.shape.exact:
            return
        name = self.shape.decodes[0].dtype
        tolerance = TOLERANCE if name == "float32" else None
        for prompt, ours in zip(prompts, answers, strict=True):
            if self.shape.leaves_last:
                wrong = await self._bit_difference(prompt, ours, name)
            else:
                truth = await asyncio.to_thread(self._compute, prompt, name)
                wrong = oracle.rounding_difference(ours, truth, dtype=name, tolerance=tolerance)
            if wrong:
                raise Failure(f"wrong tokens, HTTP 200: prompt of {len(prompt)}: {wrong}")

    async def _bit_difference(self, prompt: Prompt, ours: Generation, dtype: str) -> str | None:
        """Describe how an answer differs from both of a single engine's; None if it equals one."""
        for scheduler in (LAST_TOKEN_ALONE, None):
            truth = await asyncio.to_thread(self._compute, prompt, dtype, scheduler)
            if (ours.token_ids, ours.logprobs) == (truth.token_ids, truth.logprobs):
                return None
        return oracle.rounding_difference(ours, truth, dtype="float32", tolerance=0)

    async def counts(self) -> Counts:
        """Count where the decode engines' prompt tokens came from so far."""
        metrics = [await engine.metrics() for engine in self.decodes]

        def total(source: str) -> int:
            return round(sum(one.get(f"{SOURCE}{{{source}}}", 0) for one in metrics))

        return Counts(
            total("local_compute"), total("local_cache_hit"), total("external_kv_transfer")
        )

    def audit(self) -> audit.Audit:
        """Compare the loaded bytes with the offered ones, for the current scenario."""
        return handover_audit.read(self.engines[0].audit_directory)

    def forget_audit(self) -> None:
        for path in self.engines[0].audit_directory.glob("*.jsonl"):
            path.unlink()

    async def require_audited(self, num_tokens: int) -> str:
        """With kvxfer, fail unless all tokens that vLLM counts as loaded have the offered bytes."""
        if self.connector != "kvxfer":
            return ""
        report = self.audit()
        if report.problem:
            raise Failure(report.problem)
        if report.num_tokens < num_tokens:
            raise Failure(f"{report.num_tokens} of {num_tokens} loaded tokens were audited")
        return f", {report.num_pages} pages audited"

    async def require_free(self, *engines: Engine) -> float:
        """Fail unless no block of engines is in use within a lease; return the seconds."""
        start_s = time.monotonic()
        for engine in engines:
            while blocks := _in_use(await engine.metrics()):
                if time.monotonic() > start_s + FREE_LIMIT_S:
                    raise Failure(
                        f"{engine.name} keeps {blocks} blocks in use, {FREE_LIMIT_S:.0f} s later"
                    )
                await asyncio.sleep(POLL_S)
        return time.monotonic() - start_s

    async def reuse_blocks(self, engine: Engine) -> None:
        """Overwrite every block of an engine with other prompts."""
        metrics = await engine.metrics()
        left = int(metrics["num_blocks"]) * engine.shape.tokens_per_block * 5 // 4
        while left > 0:
            await engine.complete(self.prompt(MAX_MODEL_LEN - 96), max_tokens=1)
            left -= MAX_MODEL_LEN - 96

    def _compute(self, prompt: Prompt, dtype: str, scheduler: str | None = None) -> Generation:
        """Run a prompt in an engine without a connector, which is started when it is needed."""
        shape = self.shape.decodes[0]
        if (dtype, scheduler) not in self._alone:
            self._alone[dtype, scheduler] = EngineProcess(
                EngineConfig(
                    model=str(models.make(shape.model)),
                    dtype=dtype,
                    scheduler_cls=scheduler,
                    kv_cache_memory_bytes=shape.cache_mib << 20,
                    max_model_len=MAX_MODEL_LEN,
                    environment=ON_SHARED_CORES,
                )
            )
        [generation] = self._alone[dtype, scheduler].generate(
            [prompt], max_tokens=MAX_TOKENS, read_cache=False
        )
        return generation


def _in_use(metrics: Metrics) -> int:
    """Count the blocks that requests or leases hold, not those that are only cached."""
    return round(metrics["vllm:kv_cache_usage_perc"] * metrics["num_blocks"])
