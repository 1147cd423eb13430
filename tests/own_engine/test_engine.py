"""The engine of the tutorial gives the tokens of its model, whatever its tiers have or lose.

Its command continues texts, and names anything that cannot be used in one line.
"""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
)

from examples.engine import engine as module
from examples.engine.__main__ import main
from examples.engine.engine import Engine, Request
from kvxfer import BlockKey, Namespace
from kvxfer.storage.prompt_keys import PromptKeys

BLOCK_TOKENS = 16
NUM_TOKENS = 24
NAMESPACE = Namespace(model="tests/llama", revision="seed 0", dtype="float32")
SIZES: dict[str, Any] = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 64}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Threads only slow small models down, most of all on a busy machine."""
    monkeypatch.setattr(module, "MAX_TOKENS", 64)  # prompts are computed in several steps
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, num_hidden_layers=3, initializer_range=0.2)
    return LlamaForCausalLM(config).eval()


def generate_unpaged(model: Any, prompt: Sequence[int]) -> list[int]:
    """Generate with transformers itself: the tokens with the prompt."""
    model.set_attn_implementation("sdpa")
    model.generation_config.eos_token_id = None
    ids, settings = torch.tensor([list(prompt)]), {"max_new_tokens": NUM_TOKENS, "do_sample": False}
    output = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
    tokens: list[int] = output[0].tolist()
    return tokens


def make_prompts() -> list[list[int]]:
    chance = torch.Generator().manual_seed(1)

    def tokens(count: int) -> list[int]:
        return torch.randint(3, 300, (count,), generator=chance).tolist()

    shared = tokens(120)
    lengths = (1, 15, 16, 17, 60, 100, 100, 119, 48)
    return [shared[:length] + tokens(5) for length in lengths] + [tokens(90), shared]


PROMPTS = make_prompts()


def keys_of(tokens: Sequence[int]) -> list[BlockKey]:
    whole = len(tokens) - len(tokens) % BLOCK_TOKENS
    return PromptKeys(list(tokens)).block_keys(0, BLOCK_TOKENS, whole)


def open_engine(model: Any, backend: str | Sequence[str], num_blocks: int = 64) -> Engine:
    sizes = {"tokens_per_block": BLOCK_TOKENS, "num_blocks": num_blocks}
    return Engine(model, backend, namespace=NAMESPACE, keys=keys_of, axes={}, **sizes)


def run(
    model: Any, backend: str | Sequence[str], prompts: Sequence[Sequence[int]], **sizes: int
) -> list[Request]:
    """Generate with a new engine, and check every token, and that no block is lost."""
    alone = [generate_unpaged(model, prompt) for prompt in prompts]
    engine = open_engine(model, backend, **sizes)
    requests = engine.generate(prompts, NUM_TOKENS)
    engine.transfers.wait(list(engine.moving), timeout_s=20)
    engine.step()
    assert engine.pool.take(engine.table.num_blocks - 1) is not None
    engine.transfers.close()
    assert [request.tokens for request in requests] == alone
    return requests


def num_whole(prompt: Sequence[int]) -> int:
    return (len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS


@pytest.mark.slow
@pytest.mark.parametrize("num_blocks", [100, 24, 11])
def test_requests_that_share_blocks_and_take_them_from_each_other(
    model: Any, num_blocks: int
) -> None:
    requests = run(model, "host://?capacity=8MiB", PROMPTS, num_blocks=num_blocks)
    assert any(request.num_reused for request in requests)
    reused = [request.num_reused <= num_whole(request.tokens[:-NUM_TOKENS]) for request in requests]
    assert all(reused)


def test_an_engine_that_starts_again_has_the_prompts_in_files(model: Any, tmp_path: Path) -> None:
    tiers = ["host://?capacity=8MiB", f"file://{tmp_path}?capacity=1GiB"]
    run(model, tiers, PROMPTS)
    requests = run(model, tiers, PROMPTS)
    assert [each.num_reused for each in requests] == [num_whole(prompt) for prompt in PROMPTS]


def test_what_is_damaged_is_computed(model: Any, tmp_path: Path) -> None:
    url = f"file://{tmp_path}?capacity=1GiB"
    run(model, url, PROMPTS[5:6])
    damaged = keys_of(PROMPTS[5])[2]
    (file,) = tmp_path.rglob(f"{damaged.hex()}.safetensors")
    content = bytearray(file.read_bytes())
    content[-100] ^= 1
    file.write_bytes(content)
    (request,) = run(model, url, PROMPTS[5:6])
    assert request.num_reused == 2 * BLOCK_TOKENS


def test_a_model_with_sliding_windows_is_refused() -> None:
    config = MistralConfig(**SIZES, num_hidden_layers=1, sliding_window=8)
    engine = open_engine(MistralForCausalLM(config).eval(), "host://?capacity=8MiB")
    with pytest.raises(NotImplementedError, match="sliding_window"):
        engine.generate([PROMPTS[0]], 1)
    engine.transfers.close()


@pytest.mark.parametrize(("prompt", "num_tokens"), [([], 4), ([1, 2], 0), ([1] * 1000, 9)])
def test_a_request_that_can_never_end_is_refused(
    model: Any, prompt: list[int], num_tokens: int
) -> None:
    engine = open_engine(model, "host://?capacity=8MiB")
    with pytest.raises(ValueError, match=f"{len(prompt)} \\+ {num_tokens} tokens; 1 to 1008"):
        engine.add(prompt, num_tokens)
    engine.transfers.close()


# The command

HOST = "host://?capacity=8MiB"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Make a folder of a model, whose words are numbers."""
    made = str(tmp_path_factory.mktemp("model"))
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, num_hidden_layers=1)
    LlamaForCausalLM(config).save_pretrained(made)
    other = GPT2Config(vocab_size=300, n_embd=32, n_layer=1, n_head=2)
    GPT2LMHeadModel(other).save_pretrained(f"{made}/gpt2")
    words = Tokenizer(models.WordLevel({str(word): word for word in range(300)}))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    for each in (made, f"{made}/gpt2"):
        PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(each)
    return made


