"""Valid calls of every public callable, from which tests make wrong ones."""

import asyncio
import functools
import inspect
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import torch

import kvxfer
from kvxfer import engine_side, kvcache, lending, public, storage, tiering, transfer
from kvxfer.backends.nixl import NixlConfig
from kvxfer.engine_side import (
    LAYOUT_ZOO,
    AttentionMetadataBuilder,
    BlockTable,
    MultiGroupBlockTable,
    MultiGroupMetadataBuilder,
    TokenBatch,
    VLLMKeys,
)
from kvxfer.kvcache import (
    AllocationCondition,
    AttentionLayout,
    CopyRun,
    KVCacheSpec,
    KVLayout,
    UniformTypeKVCacheSpecs,
)
from kvxfer.kvcache.portable import PageMapping
from kvxfer.storage import PromptKeys, StoredTensor
from kvxfer.storage.backend import Purgeable
from kvxfer.storage.lending import BlockParts
from kvxfer.storage.observer import Added, Reports
from kvxfer.testing import DictBackend, DictConfig
from kvxfer.transfer.job import Direction

NUM_BLOCKS = 6
TOKENS = 4
HEADS: dict[str, Any] = {"num_kv_heads": 3, "head_dim": 8, "dtype": torch.float32}
ATTENTION = HEADS | {"tokens_per_block": TOKENS}
SPEC = kvxfer.FullAttentionSpec(**ATTENTION)
GROUP = kvxfer.KVCacheGroup(SPEC, ("a",))
CONFIG = kvxfer.KVCacheConfig(NUM_BLOCKS, (GROUP,))
LATENT = kvxfer.MLASpec(**ATTENTION)
UNIFORM = UniformTypeKVCacheSpecs(tokens_per_block=TOKENS, layer_specs={"a": SPEC})
LAYOUT = AttentionLayout("block kv token head dim", "block layer kv token head dim")
KV_CACHES = {"a": torch.zeros(NUM_BLOCKS, 2, TOKENS, 3, 8)}
CACHES = kvxfer.canonicalize(KV_CACHES, CONFIG)
SHARD = kvxfer.WorkerShard(num_kv_heads=3)
KEYS = [kvxfer.make_block_key(b"a", 0)]
BATCH = TokenBatch.of([[0, 1], [3]])
TENSOR = StoredTensor(name="k", dtype="F32", shape=(2, 4))
IDENTITY = kvxfer.GroupIdentity(page_sizes_bytes=(SPEC.page_size_bytes,))
NAMESPACE = kvxfer.Namespace(model="m", groups=(IDENTITY,))
BOXES = list(CACHES.group_data_refs[0][0].boxes)
TABLE: dict[str, Any] = {
    "max_num_requests": 3,
    "max_tokens_per_request": 16,
    "max_num_batched_tokens": 8,
}


class Builder(AttentionMetadataBuilder[int]):
    """Attention backend without requirements."""

    def build(
        self, batch: TokenBatch, block_table: torch.Tensor, slot_mapping: torch.Tensor
    ) -> int:
        return batch.num_requests + len(block_table) + len(slot_mapping)


def mapping() -> PageMapping:
    return kvxfer.map_caches(CACHES, SHARD)[0]


def table() -> BlockTable:
    made = BlockTable(TOKENS, num_blocks=NUM_BLOCKS, **TABLE)
    for row in range(2):
        made.add_row([1 + row], row)
    return made


def tables() -> MultiGroupBlockTable:
    made = MultiGroupBlockTable(CONFIG, **TABLE)
    for row in range(2):
        made.add_row([[1 + row]], row)
    return made


def builders() -> MultiGroupMetadataBuilder[int]:
    return MultiGroupMetadataBuilder([Builder()], tables())


def blocks() -> kvxfer.Descriptors:
    return kvxfer.describe(CACHES, 0, [1])


def backend() -> DictBackend:
    return DictBackend(DictConfig(), NAMESPACE)


class Values(kvxfer.BytesBackend):
    """Values in a dictionary."""

    def __init__(self) -> None:
        super().__init__(NAMESPACE)
        self.values: dict[str, bytes] = {}

    def put(self, names: Sequence[str], values: Sequence[bytes]) -> list[bool]:
        self.values |= zip(names, values, strict=True)
        return [True] * len(names)

    def get(self, names: Sequence[str]) -> list[bytes | None]:
        return [self.values.get(name) for name in names]

    def has(self, names: Sequence[str]) -> list[bool]:
        return [name in self.values for name in names]

    def remove(self, names: Sequence[str]) -> None:
        for name in names:
            self.values.pop(name, None)


