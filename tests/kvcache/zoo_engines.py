"""Engines of the layout zoo: the tensors that they would register, and worlds that they keep."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvxfer.copy_engine.cpu import CPUCopyEngine
from kvxfer.engine_side import LAYOUT_ZOO, EngineLayout
from kvxfer.kvcache import KVQuantization
from kvxfer.kvcache.canonical import CanonicalKVCaches, canonicalize
from kvxfer.kvcache.config import KVCacheConfig, KVCacheGroup
from kvxfer.kvcache.portable import WorkerShard
from kvxfer.kvcache.spec import AttentionSpec, FullAttentionSpec, KVCacheSpec, MLASpec

COPIES = CPUCopyEngine(num_threads=1)

ZOO = [entry for entry in LAYOUT_ZOO if entry.content != "states"]

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""Integer types by their size in bytes."""


@dataclass(frozen=True, slots=True)
class ZooGroup:
    """KV-cache group of an engine of the zoo; layers at one position of a block share memory."""

    spec: KVCacheSpec
    positions: tuple[int, ...]
    names: tuple[str, ...]


def plan_groups(groups: Sequence[ZooGroup], num_blocks: int) -> KVCacheConfig:
    shared: list[list[str]] = [[] for _ in range(1 + max(p for g in groups for p in g.positions))]
    for group in groups:
        for name, position in zip(group.names, group.positions, strict=True):
            shared[position].append(name)
    planned = [KVCacheGroup(group.spec, group.names) for group in groups]
    return KVCacheConfig(num_blocks, tuple(planned), tuple(map(tuple, shared)))


class AttentionEngine:
    """Engine that keeps keys and values, or latents, with zeros in its cache."""

    def __init__(
        self,
        entry: EngineLayout,
        groups: Sequence[ZooGroup] = (),
        *,
        num_blocks: int = 5,
        kernel_blocks_per_block: int = 2,
    ) -> None:
        self.entry, self.groups = entry, tuple(groups) or (_default_group(entry),)
        self.config = plan_groups(self.groups, num_blocks)
        spec = self.groups[0].spec
        (form,) = spec.cache_tensors
        self.dtype, self._page_size_bytes = form.dtype, spec.page_size_bytes
        self.sizes = {"kv": 1, "kernel": 1, **form.axis_sizes}
        self.sizes |= {"block": num_blocks, "layer": len(self.config.shared_tensors)}
        if "kv*dim" in self.sizes:  # of another width each: one after the other, as one key
            self.sizes["dim"] = self.sizes.pop("kv*dim")
        if "kernel" in entry.order:
            self.sizes["kernel"] = kernel_blocks_per_block
            self.sizes["token"] //= kernel_blocks_per_block
        self.memory, self.shape = factors(entry.memory), factors(entry.shape)
        self.steps = [axis for axis in self.memory if axis not in self.shape]
        self.strides, num_elements = self._strides()
        self.tensors = self._make_tensors(num_elements)
        self.kv_caches = self._registered()
        self.layouts = dict.fromkeys(self.kv_caches, entry.layout)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.entry.order}, {self.config})"

    @property
    def positions(self) -> dict[str, int]:
        return {n: i for i, names in enumerate(self.config.shared_tensors) for n in names}

    def _strides(self) -> tuple[dict[str, int], int]:
        """Compute the strides of an allocation's axes, and all its elements, padding included."""
        block = next(axis for axis in self.entry.memory.split() if axis.startswith("block"))
        *_, step = factors(block)
        num_steps = prod(self.sizes[axis] for axis in factors(block)[1:])
        outside = self.entry.order[: self.entry.order.index("block")]
        num_parts = num_steps * prod(self.sizes[axis] for axis in outside if axis != "layer")
        page = self._page_size_bytes // self.dtype.itemsize // num_parts
        inside = self.memory[self.memory.index(step) + 1 :]
        strides, dense = {}, 1
        for axis in reversed(self.memory):
            if axis == step:
                dense = page * (self.sizes["layer"] if "layer" in inside else 1)
            elif axis == "layer" and axis in inside and self._is_next_to_blocks(inside):
                dense = page
            strides[axis] = dense
            dense *= self.sizes[axis]
        return strides, dense

    def _is_next_to_blocks(self, inside: Sequence[str]) -> bool:
        """Whether no axis is between blocks and layers, so that padding is between layers."""
        return prod(self.sizes[axis] for axis in inside[: inside.index("layer")]) == 1

    def _make_tensors(self, num_elements: int) -> dict[tuple[int, ...], torch.Tensor]:
        # Engines register 8-bit floats as plain bytes.
        dtype = torch.uint8 if self.dtype.itemsize == 1 else self.dtype
        tensors = {}
        for at in self._indices(self.entry.allocations.split()):
            storage = torch.zeros(num_elements, dtype=dtype).as_strided(
                [self.sizes[axis] for axis in self.memory],
                [self.strides[axis] for axis in self.memory],
            )
            for step in self._indices(self.steps):
                chosen = dict(zip(self.steps, step, strict=True))
                view = storage[tuple(chosen.get(axis, slice(None)) for axis in self.memory)]
                rest = [axis for axis in self.memory if axis in self.shape]
                view = view.permute([rest.index(axis) for axis in self.shape])
                dims = [prod(self.sizes[f] for f in factors(a)) for a in self.entry.shape.split()]
                tensors[(*at, *step)] = view.view(dims)
        return tensors

    def _indices(self, axes: Sequence[str]) -> Iterator[tuple[int, ...]]:
        return product(*(range(self.sizes[axis]) for axis in axes))

    def _registered(self) -> dict[str, Any]:
        if "layer" in self.shape:
            return {"all layers": self.tensors[()]}
        at_position: dict[int, list[torch.Tensor]] = {}
        for index, tensor in self.tensors.items():
            at_position.setdefault(index[0], []).append(tensor)
        entries = {p: each[0] if len(each) == 1 else each for p, each in at_position.items()}
        return {name: entries[position] for name, position in self.positions.items()}

    def layer_view(self, layer_name: str) -> torch.Tensor:
        if "layer" not in self.shape:
            view: torch.Tensor = self.kv_caches[layer_name]
            return view
        whole = self.tensors[()]
        return whole.select(self.entry.shape.split().index("layer"), self.positions[layer_name])


