"""Disturbances of a chaos run: faults of processes, disks and files that its conductor injects."""

import contextlib
import errno
import os
import random
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.processes import ChaosProcess

MAX_STOP_S = 5.0
MAX_FULL_S = 4.0
DISK_BYTES = 32 << 20
FILLER = "filler"

WEIGHTS = {
    "kill-worker": 4,
    "stop-worker": 6,
    "kill-holder": 3,
    "end-holder": 1,
    "stop-holder": 5,
    "fill-disk": 4,
    "flip-block": 20,
    "truncate": 6,
    "flip-ledger": 8,
    "flip-claim": 8,
    "flip-namespace": 2,
    "remove-folder": 2,
    "gc": 2,
    "fsck": 2,
}
"""Relative frequency of each disturbance."""

FLIPPED = {
    "block": "*/??/*.safetensors*",
    "ledger": "usage.ledger",
    "claim": "*.claim",
    "namespace": "*/namespace.json",
}
"""Files of which bits are flipped."""

Undo = tuple[float, Callable[[], None]]


@dataclass
class Disturber:
    """Random disturbances of processes, of disks and of folders of `file://`."""

    workers: list[ChaosProcess]
    holders: list[ChaosProcess]
    roots: list[Path]
    disk: Path | None
    run_command: Callable[..., None]
    rng: random.Random
    without: frozenset[str]
    counts: Counter[str] = field(default_factory=Counter)

    def disturb(self) -> Undo | None:
        """Make one disturbance; return how to undo it, and when; None without undo."""
        names = [name for name in WEIGHTS if name not in self.without]
        if not names:
            return None
        [name] = self.rng.choices(names, [WEIGHTS[name] for name in names])
        try:
            done = self._act(name)
        except OSError as exc:  # others remove and fill what they like, too
            if exc.errno not in {errno.ENOENT, errno.ENOSPC}:
                raise
            return None
        if done is not False:
            self.counts[name] += 1
        return None if isinstance(done, bool) else done

    def _act(self, name: str) -> Undo | bool:
        verb, _, what = name.partition("-")
        processes = self.holders if what == "holder" else self.workers
        match verb:
            case "kill":
                return self._kill(processes)
            case "stop":
                return self._stop(processes)
            case "flip":
                return self._flip(FLIPPED[what])
        act: Callable[[], Undo | bool] = getattr(self, "_" + name.replace("-", "_"))
        return act()

    def _end_holder(self) -> bool:
        """Ask a holder to end, which drains first."""
        if not (running := _running(self.holders)):
            return False
        chosen = self.rng.choice(running)
        chosen.expect_end(0)
        chosen.signal(signal.SIGTERM)
        return True

    def _fill_disk(self) -> Undo | bool:
        if self.disk is None or (self.disk / FILLER).exists():
            return False
        filler = self.disk / FILLER
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(1 << 16))
        return self.rng.uniform(0.5, MAX_FULL_S), lambda: filler.unlink(missing_ok=True)

    def _truncate(self) -> bool:
        if (path := self._choose("*/??/*.safetensors*")) is None:
            return False
        os.truncate(path, self.rng.choice((0, self.rng.randint(0, path.stat().st_size))))
        return True

    def _remove_folder(self) -> bool:
        pattern = self.rng.choice(("*/??", "*/??", "*/quarantine", "*"))
        if (path := self._choose(pattern, folders=True)) is None:
            return False
        shutil.rmtree(path, ignore_errors=True)
        return True

    def _gc(self) -> bool:
        bounds = self.rng.choice(((), ("--capacity", "2MiB")))
        self.run_command("gc", str(self.rng.choice(self.roots)), *bounds)
        return True

    def _fsck(self) -> bool:
        options = self.rng.choice(((), ("--repair",)))
        self.run_command("fsck", str(self.rng.choice(self.roots)), *options)
        return True

    def _kill(self, processes: list[ChaosProcess]) -> bool:
        if running := _running(processes):
            self.rng.choice(running).kill()
        return bool(running)

    def _stop(self, processes: list[ChaosProcess]) -> Undo | bool:
        if not (running := _running(processes)):
            return False
        stopped = self.rng.choice(running)
        stopped.signal(signal.SIGSTOP)
        return self.rng.uniform(0.05, MAX_STOP_S), lambda: stopped.signal(signal.SIGCONT)

    def _flip(self, pattern: str) -> bool:
        """Flip some bits of a file, or overwrite a few bytes, in place."""
        if (path := self._choose(pattern)) is None:
            return False
        size = path.stat().st_size
        with path.open("r+b", buffering=0) as file:
            # Half of the time where headers and counts are.
            at = self.rng.randrange(self.rng.choice((min(size, 64), min(size, 512), size)) or 1)
            old = os.pread(file.fileno(), self.rng.choice((1, 1, 8, 64)), at)
            flipped = bytes(byte ^ 1 << self.rng.randrange(8) for byte in old)
            zeros, ones, noise = bytes(len(old)), b"\xff" * len(old), self.rng.randbytes(len(old))
            os.pwrite(file.fileno(), self.rng.choice((flipped, flipped, zeros, ones, noise)), at)
        return True

    def _choose(self, pattern: str, *, folders: bool = False) -> Path | None:
        found = sorted(self.rng.choice(self.roots).glob(pattern))
        found = [path for path in found if path.is_dir() == folders]
        return self.rng.choice(found) if found else None


def _running(processes: list[ChaosProcess]) -> list[ChaosProcess]:
    return [process for process in processes if not (process.ended or process.stopped)]


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Path | None]:
    """Mount a small file system; None, with a message, where that is forbidden."""
    image, mount = folder / "disk.img", folder / "disk"
    mount.mkdir()
    with image.open("wb") as file:
        file.truncate(DISK_BYTES)
    make = ["mkfs.ext4", "-q", str(image)]
    try:
        subprocess.run(make, check=True, capture_output=True, text=True)
        command = ["mount", "-o", "loop", str(image), str(mount)]
        subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as exc:
        why = getattr(exc, "stderr", None) or exc
        sys.stdout.write(f"no full disks: a file system cannot be mounted here: {why}\n")
        yield None
        return
    try:
        yield mount
    finally:
        subprocess.run(["umount", "--lazy", str(mount)], check=True)
