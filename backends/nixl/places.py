"""Places of blocks that peers tell each other, and what proves that they were read as they are."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvxfer.backends.nixl.wire import messages as wire
from kvxfer.backends.nixl.wire.regions import Regions
from kvxfer.checks import require_integers
from kvxfer.errors import InvalidArgumentError
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.storage.keys import BlockKey
from kvxfer.storage.lending import GENERATION_BYTES, Fences

Proofs: TypeAlias = list[int] | Fences
"""What proves that the bytes of blocks arrived: XXH3-64 of each of them, or their generations."""

MAX_PLACES = 1 << 16
"""Most places of a peer to remember; the oldest are forgotten."""

MAX_FRAGMENTS = 1 << 16
"""Most fragments whose places are told before blocks are pinned: a frame has room for more."""


@dataclass(frozen=True, slots=True, eq=False)
class _FoundPlaces:
    """Places of the blocks that one answer told.

    Attributes:
        blocks: Their bytes in the peer's memory.
        starts: Byte of its chunk at which each block begins.
        proofs: What proves that they were read as they are now.
    """

    blocks: Descriptors
    starts: NDArray[np.int64]
    proofs: Proofs

    def take(self, rows: list[int]) -> "_FoundPlaces":
        """Take the places of some blocks; without a copy if they are consecutive, as most are."""
        run = slice(rows[0], rows[0] + len(rows))
        is_run = rows == list(range(run.start, run.stop))
        at = run if is_run else rows
        blocks = self.blocks.select(run.start, run.stop) if is_run else self.blocks.take(rows)
        proofs = self.proofs
        if isinstance(proofs, Fences):
            chosen: Proofs = Fences(proofs.addresses[at], proofs.generations[at])
        else:
            chosen = [proofs[row] for row in rows]
        return _FoundPlaces(blocks, self.starts[at], chosen)

    @classmethod
    def concatenate(cls, parts: "Sequence[_FoundPlaces]") -> "_FoundPlaces | None":
        """Concatenate what several answers told; None if their proofs are of different kinds."""
        if len(parts) == 1:
            return parts[0]
        fences = [part.proofs for part in parts if isinstance(part.proofs, Fences)]
        checksums = [part.proofs for part in parts if not isinstance(part.proofs, Fences)]
        if fences and checksums:
            return None
        proofs: Proofs = list(chain.from_iterable(checksums))
        if fences:
            addresses, generations = zip(
                *((f.addresses, f.generations) for f in fences), strict=True
            )
            proofs = Fences(np.concatenate(addresses), np.concatenate(generations))
        blocks = Descriptors.concatenate([part.blocks for part in parts])
        return cls(blocks, np.concatenate([part.starts for part in parts]), proofs)


class Places:
    """Places that a peer has told, so that a load can read there without another request.

    A found block is not pinned, so the bytes read at its place must have its checksum, or its
    generation must still be the same. Each place is used once: a loaded block is rarely loaded
    again soon.
    """

    def __init__(self, remote: Regions) -> None:
        self._remote = remote
        self._rows: dict[BlockKey, tuple[_FoundPlaces, int]] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._rows

    def note(self, keys: Sequence[BlockKey], found: wire.Found) -> None:
        """Remember the places that were found of `keys`, instead of earlier ones.

        The oldest places are forgotten beyond `MAX_PLACES`.

        Raises:
            InvalidArgumentError: A place is not in the peer's memory, or not every block that is
                there has one.
        """
        self.forget(keys)
        if found.extents is None:
            return
        blocks = self._remote.resolve(found.extents)
        if len(blocks) > MAX_FRAGMENTS:
            raise InvalidArgumentError("fragments", len(blocks), f"at most {MAX_FRAGMENTS}")
        there = [key for key, is_there in zip(keys, found.there, strict=True) if is_there]
        counts = (blocks.num_blocks, len(found.starts))
        if counts != (len(there),) * 2:
            wanted = f"one for each of {len(there)} blocks"
            raise InvalidArgumentError("blocks and starts", counts, wanted)
        starts = require_integers("starts", found.starts)
        places = _FoundPlaces(blocks, starts, read_proofs(self._remote, found, len(there)))
        self._rows.update((key, (places, row)) for row, key in enumerate(there))
        while len(self._rows) > MAX_PLACES:
            del self._rows[next(iter(self._rows))]

    def forget(self, keys: Iterable[BlockKey]) -> None:
        """Forget the places of some blocks; unknown ones are ignored."""
        for key in keys:
            self._rows.pop(key, None)

    def take(
        self, keys: Sequence[BlockKey], blocks: Descriptors
    ) -> tuple[Descriptors, Proofs] | None:
        """Take the places and proofs of blocks, and forget them.

        None unless all places are known, and the blocks are wanted as they were stored.
        """
        taken = [place for key in keys if (place := self._rows.pop(key, None))]
        if len(taken) < len(keys):
            return None
        if all(found is taken[0][0] for found, _ in taken):  # in one answer: the usual case
            runs = [taken]
        else:
            runs = [list(run) for _, run in groupby(taken, key=lambda place: id(place[0]))]
        places = _FoundPlaces.concatenate([run[0][0].take([row for _, row in run]) for run in runs])
        if places is None or not np.array_equal(places.starts, blocks.payload_starts):
            return None
        if not np.array_equal(places.blocks.block_sizes, blocks.block_sizes):
            return None
        return places.blocks, places.proofs


def locate_fences(memory: Regions, fences: Fences | None) -> wire.Fencing | None:
    """Tell a peer generations of blocks, and where they are in our registered memory."""
    if fences is None:
        return None
    words = Descriptors.of_pieces(fences.addresses, [GENERATION_BYTES] * len(fences.addresses))
    generations = fences.generations.astype("<u8", copy=False).tobytes()
    return wire.Fencing(extents=memory.locate(words), generations=generations)


def read_proofs(remote: Regions, answer: wire.Found | wire.Pinned, num_blocks: int) -> Proofs:
    """Read the proofs of an answer about blocks.

    Raises:
        InvalidArgumentError: There is not one for each block, or a generation is not in the peer's
            memory.
    """
    if answer.fences is None:
        if len(answer.checksums) != num_blocks:
            wanted = f"one for each of {num_blocks} blocks"
            raise InvalidArgumentError("checksums", len(answer.checksums), wanted)
        return answer.checksums
    words = remote.resolve(answer.fences.extents)
    data = answer.fences.generations
    if len(data) != num_blocks * GENERATION_BYTES:
        wanted = f"{GENERATION_BYTES} for each of {num_blocks} blocks"
        raise InvalidArgumentError("bytes of generations", len(data), wanted)
    if len(words) != num_blocks or not (words.lengths == GENERATION_BYTES).all():
        wanted = f"{num_blocks} of {GENERATION_BYTES} bytes"
        raise InvalidArgumentError("extents of generations", words, wanted)
    return Fences(words.addresses, np.frombuffer(data, "<u8"))
