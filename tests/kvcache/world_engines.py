"""Engines that keep a world in the memory of their workers, and map it to portable pages."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvxfer.copy_engine.cpu import CPUCopyEngine
from kvxfer.engine_side import EngineLayout
from kvxfer.kvcache.allocation import allocate_canonical
from kvxfer.kvcache.canonical import CanonicalKVCaches, canonicalize
from kvxfer.kvcache.describer import BlockDescriber
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.kvcache.portable import PageMapping, WorkerShard, map_caches
from kvxfer.kvcache.spec import MambaSpec
from tests.kvcache.engine_views import states
from tests.kvcache.page_worlds import Values, World
from tests.kvcache.zoo_engines import (
    INTEGERS,
    AttentionEngine,
    ZooGroup,
    plan_groups,
    with_kernel_blocks,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Plan of an engine that keeps a world."""

    entry: EngineLayout
    shard: WorkerShard
    tokens_per_block: int
    kernel_blocks_per_block: int = 1
    padding_factor: int = 0
    prefix: str = "model.layers"
    allocate: bool = False

    @property
    def tokens_per_kernel_block(self) -> int:
        """Count the tokens that are one piece in every layout."""
        slots = "block*token" in self.entry.memory
        return 1 if slots else self.tokens_per_block // self.kernel_blocks_per_block

    @property
    def span(self) -> int:
        """Count the tokens of a block of all workers."""
        return self.tokens_per_block * self.shard.num_token_shares

    def can_be_mapped(self, tokens_per_page: int) -> bool:
        """Whether each worker's part of a page is whole kernel blocks, or equal parts of them."""
        if tokens_per_page % self.span == 0:
            return True
        shares, turn = self.shard.num_token_shares, self.shard.interleave_tokens
        if self.span % tokens_per_page or (shares > 1 and tokens_per_page % (shares * turn)):
            return False
        mine, kernel = tokens_per_page // shares, self.tokens_per_kernel_block
        return mine % kernel == 0 or kernel % mine == 0


class Worker:
    """Worker of an engine, with zeros in its caches."""

    shard: WorkerShard
    caches: CanonicalKVCaches
    _tensors: list[torch.Tensor]

    def contents(self) -> list[Values]:
        """Compute each tensor's values with every block in its place, by plain indexing."""
        raise NotImplementedError

    def fill(self) -> None:
        """Write the world as the engine would."""
        for tensor, content in zip(self._tensors, self.contents(), strict=True):
            as_integers(tensor).copy_(torch.from_numpy(content))

    def clear(self) -> None:
        """Write zeros to all of the memory."""
        for tensor in self._tensors:
            torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).zero_()

    def check(self) -> None:
        """Check that every tensor holds the world as the engine would write it, and no more."""
        used: dict[int, int] = {}
        for tensor, content in zip(self._tensors, self.contents(), strict=True):
            np.testing.assert_array_equal(as_integers(tensor).numpy(), content)
            storage = tensor.untyped_storage()
            count = np.count_nonzero(np.ascontiguousarray(content).view(np.uint8))
            used[storage.data_ptr()] = used.get(storage.data_ptr(), 0) + int(count)
        for tensor in self._tensors:
            storage = tensor.untyped_storage()
            found = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
            assert np.count_nonzero(found) == used[storage.data_ptr()], "padding was written"


