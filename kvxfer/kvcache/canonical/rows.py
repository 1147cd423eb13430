"""Rows: pages of several layers that are adjacent in every block, joined into one piece."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter

import numpy as np
import torch

from kvxfer.errors import LayoutError, OverlapError
from kvxfer.kvcache.canonical.layer_pages import LayerPages

_place_of = attrgetter(
    *("address", "num_fragments", "fragment_size_bytes"),
    *("fragment_stride_bytes", "data_size_bytes"),
)


@dataclass(frozen=True, slots=True)
class Row:
    """Row of pages: `size_bytes` bytes at `address + b * block_stride_bytes`, for every block b.

    Attributes:
        members: Pages in the row; those of different groups may be the same bytes.
        size_bytes: Bytes of a row: the whole block stride if that holds nothing else.
    """

    address: int
    size_bytes: int
    used_bytes: int
    block_stride_bytes: int
    num_blocks: int
    storage: torch.UntypedStorage
    members: tuple[LayerPages, ...]

    @property
    def end(self) -> int:
        """Address after the last byte that belongs to a page."""
        return self.address + (self.num_blocks - 1) * self.block_stride_bytes + self.used_bytes

    def as_tensor(self, device: torch.device) -> torch.Tensor:
        """View the rows as int8 `(num_blocks, size_bytes)` over the storage; no copy."""
        return torch.empty(0, dtype=torch.int8, device=device).set_(
            self.storage,
            self.address - self.storage.data_ptr(),
            (self.num_blocks, self.size_bytes),
            (self.block_stride_bytes, 1),
        )


def join_rows(pages: Sequence[LayerPages]) -> list[Row]:
    """Join pages that touch or coincide in every block into rows; other pages are rows alone.

    Pages touch if they have one block stride and no undeclared byte between them: the engine may
    use a gap for something else, so a row never spans one.
    """
    _require_shared_wholly(pages)
    by_place = sorted(pages, key=lambda p: (p.block_stride_bytes, p.address, p.extent_bytes))
    rows = []
    for _, alike in groupby(by_place, key=lambda p: p.block_stride_bytes):
        for window in _windows(list(alike)):
            _require_same_or_apart(window)
            rows += _touching(window)
    _require_rows_apart(rows)
    return rows


def _require_shared_wholly(pages: Sequence[LayerPages]) -> None:
    """Refuse layers of one group that have some of their pages in common, but not all."""
    places: dict[tuple[int, str], set[int]] = defaultdict(set)
    users: dict[tuple[int, int], list[str]] = defaultdict(list)
    for page in pages:
        for name in page.layer_names:
            places[page.group, name].add(page.address)
            users[page.group, page.address].append(name)
    for (group, _), names in users.items():
        found = {name: places[group, name] for name in names}
        if any(each != found[names[0]] for each in found.values()):
            raise OverlapError(names, "they have some pages in common, but not all")


def _windows(pages: Sequence[LayerPages]) -> list[list[LayerPages]]:
    """Group pages, sorted by address, whose block 0 may lie in one row."""
    windows: list[list[LayerPages]] = []
    for each in pages:
        first = windows[-1][0] if windows else each
        same_storage = first.storage.data_ptr() == each.storage.data_ptr()
        inside = each.address < first.address + first.block_stride_bytes
        if windows and inside and (same_storage or each.address == first.address):
            windows[-1].append(each)
        else:
            windows.append([each])
    return windows


def _require_same_or_apart(window: Sequence[LayerPages]) -> None:
    """Refuse pages of one window that overlap without being the same.

    Groups whose kernels use blocks of different sizes cut the same row differently. Their block
    ids are disjoint, so their pages may overlap.
    """
    spans = sorted((start, end, i) for i, p in enumerate(window) for start, end in p.fragments())
    reach: list[tuple[int, int]] = []
    for start, end, index in spans:
        page = window[index]
        for other_end, other_index in reach:
            other = window[other_index]
            if other_index == index or other_end <= start:
                continue
            cut_differently = (
                page.group != other.group and page.num_fragments != other.num_fragments
            )
            if not _same_pages(page, other) and not cut_differently:
                raise OverlapError(
                    [other.layer_names[0], page.layer_names[0]],
                    f"byte offsets {other.address - window[0].address} and "
                    f"{page.address - window[0].address} of a block, pages of "
                    f"{other.extent_bytes} and {page.extent_bytes} bytes",
                )
        reach = [(other_end, i) for other_end, i in reach if other_end > start]
        reach.append((end, index))


def _same_pages(page: LayerPages, other: LayerPages) -> bool:
    """Whether two pages may share their bytes: equal in one group, equal starts across groups.

    Pages of one layer may not, nor may different parts in one group: keys are never values.
    """
    if not set(page.layer_names).isdisjoint(other.layer_names):
        return False
    if page.group == other.group:
        parts, others = ([(box.part, box.first) for box in each.boxes] for each in (page, other))
        return bool(_place_of(page) == _place_of(other)) and parts == others
    return page.address == other.address


def _touching(window: Sequence[LayerPages]) -> list[Row]:
    spans = sorted((start, end) for page in window for start, end in page.fragments())
    runs: list[tuple[int, int]] = []
    for start, end in spans:
        if runs and start <= runs[-1][1]:
            runs[-1] = (runs[-1][0], max(end, runs[-1][1]))
        else:
            runs.append((start, end))
    return [_row(window, start, end, alone=len(runs) == 1) for start, end in runs]


def _row(window: Sequence[LayerPages], start: int, end: int, *, alone: bool) -> Row:
    members = tuple(page for page in window if start <= page.address < end)
    for page in members:
        if page.address + page.extent_bytes > end:
            raise LayoutError(
                f"layers {list(page.layer_names)!r}: a block is {page.num_fragments} pieces of "
                f"{page.fragment_size_bytes} bytes, {page.fragment_stride_bytes} apart; a page "
                "must be contiguous, or its gaps filled by other layers"
            )
    longest = max(members, key=lambda page: page.address + page.extent_bytes)
    stride, num_blocks = longest.block_stride_bytes, longest.num_blocks
    if end - start > stride:
        raise OverlapError(
            [page.layer_names[0] for page in members],
            f"rows of {end - start} bytes in blocks of {stride}",
        )
    storage = longest.storage
    whole_end = start + num_blocks * stride - storage.data_ptr()
    whole = alone and whole_end <= storage.nbytes()
    return Row(
        address=start,
        size_bytes=stride if whole else end - start,
        used_bytes=end - start,
        block_stride_bytes=stride,
        num_blocks=num_blocks,
        storage=storage,
        members=members,
    )


def _require_rows_apart(rows: Sequence[Row]) -> None:
    open_rows: list[Row] = []
    for row in sorted(rows, key=lambda r: r.address):
        open_rows = [other for other in open_rows if other.end > row.address]
        for other in open_rows:
            if _overlap(other, row):
                raise OverlapError(
                    [p.layer_names[0] for p in (*other.members, *row.members)],
                    f"blocks of {other.used_bytes} bytes every {other.block_stride_bytes} and of "
                    f"{row.used_bytes} bytes every {row.block_stride_bytes}, "
                    f"{row.address - other.address} bytes further on",
                )
        open_rows.append(row)


def _overlap(first: Row, second: Row) -> bool:
    """Whether any two blocks of the rows share a byte; `second` must not begin before `first`."""
    stride = first.block_stride_bytes
    if stride == second.block_stride_bytes:
        blocks, offset = divmod(second.address - first.address, stride)
        on_page = blocks < first.num_blocks and offset < first.used_bytes
        on_next = blocks + 1 < first.num_blocks and offset + second.used_bytes > stride
        return on_page or on_next
    starts = first.address + np.arange(first.num_blocks) * stride
    others = second.address + np.arange(second.num_blocks) * second.block_stride_bytes
    before = np.searchsorted(others, starts + first.used_bytes) - 1
    found = before >= 0
    return bool((others[before[found]] + second.used_bytes > starts[found]).any())
