# ruff: noqa: E501 - lines of the product, as they are
"""Mutations of the product, each with the scenario that finds it and the seeds that it takes.

`python -m tests.simulation.mutations [WORD ...]` tries those whose names have one of the words.
"""

import contextlib
import importlib.util
import io
import multiprocessing
import sys
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType

ROOT = Path(__file__).parents[2]
LIMIT_S = 900
NUM_PROCESSES = 2
PRELOADED = (
    *("torch", "numpy", "msgspec", "xxhash", "aiofiles", "aiohttp", "hypothesis", "pytest"),
    *("vllm.v1.core.sched.scheduler", "vllm.engine.arg_utils", "vllm.v1.worker.utils"),
)
"""Packages that the product imports, which the process of each mutation finds imported."""


@dataclass(frozen=True, slots=True)
class Mutation:
    """Fault that is put into the product.

    Attributes:
        name: What is wrong then.
        path: The file.
        old: Text of it, which is there once.
        new: Text in its place.
        scenario: Scenario that finds it.
        num_seeds: Seeds within which it does.
    """

    name: str
    path: str
    old: str
    new: str
    scenario: str
    num_seeds: int

    def __str__(self) -> str:
        return self.name


MUTATIONS = (
    Mutation(
        "the scrubber ignores the generation of a slot",
        "backends/host/scrubber.py",
        "        is_known = int(self._seen[slot]) == generation\n",
        "        is_known = True\n",
        "memory",
        40,
    ),
    Mutation(
        "the scrubber tells nobody of a change",
        "backends/host/scrubber.py",
        "            self._changed(slot, generation)\n",
        "            pass\n",
        "memory",
        40,
    ),
    Mutation(
        "no checksum is made of a block that leaves",
        "backends/host/pool.py",
        "        if slot in self._unhashed:\n",
        "        if slot < 0:\n",
        "memory",
        40,
    ),
    Mutation(
        "a delete does not wait for what moves",
        "kvxfer/tiering/tiered_backend.py",
        "            await held.enter_async_context(self._locks.acquire(keys))\n            deleting",
        "            deleting",
        "tiers",
        60,
    ),
    Mutation(
        "turns of keys are ignored",
        "kvxfer/storage/key_locks.py",
        "                while before := turn.find_before(key):\n                    await before.wait()\n",
        "                pass\n",
        "tiers",
        20,
    ),
    Mutation(
        "write-backs do not lock their keys",
        "kvxfer/tiering/tier_writer.py",
        "            await held.enter_async_context(self._locks.acquire(list(taken)))\n",
        "",
        "tiers",
        60,
    ),
    Mutation(
        "a late move is called safe",
        "kvxfer/tiering/isolated_tier.py",
        "late = Outcome(Status.TIMED_OUT, memory_safe=False, reason=reason)",
        "late = Outcome(Status.TIMED_OUT, memory_safe=True, reason=reason)",
        "tiers",
        60,
    ),
    Mutation(
        "a load goes on beyond its deadline",
        "kvxfer/transfer/mover.py",
        "_, running = await asyncio.wait(tasks, timeout=left)",
        "_, running = await asyncio.wait(tasks, timeout=None if left is None else left + 0.5)",
        "tiers",
        20,
    ),
    Mutation(
        "a piece that was abandoned counts as safe",
        "kvxfer/transfer/mover.py",
        "        except asyncio.CancelledError:\n            self._settle(job)\n            raise",
        "        except asyncio.CancelledError:\n            raise",
        "tiers",
        40,
    ),
    Mutation(
        "unsafe outcomes of a backend are forgotten",
        "kvxfer/transfer/mover.py",
        "        if not all(outcome.memory_safe for outcome in outcomes):\n            self._settle(job)",
        "        if not outcomes:\n            self._settle(job)",
        "tiers",
        40,
    ),
    Mutation(
        "a drain does not wait for the backend",
        "kvxfer/transfer/mover.py",
        "                await await_call(self._backend.drain())\n            except",
        "                await asyncio.sleep(0)\n            except",
        "tiers",
        40,
    ),
    Mutation(
        "a drain does not wait for pieces that move",
        "kvxfer/transfer/mover.py",
        "        await self.drain_begun()\n        if self._moving:",
        "        await self.drain_begun()\n        if not self._moving:",
        "tiers",
        40,
    ),
    Mutation(
        "the share of a buffer is not given back",
        "kvxfer/storage/staging_memory.py",
        "        if share is not None:\n            share.release()\n        while self._waiting:",
        "        while self._waiting:",
        "tiers",
        20,
    ),
    Mutation(
        "a pin is never given back",
        "backends/host/backend.py",
        "        return Begun(outcomes, copy, partial(self.unpin, found))",
        "        return Begun(outcomes, copy)",
        "tiers",
        20,
    ),
    Mutation(
        "a cancelled store keeps its slots",
        "kvxfer/storage/index.py",
        "            else:\n                self._drop(key)\n\n    def pin",
        "\n    def pin",
        "tiers",
        40,
    ),
    Mutation(
        "a foreign cancellation passes as that of the caller",
        "kvxfer/runtime/calls.py",
        '        if is_caller_cancelled():\n            raise\n        raise BackendUnavailableError("the',
        '        if exc:\n            raise\n        raise BackendUnavailableError("the',
        "tiers",
        80,
    ),
    Mutation(
        "what the second tier took is not written back",
        "kvxfer/tiering/tiered_backend.py",
        "        for writer in self._writers[tier.index :]:",
        "        for writer in self._writers[tier.index + 1 :]:",
        "tiers",
        40,
    ),
    Mutation(
        "a flush does not look at the queues",
        "kvxfer/tiering/tiered_backend.py",
        "            if tier.index:\n                await self._writers[tier.index - 1].flush()\n",
        "",
        "tiers",
        80,
    ),
    Mutation(
        "an unsafe outcome of a tier is said to be safe",
        "kvxfer/tiering/tiered_backend.py",
        "pick_outcome(old, new, memory_safe=new.memory_safe)",
        "pick_outcome(old, new, memory_safe=True)",
        "tiers",
        20,
    ),
    Mutation(
        "a tier that was late is never tried again",
        "kvxfer/tiering/isolated_tier.py",
        "or self._suspension.is_on(runtime.monotonic())\n        return",
        "or self._suspension.num_failures\n        return",
        "tiers",
        20,
    ),
    Mutation(
        "the drain of a tier forgets its late calls",
        "kvxfer/tiering/isolated_tier.py",
        "        await self._calls.drain()\n",
        "",
        "tiers",
        40,
    ),
    Mutation(
        "a buffer that is not quiet goes back",
        "kvxfer/storage/staging_memory.py",
        "            if staged.quiet:\n                self._give_back(buffer, share)",
        "            if True:\n                self._give_back(buffer, share)",
        "tiers",
        20,
    ),
    Mutation(
        "two holders share a buffer",
        "kvxfer/storage/staging_memory.py",
        "            return self._idle.pop()\n",
        "            return self._idle[-1]\n",
        "tiers",
        20,
    ),
    Mutation(
        "a drained buffer counts as being drained for ever",
        "kvxfer/storage/staging_memory.py",
        "        if share is not None:\n            share.note_unsafe(-1)\n",
        "",
        "tiers",
        40,
    ),
    Mutation(
        "an await before keys are locked",
        "kvxfer/tiering/tiered_backend.py",
        "        free = sorted({*chosen}.difference(busy))\n",
        "        free = sorted({*chosen}.difference(busy))\n        await asyncio.sleep(0)\n",
        "tiers",
        20,
    ),
    Mutation(
        "pieces go on after the deadline",
        "kvxfer/transfer/mover.py",
        "            for task in tasks:\n                task.cancel()\n            left_over",
        "            left_over",
        "tiers",
        20,
    ),
    Mutation(
        "memory is unsafe only when the backend has ended",
        "kvxfer/transfer/mover.py",
        "        job.in_backend[piece.start : piece.stop] = [True] * len(keys)\n",
        "",
        "tiers",
        20,
    ),
    Mutation(
        "an outcome of the wrong block",
        "kvxfer/transfer/mover.py",
        "        for index, outcome in enumerate(outcomes, piece.start):\n",
        "        for index, outcome in enumerate(outcomes):\n",
        "tiers",
        20,
    ),
    Mutation(
        "calls that were given up are forgotten",
        "kvxfer/runtime/calls.py",
        "        self._abandoned.add(call)\n",
        "",
        "tiers",
        40,
    ),
    Mutation(
        "a late call counts for ever",
        "kvxfer/runtime/calls.py",
        "        self._late.discard(call)\n",
        "",
        "tiers",
        20,
    ),
    Mutation(
        "the memory of a job that is late is said to be safe",
        "kvxfer/transfer/job.py",
        "            safe = not self.in_backend[index]\n",
        "            safe = True\n",
        "tiers",
        20,
    ),
    Mutation(
        "a request is counted twice",
        "backends/object/bucket.py",
        "                self.counts.requests += 1",
        "                self.counts.requests += 2",
        "objects",
        3,
    ),
    Mutation(
        "the memory of a page is used again while it is sent",
        "kvxfer/pages/object_pages.py",
        "        weakref.finalize(page, self._give, free, memory).atexit = False",
        "        self._give(free, memory)",
        "objects",
        20,
    ),
    Mutation(
        "a salt is renewed, and is the same",
        "kvxfer/face/salted_keys.py",
        "            self._former[self.salt] = None\n        self.salt = runtime",
        "            self._former[self.salt] = None\n        self.salt = self.salt or runtime",
        "objects",
        60,
    ),
    Mutation(
        "what was seen in a bucket is believed for ever",
        "backends/object/presence.py",
        "        return entry.there if now - entry.at < ttl_s else None",
        "        return entry.there if ttl_s else None",
        "objects",
        150,
    ),
    Mutation(
        "a part of a chunk counts as the whole",
        "kvxfer/pages/object_pages.py",
        "        return is_whole and header.start <= start and start + block.num_bytes <= header.stop",
        "        return is_whole",
        "objects",
        60,
    ),
    Mutation(
        "a corrupt object stays",
        "backends/object/backend.py",
        "            if version is None or not await self._bucket.remove(name, version):\n                return",
        "            if version is None or version:\n                return",
        "objects",
        60,
    ),
    Mutation(
        "a removal that is repeated does not look again",
        "backends/object/bucket.py",
        "        while await self.head(path) == version:\n            if failed",
        "        while failed is not None or await self.head(path) == version:\n            if failed",
        "objects",
        60,
    ),
    Mutation(
        "a lookup waits for silent requests",
        "backends/object/backend.py",
        "await self._calls.wait_for(self._config.lookup_timeout_s, asking, outlives_caller=True)",
        "await self._calls.wait_for(None, asking, outlives_caller=True)",
        "objects",
        60,
    ),
    Mutation(
        "stores do not lock their keys",
        "kvxfer/tiering/tiered_backend.py",
        "        with self._locks.hold([batch.keys[index] for index in free]):",
        "        with self._locks.hold([]):",
        "tiers",
        20,
    ),
    Mutation(
        "a store is not told",
        "backends/host/backend.py",
        "                    self._reports.added(arrived)\n",
        "",
        "tiers",
        20,
    ),
    Mutation(
        "an eviction is not told",
        "backends/host/backend.py",
        "{Removal.REPLACED: replaced, **plan.evicted_by()}",
        "{Removal.REPLACED: replaced}",
        "tiers",
        40,
    ),
    Mutation(
        "a dropped block keeps its slot",
        "kvxfer/storage/index.py",
        "        self._free_slots.append(self._entries.pop(key).slot)",
        "        self._entries.pop(key)",
        "tiers",
        20,
    ),
    Mutation(
        "a purge begins with the first tier",
        "kvxfer/tiering/tiered_backend.py",
        "            for tier in reversed(self._tiers):\n                async with",
        "            for tier in self._tiers:\n                async with",
        "tiers",
        200,
    ),
    Mutation(
        "a file has its name before its bytes",
        "backends/file/io/file_io.py",
        "                written = self.write(list(opened.values())",
        "                [_give_name(files[i], fd, durable=False) for i, fd in opened.items()]\n"
        "                written = self.write(list(opened.values())",
        "files",
        40,
    ),
    Mutation(
        "the count is changed without the lock of other processes",
        "backends/file/folders/ledger.py",
        "            self._lock_file(ends_at)\n            try:",
        "            try:",
        "files",
        300,
    ),
    Mutation(
        "room is made for what is there, not for what comes",
        "backends/file/space.py",
        "                self._ledger.used + total > self._capacity_bytes",
        "                self._ledger.used > self._capacity_bytes",
        "files",
        40,
    ),
    Mutation(
        "a descriptor of a text is not closed",
        "backends/file/folders/namespace_folder.py",
        "        finally:\n            disk.close(fd)\n\n    def has_text",
        "        finally:\n            pass\n\n    def has_text",
        "files",
        10,
    ),
    Mutation(
        "a killed writer counts as alive",
        "backends/file/folders/process_claim.py",
        "        return bool(_read_claim(root, owner))",
        "        return bool(_read_claim(root, owner)) or True",
        "files",
        100,
    ),
    Mutation(
        "a living writer counts as killed",
        "backends/file/folders/process_claim.py",
        "        return bool(_read_claim(root, owner))",
        "        return not _read_claim(root, owner)",
        "files",
        40,
    ),
    Mutation(
        "the rest of a short write is forgotten",
        "backends/file/io/posix.py",
        "            vector = _rest(vector, moved)",
        "            vector = vector[len(vector) :]",
        "files",
        40,
    ),
    Mutation(
        "two threads of an engine ask a pool at one time",
        "backends/pool/backend.py",
        "        with self._lock:\n            try:\n                self._send(request)\n                answer",
        "        with contextlib.nullcontext():\n            try:\n                self._send(request)\n                answer",
        "pool",
        10,
    ),
    Mutation(
        "a pool that was lost is asked again for ever",
        "backends/pool/backend.py",
        "            if attachment is None or attachment.error:\n",
        "            if attachment is None:\n",
        "pool",
        30,
    ),
    Mutation(
        "a call keeps the memory of a pool in use after its end",
        "backends/pool/backend.py",
        "                self._users[attachment] -= 1\n                if",
        "                if",
        "pool",
        5,
    ),
    Mutation(
        "a peer that is silent is served for ever",
        "backends/nixl/session.py",
        "            self._require_signs_of_life()\n            try:",
        "            self._lease = asyncio.get_running_loop().call_later(1e9, print)\n            try:",
        "peers",
        20,
    ),
    Mutation(
        "memory of late reads is called safe",
        "backends/nixl/reads.py",
        "        if not self._held:\n            return [True] * blocks.num_blocks\n        held",
        "        if blocks.num_blocks:\n            return [True] * blocks.num_blocks\n        held",
        "peers",
        80,
    ),
    Mutation(
        "a late read is not in quarantine",
        "backends/nixl/reads.py",
        "            late(asyncio.wrap_future(flight.done), ours)\n",
        "            pass\n",
        "lending",
        40,
    ),
    Mutation(
        "a reset keeps the names of the lower tier",
        "kvxfer/integrations/vllm/offloading/lower_tier.py",
        "        deletes_former = self._keys.renew()\n",
        "        deletes_former = False\n",
        "offloading",
        40,
    ),
    Mutation(
        "a reset leaves lookups under way",
        "kvxfer/integrations/vllm/offloading/lower_tier.py",
        "        self._end_lookups()\n        for job_id, job in self._jobs.items():\n            job.void",
        "        for job_id, job in self._jobs.items():\n            job.void",
        "offloading",
        60,
    ),
    Mutation(
        "slots that are in use are free after a reset",
        "kvxfer/integrations/vllm/offloading/manager.py",
        "            self._index.keep_out(set(in_use))\n",
        "            pass\n",
        "offloading",
        40,
    ),
    Mutation(
        "a row that is not safe is reported as moved",
        "kvxfer/integrations/vllm/offloading/lower_tier.py",
        "                (moved if outcome.memory_safe else self._late).append(each)\n",
        "                moved.append(each)\n",
        "offloading",
        40,
    ),
    Mutation(
        "a worker does not wait for stores of blocks that are written anew",
        "kvxfer/integrations/vllm/offloading/worker.py",
        "        self._engine.wait([self._ours",
        "        list([self._ours",
        "offloading",
        40,
    ),
    Mutation(
        "rows of chunks that are not below are never given back",
        "kvxfer/integrations/vllm/offloading/manager.py",
        "        self._index.finish_store(self._tier.take_missing(), stored=False)\n",
        "        self._tier.take_missing()\n",
        "offloading",
        20,
    ),
    Mutation(
        "a request that is aborted still wants its chunks",
        "kvxfer/integrations/vllm/offloading/manager.py",
        "        self._release(req_context.req_id)\n        self._requests.finish",
        "        self._requests.finish",
        "offloading",
        40,
    ),
    Mutation(
        "chunks that were loaded are not pinned for the requests that wait",
        "kvxfer/integrations/vllm/offloading/manager.py",
        "                (block.slot,) = self._index.pin([key])\n            block.checked = DONE",
        "                block.slot = self._index.slot_of(key)\n            block.checked = DONE",
        "offloading",
        20,
    ),
    Mutation(
        "a leg goes on when the client has left",
        "examples/proxy/server.py",
        "            handler_cancellation=True,\n",
        "            handler_cancellation=False,\n",
        "proxy",
        60,
    ),
    Mutation(
        "the prefill leg outlives its request",
        "examples/proxy/server.py",
        "            asyncio.get_running_loop().call_later(late_s, leg.cancel)\n",
        "            del late_s\n",
        "proxy",
        60,
    ),
    Mutation(
        "the prefill leg has no time limit of its own",
        "examples/proxy/server.py",
        "min(deadline_s, started_s + self._config.prefill_timeout_s)",
        "deadline_s",
        "proxy",
        60,
    ),
    Mutation(
        "an answer that was broken off is begun again",
        "examples/proxy/server.py",
        "                if client.answer is not None:\n                    raise\n",
        "",
        "proxy",
        60,
    ),
    Mutation(
        "an engine that was ejected never comes back",
        "examples/proxy/engine_client.py",
        "            else:\n                engine.bring_back()\n",
        "            else:\n                pass\n",
        "proxy",
        60,
    ),
    Mutation(
        "a request that was cancelled stays under way at its engine",
        "examples/proxy/engines.py",
        "        try:\n            yield\n        finally:\n            self.num_requests -= 1\n",
        "        yield\n        self.num_requests -= 1\n",
        "proxy",
        60,
    ),
    Mutation(
        "an end does not cut off requests that are late",
        "examples/proxy/server.py",
        "            for task in late:\n                task.cancel()\n",
        "",
        "proxy",
        100,
    ),
    Mutation(
        "blocks that were not loaded are not reported",
        "kvxfer/integrations/vllm/prefill_decode/worker.py",
        "                ended.end_load(request_id, bad)\n",
        "                ended.end_load(request_id, [])\n",
        "handover",
        40,
    ),
    Mutation(
        "a lease is held for a reader that is gone",
        "kvxfer/storage/leases/book.py",
        "                del entry.holders[holder]\n",
        "",
        "handover",
        60,
    ),
    Mutation(
        "a lease that nobody asks for does not run out",
        "kvxfer/storage/leases/book.py",
        "        return self.latest if self.holders else min(self.expires, self.latest)\n",
        "        return self.latest\n",
        "handover",
        20,
    ),
    Mutation(
        "the lease is not released after a load",
        "kvxfer/integrations/vllm/prefill_decode/decode.py",
        "        for request_id in request_ids:\n            self._release(request_id)\n",
        "        for request_id in request_ids:\n            self._asked.pop(request_id, None)\n",
        "handover",
        20,
    ),
    Mutation(
        "blocks of a prompt are free although they are lent",
        "kvxfer/integrations/vllm/prefill_decode/prefill.py",
        "        self._leases[request.request_id] = lease\n        return True, make_params(",
        "        self._leases[request.request_id] = lease\n        return False, make_params(",
        "handover",
        10,
    ),
    Mutation(
        "a file has its name before its bytes are on the disk",
        "backends/file/io/file_io.py",
        "    if durable:\n        disk.fsync(fd)\n",
        "",
        "files",
        20,
    ),
    Mutation(
        "the names of files do not reach the disk",
        "backends/file/block_writer.py",
        "        if self._durable:\n            self._sync(keys, results)\n",
        "",
        "files",
        300,
    ),
    Mutation(
        "a flush of files syncs nothing",
        "backends/file/backend.py",
        "        await self._ask(self._removers, self._folder.sync_file_system)\n",
        "        await asyncio.sleep(0)\n",
        "files",
        60,
    ),
    Mutation(
        "reserved bytes are not counted",
        "backends/file/folders/ledger.py",
        "        self.used += num_bytes\n        self.added",
        "        self.added",
        "files",
        20,
    ),
    Mutation(
        "stores of files do not lock their keys",
        "backends/file/backend.py",
        "        async with self._stores.acquire(keys):\n",
        "        async with contextlib.AsyncExitStack():\n",
        "files",
        60,
    ),
    Mutation(
        "padding is not cut off",
        "backends/file/io/file_io.py",
        "                            disk.ftruncate(fd, sizes[index])\n",
        "                            pass\n",
        "files",
        10,
    ),
    Mutation(
        "the count is not closed",
        "backends/file/backend.py",
        "        self._files.close()\n        self._ledger.close()\n",
        "        self._files.close()\n",
        "files",
        10,
    ),
    Mutation(
        "a lookup of a tier ends with its caller",
        "kvxfer/tiering/isolated_tier.py",
        "                outlives_caller=operation is Operation.LOOKUP,\n",
        "                outlives_caller=False,\n",
        "tiers",
        60,
    ),
    Mutation(
        "blocks that could not be read are not written back",
        "kvxfer/tiering/tier_writer.py",
        "        self._give_up(self.queue.put_off(runtime.monotonic(), failed, failed=True))\n",
        "        del failed\n",
        "tiers",
        20,
    ),
    Mutation(
        "blocks whose tier pauses are not written back",
        "kvxfer/tiering/tier_writer.py",
        "            self.queue.put_off(runtime.monotonic(), keys, failed=False)\n            return\n        load",
        "            return\n        load",
        "tiers",
        200,
    ),
    Mutation(
        "what a peer lets go stays pinned",
        "backends/nixl/session.py",
        "            await self._pins.pop(number).aclose()\n",
        "            pass\n",
        "peers",
        8,
    ),
    Mutation(
        "a transfer does not wait for room among the bytes in flight",
        "kvxfer/transfer/mover.py",
        "            await turn\n",
        "            pass\n",
        "tiers",
        60,
    ),
    Mutation(
        "rows that a late transfer may touch are given back at once",
        "kvxfer/face/row_store.py",
        "        pool.give_back([row for row, safe in zip(rows, is_safe, strict=True) if safe])\n",
        "        pool.give_back(rows)\n        late = []\n",
        "rows",
        40,
    ),
    Mutation(
        "pages are copied to their caller beyond a purge",
        "kvxfer/face/row_store.py",
        "            if arrived and direction is Direction.LOAD:\n                self._require_no_purge(job)\n",
        "            if arrived and direction is Direction.LOAD:\n",
        "rows",
        200,
    ),
    Mutation(
        "pages of before a purge are stored after it",
        "kvxfer/face/row_store.py",
        "            with self._beginning:\n                self._require_no_purge(job)\n",
        "            with self._beginning:\n",
        "rows",
        200,
    ),
    Mutation(
        "a purge does not drain the stores that have begun",
        "kvxfer/face/row_store.py",
        "        await self._engine.drain()  # a store that is late would put its pages there afterwards\n        await medium.purge()",
        "        await medium.purge()",
        "rows",
        500,
    ),
    Mutation(
        "no other salt is taken when a purge has failed",
        "kvxfer/face/row_store.py",
        "            if not self._delete_all(deadline) and self._keys.renew():",
        "            if not self._delete_all(deadline) and False:",
        "rows",
        40,
    ),
    Mutation(
        "pages are moved while a purge goes on",
        "kvxfer/face/row_store.py",
        "        return self._num_purging > 0 or ",
        "        return ",
        "rows",
        200,
    ),
    Mutation(
        "a row is given to two callers",
        "kvxfer/face/row_store.py",
        "            taken, self._free = self._free[:most], self._free[most:]\n            return taken",
        "            return self._free[:most]",
        "rows",
        20,
    ),
    Mutation(
        "rows are not given back when a late transfer has ended",
        "kvxfer/face/row_store.py",
        "        if await drain_in_the_end(self._engine.drain, what, asyncio.Event()):\n            pool.give_back(late)",
        "        await drain_in_the_end(self._engine.drain, what, asyncio.Event())",
        "rows",
        40,
    ),
    Mutation(
        "a purge that is late goes on",
        "kvxfer/face/row_store.py",
        "                    purging.cancel()  # it would delete what is stored after the call\n",
        "                    pass\n",
        "rows",
        60,
    ),
    Mutation(
        "a close does not wait for what is written back",
        "kvxfer/tiering/tiered_backend.py",
        "            await asyncio.wait([self._settling], timeout=self._close_s)\n",
        "            pass\n",
        "tiers",
        160,
    ),
    Mutation(
        "pins of a peer that has gone stay",
        "backends/nixl/session.py",
        "        while self._pins:\n            _, pin",
        "        while not self._ended:\n            _, pin",
        "peers",
        20,
    ),
    Mutation(
        "a holder whose lease has ended stays known",
        "backends/nixl/discovery.py",
        "            if data is None:\n                self._drop(name, now)\n",
        "            if data is None:\n",
        "peers",
        20,
    ),
    Mutation(
        "the lease of an announcement is not renewed",
        "backends/nixl/discovery.py",
        "if self._lease is None or not await session.renew(self._lease):",
        "if self._lease is None:",
        "peers",
        20,
    ),
    Mutation(
        "an announcement has its first lease for ever",
        "backends/nixl/discovery.py",
        '                self._lease = await session.grant(self._lease_s)\n                announced = b""\n',
        "                self._lease = self._lease or await session.grant(self._lease_s)\n",
        "peers",
        40,
    ),
    Mutation(
        "a follower ends with the first failure",
        "backends/nixl/discovery.py",
        "            await asyncio.sleep(self._pause.next_s())\n",
        "            return\n",
        "peers",
        40,
    ),
    Mutation(
        "pins of a pool engine that has ended stay",
        "backends/pool/server.py",
        "            await self._release(at_once=said_bye)\n",
        "            pass\n",
        "pool",
        60,
    ),
    Mutation(
        "a store of an object does not wait for deletes",
        "backends/object/backend.py",
        "            await self._deletes.wait(keys)\n",
        "",
        "objects",
        60,
    ),
    Mutation(
        "a request that was given up goes on at its holder",
        "backends/nixl/session.py",
        "            if job := self._jobs.get(number):\n                job.cancel()",
        "            pass",
        "peers",
        100,
    ),
    Mutation(
        "a holder is not told of a request that was given up",
        "backends/nixl/connection.py",
        "                self._channel.send_soon(wire.Cancel(request_id=number))",
        "                pass",
        "peers",
        100,
    ),
    Mutation(
        "a lease is not revoked when its blocks are gone",
        "kvxfer/integrations/vllm/prefill_decode/worker.py",
        "            self._handover.revoke(step.revoked)\n",
        "            pass\n",
        "handover",
        40,
    ),
    Mutation(
        "a load has ended although a read goes on",
        "kvxfer/integrations/vllm/prefill_decode/worker.py",
        "            if load.exception() or load.result().memory_safe:\n",
        "            if load.done():\n",
        "handover",
        160,
    ),
    Mutation(
        "a ticket is released at the first worker alone",
        "kvxfer/lending/reader.py",
        "        workers = self._workers.get(endpoint, [endpoint])",
        "        workers = [endpoint]",
        "lending",
        10,
    ),
    Mutation(
        "keys of blocks do not name their worker",
        "kvxfer/lending/reader.py",
        '"rank": self.description.at_rank(rank).shard.rank}',
        '"rank": 0}',
        "lending",
        20,
    ),
    Mutation(
        "blocks are bad only where the first worker has not read them",
        "kvxfer/lending/reader.py",
        "                bad[part.group].update((b, None) for b in targets if b != self._null_block)",
        "                if part.rank == 0:\n                    bad[part.group].update((b, None) for b in targets if b)",
        "lending",
        10,
    ),
    Mutation(
        "an evicted file stays counted",
        "backends/file/space.py",
        "            self._ledger.remove(removed_bytes)\n            return 1 +",
        "            return 1 +",
        "files",
        100,
    ),
    Mutation(
        "a walk counts although the count was lost meanwhile",
        "backends/file/folders/ledger.py",
        "        if self.num_losses != begun.num_losses or self.added < begun.added:\n",
        "        if self.num_losses < begun.num_losses:\n",
        "files",
        60,
    ),
    Mutation(
        "an evicted file is not told",
        "backends/file/space.py",
        "                self._gone.setdefault((victim.fingerprint, reason), []).append(victim.key)\n",
        "                pass\n",
        "files",
        60,
    ),
    Mutation(
        "the room of a failed store of files is not given back",
        "backends/file/space.py",
        "        if num_given_back:\n",
        "        if num_given_back < 0:\n",
        "files",
        100,
    ),
    Mutation(
        "a reader keeps the tickets that it has left",
        "backends/nixl/connection.py",
        "            self.release(asked.number)\n",
        "            pass\n",
        "lending",
        20,
    ),
    Mutation(
        "a ticket that is left ends all that its reader holds",
        "kvxfer/storage/leases/book.py",
        "if held is not None and (numbers is None or held in numbers):",
        "if held is not None:",
        "lending",
        60,
    ),
    Mutation(
        "a hold goes on after that at another worker has failed",
        "kvxfer/lending/reader.py",
        "            await end_tasks(holds)\n",
        "            pass\n",
        "lending",
        120,
    ),
    Mutation(
        "a lease runs out although it is held",
        "kvxfer/storage/leases/book.py",
        "return self.latest if self.holders else min(self.expires, self.latest)",
        "return min(self.expires, self.latest)",
        "lending",
        40,
    ),
    Mutation(
        "a lease goes on after its release where another reader holds it",
        "kvxfer/storage/leases/book.py",
        "return [] if entry is None else self._withdraw(ticket, entry)",
        "return [] if entry is None or entry.holders else self._withdraw(ticket, entry)",
        "lending",
        10,
    ),
    Mutation(
        "blocks have the same generation when their lease is over",
        "kvxfer/storage/leases/cache_lender.py",
        "        self._generations.change(slots)\n        for slot in slots:",
        "        for slot in slots:",
        "lending",
        40,
    ),
    Mutation(
        "generations are read and not compared",
        "backends/nixl/reads.py",
        'np.frombuffer(words, "<u8") == fences.generations',
        "fences.generations == fences.generations",
        "lending",
        40,
    ),
    Mutation(
        "a revoke does not wait until nobody finds the blocks",
        "kvxfer/lending/handover.py",
        "        self._loop.run_blocking(revoke(), REVOKE_S)",
        "        self._loop.submit(revoke())",
        "lending",
        10,
    ),
    Mutation(
        "a fetch is said to be safe while a read goes on",
        "kvxfer/lending/reader.py",
        "        fetched.memory_safe = self._is_quiet(wanted)\n",
        "        fetched.memory_safe = True\n",
        "lending",
        100,
    ),
    Mutation(
        "a ticket has ended although its blocks are pinned",
        "kvxfer/storage/leases/book.py",
        "block in self._pins and block not in self._offers for _",
        "block in self._pins and block not in self._pins for _",
        "lending",
        20,
    ),
    Mutation(
        "a block is unpinned before it is read",
        "kvxfer/storage/leases/cache_lender.py",
        "            yield self._locate(wanted.keys, slots, fenced=fenced)\n",
        "            located = self._locate(wanted.keys, slots, fenced=fenced)\n            self.book.unpin(found)\n            found = []\n            yield located\n",
        "lending",
        20,
    ),
    Mutation(
        "the lease of a request that is aborted before its load is not released",
        "kvxfer/integrations/vllm/prefill_decode/decode.py",
        "        if is_asked and not is_settled:\n            self._release(request_id)\n",
        "        if is_asked and not is_settled:\n            self._asked.pop(request_id)\n",
        "handover",
        20,
    ),
    Mutation(
        "the lease of a prompt that was not finished is not given up",
        "kvxfer/integrations/vllm/prefill_decode/prefill.py",
        "        self._given_up.append(early.lease)\n",
        "        pass\n",
        "handover",
        40,
    ),
    Mutation(
        "the lease of a request that was preempted goes on",
        "kvxfer/integrations/vllm/prefill_decode/prefill.py",
        "                del self._early[request_id]\n                self._revoked.append(early.lease)\n",
        "                del self._early[request_id]\n",
        "handover",
        40,
    ),
)


