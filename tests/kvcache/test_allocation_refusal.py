"""Every condition of a canonical allocation, refused with the values that clash."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from kvxfer.errors import InvalidArgumentError
from kvxfer.kvcache.allocation import (
    AllocationCondition,
    AllocationRefusal,
    AllocationRefusedError,
    AttentionBackend,
    AttentionLayout,
    allocate_canonical,
    why_not_canonical,
)
from kvxfer.kvcache.config import KVCacheConfig, KVCacheGroup
from kvxfer.kvcache.spec import (
    AttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

NHD = AttentionLayout("kv block token head dim", "block layer kv token head dim")
HND = AttentionLayout("kv block token head dim", "block layer kv head token dim")
SIZES: dict[str, Any] = {
    "tokens_per_block": 16,
    "num_kv_heads": 2,
    "head_dim": 8,
    "dtype": torch.float16,
}
FULL = FullAttentionSpec(**SIZES)
SLIDING = SlidingWindowSpec(**SIZES, sliding_window=64)
PAGE = FULL.page_size_bytes
GROUPS = (KVCacheGroup(FULL, ("a", "b")), KVCacheGroup(SLIDING, ("c",)))
CONFIG = KVCacheConfig(5, GROUPS, (("a", "c"), ("b",)), (5 * PAGE, 5 * PAGE))
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


def config_of(**changes: Any) -> KVCacheConfig:
    return replace(CONFIG, **changes)


def only_refusal(
    config: KVCacheConfig, backends: list[AttentionBackend] | None = None, **options: Any
) -> AllocationRefusal:
    """Get the only reason, and check that the error has it, too."""
    backends = backends or [NHD] * len(config.groups)
    (refusal,) = why_not_canonical(config, backends, **options)
    with pytest.raises(AllocationRefusedError) as caught:
        allocate_canonical(config, backends, **options)
    assert caught.value.refusals == (refusal,)
    assert str(caught.value) == str(refusal)
    return refusal


def test_nothing_stands_against_a_model_of_two_groups() -> None:
    assert why_not_canonical(CONFIG, [NHD, NHD]) == ()


def test_the_connector_must_want_it() -> None:
    refusal = only_refusal(CONFIG, wants_cross_layer_blocks=False)
    assert refusal.condition is AllocationCondition.CROSS_LAYER_WANTED
    assert str(refusal) == "the connector wants blocks of all layers: found no, expected yes"


def test_the_connector_must_support_several_groups_when_there_are_several() -> None:
    refusal = only_refusal(CONFIG, supports_hybrid_groups=False)
    assert refusal.condition is AllocationCondition.HYBRID_SUPPORTED
    assert str(refusal) == (
        "the connector supports several KV-cache groups: found 2 groups, expected 1 group"
    )
    alone = KVCacheConfig(5, GROUPS[:1])
    assert why_not_canonical(alone, [NHD], supports_hybrid_groups=False) == ()


def test_there_must_be_a_group() -> None:
    with pytest.raises(InvalidArgumentError, match="at least one KVCacheGroup") as caught:
        config_of(groups=(), shared_tensors=(), shared_tensor_sizes_bytes=())
    assert (caught.value.argument, caught.value.value) == ("groups", ())


def test_every_layer_must_be_attention() -> None:
    groups = (GROUPS[0], KVCacheGroup(MAMBA, ("c",)))
    refusal = only_refusal(config_of(groups=groups))
    assert (refusal.condition, refusal.group) == (AllocationCondition.ATTENTION, 1)
    assert str(refusal) == (
        "every layer is an attention layer (group 1, layer 'c'): "
        "found MambaSpec, expected an AttentionSpec"
    )


def test_every_layer_of_a_group_with_its_own_specs_must_be_attention() -> None:
    specs = UniformTypeKVCacheSpecs(tokens_per_block=16, layer_specs={"a": MAMBA, "b": MAMBA})
    refusals = why_not_canonical(KVCacheConfig(5, (KVCacheGroup(specs, ("a", "b")),)), [NHD])
    assert [(r.condition, r.layer_name) for r in refusals] == [
        (AllocationCondition.ATTENTION, "a"),
        (AllocationCondition.ATTENTION, "b"),
    ]


def test_page_sizes_must_be_equal() -> None:
    sliding = replace(SLIDING, num_kv_heads=4)
    refusal = only_refusal(config_of(groups=(GROUPS[0], KVCacheGroup(sliding, ("c",)))))
    assert refusal.condition is AllocationCondition.ONE_PAGE_SIZE
    assert (refusal.group, refusal.layer_name, refusal.found) == (1, "c", 2 * PAGE)
    assert str(refusal) == (
        "all pages have one size, in bytes (group 1, layer 'c'): "
        f"found {2 * PAGE}, expected {PAGE} like layer 'a'"
    )


def test_padding_makes_page_sizes_equal() -> None:
    narrow = replace(SLIDING, head_dim=4, page_size_padded=PAGE)
    config = config_of(groups=(GROUPS[0], KVCacheGroup(narrow, ("c",))))
    assert why_not_canonical(config, [NHD, NHD]) == ()


def test_several_groups_must_share_tensors() -> None:
    refusal = only_refusal(config_of(shared_tensors=(), shared_tensor_sizes_bytes=()))
    assert refusal.condition is AllocationCondition.SHARED_TENSORS
    assert str(refusal) == (
        "the config says which layers share a tensor: found no shared tensor, expected at least one"
    )


def test_every_layer_must_have_a_tensor() -> None:
    refusal = only_refusal(config_of(shared_tensors=(("a",), ("b",))))
    assert refusal.condition is AllocationCondition.SHARED_TENSORS
    assert str(refusal) == (
        "the config says which layers share a tensor (group 1, layer 'c'): "
        "found no tensor, expected one"
    )


def test_layers_of_one_group_that_share_a_tensor_must_be_alike() -> None:
    narrow = replace(FULL, num_kv_heads=4, head_dim=4)
    specs = UniformTypeKVCacheSpecs(tokens_per_block=16, layer_specs={"a": FULL, "b": narrow})
    config = KVCacheConfig(5, (KVCacheGroup(specs, ("a", "b")),), (("a", "b"),))
    refusal = only_refusal(config)
    assert refusal.condition is AllocationCondition.SHARED_TENSORS
    assert (refusal.group, refusal.layer_name, refusal.tensor_index) == (0, "b", 0)
    assert (refusal.found, refusal.expected) == (
        narrow,
        f"{FULL}, like layer 'a' in the same tensor",
    )
    assert why_not_canonical(replace(config, shared_tensors=(("a",), ("b",))), [NHD]) == ()


def test_tensors_must_have_one_page_for_each_block() -> None:
    refusal = only_refusal(config_of(shared_tensor_sizes_bytes=(5 * PAGE, 6 * PAGE)))
    assert refusal.condition is AllocationCondition.TENSOR_SIZE
    assert (refusal.tensor_index, refusal.found) == (1, 6 * PAGE)
    assert str(refusal) == (
        "a shared tensor has one page for each block, in bytes (tensor 1): "
        f"found {6 * PAGE}, expected {5 * PAGE}, which is 5 pages of {PAGE}"
    )


def test_the_backend_must_take_a_layer_dimension() -> None:
    refusal = only_refusal(CONFIG, [NHD, AttentionLayout(NHD.shape, None)])
    assert refusal.condition is AllocationCondition.LAYER_DIMENSION
    assert str(refusal) == (
        "the attention backend takes a layer dimension (group 1): "
        "found none for 'kv block token head dim', expected a stride order"
    )


def test_the_backends_must_agree() -> None:
    refusal = only_refusal(CONFIG, [NHD, HND])
    assert refusal.condition is AllocationCondition.ONE_ORDER
    assert str(refusal) == (
        "all attention backends order memory alike (group 1): found "
        "'block layer kv head token dim', expected 'block layer kv token head dim' like group 0"
    )


def test_backends_of_other_shapes_agree_when_they_order_memory_alike() -> None:
    blocks_first = AttentionLayout("block kv token head dim", NHD.memory)
    assert blocks_first.stride_order() != NHD.stride_order()
    assert why_not_canonical(CONFIG, [NHD, blocks_first]) == ()


def test_blocks_must_be_outermost() -> None:
    layers_first = AttentionLayout(NHD.shape, "layer block kv token head dim")
    refusal = only_refusal(KVCacheConfig(5, GROUPS[:1]), [layers_first])
    assert refusal.condition is AllocationCondition.BLOCK_OUTERMOST
    assert str(refusal) == (
        "blocks are outermost in memory (group 0): "
        "found 'layer block kv token head dim', expected 'block' first"
    )


def test_kernel_blocks_must_divide_a_block() -> None:
    refusal = only_refusal(CONFIG, tokens_per_kernel_block=[16, 6])
    assert refusal.condition is AllocationCondition.KERNEL_BLOCKS
    assert str(refusal) == (
        "kernel blocks divide a block and its page (group 1): "
        "found 6 tokens, expected a divisor of 16 tokens"
    )


def test_kernel_blocks_must_divide_a_padded_page() -> None:
    spec = replace(FULL, page_size_padded=PAGE + 8)
    config = KVCacheConfig(5, (KVCacheGroup(spec, ("a",)),))
    refusal = only_refusal(config, tokens_per_kernel_block=[2])
    assert refusal.condition is AllocationCondition.KERNEL_BLOCKS
    assert str(refusal) == (
        "kernel blocks divide a block and its page (group 0, layer 'a'): found a page of "
        f"{PAGE + 8} bytes, expected 8 kernel blocks of whole torch.float16 elements"
    )
    assert why_not_canonical(config, [NHD], tokens_per_kernel_block=[4]) == ()


@pytest.mark.parametrize("shape", [(1, 16, 31), (2, 8, 32), (1, 16, 32, 1)], ids=str)
def test_the_backends_shape_must_have_the_elements_of_a_page(shape: tuple[int, ...]) -> None:
    refusal = only_refusal(KVCacheConfig(5, GROUPS[1:]), [Odd(shape=shape)])
    assert refusal.condition is AllocationCondition.CACHE_SHAPE
    assert str(refusal) == (
        "the attention backend's shape has the elements of a page (group 0, layer 'c'): "
        f"found {shape} as 'block token dim' for 1 kernel blocks, expected 512 elements"
    )


def test_every_reason_is_listed() -> None:
    wide = replace(SLIDING, num_kv_heads=4)
    config = config_of(
        groups=(GROUPS[0], KVCacheGroup(wide, ("c",)), KVCacheGroup(MAMBA, ("d",))),
        shared_tensor_sizes_bytes=(5 * PAGE, 1),
    )
    backends = [NHD, AttentionLayout(NHD.shape, "layer block kv token head dim"), HND]
    refusals = why_not_canonical(
        config,
        backends,
        tokens_per_kernel_block=[16, 16, 5],
        wants_cross_layer_blocks=False,
        supports_hybrid_groups=False,
    )
    assert [refusal.condition.name for refusal in refusals] == [
        "CROSS_LAYER_WANTED",
        "HYBRID_SUPPORTED",
        "ONE_PAGE_SIZE",
        "ATTENTION",
        "SHARED_TENSORS",
        "TENSOR_SIZE",
        "ONE_ORDER",
        "BLOCK_OUTERMOST",
        "ONE_ORDER",
        "KERNEL_BLOCKS",
    ]


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"backends": [NHD]}, "backends"),
        ({"tokens_per_kernel_block": [16]}, "tokens_per_kernel_block"),
        ({"tokens_per_kernel_block": [16, 0]}, r"tokens_per_kernel_block\[1\]"),
        ({"config": GROUPS}, "config"),
        ({"backends": [Odd(order=(1, 0, 0, 2)), NHD]}, "stride_order"),
        ({"backends": [AttentionLayout("block token dim state", None), NHD]}, "shape"),
    ],
    ids=str,
)
def test_misuse_is_no_refusal(options: dict[str, Any], argument: str) -> None:
    arguments: dict[str, Any] = {"config": CONFIG, "backends": [NHD, NHD]}
    with pytest.raises(InvalidArgumentError, match=argument):
        why_not_canonical(**arguments | options)


def test_a_layout_has_the_same_axes_in_shape_and_memory() -> None:
    with pytest.raises(InvalidArgumentError, match="memory"):
        AttentionLayout("block kv token head dim", "block layer kv token head")


@pytest.mark.parametrize(("device", "why"), [("cpu", "CUDA"), ("meta", "host memory")])
def test_memory_that_cannot_be_pinned_is_refused(
    device: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InvalidArgumentError, match=why) as caught:
        allocate_canonical(CONFIG, [NHD, NHD], device=device, pinned=True)
    assert caught.value.argument == "pinned"
