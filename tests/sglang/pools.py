"""Host pools of SGLang, made by its own classes from its own pools of the device, here the CPU."""

from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool, MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.pool_host import base, dsa, mamba
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

PAGE = 8
LAYERS = 3
NUM_PAGES = 6
HEAD_DIM = 16
LORA_RANK, ROPE_DIM = 24, 8
INDEX_PAGE = 64
"""Tokens of a page of sparse attention's indexer, the only number that SGLang has it with."""

base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0

_DEVICE = {"device": "cpu", "enable_memory_saver": False, "layer_num": LAYERS, "page_size": PAGE}
_HOST = {"host_to_device_ratio": 1.0, "host_size": 0, "page_size": PAGE, "pin_memory": False}


def attention_pool(layout: str, *, heads: int = 4, dtype: torch.dtype = torch.bfloat16) -> Any:
    device = MHATokenToKVPool(
        size=(NUM_PAGES - 1) * PAGE, dtype=dtype, head_num=heads, head_dim=HEAD_DIM, **_DEVICE
    )
    return _host(MHATokenToKVPoolHost, device, "_mha_buffer_info", layout)


def latent_pool(layout: str, *, page: int = PAGE) -> Any:
    device = MLATokenToKVPool(
        size=(NUM_PAGES - 1) * page,
        dtype=torch.bfloat16,
        kv_lora_rank=LORA_RANK,
        qk_rope_head_dim=ROPE_DIM,
        **_DEVICE | {"page_size": page},
    )
    return _host(
        MLATokenToKVPoolHost,
        device,
        "_mla_buffer_info",
        layout,
        page_size=page,
        target_layer_num=LAYERS,
    )


def _host(
    kind: Any,
    device: Any,
    buffer_info: str,
    layout: str,
    *,
    page_size: int = PAGE,
    **only_newer: Any,
) -> Any:
    """Make a host pool; before 0.5.22 it takes the pool of the device, then its buffers."""
    shared = _HOST | {"page_size": page_size}
    if not hasattr(device, buffer_info):
        return kind(device, layout=layout, **shared)
    return kind(
        getattr(device, buffer_info)(),
        layout=layout,
        device_capacity_tokens=device.size,
        start_layer=device.start_layer,
        end_layer=device.end_layer,
        **shared,
        **only_newer,
    )


def fill(pool: Any, *, first: int = 0) -> None:
    """Fill a pool with bytes that differ from place to place."""
    buffer = pool.kv_buffer.view(torch.uint8).view(-1)
    values = torch.arange(first, first + buffer.numel(), dtype=torch.int64)
    buffer.copy_((values * 2654435761 >> 7).to(torch.uint8))


def logical_page(pool: Any, page: int) -> torch.Tensor:
    """Return the bits of a page in one order: `(parts, layers, tokens, heads, dim)`, int16."""
    found: torch.Tensor = _logical_page(pool, page).contiguous().view(torch.int16)
    return found


def _logical_page(pool: Any, page: int) -> Any:
    buffer, layout, tokens = pool.kv_buffer, pool.layout, slice(page * PAGE, (page + 1) * PAGE)
    if isinstance(pool, MLATokenToKVPoolHost):
        buffer = buffer.unsqueeze(0)
    if layout == "layer_first":
        return buffer[:, :, tokens]
    if layout == "page_first":
        return buffer[:, tokens].transpose(1, 2)
    if layout == "page_first_direct":
        return buffer[:, page]
    if layout == "page_head":
        return buffer[:, page].permute(0, 3, 2, 1, 4)
    if isinstance(pool, MLATokenToKVPoolHost):
        return buffer[:, page].unsqueeze(-2)
    groups = buffer[page].permute(2, 1, 3, 0, 4, 5)  # page_unified
    return groups.reshape(2, LAYERS, PAGE, pool.head_num, HEAD_DIM)


def state_pool(*, first: int = 0) -> Any:
    """Make a host pool of recurrent states, filled; one row is one page."""
    temporal = torch.zeros(2, NUM_PAGES, 3, 8, dtype=torch.float32)
    conv = torch.zeros(2, NUM_PAGES, 12, 4, dtype=torch.bfloat16)
    others = {"host_to_device_ratio": 1.0, "host_size": 0, "pin_memory": False}
    if hasattr(mamba, "MambaStateBufferInfo"):
        info = mamba.MambaStateBufferInfo(temporal=temporal, conv=(conv,))
        others["device_capacity"] = NUM_PAGES - 1
    else:
        states = SimpleNamespace(temporal=temporal, conv=[conv])
        info = SimpleNamespace(
            mamba_cache=states, num_mamba_layers=2, size=NUM_PAGES - 1, device="cpu"
        )
    pool = mamba.MambaPoolHost(info, layout="page_first_direct", **others)
    for index, buffer in enumerate((pool.temporal_buffer, *pool.conv_buffer)):
        values = torch.arange(buffer.numel()) + first + 100 * index
        buffer.copy_(values.view(buffer.shape))
    return pool


def index_pool(layout: str, *, first: int = 0, **others: Any) -> Any:
    """Make a host pool of the keys of sparse attention's indexer, filled, beside one of latents."""
    device = DSATokenToKVPool(
        size=(NUM_PAGES - 1) * INDEX_PAGE,
        dtype=torch.bfloat16,
        kv_lora_rank=LORA_RANK,
        qk_rope_head_dim=ROPE_DIM,
        kv_cache_dim=LORA_RANK + ROPE_DIM,
        index_head_dim=128,
        index_buf_size=(NUM_PAGES - 1) * INDEX_PAGE,
        **_DEVICE | {"page_size": INDEX_PAGE},
    )
    given = {"anchor_host": latent_pool(layout, page=INDEX_PAGE), "pin_memory": False, **others}
    if hasattr(dsa, "make_dsa_indexer_pool_decl"):
        pool = dsa.DSAIndexerPoolHost(dsa.make_dsa_indexer_pool_decl(device), **given)
    else:
        pool = dsa.DSAIndexerPoolHost(device, layout=layout, **given)
    if pool.index_k_with_scale_buffer is not None:
        buffer = pool.index_k_with_scale_buffer.view(-1)
        values = torch.arange(first, first + buffer.numel(), dtype=torch.int64)
        buffer.copy_((values * 2654435761 >> 7).to(torch.uint8))
    return pool


def index_page(pool: Any, page: int) -> torch.Tensor:
    """Return the bytes of a page of such a pool: `(layers, bytes)`."""
    buffer = pool.index_k_with_scale_buffer
    found: torch.Tensor = buffer[:, page] if pool.layout == "layer_first" else buffer[page]
    return found.reshape(pool.layer_num, -1).clone()