class Purged(DictBackend):
    """Dictionary that can be purged, with nothing in it."""

    async def purge(self, prefix: bytes = b"") -> None:
        pass


def purged_tiers() -> kvxfer.TieredBackend:
    return kvxfer.TieredBackend([Purged(None, NAMESPACE)], NAMESPACE, staging_bytes=1 << 16)


def tiers() -> kvxfer.TieredBackend:
    return kvxfer.TieredBackend([backend()], NAMESPACE, staging_bytes=1 << 16)


def engine() -> kvxfer.TransferEngine:
    return kvxfer.TransferEngine(CACHES, backend())


def load_or_compute() -> transfer.LoadOrCompute:
    return transfer.LoadOrCompute(1.5)


@functools.cache
def prompts() -> lending.PromptExchange:
    """Open an exchange that lends a prompt, for all calls."""
    opened = kvxfer.exchange(
        "nixl://?listen=127.0.0.1:0&transport=socket",
        CACHES,
        namespace=kvxfer.Namespace(model="m", revision="1"),
    )
    asyncio.run(opened.__aenter__())
    return opened


@functools.cache
def ticket() -> str:
    """Ticket of a prompt that another exchange lends."""
    lender = kvxfer.exchange(
        "nixl://?listen=127.0.0.1:0&transport=socket",
        CACHES,
        namespace=kvxfer.Namespace(model="m", revision="1"),
    )
    asyncio.run(lender.__aenter__())
    return asyncio.run(lender.offer([1, 2, 3], [[4]]))


TICKET = ticket()


async def call() -> bool:
    return True


class Valid(NamedTuple):
    """Valid call: its arguments, and a function that makes the object of a method."""

    arguments: dict[str, Any]
    of: Callable[[], Any] | None = None


MOVES = {"keys": KEYS, "block_ids": [[1]], "first_block_indices": [0], "timeout_s": 5}
WISH = kvxfer.Retention(priority=1)
ROW = {"row_index": 1}
OF_EVERY_TABLE: dict[str, dict[str, Any]] = {
    "clear_row": ROW,
    "commit": {"num_requests": 2},
    "compute_slot_mapping": {"query_start_loc": [0, 2, 3], "positions": [0, 1, 3]},
    "move_row": {"source": 0, "target": 1},
    "swap_row": {"first": 0, "second": 1},
}

VALID_SPECS = {
    "AttentionSpec": Valid(ATTENTION),
    "FullAttentionSpec": Valid(ATTENTION),
    "FullAttentionSpec.merge_alike": Valid({"specs": [SPEC]}, lambda: SPEC),
    "CrossAttentionSpec": Valid(ATTENTION),
    "MLASpec": Valid(ATTENTION),
    "SlidingWindowSpec": Valid(ATTENTION | {"sliding_window": 8}),
    "SlidingWindowMLASpec": Valid(ATTENTION | {"sliding_window": 8}),
    "ChunkedLocalAttentionSpec": Valid(ATTENTION | {"attention_chunk_tokens": 8}),
    "MambaSpec": Valid(
        {"tokens_per_block": TOKENS, "shapes": ((2, 3),), "dtypes": (torch.float32,)}
    ),
    "UniformTypeKVCacheSpecs": Valid({"tokens_per_block": TOKENS, "layer_specs": {"a": SPEC}}),
    "UniformTypeKVCacheSpecs.for_layer": Valid({"layer_name": "a"}, lambda: UNIFORM),
    "KVCacheSpec.for_layer": Valid({"layer_name": "a"}, lambda: SPEC),
    "KVCacheSpec.merge": Valid({"specs": [SPEC]}, lambda: KVCacheSpec),
    "KVCacheSpec.merge_alike": Valid({"specs": [LATENT]}, lambda: LATENT),
    "KVCacheConfig": Valid({"num_blocks": NUM_BLOCKS, "groups": (GROUP,)}),
    "KVCacheConfig.uniform": Valid(
        {"num_blocks": NUM_BLOCKS, "layer_names": ["a"], **ATTENTION, "null_block_id": 0},
        lambda: kvxfer.KVCacheConfig,
    ),
    "KVCacheGroup": Valid({"spec": SPEC, "layer_names": ("a",)}),
}

