"""Canonical allocation: a block is one piece, or a refusal names the clashing values."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from kvxfer.errors import InvalidArgumentError
from kvxfer.kvcache import (
    AllocationCondition,
    AllocationRefusedError,
    AttentionLayout,
    AttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    KVCacheSpec,
    KVLayout,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    allocate_canonical,
    allocation,
    attest,
    describe,
    why_not_canonical,
)

NHD = AttentionLayout("kv block token head dim", "block layer kv token head dim")
NHD_PAGE = "block kv token head dim"
HND = AttentionLayout("kv block token head dim", "block layer kv head token dim")
LAYERS_FIRST = AttentionLayout(NHD.shape, "layer block kv token head dim")
SIZES: dict[str, Any] = {
    "tokens_per_block": 16,
    "num_kv_heads": 2,
    "head_dim": 8,
    "dtype": torch.float16,
}
FULL = FullAttentionSpec(**SIZES)
NARROW = replace(FULL, num_kv_heads=4, head_dim=4)
SLIDING = SlidingWindowSpec(**SIZES, sliding_window=64)
PAGE = FULL.page_size_bytes
MAMBA = MambaSpec(tokens_per_block=16, shapes=((PAGE // 2,),), dtypes=(torch.float16,))


@dataclass(frozen=True)
class Odd:
    """Attention backend that contradicts itself, or the spec."""

    axes: tuple[str, ...] = ("block", "token", "dim")
    shape: tuple[int, ...] = ()
    order: tuple[int, ...] = (1, 0, 2, 3)

    def cache_shape(self, spec: AttentionSpec, num_blocks: int) -> tuple[int, ...]:
        return self.shape or (num_blocks, spec.tokens_per_block, 32)

    def stride_order(self) -> tuple[int, ...]:
        return self.order


def uniform(**specs: KVCacheSpec) -> KVCacheGroup:
    collection = UniformTypeKVCacheSpecs(tokens_per_block=16, layer_specs=specs)
    return KVCacheGroup(collection, tuple(specs))


AB = KVCacheGroup(FULL, ("a", "b"))
CONFIG = KVCacheConfig(
    5, (AB, KVCacheGroup(SLIDING, ("c",))), (("a", "c"), ("b",)), (5 * PAGE, 5 * PAGE)
)
ALONE = KVCacheConfig(5, (AB,))


def config(spec: KVCacheSpec = SLIDING, **changes: Any) -> KVCacheConfig:
    return replace(CONFIG, groups=(AB, KVCacheGroup(spec, ("c",))), **changes)


def test_a_block_of_any_group_is_one_piece() -> None:
    allocation = allocate_canonical(CONFIG, [NHD] * 2, tokens_per_kernel_block=[16, 8])
    row = 2 * PAGE
    (tensor,) = allocation.caches.tensors
    assert tuple(tensor.tensor.shape) == (5, row)
    assert allocation.buffer.shape == (5 * row,)
    assert not allocation.buffer.any()
    # The second group's kernel blocks spread its only layer over three quarters of a row.
    for group, num_bytes in enumerate((row, row - PAGE // 2)):
        blocks = describe(allocation.caches, group, [4, 1])
        starts = [allocation.buffer.data_ptr() + block * row for block in (4, 1)]
        assert blocks.addresses.tolist() == starts
        assert blocks.lengths.tolist() == [num_bytes] * 2


def test_a_layout_may_be_given_parsed() -> None:
    layouts = map(KVLayout.parse, ("block token dim", "block layer token dim"))
    parsed: Any = AttentionLayout(*layouts)  # type: ignore[arg-type] # as `canonicalize` takes it
    assert parsed == AttentionLayout("block token dim", "block layer token dim")
    assert (parsed.axes, parsed.stride_order()) == (("block", "token", "dim"), (1, 0, 2, 3))


def test_layers_of_one_group_may_have_their_own_specs() -> None:
    plan = KVCacheConfig(6, (uniform(a=FULL, b=NARROW),))
    allocation = allocate_canonical(plan, [NHD])
    assert tuple(allocation.kv_caches["a"].shape) == (2, 6, 16, 2, 8)
    assert tuple(allocation.kv_caches["b"].shape) == (2, 6, 16, 4, 4)
    attest(allocation.kv_caches, plan, allocation.caches, layouts={"a": NHD_PAGE})


@pytest.mark.gpu
def test_a_block_is_one_piece_of_device_memory_and_host_memory_is_pinned() -> None:
    allocation = allocate_canonical(CONFIG, [NHD] * 2, device="cuda")
    assert allocation.buffer.is_cuda
    layouts = dict.fromkeys(CONFIG.layer_names, NHD_PAGE)
    attest(allocation.kv_caches, CONFIG, allocation.caches, layouts=layouts)
    assert allocate_canonical(CONFIG, [NHD] * 2, pinned=True).buffer.is_pinned()


PADDED = KVCacheConfig(5, (KVCacheGroup(replace(FULL, page_size_padded=PAGE + 8), ("a",)),))
SLIDING_ALONE = KVCacheConfig(5, (KVCacheGroup(SLIDING, ("c",)),))
WIDE = replace(SLIDING, num_kv_heads=4)
TWO_SPECS = KVCacheConfig(5, (uniform(a=FULL, b=NARROW),), (("a", "b"),))
UNSHARED = config(shared_tensors=(), shared_tensor_sizes_bytes=())
NO_LAYERS = AttentionLayout(NHD.shape, None)
C = AllocationCondition
IN_C = " (group 1, layer 'c'): "
WHOLE = "8 kernel blocks of whole torch.float16 elements"
REFUSED: list[tuple[AllocationCondition, KVCacheConfig, dict[str, Any], str]] = [
    (C.CROSS_LAYER_WANTED, CONFIG, {"wants_cross_layer_blocks": False}, ": no, yes"),
    (C.HYBRID_SUPPORTED, CONFIG, {"supports_hybrid_groups": False}, ": 2 groups, 1 group"),
    (C.ATTENTION, config(MAMBA), {}, f"{IN_C}MambaSpec, an AttentionSpec"),
    (C.ONE_PAGE_SIZE, config(WIDE), {}, f"{IN_C}{2 * PAGE}, {PAGE}, like layer 'a'"),
    (C.SHARED_TENSORS, UNSHARED, {}, ": no shared tensor, at least one"),
    (C.SHARED_TENSORS, config(shared_tensors=(("a",), ("b",))), {}, f"{IN_C}no tensor, one"),
    (
        C.SHARED_TENSORS,
        TWO_SPECS,
        {},
        f" (group 0, layer 'b', tensor 0): {NARROW}, {FULL}, like layer 'a' in the same tensor",
    ),
    (
        C.TENSOR_SIZE,
        config(shared_tensor_sizes_bytes=(5 * PAGE, 6 * PAGE)),
        {},
        f" (tensor 1): {6 * PAGE}, {5 * PAGE}, which is 5 pages of {PAGE}",
    ),
    (
        C.LAYER_DIMENSION,
        CONFIG,
        {"backends": [NHD, NO_LAYERS]},
        f" (group 1): none for '{NHD.shape}', a stride order",
    ),
    (
        C.ONE_ORDER,
        CONFIG,
        {"backends": [NHD, HND]},
        f" (group 1): '{HND.memory}', '{NHD.memory}', like group 0",
    ),
    (
        C.BLOCK_OUTERMOST,
        ALONE,
        {"backends": [LAYERS_FIRST]},
        f" (group 0): '{LAYERS_FIRST.memory}', 'block' first",
    ),
    (
        C.KERNEL_BLOCKS,
        CONFIG,
        {"tokens_per_kernel_block": [16, 6]},
        " (group 1): 6 tokens, a divisor of 16 tokens",
    ),
    (
        C.KERNEL_BLOCKS,
        PADDED,
        {"tokens_per_kernel_block": [2]},
        f" (group 0, layer 'a'): a page of {PAGE + 8} bytes, {WHOLE}",
    ),
    (
        C.CACHE_SHAPE,
        SLIDING_ALONE,
        {"backends": [Odd(shape=(1, 16, 31))]},
        " (group 0, layer 'c'): (1, 16, 31) as 'block token dim' for 1 kernel blocks, 512 elements",
    ),
]


@pytest.mark.parametrize(("condition", "plan", "options", "text"), REFUSED)
def test_a_condition_that_does_not_hold_is_the_only_reason_and_the_error_has_it(
    condition: AllocationCondition, plan: KVCacheConfig, options: dict[str, Any], text: str
) -> None:
    options = {"backends": [NHD] * len(plan.groups)} | options
    (refusal,) = why_not_canonical(plan, **options)
    where, _ = text.split(": ", 1)
    assert refusal.condition is condition
    assert f"{where}: {refusal.found}, {refusal.expected}" == text
    said = f"{condition.value}{where}: found {refusal.found}, expected {refusal.expected}"
    assert str(refusal) == said
    with pytest.raises(AllocationRefusedError) as caught:
        allocate_canonical(plan, **options)
    assert (caught.value.refusals, str(caught.value)) == ((refusal,), said)


def test_every_condition_is_tried() -> None:
    assert {each[0] for each in REFUSED} == set(AllocationCondition)


def test_every_reason_is_listed() -> None:
    groups = (AB, KVCacheGroup(MAMBA, ("c",)), uniform(d=MAMBA, e=MAMBA))
    refusals = why_not_canonical(
        replace(CONFIG, groups=groups),
        [NHD, LAYERS_FIRST, HND],
        tokens_per_kernel_block=[16, 16, 5],
        wants_cross_layer_blocks=False,
    )
    assert [(refusal.condition, refusal.layer_name) for refusal in refusals] == [
        (C.CROSS_LAYER_WANTED, None),
        (C.ATTENTION, "c"),
        (C.ATTENTION, "d"),
        (C.ATTENTION, "e"),
        (C.SHARED_TENSORS, "d"),
        (C.SHARED_TENSORS, "e"),
        (C.ONE_ORDER, None),
        (C.BLOCK_OUTERMOST, None),
        (C.ONE_ORDER, None),
        (C.KERNEL_BLOCKS, None),
    ]


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"backends": [Odd(order=(1, 0, 0, 2)), NHD]}, "stride_order"),
        ({"backends": [AttentionLayout("block token dim state", None), NHD]}, "shape"),
        ({"backends": [Odd(axes=("page", "token", "dim")), NHD]}, "axes"),
    ],
    ids=str,
)
def test_misuse_is_no_refusal(options: dict[str, Any], argument: str) -> None:
    arguments: dict[str, Any] = {"config": CONFIG, "backends": [NHD, NHD]}
    with pytest.raises(InvalidArgumentError, match=argument):
        why_not_canonical(**arguments | options)
    with pytest.raises(InvalidArgumentError, match="memory"):
        AttentionLayout("block kv token head dim", "block layer kv token head")
    for num_blocks in (1 << 40, 1 << 62):
        with pytest.raises(InvalidArgumentError, match=f"config.num_blocks is {num_blocks}"):
            allocate_canonical(replace(ALONE, num_blocks=num_blocks), [NHD])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device, which pins memory")
@pytest.mark.parametrize(("device", "why"), [("cpu", "CUDA"), ("cuda", "host memory")])
def test_memory_that_cannot_be_pinned_is_refused(
    monkeypatch: pytest.MonkeyPatch, device: str, why: str
) -> None:
    monkeypatch.setattr(allocation, "require_device", lambda _, device: torch.device(device))
    with pytest.raises(InvalidArgumentError, match=why) as caught:
        allocate_canonical(CONFIG, [NHD, NHD], device=device, pinned=True)
    assert caught.value.argument == "pinned"
