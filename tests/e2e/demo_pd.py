"""`make demo-pd`: of two vLLM engines, one computes the prompts and the other one continues them.

Four questions about this repository go to `examples/proxy`. Before the third one, the prefill
engine is killed, so that the decode engine computes the prompt itself; before the fourth, it is
restarted at the same address. Every answer must be that of a single engine.

Each prompt fills whole blocks and has one token more. So a single engine that hits its own prefix
cache computes as many tokens as the decode engine that loads blocks, and the two must agree to the
last bit, see `tests.e2e.oracle`.
"""

import asyncio
import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from examples.proxy.config import ProxyConfig
from examples.proxy.server import Proxy
from tests.e2e import models, oracle, text
from tests.e2e.demo_console import Step, conclude, parse, show_steps
from tests.e2e.engine_process import (
    ON_SHARED_CORES,
    REPOSITORY,
    TOKENS_PER_BLOCK,
    EngineConfig,
    EngineDiedError,
    EngineProcess,
    Generation,
)
from tests.e2e.prefill_decode.deployment import SOURCE
from tests.e2e.prefill_decode.engines import MAX_MODEL_LEN, Engine, EngineShape, Failure

NUM_PROMPTS = 4
KILLED_BEFORE = 2
"""Index of the question before which the prefill engine is killed."""
STARTED_BEFORE = 3
"""Index of the question before which it is started again."""
NUM_BLOCKS = 12
MAX_TOKENS = 12
CACHE_MIB = 512
LIMIT_S = 180.0
MEET_PAUSE_S = 0.5
LOGS = REPOSITORY / "build" / "demo-pd"

NEXT = """
What to try next:
  your own model   vllm serve MODEL --kv-transfer-config ... (docs/prefill-decode.md has it)
  the router       .venv/bin/python -m examples.proxy --prefill http://HOST:8000 --decode http://HOST:8000
  what can happen  .venv/bin/python -m tests.e2e.prefill_decode
"""


@dataclass(frozen=True, slots=True)
class Answered:
    """Answer through the proxy, and how the decode engine got the tokens of its prompt."""

    generation: Generation
    num_computed: int
    num_loaded: int
    from_prefill: bool
    """Whether the prefill engine was running."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; 1 when an answer differs, or the wrong engine computed the prompt."""
    options = parse("make demo-pd", __doc__, ["page"], arguments)
    console = Console()
    folder = models.make("smollm2")
    prompts = _prompts(folder / "tokenizer.json")
    console.print(
        "One vLLM engine computes prompts, another one answers, and kvxfer hands over the cache.\n"
        f"\nThe model is SmolLM2-135M-Instruct, on this CPU in {options.dtype}. {NUM_PROMPTS} "
        f"prompts of {len(prompts[0])} tokens ask about this repository, by way of a proxy.\n"
    )
    logging.getLogger("examples.proxy").addHandler(logging.NullHandler())  # the table has it
    try:
        with show_steps(console) as step:
            reference = _run_alone(folder, options.dtype, prompts, step)
            answers = asyncio.run(_run(options.dtype, options.plant, prompts, step))
    except (EngineDiedError, Failure) as exc:
        console.print(f"[red]{exc}")
        return 1
    differences = list(map(_difference, answers, _expected(answers, reference)))
    problems = list(_problems(answers, differences, len(prompts[0])))
    table = _table(answers, differences)
    return conclude(console, table, problems, lambda: _conclusion(answers), NEXT)


def _prompts(tokenizer_file: Path) -> list[list[int]]:
    """Make prompts of whole blocks and one token more, from different places of a text."""
    num_tokens = NUM_BLOCKS * TOKENS_PER_BLOCK + 1
    shared_tokens = num_tokens + NUM_PROMPTS * TOKENS_PER_BLOCK
    prompts = []
    for index, whole in enumerate(
        text.prompts(tokenizer_file, NUM_PROMPTS, shared_tokens=shared_tokens)
    ):
        question = whole[shared_tokens:]
        first = index * TOKENS_PER_BLOCK
        prompts.append(whole[first : first + num_tokens - len(question)] + question)
    return prompts


def _run_alone(
    folder: Path, dtype: str, prompts: Sequence[Sequence[int]], step: Step
) -> oracle.Reference:
    config = EngineConfig(
        model=str(folder),
        dtype=dtype,
        max_model_len=MAX_MODEL_LEN,
        block_size=TOKENS_PER_BLOCK,
        environment=ON_SHARED_CORES,
    )
    advance = step("start one engine alone", 1)
    with EngineProcess(config) as engine:
        advance()
        advance = step("ask it, with and without its own cache", 2 * NUM_PROMPTS)
        return oracle.run_reference(engine, prompts, max_tokens=MAX_TOKENS, advance=advance)