VALID_LAYOUTS = {
    "AttentionLayout": Valid({"shape": LAYOUT.shape, "memory": LAYOUT.memory}),
    "AttentionLayout.cache_shape": Valid({"spec": SPEC, "num_blocks": 3}, lambda: LAYOUT),
    "EngineLayout": Valid(
        {"engine": "e", "releases": "all", "name": "n", "shape": "block", "memory": "block"}
    ),
    "EngineLayout.runs_per_block": Valid(
        {"sizes": dict.fromkeys(("layer", "kv", "token", "head", "dim", "kernel"), 2)},
        lambda: next(layout for layout in LAYOUT_ZOO if layout.order[0] != "block"),
    ),
    "KVLayout": Valid({"axes": ("block", "token")}),
    "KVLayout.parse": Valid({"layout": "block token"}, lambda: KVLayout),
}

VALID_TABLES = {
    "AttentionMetadataBuilder.reorder": Valid({"batch": BATCH}, Builder),
    "BlockTable": Valid({"tokens_per_block": TOKENS, "num_blocks": NUM_BLOCKS, **TABLE}),
    "BlockTable.add_row": Valid({"block_ids": [3], **ROW}, table),
    "BlockTable.append_row": Valid({"block_ids": [3], **ROW}, table),
    "BlockTable.num_blocks_of": Valid(ROW, table),
    "BlockTable.row": Valid(ROW, table),
    "BlockTable.truncate_row": Valid({**ROW, "num_blocks": 0}, table),
    "MultiGroupBlockTable": Valid({"config": CONFIG, **TABLE}),
    "MultiGroupBlockTable.add_row": Valid({"block_ids": [[3]], **ROW}, tables),
    "MultiGroupBlockTable.append_row": Valid({"block_ids": [[3]], **ROW}, tables),
    "MultiGroupMetadataBuilder": Valid({"builders": [Builder()], "block_tables": tables()}),
    "MultiGroupMetadataBuilder.build": Valid({"batch": BATCH}, builders),
    "MultiGroupMetadataBuilder.reorder": Valid({"batch": BATCH}, builders),
    "TokenBatch": Valid({"query_start_loc": [0, 2], "positions": [0, 1]}),
    "TokenBatch.of": Valid({"positions": [[0, 1]]}, lambda: TokenBatch),
    "TokenBatch.reorder": Valid({"order": np.array([1, 0])}, lambda: BATCH),
    "decodes_first": Valid({"batch": BATCH}),
    **{f"BlockTable.{name}": Valid(each, table) for name, each in OF_EVERY_TABLE.items()},
    **{
        f"MultiGroupBlockTable.{name}": Valid(each, tables) for name, each in OF_EVERY_TABLE.items()
    },
}

VALID_CACHES = {
    "AllocationRefusal": Valid(
        {"condition": AllocationCondition.ATTENTION, "found": 1, "expected": 2}
    ),
    "CanonicalAllocation": Valid(
        {"buffer": torch.zeros(1), "kv_caches": KV_CACHES, "caches": CACHES}
    ),
    "CanonicalKVCacheRef": Valid({"tensor_idx": 0, "page_size_bytes": 8}),
    "CanonicalKVCacheTensor": Valid(
        {"tensor": torch.zeros(2, 8, dtype=torch.int8), "page_size_bytes": 8}
    ),
    "CanonicalKVCaches": Valid(
        {"tensors": CACHES.tensors, "group_data_refs": CACHES.group_data_refs}
    ),
    "CopyRun": Valid(dict.fromkeys(inspect.signature(CopyRun).parameters, 1)),
    "Descriptors": Valid(
        {
            "addresses": np.array([8], np.uint64),
            "lengths": np.array([8], np.uint64),
            "block_offsets": np.array([0, 1]),
            "payload_starts": np.array([0]),
            "device": torch.device("cpu"),
        }
    ),
    "Descriptors.concatenate": Valid({"batches": [blocks(), blocks()]}, blocks),
    "Descriptors.cut": Valid({"max_bytes": 100}, blocks),
    "Descriptors.of_pieces": Valid({"addresses": [64], "sizes": [8]}),
    "Descriptors.select": Valid({"start": 0, "stop": 1}, blocks),
    "Descriptors.take": Valid({"blocks": [0]}, blocks),
    "PageMapping": Valid(
        {"page": mapping().page, "block_size_bytes": 8, "blocks_per_page": 1, "pages": ()}
    ),
    "PageMapping.writes": Valid({"number": 3}, mapping),
    "WorkerShard": Valid({"num_kv_heads": 3}),
    "WorkerShard.place": Valid({"boxes": BOXES}, lambda: SHARD),
    "WorkerShard.total_heads": Valid({"boxes": BOXES}, lambda: SHARD),
    "WorkerShard.writers": Valid({"boxes": BOXES}, lambda: SHARD),
    "allocate_canonical": Valid({"config": CONFIG, "backends": [LAYOUT]}),
    "attest": Valid({"kv_caches": KV_CACHES, "config": CONFIG, "caches": CACHES}),
    "canonicalize": Valid({"kv_caches": KV_CACHES, "config": CONFIG}),
    "describe": Valid({"caches": CACHES, "group": 0, "block_ids": [1, 2]}),
    "map_caches": Valid({"caches": CACHES, "shard": SHARD}),
    "verify_mappings": Valid({"mappings": [mapping()]}),
    "why_not_canonical": Valid({"config": CONFIG, "backends": [LAYOUT]}),
}