def command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr("sys.argv", ["python -m examples.engine", *arguments])
    main()


def test_the_second_run_computes_the_rest_only_and_all_with_another_configuration(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    copied = Path(shutil.copytree(folder, tmp_path / "model"))
    text = " ".join(str(word) for word in range(200))
    arguments = ("--model", str(copied), "--backend", f"file://{tmp_path}/kv?capacity=64MiB", text)
    command(monkeypatch, *arguments)
    first = capsys.readouterr().out
    assert first.startswith("0 of 200 tokens were reused:")
    command(monkeypatch, *arguments)
    assert capsys.readouterr().out == first.replace("0 of", "128 of", 1)
    config = json.loads((copied / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] *= 2
    (copied / "config.json").write_text(json.dumps(config))
    command(monkeypatch, *arguments)
    assert capsys.readouterr().out.startswith("0 of 200 tokens were reused:")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--backend", "foo://", "1"), "backend is 'foo'; expected one of: "),
        (("--backend", HOST, "--tokens", "0", "1"), "1 + 0 tokens; 1 to 8064 fit"),
        (("--backend", HOST, ""), "0 + 32 tokens; 1 to 8064 fit"),
        (("--backend", HOST, "--with-vllm", "1"), "which vLLM has opened before; it has none"),
        (("--backend", HOST, "--model", "/nowhere", "1"), "--model is '/nowhere'; expected a fold"),
        (("--backend", HOST, "--model", "{}/gpt2", "1 2"), "of GPT2LMHeadModel lacks its KV heads"),
    ],
)
def test_what_cannot_be_used_is_named_in_a_line(
    folder: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    said: str,
) -> None:
    with pytest.raises(SystemExit) as exited:
        command(monkeypatch, "--model", folder, *(each.format(folder) for each in arguments))
    assert exited.value.code == 2
    line = capsys.readouterr().err.splitlines()[-1]  # after the progress of loading weights
    assert line.startswith("python -m examples.engine: error: ")
    assert said in line