async def _run(
    dtype: str, plant: str | None, prompts: Sequence[list[int]], step: Step
) -> list[Answered]:
    """Run the prompts through the proxy, with a prefill engine that comes and goes."""
    shape = EngineShape(model="smollm2", dtype=dtype, cache_mib=CACHE_MIB, is_audited=False)
    altered = replace(shape, is_audited=True, alters_loads=True)
    prefill = Engine("P", "kvxfer", shape, LOGS)
    decode = Engine("D", "kvxfer", altered if plant == "page" else shape, LOGS)
    answers: list[Answered] = []
    try:
        await _start([prefill, decode], step("start a prefill and a decode engine", 2))
        async with Proxy(
            ProxyConfig(prefill=(prefill.url,), decode=(decode.url,), listen="127.0.0.1:0")
        ) as proxy:
            router = f"http://{proxy.endpoint}"
            await _meet(decode, router)
            for index, prompt in enumerate(prompts):
                if index == KILLED_BEFORE:
                    advance = step("kill the prefill engine", 1)
                    await asyncio.to_thread(prefill.close)
                    advance()
                elif index == STARTED_BEFORE:
                    await _start([prefill], step("start the prefill engine again", 1))
                    await _meet(decode, router)
                advance = step(f"ask question {index + 1}", 1)
                answers.append(await _ask(decode, router, prompt, from_prefill=prefill.is_running))
                advance()
    finally:
        for engine in (prefill, decode):
            await asyncio.to_thread(engine.close)
    return answers


async def _start(engines: Sequence[Engine], advance: Callable[[], None]) -> None:
    """Start engines, and let each compute a few tokens."""
    for engine in engines:
        await asyncio.to_thread(engine.start)
    for engine in engines:
        await engine.wait_ready()
        await engine.complete(range(3, 12), max_tokens=2, limit_s=LIMIT_S)
        advance()


async def _meet(decode: Engine, router: str) -> None:
    """Send short prompts until one is handed over: the proxy and D find P by themselves."""
    deadline_s = time.monotonic() + LIMIT_S
    for first in range(100, 100 + MAX_MODEL_LEN):
        answer = await _ask(decode, router, [first, *range(3, 12)], from_prefill=True)
        if answer.num_loaded:
            return
        if time.monotonic() > deadline_s:
            break
        await asyncio.sleep(MEET_PAUSE_S)
    raise Failure(f"nothing was handed over in {LIMIT_S:.0f} s; the logs are in {LOGS}")


async def _ask(
    decode: Engine, router: str, prompt: Sequence[int], *, from_prefill: bool
) -> Answered:
    """Ask the proxy, and the decode engine's counters for where the prompt came from."""
    before = await decode.metrics()
    answer = await decode.complete(prompt, max_tokens=MAX_TOKENS, limit_s=LIMIT_S, url=router)
    after = await decode.metrics()

    def count(source: str) -> int:
        name = f"{SOURCE}{{{source}}}"
        return round(after.get(name, 0) - before.get(name, 0))

    return Answered(
        answer,
        num_computed=count("local_compute"),
        num_loaded=count("external_kv_transfer"),
        from_prefill=from_prefill,
    )


def _expected(answers: Sequence[Answered], reference: oracle.Reference) -> list[Generation]:
    """Return the answers of a single engine; for loaded prompts, those from its own cache."""
    return [
        device_hit if answer.from_prefill else computed
        for answer, device_hit, computed in zip(
            answers, reference.device_hits, reference.computed, strict=True
        )
    ]


def _difference(answer: Answered, expected: Generation) -> str | None:
    """Describe how an answer differs from the expected one; None if no bit does."""
    cached_tokens = expected.cached_tokens  # an answer over HTTP does not contain it
    generation = msgspec.structs.replace(answer.generation, cached_tokens=cached_tokens)
    return oracle.hit_difference(generation, expected)


def _table(answers: Sequence[Answered], differences: Sequence[str | None]) -> Table:
    table = Table(title="Prompts of the decode engine")
    table.add_column("question")
    table.add_column("prefill engine")
    for heading in ("computed", "loaded", "same tokens"):
        table.add_column(heading, justify="right")
    for question, answer, difference in zip(text.QUESTIONS, answers, differences, strict=False):
        table.add_row(
            question,
            "there" if answer.from_prefill else "killed",
            str(answer.num_computed),
            str(answer.num_loaded),
            "NO" if difference else "yes",
        )
    return table


def _problems(
    answers: Sequence[Answered], differences: Sequence[str | None], num_tokens: int
) -> Iterator[str]:
    for number, (answer, difference) in enumerate(zip(answers, differences, strict=True), 1):
        if difference:
            yield f"question {number}: {difference}"
        if answer.from_prefill and answer.num_loaded < num_tokens - 1:  # one is always computed
            yield f"question {number}: the decode engine loaded {answer.num_loaded} tokens"
        if not answer.from_prefill and answer.num_loaded:
            yield f"question {number}: the decode engine loaded tokens of an engine that is gone"


def _conclusion(answers: Sequence[Answered]) -> str:
    num_loaded = sum(answer.num_loaded for answer in answers)
    return (
        f"kvxfer handed over {num_loaded} tokens, which the decode engine did not compute. Every "
        "output token and its log-probability equals that of one engine alone, to the last bit: "
        "of its own cache where the prompt was loaded, computed where the prefill engine was gone."
    )


if __name__ == "__main__":
    sys.exit(main())
