"""Command `kvxfer bench`: measures stores and loads of blocks against the raw medium."""

import asyncio
import contextlib
import functools
import os
import shutil
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvxfer import runtime
from kvxfer.cli.command_line import CommandLine, exit_statuses
from kvxfer.cli.service import ending_by_signals
from kvxfer.errors import BackendUnavailableError
from kvxfer.units import ByteSize, Duration, format_size

if TYPE_CHECKING:
    import msgspec

    from kvxfer.backends.object import ObjectConfig
    from kvxfer.storage.backend import Backend
    from kvxfer.storage.staging_memory import Buffer

BATCH_BYTES, MAX_BLOCKS, MIN_ROUNDS = 64 << 20, 1 << 14, 3


class Raw(NamedTuple):
    """Raw medium: calls that store, load and remove the bytes of a batch without kvxfer."""

    name: str
    store: Callable[[], Awaitable[object]]
    load: Callable[[], Awaitable[object]]
    remove: Callable[[], Awaitable[object]]


def main(argv: Sequence[str]) -> int:
    """Measure backends, one after the other; return 0."""
    parser = CommandLine(
        prog="kvxfer bench",
        description="Measure the speed of stores and loads, 64 MiB at a time, against the raw "
        "medium: plain files, objects of a plain client, or else one copy in memory.",
        epilog=exit_statuses("when it is done"),
    )
    url = "backend, such as file:///mnt/kv; restart a holder or pool that had no model before"
    parser.add_argument("url", nargs="+", help=url)
    parser.add_argument("--size", default="2MiB", help="bytes of a block; default 2MiB")
    parser.add_argument("--seconds", default="3s", help="time for each URL; default 3s")
    arguments = parser.parse_args(argv)
    size = ByteSize.parse(arguments.size)
    seconds = Duration.parse(arguments.seconds, name="seconds")
    with ending_by_signals():
        from kvxfer.connect import parse_backend  # Ctrl-C would wait for it on an event loop

        for url in arguments.url:
            runtime.run(_measure(url, parse_backend(url)[1], size, seconds))
    return 0


