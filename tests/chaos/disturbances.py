"""Disturbances of a chaos run: faults that its conductor injects in processes, disks and files."""

import contextlib
import errno
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos.processes import ChaosProcess

MAX_STOP_S = 5.0
MAX_FULL_S = 4.0
DISK_BYTES = 32 << 20
FILLER = "filler"

WEIGHTS = {
    "kill worker": 4,
    "stop worker": 6,
    "kill holder": 3,
    "stop holder": 5,
    "fill disk": 4,
    "flip block": 20,
    "truncate block": 6,
    "flip ledger": 8,
    "flip claim": 8,
    "flip namespace": 2,
}
"""Relative frequency of each disturbance."""

FILES = {
    "block": "*/??/*.safetensors*",
    "ledger": "usage.ledger",
    "claim": "*.claim",
    "namespace": "*/namespace.json",
}

Undo = tuple[float, Callable[[], object]]


@dataclass
class Disturber:
    """Random disturbances of processes, of disks and of files of `file://`."""

    workers: list[ChaosProcess]
    holders: list[ChaosProcess]
    roots: list[Path]
    disk: Path | None
    rng: random.Random
    counts: Counter[str] = field(default_factory=Counter)

    def disturb(self) -> Undo | None:
        """Make one disturbance; return how and when to undo it, or None."""
        [name] = self.rng.choices(list(WEIGHTS), list(WEIGHTS.values()))
        verb, _, what = name.partition(" ")
        if not (targets := self._targets(what)):
            return None
        act: Callable[[Any], Undo | None] = getattr(self, f"_{verb}")
        try:
            undo = act(self.rng.choice(targets))
        except OSError as exc:  # other disturbances remove and fill things, too
            if exc.errno not in {errno.ENOENT, errno.ENOSPC}:
                raise
            return None
        self.counts[name] += 1
        return undo

    def _targets(self, what: str) -> list[Any]:
        if what in FILES:
            return sorted(self.rng.choice(self.roots).glob(FILES[what]))
        if what == "disk":
            filler = self.disk and self.disk / FILLER
            return [filler] if filler and not filler.exists() else []
        processes = self.workers if what == "worker" else self.holders
        return [each for each in processes if not (each.ended or each.stopped)]

    def _kill(self, process: ChaosProcess) -> None:
        process.kill()

    def _stop(self, process: ChaosProcess) -> Undo:
        process.signal(signal.SIGSTOP)
        return self.rng.uniform(0.05, MAX_STOP_S), lambda: process.signal(signal.SIGCONT)

    def _fill(self, filler: Path) -> Undo:
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(1 << 16))
        return self.rng.uniform(0.5, MAX_FULL_S), lambda: filler.unlink(missing_ok=True)

    def _truncate(self, path: Path) -> None:
        os.truncate(path, self.rng.choice((0, self.rng.randint(0, path.stat().st_size))))

    def _flip(self, path: Path) -> None:
        """Flip some bits of a file, or overwrite a few bytes, in place."""
        size = path.stat().st_size
        with path.open("r+b", buffering=0) as file:
            # Half of the time where headers and counts are.
            at = self.rng.randrange(self.rng.choice((min(size, 64), min(size, 512), size)) or 1)
            old = os.pread(file.fileno(), self.rng.choice((1, 1, 8, 64)), at)
            flipped = bytes(byte ^ 1 << self.rng.randrange(8) for byte in old)
            zeros, ones, noise = bytes(len(old)), b"\xff" * len(old), self.rng.randbytes(len(old))
            os.pwrite(file.fileno(), self.rng.choice((flipped, flipped, zeros, ones, noise)), at)


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Path | None]:
    """Mount a small file system; None, with a message, where that is forbidden."""
    image, mount = folder / "disk.img", folder / "disk"
    mount.mkdir()
    with image.open("wb") as file:
        file.truncate(DISK_BYTES)
    command = f"mkfs.ext4 -q {image} && mount -o loop {image} {mount}"
    made = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)  # noqa: S602
    if made.returncode:
        sys.stdout.write(f"no full disks: a file system cannot be mounted here: {made.stderr}\n")
        yield None
        return
    try:
        yield mount
    finally:
        subprocess.run(["umount", "--lazy", str(mount)], check=True)
