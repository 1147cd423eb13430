"""Cache mappings: the portable pages of workers, and the reasons of caches without any."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvxfer.engine_side import EngineLayout
from kvxfer.errors import BlockIdError, DuplicateError, InvalidArgumentError, PageMappingError
from kvxfer.kvcache import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    Descriptors,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    KVCacheSpec,
    KVQuantization,
    MambaSpec,
    MLASpec,
    PageMapping,
    UniformTypeKVCacheSpecs,
    WorkerShard,
    canonicalize,
    map_caches,
    verify_mappings,
)
from kvxfer.kvcache.describer import BlockDescriber
from kvxfer.kvcache.page_box import PageBox
from kvxfer.kvcache.portable import compile_mapping, payload_boxes
from kvxfer.storage import Backend
from kvxfer.storage.portable_backend import PortableBackend
from kvxfer.testing.payloads import read_payloads
from tests.examples import examples
from tests.kvcache.test_canonical import states
from tests.kvcache.zoo_engines import (
    COPIES,
    ZOO,
    Values,
    Worker,
    WorldEngine,
    ZooGroup,
    divisors,
    engine_options,
    generators,
    named,
    page_tokens,
    plan_groups,
    start_engine,
    worlds,
)

NUM_BLOCKS, TOKENS, HEADS, DIM = 12, 8, 2, 4
NHD = "block kv token head dim"
SPEC = FullAttentionSpec(
    tokens_per_block=TOKENS, num_kv_heads=HEADS, head_dim=DIM, dtype=torch.float16
)
ONE_HEAD = replace(SPEC, num_kv_heads=1)
ALONE = WorkerShard(num_kv_heads=HEADS)
STATES = MambaSpec(tokens_per_block=64, shapes=((4, 3), (4, 2)), dtypes=(torch.float16,) * 2)


def caches_of(
    layout: str = NHD,
    *,
    names: Sequence[str] = ("layers.0",),
    spec: KVCacheSpec = SPEC,
    kernel_blocks_per_block: int = 1,
) -> CanonicalKVCaches:
    """Make a worker whose layers have tensors of one layout, with numbers in them."""
    config = KVCacheConfig(NUM_BLOCKS, (KVCacheGroup(spec, tuple(names)),))
    kv_caches = {}
    for name in names:
        own = spec.for_layer(name)
        dtype = own.cache_tensors[0].dtype
        tensor = numbered(_shape(layout, own, kernel_blocks_per_block))
        kv_caches[name] = tensor.view(dtype) if dtype.itemsize == 2 else tensor.to(dtype)
    return canonicalize(kv_caches, config, layouts=dict.fromkeys(names, layout))


def numbered(shape: Sequence[int]) -> torch.Tensor:
    return torch.arange(int(torch.Size(shape).numel()), dtype=torch.int16).view(*shape)


def _shape(layout: str, spec: KVCacheSpec, kernel_blocks_per_block: int) -> list[int]:
    sizes = {"kv": 1, **spec.cache_tensors[0].axis_sizes, "block": NUM_BLOCKS}
    sizes["block"] *= kernel_blocks_per_block
    if "token" in layout:
        sizes["token"] //= kernel_blocks_per_block
    return [sizes[axis] for axis in layout.split()]


def states_of() -> CanonicalKVCaches:
    config = KVCacheConfig(NUM_BLOCKS, (KVCacheGroup(STATES, ("layers.0",)),))
    states = [torch.zeros(NUM_BLOCKS, *shape, dtype=torch.float16) for shape in STATES.shapes]
    return canonicalize({"layers.0": states}, config)


def map_one(caches: CanonicalKVCaches, shard: WorkerShard = ALONE, **options: Any) -> PageMapping:
    (mapping,) = map_caches(caches, shard, **options)
    return mapping


def names_of(mapping: PageMapping) -> list[str]:
    return [tensor.name for tensor in mapping.page.tensors]


@pytest.mark.parametrize(
    ("names", "called"),
    [
        (("a.3.attn", "a.12.attn"), ["layers.3", "layers.12"]),
        (("first", "second"), ["first", "second"]),
        (("encoder.0", "decoder.0"), ["decoder.0", "encoder.0"]),
        (("h.03", "g.3"), ["g.3", "h.03"]),
        (("layers.0.mla2", "layers.1"), ["layers.0.mla2", "layers.1"]),
    ],
)
def test_layers_are_called_by_their_number_where_that_is_one_layer(
    names: tuple[str, ...], called: list[str]
) -> None:
    mapping = map_one(caches_of(names=names))
    assert names_of(mapping) == [f"{name}.{part}" for name in called for part in "kv"]


def test_a_layer_that_keeps_what_another_does_is_not_mapped_twice() -> None:
    tensor = torch.zeros(_shape(NHD, SPEC, 1), dtype=torch.float16)
    names = ("layers.12", "layers.3")
    config = KVCacheConfig(NUM_BLOCKS, (KVCacheGroup(SPEC, names),))
    layouts = dict.fromkeys(names, NHD)
    mapping = map_one(canonicalize(dict.fromkeys(names, tensor), config, layouts=layouts))
    assert names_of(mapping) == ["layers.3.k", "layers.3.v"]
    assert mapping.num_bytes == mapping.block_size_bytes == SPEC.page_size_bytes


def test_layers_that_are_alike_are_placed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """An event loop waits for the mapping of a peer's blocks; of 80 layers it took seconds."""
    placed: list[str] = []
    narrowed = PageBox.narrowed

    def count(box: PageBox, axis: str, start: int, stop: int) -> PageBox | None:
        placed.append(axis)
        return narrowed(box, axis, start, stop)

    monkeypatch.setattr(PageBox, "narrowed", count)
    counts = []
    for num_layers in (1, 40):
        names = [f"layers.{index}" for index in range(num_layers)]
        mapping = map_one(caches_of(names=names), tokens_per_page=2)
        assert mapping.num_bytes * 4 == mapping.block_size_bytes == num_layers * 256
        counts.append(len(placed))
    assert counts[1] == 2 * counts[0]


