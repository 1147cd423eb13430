"""Adapter files: the digest of a LoRA adapter, and whether an engine may have loaded other weights.

An engine knows an adapter by its name and folder, and retraining may overwrite the folder's files.
"""

import hashlib
import os
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

from kvxfer.errors import InvalidArgumentError

DIGEST_BYTES = 16
HARMLESS = (
    *("README.md", "LICENSE*", ".git*", "*.lock", "events.out.*"),
    *("optimizer.*", "scheduler.*", "scaler.*", "rng_state*", "trainer_state.json"),
    *("training_args.*", "all_results.json", "eval_results.json", "train_results.json"),
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt"),
    *("chat_template.*",),
)
"""Files of an adapter's folder that change no weight; the tokenizer's are among them, as page keys
depend on the tokens. All others count, such as `adapter_config.json`, which has the scaling."""

Stats = tuple[tuple[str | int, ...], ...]


class Adapter(NamedTuple):
    """Adapter of a request."""

    number: int  # the engine's id of the loaded adapter
    name: str  # used by requests
    path: str  # folder of the files
    loads_anew: bool = False  # whether the engine rereads the files of a loaded adapter


def digest_adapter(path: str) -> str:
    """Hash names and bytes of an adapter's files; equal files in another folder hash the same."""
    stats, digest = _stats_of(path), hashlib.blake2b(digest_size=DIGEST_BYTES)
    for name, *_ in stats:
        digest.update(f"{len(str(name))} {name} ".encode(errors="surrogateescape"))
        try:
            with (Path(path).expanduser() / str(name)).open("rb") as file:
                digest.update(hashlib.file_digest(file, "blake2b").digest())
        except OSError as exc:
            raise _unreadable(path, exc) from exc
    if not stats or _stats_of(path) != stats:
        raise _unreadable(path, "it has none, or they are being written")
    return digest.hexdigest()


class LoadedAdapters:
    """Adapters that an engine has loaded, inferred from its requests.

    An engine reads an adapter's files when it first needs them, and again after unloading the
    adapter or when told to. So the loaded weights are known while the files are those of the first
    request. Once the files differ, pages may be of other weights, even in the engine's own cache:
    the adapter has no digest until the engine restarts or loads it from another folder. Only a
    change between the engine's first load and the adapter's first request goes unnoticed.

    Not thread-safe. Each call stats the folder's files, and reads new ones.
    """

    def __init__(self) -> None:
        self._stats: dict[tuple[str, str], Stats] = {}  # at the first request, by name and folder
        self._digests: dict[Stats, str] = {}
        self._reasons: dict[tuple[str, str] | int, str] = {}  # by name and folder, or by number
        self._places: dict[int, tuple[str, str]] = {}  # name and folder, by number
        self._reassigned: set[int] = set()  # numbers that now mean another folder

    def note(self, adapter: Adapter) -> None:
        """Note a request for an adapter; call this for every request before it is computed."""
        place = adapter.name, adapter.path
        try:
            stats = _stats_of(adapter.path)
        except InvalidArgumentError as exc:
            stats = ()
            self._reasons.setdefault(place, str(exc))
        if self._stats.setdefault(place, stats) != stats:
            self._reasons.setdefault(place, f"the files in {adapter.path} have changed")
        before = self._places.setdefault(adapter.number, place)
        if before != place and adapter.loads_anew:
            self._reasons.setdefault(before, f"{adapter.path} replaced it")
            self._places[adapter.number] = place
            self._reassigned.add(adapter.number)
        elif before != place:
            text = f"number {adapter.number} is used for {before[1]} and for {adapter.path}"
            self._reasons.setdefault(adapter.number, text)
        elif adapter.number in self._reassigned and not adapter.loads_anew:
            text = f"only some requests for {adapter.path} say that it replaces another adapter"
            self._reasons.setdefault(adapter.number, text)

    def digest(self, adapter: Adapter) -> str:
        """Return the digest of the files that the engine has loaded for an adapter.

        Raises:
            InvalidArgumentError: The loaded weights are not known; the error says why.
        """
        self.note(adapter)
        place = adapter.name, adapter.path
        reason = self._reasons.get(place) or self._reasons.get(adapter.number)
        if reason:
            wanted = "the weights that were loaded first"
            raise InvalidArgumentError("lora_request", adapter.name, f"{wanted}: {reason}")
        stats = self._stats[place]
        if stats not in self._digests:
            digest = digest_adapter(adapter.path)
            if _stats_of(adapter.path) != stats:
                return self.digest(adapter)  # raises: the files have changed
            self._digests[stats] = digest
        return self._digests[stats]


def _stats_of(path: str) -> Stats:
    """Stat the files of a folder that count: names, and the fields that a write changes."""
    stats: list[tuple[str | int, ...]] = []
    try:
        with os.scandir(Path(path).expanduser()) as entries:
            for entry in entries:
                if entry.is_file() and not any(fnmatch(entry.name, each) for each in HARMLESS):
                    found = entry.stat()
                    place = entry.name, found.st_dev, found.st_ino
                    stats.append((*place, found.st_size, found.st_mtime_ns, found.st_ctime_ns))
    except (OSError, RuntimeError, ValueError) as exc:  # an unknown `~user`, a NUL
        raise _unreadable(path, exc) from exc
    return tuple(sorted(stats))


def _unreadable(path: str, reason: Any) -> InvalidArgumentError:
    return InvalidArgumentError("adapter", path, f"a folder whose files can be read ({reason})")
