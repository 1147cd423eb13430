"""Specs: sizes, validation and merging."""

import copy
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from kvxfer.errors import InvalidArgumentError, SpecMergeError
from kvxfer.kvcache.cache_tensor import CacheTensorForm
from kvxfer.kvcache.canonical import attest, canonicalize
from kvxfer.kvcache.config import KVCacheConfig, KVCacheGroup
from kvxfer.kvcache.quantization import KVQuantization
from kvxfer.kvcache.spec import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLASpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

ATTENTION: dict[str, Any] = {
    "tokens_per_block": 16,
    "num_kv_heads": 8,
    "head_dim": 64,
    "dtype": torch.bfloat16,
}
LATENT: dict[str, Any] = {"tokens_per_block": 16, "head_dim": 576, "dtype": torch.bfloat16}
FULL = FullAttentionSpec(**ATTENTION)
PADDED = replace(FULL, num_kv_heads=4, page_size_padded=20_000)
MAMBA = MambaSpec(
    tokens_per_block=16, shapes=((3, 4), (2, 5, 6)), dtypes=(torch.bfloat16, torch.float32)
)
ALL = [
    FULL,
    SlidingWindowSpec(**ATTENTION, sliding_window=128),
    ChunkedLocalAttentionSpec(**ATTENTION, attention_chunk_tokens=64),
    CrossAttentionSpec(**ATTENTION),
    MLASpec(**LATENT),
    SlidingWindowMLASpec(**LATENT, sliding_window=128),
    MAMBA,
    UniformTypeKVCacheSpecs(tokens_per_block=16, layer_specs={"a": FULL}),
]


def test_attention_keeps_keys_and_values_of_every_token() -> None:
    assert FULL.unpadded_page_size_bytes == 2 * 16 * 8 * 64 * 2
    assert FULL.page_size_bytes == FULL.unpadded_page_size_bytes


def test_values_of_another_width_count_with_their_own() -> None:
    spec = FullAttentionSpec(**ATTENTION, head_dim_v=32)
    assert spec.unpadded_page_size_bytes == 16 * 8 * (64 + 32) * 2


def test_latent_attention_keeps_one_vector_per_token() -> None:
    assert MLASpec(**LATENT).unpadded_page_size_bytes == 16 * 576 * 2
    assert SlidingWindowMLASpec(**LATENT, sliding_window=8).page_size_bytes == 16 * 576 * 2


def test_mamba_keeps_one_of_each_state() -> None:
    assert MAMBA.unpadded_page_size_bytes == 3 * 4 * 2 + 2 * 5 * 6 * 4


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_scales_of_a_tensor_are_not_in_the_cache(dtype: torch.dtype) -> None:
    quantized = replace(FULL, dtype=dtype, quantization=KVQuantization.PER_TENSOR)
    assert quantized.page_size_bytes == FULL.page_size_bytes // 2


@pytest.mark.parametrize(
    ("spec", "bytes_per_token_head"),
    [
        (FULL, 2 * (64 + 4)),
        (replace(FULL, head_dim_v=32), 64 + 4 + 32 + 4),
        (replace(FULL, head_dim=32), 2 * (32 + 4)),  # 64 numbers of 4 bits
    ],
    ids=["int8", "narrow values", "int4"],
)
def test_scales_of_tokens_and_heads_are_in_the_cache(
    spec: FullAttentionSpec, bytes_per_token_head: int
) -> None:
    quantized = replace(spec, dtype=torch.int8, quantization=KVQuantization.PER_TOKEN_HEAD)
    assert quantized.page_size_bytes == 16 * 8 * bytes_per_token_head


def test_scales_of_latents_are_in_the_cache() -> None:
    spec = MLASpec(
        tokens_per_block=16,
        head_dim=576,
        dtype=torch.int8,
        quantization=KVQuantization.PER_TOKEN_HEAD,
    )
    assert spec.page_size_bytes == 16 * (576 + 8)


@pytest.mark.parametrize("quantization", [KVQuantization.PER_TENSOR, KVQuantization.PER_TOKEN_HEAD])
def test_only_8_bits_are_quantized(quantization: KVQuantization) -> None:
    with pytest.raises(InvalidArgumentError, match="bfloat16") as caught:
        replace(FULL, quantization=quantization)
    assert caught.value.argument == "dtype"