def with_kernel_blocks(entry: EngineLayout) -> EngineLayout:
    """Make the same engine with kernel blocks, where it has a block to itself."""
    if "block" not in entry.shape.split():
        return entry
    cut = {"block": "block*kernel"}
    return replace(
        entry,
        shape=" ".join(cut.get(axis, axis) for axis in entry.shape.split()),
        memory=" ".join(cut.get(axis, axis) for axis in entry.memory.split()),
    )


def _default_group(entry: EngineLayout) -> ZooGroup:
    """No two axes look alike; a block has eight tokens where its kernel blocks have four."""
    common: dict[str, Any] = {"tokens_per_block": 8, "head_dim": 6, "dtype": torch.int32}
    spec: AttentionSpec = MLASpec(**common)
    if entry.content == "keys and values":
        spec = FullAttentionSpec(**common, num_kv_heads=7)
    return ZooGroup(spec, (0, 1, 2), ("a", "b", "c"))


def factors(axes: str) -> list[str]:
    return axes.replace("*", " ").split()


def named(entry: EngineLayout) -> str:
    return f"{entry.engine}, {entry.name}"


Values = NDArray[Any]
FIRST_LAYER = 9  # so that layers 9 and 10 are not in the order of their letters


class World:
    def __init__(
        self,
        rng: np.random.Generator,
        *,
        positions: Sequence[tuple[int, ...]],
        num_heads: int,
        num_tokens: int,
        options: dict[str, Any],
        latents: bool = False,
    ) -> None:
        self.positions, self.num_tokens, self.latents = tuple(positions), num_tokens, latents
        self.num_heads, self._options = num_heads, options
        spec = self.spec(num_tokens, num_heads)
        (form,) = spec.cache_tensors
        self.parts, self.dtype = form.parts, integers(form.dtype)
        limits, width = np.iinfo(self.dtype), sum(width for _, width in form.parts)
        shape = width, num_heads, num_tokens
        self.values = [
            rng.integers(limits.min, limits.max, (len(each), *shape), self.dtype, endpoint=True)
            for each in positions
        ]

    def spec(
        self, tokens_per_block: int, num_kv_heads: int, *, padding_factor: int = 0
    ) -> AttentionSpec:
        common = {"tokens_per_block": tokens_per_block, **self._options}
        common |= {} if self.latents else {"num_kv_heads": num_kv_heads}
        spec: AttentionSpec = (MLASpec if self.latents else FullAttentionSpec)(**common)
        if not padding_factor:
            return spec
        padding = padding_factor * 2 * num_kv_heads * tokens_per_block * spec.dtype.itemsize
        return replace(spec, page_size_padded=spec.page_size_bytes + padding)

    def layer_number(self, group: int, layer: int) -> int:
        """Compute the number in a layer's name: groups take turns."""
        return FIRST_LAYER + layer * len(self.positions) + group

    def layer_names(self, group: int, prefix: str) -> tuple[str, ...]:
        count = len(self.positions[group])
        return tuple(f"{prefix}.{self.layer_number(group, n)}.attn" for n in range(count))

    def tensors(self, group: int) -> dict[str, Values]:
        """Make the tensors of a group's portable pages, by their names, in their order there.

        They are integers, `(head, token, dim)`, or `(token, dim)` of latents, of all tokens.
        """
        found = {}
        for layer, values in enumerate(self.values[group]):
            start = 0
            for part, width in self.parts:
                tensor = values[start : start + width].transpose(1, 2, 0)
                name = f"layers.{self.layer_number(group, layer)}.{part}"
                found[name] = tensor[0] if self.latents else tensor
                start += width
        return found

    def pages(self, group: int, tokens_per_page: int, num_shards: int = 1) -> NDArray[np.uint8]:
        """Compute all portable pages, uint8, `(num_pages, page_size_bytes)`, by plain indexing."""
        pages = []
        for start in range(0, self.num_tokens, tokens_per_page):
            tokens, page = slice(start, start + tokens_per_page), b""
            for shard in range(num_shards):
                for values in self.tensors(group).values():
                    if not self.latents:
                        share = self.num_heads // num_shards
                        heads = slice(shard * share, (shard + 1) * share)
                        page += values[heads, tokens].tobytes()
                    elif shard == 0:
                        page += values[tokens].tobytes()
            pages.append(np.frombuffer(page, np.uint8))
        return np.stack(pages)


