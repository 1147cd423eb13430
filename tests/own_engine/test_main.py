"""`python -m examples.engine`: texts go on, and whatever cannot be used is named in a line."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from examples.engine.__main__ import main

HOST = "host://?capacity=8MiB"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Make a folder of a model, whose words are numbers."""
    made = str(tmp_path_factory.mktemp("model"))
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 16}
    config = LlamaConfig(vocab_size=300, num_attention_heads=2, num_key_value_heads=2, **sizes)
    LlamaForCausalLM(config).save_pretrained(made)
    words = Tokenizer(models.WordLevel({str(word): word for word in range(300)}))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(made)
    return made


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr("sys.argv", ["python -m examples.engine", *arguments])
    main()


def test_the_second_run_computes_the_rest_only(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = " ".join(str(word) for word in range(200))
    arguments = ("--model", folder, "--backend", f"file://{tmp_path}?capacity=64MiB", text)
    run(monkeypatch, *arguments)
    first = capsys.readouterr().out
    run(monkeypatch, *arguments)
    again = capsys.readouterr().out
    assert first.startswith("0 of 200 tokens were there:")
    assert again == first.replace("0 of", "128 of", 1)


def test_another_configuration_of_the_same_weights_reuses_nothing(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    copied = Path(shutil.copytree(folder, tmp_path / "model"))
    text = " ".join(str(word) for word in range(200))
    arguments = ("--model", str(copied), "--backend", f"file://{tmp_path}/kv?capacity=64MiB", text)
    run(monkeypatch, *arguments)
    config = json.loads((copied / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] *= 2
    (copied / "config.json").write_text(json.dumps(config))
    capsys.readouterr()
    run(monkeypatch, *arguments)
    assert capsys.readouterr().out.startswith("0 of 200 tokens were there:")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--backend", "foo://", "1"), "backend is 'foo'; expected one of: "),
        (("--backend", HOST, "--tokens", "0", "1"), "1 + 0 tokens: 1 to 8064 in all"),
        (("--backend", HOST, ""), "0 + 32 tokens: 1 to 8064 in all"),
        (("--backend", HOST, "--with-vllm", "1"), "opened by vLLM once; it has none"),
        (("--backend", HOST, "--model", "/nowhere", "1"), "--model is '/nowhere'; expected a fold"),
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
        run(monkeypatch, "--model", folder, *arguments)
    assert exited.value.code == 2
    line = capsys.readouterr().err.splitlines()[-1]  # after the progress of loading weights
    assert line.startswith("python -m examples.engine: error: ")
    assert said in line


def test_a_model_that_the_engine_does_not_know_is_named_in_a_line(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = str(shutil.copytree(folder, tmp_path / "model"))
    config = GPT2Config(vocab_size=300, n_embd=32, n_layer=1, n_head=2)
    GPT2LMHeadModel(config).save_pretrained(other)
    with pytest.raises(SystemExit):
        run(monkeypatch, "--model", other, "--backend", HOST, "1 2 3")
    line = capsys.readouterr().err.splitlines()[-1]
    assert "error: GPT2LMHeadModel does not say what its KV heads are" in line
