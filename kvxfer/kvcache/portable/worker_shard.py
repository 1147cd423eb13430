"""Worker shards: the heads and tokens of a model that one of its workers keeps."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvxfer.checks import require_instances, require_integer, set_counts
from kvxfer.errors import InvalidArgumentError, PageMappingError
from kvxfer.kvcache.page_box import PageBox

OPAQUE = "opaque"
"""Name prefix of parts that are plain bytes without axes; a number follows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerShard:
    """Shard of one worker among those that share the layers of a pipeline stage.

    Workers are numbered as in vLLM: tensor parallelism innermost; decode context parallelism
    divides tokens among workers that hold the same heads, prefill context parallelism among
    groups of `tp_size` workers.

    Attributes:
        rank: Rank of this worker, 0 to `tp_size * pcp_size - 1`.
        tp_size: Workers that divide the heads.
        num_kv_heads: KV heads of the whole model; if fewer than `tp_size`, several workers keep
            each.
        pcp_size: Groups of workers that divide the tokens in prefill.
        dcp_size: Workers that divide the tokens among those that hold the same heads.
        interleave_tokens: Consecutive tokens of one worker before those of the next.

    Raises:
        InvalidArgumentError: A number is invalid, or does not fit the others; the error names it.

    Source: `_RankContext` of vLLM's `offloading/canonical_mapping.py`.
    """

    num_kv_heads: int
    rank: int = 0
    tp_size: int = 1
    pcp_size: int = 1
    dcp_size: int = 1
    interleave_tokens: int = 1

    def __post_init__(self) -> None:
        set_counts(self, "num_kv_heads", "tp_size", "pcp_size", "dcp_size", "interleave_tokens")
        expected = f"0 <= rank < {self.num_workers}"
        rank = require_integer("rank", self.rank, maximum=self.num_workers - 1, expected=expected)
        object.__setattr__(self, "rank", rank)
        small, large = sorted((self.num_kv_heads, self.tp_size))
        if large % small:
            rule = f"a divisor or a multiple of {self.num_kv_heads} KV heads"
            raise InvalidArgumentError("tp_size", self.tp_size, rule)

    @property
    def num_workers(self) -> int:
        """Number of all workers."""
        return self.tp_size * self.pcp_size

    @property
    def num_token_shares(self) -> int:
        """Number of workers that divide the tokens of a block."""
        return self.pcp_size * self.dcp_size

    def place(self, boxes: Sequence[PageBox]) -> tuple[PageBox, ...]:
        """Shift the boxes of this worker's block to their indices in the whole model.

        Raises:
            PageMappingError: The number of heads is not that of such a worker, interleaved runs of
                tokens do not end where the boxes' digits do, or it is not known how workers
                divide a state.
        """
        require_instances("boxes", boxes, PageBox)
        kept = max(1, self.num_kv_heads // self.tp_size)
        heads: dict[tuple[str, str], int] = {}
        for box in boxes:
            name = box.layer_name, box.part
            heads[name] = max(heads.get(name, 0), box.first_index("head") + box.extent("head"))
        placed = []
        for box in boxes:
            found = heads[box.layer_name, box.part]
            if is_state(box):
                if self.num_workers > 1 and "head" not in box.axes:
                    raise PageMappingError("head", f"{box.part} without heads", "one worker")
                if self.num_token_shares > 1:
                    raise PageMappingError(
                        "token", f"{box.part} without tokens", "no shares of them"
                    )
                first = self._tp_rank * found
            else:
                if "head" in box.axes and found != kept:
                    raise PageMappingError(
                        "head", f"{found} in {box.layer_name!r}", f"{kept} per worker"
                    )
                first = self._tp_rank // self._num_copies(box) * kept
            moved = box.shifted("head", first) if "head" in box.axes else box
            if "token" in box.axes and self.num_token_shares > 1:
                moved = moved.interleaved(
                    "token",
                    run=self.interleave_tokens,
                    rank=self.rank // self.tp_size * self.dcp_size + self._tp_rank % self.dcp_size,
                    num_ranks=self.num_token_shares,
                )
            placed.append(moved)
        return tuple(placed)

    def total_heads(self, boxes: Sequence[PageBox]) -> int:
        """Count the heads of the whole model in the layer and part of these boxes.

        Raises:
            InvalidArgumentError: There is no box.
        """
        require_instances("boxes", boxes, PageBox, at_least_one=True)
        if is_state(boxes[0]):
            return boxes[0].extent("head") * self.tp_size
        return self.num_kv_heads

    def writers(self, boxes: Sequence[PageBox]) -> tuple[int, int]:
        """Count the workers that hold the same bytes, and return this one's index among them.

        Raises:
            PageMappingError: Some boxes are kept by more workers than others.
            InvalidArgumentError: There is no box, or tokens are divided among more workers than
                hold the same heads.
        """
        require_instances("boxes", boxes, PageBox, at_least_one=True)
        found = {self._num_copies(box) for box in boxes}
        if len(found) > 1:
            raise PageMappingError("head", f"kept by {sorted(found)} workers", "one number")
        (copies,) = found
        shares = self.dcp_size if any("token" in box.axes for box in boxes) else 1
        if copies % shares:
            rule = f"a divisor of {copies}, the workers that hold the same heads"
            raise InvalidArgumentError("dcp_size", self.dcp_size, rule)
        return copies // shares, self._tp_rank % copies // shares

    @property
    def _tp_rank(self) -> int:
        return self.rank % self.tp_size

    def _num_copies(self, box: PageBox) -> int:
        """Count the workers of a tensor-parallel group that keep the same heads of a box."""
        if is_state(box) or box.part.startswith(OPAQUE):
            return 1
        return max(1, self.tp_size // self.num_kv_heads) if "head" in box.axes else self.tp_size


def is_state(box: PageBox) -> bool:
    """Whether a box holds a state of a recurrent layer."""
    return box.part.startswith("state")
