"""Valid calls of every public callable, from which tests make wrong ones."""

import asyncio
import functools
import inspect
from collections.abc import Callable, Iterator
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
from kvxfer.kvcache import AllocationCondition, AttentionLayout, UniformTypeKVCacheSpecs
from kvxfer.kvcache.portable import PageMapping
from kvxfer.storage import PromptKeys, StoredTensor
from kvxfer.storage.backend import Purgeable
from kvxfer.storage.lending import BlockParts
from kvxfer.storage.observer import Added, Reports
from kvxfer.testing import DictBackend, DictConfig
from kvxfer.transfer.job import Direction
from tests.storage.test_bytes_backend import Values

NUM_BLOCKS = 6
TOKENS = 4
HEADS: dict[str, Any] = {"num_kv_heads": 3, "head_dim": 8, "dtype": torch.float32}
ATTENTION = HEADS | {"tokens_per_block": TOKENS}
SPEC = kvxfer.FullAttentionSpec(**ATTENTION)
GROUP = kvxfer.KVCacheGroup(SPEC, ("a",))
CONFIG = kvxfer.KVCacheConfig(NUM_BLOCKS, (GROUP,))
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
WISH = kvxfer.Retention(priority=1)
OF_A_TABLE: dict[str, Any] = {
    "max_num_requests": 3,
    "max_tokens_per_request": 16,
    "max_num_batched_tokens": 8,
}


class Builder(AttentionMetadataBuilder[int]):
    def build(
        self, batch: TokenBatch, block_table: torch.Tensor, slot_mapping: torch.Tensor
    ) -> int:
        return batch.num_requests + len(block_table) + len(slot_mapping)


def mapping() -> PageMapping:
    return kvxfer.map_caches(CACHES, SHARD)[0]


def table() -> BlockTable:
    made = BlockTable(TOKENS, num_blocks=NUM_BLOCKS, **OF_A_TABLE)
    for row in range(2):
        made.add_row([1 + row], row)
    return made


def tables() -> MultiGroupBlockTable:
    made = MultiGroupBlockTable(CONFIG, **OF_A_TABLE)
    for row in range(2):
        made.add_row([[1 + row]], row)
    return made


def blocks() -> kvxfer.Descriptors:
    return kvxfer.describe(CACHES, 0, [1])


def backend() -> DictBackend:
    return DictBackend(DictConfig(), NAMESPACE)


class Purged(DictBackend):
    """Dictionary that can be purged, with nothing in it."""

    async def purge(self, prefix: bytes = b"") -> None:
        pass


def tiers(first: kvxfer.Backend | None = None) -> kvxfer.TieredBackend:
    return kvxfer.TieredBackend([first or backend()], NAMESPACE, staging_bytes=1 << 16)


def engine() -> kvxfer.TransferEngine:
    return kvxfer.TransferEngine(CACHES, backend())


def open_exchange() -> lending.PromptExchange:
    url = "nixl://?listen=127.0.0.1:0&transport=socket"
    namespace = kvxfer.Namespace(model="m", revision="1")
    opened = kvxfer.exchange(url, CACHES, namespace=namespace)
    asyncio.run(opened.__aenter__())
    return opened


prompts = functools.cache(open_exchange)
"""Exchange that lends a prompt, for all calls."""


@functools.cache
def ticket() -> str:
    """Ticket of a prompt that another exchange lends."""
    return asyncio.run(open_exchange().offer([1, 2, 3], [[4]]))


async def call() -> bool:
    return True


class Valid(NamedTuple):
    """Valid call: its arguments, and a function that makes the object of a method."""

    arguments: dict[str, Any]
    of: Callable[[], Any] | None = None


