"""Simple models of caches to compare with: lists and loops, slow and obvious."""

from collections.abc import Sequence


def lru_hits(requests: Sequence[Sequence[int]], capacity: int, *, tail_first: bool) -> int:
    """Count hits in a list of blocks, the most recently used one last."""
    cache: list[int] = []
    hits = 0
    for blocks in requests:
        for block in blocks:
            if block not in cache:
                break
            hits += 1
        for block in reversed(blocks) if tail_first else blocks:
            if block in cache:
                cache.remove(block)
            cache.append(block)
        del cache[: max(0, len(cache) - capacity)]
    return hits