class _Mutated(SourceFileLoader):
    """Loader of a module with a fault in it."""

    def __init__(self, fullname: str, mutation: Mutation) -> None:
        super().__init__(fullname, str(ROOT / mutation.path))
        self._mutation = mutation

    def get_code(self, fullname: str) -> CodeType:
        """Compile the text of the module with the fault in it."""
        del fullname
        text = Path(self.path).read_text().replace(self._mutation.old, self._mutation.new)
        return compile(text, self.path, "exec")


class _Finder:
    """Finder of the one module that has a fault."""

    def __init__(self, mutation: Mutation) -> None:
        parts = Path(mutation.path).with_suffix("").parts
        self._mutation = mutation
        self._name = ".".join(("kvxfer", *parts) if parts[0] == "backends" else parts)

    def find_spec(self, fullname: str, path: object, target: object = None) -> object:
        """See `importlib.abc.MetaPathFinder.find_spec`."""
        del path, target
        if fullname != self._name:
            return None
        return importlib.util.spec_from_loader(fullname, _Mutated(fullname, self._mutation))


def try_one(mutation: Mutation) -> tuple[Mutation, str]:
    """Run seeds with a mutation, in a process that has not imported the product before.

    Returns:
        The mutation, and what a seed has found; empty if none has.
    """
    sys.meta_path.insert(0, _Finder(mutation))  # type: ignore[arg-type]
    from kvxfer.testing.simulation import main
    from tests.simulation.__main__ import SCENARIOS

    arguments = ["--scenario", mutation.scenario, "--seeds", str(mutation.num_seeds), "--until-one"]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        ended = main(SCENARIOS, arguments)
    return mutation, said.getvalue() if ended else ""


def try_all(words: list[str]) -> bool:
    """Try the mutations whose names have one of some words; whether all are found."""
    for name in PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    chosen = [each for each in MUTATIONS if not words or any(word in each.name for word in words)]
    with multiprocessing.get_context("fork").Pool(NUM_PROCESSES, maxtasksperchild=1) as pool:
        trying = pool.imap_unordered(try_one, chosen)
        all_found = True
        for _ in chosen:
            mutation, found = trying.next(LIMIT_S)
            all_found &= bool(found)
            first, *_ = found.splitlines() or [""]
            sys.stdout.write(
                f"{'found' if found else 'NOT FOUND'}: {mutation}\n    {first[:160]}\n"
            )
            sys.stdout.flush()
    return all_found


if __name__ == "__main__":
    sys.exit(not try_all(sys.argv[1:]))