ARGUMENTS: dict[str, Any] = {
    **OF_A_TABLE,
    "addresses": np.array([8], np.uint64),
    "ask": dict,
    "attention_chunk_tokens": 8,
    "axes": ("block", "token"),
    "backend": backend(),
    "backends": [LAYOUT],
    "bad_blocks": [[]],
    "batch": BATCH,
    "batches": [blocks(), blocks()],
    "block_ids": [[1]],
    "block_offsets": np.array([0, 1]),
    "block_size_bytes": 8,
    "block_tables": tables(),
    "blocks": blocks(),
    "blocks_per_page": 1,
    "boxes": BOXES,
    "buffer": torch.zeros(1),
    "builders": [Builder()],
    "caches": CACHES,
    "call": call,
    "condition": AllocationCondition.ATTENTION,
    "config": CONFIG,
    "content_hash": b"a",
    "device": torch.device("cpu"),
    "direction": Direction.LOAD,
    "dtype": torch.float32,
    "dtypes": (torch.float32,),
    "engine": "e",
    "event": Added("host", KEYS),
    "expected": 2,
    "first": 0,
    "found": 1,
    "group": 0,
    "group_data_refs": CACHES.group_data_refs,
    "groups": (GROUP,),
    "head_dim": 8,
    "interface": Purgeable,
    "job_id": 5,
    "job_ids": [5],
    "key": KEYS[0],
    "keys": KEYS,
    "kv_caches": KV_CACHES,
    "layer_name": "a",
    "layer_names": ("a",),
    "layer_specs": {"a": SPEC},
    "layout": "block token",
    "lengths": np.array([8], np.uint64),
    "mappings": [mapping()],
    "max_bytes": 100,
    "max_load_ratio": 1.5,
    "memory": [],
    "model": "m",
    "name": "n",
    "namespace": kvxfer.Namespace(model="m", revision="1"),
    "num_blocks": NUM_BLOCKS,
    "num_bytes": 8,
    "num_kv_heads": 3,
    "num_requests": 2,
    "num_tokens": 3,
    "number": 3,
    "order": np.array([1, 0]),
    "outcomes": [],
    "page": mapping().page,
    "page_size_bytes": 8,
    "page_sizes_bytes": (32,),
    "pages": (),
    "parts": BlockParts(KEYS, [0], [8]),
    "payload_starts": np.array([0]),
    "positions": [0, 1, 3],
    "query_start_loc": [0, 2, 3],
    "releases": "all",
    "reports": Reports(),
    "retention": WISH,
    "row_index": 1,
    "second": 1,
    "seconds": 0.5,
    "shape": "block",
    "shapes": ((2, 3),),
    "shard": SHARD,
    "sizes": [8],
    "sliding_window": 8,
    "source": 0,
    "spec": SPEC,
    "specs": [SPEC],
    "start": 0,
    "status": kvxfer.Status.DONE,
    "stop": 1,
    "target": 1,
    "tensor": torch.zeros(2, 8, dtype=torch.int8),
    "tensor_idx": 0,
    "tensors": CACHES.tensors,
    "theirs": NAMESPACE,
    "ticket": ticket(),
    "tier": "host",
    "tiers": [backend()],
    "tokens": [1, 2, 3],
    "tokens_per_block": TOKENS,
    "tokens_per_chunk": 2,
}
"""Valid values of arguments, which have one name wherever they mean the same."""

