# ruff: noqa: E501 - lines of the product, as they are
"""Mutations of the product, each with the scenario that finds it and the seeds that it takes.

`python -m tests.simulation.mutations [WORD ...]` tries those whose names have one of the words.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIMIT_S = 900
COPIED = ("kvxfer", "backends", "tests/simulation")


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
        "stores do not lock their keys",
        "kvxfer/tiering/tiered_backend.py",
        "        with self._locks.hold([keys[index] for index in free]):\n            left",
        "        if keys:\n            left",
        "tiers",
        60,
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
        "write-backs do not lock their keys",
        "kvxfer/tiering/tier_writer.py",
        "            await held.enter_async_context(self._locks.acquire(list(taken)))\n",
        "",
        "tiers",
        60,
    ),
    Mutation(
        "promotions do not lock their keys",
        "kvxfer/tiering/tiered_backend.py",
        "                await held.enter_async_context(self._locks.acquire(batch))\n",
        "",
        "tiers",
        60,
    ),
    Mutation(
        "a staging buffer is used again although a late call touches it",
        "kvxfer/storage/staging_memory.py",
        "        if all(outcome.memory_safe for outcome in outcomes):\n            self.drains",
        "        if outcomes:\n            self.drains",
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
        "lookups of lower tiers have no deadline",
        "kvxfer/tiering/isolated_tier.py",
        "found = await self._ask(Operation.LOOKUP, what, keys, self._timeouts.lookup_s, call)",
        "found = await self._ask(Operation.LOOKUP, what, keys, None, call)",
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
        "        await self.begun.drain()\n        if self._moving:",
        "        await self.begun.drain()\n        if not self._moving:",
        "tiers",
        40,
    ),
    Mutation(
        "tiers do not wait for abandoned calls",
        "kvxfer/tiering/isolated_tier.py",
        "        await self._calls.drain()\n        await self.backend.drain()",
        "        await self.backend.drain()",
        "tiers",
        60,
    ),
    Mutation(
        "bytes in flight are not taken back after a cancellation",
        "kvxfer/transfer/admission.py",
        "                self._bytes_in_flight -= num_bytes\n            self._admit_waiting()\n            raise",
        "                pass\n            self._admit_waiting()\n            raise",
        "tiers",
        200,
    ),
    Mutation(
        "an ended transfer lets no other in",
        "kvxfer/transfer/admission.py",
        "        finally:\n            self._bytes_in_flight -= num_bytes\n            self._admit_waiting()",
        "        finally:\n            self._bytes_in_flight -= num_bytes",
        "tiers",
        20,
    ),
    Mutation(
        "a buffer does not come back after a cancelled wait",
        "kvxfer/storage/staging_memory.py",
        "                self._give_back(turn.result())\n            raise",
        "                pass\n            raise",
        "tiers",
        300,
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
        "a pin is given back twice as early: a slot is read without one",
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
        "a cancelled store of host memory returns before its thread",
        "backends/host/backend.py",
        "await self._threads.run(self._pool.write, plan.slots, plan.keys, chosen)",
        "await self._threads.ask(self._pool.write, plan.slots, plan.keys, chosen)",
        "tiers",
        200,
    ),
    Mutation(
        "a foreign cancellation passes as that of the caller",
        "kvxfer/runtime/calls.py",
        '        if is_caller_cancelled():\n            raise\n        raise BackendUnavailableError("the',
        '        if exc:\n            raise\n        raise BackendUnavailableError("the',
        "tiers",
        60,
    ),
    Mutation(
        "purge leaves the queues of write-backs",
        "kvxfer/tiering/tiered_backend.py",
        "        for writer in self._writers:\n            writer.drop(prefix)\n        async",
        "        async",
        "tiers",
        300,
    ),
    Mutation(
        "blocks that a hanging tier misses are dropped",
        "kvxfer/tiering/tier_writer.py",
        "        if not self._target.is_available:\n            self.queue.give_back(runtime.monotonic(), taken)\n            return\n        blocks",
        "        if not self._target.is_available:\n            return\n        blocks",
        "tiers",
        100,
    ),
    Mutation(
        "flush does not wait for what is queued or being copied",
        "kvxfer/tiering/tier_writer.py",
        "        while self.queue.has_older(mark):",
        "        while False:",
        "tiers",
        100,
    ),
    Mutation(
        "the wish to delete a key is not taken back",
        "kvxfer/tiering/tiered_backend.py",
        "            self._to_delete[key] -= 1\n",
        "",
        "tiers",
        20,
    ),
    Mutation(
        "turns of a key are not ended after a cancellation",
        "kvxfer/storage/key_locks.py",
        "        finally:\n            turn.set()\n            for key",
        "        except ZeroDivisionError:\n            turn.set()\n            for key",
        "tiers",
        100,
    ),
)


@contextmanager
def mutated(mutation: Mutation) -> Iterator[Path]:
    """Copy the tree and put the fault into the copy."""
    with tempfile.TemporaryDirectory(prefix="kvxfer-mutation-") as folder:
        root = Path(folder)
        for name in COPIED:
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, root / name, symlinks=True, ignore=ignored)
        path = root / mutation.path
        path.write_text(path.read_text().replace(mutation.old, mutation.new))
        yield root


def is_found(mutation: Mutation) -> bool:
    """Whether the scenario finds a mutation within its seeds."""
    arguments = ["--scenario", mutation.scenario, "--seeds", str(mutation.num_seeds), "--until-one"]
    with mutated(mutation) as root:
        ended = subprocess.run(
            [sys.executable, "-m", "tests.simulation", *arguments],
            cwd=root,
            env=os.environ | {"PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    assert ended.returncode in (0, 1), ended.stderr
    sys.stdout.write(f"{'found' if ended.returncode else 'NOT FOUND'}: {mutation}\n")
    sys.stdout.write("".join(f"    {line}\n" for line in ended.stdout.splitlines()[:3]))
    sys.stdout.flush()
    return ended.returncode == 1


if __name__ == "__main__":
    words = sys.argv[1:]
    chosen = [each for each in MUTATIONS if not words or any(word in each.name for word in words)]
    found = [is_found(each) for each in chosen]
    sys.exit(not all(found))