VALID_TRANSFERS = {
    "BlockMover.attach": Valid({"memory": []}, backend),
    "BlockMover.provide": Valid({"interface": Purgeable}, backend),
    "BytesBackend.delete": Valid({"keys": KEYS}, Values),
    "BytesBackend.load": Valid({"keys": KEYS, "blocks": blocks()}, Values),
    "BytesBackend.lookup": Valid({"keys": KEYS}, Values),
    "BytesBackend.name_of": Valid({"key": KEYS[0]}, Values),
    "BytesBackend.store": Valid({"keys": KEYS, "blocks": blocks()}, Values),
    "FinishedJob": Valid(
        dict.fromkeys(inspect.signature(kvxfer.FinishedJob).parameters, 0)
        | {"direction": Direction.LOAD, "outcomes": []}
    ),
    "GroupIdentity": Valid({"page_sizes_bytes": (32,), "tensors": (TENSOR,)}),
    "Namespace": Valid({"model": "m", "groups": (IDENTITY,), "parallel": {"tp_size": 2}}),
    "Namespace.chunk_size_bytes": Valid({"group": 0}, lambda: NAMESPACE),
    "Namespace.differences": Valid({"theirs": NAMESPACE}, lambda: NAMESPACE),
    "Namespace.require_same": Valid({"theirs": NAMESPACE}, lambda: NAMESPACE),
    "Retention": Valid({"priority": 2.5, "ttl_s": 60}),
    "Outcome": Valid({"status": kvxfer.Status.DONE}),
    "StoredTensor": Valid({"name": "k", "dtype": "F32", "shape": (2, 4)}),
    "TierTimeouts": Valid({"lookup_s": 1, "move_s": 1, "close_s": 1, "pause_s": 1}),
    "TieredBackend": Valid({"tiers": [backend()], "namespace": NAMESPACE}),
    "TieredBackend.attach": Valid({"memory": []}, tiers),
    "TieredBackend.delete": Valid({"keys": KEYS}, tiers),
    "TieredBackend.load": Valid({"keys": KEYS, "blocks": blocks()}, tiers),
    "TieredBackend.lookup": Valid({"keys": KEYS}, tiers),
    "TieredBackend.observe": Valid({"reports": Reports()}, tiers),
    "TieredBackend.purge": Valid({"prefix": b"salt"}, purged_tiers),
    "TieredBackend.retain": Valid({"keys": KEYS, "retention": WISH}, tiers),
    "TieredBackend.retentions": Valid({"keys": KEYS}, tiers),
    "TieredBackend.store": Valid({"keys": KEYS, "blocks": blocks()}, tiers),
    "TieredBackend.write_back": Valid({"parts": BlockParts(KEYS, [0], [8])}, tiers),
    "PolledEngine": Valid({"caches": CACHES, "backend": backend()}),
    "Slices": Valid({"load_bytes": 8, "store_bytes": 8, "share": 0.5}),
    "TransferEngine": Valid({"caches": CACHES, "backend": backend()}),
    "LoadOrCompute": Valid({"max_load_ratio": 1.5, "prefill_tokens_per_s": 1000}),
    "LoadOrCompute.computed": Valid({"num_tokens": 8, "seconds": 0.5}, load_or_compute),
    "LoadOrCompute.loaded": Valid({"num_bytes": 8, "seconds": 0.5}, load_or_compute),
    "LoadOrCompute.note": Valid({"event": Added("host", KEYS)}, load_or_compute),
    "Observer.watch": Valid({"tier": "host", "ask": dict}, load_or_compute),
    "LoadOrCompute.pays": Valid(
        {"keys": KEYS, "num_bytes": 8, "num_tokens": 4, "queued_bytes": 8}, load_or_compute
    ),
    "PolledEngine.cancel": Valid({"job_id": 5}, engine),
    "TransferEngine.flush": Valid({"timeout_s": 1}, engine),
    "TransferEngine.load": Valid(MOVES, engine),
    "TransferEngine.lookup": Valid({"keys": KEYS}, engine),
    "TransferEngine.submit_lookup": Valid({"keys": KEYS, "timeout_s": 1}, engine),
    "PolledEngine.may_touch": Valid({"job_id": 5}, engine),
    "TransferEngine.store": Valid(MOVES | {"retention": WISH}, engine),
    "PolledEngine.submit_call": Valid({"call": call}, engine),
    "PolledEngine.submit_load": Valid(MOVES, engine),
    "PolledEngine.submit_store": Valid(MOVES | {"retention": WISH}, engine),
    "PolledEngine.wait": Valid({"job_ids": [5], "timeout_s": 1}, engine),
    "connect": Valid(
        {
            "backend": "host://?capacity=64KiB",
            "caches": CACHES,
            "namespace": kvxfer.Namespace(model="m", revision="1"),
        }
    ),
    "Fetched": Valid({"bad_blocks": [[]]}),
    "PromptExchange": Valid(
        {
            "config": NixlConfig(),
            "caches": CACHES,
            "namespace": kvxfer.Namespace(model="m", revision="1"),
        }
    ),
    "PromptExchange.ask": Valid({"ticket": TICKET, "tokens": [1, 2, 3]}, prompts),
    "PromptExchange.fetch": Valid(
        {"ticket": TICKET, "tokens": [1, 2, 3], "block_ids": [[5]]}, prompts
    ),
    "PromptExchange.give_up": Valid({"ticket": TICKET}, prompts),
    "PromptExchange.offer": Valid({"tokens": [1, 2, 3], "block_ids": [[1]]}, prompts),
    "PromptExchange.release": Valid({"ticket": TICKET}, prompts),
    "PromptKeys": Valid({"tokens": [1, 2, 3]}),
    "PromptKeys.block_keys": Valid(
        {"group": 0, "tokens_per_block": 2, "num_tokens": 3}, lambda: PromptKeys([1, 2, 3])
    ),
    "PromptKeys.state_key": Valid({"group": 0, "num_tokens": 3}, lambda: PromptKeys([1, 2, 3])),
    "exchange": Valid(
        {
            "backend": "nixl://",
            "caches": CACHES,
            "namespace": kvxfer.Namespace(model="m", revision="1"),
        }
    ),
    "VLLMKeys": Valid({"hash": "sha256", "seed": "0", "tokens_per_block": 2}),
    "VLLMKeys.chunk_keys": Valid({"tokens": [1, 2, 3], "tokens_per_chunk": 2}, VLLMKeys),
    "group_of": Valid({"key": KEYS[0]}),
    "make_block_key": Valid({"content_hash": b"a", "group": 0}),
}

