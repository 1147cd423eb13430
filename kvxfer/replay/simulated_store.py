"""Simulated store: the blocks that a host or file backend would have, without their bytes."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal, cast

from kvxfer.storage.eviction.policies import POLICIES, PolicyName
from kvxfer.storage.keys import BlockKey

Medium = Literal["host", "file", "object"]


class SimulatedMedium(ABC):
    """Blocks of one tier, without their bytes.

    Attributes:
        num_read: Blocks that were read.
        num_written: Blocks that were written.
        num_evicted: Blocks that were evicted.
    """

    def __init__(self) -> None:
        self.num_read = self.num_written = self.num_evicted = 0
        self._resident: set[int] = set()

    def __contains__(self, block: object) -> bool:
        return block in self._resident

    def find(self, blocks: Sequence[int]) -> list[int]:
        """Find the blocks that are there; not a use of them."""
        resident = self._resident
        return [block for block in blocks if block in resident]

    def lookup(self, blocks: Sequence[int]) -> list[int]:
        """Find the blocks that are there, as a lookup of the real backend does."""
        return self.find(blocks)

    def try_load(self, blocks: Sequence[int]) -> list[int]:
        """Read the blocks that are there, and return them."""
        there = self.find(blocks)
        self.load(there)
        return there

    @abstractmethod
    def load(self, blocks: Sequence[int]) -> None:
        """Read blocks that are there; the first of them is used last."""

    @abstractmethod
    def load_for_copy(self, blocks: Sequence[int]) -> None:
        """Read blocks that are there; not a use of them."""

    @abstractmethod
    def store(self, blocks: Sequence[int]) -> list[int]:
        """Write the blocks that are not there, as far as there is room; a use of the others.

        Returns:
            The blocks that were written.
        """


class SimulatedStore(SimulatedMedium):
    """Store of one tier, which asks the real eviction policy in the order of the real backends.

    Attributes:
        medium: Backend that is simulated. Their orders of eviction differ: host memory evicts for
            one block after the other, files for a whole batch at once.
        policy: Name of the eviction policy.
        num_slots: Blocks that fit.
    """

    def __init__(self, medium: Medium, policy: PolicyName, num_slots: int) -> None:
        super().__init__()
        self.medium = medium
        self.policy: PolicyName = policy
        self.num_slots = num_slots
        self._policy = POLICIES[policy](num_slots)

    def load(self, blocks: Sequence[int]) -> None:
        """See `SimulatedMedium.load`."""
        self._touch(_keys(blocks))
        self.num_read += len(blocks)

    def load_for_copy(self, blocks: Sequence[int]) -> None:
        """See `SimulatedMedium.load_for_copy`."""
        self.num_read += len(blocks)

    def store(self, blocks: Sequence[int]) -> list[int]:
        """See `SimulatedMedium.store`."""
        policy, resident = self._policy, self._resident
        present = _keys([block for block in blocks if block in resident])
        absent = [block for block in blocks if block not in resident]
        self._touch(present)
        for key in present:
            policy.hold(key)
        if self.medium == "host":
            written = self._replace(absent)
            self._release(present)
        else:
            absent = absent[: self._make_room(len(absent))]
            self._release(present)
            for key in _keys(absent):
                policy.admit(key)
            resident.update(absent)
            written = absent
        self._release(_keys(written))
        self.num_written += len(written)
        return written

    def _touch(self, keys: Sequence[BlockKey]) -> None:
        touch = self._policy.touch
        for key in reversed(keys):
            touch(key)

    def _release(self, keys: Sequence[BlockKey]) -> None:
        release = self._policy.release
        for key in reversed(keys):
            release(key)

    def _replace(self, absent: list[int]) -> list[int]:
        """Admit blocks one by one, each in a free slot or in that of another one."""
        policy, resident = self._policy, self._resident
        keys = _keys(absent)
        num_free = min(self.num_slots - len(resident), len(keys))
        for key in keys[:num_free]:
            policy.admit(key)
        num_written = min(len(keys), num_free + len(policy))
        victims = cast("list[int]", [policy.replace(key) for key in keys[num_free:num_written]])
        written = absent[:num_written]
        resident.difference_update(victims)
        resident.update(written)
        self.num_evicted += len(victims)
        return written

    def _make_room(self, number: int) -> int:
        """Evict for blocks that come; return how many of them there is room for."""
        policy, resident = self._policy, self._resident
        num_free = self.num_slots - len(resident)
        num_evicted = min(max(number - num_free, 0), len(policy))
        resident.difference_update(cast("list[int]", [policy.evict() for _ in range(num_evicted)]))
        self.num_evicted += num_evicted
        return min(number, num_free + num_evicted)


def _keys(blocks: list[int] | Sequence[int]) -> Sequence[BlockKey]:
    """Use blocks as keys: a policy only hashes and compares them."""
    return cast("Sequence[BlockKey]", blocks)