def test_layers_of_one_group_may_be_quantized_or_not() -> None:
    quantized = replace(FULL, dtype=torch.int8, quantization=KVQuantization.PER_TOKEN_HEAD)
    specs = UniformTypeKVCacheSpecs(
        tokens_per_block=16, layer_specs={"a": FULL, "b": quantized, "c": PADDED}
    )
    assert specs.page_size_bytes == FULL.page_size_bytes + quantized.page_size_bytes + 20_000
    kv_caches = {
        "a": torch.zeros(5, 2, 16, 8, 64, dtype=torch.bfloat16),
        "b": torch.zeros(5, 8, 16, 2 * (64 + 4), dtype=torch.int8),
        "c": torch.zeros(5, 20_000, dtype=torch.int8)[:, : PADDED.unpadded_page_size_bytes]
        .view(torch.bfloat16)
        .view(5, 2, 16, 4, 64),
    }
    config = KVCacheConfig(5, (KVCacheGroup(specs, ("a", "b", "c")),))
    caches = canonicalize(kv_caches, config)
    attest(kv_caches, config, caches)
    assert [each.page_size_bytes for each in caches.tensors] == [
        FULL.page_size_bytes,
        quantized.page_size_bytes,
        20_000,
    ]
    assert [ref.page_size_bytes for ref in caches.group_data_refs[0]] == [
        FULL.page_size_bytes,
        quantized.page_size_bytes,
        PADDED.unpadded_page_size_bytes,
    ]


@pytest.mark.parametrize("spec", [FULL, MLASpec(**LATENT), MAMBA])
def test_padding_changes_the_page_and_not_its_data(spec: KVCacheSpec) -> None:
    unpadded = spec.unpadded_page_size_bytes
    padded = replace(spec, page_size_padded=unpadded + 100)
    assert padded.page_size_bytes == unpadded + 100
    assert padded.unpadded_page_size_bytes == unpadded
    with pytest.raises(InvalidArgumentError, match="page_size_padded"):
        replace(spec, page_size_padded=unpadded - 1)


def test_a_collection_is_as_large_as_its_layers() -> None:
    small = replace(FULL, num_kv_heads=4, page_size_padded=20_000)
    specs = UniformTypeKVCacheSpecs(tokens_per_block=16, layer_specs={"a": FULL, "b": small})
    assert specs.page_size_bytes == FULL.page_size_bytes + 20_000
    assert specs.unpadded_page_size_bytes == FULL.page_size_bytes * 3 // 2
    assert specs.for_layer("b") == small
    with pytest.raises(InvalidArgumentError, match="'c'"):
        specs.for_layer("c")


def test_a_collection_does_not_follow_the_mapping_it_was_made_from() -> None:
    layer_specs: dict[str, KVCacheSpec] = {"a": FULL}
    specs = UniformTypeKVCacheSpecs(tokens_per_block=16, layer_specs=layer_specs)
    layer_specs["b"] = FULL
    assert list(specs.layer_specs) == ["a"]


