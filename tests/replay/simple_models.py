"""Simple models of caches to compare with: lists and loops, slow and obvious."""

from collections.abc import Sequence


class ListStore:
    """LRU store of a tier as a list, the most recently used block last."""

    def __init__(self, capacity: int) -> None:
        self.blocks: list[int] = []
        self.capacity = capacity

    def use(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):
            self.blocks.remove(block)
            self.blocks.append(block)

    def store(self, blocks: Sequence[int]) -> list[int]:
        old = [block for block in blocks if block in self.blocks]
        new = [block for block in blocks if block not in self.blocks][: self.capacity - len(old)]
        for victim in [block for block in self.blocks if block not in old]:
            if len(self.blocks) + len(new) > self.capacity:
                self.blocks.remove(victim)
        self.use(old)
        self.blocks += reversed(new)
        return new


def lru_tier_hits(
    requests: Sequence[Sequence[int]], host_capacity: int, file_capacity: int
) -> tuple[int, int]:
    """Count the hits of files below host memory that came from each of them."""
    host, file = ListStore(host_capacity), ListStore(file_capacity)
    hits = [0, 0]
    for blocks in requests:
        in_host = [block for block in blocks if block in host.blocks]
        below = [block for block in blocks if block in file.blocks and block not in in_host]
        loaded: list[int] = []
        for block in blocks:
            if block not in in_host and block not in below:
                break
            loaded.append(block)
        file.use(below)
        host.store(below)
        for block in loaded:
            if block not in host.blocks and block not in file.blocks:
                break
            hits[block in below or block not in host.blocks] += 1
        host.use([block for block in loaded if block in host.blocks])
        file.use([block for block in loaded if block not in host.blocks and block in file.blocks])
        rest = blocks[len(loaded) :]
        only_below = [b for b in rest if b in file.blocks and b not in host.blocks]
        file.use(only_below)
        new = [block for block in rest if block not in only_below]
        host.store(new)
        down = [block for block in new if block in host.blocks and block not in file.blocks]
        file.store(down)
        file.store([block for block in new if block not in host.blocks])
    return hits[0], hits[1]
