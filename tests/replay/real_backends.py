"""Replay on real backends, with tiny blocks of known bytes, to compare with the model."""

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvxfer import runtime
from kvxfer.backends.host import PoolShape
from kvxfer.connect import open_backend
from kvxfer.errors import KVXferError
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.replay import TierPlan, Trace, simulate
from kvxfer.replay.block_size import opaque_namespace
from kvxfer.storage.backend import Backend
from kvxfer.storage.keys import BlockKey, make_block_key
from kvxfer.tiering import TieredBackend

BLOCK_BYTES = 64
PAGE_BYTES = 4096
FILE_BYTES = 2 * PAGE_BYTES
"""Bytes on the disk of the file of a block: a page of header, and one of data."""


class WrongBytesError(KVXferError):
    """Block that came back with other bytes than it was stored with."""


async def replay_on(backend: Backend, trace: Trace) -> int:
    """Replay a trace on a backend: look up, load the leading run, store the rest; count hits.

    Each request waits for all that the one before it began, copies to lower tiers included, and
    the bytes of each hit are compared with those that were stored.

    Raises:
        WrongBytesError: They differ.
    """
    num_hits = 0
    for blocks in trace.requests():
        if not blocks:
            continue
        keys = [_key(block) for block in blocks]
        found = await backend.lookup(keys)
        run = next((index for index, there in enumerate(found) if not there), len(keys))
        if run:
            memory = np.zeros((run, BLOCK_BYTES // 8), np.int64)
            outcomes = await backend.load(keys[:run], _describe(memory))
            loaded = next((i for i, outcome in enumerate(outcomes) if not outcome.done), run)
            if not (memory[:loaded] == _payload(blocks[:loaded])).all():
                raise WrongBytesError(f"a block of {blocks[:loaded]} came back with other bytes")
            num_hits += loaded
        if run < len(keys):
            memory = _payload(blocks[run:])
            await backend.store(keys[run:], _describe(memory))
            if isinstance(backend, TieredBackend):
                await backend.flush()  # copies to lower tiers are made in the background
    return num_hits


def replay_real(trace: Trace, plans: Sequence[TierPlan], folder: Path) -> tuple[int, int]:
    """Replay a trace on real tiers of as many blocks as the planned ones.

    Args:
        trace: The trace.
        plans: The tiers, fastest first.
        folder: Folder in which files are made, and removed.

    Returns:
        Hits of the real tiers, and those of the model.

    Raises:
        OSError: Nothing can be written to the folder.
        WrongBytesError: A block came back with other bytes.
    """
    modelled = simulate(trace, plans).num_hits
    with tempfile.TemporaryDirectory(prefix="kvxfer-replay-", dir=folder) as root:
        backend = [_choice(plan, f"{root}/{index}") for index, plan in enumerate(plans)]
        return runtime.run(_open_and_replay(backend, trace)), modelled


async def _open_and_replay(backend: Sequence[Mapping[str, Any]], trace: Trace) -> int:
    async with AsyncExitStack() as stack:
        opened = open_backend(backend, opaque_namespace(BLOCK_BYTES))
        stack.push_async_callback(opened.aclose)
        await opened.start()
        return await replay_on(opened, trace)


def _choice(plan: TierPlan, path: str) -> Mapping[str, Any]:
    if plan.medium == "host":
        return {
            "type": "host",
            "capacity": _host_capacity(plan.num_slots),
            "eviction": plan.policy,
        }
    return {
        "type": "file",
        "path": path,
        "capacity": plan.num_slots * FILE_BYTES,
        "eviction": plan.policy,
        "min_free": 1,
        "direct": "off",
    }


def _host_capacity(num_slots: int) -> int:
    """Find the capacity of host memory in which exactly this many blocks fit."""
    capacity = PoolShape(num_slots, 1, PAGE_BYTES).num_bytes
    while _fit(capacity).num_slots < num_slots:
        capacity += PAGE_BYTES
    return capacity


def _fit(capacity: int) -> PoolShape:
    return PoolShape.fit(capacity_bytes=capacity, num_parts=1, part_size_bytes=BLOCK_BYTES)


def _key(block: int) -> BlockKey:
    return make_block_key(block.to_bytes(16, "big"), 0)


def _payload(blocks: Sequence[int]) -> NDArray[np.int64]:
    return np.repeat(np.array(blocks, np.int64)[:, None] + 1, BLOCK_BYTES // 8, axis=1)


def _describe(memory: NDArray[np.int64]) -> Descriptors:
    number = len(memory)
    first = memory.ctypes.data
    return Descriptors(
        addresses=np.arange(first, first + number * BLOCK_BYTES, BLOCK_BYTES, dtype=np.uint64),
        lengths=np.full(number, BLOCK_BYTES, np.uint64),
        block_offsets=np.arange(number + 1, dtype=np.int64),
        payload_starts=np.zeros(number, np.int64),
        device=torch.device("cpu"),
        owners=(memory,),
    )
