"""Served peer: a holder's answers to one peer's requests, and its pins."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from typing import Any

import msgspec
import numpy as np

from kvxfer.backends.nixl.channel import FrameChannel
from kvxfer.backends.nixl.extents import RegionTable
from kvxfer.backends.nixl.link import Link
from kvxfer.backends.nixl.messages import (
    Answer,
    Cancel,
    Delete,
    Deleted,
    Ending,
    Extents,
    Failed,
    Found,
    Lookup,
    Moved,
    Pin,
    Ping,
    Pinned,
    Pong,
    Probe,
    Pull,
    Push,
    Request,
    Unpin,
    Unpinned,
)
from kvxfer.backends.nixl.session import Session
from kvxfer.backends.nixl.store import BlockStore
from kvxfer.errors import (
    ClosedError,
    InvalidArgumentError,
    PeerError,
    PeerTimeoutError,
    TransferFailedError,
)
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.storage.backend import Outcome, Status
from kvxfer.storage.keys import BlockKey
from kvxfer.storage.lending import BlockParts

MAX_REQUESTS = 64

PULL_RUN_BYTES = 16 << 20
"""Bytes of a `Pull` that are verified together once they have landed; the next piece is read
meanwhile."""

logger = logging.getLogger(__name__)

_REQUEST: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
RELEASE_TIMEOUT_S = 1.0
"""Longest wait of a deletion for transfers that may release the blocks that it names."""
_NOTHING = Extents(regions=b"", offsets=b"", lengths=b"", block_offsets=bytes(8))


class ServedPeer:
    """Peer that is served: answers the requests of its control connection, several at a time.

    Its pins are released and its transfers ended when its connection ends, or when it was silent
    for `lease_s`.

    Args:
        channel: The connection, after the handshake.
        session: Session that its data connections belong to.
        store: Store of the blocks.
        link: Link to its memory, None where only sockets reach it.
        memory: Our registered memory, where the lent blocks are.
        lease_s: Seconds for which it may be silent.
    """

    def __init__(
        self,
        channel: FrameChannel,
        session: Session,
        *,
        store: BlockStore,
        link: Link | None,
        memory: RegionTable,
        lease_s: float,
    ) -> None:
        self.session = session
        self.store = store
        self._channel = channel
        self._link = link
        self._memory = memory
        self._lease_s = lease_s
        self._jobs: dict[int, asyncio.Task[None]] = {}
        self._cancelled: set[int] = set()
        self._pins: dict[int, AsyncExitStack] = {}
        self._data: set[asyncio.Task[Any]] = set()
        self._transfers: set[asyncio.Future[None]] = set()
        self._heard = time.monotonic()

    @property
    def num_pins(self) -> int:
        """Batches that this peer has pinned."""
        return len(self._pins)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is pinned or moved for this peer."""
        return not (self._pins or self._jobs or self._transfers)

    @property
    def transport(self) -> str:
        """Transport of this peer's bytes."""
        return "socket" if self._link is None else self._link.carrier

    @contextlib.contextmanager
    def owning_current_task(self) -> Iterator[None]:
        """Tie the current task, which serves a data connection, to this peer: it ends with it."""
        task = asyncio.current_task()
        assert task is not None
        self._data.add(task)
        try:
            yield
        finally:
            self._data.discard(task)

    @contextlib.contextmanager
    def moving(self) -> Iterator[None]:
        """Note a transfer on a data connection, for `is_idle` and for deletions."""
        ended = asyncio.get_running_loop().create_future()
        self._transfers.add(ended)
        try:
            yield
        finally:
            self._transfers.discard(ended)
            ended.set_result(None)

    async def serve(self) -> None:
        """Answer until the connection ends; return when no block is pinned or moved any more."""
        self._require_signs_of_life()
        try:
            while True:
                await self._take(await self._channel.receive(_REQUEST))
        except (PeerError, ClosedError) as exc:
            logger.info("%s", exc)
        finally:
            self._lease.cancel()
            await self._let_go()

    async def aclose(self) -> None:
        """End the connection; `serve` returns soon."""
        await self._channel.aclose()

    def _require_signs_of_life(self) -> None:
        """Cut the connection when its lease expires; one timer per request would cost more."""
        left_s = self._heard + self._lease_s - time.monotonic()
        if left_s > 0:
            loop = asyncio.get_running_loop()
            self._lease = loop.call_later(left_s, self._require_signs_of_life)
            return
        logger.warning("%s: silent for %g s", self._channel.peer, self._lease_s)
        self._channel.cut(PeerTimeoutError(str(self._channel.peer), "a request", self._lease_s))

    async def _take(self, request: Request) -> None:
        self._heard = time.monotonic()
        number = request.request_id
        for spent in request.let_go:
            if spent in self._pins:
                await self._pins.pop(spent).aclose()
        if isinstance(request, Ping):
            await self._channel.send(Pong(request_id=number))
        elif isinstance(request, Cancel):
            if job := self._jobs.get(request.request_id):
                self._cancelled.add(number)
                job.cancel()
        elif isinstance(request, Unpin):
            pin = self._pins.pop(request.pin, None)
            if pin is not None:
                await pin.aclose()
            await self._channel.send(Unpinned(request_id=number, held=pin is not None))
        elif number in self._jobs or number in self._pins:
            await self._refuse(number, f"request {number} has not ended")
        elif len(self._jobs) + len(self._pins) >= MAX_REQUESTS:
            await self._refuse(number, f"more than {MAX_REQUESTS} requests at one time")
        else:
            job = self._jobs[number] = asyncio.create_task(self._do(request))
            job.add_done_callback(lambda _: self._jobs.pop(number))
            await asyncio.sleep(0)  # let the job begin: then it answers even when cancelled

    async def _do(self, request: Request) -> None:
        """Execute a request, and answer."""
        try:
            answer = await self._answer(request)
        except asyncio.CancelledError:
            if request.request_id not in self._cancelled:
                raise
            self._cancelled.discard(request.request_id)
            answer = _cancelled(request)
        except (InvalidArgumentError, TransferFailedError, ClosedError) as exc:
            answer = Failed(request_id=request.request_id, reason=str(exc))
        except Exception as exc:
            logger.exception("%s of %s failed", type(request).__name__, self._channel.peer)
            answer = Failed(request_id=request.request_id, reason=repr(exc))
        with contextlib.suppress(PeerError, ClosedError):  # `serve` gets it, too
            await self._channel.send(answer)

    async def _answer(self, request: Request) -> Answer:
        number = request.request_id
        if isinstance(request, Lookup):
            return await self._lookup(request)
        if isinstance(request, Delete):
            return Deleted(request_id=number, deleted=await self._delete(request.keys))
        if isinstance(request, Pin):
            return await self._pin(request)
        if isinstance(request, Push):
            return await self._push(request)
        if isinstance(request, Pull):
            return await self._pull(request)
        assert isinstance(request, Probe)
        return await self._probe(request)

    async def _delete(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Delete blocks, also those that this peer has just loaded.

        The peer has all bytes a moment before the transfer on its data connection releases the
        blocks, so blocks that stayed are deleted once the transfers of this moment have ended.
        """
        deleted = await self.store.backend.delete(keys)
        if all(deleted) or not self._transfers:
            return deleted
        await asyncio.wait(set(self._transfers), timeout=RELEASE_TIMEOUT_S)
        stayed = [index for index, is_deleted in enumerate(deleted) if not is_deleted]
        again = await self.store.backend.delete([keys[index] for index in stayed])
        for index, is_deleted in zip(stayed, again, strict=True):
            deleted[index] = is_deleted
        return deleted

    async def _lookup(self, request: Lookup) -> Found:
        sight = self.store.lender.peek(request.keys) if request.places else None
        if sight is None or sight.blocks is None:
            there = await self.store.backend.lookup(request.keys)
            return Found(request_id=request.request_id, there=there)
        return Found(
            request_id=request.request_id,
            there=[outcome.done for outcome in sight.outcomes],
            starts=sight.blocks.payload_starts.tolist(),
            checksums=sight.checksums,
            extents=self._memory.locate(sight.blocks),
        )

    async def _pin(self, request: Pin) -> Pinned:
        async with AsyncExitStack() as stack:
            wanted = BlockParts(request.keys, request.starts, request.sizes)
            loan = await stack.enter_async_context(self.store.lender.lend(wanted))
            if loan.blocks is not None:
                self._pins[request.request_id] = stack.pop_all()
        return Pinned(
            request_id=request.request_id,
            endings=endings(loan.outcomes),
            checksums=loan.checksums,
            extents=_NOTHING if loan.blocks is None else self._memory.locate(loan.blocks),
        )

    async def _push(self, request: Push) -> Moved:
        link = self._require_link()
        theirs = link.remote.resolve(request.extents)
        wanted = BlockParts(request.keys, request.starts, theirs.block_sizes.tolist())
        async with self.store.lender.lend(wanted) as loan:
            if loan.blocks is not None:
                lent = [index for index, outcome in enumerate(loan.outcomes) if outcome.done]
                await link.write(loan.blocks, theirs.take(lent))
        return Moved(
            request_id=request.request_id,
            endings=endings(loan.outcomes),
            checksums=loan.checksums,
        )

    async def _pull(self, request: Pull) -> Moved:
        link = self._require_link()
        theirs = link.remote.resolve(request.extents)
        offered = BlockParts(request.keys, request.starts, theirs.block_sizes.tolist())
        async with self.store.lender.make_room(offered) as room:
            if room.blocks is not None:
                wanted = [index for index, outcome in enumerate(room.outcomes) if outcome is None]
                expected = [request.checksums[index] for index in wanted]
                arrived = await link.read_verified(
                    theirs.take(wanted),
                    room.blocks,
                    expected,
                    self.store.hasher,
                    last_run_bytes=PULL_RUN_BYTES,
                )
                room.arrived.update(arrived)
        return Moved(request_id=request.request_id, endings=endings(room.outcomes))

    async def _probe(self, request: Probe) -> Moved:
        link = self._require_link()
        theirs = link.remote.resolve(request.extents)
        region = self.store.lender.region
        if theirs.num_bytes > region.num_bytes:
            wanted = f"at most {region.num_bytes}"
            raise InvalidArgumentError("bytes of a probe", theirs.num_bytes, wanted)
        ends = np.cumsum(theirs.lengths)
        ours = Descriptors(
            addresses=np.uint64(region.address) + ends - theirs.lengths,
            lengths=theirs.lengths,
            block_offsets=theirs.block_offsets,
            payload_starts=theirs.payload_starts,
            device=theirs.device,
        )
        await link.write(ours, theirs)
        return Moved(request_id=request.request_id, endings=[])

    def _require_link(self) -> Link:
        if self._link is None:
            raise InvalidArgumentError(
                "request", "Push, Pull or Probe", "a request that sockets can carry out"
            )
        return self._link

    async def _refuse(self, number: int, reason: str) -> None:
        await self._channel.send(Failed(request_id=number, reason=reason))

    async def _let_go(self) -> None:
        """Cancel transfers, wait until they have ended, and release the pins."""
        jobs = list(self._jobs.values())
        for job in jobs:
            job.cancel()
        if self._link is not None:
            await self._link.aclose()
        data = list(self._data)
        for task in data:
            task.cancel()
        if tasks := [*jobs, *data]:
            await asyncio.wait(tasks)
        for pin in self._pins.values():
            await pin.aclose()
        self._pins.clear()
        await self._channel.aclose()


def endings(outcomes: Sequence[Outcome | None]) -> list[Ending]:
    """Turn outcomes into endings; those that are not settled yet count as failed."""
    return [
        Ending(outcome.status, outcome.reason) if outcome else Ending(Status.FAILED)
        for outcome in outcomes
    ]


def _cancelled(request: Request) -> Answer:
    if isinstance(request, Push | Pull):
        endings = [Ending(Status.CANCELLED)] * len(request.keys)
        return Moved(request_id=request.request_id, endings=endings)
    return Failed(request_id=request.request_id, reason="cancelled")