async def _measure(url: str, config: "msgspec.Struct", size: int, seconds: float) -> None:
    """Move batches by kvxfer and by the raw medium in turn, for some seconds; print the speeds."""
    from kvxfer.connect import open_backend
    from kvxfer.settings import shown
    from kvxfer.storage.keys import GroupIdentity, Namespace

    group = GroupIdentity(page_sizes_bytes=(size,))
    namespace = Namespace(model="kvxfer bench", revision="1", groups=(group,))
    rounds: list[tuple[float, ...]] = []
    async with open_backend(url, namespace) as backend:
        await backend.start()
        batch = _Batch(backend, size, min(max(BATCH_BYTES // size, 1), MAX_BLOCKS))
        raw, end = _raw_medium(config, batch), runtime.monotonic() + seconds
        # The first round does not count: it starts threads, opens connections, creates folders.
        while len(rounds) <= MIN_ROUNDS or runtime.monotonic() < end:
            ours = await batch.move()
            async with _removing(raw.remove):
                began = time.perf_counter()
                await raw.store()
                between = time.perf_counter()
                await raw.load()
                rounds.append((*ours, between - began, time.perf_counter() - between))
    stored, loaded, *plain_times = zip(*rounds[1:], strict=True)
    print(f"{shown(url)}: {batch.num_blocks} blocks of {format_size(size)}, {len(stored)} rounds")
    for name, ours, plain in zip(("store", "load"), (stored, loaded), plain_times, strict=True):
        speeds = (batch.source.nbytes / statistics.median(times) for times in (ours, plain))
        our_speed, raw_speed = (f"{format_size(int(each))}/s" for each in speeds)
        ratio = statistics.median(p / o for o, p in zip(ours, plain, strict=True))
        print(f"  {name:5}  {our_speed:>12}  {raw.name} {raw_speed:>12}  ratio {ratio:.2f}")


@contextlib.asynccontextmanager
async def _removing(remove: Callable[[], Awaitable[object]]) -> AsyncIterator[None]:
    """Remove at the end what was stored; an error of the context is raised, not of its removal."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(Exception):
            await _surely(remove)
        raise
    await _surely(remove)


async def _surely(remove: Callable[[], Awaitable[object]]) -> None:
    """Remove what was stored; begin anew if a signal interrupts that, which ends the command."""
    try:
        await remove()
    except (KeyboardInterrupt, asyncio.CancelledError):
        await asyncio.gather(remove(), return_exceptions=True)  # files may be gone already
        raise


class _Batch:
    """Batch of blocks that has new keys in each round."""

    def __init__(self, backend: "Backend", size: int, num_blocks: int) -> None:
        from kvxfer.storage.staging_memory import allocate_aligned

        self.num_blocks, self.size, self._backend = num_blocks, size, backend
        self.source, self.target = (allocate_aligned(num_blocks * size) for _ in range(2))
        self.source[:] = np.frombuffer(np.random.default_rng().bytes(self.source.nbytes), np.uint8)

    async def move(self) -> tuple[float, float]:
        """Store, look up, load and delete the blocks; return the seconds of store and load."""
        from kvxfer.storage.keys import make_block_key

        keys = [make_block_key(runtime.token_bytes(32)) for _ in range(self.num_blocks)]
        self.target[:] = 0
        async with _removing(functools.partial(self._backend.delete, keys)):
            stored = await self._call("stored", self._backend.store, keys, self.source)
            if not all(await self._backend.lookup(keys)):
                raise BackendUnavailableError("a block that was stored is not found")
            loaded = await self._call("loaded", self._backend.load, keys, self.target)
        if not (self.source == self.target).all():
            raise BackendUnavailableError("a block was loaded with bytes that were not stored")
        return stored, loaded

    async def _call(
        self, done: str, move: Callable[..., Awaitable[Any]], keys: list[Any], memory: "Buffer"
    ) -> float:
        from kvxfer.kvcache.descriptors import Descriptors

        addresses = memory.ctypes.data + np.arange(len(keys), dtype=np.uint64) * self.size
        sizes = np.full(len(keys), self.size)
        blocks = Descriptors.of_pieces(addresses.astype(np.uint64), sizes, owners=(memory,))
        began = time.perf_counter()
        outcomes = await move(keys, blocks)
        ended = time.perf_counter()
        for each in outcomes:
            if not each.done:
                raise BackendUnavailableError(f"a block was not {done}: {each.reason or each}")
        return ended - began


_aside = functools.partial(runtime.run_aside, "raw medium")


def _raw_medium(config: "msgspec.Struct", batch: _Batch) -> Raw:
    from kvxfer.backends.file import FileConfig
    from kvxfer.backends.object import ObjectConfig

    if isinstance(config, FileConfig):
        return _plain_files(Path(config.path), batch)
    if isinstance(config, ObjectConfig):
        rows = (memory.reshape(-1, batch.size) for memory in (batch.source, batch.target))
        return plain_objects(config, *rows)
    copy = functools.partial(_aside, lambda: np.copyto(batch.target, batch.source))
    return Raw("copy in memory", copy, copy, lambda: asyncio.sleep(0))


def _plain_files(root: Path, batch: _Batch) -> Raw:
    """Move files one after the other, with O_DIRECT if the file system has it."""
    from kvxfer.backends.file.io import probe_direct

    alignment, folder = probe_direct(root), root / f"kvxfer-bench-{runtime.token_bytes(8).hex()}"
    direct = os.O_DIRECT if alignment and not batch.size % alignment else 0

    def each(flags: int, move: Callable[..., int], memory: "Buffer") -> None:
        folder.mkdir(exist_ok=True)
        for number, block in enumerate(memory.reshape(-1, batch.size)):
            file = os.open(folder / str(number), flags | direct, 0o600)
            left = block.data
            while left and (moved := move(file, [left])):
                left = left[moved:]
            os.close(file)

    return Raw(
        "plain files",
        lambda: _aside(lambda: each(os.O_WRONLY | os.O_CREAT, os.writev, batch.source)),
        lambda: _aside(lambda: each(os.O_RDONLY, os.readv, batch.target)),
        lambda: _aside(lambda: shutil.rmtree(folder)),
    )


def plain_objects(config: "ObjectConfig", source: "Buffer", target: "Buffer") -> Raw:
    """Move objects by obstore alone, with as many requests at a time as the backend.

    Source and target are bytes `(num_blocks, block_bytes)`; each store makes new objects.
    """
    import obstore

    from kvxfer.backends.object.request_failure import request_failure

    client, requests = config.open_store(), asyncio.Semaphore(config.max_requests)
    names: list[str] = []

    async def one(ask: Callable[[int], Awaitable[Any]], number: int) -> None:
        async with requests:
            await ask(number)

    async def each(ask: Callable[[int], Awaitable[Any]]) -> None:
        """Make all requests, even if one fails, so that no object is stored after `remove`."""
        requested = (one(ask, number) for number in range(len(names)))
        for found in await asyncio.gather(*requested, return_exceptions=True):
            if found is not None:
                raise request_failure("plain client", found) from found

    async def store() -> None:
        folder = config.prefix + runtime.token_bytes(8).hex()
        names[:] = [f"{folder}/{number}" for number in range(len(source))]
        await each(lambda n: obstore.put_async(client, names[n], source[n].data))

    async def get(number: int) -> None:
        found: Any = await (await obstore.get_async(client, names[number])).bytes_async()
        target[number] = np.frombuffer(found, np.uint8)

    remove = functools.partial(each, lambda n: obstore.delete_async(client, names[n]))
    return Raw("plain client", store, functools.partial(each, get), remove)
