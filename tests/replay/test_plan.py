"""Plans: sizes of blocks, bytes and seconds, and the list that is recommended for a budget."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvxfer import replay
from kvxfer.errors import InvalidArgumentError

LLAMA = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "torch_dtype": "bfloat16",
}
MLA = {
    "num_hidden_layers": 61,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "num_key_value_heads": 128,
    "dtype": "bfloat16",
}


@pytest.fixture(scope="module")
def chats() -> replay.Trace:
    return replay.make_synthetic(replay.MultiTurn(requests=600, requests_per_s=4), seed=3)


FULL, LATENT = 32 * 2 * 8 * 128 * 2, 61 * 576 * 2


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (LLAMA, FULL),
        ({"text_config": LLAMA, "torch_dtype": "float16"}, FULL),
        (LLAMA | {"sliding_window": 4096, "use_sliding_window": False}, FULL),
        (MLA, LATENT),
        (LLAMA | {"layer_types": ["linear_attention", "full_attention"]}, "not linear_attention"),
        (LLAMA | {"sliding_window": 4096}, "not a sliding window"),
        # Layers of another kind, as Jamba, Nemotron-H, MiniMax-01 and Llama 4 name them.
        (LLAMA | {"attn_layer_period": 8, "mamba_d_state": 16}, "not attn_layer_period"),
        (LLAMA | {"hybrid_override_pattern": "M-M*"}, "not hybrid_override_pattern"),
        (LLAMA | {"attn_type_list": [0, 1]}, "not attn_type_list"),
        (LLAMA | {"attention_chunk_size": 8192}, "not attention_chunk_size"),
        (LLAMA | {"hidden_size": 8}, "head_dim in .* is 0; expected a positive integer"),
        (LLAMA | {"torch_dtype": "int3"}, "dtype in .* is 'int3'"),
        (LLAMA | {"num_hidden_layers": None}, "num_hidden_layers in .* is None"),
        (LLAMA | {"num_hidden_layers": -2}, "num_hidden_layers in .* is -2"),
        (LLAMA | {"torch_dtype": ["float32"]}, "a model's config.json"),
    ],
)
def test_bytes_of_a_token_follow_from_the_configuration_of_a_model(
    tmp_path: Path, config: Any, expected: int | str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    if isinstance(expected, int):
        assert (
            replay.bytes_per_token(tmp_path)
            == replay.bytes_per_token(tmp_path / "config.json")
            == expected
        )
    else:
        with pytest.raises(InvalidArgumentError, match=expected):
            replay.bytes_per_token(tmp_path)


def test_files_are_recommended_where_memory_is_too_small_and_no_tier_where_it_is_slow(
    chats: replay.Trace,
) -> None:
    budget = replay.parse_budget("host=64MiB,file=64GiB")
    for host, file, media in ((10e9, 2e9, ["host", "file"]), (10e9, 2e6, ["host"]), (1e6, 1e6, [])):
        machine = replay.Machine(
            bytes_per_token=4096,
            prefill_tokens_per_s=10000,
            bandwidths={"host": host, "file": file},
        )
        row, reasons = msgspec.structs.astuple(replay.recommend(chats, machine, budget))[1:]
        if not media:
            assert row is None
            assert reasons == ["no tier is worth it: a hit saves nothing, or there are no hits"]
            continue
        assert [tier.medium for tier in row.tiers] == media
        best = replay.plan_list(
            chats, machine, ["host://?capacity=64MiB", "file:///kv?capacity=64GiB"][: len(media)]
        )
        assert best.first_token_s is not None
        assert row.first_token_s >= 0.99 * best.first_token_s
