"""Specs and configs: sizes, validation and merging."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvxfer.errors import InvalidArgumentError, SpecMergeError
from kvxfer.kvcache.config import KVCacheConfig, KVCacheGroup
from kvxfer.kvcache.spec import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    KVQuantization,
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
MLA = MLASpec(**LATENT)
MAMBA = MambaSpec(
    tokens_per_block=16, shapes=((3, 4), (2, 5, 6)), dtypes=(torch.bfloat16, torch.float32)
)
PER_TENSOR, PER_TOKEN_HEAD = KVQuantization.PER_TENSOR, KVQuantization.PER_TOKEN_HEAD
INT8 = replace(FULL, dtype=torch.int8, quantization=PER_TOKEN_HEAD)
ALL = [
    FULL,
    SlidingWindowSpec(**ATTENTION, sliding_window=128),
    ChunkedLocalAttentionSpec(**ATTENTION, attention_chunk_tokens=64),
    CrossAttentionSpec(**ATTENTION),
    MLA,
    SlidingWindowMLASpec(**LATENT, sliding_window=128),
    MAMBA,
    UniformTypeKVCacheSpecs(tokens_per_block=16, layer_specs={"a": FULL}),
]


def collection(*specs: KVCacheSpec) -> UniformTypeKVCacheSpecs:
    return UniformTypeKVCacheSpecs(
        tokens_per_block=16, layer_specs=dict(zip("abc", specs, strict=False))
    )


@pytest.mark.parametrize(
    ("spec", "num_bytes"),
    [
        (FULL, 2 * 16 * 8 * 64 * 2),
        (replace(FULL, head_dim_v=32), 16 * 8 * (64 + 32) * 2),
        (MLA, 16 * 576 * 2),
        (ALL[5], 16 * 576 * 2),
        (MAMBA, 3 * 4 * 2 + 2 * 5 * 6 * 4),
        (replace(FULL, dtype=torch.float8_e4m3fn, quantization=PER_TENSOR), 2 * 16 * 8 * 64),
        (replace(FULL, dtype=torch.int8, quantization=PER_TENSOR), 2 * 16 * 8 * 64),
        (INT8, 16 * 8 * 2 * (64 + 4)),  # scales of each token and head are in the cache
        (replace(INT8, head_dim_v=32), 16 * 8 * (64 + 4 + 32 + 4)),
        (replace(INT8, head_dim=32), 16 * 8 * 2 * (32 + 4)),  # 64 numbers of 4 bits
        (replace(MLA, dtype=torch.int8, quantization=PER_TOKEN_HEAD), 16 * (576 + 8)),
        (collection(FULL, PADDED), FULL.page_size_bytes * 3 // 2),
    ],
)
def test_a_page_has_the_bytes_of_its_block(spec: KVCacheSpec, num_bytes: int) -> None:
    assert spec.unpadded_page_size_bytes == num_bytes
    if isinstance(spec, UniformTypeKVCacheSpecs):
        assert spec.page_size_bytes == FULL.page_size_bytes + 20_000
        return
    assert spec.page_size_bytes == num_bytes
    padded = replace(spec, page_size_padded=num_bytes + 100)
    assert (padded.page_size_bytes, padded.unpadded_page_size_bytes) == (num_bytes + 100, num_bytes)
    with pytest.raises(InvalidArgumentError, match="page_size_padded"):
        replace(spec, page_size_padded=num_bytes - 1)


def full(**fields: Any) -> Callable[[], object]:
    return lambda: FullAttentionSpec(**(ATTENTION | fields))


def uniform(specs: dict[str, KVCacheSpec], tokens: int = 16, **fields: Any) -> Callable[[], object]:
    return lambda: UniformTypeKVCacheSpecs(tokens_per_block=tokens, layer_specs=specs, **fields)


def mamba(shapes: Any, dtypes: Any) -> Callable[[], object]:
    return lambda: MambaSpec(tokens_per_block=1, shapes=shapes, dtypes=dtypes)


def config(**fields: Any) -> Callable[[], object]:
    good: dict[str, Any] = {"num_blocks": 4, "groups": (KVCacheGroup(FULL, ("a", "b")),)}
    assert KVCacheConfig(**good).layer_names == ("a", "b")
    return lambda: KVCacheConfig(**good | fields)


GROUP = KVCacheGroup(FULL, ("a",))


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (full(quantization=PER_TENSOR), "dtype is torch.bfloat16"),
        (full(sliding_window=8, attention_chunk_tokens=8), "attention_chunk_tokens"),
        (lambda: MLASpec(**LATENT, head_dim_v=64), "head_dim_v"),
        (mamba(((3,),), (torch.int8,) * 2), "dtypes"),
        (mamba(((3, 0),), (torch.int8,)), r"shapes\[0\]"),
        (uniform({"a": FULL, "b": MAMBA}), "'b'"),
        (uniform({"a": FULL}, 8), "'a'"),
        (uniform({"a": FULL}, page_size_padded=1 << 20), "page_size_padded"),
        (lambda: collection(FULL).for_layer("c"), "'c'"),
        (lambda: KVCacheGroup(FULL, ("a", "a")), "layer_names"),
        (lambda: KVCacheGroup(collection(FULL), ("a", "b")), "'b'"),
        (config(groups=(GROUP, KVCacheGroup(FULL, ("b", "a")))), "groups"),
        (config(shared_tensors=(("a", "c"),)), "shared_tensors"),
        (config(shared_tensors=(("a",), ("b", "a"))), "shared_tensors"),
    ],
)
def test_what_cannot_be_is_refused_by_its_field(make: Callable[[], object], field: str) -> None:
    with pytest.raises(InvalidArgumentError, match=field):
        make()


@pytest.mark.parametrize(
    ("windows", "merged"),
    [([None, None], None), ([None, 128], 128), ([128, None, 128], 128), ([128, 128], 128)],
)
@pytest.mark.parametrize("field", ["sliding_window", "attention_chunk_tokens"])
def test_full_attention_takes_over_the_one_window_in_use(
    field: str, windows: list[int | None], merged: int | None
) -> None:
    specs = [FullAttentionSpec(**(ATTENTION | {field: window})) for window in windows]
    assert KVCacheSpec.merge(specs) == FullAttentionSpec(**(ATTENTION | {field: merged}))


INT8_ALONE = replace(FULL, dtype=torch.int8)
OTHER_VALUES: dict[str, Any] = {
    "num_kv_heads": 4,
    "head_dim": 32,
    "head_dim_v": 32,
    "dtype": torch.float32,
    "tokens_per_block": 32,
    "page_size_padded": 1 << 20,
}
DIFFERING: list[tuple[str, Sequence[KVCacheSpec]]] = [
    *(("type", [spec, MAMBA if spec is FULL else FULL]) for spec in ALL),
    *((field, [FULL, replace(FULL, **{field: other})]) for field, other in OTHER_VALUES.items()),
    ("sliding_window", [replace(FULL, sliding_window=window) for window in (128, None, 256)]),
    ("quantization", [INT8_ALONE, replace(INT8_ALONE, quantization=PER_TENSOR)]),
    ("num_kv_heads", [FULL, replace(FULL, sliding_window=128, num_kv_heads=4)]),
    ("sliding_window", [ALL[1], SlidingWindowSpec(**ATTENTION, sliding_window=256)]),
    ("sliding_window", [ALL[5], SlidingWindowMLASpec(**LATENT, sliding_window=256)]),
]


@pytest.mark.parametrize(("field", "specs"), DIFFERING)
def test_specs_that_differ_do_not_merge_and_say_where(
    field: str, specs: Sequence[KVCacheSpec]
) -> None:
    assert KVCacheSpec.merge([specs[0]] * 3) == specs[0]
    with pytest.raises(SpecMergeError) as caught:
        KVCacheSpec.merge(specs)
    assert caught.value.field == field
    values = (getattr(spec, field, type(spec).__name__) for spec in specs)
    assert caught.value.values == tuple(values)


def test_a_window_and_a_chunk_do_not_merge() -> None:
    specs = [replace(FULL, sliding_window=128), replace(FULL, attention_chunk_tokens=128)]
    with pytest.raises(SpecMergeError, match="sliding_window and attention_chunk_tokens"):
        KVCacheSpec.merge(specs)