MOVES = {"first_block_indices": [0], "timeout_s": 5}
SPECIAL: dict[str, dict[str, Any]] = {
    "AttentionLayout": {"shape": LAYOUT.shape, "memory": LAYOUT.memory},
    "BlockTable.add_row": {"block_ids": [3]},
    "BlockTable.append_row": {"block_ids": [3]},
    "BlockTable.truncate_row": {"num_blocks": 0},
    "Descriptors.of_pieces": {"addresses": [64]},
    "Descriptors.take": {"blocks": [0]},
    "EngineLayout": {"memory": "block"},
    "GroupIdentity": {"tensors": (TENSOR,)},
    "LoadOrCompute": {"prefill_tokens_per_s": 1000},
    "LoadOrCompute.pays": {"queued_bytes": 8},
    "MLASpec": {"num_kv_heads": 3},
    "MultiGroupBlockTable.add_row": {"block_ids": [[3]]},
    "MultiGroupBlockTable.append_row": {"block_ids": [[3]]},
    "Namespace": {"groups": (IDENTITY,), "parallel": {"tp_size": 2}},
    "PolledEngine.submit_load": MOVES,
    "PolledEngine.submit_store": MOVES | {"retention": WISH},
    "PromptExchange": {"config": NixlConfig()},
    "PromptExchange.fetch": {"block_ids": [[5]]},
    "PromptKeys.block_keys": {"tokens_per_block": 2},
    "Retention": {"priority": 2.5, "ttl_s": 60},
    "SlidingWindowMLASpec": {"num_kv_heads": 3},
    "StoredTensor": {"dtype": "F32", "shape": (2, 4)},
    "TieredBackend": {"namespace": NAMESPACE},
    "TieredBackend.drain_of": {"blocks": blocks()},
    "TieredBackend.share_out": {"num_buffers": 4},
    "TokenBatch": {"query_start_loc": [0, 2], "positions": [0, 1]},
    "TokenBatch.of": {"positions": [[0, 1]]},
    "TransferEngine.load": MOVES,
    "TransferEngine.store": MOVES | {"retention": WISH},
    "VLLMKeys": {"hash": "sha256", "seed": "0", "tokens_per_block": 2},
    "connect": {"backend": "host://?capacity=64KiB"},
    "describe": {"block_ids": [1, 2]},
    "exchange": {"backend": "nixl://"},
    "make_block_key": {"group": 0},
}
"""Values that a callable takes in place of those, or beside the required ones."""

OWNERS: dict[str, Callable[[], Any]] = {
    "AttentionLayout": lambda: LAYOUT,
    "AttentionMetadataBuilder": Builder,
    "BlockMover": backend,
    "BlockTable": table,
    "BytesBackend": lambda: Values({}, NAMESPACE),
    "Descriptors": blocks,
    "EngineLayout": lambda: next(each for each in LAYOUT_ZOO if each.order[0] != "block"),
    "FullAttentionSpec": lambda: SPEC,
    "KVCacheSpec": lambda: SPEC,
    "LoadOrCompute": lambda: transfer.LoadOrCompute(1.5),
    "MultiGroupBlockTable": tables,
    "MultiGroupMetadataBuilder": lambda: MultiGroupMetadataBuilder([Builder()], tables()),
    "Namespace": lambda: NAMESPACE,
    "Observer": lambda: transfer.LoadOrCompute(1.5),
    "PageMapping": mapping,
    "PolledEngine": engine,
    "PromptExchange": prompts,
    "PromptKeys": lambda: PromptKeys([1, 2, 3]),
    "TellsKept": tiers,
    "TieredBackend": tiers,
    "TieredBackend.purge": lambda: tiers(Purged(None, NAMESPACE)),
    "TokenBatch": lambda: BATCH,
    "TransferEngine": engine,
    "UniformTypeKVCacheSpecs": lambda: UNIFORM,
    "VLLMKeys": VLLMKeys,
    "WorkerShard": lambda: SHARD,
}
"""Objects whose methods are called, by class or method."""


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


def _valid_calls() -> Iterator[tuple[str, Valid]]:
    """Find the valid call of each callable whose required arguments have a value."""
    for name, function in public_callables().items():
        special = SPECIAL.get(name, {})
        wanted = inspect.signature(function).parameters.values()
        required = {each.name for each in wanted if each.default is each.empty} - {"self"}
        if required <= {*special, *ARGUMENTS}:
            arguments = {each: ARGUMENTS[each] for each in required - {*special}} | special
            owner = OWNERS.get(name, OWNERS.get(name.partition(".")[0]))
            is_bound = "." not in name or inspect.ismethod(function)
            yield name, Valid(arguments, None if is_bound else owner)


VALID_CALLS = dict(_valid_calls())
