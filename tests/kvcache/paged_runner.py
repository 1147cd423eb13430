"""Miniature serving engine: transformers models that keep their keys and values in blocks."""

import hashlib
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AttentionInterface

from kvxfer.engine_side import (
    NULL_BLOCK_ID,
    AttentionMetadataBuilder,
    MultiGroupBlockTable,
    MultiGroupMetadataBuilder,
    TokenBatch,
    decodes_first,
)
from kvxfer.kvcache.allocation import AttentionLayout, allocate_canonical
from kvxfer.kvcache.config import KVCacheConfig, KVCacheGroup
from kvxfer.kvcache.spec import AttentionSpec, FullAttentionSpec, SlidingWindowSpec
from kvxfer.storage.keys import BlockKey, make_block_key
from kvxfer.transfer.engine import TransferEngine

PAGED_ATTENTION = "kvxfer_paged"
MAX_REQUESTS = 8
MAX_BATCHED_TOKENS = 512
GARBAGE = 0x7F  # four of them are a float32 of 3e38: whoever reads one, sees it


@dataclass(eq=False)
class Request:
    """Request: its tokens and, per KV-cache group, the blocks that hold them.

    Attributes:
        tokens: The prompt, then what was generated.
        logits: Logits from which each generated token was chosen.
        num_computed: Tokens whose keys and values are in the blocks.
        block_ids: For each group; the null block where the window has moved on.
    """

    tokens: list[int]
    block_ids: list[list[int]]
    logits: list[torch.Tensor] = field(default_factory=list)
    num_computed: int = 0

    @property
    def blocks_in_use(self) -> set[int]:
        return {block for ids in self.block_ids for block in ids} - {NULL_BLOCK_ID}


@dataclass(frozen=True)
class GroupMetadata:
    """Metadata of a batch for the attention of one group's layers; all on the device."""

    batch: TokenBatch
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    tokens_per_kernel_block: int


class PagedBuilder(AttentionMetadataBuilder[GroupMetadata]):
    """Metadata builder of any group; group 0 puts decodes first."""

    def __init__(self, tokens_per_kernel_block: int) -> None:
        self.tokens_per_kernel_block = tokens_per_kernel_block

    def reorder(self, batch: TokenBatch) -> NDArray[np.int64]:
        return decodes_first(batch)

    def build(
        self, batch: TokenBatch, block_table: torch.Tensor, slot_mapping: torch.Tensor
    ) -> GroupMetadata:
        return GroupMetadata(batch, block_table, slot_mapping, self.tokens_per_kernel_block)


