"""Tiny models of transformers with random weights, whose tokens depend on the prompt."""

import functools
import operator
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from kvxfer.integrations.transformers import PrefixCache
from kvxfer.integrations.transformers.interface import CACHE_ARGUMENT

VOCAB_SIZE = 200
TOKENS_PER_PAGE = 16
WINDOW = 16
_SIZES = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "initializer_range": 0.2,
    "max_position_embeddings": 512,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": None, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "head_dim": 8, "v_head_dim": 12, "n_routed_experts": 4,
    "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, Mapping[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {}),
    "gpt2": ("GPT2Config", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512}),
    "mistral": ("MistralConfig", {"sliding_window": WINDOW}),
    "gemma3": ("Gemma3TextConfig", {"sliding_window": WINDOW, "num_hidden_layers": 7}),
    "gemma4": ("Gemma4TextConfig", {
        "sliding_window": WINDOW, "num_hidden_layers": 6, "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": VOCAB_SIZE, "num_kv_shared_layers": 0,
        "num_global_key_value_heads": 1, "global_head_dim": 32, "attention_k_eq_v": True,
    }),
    "gpt_oss": ("GptOssConfig", {
        "sliding_window": WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2,
    }),
    "deepseek_v2": ("DeepseekV2Config", _LATENT | _EXPERTS),
    "deepseek_v3": ("DeepseekV3Config", _LATENT | _EXPERTS | {"q_lora_rank": 32}),
}  # fmt: skip
REFUSED: dict[str, tuple[str, Mapping[str, Any], str]] = {
    "mamba": ("MambaConfig", {"state_size": 8}, "layer 0: LinearAttentionLayer"),
    "jamba": (
        "JambaConfig",
        {"attn_layer_period": 2, "attn_layer_offset": 0, "use_mamba_kernels": False},
        "layer 1: LinearAttentionLayer",
    ),
    "llama4": (
        "Llama4TextConfig",
        {"attention_chunk_size": 16, "num_local_experts": 2, "intermediate_size_mlp": 96},
        "layer 0: chunked attention",
    ),
    "dynamic rope": (
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
        "rotary embedding 'dynamic'",
    ),
    "longrope": (
        "Phi3Config",
        {
            "rope_parameters": {
                "rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8,
                "factor": 2.0, "rope_theta": 1e4, "original_max_position_embeddings": 256,
            },
        },
        "rotary embedding 'longrope'",
    ),
    "bidirectional": (
        "Gemma3TextConfig",
        {"use_bidirectional_attention": True},
        "attention to later tokens",
    ),
    "bert": ("BertConfig", {}, "attention to later tokens"),
    "roformer": ("RoFormerConfig", {}, "attention to later tokens"),
    "big bird": ("BigBirdConfig", {"is_decoder": True}, "attention to blocks"),
    "moshi": (
        "MoshiConfig",
        {"sliding_window": WINDOW, "ffn_dim": 96, "num_codebooks": 2, "audio_vocab_size": 32},
        "layer 0: a window that only its cache implements",
    ),
    "xmod": ("XmodConfig", {"pad_token_id": 1, "is_decoder": True}, "Input language unknown"),
    "roberta": (
        "RobertaConfig",
        {"is_decoder": True, "pad_token_id": 1},
        "other keys with the positions of generate()",
    ),
    "t5": ("T5Config", {"d_model": 32, "d_kv": 8, "num_layers": 1}, "an encoder-decoder model"),
}  # fmt: skip


def make_model(config_class: str, settings: Mapping[str, Any]) -> Any:
    import transformers

    torch.manual_seed(20)
    config = getattr(transformers, config_class)(**{**_SIZES, **settings})
    encodes = config.is_encoder_decoder
    kind = transformers.AutoModelForSeq2SeqLM if encodes else transformers.AutoModelForCausalLM
    return kind.from_config(config, attn_implementation="eager").eval()


def changing(path: str, value: Any) -> Callable[[Any], None]:
    """Make what sets an attribute of a model, by its path."""
    parent, _, name = path.rpartition(".")
    return lambda model: setattr(operator.attrgetter(parent)(model), name, value)


@functools.cache
def shared_model(family: str = "llama") -> Any:
    """Make a model that tests leave as it is."""
    return make_model(*FAMILIES[family])


def files_url(folder: Path) -> str:
    return f"file://{folder}?capacity=64MiB&min_free=1MiB"


def open_cache(model: Any, backend: Any, **settings: Any) -> PrefixCache:
    backend = files_url(backend) if isinstance(backend, Path) else backend
    return PrefixCache(model, backend, **{"tokens_per_page": TOKENS_PER_PAGE, **settings})


def prompt_of(num_tokens: int, *, seed: int = 0) -> torch.Tensor:
    source = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB_SIZE, (1, num_tokens), generator=source)


def with_cache(past: Any) -> dict[str, Any]:
    return {CACHE_ARGUMENT: past}


def generate(model: Any, prompt: torch.Tensor, **settings: Any) -> list[int]:
    output = model.generate(prompt, max_new_tokens=20, do_sample=False, **settings)
    return output[0, prompt.shape[1] :].tolist()  # type: ignore[no-any-return]


def fill(cache: PrefixCache, model: Any, prompt: torch.Tensor) -> int:
    """Generate after a prompt; return the tokens that were stored."""
    past = cache.load(prompt)
    output = model.generate(prompt, **with_cache(past), max_new_tokens=20, do_sample=False)
    return cache.store(output, past)


def num_loaded(cache: PrefixCache, prompt: torch.Tensor, **settings: Any) -> int:
    return int(cache.load(prompt, **settings).get_seq_length())
