"""Attestation: proof on live memory that canonical caches match the engine's own views."""

from collections.abc import Sequence
from itertools import product

import torch

from kvxfer.checks import require_instance
from kvxfer.errors import AttestationError
from kvxfer.kvcache.canonical.caches import CanonicalKVCacheRef, CanonicalKVCaches
from kvxfer.kvcache.canonical.registered import KVCaches, LayerPlace, Layouts, read_registered
from kvxfer.kvcache.config import KVCacheConfig
from kvxfer.kvcache.layout import LayoutReading
from kvxfer.kvcache.memory_region import HOST

SENTINELS = range(1, 60)
"""Byte values to write: never zero, and never the upper byte of a NaN in any float format."""


def attest(
    kv_caches: KVCaches,
    config: KVCacheConfig,
    caches: CanonicalKVCaches,
    *,
    layouts: Layouts | None = None,
) -> None:
    """Prove that `caches` shows, block by block, the bytes that the engine writes to `kv_caches`.

    For the first, a middle and the last block of every layer, sentinels are written through the
    engine's own view and looked for in the canonical pages: exactly the layer's bytes must have
    changed, in memory order. The memory is restored afterwards, even if the proof fails. Nothing
    else may use the caches meanwhile. Blocks until the device is done.

    `caches` may come from `canonicalize`, or from the engine itself. A wrong layout in `layouts`
    that fits the tensor cannot be detected.

    Args:
        kv_caches: The tensors that the engine registered, as for `canonicalize`.
        config: The blocks, groups and specs.
        caches: The canonical caches to prove.
        layouts: Layouts of some entries, given by the caller.

    Raises:
        AttestationError: A layer's bytes are not where `caches` has them; the error names the
            first such layer and block.
        KVXferError: The tensors cannot be read, see `canonicalize`.
    """
    require_instance("config", config, KVCacheConfig)
    require_instance("caches", caches, CanonicalKVCaches)
    _require_shape(caches, config)
    block_ids = sorted({0, config.num_blocks // 2, config.num_blocks - 1})
    with torch.inference_mode():  # engines' tensors may be inference tensors, read-only outside it
        for cache in read_registered(kv_caches, config, layouts):
            for index, places in enumerate(cache.positions):
                for place, block_id in product(places, block_ids):
                    views = [
                        _block_view(tensor, reading, index, block_id)
                        for tensor, reading in zip(cache.tensors, cache.readings, strict=True)
                    ]
                    _attest_block(place, views, caches, block_id)


def _block_view(
    tensor: torch.Tensor, reading: LayoutReading, layer_index: int, block_id: int
) -> torch.Tensor:
    """Select a block by the engine's own indices, then sort the dimensions by stride.

    The result has the split axes outermost: K before V, each as its kernel blocks.
    """
    view, order = tensor, []
    ratio = reading.kernel_blocks_per_block
    for axis, dim in zip(reading.layout.axes, reading.dims, strict=True):
        if dim is None:
            continue
        if axis == "block":
            view = view.narrow(dim, block_id * ratio, ratio)
        elif axis == "layer":
            view = view.narrow(dim, layer_index, 1)
        order.append(dim)
    rest = [dim for dim in range(tensor.ndim) if dim not in order]
    return view.permute(*order, *rest)


def _require_shape(caches: CanonicalKVCaches, config: KVCacheConfig) -> None:
    first = config.layer_names[0]
    if len(caches.group_data_refs) != len(config.groups):
        found = f"{len(caches.group_data_refs)} groups instead of {len(config.groups)}"
        raise AttestationError(first, 0, found)
    for index, each in enumerate(caches.tensors):
        if each.tensor.shape[0] != config.num_blocks:
            found = f"tensor {index} has {each.tensor.shape[0]} blocks, not {config.num_blocks}"
            raise AttestationError(first, 0, found)


def _refs_of(layer: LayerPlace, caches: CanonicalKVCaches) -> list[CanonicalKVCacheRef]:
    """List the refs that may hold a layer: those with its name, or all if none has names."""
    refs = caches.group_data_refs[layer.group]
    if not any(ref.layer_names for ref in refs):
        return list(refs)
    return [ref for ref in refs if layer.layer_name in ref.layer_names]


def _attest_block(
    layer: LayerPlace, views: list[torch.Tensor], caches: CanonicalKVCaches, block_id: int
) -> None:
    refs = _refs_of(layer, caches)
    rows = [caches.tensors[ref.tensor_idx].tensor[block_id] for ref in refs]
    views.sort(key=lambda view: _place(view, rows))
    saved = [view.clone() for view in views]
    try:
        for view in views:
            view.zero_()
        before = [row.clone() for row in rows]
        written = [_write_sentinels(view, seed) for seed, view in enumerate(views)]
        after = [row.clone() for row in rows]
    finally:
        for view, content in zip(views, saved, strict=True):
            view.copy_(content)
    found = _changed_bytes(refs, before, after)
    expected = torch.cat(written)
    if (num_found := found.numel()) != expected.numel():
        detail = f"{expected.numel()} bytes written, but {num_found} changed in its canonical pages"
        raise AttestationError(layer.layer_name, block_id, detail)
    if not torch.equal(found, expected):
        first = int((found != expected).nonzero()[0])
        detail = f"byte {first} of those written has another value in its canonical pages"
        raise AttestationError(layer.layer_name, block_id, detail)


def _place(view: torch.Tensor, rows: Sequence[torch.Tensor]) -> tuple[int, int]:
    """Return a view's sort key: the index of the row that it begins in, and its address."""
    address = view.data_ptr()
    begins_in = (
        index for index, row in enumerate(rows) if 0 <= address - row.data_ptr() < row.numel()
    )
    return next(begins_in, len(rows)), address


def _write_sentinels(view: torch.Tensor, seed: int) -> torch.Tensor:
    """Fill a view with sentinels and return them as bytes, in the order of the view."""
    num_bytes = view.numel() * view.element_size()
    generator = torch.Generator().manual_seed(seed)
    sentinels = torch.empty(num_bytes, dtype=torch.int8, device=HOST)
    sentinels.random_(SENTINELS.start, SENTINELS.stop, generator=generator)
    view.copy_(sentinels.view(view.dtype).view(view.shape))
    return sentinels


def _changed_bytes(
    refs: Sequence[CanonicalKVCacheRef],
    before: Sequence[torch.Tensor],
    after: Sequence[torch.Tensor],
) -> torch.Tensor:
    """Collect the changed bytes of the refs' pages, page by page."""
    changed = [torch.empty(0, dtype=torch.int8, device=HOST)]
    for ref, old, new in zip(refs, before, after, strict=True):
        page, old_page = new[: ref.page_size_bytes], old[: ref.page_size_bytes]
        changed.append(page[page != old_page].cpu())
    return torch.cat(changed)