@pytest.mark.parametrize(
    ("kind", "arguments", "field"),
    [
        (FullAttentionSpec, ATTENTION | {"tokens_per_block": 0}, "tokens_per_block"),
        (FullAttentionSpec, ATTENTION | {"num_kv_heads": -1}, "num_kv_heads"),
        (FullAttentionSpec, ATTENTION | {"head_dim": 1.5}, "head_dim"),
        (FullAttentionSpec, ATTENTION | {"head_dim": True}, "head_dim"),
        (FullAttentionSpec, ATTENTION | {"head_dim_v": 0}, "head_dim_v"),
        (FullAttentionSpec, ATTENTION | {"dtype": "float16"}, "dtype"),
        (FullAttentionSpec, ATTENTION | {"sliding_window": 0}, "sliding_window"),
        (
            FullAttentionSpec,
            ATTENTION | {"sliding_window": 8, "attention_chunk_tokens": 8},
            "attention_chunk_tokens",
        ),
        (SlidingWindowSpec, ATTENTION | {"sliding_window": 0}, "sliding_window"),
        (
            ChunkedLocalAttentionSpec,
            ATTENTION | {"attention_chunk_tokens": 0},
            "attention_chunk_tokens",
        ),
        (MLASpec, LATENT | {"head_dim_v": 64}, "head_dim_v"),
        (SlidingWindowMLASpec, LATENT | {"sliding_window": 0}, "sliding_window"),
        (MambaSpec, {"tokens_per_block": 1, "shapes": (), "dtypes": ()}, "dtypes"),
        (
            MambaSpec,
            {"tokens_per_block": 1, "shapes": ((3,),), "dtypes": (torch.int8,) * 2},
            "dtypes",
        ),
        (
            MambaSpec,
            {"tokens_per_block": 1, "shapes": ((3, 0),), "dtypes": (torch.int8,)},
            r"shapes\[0\]",
        ),
        (UniformTypeKVCacheSpecs, {"tokens_per_block": 16, "layer_specs": {}}, "layer_specs"),
        (
            UniformTypeKVCacheSpecs,
            {"tokens_per_block": 16, "layer_specs": {"a": FULL, "b": MAMBA}},
            "'b'",
        ),
        (UniformTypeKVCacheSpecs, {"tokens_per_block": 8, "layer_specs": {"a": FULL}}, "'a'"),
        (
            UniformTypeKVCacheSpecs,
            {"tokens_per_block": 16, "layer_specs": {"a": FULL}, "page_size_padded": 1 << 20},
            "page_size_padded",
        ),
    ],
)
def test_a_spec_that_cannot_be_names_the_field(
    kind: type[KVCacheSpec], arguments: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=field):
        kind(**arguments)


@pytest.mark.parametrize("spec", ALL, ids=lambda spec: type(spec).__name__)
def test_equal_specs_merge_into_the_same(spec: KVCacheSpec) -> None:
    assert KVCacheSpec.merge([spec, copy.deepcopy(spec), spec]) == spec
    assert KVCacheSpec.merge([spec]) == spec


@pytest.mark.parametrize("spec", ALL, ids=lambda spec: type(spec).__name__)
def test_specs_of_different_types_do_not_merge(spec: KVCacheSpec) -> None:
    other = FULL if not isinstance(spec, FullAttentionSpec) else MAMBA
    with pytest.raises(SpecMergeError) as caught:
        KVCacheSpec.merge([spec, other])
    assert caught.value.field == "type"
    assert caught.value.values == (type(spec).__name__, type(other).__name__)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_kv_heads", 4),
        ("head_dim", 32),
        ("head_dim_v", 32),
        ("dtype", torch.float32),
        ("tokens_per_block", 32),
        ("page_size_padded", 1 << 20),
    ],
)
@pytest.mark.parametrize("spec", ALL[:4], ids=lambda spec: type(spec).__name__)
def test_specs_that_differ_do_not_merge_and_say_where(
    spec: AttentionSpec, field: str, value: object
) -> None:
    change: dict[str, Any] = {field: value}
    other = replace(spec, **change)
    with pytest.raises(SpecMergeError) as caught:
        KVCacheSpec.merge([spec, other])
    assert caught.value.field == field
    assert caught.value.values == (getattr(spec, field), value)


@pytest.mark.parametrize(
    ("windows", "merged"),
    [([None, None], None), ([None, 128], 128), ([128, None, 128], 128), ([128, 128], 128)],
)
@pytest.mark.parametrize("field", ["sliding_window", "attention_chunk_tokens"])
def test_full_attention_takes_over_the_one_window_in_use(
    field: str, windows: list[int | None], merged: int | None
) -> None:
    specs = [FullAttentionSpec(**(ATTENTION | {field: window})) for window in windows]
    unchanged = copy.deepcopy(specs)
    assert KVCacheSpec.merge(specs) == FullAttentionSpec(**(ATTENTION | {field: merged}))
    assert specs == unchanged


@pytest.mark.parametrize("field", ["sliding_window", "attention_chunk_tokens"])
def test_full_attention_with_two_windows_does_not_merge(field: str) -> None:
    specs = [FullAttentionSpec(**(ATTENTION | {field: window})) for window in (128, None, 256)]
    with pytest.raises(SpecMergeError) as caught:
        KVCacheSpec.merge(specs)
    assert caught.value.field == field
    assert caught.value.values == (128, None, 256)