@dataclass(frozen=True)
class LayerCache:
    """Layer's view of the cache, axes `block kv token head dim`, and its group's metadata."""

    view: torch.Tensor
    group: int


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    paged: "PagedRunner",
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Write keys and values to their slots, and attend to what the block table says.

    The batch is one sequence for the model: `(1, heads, num_tokens, head_dim)`.
    """
    assert attention_mask is None, "the mask follows from the positions"
    layer = paged.layers[str(module.layer_idx)]
    metadata = paged.metadata[layer.group]
    tokens = metadata.tokens_per_kernel_block
    written = metadata.slot_mapping >= 0
    slots = metadata.slot_mapping[written]
    for kv, states in enumerate((key, value)):
        layer.view[slots // tokens, kv, slots % tokens] = states[0].transpose(0, 1)[written]
    outputs = []
    starts = metadata.batch.query_start_loc.tolist()
    for row, (start, stop) in enumerate(pairwise(starts)):
        positions = torch.from_numpy(metadata.batch.positions[start:stop])
        num_keys = int(positions[-1]) + 1
        first = max(0, int(positions[0]) + 1 - sliding_window) if sliding_window else 0
        first_block = first // tokens
        blocks = metadata.block_table[row, first_block : -(-num_keys // tokens)]
        cached = layer.view[blocks].transpose(0, 1).flatten(1, 2)  # kv, token, head, dim
        cached = cached[:, first - first_block * tokens : num_keys - first_block * tokens]
        distances = positions[:, None] - torch.arange(first, num_keys)
        mask = distances >= 0
        if sliding_window:
            mask &= distances < sliding_window
        keys, values = cached.transpose(1, 2)[:, None]
        outputs.append(
            torch.nn.functional.scaled_dot_product_attention(
                query[:, :, start:stop], keys, values, mask, scale=scaling, enable_gqa=True
            )
        )
    return torch.cat(outputs, dim=2).transpose(1, 2), None


AttentionInterface.register(PAGED_ATTENTION, paged_attention)


def cache_config(
    model_config: Any, *, num_blocks: int, tokens_per_block: int, layers_per_group: int
) -> KVCacheConfig:
    """Plan groups of at most `layers_per_group` layers of one kind, which share positions."""
    kinds = getattr(model_config, "layer_types", None)
    kinds = kinds or ["full_attention"] * model_config.num_hidden_layers
    shape = {
        "tokens_per_block": tokens_per_block,
        "num_kv_heads": model_config.num_key_value_heads,
        "head_dim": model_config.head_dim,
        "dtype": torch.float32,
    }
    specs: dict[str, AttentionSpec] = {"full_attention": FullAttentionSpec(**shape)}
    if "sliding_attention" in kinds:
        window = model_config.sliding_window
        specs["sliding_attention"] = SlidingWindowSpec(**shape, sliding_window=window)
    groups = []
    for kind, spec in specs.items():
        names = [str(index) for index, each in enumerate(kinds) if each == kind]
        groups += [
            KVCacheGroup(spec, tuple(names[start : start + layers_per_group]))
            for start in range(0, len(names), layers_per_group)
        ]
    positions = tuple(
        tuple(group.layer_names[index] for group in groups if index < len(group.layer_names))
        for index in range(layers_per_group)
    )
    return KVCacheConfig(num_blocks, tuple(groups), tuple(filter(None, positions)))


class PagedRunner:
    """Runner that generates greedily for several requests at once, one per row of the batch."""

    def __init__(
        self,
        model: Any,
        config: KVCacheConfig,
        *,
        layout: AttentionLayout,
        tokens_per_kernel_block: Sequence[int],
    ) -> None:
        model.set_attn_implementation(PAGED_ATTENTION)
        self.model = model
        self.config = config
        allocation = allocate_canonical(
            config,
            [layout] * len(config.groups),
            tokens_per_kernel_block=tokens_per_kernel_block,
        )
        self.caches = allocation.caches
        order = [layout.axes.index(axis) for axis in ("block", "kv", "token", "head", "dim")]
        self.layers = {
            name: LayerCache(allocation.kv_caches[name].permute(order), index)
            for index, group in enumerate(config.groups)
            for name in group.layer_names
        }
        self.block_tables = MultiGroupBlockTable(
            config,
            max_num_requests=MAX_REQUESTS,
            max_tokens_per_request=model.config.max_position_embeddings,
            max_num_batched_tokens=MAX_BATCHED_TOKENS,
            tokens_per_kernel_block=tokens_per_kernel_block,
        )
        builders = [PagedBuilder(tokens) for tokens in tokens_per_kernel_block]
        self.builder = MultiGroupMetadataBuilder(builders, self.block_tables)
        self.metadata: list[GroupMetadata] = []
        self.rows: list[Request] = []
        self.free_blocks = deque(range(1, config.num_blocks))

    def add(self, prompt: Sequence[int]) -> Request:
        """Begin a request in the next row."""
        request = Request(list(prompt), [[] for _ in self.config.groups])
        self.block_tables.add_row(request.block_ids, len(self.rows))
        self.rows.append(request)
        return request

    def step(self, max_tokens_per_request: int) -> None:
        """Compute pending tokens of every request; requests without any generate one."""
        lens = [min(len(r.tokens) - r.num_computed, max_tokens_per_request) for r in self.rows]
        for row, (request, num_tokens) in enumerate(zip(self.rows, lens, strict=True)):
            self._allocate(row, request.num_computed + num_tokens)
        positions = [
            np.arange(request.num_computed, request.num_computed + num_tokens)
            for request, num_tokens in zip(self.rows, lens, strict=True)
        ]
        batch, order = self.builder.reorder(TokenBatch.of(positions))
        self.rows = [self.rows[index] for index in order]
        self.metadata = self.builder.build(batch)
        tokens = [
            request.tokens[request.num_computed + index]
            for request, num_tokens in zip(self.rows, batch.query_lens, strict=True)
            for index in range(num_tokens)
        ]
        with torch.inference_mode():
            output = self.model(
                input_ids=torch.tensor([tokens]),
                position_ids=torch.from_numpy(batch.positions)[None],
                use_cache=False,
                paged=self,
            )
        last_tokens = batch.query_start_loc[1:] - 1
        for row, (request, last) in enumerate(zip(self.rows, last_tokens, strict=True)):
            request.num_computed = int(batch.positions[last]) + 1
            if request.num_computed == len(request.tokens):
                request.logits.append(output.logits[0, last].clone())
                request.tokens.append(int(output.logits[0, last].argmax()))
            self._free_outside_of_windows(row)

    def preempt(self, request: Request, engine: TransferEngine) -> list[BlockKey]:
        """Store a request's blocks, fill them with garbage and free them for other requests."""
        keys, block_ids = self._keys(request), self._used(request)
        self._transfer(engine, engine.submit_store(keys, block_ids))
        freed = sorted(request.blocks_in_use)
        self.caches.tensors[0].tensor[freed] = GARBAGE
        self.free_blocks.extend(freed)
        row, last = self.rows.index(request), len(self.rows) - 1
        self.block_tables.clear_row(row)
        self.block_tables.move_row(last, row)
        self.rows[row] = self.rows[last]
        self.rows.pop()
        return keys

    def resume(self, request: Request, engine: TransferEngine) -> None:
        """Load the blocks of a preempted request into free blocks."""
        keys = self._keys(request)
        request.block_ids = [
            [self.free_blocks.popleft() if block != NULL_BLOCK_ID else block for block in ids]
            for ids in request.block_ids
        ]
        self._transfer(engine, engine.submit_load(keys, self._used(request)))
        self.block_tables.add_row(request.block_ids, len(self.rows))
        self.rows.append(request)

    def _allocate(self, row: int, num_tokens: int) -> None:
        request, added = self.rows[row], []
        for group, ids in zip(self.config.groups, request.block_ids, strict=True):
            needed = -(-num_tokens // group.spec.tokens_per_block) - len(ids)
            added.append([self.free_blocks.popleft() for _ in range(needed)])
            ids.extend(added[-1])
        self.block_tables.append_row(added, row)

    def _free_outside_of_windows(self, row: int) -> None:
        request = self.rows[row]
        for group, ids in zip(self.config.groups, request.block_ids, strict=True):
            if not isinstance(group.spec, SlidingWindowSpec):
                continue
            first_visible = max(0, request.num_computed + 1 - group.spec.sliding_window)
            for index in range(first_visible // group.spec.tokens_per_block):
                if ids[index] != NULL_BLOCK_ID:
                    self.caches.tensors[0].tensor[ids[index]] = GARBAGE
                    self.free_blocks.append(ids[index])
                    ids[index] = NULL_BLOCK_ID
        self.block_tables.add_row(request.block_ids, row)

    def _used(self, request: Request) -> list[list[int]]:
        return [[block for block in ids if block != NULL_BLOCK_ID] for ids in request.block_ids]

    def _keys(self, request: Request) -> list[BlockKey]:
        """Make the key of every block from all tokens up to its end; the last may be partial."""
        keys = []
        for group, ids in enumerate(request.block_ids):
            tokens_per_block = self.config.groups[group].spec.tokens_per_block
            for index, block in enumerate(ids):
                stop = min((index + 1) * tokens_per_block, request.num_computed)
                prefix = np.array(request.tokens[:stop]).tobytes()
                if block != NULL_BLOCK_ID:
                    keys.append(make_block_key(hashlib.sha256(prefix).digest(), group))
        return keys

    @staticmethod
    def _transfer(engine: TransferEngine, job: Any) -> None:
        assert engine.wait([job], timeout_s=20)
        (finished,) = engine.get_finished()
        assert finished.done, finished.outcomes


@contextmanager
def one_thread() -> Iterator[None]:
    """Run small models fast: threads only slow them down, most of all on a busy machine."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def generate_unpaged(
    model: Any, prompt: Sequence[int], num_tokens: int
) -> tuple[list[int], torch.Tensor]:
    """Generate with transformers itself: the tokens with the prompt, and logits `(n, vocab)`."""
    model.set_attn_implementation("sdpa")
    model.generation_config.eos_token_id = None
    output = model.generate(
        torch.tensor([list(prompt)]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=num_tokens,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return output.sequences[0].tolist(), torch.cat(output.logits)
