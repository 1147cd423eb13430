"""Mutations of the product, each with the scenario that finds it and the seeds that it takes.

`python -m tests.simulation.mutations [WORD ...]` tries those whose names have one of the words.
"""

import contextlib
import importlib.util
import io
import multiprocessing
import sys
from collections.abc import Iterator
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
"""Packages that the product needs, imported once before the process of a mutation forks."""


@dataclass(frozen=True, slots=True)
class Mutation:
    """Fault to put into the product: a text that occurs once in a file, and its replacement."""

    name: str
    path: str
    old: str
    new: str
    scenario: str
    num_seeds: int

    def __str__(self) -> str:
        return self.name


TABLE = """
--- backends/file/store_batch.py
@@ files 200 memory is short while the room of a failed store is looked for
-        with contextlib.suppress(MemoryError):
+        with contextlib.suppress():
--- backends/nixl/client.py
@@ peers 200 lookups and deletes do not wait for their turn at a holder
-        self._asked = asyncio.Semaphore(ASKED_AT_A_PEER)
+        self._asked = asyncio.Semaphore(1 << 20)
--- backends/file/folders/block_tree.py
@@ files 100 a walk ends at a file that cannot be read
-    if exc.errno in DAMAGE_ERRORS:
+    if exc.errno in ():
--- backends/host/scrubber.py
@@ memory 40 the scrubber ignores the generation of a slot
-        is_known = int(self._seen[slot]) == generation
+        is_known = True
@@ memory 40 the scrubber tells nobody of a change
-            changed(slot, generation)
--- backends/host/pool.py
@@ memory 40 no checksum is made of a block that leaves
-        if slot in self._unhashed:
+        if slot < 0:
--- kvxfer/tiering/tiered_backend.py
@@ isolation 60 a tier that hangs keeps every staging buffer of a GPU's blocks
-            tier.bound_callers(max(1, (num_buffers - 1) // len(self._lower)))
+            tier.bound_callers(num_buffers)
@@ isolation 20 keys that are brought up are locked before there is a buffer
             async with AsyncExitStack() as held:
+                await held.enter_async_context(self._locks.acquire(batch))
                 try:  # before the locks, which other calls wait for
                     hold = tier.hold(sizes[start:stop], [0] * len(batch))
                     staged = await held.enter_async_context(hold)
                 except TimeoutError:
                     logger.warning("%s: no staging buffer came back in time", tier.name)
                     break
-                await held.enter_async_context(self._locks.acquire(batch))
@@ tiers 60 a delete does not wait for what moves
-            await held.enter_async_context(self._locks.acquire(keys))
@@ tiers 10 a lookup finds what no tier has
-        return [key in found for key in keys]
+        return [True for key in keys]
@@ tiers 40 what the second tier took is not written back
-        for writer in self._writers[tier.index :]:
+        for writer in self._writers[tier.index + 1 :]:
@@ tiers 80 a flush does not look at the queues
-            if tier.index:
-                await self._writers[tier.index - 1].flush()
@@ tiers 20 a flush of tiers does not flush these
-            await tier.backend.flush()
@@ tiers 20 an unsafe outcome of a tier is said to be safe
-pick_outcome(old, new, memory_safe=new.memory_safe)
+pick_outcome(old, new, memory_safe=True)
@@ tiers 20 an await before keys are locked
         free = sorted({*chosen}.difference(busy))
+        await asyncio.sleep(0)
@@ tiers 20 stores do not lock their keys
-        with self._locks.hold([batch.keys[index] for index in free]):
+        with self._locks.hold([]):
@@ tiers 200 a purge begins with the first tier
-            for tier in reversed(self._tiers):
+            for tier in self._tiers:
                 try:
@@ tiers 160 a close does not wait for what is written back
-            await asyncio.wait([self._settling], timeout=self._close_s)
--- kvxfer/storage/key_locks.py
@@ tiers 20 turns of keys are ignored
-                while before := turn.find_before(key):
-                    await before.wait()
--- kvxfer/tiering/tier_writer.py
@@ isolation 20 keys that are written back are locked before there is a buffer
         async with AsyncExitStack() as held:
+            await held.enter_async_context(self._locks.acquire(list(taken)))
             try:
                 staged = await held.enter_async_context(self._target.hold(sizes, starts))
             except TimeoutError:
                 self.queue.give_back(runtime.monotonic(), taken)
                 return
-            await held.enter_async_context(self._locks.acquire(list(taken)))
@@ tiers 60 write-backs do not lock their keys
-            await held.enter_async_context(self._locks.acquire(list(taken)))
@@ tiers 300 blocks that could not be read are not written back
-        self._give_up(self.queue.put_off(runtime.monotonic(), failed, failed=True))
+        del failed
@@ tiers 200 blocks whose tier pauses are not written back
-            self.queue.put_off(runtime.monotonic(), keys, failed=False)
--- kvxfer/tiering/isolated_tier.py
@@ isolation 200 a buffer of a caller is said to be quiet while a tier touches it
-            if overlap(blocks, others):
+            if blocks is None:
@@ isolation 200 a share comes back while its tier may touch the buffer of a caller
-            if not is_quiet:
-                task = asyncio
+            if False:
+                task = asyncio
@@ isolation 20 a tier may hold every staging buffer
-share=self._share, timeout_s=self._timeouts.move_s)
+timeout_s=self._timeouts.move_s)
@@ isolation 20 a staging buffer is waited for without a deadline
-share=self._share, timeout_s=self._timeouts.move_s)
+share=self._share)
@@ isolation 40 a tier is asked whose buffers are all being drained
-        return not (is_late or is_spent)
+        return not is_late
@@ rows 400 a store that was given up brings back what was purged
-            await self.backend.drain()
-            self._num_drained
+            self._num_drained
@@ tiers 60 a late move is called safe
-late = Outcome(Status.TIMED_OUT, memory_safe=False, reason=reason)
+late = Outcome(Status.TIMED_OUT, memory_safe=True, reason=reason)
@@ tiers 20 a tier that was late is never tried again
-or self._suspension.is_on(runtime.monotonic())
+or self._suspension.num_failures
@@ tiers 40 the drain of a tier forgets its late calls
-        await self._calls.drain()
@@ tiers 60 a lookup of a tier ends with its caller
-                outlives_caller=operation is Operation.LOOKUP,
+                outlives_caller=False,
--- kvxfer/transfer/mover.py
@@ tiers 150 bytes of a transfer that was cancelled as it began stay in flight
-            if not (turn.cancel() or turn.cancelled()):  # admitted at the same moment
-                self.bytes_in_flight -= num_bytes
@@ tiers 20 a load goes on beyond its deadline
-_, running = await asyncio.wait(tasks, timeout=left)
+_, running = await asyncio.wait(tasks, timeout=None if left is None else left + 0.5)
@@ tiers 40 a piece that was abandoned counts as safe
         except asyncio.CancelledError:
-            self._settle(job)
@@ tiers 40 unsafe outcomes of a backend are forgotten
-        if not all(outcome.memory_safe for outcome in outcomes):
+        if not outcomes:
@@ tiers 40 a drain does not wait for the backend
-                await await_call(self._backend.drain())
+                await asyncio.sleep(0)
@@ tiers 40 a drain does not wait for pieces that move
-            await asyncio.wait(met)
@@ tiers 20 pieces go on after the deadline
-            for task in tasks:
-                task.cancel()
@@ tiers 20 memory is unsafe only when the backend has ended
-        job.in_backend[piece.start : piece.stop] = [True] * len(keys)
@@ tiers 20 an outcome of the wrong block
-        for index, outcome in enumerate(outcomes, piece.start):
+        for index, outcome in enumerate(outcomes):
@@ tiers 60 a transfer does not wait for room among the bytes in flight
-            await turn
--- kvxfer/storage/staging_memory.py
@@ isolation 100 buffers of callers wait for tiers that hang, and do not touch them
-            if self._shares is not None:
-                drain = partial(self._shares.drain_of, blocks)
+            pass
@@ tiers 20 the share of a buffer is not given back
-        if share is not None:
-            share.release()
@@ tiers 20 a buffer that is not quiet goes back
-            if staged is None or not staged.drains:
+            if True:
                 self._give_back(buffer, share)
@@ tiers 20 two holders share a buffer
-            return self._idle.pop()
+            return self._idle[-1]
@@ tiers 80 a drained buffer counts as being drained for ever
-        self._num_unsafe -= 1
--- backends/host/backend.py
@@ tiers 120 a purge of pinned blocks says nothing
-            self._reports.removed(pinned, Removal.DELETED)
@@ tiers 20 slots are free before their blocks were read
-            return Begun(outcomes, copy, partial(self.unpin, found))
+            self.unpin(found)
+            return Begun(outcomes, copy)
@@ tiers 20 a store of host memory ends before its bytes are there
-                await wait_for_begun(Begun((), copy, landed=finish))
+                finish()
@@ tiers 40 a store that failed is told as one of new blocks
-        self._reports.added(stored)
+        self._reports.added([*keys])
@@ tiers 20 a pin is never given back
-        return Begun(outcomes, copy, partial(self.unpin, found))
+        return Begun(outcomes, copy)
@@ tiers 20 a store is not told
-        self._reports.added(stored)
@@ tiers 40 an eviction is not told
-{Removal.REPLACED: replaced, **plan.evicted_by}
+{Removal.REPLACED: replaced}
--- kvxfer/storage/index.py
@@ tiers 100 a block that is read is removed
-dict.fromkeys(keys) if self.state(key) is BlockState.READY]
+dict.fromkeys(keys) if self.state(key) in (BlockState.READY, BlockState.LOADING)]
@@ memory 30 a block that is being stored is found
-        return [entry is not None and not entry.storing for entry in map(self._entries.get, keys)]
+        return [entry is not None for entry in map(self._entries.get, keys)]
@@ tiers 60 blocks of a batch evict each other
-        for key in idle:
-            policy.hold(key)
+        idle = []
@@ tiers 60 a slot is never used
-            elif self._next_slot < self.num_slots:
+            elif self._next_slot < self.num_slots - 1:
@@ tiers 20 a block that was stored can never be evicted
             self._entries[key].storing = False
-            self._active.release(key)
@@ tiers 40 a cancelled store keeps its slots
-            self._drop(*reversed(keys))
@@ tiers 20 a dropped block keeps its slot
-        self._free_slots.append(self._entries.pop(key).slot)
+        self._entries.pop(key)
--- kvxfer/runtime/calls.py
@@ isolation 200 a load that was given up counts in flight until a tier that hangs answers
-                await _wait_to_the_end(task, ends_at - loop.time())
+                await _wait_to_the_end(task)
@@ tiers 80 a foreign cancellation passes as that of the caller
-        if is_caller_cancelled():
+        if exc:
@@ tiers 40 calls that were given up are forgotten
-        self._abandoned.add(call)
@@ tiers 20 a late call counts for ever
-        self._late.discard(call)
--- kvxfer/transfer/engine.py
@@ tiers 20 a job that was polled is remembered for ever
-                self._submitted.pop(job_id, None)
--- kvxfer/transfer/event_loop.py
@@ polled 600 a close that another one overtakes fails
-            if not self.guard.released:
-                raise
+            raise
--- kvxfer/transfer/job.py
@@ tiers 20 the memory of a job that is late is said to be safe
-            safe = not self.in_backend[index]
+            safe = True
--- backends/object/bucket.py
@@ objects 3 a request is counted twice
-                self.counts.requests += 1
+                self.counts.requests += 2
@@ objects 60 a removal that is repeated does not look again
-        while await self.head(path) == version:
+        while failed is not None or await self.head(path) == version:
--- kvxfer/pages/object_pages.py
@@ objects 20 the memory of a page is used again while it is sent
-        weakref.finalize(page, self._give, free, memory).atexit = False
+        self._give(free, memory)
--- kvxfer/pages/header.py
@@ objects 60 a part of a chunk counts as the whole
-        return is_whole and self.start <= start and start + num_bytes <= self.stop
+        return is_whole
--- kvxfer/face/salted_keys.py
@@ objects 20 a salt whose blocks stay is forgotten
-                failure = exc
+                failure = exc
+                self._former.pop(salt, None)
@@ objects 60 a salt is renewed, and is the same
-        self.salt = runtime
+        self.salt = self.salt or runtime
--- backends/object/presence.py
@@ objects 150 what was seen in a bucket is believed for ever
-        return entry.there if now - entry.at < ttl_s else None
+        return entry.there if ttl_s else None
--- backends/object/backend.py
@@ objects 250 a close does not wait for deletes
-                await self._deletes.wait_for_others()  # those whose callers were cancelled
@@ objects 60 a corrupt object stays
-            if await self._bucket.remove(name, version):
+            if version is None:
@@ objects 60 a lookup waits for silent requests
-await self._calls.wait_for(left_s, asking, outlives_caller=True)
+await self._calls.wait_for(None, asking, outlives_caller=True)
@@ objects 60 a store of an object does not wait for deletes
-            await self._deletes.wait(keys)
@@ objects 400 a block that could not be removed counts as gone
-{key for key, gone in pairs if gone is None}
+set()
--- backends/file/io/file_io.py
@@ files 40 a file has its name before its bytes
+                    disk.rename(file.temporary, file.name, src_dir_fd=folder, dst_dir_fd=folder)
                     written = self.write(fd, file.vector)
@@ files 20 a file has its name before its bytes are on the disk
-                    if durable:
-                        disk.fsync(fd)
@@ files 10 padding is not cut off
-                    disk.ftruncate(fd, file.size_bytes)
@@ files 40 the rest of a short write is forgotten
-        vector = _rest(vector, moved)
+        vector = vector[len(vector) :]
--- backends/file/folders/ledger.py
@@ files 300 the count is changed without the lock of other processes
-            self._lock_file(ends_at)
@@ files 20 reserved bytes are not counted
-        self.used += num_bytes
@@ files 300 a walk counts although the count was lost meanwhile
-        if self._num_losses != begun.num_losses or self._added < begun.added:
+        if self._num_losses < begun.num_losses:
--- backends/file/space.py
@@ files 40 a walk that failed stays under way
-            self.index.abandon_walk()
@@ files 600 memory is short while the room of files is given back
-            with contextlib.suppress(OSError, MemoryError):
-                with self
+            with contextlib.suppress(OSError):
+                with self
@@ files 600 an eviction ends at a file that cannot be removed
-                if not (may_not or of_file or exc.errno in DAMAGE_ERRORS):
+                if not may_not:
@@ files 600 memory is short while a file is evicted
-                num_bytes = folder.remove(victim.key, found_in)
+                try:
+                    num_bytes = folder.remove(victim.key, found_in)
+                except MemoryError:
+                    del self._not_removed[victim]
+                    raise
@@ files 400 a corrupt block that two have found is taken off the count twice
-            moved, is_known = self._quarantine(key, fd), True
+            moved, is_known = self._quarantine(key, fd) or (8192, 8192), True
@@ files 100 nobody is told of a corrupt block that is moved away
-            self._reports.removed([key], Removal.CORRUPT)
@@ files 40 room is made for what is there, not for what comes
-                self._ledger.used + total > self._config.capacity
+                self._ledger.used > self._config.capacity
@@ files 100 an evicted file stays counted
-            self._take_off(padded(num_bytes), victim.num_bytes)
-            return 1 + (with_folder and folder.remove_if_empty(victim.key))
+            return 1 + (with_folder and folder.remove_if_empty(victim.key))
@@ files 60 an evicted file is not told
-                self._gone.setdefault((victim.fingerprint, reason), []).append(victim.key)
@@ files 200 the room of a failed store of files is not given back
-                    self._ledger.give_back(settled[1])
+                    self._ledger.give_back(0)
--- backends/file/file_index.py
@@ files 150 files of other namespaces count as ours
-        return [key_in(file) for file in files if file.startswith(self._namespace)]
+        return [key_in(file) for file in files]
--- backends/file/io/file_io.py
@@ files 10 a descriptor is not closed at the end of its context
-        yield fd
-    finally:
-        runtime.disk().close(fd)
+        yield fd
+    finally:
+        pass
--- backends/file/folders/process_claim.py
@@ files 500 a claim that cannot be locked stays open
-            except BaseException:
-                self.close()
-                raise
+            except RuntimeError:
+                raise
@@ files 100 a killed writer counts as alive
-        return bool(_read_claim(root, owner))
+        return bool(_read_claim(root, owner)) or True
@@ files 40 a living writer counts as killed
-        return bool(_read_claim(root, owner))
+        return not _read_claim(root, owner)
--- backends/pool/backend.py
@@ pool 10 two threads of an engine ask a pool at one time
-        with self._lock:
+        with contextlib.nullcontext():
             try:
                 self._send(request)
@@ pool 150 a pool that was lost is asked again for ever
-            if attachment is None or attachment.error:
+            if attachment is None:
@@ pool 5 a call keeps the memory of a pool in use after its end
-                self._users[attachment] -= 1
--- backends/nixl/server.py
@@ peers 100 a peer that is silent is served for ever
-            self._require_signs_of_life()
+            self._lease = asyncio.get_running_loop().call_later(1e9, print)
@@ peers 8 what a peer lets go stays pinned
-            await self._pins.pop(number).aclose()
@@ peers 40 pins of a peer that has gone stay
-        while self._pins:
+        while not self._ended:
@@ peers 300 a request that was given up goes on at its holder
-            if job := self._jobs.get(number):
-                job.cancel()
--- backends/nixl/reads.py
@@ peers 250 memory of late reads is called safe
-        if not self._held:
+        if blocks.num_blocks:
@@ lending 80 a late read is not in quarantine
-            late(asyncio.wrap_future(flight.done), ours)
@@ lending 40 generations are read and not compared
-np.frombuffer(words, "<u8") == fences.generations
+fences.generations == fences.generations
--- kvxfer/integrations/vllm/offloading/lower_tier.py
@@ offloading 40 a reset keeps the names of the lower tier
-        deletes_former = self._keys.renew()
+        deletes_former = False
@@ offloading 60 a reset leaves lookups under way
-        self._end_lookups()
         for job_id, job in self._jobs.items():
@@ offloading 40 a row that is not safe is reported as moved
-                (moved if outcome.memory_safe else self._late).append(each)
+                moved.append(each)
--- kvxfer/integrations/vllm/offloading/manager.py
@@ offloading 40 slots that are in use are free after a reset
-            self._index.keep_out(set(in_use))
@@ offloading 20 rows of chunks that are not below are never given back
-        self._index.finish_store(self._tier.take_missing(), stored=False)
+        self._tier.take_missing()
@@ offloading 40 a request that is aborted still wants its chunks
-        self._release(req_context.req_id)
         self._requests.finish
@@ offloading 100 a request that was preempted holds chunks as it runs again
-            self._release_resumed(context.preempted_req_ids)
+            pass
@@ offloading 20 chunks that were loaded are not pinned for the requests that wait
-            (block.slot,) = self._index.pin([key])
+            block.slot = self._index.slot_of(key)
--- kvxfer/integrations/vllm/offloading/worker.py
@@ offloading 100 a worker does not wait for stores of blocks that are written anew
-        self._engine.wait([self._ours
+        list([self._ours
--- examples/proxy/server.py
@@ proxy 60 a leg goes on when the client has left
-            handler_cancellation=True,
+            handler_cancellation=False,
@@ proxy 60 the prefill leg outlives its request
-            asyncio.get_running_loop().call_later(late_s, leg.cancel)
+            del late_s
@@ proxy 60 the prefill leg has no time limit of its own
-min(deadline_s, started_s + self._config.prefill_timeout_s)
+deadline_s
@@ proxy 60 an answer that was broken off is begun again
-                if client.answer is not None:
-                    raise
@@ proxy 100 an end does not cut off requests that are late
-            for task in late:
-                task.cancel()
--- examples/proxy/engine_client.py
@@ proxy 60 an engine that was ejected never comes back
-                engine.bring_back()
--- examples/proxy/engines.py
@@ proxy 60 a request that was cancelled stays under way at its engine
-        try:
-            yield
-        finally:
-            self.num_requests -= 1
+        yield
+        self.num_requests -= 1
--- kvxfer/integrations/vllm/prefill_decode/worker.py
@@ handover 40 blocks that were not loaded are not reported
-                ended.bad_blocks |= {request_id: bad} if any(bad) else {}
@@ handover 40 a lease is not revoked when its blocks are gone
-            self._handover.revoke(step.revoked)
@@ handover 40 a load has ended although a read goes on
-            if not fetched.memory_safe:
+            if not load.done():
--- kvxfer/storage/leases/book.py
@@ handover 60 a lease is held for a reader that is gone
-                del entry.holders[holder]
@@ handover 20 a lease that nobody asks for does not run out
-        return self.latest if self.holders else min(self.expires, self.latest)
+        return self.latest
@@ lending 60 a ticket that is left ends all that its reader holds
-if held is not None and (numbers is None or held in numbers):
+if held is not None:
@@ lending 40 a lease runs out although it is held
-return self.latest if self.holders else min(self.expires, self.latest)
+return min(self.expires, self.latest)
@@ lending 10 a lease goes on after its release where another reader holds it
-if (entry := self._tickets.get(ticket)) and not entry.is_over:
+if (entry := self._tickets.get(ticket)) and not entry.is_over and not entry.holders:
@@ lending 60 a ticket has ended although its blocks are pinned
-        return not (entry.blocks & self._pins.keys()) - self._offers.keys()
+        return True
--- kvxfer/integrations/vllm/prefill_decode/decode.py
@@ handover 20 the lease is not released after a load
         for request_id in request_ids:
-            self._release(request_id)
+            self._asked.pop(request_id, None)
@@ handover 20 the lease of a request that is aborted before its load is not released
         if is_asked and not is_settled:
-            self._release(request_id)
+            self._asked.pop(request_id)
--- kvxfer/integrations/vllm/prefill_decode/prefill.py
@@ handover 10 blocks of a prompt are free although they are lent
-        return True, self._make_params(
+        return False, self._make_params(
@@ handover 40 the lease of a prompt that was not finished is not given up
-        self._step.given_up.append(early.lease)
@@ handover 40 the lease of a request that was preempted goes on
-                self._step.revoked.append(early.lease)
--- backends/file/block_writer.py
@@ files 600 the names of files do not reach the disk
-        if self.is_durable:
-            self._sync(keys, results)
--- backends/file/backend.py
@@ files 60 memory is short on a thread of files
-        except (OSError, MemoryError) as exc:
+        except OSError as exc:
@@ files 60 a flush of files syncs nothing
-        await self._ask(self._syncs, self._folder.sync_file_system)
+        await asyncio.sleep(0)
@@ files 600 stores of files do not lock their keys
-        async with self._stores.acquire(keys):
+        async with contextlib.AsyncExitStack():
@@ files 10 the count is not closed
-        self._ledger.close()
--- kvxfer/face/row_store.py
@@ rows 40 rows that a late transfer may touch are given back at once
-        self._rows_of[job.direction].give_back([r for r in job.rows if r not in late], late=late)
+        self._rows_of[job.direction].give_back(job.rows)
+        late = []
@@ rows 200 pages are copied to their caller beyond a purge
             if arrived and job.direction is Direction.LOAD:
-                self._require_no_purge(job)
@@ rows 200 pages of before a purge are stored after it
                     held.callback(self._beginning.release)
-                    self._require_no_purge(job)
@@ rows 500 a purge does not drain the stores that have begun
-        await self._engine.drain()  # a store that is late would put its pages there afterwards
@@ rows 40 no other salt is taken when a purge has failed
-            if not self._delete_all(deadline) and self._keys.renew():
+            if not self._delete_all(deadline) and False:
@@ rows 200 pages are moved while a purge goes on
-        return self._num_purging > 0 or self._suspension.is_on(runtime.monotonic())
+        return self._suspension.is_on(runtime.monotonic())
@@ rows 20 a row is given to two callers
-            taken, self._free = self._free[:most], self._free[most:]
-            return taken
+            return self._free[:most]
@@ rows 40 rows are not given back when a late transfer has ended
-        self._rows_of[job.direction].give_back(late)
@@ rows 60 a tier that hangs has all rows
-            shares.share_out(num_jobs)
@@ rows 60 rows wait for tiers that hang, and do not touch them
-        drain = partial(self._engine.drain, self._describer.describe(job.group, late))
+        drain = self._engine.drain
@@ rows 60 a purge that is late goes on
-                    purging.cancel()  # a late one would delete what is stored after the call
--- backends/nixl/discovery.py
@@ peers 20 a holder whose lease has ended stays known
-                self._drop(name, now)
@@ peers 20 the lease of an announcement is not renewed
-if self._lease is None or not await session.renew(self._lease):
+if self._lease is None:
@@ peers 40 an announcement has its first lease for ever
-                self._lease = await session.grant(self._lease_s)
-                announced = b""
+                self._lease = self._lease or await session.grant(self._lease_s)
@@ peers 40 a follower ends with the first failure
-            await asyncio.sleep(self._pause.next_s())
+            return
--- kvxfer/tiering/tiered_backend.py
@@ pool 300 preloading waits for a tier that hangs
-await outlive_caller(remembering.recently_used(num_blocks))
+await remembering.recently_used(num_blocks)
@@ pool 600 a pool does not start while a tier fails
-    except Exception:  # the first tier works without the others
+    except MemoryError:
@@ pool 300 blocks count as preloaded that the first tier does not have
-                found += [key for key, each in zip(batch, there, strict=True) if each]
+                found += batch
--- backends/pool/server.py
@@ pool 100 a connection that a forked child keeps open outlives its engine
-            loop.add_reader(self._pidfd, self._end_connection)
@@ pool 10 what is stored in a pool is not written back
-            self._backend.write_back(parts)
@@ pool 60 a corrupt block of a pool stays
-                self._host.drop_corrupt([key], [slot], [corrupt])
@@ pool 150 a lookup of a pool waits for a tier that hangs
-                async with asyncio.timeout(within_s):
+                async with asyncio.timeout(None):
@@ pool 500 a delete of a pool waits for a tier that hangs
-            async with asyncio.timeout(min(DELETE_WITHIN_S, self._within_s)):
+            async with asyncio.timeout(None):
@@ pool 60 pins of a pool engine that has ended stay
-            await self._release(at_once=said_bye or is_caller_cancelled())
--- backends/nixl/connection.py
@@ peers 40 a data connection that was not opened to the end stays open
-        except BaseException:
-            data.close()
-            raise
+        except BaseException:
+            raise
@@ peers 200 a part of a block is read in place of another
-        if places is None or not np.array_equal(places.starts, blocks.payload_starts):
+        if places is None:
@@ peers 300 a holder is not told of a request that was given up
-                self._channel.send_soon(wire.Cancel(request_id=number))
@@ lending 20 a reader keeps the tickets that it has left
-            self.release(asked.number)
--- backends/nixl/wire/data.py
@@ peers 40 the socket of a data connection that does not connect stays open
-                unless_secured.callback(plain.close)
--- kvxfer/lending/reader.py
@@ lending 10 a ticket is released at the first worker alone
-        workers = self._workers.get(endpoint, [endpoint])
+        workers = [endpoint]
@@ lending 20 keys of blocks do not name their worker
-"rank": self.description.at_rank(rank).shard.rank}
+"rank": 0}
@@ lending 10 blocks are bad only where the first worker has not read them
-                bad[part.group].update((b, None) for b in targets if b != self._null_block)
+                if part.rank == 0:
+                    bad[part.group].update((b, None) for b in targets if b)
@@ lending 20 a released ticket stays kept
-        self._keepers.pop((endpoint, ticket), None)
@@ lending 600 a hold goes on after that at another worker has failed
-            await end_tasks(holds)
@@ lending 80 a connection is closed before its call begins
-        holds = [asyncio.ensure_future(hold(*pair)) for pair in zip(workers, keys, strict=True)]
+        pairs, peer = zip(workers, keys, strict=True), self._exchange.peer
+        holds = [asyncio.ensure_future(peer(at).hold(ticket, names)) for at, names in pairs]
@@ lending 400 a fetch is said to be safe while a read goes on
-        fetched.memory_safe = is_quiet() or all(map(is_quiet, self._blocks(wanted)))
+        fetched.memory_safe = True
--- kvxfer/storage/leases/cache_lender.py
@@ lending 40 blocks have the same generation when their lease is over
-        self._generations.change(withdrawn)
@@ lending 60 a block is unpinned before it is read
-            yield self._locate(wanted.keys, slots, fenced=fenced)
+            located = self._locate(wanted.keys, slots, fenced=fenced)
+            self.book.unpin(found)
+            found = []
+            yield located
--- kvxfer/lending/prompt_exchange.py
@@ lending 100 blocks of a first offer that is cancelled stay lent
-            await self._run_if_open(take_back())
@@ lending 100 an offer that is cancelled ends what another has lent under its ticket
-            if not offers:
+            if True:
@@ lending 1000 a fetch that is cancelled does not wait for late reads
-                await self._run_if_open(reader.drain(wanted))
@@ lending 40 a fetch keeps what it has asked for
-                await self._run_if_open(reader.leave(endpoint, lease))
--- kvxfer/lending/handover.py
@@ lending 150 a ticket that is offered again ends with its first end
-            self._ended.remove(ticket)
@@ lending 10 a revoke does not wait until nobody finds the blocks
-        self._loop.run_blocking(self.withdraw(tickets), REVOKE_S)
+        self._loop.submit(self.withdraw(tickets))
--- backends/file/block_reader.py
@@ files 60 a corrupt file stays
-            if self._space.quarantine(key, fd):
+            if fd < 0:
--- kvxfer/transfer/staged_backend.py
@@ tiers 40 blocks that did not arrive in a staging buffer are copied
-                if arrived := positions_done(outcomes):
+                if arrived := list(range(len(outcomes))):
@@ tiers 250 a copy of a staging buffer goes on after its buffer is free
-            await self._threads.run(self._copy_blocking, source, destination)
+            await self._threads.ask(self._copy_blocking, source, destination)
--- backends/pool/backend.py
@@ pool 60 a pool is not told that an engine has given its connection up
-                    if attachment.error or attachment is not self._attachment:
+                    if attachment is not self._attachment:
@@ pool 150 the rest of a message is never sent to a pool that goes on
-                runtime.start_thread(self._send_rest, name="kvxfer-pool-bye")
+                self._socket.close()
@@ pool 40 an engine unpins before it has read
-                    read = attachment.pool.read(pinned.slots, found, blocks.take(pinned.rows))
+                    attachment.tell(wire.Unpin(keys=found))
+                    read = attachment.pool.read(pinned.slots, found, blocks.take(pinned.rows))
@@ pool 200 the rest of a batch is stored with the bytes of other blocks
-blocks.take(left))
+blocks.take(list(range(len(left)))))
--- kvxfer/transfer/mover.py
@@ tiers 40 a drain that has failed says that memory is safe
-        except Exception as exc:
-            raise BackendUnavailableError(f"memory cannot be drained: {exc!r}") from exc
+        except Exception:
+            pass
--- kvxfer/tiering/write_back_queue.py
@@ tiers 300 a flush does not wait for what was put off
-        entries = chain(self._waiting.values(), self._taken.values(), self._put_off.values())
+        entries = chain(self._waiting.values(), self._taken.values())
--- kvxfer/tiering/tier_writer.py
@@ tiers 250 a write-back that timed out counts as done
-        failed = {key for key, each in zip(keys, outcomes, strict=True) if not each.done}
+        failed = {k for k, e in zip(keys, outcomes, strict=True) if e.status is Status.FAILED}
--- kvxfer/storage/index.py
@@ memory 250 a block that is pinned can be evicted
-            if not entry.num_pins:
-                self._active.hold(key)
--- backends/host/backend.py
@@ memory 300 a purge leaves what somebody reads
-            pinned, left = self._index.quarantine_all(prefix)
+            pinned, left = list[BlockKey](), list[BlockKey]()
@@ memory 150 stores of host memory do not lock their keys
-            with self._stores.hold(plan.keys):
+            if plan.keys is not None:
--- backends/host/scrubber.py
@@ memory 60 the scrubber never begins
-            self._threads.start(self._run, threading.get_ident())
--- kvxfer/storage/staging_memory.py
@@ tiers 40 a buffer is drained by all tiers
-        drain = drain or self._drain
+        drain = self._drain
--- backends/file/io/file_io.py
@@ files 200 a file that cannot be looked for is not there
-            sizes.append(None if runtime.is_absent(exc) else exc)
+            sizes.append(None)
--- kvxfer/storage/bytes_backend.py
@@ bytes 600 a store finds what a delete that was given up removes after it
-        await self._locks.wait_for_others(keys)  # else a removal could take what the lookup finds
@@ bytes 300 changes of a value overtake each other
-        return await self._locks.hold_during(keys, change)
+        return await self._threads.ask(self._call, func)
@@ bytes 1500 a storage is closed while calls hang in it
-        if await self._threads.aclose():  # calls hang
+        if await self._threads.aclose() < 0:  # calls hang
@@ bytes 20 a part of a chunk is written to the beginning of its block
-            payload = verified[start:]
+            payload = verified
--- kvxfer/integrations/lmcache/residents.py
@@ lmcache 200 objects that are only away are deleted
-        if self.is_exact:
+        if self.num_tiers:
@@ lmcache 20 an object is told as gone twice
-                    resident.told_bytes = 0
@@ lmcache 300 what is left of an object that lost a piece stays
-                        self._broken[object_id] = None  # else a silent tier may have it
--- kvxfer/integrations/lmcache/answers.py
@@ lmcache 150 memory of LMCache's is touched after the answer
-            if not self.ended:
+            if self.done:
@@ lmcache 40 nobody watches the deadlines of tasks
-            self._tasks.append(task)
--- kvxfer/integrations/lmcache/object_store.py
@@ lmcache 60 a buffer of LMCache's store is used again that is not quiet
-            outcomes = await task.ask(staged.move(move, keys, staged.blocks))
+            outcomes = await task.ask(move(keys, staged.blocks))
@@ lmcache 20 an object of another type is loaded
-        other = {pieces[at]: Status.CORRUPT for at in done if heads[at] != pieces[at].head}
+        other = dict[Piece, Status]()
--- kvxfer/integrations/lmcache/adapter.py
@@ lmcache 200 an object that LMCache has locked is deleted
-                ids = [object_id_of(key) for key in keys if key not in self._pins]
+                ids = [object_id_of(key) for key in keys]
"""
"""Faults of files, as in a patch; after `@@` scenario, seeds, name; only `-` lines: `pass`."""


