"""Audit of hand-overs: an independent check of every page that is loaded from another engine.

`AuditedHandover` keeps digests of each token's bytes: in offered blocks at the time of the offer,
and in loaded blocks once they have landed. It reads both by the boxes of the caches, without the
mappings that move bytes, so that blocks of different sizes, layouts and workers are compared by
meaning. `read` compares them.

With `Hook.FLIP_LOADED_BIT`, a page of each load is altered after it was verified, as by a broken
copy.
"""

from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvxfer.backends.nixl import Endpoint
from kvxfer.kvcache.canonical import CanonicalKVCaches
from kvxfer.kvcache.page_box import Digit, PageBox
from kvxfer.kvcache.portable import CacheDescription, WorkerShard
from kvxfer.lending.handover import Handover
from kvxfer.lending.reader import Fetched, Reader, Wanted
from kvxfer.storage.keys import BlockKey, group_of
from tests.e2e.audit import Audit, Forwarding, Hook, Log, hooks, lines_of

SIGN_BIT = -0x80
"""Bit of each second byte, so that altered little-endian floats of 16 or 32 bits stay finite."""
BLOCK = "block"
"""Name in place of a head for blocks of which only the bytes are known."""

Digests = dict[str, list[int]]
"""Digest of each token of a block, for each head of the model."""


def _find_tokens(boxes: Sequence[PageBox], shard: WorkerShard) -> dict[str, NDArray[np.int64]]:
    """Find the bytes of each token, `(tokens, bytes)`, for each head; none without tokens.

    Bytes of a token are in the order of layers, parts and the other axes.
    """
    if not boxes or not all("token" in box.axes for box in boxes):
        return {}
    found: dict[str, list[NDArray[np.int64]]] = defaultdict(list)
    for box in sorted(shard.place(boxes), key=lambda box: (box.layer_name, box.part)):
        for head, rows in _rows_of(box):
            found[str(head)].append(rows)
    return {head: np.concatenate(rows, axis=1) for head, rows in found.items()}


def _rows_of(box: PageBox) -> Iterator[tuple[int, NDArray[np.int64]]]:
    digits = (*box.digits, Digit("~byte", box.dtype.itemsize, 1))
    values = np.indices([digit.size for digit in digits]).reshape(len(digits), -1)
    places = np.full(values.shape[1], box.offset_bytes)
    indices = {digit.axis: np.full_like(places, box.first_index(digit.axis)) for digit in digits}
    for digit, value in zip(digits, values, strict=True):
        places += value * digit.stride_bytes
        indices[digit.axis] += value * digit.step
    heads = indices.pop("head", np.full_like(places, -1))
    tokens = indices.pop("token")
    others = [indices[axis] for axis in sorted(indices, reverse=True)]
    order = np.lexsort((*others, tokens, heads))  # the last one first
    num_tokens = len(np.unique(tokens))
    for head in np.unique(heads):
        yield int(head), places[order[heads[order] == head]].reshape(num_tokens, -1)


class _AuditedReader(Forwarding):
    """Reader that passes its fetches to an audit."""

    def __init__(self, inner: Reader, audit: Callable[[Any, Wanted], Any]) -> None:
        super().__init__(inner)
        self._audit = audit

    def fetch(self, endpoint: Endpoint, wanted: Wanted, **how: Any) -> Any:
        return self._audit(self._inner.fetch(endpoint, wanted, **how), wanted)