def integers(dtype: torch.dtype) -> np.dtype[Any]:
    name = str(INTEGERS[dtype.itemsize]).removeprefix("torch.")
    return np.dtype(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Plan of an engine that keeps a world."""

    entry: EngineLayout
    shard: WorkerShard
    tokens_per_block: int
    kernel_blocks_per_block: int = 1
    padding_factor: int = 0
    prefix: str = "model.layers"

    @property
    def tokens_per_kernel_block(self) -> int:
        """Count the tokens that are one piece in every layout."""
        slots = "block*token" in self.entry.memory
        return 1 if slots else self.tokens_per_block // self.kernel_blocks_per_block

    @property
    def span(self) -> int:
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
    shard: WorkerShard
    caches: CanonicalKVCaches
    _tensors: list[torch.Tensor]

    def contents(self) -> list[Values]:
        """Compute each tensor's values with every block in its place, by plain indexing."""
        raise NotImplementedError

    def fill(self) -> None:
        for tensor, content in zip(self._tensors, self.contents(), strict=True):
            as_integers(tensor).copy_(torch.from_numpy(content))

    def clear(self) -> None:
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
        groups = [
            ZooGroup(spec, positions, world.layer_names(group, options.prefix))
            for group, positions in enumerate(world.positions)
        ]
        cuts = options.kernel_blocks_per_block
        sizes = {"num_blocks": num_blocks, "kernel_blocks_per_block": cuts}
        self._engine = engine = AttentionEngine(entry, groups, **sizes)
        self.caches = canonicalize(engine.kv_caches, engine.config, layouts=engine.layouts)
        self._tensors = list(engine.tensors.values())

    def contents(self) -> list[Values]:
        """Compute each tensor's values with every block in its place, by plain indexing."""
        pool = self._pool()
        return [self._content(pool, index) for index in self._engine.tensors]

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
        sizes, width = self._engine.sizes, sum(width for _, width in world.parts)
        shape = sizes["layer"], sizes["block"], width, self._num_heads, tokens
        pool = np.zeros(shape, world.dtype)
        groups = zip(world.positions, world.values, self._block_ids, strict=True)
        for positions, values, ids in groups:
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


@dataclass(frozen=True, slots=True)
class WorldEngine:
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
    return tensor.view(INTEGERS[tensor.element_size()])


# Random worlds, and random engines that keep them.

TP_SIZES = (1, 2, 3, 4, 8)
MAX_WORKERS = 8
MIN_TOKENS, KERNEL_BLOCKS = 8, 2
GROUPS = ([(0, 1)], [(0,)], [(0, 1), (1,)], [(0, 1), (1, 0)])
"""Positions of each group's layers; groups share positions."""
DTYPES = (torch.float8_e4m3fn, torch.int8, torch.float16, torch.bfloat16, torch.float32)


def divisors(number: int, at_least: int = 1) -> list[int]:
    return [each for each in range(at_least, number + 1) if number % each == 0]


def generators() -> st.SearchStrategy[np.random.Generator]:
    return st.integers(0, 2**16).map(np.random.default_rng)


@st.composite
def worlds(draw: st.DrawFn, entry: EngineLayout) -> World:
    """Draw any model that a layout can keep: groups, K and V of unequal width, scales, dtypes."""
    latents = entry.content == "latents"
    dtype = draw(st.sampled_from(DTYPES))
    options: dict[str, Any] = {"head_dim": draw(st.integers(1, 5)), "dtype": dtype}
    if not latents and "kv*dim" in entry.shape.split() and draw(st.booleans()):
        options["head_dim_v"] = options["head_dim"] + 2
    if dtype.itemsize == 1:
        options["quantization"] = draw(st.sampled_from(KVQuantization))
    return World(
        draw(generators()),
        positions=draw(st.sampled_from(GROUPS)),
        num_heads=1 if latents else draw(st.integers(1, 8)),
        num_tokens=draw(st.sampled_from([32, 64, 96])),
        options=options,
        latents=latents,
    )


@st.composite
def shards(draw: st.DrawFn, num_heads: int) -> WorkerShard:
    sizes = [n for n in TP_SIZES if max(n, num_heads) % min(n, num_heads) == 0]
    tp_size = draw(st.sampled_from(sizes))
    copies = max(1, tp_size // num_heads)
    return WorkerShard(
        num_kv_heads=num_heads,
        tp_size=tp_size,
        pcp_size=draw(st.sampled_from([1, 1, 2] if 2 * tp_size <= MAX_WORKERS else [1])),
        dcp_size=draw(st.sampled_from(divisors(copies))),
        interleave_tokens=draw(st.sampled_from([1, 4, 16])),
    )


@st.composite
def engine_options(draw: st.DrawFn, world: World, entry: EngineLayout) -> EngineOptions:
    """Draw an engine of a layout with any parallelism, blocks, padding and kernel blocks."""
    shard = draw(shards(world.num_heads).filter(lambda s: _fitting_blocks(world, entry, s)))
    tokens_per_block = draw(st.sampled_from(_fitting_blocks(world, entry, shard)))
    return EngineOptions(
        entry=entry,
        shard=shard,
        tokens_per_block=tokens_per_block,
        kernel_blocks_per_block=draw(_kernel_blocks(entry, shard, tokens_per_block)),
        padding_factor=0 if "kv" in entry.allocations else draw(st.sampled_from([0, 0, 1])),
        prefix=draw(st.sampled_from(["model.layers", "decoder.block", ""])),
    )


def _fitting_blocks(world: World, entry: EngineLayout, shard: WorkerShard) -> list[int]:
    """List the tokens of a block with which the tokens of a world are whole blocks and turns."""
    return [
        tokens
        for tokens in divisors(world.num_tokens, at_least=MIN_TOKENS)
        if world.num_tokens % (tokens * shard.num_token_shares) == 0
        and (shard.num_token_shares == 1 or tokens % shard.interleave_tokens == 0)
        and ("kernel" not in entry.order or _turns_fit(shard, tokens // KERNEL_BLOCKS))
    ]


def _kernel_blocks(
    entry: EngineLayout, shard: WorkerShard, tokens_per_block: int
) -> st.SearchStrategy[int]:
    if "kernel" in entry.order:
        return st.just(KERNEL_BLOCKS)
    gaps = entry.layout != entry.memory and entry.memory.startswith("block head layer")
    if gaps or "block" not in entry.shape.split():
        return st.just(1)
    counts = divisors(tokens_per_block)
    fitting = [n for n in counts if _turns_fit(shard, tokens_per_block // n)]
    return st.just(1) | st.sampled_from(fitting or [1])


def _turns_fit(shard: WorkerShard, kernel_tokens: int) -> bool:
    """Whether the turns of workers are whole kernel blocks, or equal parts of them."""
    turn = shard.interleave_tokens
    whole = kernel_tokens % turn == 0 or turn % kernel_tokens == 0
    return shard.num_token_shares == 1 or whole


def page_tokens(world: World, options: EngineOptions) -> st.SearchStrategy[int]:
    sizes = divisors(world.num_tokens, at_least=MIN_TOKENS)
    return st.sampled_from([tokens for tokens in sizes if options.can_be_mapped(tokens)])
