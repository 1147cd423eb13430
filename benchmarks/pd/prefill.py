"""Prefill process of `make bench NAME=pd`: engines without a model, that lend blocks."""

import asyncio
from collections.abc import Sequence

from benchmarks.nixl.far import Far
from benchmarks.shapes import EngineShape, WorkerCaches
from kvxfer.backends.nixl import IntegrityGrade, NixlConfig
from kvxfer.endpoint import free_ports
from kvxfer.lending.handover import Handover
from kvxfer.storage.keys import BlockKey, Namespace

NUM_BYTES = 1 << 30
"""Bytes of the caches of an engine, all of which are handed over: 8192 tokens of Llama-3.1-8B."""

HOST = "127.0.0.1"
NAMESPACE = Namespace(model="bench")
LEASE_S = 600.0


class Prefill(Far):
    """Commands of the prefill process, on top of those of `Far`."""

    def __init__(self) -> None:
        super().__init__(NUM_BYTES)
        self._engines: dict[int, list[Handover]] = {}

    async def open_engine(self, shape: EngineShape, integrity: IntegrityGrade) -> int:
        """Open an engine whose caches are all of the memory; return its first worker's port."""
        return await asyncio.to_thread(self._open, shape, integrity)

    async def offer(
        self, port: int, ticket: str, keys: Sequence[BlockKey], block_ids: Sequence[int]
    ) -> None:
        """Offer blocks of all workers."""
        for handover in self._engines[port]:
            handover.offer(ticket, keys, block_ids)

    async def close_engine(self, port: int) -> None:
        """Close an engine."""
        for handover in self._engines.pop(port):
            await asyncio.to_thread(handover.close)

    async def aclose(self) -> None:
        """Close everything."""
        for port in list(self._engines):
            await self.close_engine(port)
        await super().aclose()

    def _open(self, shape: EngineShape, integrity: IntegrityGrade) -> int:
        workers: list[Handover] = []
        port = free_ports(shape.tp_size)
        try:
            for rank, memory in enumerate(self._memory.reshape(shape.tp_size, -1)):
                config = NixlConfig(
                    listen=f"{HOST}:{port + rank}", integrity=integrity, lease_s=LEASE_S
                )
                worker = WorkerCaches(shape, rank, memory)
                handover = Handover(config, NAMESPACE, worker.description, worker.caches)
                workers.append(handover)
                handover.start()
        except BaseException:
            for handover in workers:
                handover.close()
            raise
        self._engines[port] = workers
        return port