class AuditedHandover(Forwarding):
    """Hand-over of a worker under audit, which replaces the one that it wraps."""

    def __init__(
        self, inner: Handover, caches: CanonicalKVCaches, description: CacheDescription
    ) -> None:
        super().__init__(inner)
        self._places = [
            _find_tokens(group.boxes, description.shard) for group in description.groups
        ]
        self._sizes = [group.tokens_per_block for group in description.groups]
        self._rank = description.shard.rank
        self._log = Log(f"handover{self._rank}")
        self._caches = caches
        self._null_block = caches.null_block_id
        self.reader = _AuditedReader(inner.reader, self._audit)

    def offer(
        self, ticket: str, keys: Sequence[BlockKey], block_ids: Sequence[int], **how: Any
    ) -> None:
        groups = list(map(group_of, keys))
        blocks = [
            (key.hex(), self._sizes[group], self._digest(group, block))
            for key, group, block in zip(keys, groups, block_ids, strict=True)
        ]
        self._log.write("offer", blocks=blocks)
        self._inner.offer(ticket, keys, block_ids, **how)

    async def _audit(self, loading: Awaitable[Fetched], wanted: Wanted) -> Fetched:
        fetched = await loading
        if Hook.FLIP_LOADED_BIT in hooks():
            self._alter(next(filter(None, wanted.block_ids[0])))
        groups = [
            {
                "keys": [key.hex() for key in wanted.keys[group]],
                "first_block": wanted.first_blocks[group],
                "blocks": [
                    (index * self._sizes[group], self._digest(group, block))
                    for index, block in enumerate(ids)
                    if block != self._null_block and block not in fetched.bad_blocks[group]
                    if (index + 1) * self._sizes[group] > wanted.first_token
                    if index * self._sizes[group] < wanted.num_tokens
                ],
            }
            for group, ids in enumerate(wanted.block_ids)
        ]
        tokens = (wanted.first_token, wanted.num_tokens)
        self._log.write("load", rank=self._rank, tokens=tokens, groups=groups)
        return fetched

    def _digest(self, group: int, block_id: int) -> Digests:
        """Digest the tokens of a block, or the whole block if it has no tokens."""
        refs = self._caches.group_data_refs[group]
        pages = [
            self._caches.tensors[ref.tensor_idx].tensor[block_id][: ref.page_size_bytes].cpu()
            for ref in refs
        ]
        payload = np.concatenate(pages).view(np.uint8)
        places = self._places[group] or {BLOCK: np.arange(len(payload))[None]}
        return {
            head: [xxhash.xxh3_64_intdigest(row.tobytes()) for row in payload[rows]]
            for head, rows in places.items()
        }

    def _alter(self, block_id: int) -> None:
        """Alter the page of the last layer."""
        ref = self._caches.group_data_refs[0][-1]
        row = self._caches.tensors[ref.tensor_idx].tensor[block_id]
        row[1 : ref.page_size_bytes : 2] ^= SIGN_BIT


class _Offered(NamedTuple):
    """Blocks that were offered under one key, by all workers."""

    tokens_per_block: int
    digests: dict[str, list[list[int]]]


def read(directory: Path) -> Audit:
    """Compare loaded bytes with offered ones, in all engines that share a directory."""
    offered: dict[str, _Offered] = {}
    loads = []
    for line in lines_of(directory, "handover"):
        if line["event"] == "load":
            loads.append(line)
        for key, size, digests in line.get("blocks", ()):
            known = offered.setdefault(key, _Offered(size, defaultdict(list)))
            for head, tokens in digests.items():
                known.digests[head].append(tokens)
    audit = Audit()
    for load in loads:
        counts = [
            _compare(audit, load, group, found, offered)
            for group, found in enumerate(load["groups"])
        ]
        audit.num_tokens += max(counts) if load["rank"] == 0 else 0
    return audit


def _compare(audit: Audit, load: Any, group: int, found: Any, offered: dict[str, _Offered]) -> int:
    """Compare the blocks of one group of a load; return the tokens that were compared."""
    num_tokens = 0
    for first, digests in found["blocks"]:
        audit.num_pages += 1
        audit.ranks.add(load["rank"])
        name = f"tokens from {first} of group {group} at rank {load['rank']}"
        low, high = max(first, load["tokens"][0]), load["tokens"][1]
        verdicts: set[bool | None] = set()
        for head, tokens in digests.items():
            ours = {first + at: digest for at, digest in enumerate(tokens)}
            wanted = [at for at in ours if head == BLOCK or low <= at < high]
            verdicts |= {_is_offered(found, head, at, ours[at], offered) for at in wanted}
        num_tokens += len(wanted)
        if None in verdicts:
            audit.unknown.append(name)
        elif False in verdicts:
            audit.different.append(name)
    return num_tokens


def _is_offered(
    found: Any, head: str, token: int, digest: int, offered: dict[str, _Offered]
) -> bool | None:
    """Whether a token has the bytes offered under its key; None if none were offered."""
    size = next((offered[key].tokens_per_block for key in found["keys"] if key in offered), 0)
    index = token // size - found["first_block"] if size else -1
    key = found["keys"][index] if 0 <= index < len(found["keys"]) else ""
    if key not in offered or head not in offered[key].digests:
        return None
    return any(tokens[token % size] == digest for tokens in offered[key].digests[head])