def unknown(**fields: Any) -> CanonicalKVCaches:
    tensor = CanonicalKVCacheTensor(torch.zeros(3, 8, dtype=torch.int8), 8)
    refs = ((CanonicalKVCacheRef(0, 8, ("layers.0",)),),)
    return CanonicalKVCaches((tensor,), refs, **fields)


def compiled(page_of: CanonicalKVCaches, **fields: Any) -> PageMapping:
    """Map the blocks of one worker to pages of another model, as row stores do."""
    boxes = [replace(box, **fields) for box in payload_boxes(caches_of().group_data_refs[0])]
    page = map_one(page_of).page
    return compile_mapping(boxes, page, tokens_per_block=TOKENS, payload_sizes=[256])


def several_heads(kept: int) -> CanonicalKVCaches:
    specs = {"layers.0": SPEC, "layers.1": replace(SPEC, num_kv_heads=kept)}
    spec = UniformTypeKVCacheSpecs(tokens_per_block=TOKENS, layer_specs=specs)
    return caches_of(names=tuple(specs), spec=spec)


PAIR = ("layers.0", "layers.1")
TWO, FOUR = (WorkerShard(num_kv_heads=heads, tp_size=2) for heads in (2, 4))
OF_TOKENS = WorkerShard(num_kv_heads=1, tp_size=2, rank=1, dcp_size=2, interleave_tokens=8)
LONG = replace(OF_TOKENS, interleave_tokens=16)
IN_FOUR: Any = {"spec": replace(SPEC, tokens_per_block=24), "kernel_blocks_per_block": 4}
UNMAPPED: list[tuple[Callable[[], object], str, str]] = [
    (lambda: compiled(caches_of(spec=replace(SPEC, head_dim=5))), "dim", "5 of"),
    (lambda: compiled(caches_of(spec=replace(SPEC, dtype=torch.bfloat16))), "dtype", "bfloat16"),
    (lambda: compiled(caches_of(names=PAIR)), "layer", "also"),
    (lambda: compiled(caches_of(), layer_name="layers.7"), "layer", "layers.7"),
    (lambda: compiled(caches_of(), encoding="for AMX"), "encoding", "for AMX"),
    (lambda: map_caches(several_heads(1), ALONE), "head", "1 in 'layers.1'"),
    # A turn of a worker is longer than a block, nothing of a page is left for rank 1, ...
    (lambda: map_caches(caches_of(spec=ONE_HEAD), LONG), "token", "16"),
    (lambda: map_caches(caches_of(spec=ONE_HEAD), OF_TOKENS, tokens_per_page=8), "token", "page"),
    (lambda: map_caches(caches_of(), ALONE, tokens_per_page=12), "token", "12 per page"),
    (lambda: map_caches(caches_of(**IN_FOUR), ALONE, tokens_per_page=8), "token", "of 6; .* 8"),
    (lambda: map_caches(states_of(), TWO, state_heads=(None, "s0")), "head", "without heads"),
    (lambda: map_caches(states_of(), OF_TOKENS, state_heads=("s0",) * 2), "token", "no shares"),
    (lambda: PortableBackend(Mock(Backend), map_caches(caches_of(), FOUR)), "head", "more shards"),
    (lambda: map_caches(unknown(group_specs=(SPEC,)), ALONE), "layout", r"bytes of \['layers.0'\]"),
]


