"""Scenario of an engine over every list of tiers of this project."""

from random import Random
from typing import ClassVar

from kvxfer.backends.host import HostBackend, HostConfig
from kvxfer.storage.backend import Backend
from kvxfer.storage.keys import Namespace
from kvxfer.testing.dict_backend import DictBackend, DictConfig
from kvxfer.testing.simulation import EngineScenario, FaultyTier, Opened, Simulation
from kvxfer.testing.simulation.world import NUM_KEYS, PAGE_SIZES_BYTES
from kvxfer.tiering import TieredBackend, TierTimeouts
from kvxfer.transfer import TransferEngine
from kvxfer.units import ByteSize

ROOM = NUM_KEYS * len(PAGE_SIZES_BYTES) + 4
"""Blocks for which a roomy tier has room, those that are being replaced included."""
SLOT_BYTES = 8192
LISTS = (
    ("host", "dict"),
    ("dict", "dict"),
    ("host", "dict", "dict"),
    ("dict", "dict", "dict"),
    ("host", "host", "dict"),
    ("dict", "host"),
    ("host",),
    ("dict",),
)


class TiersScenario(EngineScenario):
    """Engine over one tier or several, of host memory and dictionaries, with faults in any."""

    name = "tiers"
    num_faulty: ClassVar[int] = 3

    def open(self, simulation: Simulation, namespace: Namespace) -> Opened:
        """See `EngineScenario.open`."""
        random = simulation.random("tiers")
        kinds = random.choice(LISTS)
        is_roomy = random.random() < 0.6
        tiers: list[Backend] = []
        faulty: dict[int, FaultyTier] = {}
        for number, kind in enumerate(kinds):
            num_blocks = ROOM if is_roomy or number else random.choice((2, 4, 8))
            tier = _open_tier(kind, num_blocks, namespace)
            if number or len(kinds) == 1 or random.random() < 0.5:
                tier = faulty[number] = FaultyTier(tier, simulation, f"{number} {kind}")
            tiers.append(tier)
        is_alone = len(tiers) == 1 and random.random() < 0.5
        backend = tiers[0] if is_alone else _join(tiers, namespace, random)
        return Opened(
            backend=backend,
            tiers=() if is_alone else tiers,
            faulty=faulty,
            is_roomy=is_roomy,
            may_evict_unseen=not is_roomy and 0 in faulty,
            may_raise=is_alone,
        )

    def leftovers(self, engine: TransferEngine, opened: Opened) -> list[str]:
        """See `EngineScenario.leftovers`."""
        left = leftovers_of_engine(engine)
        if isinstance(opened.backend, TieredBackend):
            left += leftovers_of_tiers(opened.backend)
        for tier in opened.tiers or [opened.backend]:
            inner = tier.inner if isinstance(tier, FaultyTier) else tier
            if isinstance(inner, HostBackend):
                left += leftovers_of_host(inner)
        return left


def _open_tier(kind: str, num_blocks: int, namespace: Namespace) -> Backend:
    if kind == "host":
        return HostBackend(HostConfig(capacity=ByteSize(num_blocks * SLOT_BYTES)), namespace)
    return DictBackend(DictConfig(max_blocks=num_blocks), namespace)


def _join(tiers: list[Backend], namespace: Namespace, random: Random) -> TieredBackend:
    timeouts = TierTimeouts(
        lookup_s=0.5, move_s=1.0, close_s=20.0, pause_s=random.choice((0.0, 0.1, 1.0))
    )
    staging_bytes = random.choice((8192, 16384, 65536))
    return TieredBackend(tiers, namespace, staging_bytes=staging_bytes, timeouts=timeouts)


def leftovers_of_engine(engine: TransferEngine) -> list[str]:
    """Describe pieces, bytes and calls that an idle engine still has."""
    mover = engine._mover
    counts = {
        "unsettled pieces": mover.num_unsettled,
        "bytes in flight": mover._admission.bytes_in_flight,
        "waiting pieces": mover._admission.num_waiting,
        "begun jobs": len(mover.begun),
        "late calls": engine._calls.num_late,
    }
    return [f"{count} {what}" for what, count in counts.items() if count]


def leftovers_of_tiers(backend: TieredBackend) -> list[str]:
    """Describe locks, buffers, calls and queued blocks that idle tiers still have."""
    staging = backend._staging
    counts = {
        "locked keys": len(backend._locks),
        "keys to delete": len(backend._to_delete),
        "missing staging buffers": staging.num_buffers - len(staging._idle),
        "late calls": sum(tier._calls.num_late for tier in backend._tiers),
        "abandoned calls": sum(len(tier._calls._abandoned) for tier in backend._tiers),
        "queued blocks": sum(len(writer.queue) for writer in backend._writers),
    }
    return [f"{count} {what}" for what, count in counts.items() if count]


def leftovers_of_host(backend: HostBackend) -> list[str]:
    """Describe pins, stores and slots that idle host memory still has."""
    index = backend._index
    entries = list(index._entries.values())
    counts = {
        "pins": sum(entry.num_pins for entry in entries),
        "blocks being stored": sum(entry.storing for entry in entries),
        "quarantined slots": len(index._quarantined),
        "lost slots": backend.num_slots - len(index._free_slots) - len(entries),
    }
    return [f"{count} {what}" for what, count in counts.items() if count]