def test_specs_of_different_quantization_do_not_merge() -> None:
    plain = replace(FULL, dtype=torch.int8)
    quantized = replace(plain, quantization=KVQuantization.PER_TENSOR)
    with pytest.raises(SpecMergeError) as caught:
        KVCacheSpec.merge([plain, quantized])
    assert caught.value.field == "quantization"
    assert caught.value.values == (KVQuantization.NONE, KVQuantization.PER_TENSOR)


def test_a_window_and_a_chunk_do_not_merge() -> None:
    with pytest.raises(SpecMergeError, match="sliding_window and attention_chunk_tokens"):
        KVCacheSpec.merge(
            [
                FullAttentionSpec(**ATTENTION, sliding_window=128),
                FullAttentionSpec(**ATTENTION, attention_chunk_tokens=128),
            ]
        )


def test_full_attention_with_a_window_and_other_heads_does_not_merge() -> None:
    windowed = replace(FULL, sliding_window=128, num_kv_heads=4)
    with pytest.raises(SpecMergeError, match="num_kv_heads"):
        KVCacheSpec.merge([FULL, windowed])


@pytest.mark.parametrize("kind", [SlidingWindowSpec, SlidingWindowMLASpec])
def test_sliding_windows_of_different_size_do_not_merge(kind: type[KVCacheSpec]) -> None:
    shape = ATTENTION if kind is SlidingWindowSpec else LATENT
    specs = [kind(**(shape | {"sliding_window": window})) for window in (128, 256)]
    with pytest.raises(SpecMergeError) as caught:
        KVCacheSpec.merge(specs)
    assert caught.value.field == "sliding_window"
    assert caught.value.values == (128, 256)


def test_nothing_does_not_merge() -> None:
    with pytest.raises(InvalidArgumentError, match="specs"):
        KVCacheSpec.merge([])


def test_a_new_family_is_one_class() -> None:
    @dataclass(frozen=True, slots=True, kw_only=True)
    class IndexerSpec(KVCacheSpec):
        width: int

        @property
        def cache_tensors(self) -> tuple[CacheTensorForm, ...]:
            form = CacheTensorForm(
                dtype=torch.uint8,
                axis_sizes={"token": self.tokens_per_block, "dim": self.width},
                layouts=("block token dim",),
                parts=(("indexer", self.width),),
            )
            return (form,)

    spec = IndexerSpec(tokens_per_block=4, width=132)
    config = KVCacheConfig(3, (KVCacheGroup(spec, ("a",)),))
    caches = canonicalize({"a": torch.zeros(3, 4, 132, dtype=torch.uint8)}, config)
    assert tuple(caches.tensors[0].tensor.shape) == (3, 4 * 132)


@pytest.mark.parametrize("layer_names", [(), ("a", "a")])
def test_a_group_has_layers_each_of_them_once(layer_names: tuple[str, ...]) -> None:
    with pytest.raises(InvalidArgumentError, match="layer_names"):
        KVCacheGroup(FULL, layer_names)


def test_a_group_has_a_spec_for_every_layer() -> None:
    specs = UniformTypeKVCacheSpecs(tokens_per_block=16, layer_specs={"a": FULL})
    with pytest.raises(InvalidArgumentError, match="'b'"):
        KVCacheGroup(specs, ("a", "b"))
    with pytest.raises(InvalidArgumentError, match="spec"):
        KVCacheGroup("full attention", ("a",))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"num_blocks": 0}, "num_blocks"),
        ({"groups": ()}, "groups"),
        ({"groups": (FULL,)}, r"groups\[0\]"),
        ({"groups": (KVCacheGroup(FULL, ("a",)), KVCacheGroup(FULL, ("b", "a")))}, "groups"),
        ({"shared_tensors": (("a", "c"),)}, "shared_tensors"),
        ({"shared_tensors": (("a",), ("b", "a"))}, "shared_tensors"),
    ],
)
def test_a_config_that_cannot_be_names_the_field(arguments: dict[str, Any], field: str) -> None:
    good: dict[str, Any] = {"num_blocks": 4, "groups": (KVCacheGroup(FULL, ("a", "b")),)}
    assert KVCacheConfig(**good).layer_names == ("a", "b")
    with pytest.raises(InvalidArgumentError, match=field):
        KVCacheConfig(**good | arguments)
