"""Gauges: states of tiers and engines that observers may ask for."""

import enum


class Gauge(enum.StrEnum):
    """State of a tier, or of the engine, that is asked for when somebody wants to know it.

    `BREAKER_OPEN`, `SUSPENDED` and `DISCOVERY_FAILING` are 1 or 0. `QUARANTINED_BYTES` is memory
    that late reads may still change; `QUARANTINED_BLOCKS` are corrupt files that were kept.
    `REQUESTS`, `SENT_BYTES` and `RECEIVED_BYTES`, of object storage and Mooncake Store, and
    `SCRUBBED_BYTES`, of host memory, are counted since the tier was opened.
    """

    CAPACITY_BYTES = "capacity_bytes"
    USED_BYTES = "used_bytes"
    STORED_BLOCKS = "stored_blocks"
    QUARANTINED_BLOCKS = "quarantined_blocks"
    QUARANTINED_BYTES = "quarantined_bytes"
    BREAKER_OPEN = "breaker_open"
    SUSPENDED = "suspended"
    WRITE_BACK_BLOCKS = "write_back_queue_blocks"
    QUEUED_BATCHES = "queued_batches"
    BYTES_IN_FLIGHT = "in_flight_bytes"
    PEERS = "peers_connected"
    PEERS_KNOWN = "peers_known"
    DISCOVERY_FAILING = "discovery_failing"
    PINS = "pinned_batches"
    LEASES = "leases"
    REQUESTS = "requests"
    SENT_BYTES = "sent_bytes"
    RECEIVED_BYTES = "received_bytes"
    SCRUBBED_BYTES = "scrubbed_bytes"
