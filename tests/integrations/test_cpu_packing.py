"""CPU packing: vLLM's attention kernel puts keys and values where the packing says, bit by bit."""

from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm.v1.kv_offload.base", reason="needs vLLM")

from vllm import _custom_ops
from vllm.config import CacheConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.platforms import current_platform
from vllm.v1.attention.backends import cpu_attn

from kvxfer.integrations.vllm.common.cpu_packing import (
    MEASURED,
    cpu_attention_isa,
    cpu_kernels,
    cpu_packing,
    kernel_packs_as,
)

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
HEAD_DIMS = (64, 80, 96, 128, 256, 512)
TOKENS = (16, 32, 48, 64, 128)
NUM_HEADS = 2
has_kernel = pytest.mark.skipif(
    not hasattr(torch.ops._C, "cpu_attn_reshape_and_cache"),
    reason="this vLLM has no CPU attention that runs with the torch that is installed",
)


def packs(isa: str, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether vLLM has a kernel with this packing; each such kernel has been measured."""
    return dtype.itemsize in MEASURED[isa][1] and (isa != "amx" or head_dim % 32 == 0)


def require_isa(isa: str) -> None:
    """Skip where the kernels of this process were built without an instruction set."""
    cache = torch.zeros(2, 1, 1, 32, 32, dtype=torch.bfloat16)
    slots = torch.arange(0)
    key, value = torch.zeros(2, 0, 1, 32, dtype=torch.bfloat16)
    try:
        _custom_ops.cpu_attn_reshape_and_cache(key, value, *cache, slots, isa)
    except RuntimeError as exc:
        wanted = "avx512_bf16" if isa == "amx" else isa
        pytest.skip(f"{isa} not run: no {wanted} on {cpu_kernels()} ({exc})")


@has_kernel
@pytest.mark.parametrize(
    ("isa", "dtype", "head_dim"),
    [case for case in product(MEASURED, DTYPES, HEAD_DIMS) if packs(*case)],
    ids=str,
)
def test_every_element_lies_where_the_digits_say(
    isa: str, dtype: torch.dtype, head_dim: int
) -> None:
    require_isa(isa)
    for tokens in TOKENS:
        if tokens % MEASURED[isa][0]:
            continue
        planes = cpu_packing(
            isa, tokens_per_block=tokens, head_dim=head_dim, itemsize=dtype.itemsize
        )
        assert planes is not None
        for plane in planes:
            token, dim = plane.elements().T
            assert np.array_equal(np.sort(token * head_dim + dim), np.arange(tokens * head_dim))
        assert kernel_packs_as(planes, isa, dtype)


@has_kernel
@pytest.mark.parametrize("part", [0, 1])
def test_a_wrong_digit_is_found_out(part: int) -> None:
    planes = cpu_packing("vec", tokens_per_block=64, head_dim=64, itemsize=2)
    assert planes is not None
    outermost, *inner = planes[part].digits
    wrong = replace(planes[part], digits=(*inner, outermost))
    changed = (wrong, planes[1]) if part == 0 else (planes[0], wrong)
    assert not kernel_packs_as(changed, "vec", torch.bfloat16)


@pytest.mark.parametrize(
    ("isa", "tokens", "head_dim", "itemsize"),
    [
        *((isa, 32, 64, 2) for isa in ("amx_fp8", "neon", "rvv", "vsx", "vxe", "unheard-of")),
        *((isa, 32, 64, 1) for isa in MEASURED),  # a quantized cache
        *((isa, tokens, 64, 2) for isa in MEASURED for tokens in (8, 24, 40)),
        *(("amx", *sizes) for sizes in ((48, 64, 2), (32, 80, 2), (32, 64, 4))),
    ],
)
def test_what_was_not_measured_or_the_kernel_cannot_read_is_opaque(
    isa: str, tokens: int, head_dim: int, itemsize: int
) -> None:
    sizes = {"tokens_per_block": tokens, "head_dim": head_dim, "itemsize": itemsize}
    assert cpu_packing(isa, **sizes) is None


def test_tiles_of_amx_are_pairs_of_what_is_summed_over() -> None:
    """As data, on any processor: the first places of 32 tokens of 64 dimensions."""
    planes = cpu_packing("amx", tokens_per_block=32, head_dim=64, itemsize=2)
    assert planes is not None
    keys, values = (plane.elements().tolist() for plane in planes)
    assert keys[:4] == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert keys[32:34] == [[0, 2], [0, 3]]
    assert keys[16 * 64] == [16, 0]
    assert values[:4] == [[0, 0], [1, 0], [0, 1], [1, 1]]
    assert values[32:34] == [[2, 0], [3, 0]]
    assert values[16 * 32] == [0, 16]
    for places in (keys, values):
        assert sorted(places) == [list(place) for place in np.ndindex(32, 64)]
    assert not any(plane.has_rows for plane in planes)


def isa_of_metadata(dtype: torch.dtype, head_dim: int, tokens: int) -> str:
    """Make a layer of the CPU attention as an engine does; return the ISA of its metadata."""
    config = VllmConfig(cache_config=CacheConfig(block_size=tokens))
    config.model_config = SimpleNamespace(  # a real one starts a process that imports a model
        dtype=dtype,
        is_mm_prefix_lm=False,
        rswa_window=None,
        get_num_attention_heads=lambda parallel: NUM_HEADS,
    )
    with set_current_vllm_config(config):
        layer = Attention(
            NUM_HEADS,
            head_dim,
            1.0,
            num_kv_heads=NUM_HEADS,
            cache_config=config.cache_config,
            prefix="layer",
        )
        make_builder = layer.attn_backend.get_builder_cls()
        spec = layer.get_kv_cache_spec(config)
        builder = make_builder(spec, ["layer"], config, torch.device("cpu"))
    return str(builder.isa)


@has_kernel
@pytest.mark.skipif(not current_platform.is_cpu(), reason="this vLLM is for another device")
@pytest.mark.parametrize("tokens", [32, 128])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_amx", [False, True], ids=["without AMX", "with AMX"])
def test_a_layer_of_vllm_has_the_isa_that_is_told(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    head_dim: int,
    tokens: int,
    has_amx: bool,  # noqa: FBT001 - a column of the table
) -> None:
    """Packing needs no tiles: a build with AMX packs for it even on a processor without AMX."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has_amx)
    isa = cpu_attention_isa(dtype=dtype, tokens_per_block=tokens, head_dim=head_dim)
    assert isa is not None
    assert (isa == "amx") is (has_amx and dtype == torch.bfloat16 and head_dim % 32 == 0)
    require_isa(isa)
    assert isa_of_metadata(dtype, head_dim, tokens) == isa


def test_the_isa_is_unknown_where_vllm_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: dict[str, Any] = {"dtype": torch.bfloat16, "tokens_per_block": 32, "head_dim": 64}
    monkeypatch.setattr(current_platform, "is_cpu", lambda: True)
    assert cpu_attention_isa(**sizes) is not None
    assert cpu_attention_isa(**sizes | {"head_dim": 80}, kv_cache_dtype="fp8") is None
    monkeypatch.setattr(cpu_attn, "_get_attn_isa", lambda dtype, block_size: "vec")
    assert cpu_attention_isa(**sizes) is None
    monkeypatch.delattr(cpu_attn, "_get_attn_isa")
    assert cpu_attention_isa(**sizes) is None
    monkeypatch.setattr(current_platform, "is_cpu", lambda: False)
    assert cpu_attention_isa(**sizes) is None
