"""Workers of one model in different shapes, which share its portable pages."""

from dataclasses import dataclass

import torch

import kvxfer
from kvxfer.kvcache import CanonicalKVCaches, PageMapping

LAYERS = ("model.layers.0.attn", "model.layers.1.attn")
HEADS, DIM, TOKENS, PAGE = 4, 8, 64, 16
NAMESPACE = kvxfer.Namespace(model="model", revision="1", layout="whatever")
KEYS = [kvxfer.make_block_key(b"page %d" % index, 0) for index in range(TOKENS // PAGE)]
AXES = ("block", "kv", "head", "token", "dim")


@dataclass
class Worker:
    """Worker of an engine, its caches filled with its part of a model's values."""

    shard: kvxfer.WorkerShard
    layout: str
    views: dict[str, torch.Tensor]
    caches: CanonicalKVCaches
    mappings: tuple[PageMapping, ...]
    num_blocks: int

    @property
    def values(self) -> torch.Tensor:
        """`(layers, 2, heads, tokens, dim)` of its caches."""
        layers = []
        for view in self.views.values():
            named = view.permute([self.layout.split().index(axis) for axis in AXES])
            layers.append(named.permute(1, 2, 0, 3, 4).reshape(2, -1, TOKENS, DIM))
        return torch.stack(layers)

    def part(self, values: torch.Tensor) -> torch.Tensor:
        """Select a worker's part of the values of all heads."""
        heads = max(1, HEADS // self.shard.tp_size)
        first = self.shard.rank * HEADS // self.shard.tp_size
        return values[:, :, first : first + heads]

    def connect(self, url: str) -> kvxfer.TransferEngine:
        return kvxfer.connect(url, self.caches, namespace=NAMESPACE, mappings=self.mappings)

    def fill(self, values: torch.Tensor) -> None:
        """Write the worker's part of the values into its caches."""
        part = self.part(values)
        for layer, view in zip(part, self.views.values(), strict=True):
            named = view.permute([self.layout.split().index(axis) for axis in AXES])
            blocks = layer.reshape(2, -1, self.num_blocks, TOKENS // self.num_blocks, DIM)
            blocks = blocks.permute(2, 0, 1, 3, 4)
            named.copy_(blocks)


def make_worker(layout: str, *, rank: int, tp_size: int, tokens_per_block: int) -> Worker:
    heads = max(1, HEADS // tp_size)
    num_blocks = TOKENS // tokens_per_block
    sizes = {"block": num_blocks, "kv": 2, "token": tokens_per_block, "head": heads, "dim": DIM}
    spec = kvxfer.FullAttentionSpec(
        tokens_per_block=tokens_per_block, num_kv_heads=heads, head_dim=DIM, dtype=torch.bfloat16
    )
    views = {
        name: torch.zeros([sizes[axis] for axis in layout.split()], dtype=torch.bfloat16)
        for name in LAYERS
    }
    config = kvxfer.KVCacheConfig(num_blocks, (kvxfer.KVCacheGroup(spec, LAYERS),))
    caches = kvxfer.canonicalize(views, config, layouts=dict.fromkeys(LAYERS, layout))
    shard = kvxfer.WorkerShard(num_kv_heads=HEADS, rank=rank, tp_size=tp_size)
    mappings = kvxfer.map_caches(caches, shard, tokens_per_page=PAGE, num_shards=HEADS)
    return Worker(shard, layout, views, caches, mappings, num_blocks)


def make_engine(layout: str, *, tp_size: int, **shape: int) -> list[Worker]:
    return [make_worker(layout, rank=rank, tp_size=tp_size, **shape) for rank in range(tp_size)]


def make_values() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    shape = (len(LAYERS), 2, HEADS, TOKENS, DIM)
    return torch.randn(shape, generator=generator).to(torch.bfloat16)
