"""Contender kvcr, a runner over NIXL that keeps blocks in host memory; optional."""

import hashlib
import itertools
import time
import uuid
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.nixl.raw import TOTAL_BYTES, allocate
from kvxfer.backends.nixl.agents.nixl_module import import_nixl
from kvxfer.endpoint import free_ports

TIMEOUT_MS = 10_000


class KVCRPool:
    """Pool of blocks in kvcr; deposited and delivered within this process.

    Args:
        memory: Memory that blocks are stored from and loaded to.
        block_bytes: Bytes of a block.

    Raises:
        ImportError: kvcr is not installed.
    """

    def __init__(self, memory: NDArray[np.uint8], block_bytes: int) -> None:
        import_nixl(otherwise="benchmark something else")
        from kvcr import KVCR, KVCRBindings, config, types

        self._types = types
        self._name = f"kvcr-{uuid.uuid4()}"
        self._num_blocks = TOTAL_BYTES // block_bytes
        self._nth = itertools.count()
        self._pool = allocate(seed=3)
        self._kvcr: Any = KVCR(
            config.KVCRConfig(
                nixl_agent_name=self._name,
                pool_layouts=[("blocks", block_bytes)],
                operation_timeout_ms=TIMEOUT_MS,
                abandon_timeout_ms=2 * TIMEOUT_MS,
                nixl_listen_port=free_ports(),
            ),
            KVCRBindings(
                request_pin=lambda _: types.PinRequestId(0),
                poll_pin_results=list,
                release_pin=lambda _: True,
            ),
            config.KVCRBackendConfigs(
                framework_regions=[
                    types.RegionDescriptor(
                        addr=memory.ctypes.data,
                        count=self._num_blocks,
                        size=block_bytes,
                        label="blocks",
                    )
                ],
                local_dram=config.LocalDramOptions(
                    pools=[("blocks", self._pool.ctypes.data, self._pool.nbytes)]
                ),
            ),
        )
        self._blocks = self._new_blocks()
        self._wait(self._kvcr.deposit(self._blocks))

    async def deposit(self) -> float:
        """Store new blocks in place of the stored ones; return the seconds it took."""
        self._blocks = self._new_blocks()
        began = time.perf_counter()
        self._wait(self._kvcr.deposit(self._blocks))
        return time.perf_counter() - began

    async def deliver(self) -> float:
        """Load the blocks that were stored last; return the seconds it took."""
        began = time.perf_counter()
        self._wait(self._kvcr.deliver(self._blocks))
        return time.perf_counter() - began

    def close(self) -> None:
        """Stop kvcr's threads."""
        self._kvcr.close()

    def _new_blocks(self) -> dict[Any, list[Any]]:
        order = np.random.default_rng(next(self._nth)).permutation(self._num_blocks)
        return {
            hashlib.sha256(f"{self._nth} {index}".encode()).digest(): [
                self._types.MemoryRef(
                    end_point_name=self._name, label="blocks", element_index=index
                )
            ]
            for index in order.tolist()
        }

    def _wait(self, operation: int) -> None:
        while True:
            for ended, results in self._kvcr.poll_completed():
                if ended == operation:
                    if not all(each.success for each in results.values()):
                        raise RuntimeError(f"kvcr failed: {results}")
                    return
            time.sleep(0)  # lets kvcr's thread run, as the other contenders do