VALID_CALLS = VALID_SPECS | VALID_LAYOUTS | VALID_TABLES | VALID_CACHES | VALID_TRANSFERS


def public_callables() -> dict[str, Callable[..., Any]]:
    """Collect functions, constructors and methods with arguments, by name.

    Not errors and enums, which the library makes itself, and not methods for implementors.
    """
    found: dict[str, Callable[..., Any]] = {}
    faces = (public, kvcache, storage, tiering, transfer, lending, engine_side)
    public_values = {name: getattr(face, name) for face in faces for name in face.__all__}
    for name, value in public_values.items():
        if inspect.isfunction(value):
            found[name] = value
        if not inspect.isclass(value) or issubclass(value, (BaseException, Enum)):
            continue
        if getattr(value, "_is_protocol", False):
            continue
        if not inspect.isabstract(value):
            found[name] = value
        found |= _methods(value)
    return found


def _methods(kind: type) -> dict[str, Callable[..., Any]]:
    found = {}
    for owner in kind.__mro__:
        if not owner.__module__.startswith("kvxfer") or owner.__name__.startswith("_"):
            continue
        for name in vars(owner):
            value = getattr(owner, name)
            is_method = inspect.isfunction(value) or inspect.ismethod(value)
            if name.startswith("_") or not is_method:
                continue
            is_static = isinstance(inspect.getattr_static(owner, name), staticmethod)
            parameters = [*inspect.signature(value).parameters]
            takes_some = parameters if is_static or inspect.ismethod(value) else parameters[1:]
            if takes_some and not getattr(value, "__isabstractmethod__", False):
                found[f"{owner.__name__}.{name}"] = value
    return found
