"""Generation from paged caches whose blocks go through kvxfer and come back elsewhere."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers")

from kvxfer.connect import connect
from kvxfer.engine_side import NULL_BLOCK_ID
from kvxfer.kvcache.allocation import AttentionLayout
from kvxfer.storage.keys import Namespace
from kvxfer.transfer.engine import TransferEngine
from tests.kvcache.paged_runner import (
    PagedRunner,
    Request,
    cache_config,
    generate_unpaged,
    one_thread,
)

NUM_TOKENS = 16
TOKENS_PER_BLOCK = 8
WINDOW = 20
TOLERANCE = 1e-4  # logits are up to 4; the two differ by 2e-6 on the machine of this writing
PROMPTS = [list(range(5, 50)), list(range(100, 121)), list(range(230, 200, -1))]

NHD = AttentionLayout("block kv token head dim", "block layer kv token head dim")
HND_KV_FIRST = AttentionLayout("kv block token head dim", "block layer kv head token dim")

TINY = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,  # wide, so that the next token depends on every cached value
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}


@pytest.fixture(scope="module")
def gemma() -> Any:
    """Model of two full layers and three sliding ones: three groups, the last with one layer."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(20)
    full, sliding = "full_attention", "sliding_attention"
    config = Gemma3TextConfig(
        **TINY,
        num_hidden_layers=5,
        layer_types=[sliding, sliding, full, sliding, full],
        sliding_window=WINDOW,
        query_pre_attn_scalar=16,
    )
    return Gemma3ForCausalLM(config).eval()


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture
def connected() -> Iterator[Callable[[PagedRunner, str], TransferEngine]]:
    engines = []

    def open_engine(runner: PagedRunner, url: str) -> TransferEngine:
        engines.append(connect(url, runner.caches, namespace=Namespace(model="tiny", revision="1")))
        return engines[-1]

    yield open_engine
    for engine in engines:
        engine.close()


Connect = Callable[[PagedRunner, str], TransferEngine]


def make_runner(
    model: Any, layout: AttentionLayout, *, layers_per_group: int, first_kernel_tokens: int
) -> PagedRunner:
    config = cache_config(
        model.config,
        num_blocks=80,
        tokens_per_block=TOKENS_PER_BLOCK,
        layers_per_group=layers_per_group,
    )
    kernel_tokens = [first_kernel_tokens] + [TOKENS_PER_BLOCK] * (len(config.groups) - 1)
    return PagedRunner(model, config, layout=layout, tokens_per_kernel_block=kernel_tokens)


def generate_with_preemptions(
    runner: PagedRunner,
    engine: TransferEngine,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens_per_request: int,
) -> list[Request]:
    """Generate; every second step, load the request stored two steps ago and store another."""
    requests = [runner.add(prompt) for prompt in prompts]
    away: Request | None = None
    num_resumed = 0
    while any(len(request.logits) < NUM_TOKENS for request in requests):
        runner.step(max_tokens_per_request)
        runner.step(max_tokens_per_request)
        if away is not None:
            before = away.blocks_in_use
            runner.resume(away, engine)
            assert before.isdisjoint(away.blocks_in_use)
        away = requests[num_resumed % len(requests)]
        num_resumed += 1
        runner.preempt(away, engine)
    assert num_resumed > 2 * len(requests)
    return requests


def require_as_unpaged(
    model: Any, prompts: Sequence[Sequence[int]], requests: Sequence[Request]
) -> None:
    for prompt, request in zip(prompts, requests, strict=True):
        tokens, logits = generate_unpaged(model, prompt, NUM_TOKENS)
        assert request.tokens[: len(tokens)] == tokens
        found = torch.stack(request.logits[:NUM_TOKENS])
        torch.testing.assert_close(found, logits, atol=TOLERANCE, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "url"),
    [(NHD, "host://?capacity=16MiB"), (HND_KV_FIRST, "file://{}?capacity=64MiB")],
    ids=["nhd-host", "hnd-file"],
)
def test_gemma_generates_as_unpaged_while_its_blocks_come_and_go(
    gemma: Any, layout: AttentionLayout, url: str, tmp_path: Path, connected: Connect
) -> None:
    runner = make_runner(gemma, layout, layers_per_group=2, first_kernel_tokens=4)
    assert [group.layer_names for group in runner.config.groups] == [("2", "4"), ("0", "1"), ("3",)]
    assert len(runner.caches.tensors) == 1
    engine = connected(runner, url.format(tmp_path))
    requests = generate_with_preemptions(runner, engine, PROMPTS, max_tokens_per_request=12)
    for request in requests:
        num_visible = -(-WINDOW // TOKENS_PER_BLOCK) + 1
        full, *sliding = [[block != NULL_BLOCK_ID for block in ids] for ids in request.block_ids]
        assert all(full)
        assert all(sum(in_use) <= num_visible < len(in_use) for in_use in sliding)
    assert not runner.caches.tensors[0].tensor[NULL_BLOCK_ID].any()
    require_as_unpaged(gemma, PROMPTS, requests)


def generate_after_one_preemption(
    runner: PagedRunner, engine: TransferEngine, spoil: Callable[[PagedRunner, Request], None]
) -> torch.Tensor:
    """Compute logits of a request that was preempted once, and whose loaded blocks were spoiled."""
    request = runner.add(PROMPTS[0])
    while len(request.logits) < 4:
        runner.step(max_tokens_per_request=12)
    runner.preempt(request, engine)
    runner.resume(request, engine)
    spoil(runner, request)
    while len(request.logits) < 5:
        runner.step(max_tokens_per_request=12)
    return torch.stack(request.logits)


def flip_one_bit(runner: PagedRunner, request: Request, group: int) -> None:
    """Change the sign of one cached number: the last byte of a float32."""
    runner.caches.tensors[0].tensor[request.block_ids[group][-2], 3] ^= -128


def put_a_wrong_block(runner: PagedRunner, request: Request, group: int) -> None:
    """Swap a block for another one."""
    ids = request.block_ids[group]
    ids[-2] = ids[-3]
    runner.block_tables.add_row(request.block_ids, 0)


@pytest.mark.parametrize(
    ("group", "spoil"), [(0, flip_one_bit), (1, put_a_wrong_block), (2, flip_one_bit)]
)
def test_one_changed_byte_or_a_wrong_block_changes_the_logits(
    gemma: Any, connected: Connect, group: int, spoil: Callable[[PagedRunner, Request, int], None]
) -> None:
    _, expected = generate_unpaged(gemma, PROMPTS[0], 5)

    def generate(spoil_one: Callable[[PagedRunner, Request], None]) -> torch.Tensor:
        runner = make_runner(gemma, NHD, layers_per_group=2, first_kernel_tokens=TOKENS_PER_BLOCK)
        engine = connected(runner, "host://?capacity=16MiB")
        return generate_after_one_preemption(runner, engine, spoil_one)

    whole = generate(lambda runner, request: None)
    torch.testing.assert_close(whole, expected, atol=TOLERANCE, rtol=0)
    spoiled = generate(lambda runner, request: spoil(runner, request, group))
    torch.testing.assert_close(spoiled[:4], expected[:4], atol=TOLERANCE, rtol=0)
    assert (spoiled[4] - expected[4]).abs().max() > 10 * TOLERANCE
