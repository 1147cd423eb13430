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
        "        await self.begun.drain()\n        if self._moving:",
        "        await self.begun.drain()\n        if not self._moving:",
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
        60,
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
