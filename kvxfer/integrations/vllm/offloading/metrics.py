"""Metrics of the vLLM adapter, reported through vLLM's own mechanism.

Their names begin with `vllm:` because vLLM exports no others.
"""

from collections.abc import Mapping

from kvxfer.integrations.vllm.offloading.interface import (
    OffloadingConnectorStats,
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingMetricMetadata,
)

BLOCKS = "vllm:kvxfer_host_blocks"
PINNED = "vllm:kvxfer_host_blocks_in_use"
CAPACITY = "vllm:kvxfer_host_capacity_blocks"
LOADED = "vllm:kvxfer_blocks_loaded"
STORED = "vllm:kvxfer_blocks_stored"
EVICTED = "vllm:kvxfer_blocks_evicted"
REFUSED = "vllm:kvxfer_stores_refused"
LOST = "vllm:kvxfer_stores_lost"
CORRUPT = "vllm:kvxfer_blocks_corrupt"
LOWER_STORED = "vllm:kvxfer_lower_blocks_stored"
LOWER_LOADED = "vllm:kvxfer_lower_blocks_loaded"
LOWER_STORES_FAILED = "vllm:kvxfer_lower_stores_failed"
LOWER_STORES_DROPPED = "vllm:kvxfer_lower_stores_dropped"
LOWER_LOADS_FAILED = "vllm:kvxfer_lower_loads_failed"
LOWER_LOADS_REFUSED = "vllm:kvxfer_lower_loads_refused"

DEFINITIONS: Mapping[str, OffloadingMetricMetadata] = {
    BLOCKS: OffloadingGaugeMetadata(documentation="Chunks kept in host memory."),
    PINNED: OffloadingGaugeMetadata(
        documentation="Chunks being stored, verified or loaded, which cannot be evicted."
    ),
    CAPACITY: OffloadingGaugeMetadata(documentation="Chunks that fit into host memory."),
    LOADED: OffloadingCounterMetadata(documentation="Chunks loaded from host memory."),
    STORED: OffloadingCounterMetadata(documentation="Chunks stored in host memory."),
    EVICTED: OffloadingCounterMetadata(documentation="Chunks evicted to make room."),
    REFUSED: OffloadingCounterMetadata(
        documentation="Chunks not stored because every chunk in host memory was in use."
    ),
    LOST: OffloadingCounterMetadata(
        documentation="Chunks whose store did not complete on every worker; dropped."
    ),
    CORRUPT: OffloadingCounterMetadata(
        documentation="Chunks whose bytes changed in host memory; dropped and recomputed."
    ),
    LOWER_STORED: OffloadingCounterMetadata(
        documentation="Chunks copied from host memory to the tier below."
    ),
    LOWER_LOADED: OffloadingCounterMetadata(
        documentation="Chunks brought back from the tier below, verified."
    ),
    LOWER_STORES_FAILED: OffloadingCounterMetadata(
        documentation="Chunks that the tier below did not store."
    ),
    LOWER_STORES_DROPPED: OffloadingCounterMetadata(
        documentation="Chunks evicted from host memory before they were copied to the tier below."
    ),
    LOWER_LOADS_FAILED: OffloadingCounterMetadata(
        documentation="Chunks found in the tier below that were corrupt, gone, or not loaded in "
        "time; recomputed."
    ),
    LOWER_LOADS_REFUSED: OffloadingCounterMetadata(
        documentation="Chunks found in the tier below for which host memory had no room."
    ),
}


class Counters:
    """Counters of metrics since the last report."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def add(self, name: str, number: int = 1) -> None:
        """Add `number` to a metric of `DEFINITIONS`."""
        if number:
            self._counts[name] = self._counts.get(name, 0) + number

    def report(self, gauges: Mapping[str, int]) -> OffloadingConnectorStats:
        """Return the counts, and these gauges, in vLLM's form, and reset the counts."""
        stats = OffloadingConnectorStats()
        for name, value in gauges.items():
            stats.set_gauge(name, value)
        for name, number in self._counts.items():
            stats.increase_counter(name, number)
        self._counts = {}
        return stats