def _parse(table: str) -> Iterator[Mutation]:
    for of_file in table.split("\n--- ")[1:]:
        path, *hunks = of_file.split("\n@@ ")
        for hunk in hunks:
            head, *lines = hunk.splitlines()
            scenario, num_seeds, name = head.split(" ", 2)
            old, new = (
                "\n".join(line[1:] for line in lines if line[:1] in marks) for marks in (" -", " +")
            )
            new = new or old[: len(old) - len(old.lstrip())] + "pass"
            yield Mutation(name, path, old, new, scenario, int(num_seeds))


MUTATIONS = tuple(_parse(TABLE))


class _Mutated(SourceFileLoader):
    """Loader of a module with a fault in it."""

    def __init__(self, fullname: str, mutation: Mutation) -> None:
        super().__init__(fullname, str(ROOT / mutation.path))
        self._mutation = mutation

    def get_code(self, fullname: str) -> CodeType:
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
    from kvxfer.testing.simulation import campaign
    from tests.simulation.__main__ import SCENARIOS

    [scenario] = [each for each in SCENARIOS if each.name == mutation.scenario]
    with contextlib.redirect_stdout(io.StringIO()), campaign._quietly():
        for seed in range(mutation.num_seeds):
            if violations := campaign._run(scenario, seed).violations:
                return mutation, f"{scenario.name}, seed {seed}: {violations[0]}"
    return mutation, ""


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
