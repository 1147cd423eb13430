"""Engines that hand prompts over, for tests: every element encodes its prompt and its place."""

from collections.abc import Sequence
from concurrent.futures import Future
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kvxfer.backends.nixl import Client, Endpoint, NixlConfig
from kvxfer.kvcache import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    SlidingWindowSpec,
    WorkerShard,
    canonicalize,
)
from kvxfer.kvcache.portable import describe_caches
from kvxfer.lending import Fetched, reader
from kvxfer.lending.handover import Handover
from kvxfer.lending.reader import Found
from kvxfer.storage import Namespace, PromptKeys
from tests.backends.processes import ObedientProcess, answer
from tests.ports import free_ports

T = TypeVar("T")

LIMIT_S = 30.0
NHD = "block kv token head dim"
HND = "block kv head token dim"
AXES = NHD.split()
NUM_BLOCKS, NUM_HEADS, HEAD_DIM, NUM_LAYERS = 24, 4, 3, 2
NULL = 0


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(0, 1000, num_tokens).tolist()
    return tokens


def look_for_two(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Make lookups ask for at most two pages; return the number of pages in each, in order."""
    hold, asked = Client.hold, list[int]()

    def counted_hold(client: Client, ticket: str, keys: Any) -> Any:
        asked.append(len(keys))
        return hold(client, ticket, keys)

    monkeypatch.setattr(Client, "hold", counted_hold)
    monkeypatch.setattr(reader, "LOOKED_FOR", 2)
    return asked


def values(tokens: Sequence[int], group: int, layer: int) -> NDArray[np.int32]:
    """Compute a layer's values for a prompt, `(token, kv, head, dim)`, each from its prefix."""
    prefix = np.cumsum((np.array(tokens, np.int64) + 1) * 2654435761) % 1000003
    place = np.arange(2 * NUM_HEADS * HEAD_DIM).reshape(2, NUM_HEADS, HEAD_DIM)
    found = prefix[:, None, None, None] * 4001 + place + 100 * (group * NUM_LAYERS + layer) + 1
    return (found % (1 << 31)).astype(np.int32)


class Engine:
    """Engine of some workers, each with a hand-over; blocks are filled with -1 at first."""

    def __init__(
        self,
        tokens_per_block: int = 4,
        *,
        layout: str = NHD,
        tp_size: int = 1,
        windows: Sequence[int | None] = (None,),
        model: str = "m",
        port: int = 0,
        lends: bool = True,
        **config: Any,
    ) -> None:
        self.tokens_per_block, self.tp_size, self.windows = tokens_per_block, tp_size, windows
        self.workers: list[Handover] = []
        self.views: list[list[list[torch.Tensor]]] = []
        port = port or free_ports(tp_size)
        self.endpoint = Endpoint("127.0.0.1", port)
        fields: dict[str, Any] = {"transport": "socket", "timeout_s": 5.0} | config
        for rank in range(tp_size):
            listen: dict[str, Any] = {"listen": f"127.0.0.1:{port + rank}"} if lends else {}
            self._add_worker(rank, layout, model, NixlConfig(**fields, **listen))

    def _add_worker(self, rank: int, layout: str, model: str, config: NixlConfig) -> None:
        heads = NUM_HEADS // self.tp_size
        common: dict[str, Any] = {
            "tokens_per_block": self.tokens_per_block,
            "num_kv_heads": heads,
            "head_dim": HEAD_DIM,
            "dtype": torch.int32,
        }
        sizes = dict(
            zip(AXES, (NUM_BLOCKS, 2, self.tokens_per_block, heads, HEAD_DIM), strict=True)
        )
        shape = [sizes[axis] for axis in layout.split()]
        groups, views = [], []
        caches: dict[str, torch.Tensor] = {}
        for group, window in enumerate(self.windows):
            names = [f"layers.{group + layer * len(self.windows)}" for layer in range(NUM_LAYERS)]
            spec = (
                FullAttentionSpec(**common)
                if window is None
                else SlidingWindowSpec(**common, sliding_window=window)
            )
            groups.append(KVCacheGroup(spec, tuple(names)))
            each = {name: torch.full(shape, -1, dtype=torch.int32) for name in names}
            caches |= each
            order = [layout.split().index(axis) for axis in AXES]
            views.append([tensor.permute(order) for tensor in each.values()])
        plan = KVCacheConfig(NUM_BLOCKS, tuple(groups), null_block_id=NULL)
        canonical = canonicalize(caches, plan, layouts=dict.fromkeys(caches, layout))
        shard = WorkerShard(num_kv_heads=NUM_HEADS, rank=rank, tp_size=self.tp_size)
        described = describe_caches(canonical, shard)
        handover = Handover(config, Namespace(model=model), described, canonical)
        self.workers.append(handover)
        self.views.append(views)
        handover.start()

    def compute(self, tokens: Sequence[int], block_ids: Sequence[Sequence[int]]) -> None:
        """Write the engine's values for a prompt to blocks, except null blocks."""
        size = self.tokens_per_block
        for rank, views in enumerate(self.views):
            for group, ids in enumerate(block_ids):
                for layer, view in enumerate(views[group]):
                    found = self.part(tokens, rank, group, layer)
                    for index, block in enumerate(ids):
                        part = found[index * size : (index + 1) * size]
                        if block != NULL:
                            view[block, :, : len(part)] = part.transpose(0, 1)

    def part(self, tokens: Sequence[int], rank: int, group: int, layer: int) -> torch.Tensor:
        heads = NUM_HEADS // self.tp_size
        kept = values(tokens, group, layer)[:, :, rank * heads : (rank + 1) * heads]
        return torch.from_numpy(kept)

    def good(
        self, tokens: Sequence[int], block_ids: Sequence[Sequence[int]]
    ) -> list[list[list[bool]]]:
        """Whether each block has the values that the engine would have, for each rank and group."""
        size = self.tokens_per_block
        return [
            [
                [
                    all(
                        bool((view[block, :, : len(p)] == p.transpose(0, 1)).all())
                        for layer, view in enumerate(views[group])
                        for p in [self.part(tokens, rank, group, layer)[i * size : (i + 1) * size]]
                    )
                    for i, block in enumerate(ids)
                ]
                for group, ids in enumerate(block_ids)
            ]
            for rank, views in enumerate(self.views)
        ]

    def all_good(self, tokens: Sequence[int], block_ids: Sequence[Sequence[int]]) -> bool:
        each = self.good(tokens, block_ids)
        return all(flag for rank in each for group in rank for flag in group)

    def is_untouched(self, block_ids: Sequence[Sequence[int]]) -> bool:
        """Whether only these blocks were written."""
        return all(
            bool((view[[b for b in range(NUM_BLOCKS) if b not in ids]] == -1).all())
            for views in self.views
            for group, ids in enumerate(block_ids)
            for view in views[group]
        )

    def alter(self, block: int) -> None:
        for views in self.views:
            views[0][0][block, 0, 0, 0, 0] += 1

    def offer(
        self,
        ticket: str,
        tokens: Sequence[int],
        block_ids: Sequence[Sequence[int]],
        *,
        num_tokens: int | None = None,
        is_complete: bool = True,
    ) -> None:
        """Offer the blocks of a prompt, as far as it is computed."""
        stop, made = len(tokens) if num_tokens is None else num_tokens, PromptKeys(tokens)
        keys, blocks = [], []
        for group, ids in enumerate(block_ids):
            named = made.block_keys(group, self.tokens_per_block, stop)
            for key, block in zip(named, ids, strict=False):
                if block != NULL:
                    keys.append(key)
                    blocks.append(block)
        for worker in self.workers:
            worker.offer(ticket, keys, blocks, is_complete=is_complete)

    def lend(
        self, ticket: str, tokens: Sequence[int], block_ids: Sequence[Sequence[int]], **how: Any
    ) -> str:
        """Compute a prompt, offer it, and wait until the offer is known."""
        self.compute(tokens, block_ids)
        self.offer(ticket, tokens, block_ids, **how)
        self.settle()
        return str(self.endpoint)

    def settle(self) -> None:
        for worker in self.workers:
            worker.revoke([])

    def revoke(self, ticket: str) -> None:
        for worker in self.workers:
            worker.revoke([ticket])

    def take_ended(self) -> list[list[str]]:
        return [worker.take_ended() for worker in self.workers]

    def ask(
        self, at: Endpoint, ticket: str, tokens: Sequence[int], *, waits: bool = False
    ) -> Found:
        worker = self.workers[0]
        made = PromptKeys(tokens)
        return get(worker.submit(worker.reader.ask(at, ticket, made, self.windows, waits=waits)))

    def begin_fetch(
        self,
        at: Endpoint,
        found: Found,
        tokens: Sequence[int],
        block_ids: Sequence[Sequence[int]],
        *,
        first_token: int = 0,
        num_tokens: int | None = None,
        waits_for: str | None = None,
    ) -> list[Future[Fetched]]:
        stop = len(tokens) if num_tokens is None else num_tokens
        wanted = found.wanted(PromptKeys(tokens), first_token, stop, block_ids)
        return [
            worker.submit(worker.reader.fetch(at, wanted, waits_for=waits_for))
            for worker in self.workers
        ]

    def fetch(
        self,
        at: Endpoint,
        ticket: str,
        tokens: Sequence[int],
        block_ids: Sequence[Sequence[int]],
        **how: Any,
    ) -> list[Fetched]:
        """Ask for a prompt and fetch it into blocks, on every worker."""
        found = self.ask(at, ticket, tokens)
        return [get(each) for each in self.begin_fetch(at, found, tokens, block_ids, **how)]

    def release(self, at: Endpoint, ticket: str) -> None:
        worker = self.workers[0]
        get(worker.submit(worker.reader.release(at, ticket)))

    def close(self) -> None:
        for worker in self.workers:
            worker.close()


def get(future: Future[T]) -> T:
    return future.result(LIMIT_S)


class EngineProcess(ObedientProcess):
    """Engine in a process of its own, whose methods are called by their names."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(_serve, args, options)
        self.endpoint = Endpoint("127.0.0.1", self.said)

    def call(self, method: str, *args: Any, **options: Any) -> Any:
        return self.tell((method, args, options))


def _serve(orders: Connection, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    engine = Engine(*args, **options)
    port = engine.endpoint.port
    answer(orders, port, lambda order: getattr(engine, order[0])(*order[1], **order[2]))
    engine.close()
