"""A small serving engine on kvxfer: paged KV cache, continuous batching, prefix reuse, tiers."""

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise, takewhile
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention as attend
from transformers import AttentionInterface

import kvxfer
from kvxfer.engine_side import BlockTable

MAX_REQUESTS, MAX_TOKENS, LAYOUT = 8, 512, "block kv token head dim"  # per step; of a layer


def paged_attention(module: Any, query: Any, key: Any, value: Any, *_: Any, **step: Any) -> Any:
    """Write keys and values `(1, heads, tokens, head_dim)` to slots, and attend to blocks."""
    if odd := [n for n in ("sliding_window", "softcap", "s_aux") if step.get(n) is not None]:
        raise NotImplementedError(f"the model has {odd[0]}; only full attention is supported")
    cache, slots, scale = step["kv_caches"][module.layer_idx], step["slots"], step["scaling"]
    size, out = cache.shape[2], []
    for kv, states in enumerate((key, value)):
        cache[slots // size, kv, slots % size] = states[0].transpose(0, 1)
    for (start, stop), length, row in step["rows"]:
        blocks = cache[row[: -(-length // size)]]
        keys, values = blocks.transpose(0, 1).flatten(1, 2)[:, :length].transpose(1, 2)[:, None]
        mask = torch.ones(stop - start, length, dtype=torch.bool).tril(length - stop + start)
        out += [attend(query[:, :, start:stop], keys, values, mask, scale=scale, enable_gqa=True)]
    return torch.cat(out, dim=2).transpose(1, 2), None


class BlockPool:
    """Blocks of the cache; a free block keeps its content until it is taken."""

    def __init__(self, num_blocks: int) -> None:
        self._num_users = [0] * num_blocks
        self._free = OrderedDict.fromkeys(range(1, num_blocks))  # 0 is the null block
        self._keys: dict[int, kvxfer.BlockKey] = {}
        self._blocks: dict[kvxfer.BlockKey | None, int] = {}

    def find(self, keys: Sequence[kvxfer.BlockKey]) -> list[int]:
        """Use the blocks of the leading keys that are still in the cache."""
        return self.use([self._blocks[k] for k in takewhile(self._blocks.__contains__, keys)])

    def take(self, num_blocks: int) -> list[int] | None:
        """Use blocks to write into, those free for longest first; None if too few are free."""
        if num_blocks > len(self._free):
            return None
        blocks = [self._free.popitem(last=False)[0] for _ in range(num_blocks)]
        for block in blocks:
            self._blocks.pop(self._keys.pop(block, None), None)
        return self.use(blocks)

    def use(self, blocks: list[int]) -> list[int]:
        """Add a user to each block; return them."""
        for block in blocks:
            self._num_users[block] += 1
            self._free.pop(block, None)
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """Remove a user of each block; the tail of a prompt is taken again before its head."""
        for block in reversed(blocks):
            self._num_users[block] -= 1
            if not self._num_users[block]:
                self._free[block] = None

    def name(self, blocks: Sequence[int], keys: Sequence[kvxfer.BlockKey]) -> None:
        """Note the keys of blocks; if two blocks have the same key, the first one is found."""
        for block, key in zip(blocks, keys, strict=True):
            if self._blocks.setdefault(key, block) == block:
                self._keys[block] = key


@dataclass(eq=False)
class Request:
    """Request: its tokens, and the blocks that hold their keys and values."""

    tokens: list[int]  # the prompt, then the generated tokens
    stop: int  # number of tokens at which it ends
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0  # tokens whose keys and values are in the blocks
    num_stored: int = 0  # blocks that were given to the tiers, or came from there
    num_reused: int = 0  # tokens that it never computed
    keys: list[kvxfer.BlockKey] = field(default_factory=list)  # of the whole blocks when queued
    hits: Any = None  # future of the lookup: which of these keys the tiers have


class Engine:
    """Engine that generates greedily for many requests at once, and never waits for a tier."""

    def __init__(
        self,
        model: Any,  # of transformers, with full attention in every layer
        backend: str | Sequence[str],  # a URL, or several, fastest first
        *,
        namespace: kvxfer.Namespace,  # identity of the model and its weights
        keys: Callable[[Sequence[int]], list[kvxfer.BlockKey]],  # of the whole blocks of tokens
        axes: Mapping[str, Sequence[str]],  # of stored pages, see `map_caches`
        tokens_per_block: int = 128,
        num_blocks: int = 64,
    ) -> None:
        if not all(getattr(model.config, n, 0) for n in ("num_key_value_heads", "head_dim")):
            raise NotImplementedError(f"the config of {type(model).__name__} lacks its KV heads")
        heads, dim = model.config.num_key_value_heads, model.config.head_dim
        names = tuple(f"model.layers.{i}" for i in range(model.config.num_hidden_layers))
        shape = (num_blocks, 2, tokens_per_block, heads, dim)
        self.kv_caches = {name: torch.zeros(shape, dtype=model.dtype) for name in names}
        plan = {"num_kv_heads": heads, "head_dim": dim, "dtype": model.dtype, "null_block_id": 0}
        plan["tokens_per_block"] = tokens_per_block
        config = kvxfer.KVCacheConfig.uniform(num_blocks, names, **plan)
        caches = kvxfer.canonicalize(self.kv_caches, config, layouts=dict.fromkeys(names, LAYOUT))
        mappings = kvxfer.map_caches(caches, kvxfer.WorkerShard(num_kv_heads=heads), axes=axes)
        self.transfers = kvxfer.connect(backend, caches, namespace=namespace, mappings=mappings)
        AttentionInterface.register("paged", paged_attention)
        model.set_attn_implementation("paged")
        self.model, self.keys, self.block_size = model, keys, tokens_per_block
        self.pool, self.max_length = BlockPool(num_blocks), (num_blocks - 1) * tokens_per_block
        bounds: dict[str, Any] = {"num_blocks": num_blocks, "max_num_requests": MAX_REQUESTS}
        bounds |= {"max_tokens_per_request": self.max_length, "max_num_batched_tokens": MAX_TOKENS}
        self.table = BlockTable(tokens_per_block, **bounds)
        self.waiting, self.running, self.ended = deque[Request](), list[Request](), list[Any]()
        self.loading, self.moving = dict[Any, Request](), dict[Any, list[int]]()  # by job

    def add(self, prompt: Sequence[int], num_tokens: int) -> Request:
        """Add a request to generate `num_tokens` after a prompt."""
        request = Request(list(prompt), len(prompt) + num_tokens)
        if not prompt or num_tokens < 1 or request.stop > self.max_length:
            raise ValueError(f"{len(prompt)} + {num_tokens} tokens; 1 to {self.max_length} fit")
        self._wait(request)
        return request

    def step(self) -> None:
        """Take ended transfers, admit requests, compute a batch, and store the blocks it filled."""
        self._take_finished()
        self._admit()
        chosen = self._schedule()
        logits = self._compute(chosen) if chosen else ()
        for (request, num_tokens), scores in zip(chosen, logits, strict=True):
            request.num_computed += num_tokens
            if request.num_computed == len(request.tokens):
                request.tokens.append(int(scores.argmax()))
            self._store(request)
            if len(request.tokens) == request.stop:
                self.running.remove(request)
                self.pool.release(request.blocks)

    def generate(
        self, prompts: Sequence[Sequence[int]], num_tokens: int, timeout_s: float = 600
    ) -> list[Request]:
        """Add requests, and run steps until they have ended, for at most `timeout_s`."""
        requests, end = [self.add(p, num_tokens) for p in prompts], time.monotonic() + timeout_s
        while self.waiting or self.loading or self.running:
            if time.monotonic() > end:
                raise TimeoutError(f"the requests did not end within {timeout_s} s")
            self.step()
            time.sleep(0 if self.running else 0.001)  # until a lookup or a load has ended
        return requests

    def _wait(self, request: Request) -> None:
        """Queue a request, and look its prompt up in the tiers."""
        self.pool.release(request.blocks)
        request.keys = self.keys(request.tokens[:-1])  # the last one is computed, for its logits
        request.hits = self.transfers.submit_lookup(request.keys, timeout_s=1)
        self.waiting.append(request)

    def _admit(self) -> None:
        """Give blocks to requests whose lookup was answered, and begin their loads."""
        for request in list(self.waiting):
            if len(self.running) + len(self.loading) == MAX_REQUESTS or not request.hits.done():
                continue
            there = [] if request.hits.exception() else request.hits.result()
            here = self.pool.find(request.keys)
            wanted = request.keys[len(here) : [*there, False].index(False)]
            if (room := self.pool.take(len(wanted))) is None:
                self.pool.release(here)
                return
            self.waiting.remove(request)
            request.blocks = here
            if wanted:
                job_id = self.transfers.submit_load(wanted, [room])
                self.loading[job_id], self.moving[job_id] = request, room
            else:
                self._run(request)

    def _run(self, request: Request) -> None:
        request.num_stored, num_there = len(request.blocks), len(request.blocks) * self.block_size
        request.num_reused = request.num_reused if request.num_computed else num_there
        request.num_computed = num_there
        self.running.append(request)

    def _take_finished(self) -> None:
        """Take the outcomes of transfers, and release blocks that they can no longer touch."""
        for job in self.transfers.get_finished():
            if request := self.loading.pop(job.job_id, None):
                num_arrived = [*(outcome.done for outcome in job.outcomes), False].index(False)
                request.blocks += self.pool.use(self.moving[job.job_id][:num_arrived])
                self.pool.name(request.blocks, request.keys[: len(request.blocks)])
                self._run(request)
            self.ended.append(job.job_id)
        for job_id in [each for each in self.ended if not self.transfers.may_touch(each)]:
            self.ended.remove(job_id)
            self.pool.release(self.moving.pop(job_id))

    def _schedule(self) -> list[tuple[Request, int]]:
        """Choose the tokens of a step; if blocks run out, the last request begins again."""
        chosen, left = [], MAX_TOKENS
        for request in list(self.running):
            num_tokens = min(len(request.tokens) - request.num_computed, left)
            num_blocks = -(-(request.num_computed + num_tokens) // self.block_size)
            while num_tokens and request in self.running:
                if (blocks := self.pool.take(max(0, num_blocks - len(request.blocks)))) is not None:
                    request.blocks += blocks
                    chosen.append((request, num_tokens))
                    left -= num_tokens
                    break
                self._wait(self.running.pop())
        return chosen

    def _compute(self, chosen: Sequence[tuple[Request, int]]) -> Any:
        """Compute tokens; return the logits after the last one of each request."""
        for row, (request, _) in enumerate(chosen):
            self.table.add_row(request.blocks, row)
        spans = [slice(each.num_computed, each.num_computed + n) for each, n in chosen]
        starts = [0, *accumulate(span.stop - span.start for span in spans)]
        positions = torch.cat([torch.arange(span.start, span.stop) for span in spans])
        lengths, table = [span.stop for span in spans], self.table.commit(len(chosen))
        tokens = [t for each, n in chosen for t in each.tokens[each.num_computed :][:n]]
        with torch.inference_mode():
            return self.model(
                input_ids=torch.tensor([tokens]),
                position_ids=positions[None],
                logits_to_keep=torch.tensor(starts[1:]) - 1,
                use_cache=False,
                kv_caches=list(self.kv_caches.values()),
                rows=list(zip(pairwise(starts), lengths, table, strict=True)),
                slots=self.table.compute_slot_mapping(starts, positions),
            ).logits[0]

    def _store(self, request: Request) -> None:
        """Begin to store the blocks that became whole."""
        if blocks := request.blocks[request.num_stored : request.num_computed // self.block_size]:
            keys = self.keys(request.tokens[: request.num_computed])[request.num_stored :]
            self.pool.name(blocks, keys)
            self.moving[self.transfers.submit_store(keys, [blocks])] = self.pool.use(blocks)
            request.num_stored += len(blocks)