class AttentionWorker(Worker):
    """Worker that keeps a part of a `World`."""

    def __init__(
        self,
        world: World,
        options: EngineOptions,
        rank: int,
        block_ids: Sequence[Sequence[int]],
        num_blocks: int,
    ) -> None:
        self.shard = replace(options.shard, rank=rank)
        self._world, self._options, self._block_ids = world, options, block_ids
        self._num_heads = max(1, world.num_heads // self.shard.tp_size)
        spec = world.spec(
            options.tokens_per_block, self._num_heads, padding_factor=options.padding_factor
        )
        cut = options.kernel_blocks_per_block > 1
        entry = with_kernel_blocks(options.entry) if cut else options.entry
        self._engine = AttentionEngine(
            entry,
            [
                ZooGroup(spec, positions, world.layer_names(group, options.prefix))
                for group, positions in enumerate(world.positions)
            ],
            num_blocks=num_blocks,
            kernel_blocks_per_block=options.kernel_blocks_per_block,
        )
        config = self._engine.config
        if not options.allocate:
            layouts = self._engine.layouts
            self.caches = canonicalize(self._engine.kv_caches, config, layouts=layouts)
            self._tensors = list(self._engine.tensors.values())
            return
        layout = options.entry.attention_layout
        assert layout is not None
        allocation = allocate_canonical(
            config,
            [layout] * len(config.groups),
            tokens_per_kernel_block=[self._engine.sizes["token"]] * len(config.groups),
        )
        self.caches = allocation.caches
        self._tensors = [allocation.kv_caches[names[0]] for names in config.shared_tensors]

    def contents(self) -> list[Values]:
        """Compute each tensor's values with every block in its place, by plain indexing."""
        pool = self._pool()
        if not self._options.allocate:
            return [self._content(pool, index) for index in self._engine.tensors]
        for index, tensor in self._engine.tensors.items():
            as_integers(tensor).copy_(torch.from_numpy(self._content(pool, index)))
        config = self._engine.config
        views = [self._engine.layer_view(names[0]) for names in config.shared_tensors]
        return [as_integers(view).numpy() for view in views]

    def _content(self, pool: Values, index: tuple[int, ...]) -> Values:
        """Select one registered tensor's part of `(position, block, width, head, token)`."""
        engine = self._engine
        outside = (*engine.entry.allocations.split(), *engine.steps)
        at: dict[str, Any] = dict(zip(outside, index, strict=True))
        for place, axis in enumerate(engine.shape):
            shape = [-1 if other == place else 1 for other in range(len(engine.shape))]
            at[axis] = np.arange(engine.sizes[axis]).reshape(shape)
        content: Values = pool[
            at.get("layer", 0),
            at["block"],
            at.get("kv", 0) * engine.sizes["dim"] + at["dim"],
            at.get("head", 0),
            at.get("kernel", 0) * engine.sizes["token"] + at.get("token", 0),
        ]
        return content.reshape(engine.tensors[index].shape)

    def _pool(self) -> Values:
        """Compute this worker's part, `(position, block, width, head, token)`, zero elsewhere."""
        world, tokens = self._world, self._options.tokens_per_block
        first_head = self.shard.rank % self.shard.tp_size * world.num_heads // self.shard.tp_size
        heads = slice(first_head, first_head + self._num_heads)
        mine = [t for t in range(world.num_tokens) if self._keeps(t)]
        pool = np.zeros(
            (
                self._engine.sizes["layer"],
                self._engine.config.num_blocks,
                sum(width for _, width in world.parts),
                self._num_heads,
                tokens,
            ),
            world.dtype,
        )
        for positions, values, ids in zip(
            world.positions, world.values, self._block_ids, strict=True
        ):
            for position, layer in zip(positions, values, strict=True):
                for index, block_id in enumerate(ids):
                    chosen = mine[index * tokens : (index + 1) * tokens]
                    pool[position, block_id] = layer[:, heads][..., chosen]
        return pool

    def _keeps(self, token: int) -> bool:
        """Whether this worker keeps a token, by vLLM's distribution."""
        shard = self.shard
        pcp_rank, dcp_rank = shard.rank // shard.tp_size, shard.rank % shard.dcp_size
        turn = token // shard.interleave_tokens % (shard.pcp_size * shard.dcp_size)
        return turn == pcp_rank * shard.dcp_size + dcp_rank


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
        """Compute each tensor's values with every block in its place, by plain indexing."""
        contents = []
        for mine in (each[layer] for layer in range(2) for each in self._mine):
            content = np.zeros((1 + max(self._block_ids), *mine.shape[1:]), mine.dtype)
            content[self._block_ids] = mine
            contents.append(content)
        return contents


@dataclass(frozen=True, slots=True)
class WorldEngine:
    """Engine: all of its workers."""

    block_ids: list[list[int]]
    workers: list[Worker]


def start_engine(rng: np.random.Generator, world: World, options: EngineOptions) -> WorldEngine:
    """Start all workers of an engine; its blocks are in any order, and block 0 is never used."""
    per_group = world.num_tokens // options.span
    num_blocks = 2 + int(rng.integers(3)) + per_group * len(world.positions)
    ids = (1 + rng.permutation(num_blocks - 1))[: per_group * len(world.positions)]
    block_ids = ids.reshape(len(world.positions), per_group).tolist()
    workers: list[Worker] = [
        AttentionWorker(world, options, rank, block_ids, num_blocks)
        for rank in range(options.shard.num_workers)
    ]
    return WorldEngine(block_ids, workers)


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """View memory as integers."""
    return tensor.view(INTEGERS[tensor.element_size()])


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
    """Engine with the mappings of its workers."""

    engine: WorldEngine
    mappings: list[tuple[PageMapping, ...]]

    @classmethod
    def of(cls, engine: WorldEngine, **options: Any) -> "MappedEngine":
        """Map the caches of every worker; options are those of `map_caches`."""
        return cls(engine, [map_caches(w.caches, w.shard, **options) for w in engine.workers])

    def of_group(self, group: int) -> list[PageMapping]:
        """List the mappings of a group, by rank."""
        return [each[group] for each in self.mappings]

    def write(self, group: int, num_pages: int, copies: CPUCopyEngine) -> NDArray[np.uint8]:
        """Store pages from the workers, each page from the worker whose turn it is."""
        pages = np.zeros((num_pages, self.mappings[0][group].page.num_bytes), np.uint8)
        for mappings, blocks in zip(self.mappings, self._describe(group), strict=True):
            turns = [page for page in range(num_pages) if mappings[group].writes(page)]
            if turns:
                held = part_of_pages(mappings[group], pages)
                copies.copy(blocks.take(turns), held.take(turns))
        return pages

    def read(self, group: int, pages: NDArray[np.uint8], copies: CPUCopyEngine) -> None:
        """Load pages into the caches of all workers, each its part."""
        for mappings, blocks in zip(self.mappings, self._describe(group), strict=True):
            copies.copy(part_of_pages(mappings[group], pages), blocks)

    def _describe(self, group: int) -> list[Descriptors]:
        return [
            BlockDescriber(worker.caches, mappings=mappings).describe(
                group, self.engine.block_ids[group]
            )
            for worker, mappings in zip(self.engine.workers, self.mappings, strict=True)
        ]
