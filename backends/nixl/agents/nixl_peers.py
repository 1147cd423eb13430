"""Peers of a NIXL agent: added once their beacon was read, removed once nothing else is."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from kvxfer.backends.nixl.agents.base import Fragments
from kvxfer.backends.nixl.agents.nixl_connections import NixlConnections
from kvxfer.backends.nixl.agents.nixl_reads import PiecewiseRead, ReadPiece, Reads
from kvxfer.backends.nixl.wire import (
    AgentMetadata,
    Regions,
)
from kvxfer.errors import (
    InvalidArgumentError,
    KVXferError,
    PeerLostError,
    TransferFailedError,
)

T = TypeVar("T")

BEACON_BYTES = 32
"""Random bytes at an address in the metadata: a peer that reads them reaches this agent."""

NUM_SLOTS = 64
"""Slots for beacons that are registered at once."""


@dataclass(slots=True, eq=False)
class _NixlRemote:
    """Peer that NIXL knows.

    Attributes:
        metadata: Its metadata.
        added: Ends with its name once its beacon was read.
        num_users: Calls of `add_peer` that were not undone.
        removed: Set while it is removed: ends once NIXL has forgotten it.
    """

    metadata: AgentMetadata
    added: "Future[str]" = field(default_factory=Future)
    num_users: int = 0
    removed: "Future[None] | None" = None


class NixlPeers:
    """Peers of one NIXL agent; for the agent's thread only, except `regions`.

    Args:
        name: Name of the agent.
        reads: Its reads.
        connections: Its connections.
        register: Registers memory that beacons are read into.
        max_unanswered: See `NixlLimits`.

    Attributes:
        regions: Registered memory of each peer, by name; any thread may read it.
    """

    def __init__(
        self,
        name: str,
        reads: Reads,
        connections: NixlConnections,
        register: Callable[[NDArray[np.uint8]], None],
        max_unanswered: int,
    ) -> None:
        self.regions: dict[str, Regions] = {}
        self._name = name
        self._reads = reads
        self._connections = connections
        self._register = register
        self._max_unanswered = max_unanswered
        self._remotes: dict[str, _NixlRemote] = {}  # also while added or removed
        self._postponed: set[Future[str]] = set()  # of peers that are removed first
        self._free_slots: list[NDArray[np.uint8]] = []  # that peers' beacons are read into
        self._closed = False

    def add(self, peer: AgentMetadata, done: "Future[str]") -> None:
        """Add a peer, see `TransferAgent.add_peer`; ends `done` when the peer was added.

        Reads the peer's beacon: a peer that cannot be reached, or hangs, shows here, where no
        memory is at stake.
        """
        remote = self._remotes.get(peer.name)
        if peer.name == self._name or (remote and not remote.metadata.is_same_agent(peer)):
            raise InvalidArgumentError("metadata", peer.name, "an agent not added before")
        if remote and remote.removed:  # once it is gone, it is added anew
            self._postponed.add(done)
            remote.removed.add_done_callback(lambda _: self._add_postponed(peer, done))
            return
        if not remote:
            remote = self._begin_adding(peer)
        remote.num_users += 1
        remote.added.add_done_callback(partial(_pass_on, to=done))

    def _add_postponed(self, peer: AgentMetadata, done: "Future[str]") -> None:
        if done in self._postponed:  # else it was cancelled
            self._postponed.remove(done)
            if self._closed:
                done.set_exception(TransferFailedError(peer.name, "the agent was closed"))
            else:
                attempt(done, partial(self.add, peer, done))

    def _begin_adding(self, peer: AgentMetadata) -> _NixlRemote:
        if sum(not each.added.done() for each in self._remotes.values()) >= self._max_unanswered:
            raise PeerLostError(peer.name, "too many peers do not answer")
        if not self._free_slots:
            slots = np.zeros((NUM_SLOTS, BEACON_BYTES), np.uint8)
            self._register(slots)
            self._free_slots.extend(slots)
        regions = Regions(peer.regions)
        kept = self._connections.open(peer)
        remote = self._remotes[peer.name] = _NixlRemote(peer)
        self._read_beacon(remote, regions, kept=kept)
        return remote

    def _read_beacon(self, remote: _NixlRemote, regions: Regions, *, kept: bool) -> None:
        peer, slot = remote.metadata, self._free_slots.pop()

        def end(beacon: "Future[None]") -> None:
            self._free_slots.append(slot)
            error = beacon.exception()
            is_there = not error and slot.tobytes() == peer.beacon
            if is_there and not remote.removed:
                self.regions[peer.name] = regions
                remote.added.set_result(peer.name)
                return
            is_wanted = not (remote.removed or self._closed)
            if error and kept and is_wanted:  # its connection may be one that broke
                try:
                    self._connections.close(peer.name)
                    self._connections.open(peer)
                    self._read_beacon(remote, regions, kept=False)
                except KVXferError as exc:
                    error = exc
                else:
                    return
            remote.removed = remote.removed or Future()
            reason = error or "other memory is where its beacon should be"
            lost = PeerLostError(peer.name, f"it cannot be reached ({reason})")
            remote.added.set_exception(lost)

        words = slot.ctypes.data, peer.beacon_address, BEACON_BYTES
        beacon = Fragments(*(np.array([word], np.uint64) for word in words))
        reading = PiecewiseRead(peer.name, deque([ReadPiece(beacon)]))
        reading.done.add_done_callback(end)
        self._reads.begin(reading)

    def remove(self, peer: str, done: "Future[None]") -> None:
        """Remove a peer, see `TransferAgent.remove_peer`; ends `done` when the call was undone."""
        remote = self._remotes.get(peer)
        if remote and not remote.removed:
            remote.num_users -= 1
            if not remote.num_users:
                self.regions.pop(peer, None)
                remote.removed = Future()
                self._reads.stop(peer)
        if remote and remote.removed:
            remote.removed.add_done_callback(lambda _: done.set_result(None))
        else:
            done.set_result(None)

    def forget(self, peer: str, adding: "Future[str]") -> None:
        """Remove a peer whose `add` was given up."""
        if adding in self._postponed:
            self._postponed.remove(adding)
        elif not (adding.done() and adding.exception()):
            self.remove(peer, Future())

    def end_removed(self) -> None:
        """End the removal of peers from which nothing is read any more."""
        removed = [(name, each) for name, each in self._remotes.items() if each.removed]
        if not removed:
            return
        busy = self._reads.busy_peers
        for name, remote in removed:
            if name not in busy and remote.removed:
                if remote.added.exception():
                    self._connections.close(name)
                else:
                    self._connections.keep(remote.metadata)
                del self._remotes[name]
                remote.removed.set_result(None)

    def release(self) -> None:
        """Let go of the agent, which is destroyed when nobody refers to it."""
        self._closed = True
        del self._connections

    def close(self) -> None:
        """End all removals, because the agent was closed."""
        for remote in self._remotes.values():
            if remote.removed:
                remote.removed.set_result(None)


def attempt(done: "Future[T]", command: Callable[[], object]) -> None:
    """Run a command; if it raises, end `done` with the error."""
    try:
        command()
    except Exception as exc:  # noqa: BLE001 - raised by `done.result()`
        done.set_exception(exc)


def _pass_on(ended: "Future[T]", *, to: "Future[T]") -> None:
    """End one future as another one has ended."""
    if error := ended.exception():
        to.set_exception(error)
    else:
        to.set_result(ended.result())