@pytest.mark.parametrize(("call", "axis", "match"), UNMAPPED)
def test_what_cannot_be_mapped_is_refused_by_its_axis(
    call: Callable[[], object], axis: str, match: str
) -> None:
    with pytest.raises(PageMappingError, match=match) as caught:
        call()
    assert caught.value.axis == axis
    assert str(caught.value).startswith(f"pages cannot be mapped along {axis!r}: ")


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda: WorkerShard(num_kv_heads=6, tp_size=4), "tp_size"),
        (lambda: map_caches(caches_of(), replace(FOUR, dcp_size=2)), "dcp_size"),
        (lambda: map_caches(caches_of(), ALONE, num_shards=1 << 40), "num_shards"),
        (lambda: map_caches(caches_of(), ALONE, tokens_per_page=1 << 60), "tokens_per_page"),
        (lambda: map_caches(unknown(), ALONE), "caches"),
        (lambda: unknown(group_specs=(SPEC, SPEC)), "group_specs"),
        (lambda: map_one(caches_of(), axes={"k": ("token", "head", "dim")}), "axes of 'k'"),
        (lambda: map_one(caches_of(), axes={"keys": ("head", "dim", "token")}), "axes"),
        (lambda: map_one(states_of(), state_heads=(None, "head")), "state_heads[1]"),
    ],
)
def test_arguments_that_cannot_be_are_refused(call: Callable[[], object], argument: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        call()
    assert caught.value.argument == argument


@pytest.mark.parametrize("part", ["latent", "v", "state0", "state3"])
def test_parts_that_another_stage_of_a_pipeline_has_may_be_named_to_all(part: str) -> None:
    """Kimi Delta Attention has four states."""
    caches = states_of() if part == "v" else caches_of()
    assert map_one(caches, axes={part: ("head", "s1", "s0")}).page == map_one(caches).page


@pytest.mark.parametrize("parallel", [{"dcp_size": 2}, {"pcp_size": 2}, {}])
def test_what_cannot_be_mapped_is_kept_by_each_worker_for_itself(parallel: dict[str, int]) -> None:
    first = WorkerShard(num_kv_heads=1, tp_size=2, **parallel)
    mappings = [
        map_one(states_of(), replace(first, rank=rank), opaque="engine 1, NHD")
        for rank in range(first.num_workers)
    ]
    verify_mappings(mappings)
    encodings = []
    for rank, mapping in enumerate(mappings):
        (encoding,) = {tensor.encoding for tensor in mapping.page.tensors}
        assert encoding.startswith(f"engine 1, NHD, worker {rank} of {first.num_workers} (")
        assert "state0 without heads" in encoding
        encodings.append(encoding)
        assert mapping.num_bytes == mapping.block_size_bytes == STATES.page_size_bytes
        assert mapping.writes(0)
        assert mapping.writes(1)
    assert len(set(encodings)) == first.num_workers
    for caches in (unknown(), unknown(group_specs=(SPEC,)), replace(caches_of(), group_specs=())):
        (tensor,) = map_one(caches, opaque="engine 1").page.tensors
        assert tensor.name == "layers.0.opaque0"
        why = "no spec" if caches.group_data_refs[0][0].boxes else "named axes"
        assert why in tensor.encoding


def test_opaque_pages_of_scaled_elements_are_those_of_this_scaling_only() -> None:
    scalings = KVQuantization.NONE, KVQuantization.PER_TENSOR
    specs = [replace(SPEC, dtype=torch.int8, quantization=scaling) for scaling in scalings]
    pages = [map_one(unknown(group_specs=(each,)), opaque="engine 1").page for each in specs]
    assert pages[0] != pages[1]


def test_opaque_rows_of_several_layers_are_those_of_these_layers_only() -> None:
    stages = []
    for names in (("layers.0", "layers.1"), ("layers.2", "layers.3")):
        rows = torch.zeros(NUM_BLOCKS, 2, STATES.page_size_bytes // 2, dtype=torch.float16)
        kv_caches = {
            name: [
                part.view(NUM_BLOCKS, *shape)
                for part, shape in zip(
                    rows[:, place].tensor_split([12], 1), STATES.shapes, strict=True
                )
            ]
            for place, name in enumerate(names)
        }
        caches = canonicalize(kv_caches, KVCacheConfig(NUM_BLOCKS, (KVCacheGroup(STATES, names),)))
        assert [ref.layer_names for ref in caches.group_data_refs[0]] == [names]
        stages.append(map_one(caches, TWO, opaque="engine 1").page)
    assert stages[0] != stages[1]


def test_opaque_pages_of_workers_that_share_tokens_are_of_those_that_share_them_alike() -> None:
    whole = WorkerShard(num_kv_heads=1, tp_size=4)
    shards = [
        whole,
        replace(whole, tp_size=2, pcp_size=2),
        replace(whole, dcp_size=4),
        replace(whole, dcp_size=4, interleave_tokens=2),
    ]
    caches = unknown(group_specs=(SPEC,))
    assert len({map_one(caches, each, opaque="engine 1").page for each in shards}) == len(shards)


def test_a_group_that_can_be_mapped_is_so_beside_one_that_cannot() -> None:
    groups = (KVCacheGroup(SPEC, ("layers.0",)), KVCacheGroup(STATES, ("layers.1",)))
    kv_caches: dict[str, Any] = {
        "layers.0": torch.zeros(_shape(NHD, SPEC, 1), dtype=torch.float16),
        "layers.1": [torch.zeros(NUM_BLOCKS, *s, dtype=torch.float16) for s in STATES.shapes],
    }
    caches = canonicalize(kv_caches, KVCacheConfig(NUM_BLOCKS, groups), layouts={"layers.0": NHD})
    attention, states = map_caches(caches, FOUR, opaque="engine 1")
    assert [tensor.encoding for tensor in attention.page.tensors] == ["", ""]
    assert all(tensor.encoding for tensor in states.page.tensors)


def test_parts_may_have_another_order_if_heads_are_first() -> None:
    turned = map_one(caches_of("block kv head token dim"), axes={"k": ("head", "dim", "token")})
    keys, values = turned.page.tensors[:2]
    assert (keys.axes, values.axes) == (("head", "dim", "token"), ("head", "token", "dim"))


CACHES = caches_of("kv block token head dim")
CACHE = numbered(_shape("kv block token head dim", SPEC, 1))


def describer(**options: Any) -> BlockDescriber:
    return BlockDescriber(CACHES, mappings=map_caches(CACHES, ALONE, **options))


def reference(block_ids: list[int], tokens_per_page: int) -> list[bytes]:
    tokens = CACHE[:, block_ids].permute(0, 3, 1, 2, 4).numpy().reshape(2, HEADS, -1, DIM)
    starts = range(0, tokens.shape[2], tokens_per_page)
    return [tokens[:, :, start : start + tokens_per_page].tobytes() for start in starts]


@pytest.mark.parametrize("num_pages", [5, 6, 7, 8])
def test_the_last_block_may_have_fewer_pages_than_it_could(num_pages: int) -> None:
    pages = describer(tokens_per_page=2).describe(0, [9, 4], num_pages=num_pages)
    assert read_payloads(pages) == reference([9, 4], 2)[:num_pages]
    assert len(pages) == int(pages.block_offsets[-1])
    later = describer(tokens_per_page=16).describe(0, [2, 1], first_block_index=6)
    assert read_payloads(later) == reference([2, 1], 16), "pages begin where they are stored"


@pytest.mark.parametrize(
    ("tokens_per_page", "ids", "options", "match"),
    [
        *((2, [9, 4], {"num_pages": n}, f"num_pages is {n}") for n in (0, 4, 9)),
        *((16, [9, 4], {"num_pages": n}, f"num_pages is {n}") for n in (0, 2)),
        *((16, list(range(n)), {}, f"block_ids is {n}; .* a multiple of 2") for n in (1, 3, 5)),
        (16, [2, 1], {"first_block_index": 3}, "first_block_index is 3; .* the blocks of a page"),
        (8, [], {}, "block_ids"),
    ],
)
def test_blocks_that_are_not_whole_pages_are_refused(
    tokens_per_page: int, ids: list[int], options: dict[str, int], match: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=match):
        describer(tokens_per_page=tokens_per_page).describe(0, ids, **options)


def test_blocks_are_checked_as_they_are_without_mappings() -> None:
    with pytest.raises(BlockIdError):
        describer().describe(0, [NUM_BLOCKS])
    with pytest.raises(DuplicateError):
        describer().describe(0, [1, 1])
    mappings = map_caches(CACHES, ALONE)
    with pytest.raises(InvalidArgumentError, match="mappings"):
        BlockDescriber(CACHES, mappings=[*mappings, *mappings])
    with pytest.raises(InvalidArgumentError, match="blocks_per_chunk"):
        BlockDescriber(CACHES, mappings=mappings, blocks_per_chunk=2)
    with pytest.raises(InvalidArgumentError, match=r"mappings\[0\].block_size_bytes is 128"):
        BlockDescriber(CACHES, mappings=map_caches(caches_of(spec=ONE_HEAD), TWO))


MLA = MLASpec(tokens_per_block=TOKENS, head_dim=DIM, dtype=torch.float16)
PARALLEL = {
    "heads": WorkerShard(num_kv_heads=4, tp_size=4),
    "replicated": WorkerShard(num_kv_heads=2, tp_size=8),
    "tokens": WorkerShard(num_kv_heads=1, tp_size=4, dcp_size=2, pcp_size=2, interleave_tokens=4),
    "latents": WorkerShard(num_kv_heads=1, tp_size=4),
}


def workers(kind: str, *, spec: KVCacheSpec = ONE_HEAD, **options: Any) -> list[PageMapping]:
    caches = caches_of("block token dim", spec=MLA) if kind == "latents" else caches_of(spec=spec)
    shard = PARALLEL[kind]
    ranks = range(shard.num_workers)
    return [map_one(caches, replace(shard, rank=rank), **options) for rank in ranks]


@pytest.mark.parametrize("kind", PARALLEL)
def test_all_workers_together_are_the_page_and_a_missing_or_another_one_is_found(kind: str) -> None:
    mappings = workers(kind)
    verify_mappings(mappings)
    for rank in range(len(mappings)):
        with pytest.raises(PageMappingError, match="bytes of all workers") as caught:
            verify_mappings(mappings[:rank] + mappings[rank + 1 :])
        assert caught.value.axis == "head"
        doubled = list(mappings)
        doubled[rank] = mappings[rank - 1]
        for wrong in (doubled, [*mappings, mappings[rank]]):
            with pytest.raises(PageMappingError):
                verify_mappings(wrong)
    if kind in ("replicated", "latents"):
        turns: list[dict[str, Any]] = [{"writer_index": 1}, {"num_writers": 1, "writer_index": 0}]
        for fields in turns:
            with pytest.raises(PageMappingError):
                verify_mappings([replace(mappings[0], **fields), *mappings[1:]])


@pytest.mark.parametrize("kind", PARALLEL)
@pytest.mark.parametrize("field", ["page_offsets", "local_offsets", "lengths", "blocks"])
@pytest.mark.parametrize("by", [-1, 1, 8, 10**6])
def test_a_corrupted_fragment_is_found(kind: str, field: str, by: int) -> None:
    mappings = workers(kind)
    fragments = mappings[1].pages[0]
    for index in {0, len(fragments.lengths) // 2, len(fragments.lengths) - 1}:
        values = getattr(fragments, field).copy()
        values[index] += by
        broken = replace(fragments, **{field: values})
        wrong = [mappings[0], replace(mappings[1], pages=(broken,)), *mappings[2:]]
        with pytest.raises(PageMappingError):
            verify_mappings(wrong)


def test_workers_with_other_pages_or_blocks_are_found() -> None:
    ours, theirs = workers("heads"), workers("heads", tokens_per_page=4)
    for wrong in ([*ours[:3], theirs[3]], [*ours, theirs[3]]):
        with pytest.raises(PageMappingError):
            verify_mappings(wrong)
    short = workers("heads", spec=replace(ONE_HEAD, tokens_per_block=4))
    with pytest.raises(PageMappingError, match=r"\[1, 2\] pages per block") as caught:
        verify_mappings([*theirs[:3], short[3]])
    assert caught.value.axis == "token"


class StateWorker(Worker):
    """Worker that keeps its share of states, `(layer, block, ...)` each, divided along an axis."""

    def __init__(
        self,
        whole: Sequence[Values],
        head_axes: Sequence[int],
        shard: WorkerShard,
        block_ids: Sequence[int],
        *,
        is_joined: bool,
    ) -> None:
        self.shard, self._block_ids = shard, list(block_ids)
        self._mine = [
            np.array_split(each, shard.tp_size, head + 2)[shard.rank]
            for each, head in zip(whole, head_axes, strict=True)
        ]
        num_blocks, layer_names = 1 + max(block_ids), ("layers.9.mixer", "layers.10.mixer")
        shapes = tuple(each.shape[2:] for each in self._mine)
        spec = MambaSpec(tokens_per_block=8, shapes=shapes, dtypes=(torch.float16, torch.float32))
        if is_joined:  # one tensor of each state for all layers
            slots = [
                torch.zeros((2, num_blocks, *shape), dtype=dtype)
                for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
            ]
            layers = [[slot[layer] for slot in slots] for layer in range(2)]
        else:
            spec = replace(spec, page_size_padded=spec.page_size_bytes + 16)
            pages = torch.zeros((2, num_blocks * spec.page_size_bytes), dtype=torch.int8)
            layers = [states(spec, page.clone(), num_blocks=num_blocks) for page in pages]
        config = plan_groups([ZooGroup(spec, (0, 1), layer_names)], num_blocks)
        self.caches = canonicalize(dict(zip(layer_names, layers, strict=True)), config)
        self._tensors = [tensor for layer in layers for tensor in layer]

    def contents(self) -> list[Values]:
        contents = []
        for mine in (each[layer] for layer in range(2) for each in self._mine):
            content = np.zeros((1 + max(self._block_ids), *mine.shape[1:]), mine.dtype)
            content[self._block_ids] = mine
            contents.append(content)
        return contents


def part_of_pages(mapping: PageMapping, pages: NDArray[np.uint8]) -> Descriptors:
    """List the pieces of each portable page that a worker holds."""
    num_pages, page_bytes = pages.shape
    of_block = mapping.pages
    chosen = [of_block[index % len(of_block)] for index in range(num_pages)]
    starts = [pages.ctypes.data + index * page_bytes for index in range(num_pages)]
    counts = [len(each.lengths) for each in chosen]
    return Descriptors(
        addresses=np.concatenate(
            [
                (start + each.page_offsets).astype(np.uint64)
                for start, each in zip(starts, chosen, strict=True)
            ]
        ),
        lengths=np.concatenate([each.lengths for each in chosen]).astype(np.uint64),
        block_offsets=np.concatenate(([0], np.cumsum(counts))),
        payload_starts=np.zeros(num_pages, np.int64),
        device=torch.device("cpu"),
        owners=(pages,),
    )


@dataclass(frozen=True, slots=True)
class MappedEngine:
    engine: WorldEngine
    mappings: list[tuple[PageMapping, ...]]

    @classmethod
    def of(cls, engine: WorldEngine, **options: Any) -> "MappedEngine":
        return cls(engine, [map_caches(w.caches, w.shard, **options) for w in engine.workers])

    def of_group(self, group: int) -> list[PageMapping]:
        return [each[group] for each in self.mappings]

    def write(self, group: int, num_pages: int) -> NDArray[np.uint8]:
        """Store pages from the workers, each page from the worker whose turn it is."""
        pages = np.zeros((num_pages, self.mappings[0][group].page.num_bytes), np.uint8)
        for mappings, blocks in zip(self.mappings, self._describe(group), strict=True):
            turns = [page for page in range(num_pages) if mappings[group].writes(page)]
            if turns:
                held = part_of_pages(mappings[group], pages)
                COPIES.copy(blocks.take(turns), held.take(turns))
        return pages

    def read(self, group: int, pages: NDArray[np.uint8]) -> None:
        for mappings, blocks in zip(self.mappings, self._describe(group), strict=True):
            COPIES.copy(part_of_pages(mappings[group], pages), blocks)

    def _describe(self, group: int) -> list[Descriptors]:
        return [
            BlockDescriber(worker.caches, mappings=mappings).describe(
                group, self.engine.block_ids[group]
            )
            for worker, mappings in zip(self.engine.workers, self.mappings, strict=True)
        ]


def check_pages(engine: MappedEngine, expected: Sequence[NDArray[np.uint8]]) -> None:
    workers = engine.engine.workers
    for worker in workers:
        worker.fill()
    for group, pages in enumerate(expected):
        verify_mappings(engine.of_group(group))
        np.testing.assert_array_equal(engine.write(group, len(pages)), pages)
    for worker in workers:
        worker.clear()
    for group, pages in enumerate(expected):
        engine.read(group, pages)
    for worker in workers:
        worker.check()


@pytest.mark.parametrize("entry", ZOO, ids=named)
@examples(6)
@given(data=st.data())
def test_the_portable_pages_of_a_model_are_those_of_plain_indexing(
    entry: EngineLayout, data: st.DataObject
) -> None:
    world = data.draw(worlds(entry))
    options = data.draw(engine_options(world, entry))
    tokens_per_page = data.draw(page_tokens(world, options))
    num_shards = data.draw(st.sampled_from(divisors(world.num_heads)[:3]))
    engine = MappedEngine.of(
        start_engine(data.draw(generators()), world, options),
        tokens_per_page=tokens_per_page,
        num_shards=num_shards,
    )
    groups = range(len(world.positions))
    for group in groups:
        names = list(world.tensors(group))
        for mapping in engine.of_group(group):
            assert [tensor.name for tensor in mapping.page.shards[0]] == names
    expected = [world.pages(group, tokens_per_page, num_shards) for group in groups]
    check_pages(engine, expected)


@pytest.mark.parametrize("is_joined", [False, True], ids=["pages", "tensors of all layers"])
@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("head_axes", list(product((0, 1), (0, 2))))
def test_the_portable_pages_of_states_are_those_of_plain_indexing(
    head_axes: tuple[int, int], tp_size: int, *, is_joined: bool
) -> None:
    rng, block_ids = np.random.default_rng(0), [5, 1, 4]
    whole = [
        rng.integers(-100, 100, (2, len(block_ids), *shape)).astype(kind)
        for shape, kind in (((4, 8), np.int16), ((8, 2, 4), np.int32))
    ]
    shard = WorkerShard(num_kv_heads=4, tp_size=tp_size)
    workers: list[Worker] = [
        StateWorker(whole, head_axes, replace(shard, rank=rank), block_ids, is_joined=is_joined)
        for rank in range(tp_size)
    ]
    state_heads = [f"s{axis}" for axis in head_axes]
    engine = MappedEngine.of(WorldEngine([block_ids], workers), state_heads=state_heads)
    pages = [
        b"".join(
            np.moveaxis(state[layer, block], head, 0).tobytes()
            for layer in range(2)
            for state, head in zip(whole, head_axes, strict=True)
        )
        for block in range(len(block_ids))
    ]
    expected = np.frombuffer(b"".join(pages), np.uint8).reshape(len(block_ids), -1)
    check_pages(engine, [expected])
