"""A backend over a host pool keeps every promise of `Backend`, and engines share the pool."""

import asyncio
import contextlib
import fcntl
import multiprocessing
import os
import signal
import socket
import stat
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock, patch

import pytest
from msgspec.structs import replace

from kvxfer import Backend, BlockKey, Namespace, Status, TieredBackend, make_block_key
from kvxfer.backends.host import HostBackend, HostConfig, HostPool
from kvxfer.backends.host.memory import SharedMemory
from kvxfer.backends.pool import Attachment, PoolBackend, PoolConfig, PoolServer, backend, server
from kvxfer.backends.pool.messages import (
    Done,
    Found,
    Lookup,
    Message,
    Pin,
    Pinned,
    Reserve,
    Reserved,
    Unpin,
    encode,
)
from kvxfer.errors import (
    BackendUnavailableError,
    DeviceUnavailableError,
    InvalidArgumentError,
    NamespaceMismatchError,
)
from kvxfer.storage.lending import BlockParts
from kvxfer.testing import BackendStateMachine, BackendTests, BlockMemory, DictBackend
from kvxfer.units import ByteSize
from tests.backends.host_blocks import flip
from tests.backends.pool_servers import OwnPoolBackend, running_pool
from tests.backends.processes import start
from tests.backends.test_host import capacity_for
from tests.backends.worker_processes import move_blocks
from tests.cli import peers
from tests.cli.peers import ServeProcess, serving
from tests.clock import LIMIT_S
from tests.examples import examples

MEMORY = BlockMemory(peers.PAGES, num_blocks=1)
OTHER = make_block_key(b"other", 0)


class TestPoolBackend(BackendTests):
    max_blocks = 5

    async def make_backend(self, namespace: Namespace) -> Backend:
        return OwnPoolBackend(namespace, capacity_for(namespace, 64))

    async def make_bounded_backend(self, namespace: Namespace) -> Backend:
        return OwnPoolBackend(namespace, capacity_for(namespace, 5))

    async def corrupt(self, backend: Backend, key: BlockKey) -> None:
        assert isinstance(backend, OwnPoolBackend)
        flip(backend.hosts[0], key, at=0)


class BoundedPoolStateMachine(BackendStateMachine):
    bounded = True

    async def make_backend(self, namespace: Namespace) -> Backend:
        return OwnPoolBackend(namespace, capacity_for(namespace, 3))


TestBoundedPoolStateMachine = BoundedPoolStateMachine.TestCase
TestBoundedPoolStateMachine.settings = examples(10, steps=30)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "pool.sock"


def attach(path: Path, *, model: str = "example/model", timeout_s: float = 5.0) -> PoolBackend:
    return PoolBackend(PoolConfig(path=str(path), timeout_s=timeout_s), peers.namespace(model))


@contextlib.contextmanager
def attached(path: Path) -> Iterator[PoolBackend]:
    backend = attach(path)
    try:
        yield backend
    finally:
        asyncio.run(backend.aclose())


async def test_a_store_of_a_block_that_another_engine_stores_for_ever_ends_in_time(
    path: Path,
) -> None:
    with running_pool(path):
        backend = attach(path, timeout_s=0.05)
        with patch.object(backend, "_store", return_value=[None]):
            storing = backend.store([make_block_key(b"block", 0)], MEMORY.describe(0, [0]))
            [outcome] = await asyncio.wait_for(storing, LIMIT_S)
        assert outcome.status is Status.FAILED
        await backend.aclose()


@pytest.mark.parametrize(
    ("model", "version", "wanted"),
    [
        ("other", 1, "differ in model: ours is 'other', theirs is 'example/model'"),
        ("example/model", 7, "protocol_version: ours is '7', theirs is '1'"),
    ],
)
def test_an_engine_of_another_model_or_version_is_refused_with_both(
    path: Path, monkeypatch: pytest.MonkeyPatch, model: str, version: int, wanted: str
) -> None:
    with running_pool(path), attached(path):
        monkeypatch.setattr(backend, "PROTOCOL_VERSION", version)
        with pytest.raises(NamespaceMismatchError, match=wanted):
            attach(path, model=model)


def test_engines_that_a_pool_refuses_until_it_is_ready_fill_no_log(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with running_pool(path):
        monkeypatch.setattr(PoolServer, "is_ready", property(lambda _: False), raising=False)
        with attached(path) as engine:
            assert not engine.is_attached
        assert "it is not ready yet" in caplog.text  # at the engine
        assert "refused an engine" not in caplog.text
        monkeypatch.setattr(backend, "PROTOCOL_VERSION", 7)
        with pytest.raises(NamespaceMismatchError, match="protocol_version"):
            attach(path)
        assert "refused an engine: namespaces differ in protocol_version" in caplog.text
        monkeypatch.undo()


@pytest.mark.parametrize("path", ["", "pool.sock", "/" + "x" * 107])
def test_what_is_no_path_of_a_socket_is_refused_by_name(path: str) -> None:
    PoolConfig(path="/" + "x" * 106)
    with pytest.raises(InvalidArgumentError, match=r"path is .*107 bytes at most"):
        PoolConfig(path=path)


def test_a_process_of_another_user_is_refused_on_both_sides(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with running_pool(path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with monkeypatch.context() as patched:
            patched.setattr(server, "peer_of", lambda _: (1, 65534))
            with pytest.raises(NamespaceMismatchError, match="in user: ours is '65534'"):
                attach(path)
        monkeypatch.setattr(backend, "peer_of", lambda _: (1, 65534))
        with attached(path) as engine:
            assert not engine.is_attached
            keys = [make_block_key(b"key")]  # which the pool may have
            assert asyncio.run(engine.delete_or_keep(keys)) == (set(), {*keys})
        assert "its user is 65534, that of this process is" in caplog.text


def test_neither_a_socket_that_another_process_serves_nor_a_file_is_taken(path: Path) -> None:
    path.write_text("precious")
    with pytest.raises(BackendUnavailableError, match="is not a socket"), running_pool(path):
        pass
    assert path.read_text() == "precious"
    path.unlink()
    with running_pool(path):
        with (
            pytest.raises(BackendUnavailableError, match="another process serves"),
            running_pool(path),
        ):
            pass
        with attached(path) as engine:
            assert engine.is_attached


def test_what_is_no_request_ends_its_own_session_only(path: Path) -> None:
    with running_pool(path), attached(path) as good:
        for nonsense in (b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\1\xc1", b"\0\0"):
            with socket.socket(socket.AF_UNIX) as stranger:
                stranger.connect(str(path))
                stranger.sendall(nonsense)
                stranger.shutdown(socket.SHUT_WR)
                with contextlib.suppress(ConnectionResetError):
                    while stranger.recv(4096):
                        pass
        assert all(each.done for each in asyncio.run(peers.store(good)))


def test_a_session_that_ends_by_an_error_of_the_holder_says_where_it_was_raised(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with running_pool(path), attached(path) as engine:
        monkeypatch.setattr(server.PoolSession, "_publish", AsyncMock(side_effect=RuntimeError))
        assert not any(each.done for each in asyncio.run(peers.store(engine)))
    [record] = [each for each in caplog.records if "cannot be served" in each.getMessage()]
    assert record.exc_info


def test_what_a_pool_removed_before_it_went_away_was_removed(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_pool(path), attached(path) as engine:
        asyncio.run(peers.store(engine))
        gone = BackendUnavailableError("the pool is gone")
        monkeypatch.setattr(engine, "_find", Mock(side_effect=gone))
        here, unknown = peers.KEYS[0], make_block_key(b"unknown")
        assert asyncio.run(engine.delete_or_keep([here, unknown])) == ({here}, {unknown})


def test_a_pool_says_that_a_tier_below_may_keep_blocks_that_no_lookup_finds(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_pool(path) as hosts, attached(path) as engine:
        asyncio.run(peers.store(engine))
        here, below = peers.KEYS[0], make_block_key(b"below")
        tiers = Mock(delete_or_keep=AsyncMock(return_value=(set(), {here})))
        monkeypatch.setattr(hosts[0], "provide", lambda _: tiers)
        assert asyncio.run(engine.delete_or_keep([here])) == (set(), {here})
        tiers.delete_or_keep.return_value = {here}, {below}
        assert asyncio.run(engine.delete_or_keep([here, below])) == (set(), {here, below})


async def test_a_delete_that_a_tier_below_does_not_answer_goes_on_and_ends_no_attachment(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, may_delete = HostConfig(capacity=ByteSize(1 << 20), shared=True), asyncio.Event()

    class SlowBackend(DictBackend):
        async def delete(self, keys: Sequence[BlockKey]) -> list[bool]:
            await may_delete.wait()
            return await super().delete(keys)

    tiers = [HostBackend(config, peers.namespace()), SlowBackend(None, peers.namespace())]
    tiered = TieredBackend(tiers, peers.namespace())
    pool = PoolServer(path, config.capacity, lambda _: tiered)
    async with contextlib.aclosing(pool):
        await pool.start()
        async with await asyncio.to_thread(attach, path) as engine:
            await peers.store(engine)
            await tiered.flush()
            with monkeypatch.context() as patched:
                patched.setattr(server, "DELETE_WITHIN_S", 0.0)
                assert await engine.delete_or_keep(peers.KEYS) == (set(), {*peers.KEYS})
            assert engine.is_attached
            may_delete.set()
            assert await engine.delete_or_keep(peers.KEYS) == (set(), set()), "not removed before"
            may_delete.clear()
        async with await asyncio.to_thread(partial(attach, path, timeout_s=0.5)) as engine:
            assert await engine.delete_or_keep(peers.KEYS) == (set(), {*peers.KEYS})
            assert engine.is_attached, "it waits no longer than that, whatever was asked before"
            may_delete.set()


async def test_a_lookup_does_not_wait_for_an_engine_that_stores_a_block(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config, namespace = HostConfig(capacity=ByteSize(1 << 20), shared=True), peers.namespace()
    host, below = HostBackend(config, namespace), DictBackend(None, namespace)
    await peers.store(below)
    tiered, key = TieredBackend([host, below], namespace), peers.KEYS[0]
    pool = PoolServer(path, config.capacity, lambda _: tiered)
    async with contextlib.aclosing(pool):
        await pool.start()
        parts = BlockParts([key], [0], [namespace.chunk_sizes[0]])
        attaching = asyncio.to_thread(partial(attach, path, timeout_s=0.5))
        async with await attaching as engine, host.make_room(parts):
            assert await engine.lookup([key]) == [False]
    assert "took longer" not in caplog.text


async def test_a_holder_keeps_its_socket_while_it_begins(path: Path) -> None:
    config, may_begin = HostConfig(capacity=ByteSize(1 << 20), shared=True), asyncio.Event()

    async def wait(_: Backend) -> None:
        await may_begin.wait()

    def make(**how: Any) -> PoolServer:
        open_host = partial(HostBackend, config)
        return PoolServer(path, config.capacity, open_host, namespace=peers.namespace(), **how)

    async with contextlib.aclosing(make(prepare=wait)) as pool, contextlib.aclosing(make()) as late:
        starting = asyncio.create_task(pool.start())
        async with await asyncio.to_thread(attach, path) as engine:
            assert not engine.is_attached
        with pytest.raises(BackendUnavailableError, match="another process serves"):
            await late.start()
        may_begin.set()
        await starting
        async with await asyncio.to_thread(attach, path) as engine:
            assert engine.is_attached


async def test_an_engine_that_comes_as_its_holder_begins_to_end_stores_nothing(path: Path) -> None:
    config = HostConfig(capacity=ByteSize(1 << 20), shared=True)

    async def drain(_: Backend) -> None:
        await pool.drain(1.0)

    pool = PoolServer(path, config.capacity, partial(HostBackend, config), prepare=drain)
    async with contextlib.aclosing(pool):
        await pool.start()
        async with await asyncio.to_thread(attach, path) as engine:
            assert engine.is_attached
            assert not any(each.done for each in await peers.store(engine))


def memory_fds() -> list[int]:
    links = {each: os.path.realpath(each) for each in Path("/proc/self/fd").iterdir()}
    return [int(each.name) for each, target in links.items() if "kvxfer-pool" in target]


def test_no_child_inherits_the_memory(path: Path) -> None:
    with running_pool(path), attached(path):
        assert (fds := memory_fds())
        assert not any(map(os.get_inheritable, fds))


def test_a_pool_that_a_gpu_cannot_use_is_unmapped_and_not_asked_again_for_a_while(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "RETRY_S", 0.0)
    with attached(path) as engine, running_pool(path):
        with attached(path):  # so that the holder has its memory
            pass
        before = memory_fds()
        register = Mock(side_effect=DeviceUnavailableError(0, "it is lost"))
        monkeypatch.setattr(HostPool, "attach", register)
        for _ in range(2):
            assert asyncio.run(engine.lookup(peers.KEYS)) == [False] * len(peers.KEYS)
        register.assert_called_once()
        assert memory_fds() == before


def test_memory_that_somebody_could_cut_is_not_mapped() -> None:
    for seals, wanted in ((0, "a sealed size"), (fcntl.F_SEAL_SHRINK, "expected 8192")):
        fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, 4096)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        with pytest.raises(InvalidArgumentError, match=wanted):
            SharedMemory(fd, 8192 if seals else 4096)
    memory = SharedMemory.create(8192)
    with pytest.raises(PermissionError):
        os.ftruncate(memory.fd, 4096)
    memory.close()


IMPOSSIBLE: dict[str, tuple[type[Message], dict[str, Any]]] = {
    "found for other keys": (Found, {"there": [True]}),
    "pinned beyond the keys": (Pinned, {"rows": [99], "slots": [0]}),
    "pinned twice": (Pinned, {"rows": [0, 0], "slots": [0, 1]}),
    "pinned without slots": (Pinned, {"slots": []}),
    "pinned in no slot": (Pinned, {"rows": [0], "slots": [1 << 62]}),
    "pinned below the first slot": (Pinned, {"rows": [0], "slots": [-1]}),
    "reserved beyond the keys": (Reserved, {"rows": [99], "slots": [0]}),
    "reserved in one slot": (Reserved, {"rows": [0, 1], "slots": [0, 0]}),
    "reserved in no slot": (Reserved, {"rows": [0], "slots": [1 << 62]}),
    "busy beyond the keys": (Reserved, {"rows": [], "slots": [], "busy": [99]}),
    "refused below the keys": (Reserved, {"rows": [], "slots": [], "refused": {-1: "full"}}),
    "done for other blocks": (Done, {"done": [True]}),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_an_answer_of_a_holder_that_cannot_be_costs_its_call_and_nobody_else(
    path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (kind, changes), honest = IMPOSSIBLE[name], server.PoolSession._answer
    memory = BlockMemory(peers.PAGES, num_blocks=len(peers.KEYS))

    async def answer(session: server.PoolSession, request: Any) -> Any:
        answered = await honest(session, request)
        return replace(answered, **changes) if isinstance(answered, kind) else answered

    async def ask_all(engine: PoolBackend) -> None:
        target = memory.describe(0, range(len(peers.KEYS)))
        assert len(await engine.lookup(peers.KEYS)) == len(peers.KEYS)
        stored, loaded = await peers.store(engine), await engine.load(peers.KEYS, target)
        assert len(stored) == len(loaded) == len(peers.KEYS)
        assert await engine.delete_or_keep(peers.KEYS[:2])

    with running_pool(path), attached(path) as other, attached(path) as engine:
        monkeypatch.setattr(server.PoolSession, "_answer", answer)
        for _ in range(2):
            engine._pause.reset()
            asyncio.run(ask_all(engine))
        monkeypatch.undo()
        assert all(each.done for each in asyncio.run(peers.store(other)))


def test_an_answer_that_memory_is_short_for_is_not_taken_for_part_of_the_next_one(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "RETRY_S", 0.0)
    with running_pool(path), attached(path) as engine:
        asyncio.run(peers.store(engine))
        with monkeypatch.context() as patched:
            patched.setattr(Attachment, "_receive_exactly", Mock(side_effect=MemoryError))
            assert not any(asyncio.run(engine.lookup(peers.KEYS)))
        others = [make_block_key(b"%d" % index, 0) for index in range(len(peers.KEYS))]
        assert not any(asyncio.run(engine.lookup(others)))
        assert all(asyncio.run(engine.lookup(peers.KEYS)))


async def test_a_copy_that_fails_costs_its_call_and_no_other_call_of_the_attachment(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_pool(path):
        engine = attach(path)
        assert all(each.done for each in await peers.store(engine))
        target = MEMORY.describe(0, [0])
        for name, call in ("read", engine.load), ("write", engine.store):
            with monkeypatch.context() as patched:
                failing = Mock(side_effect=DeviceUnavailableError(0, "it is lost"))
                patched.setattr(HostPool, name, failing)
                with pytest.raises(DeviceUnavailableError):
                    await call([peers.KEYS[0] if name == "read" else OTHER], target)
            assert engine.is_attached
        assert all(await engine.lookup(peers.KEYS))
        assert all(each.done for each in await engine.store([OTHER], target))
        await engine.aclose()


@pytest.mark.parametrize("within_s", [float("nan"), float("inf"), -1.0])
def test_a_deadline_that_is_none_ends_its_own_session_only(path: Path, within_s: float) -> None:
    """A timer at NaN has no place in the order of those of others, which would be late."""
    with running_pool(path), attached(path) as other:
        for question in (Lookup(keys=[], within_s=within_s), Pin(keys=[], within_s=within_s)):
            engine = Attachment(PoolConfig(path=str(path)), peers.namespace())
            with pytest.raises(BackendUnavailableError, match="ended the connection"):
                engine.ask(question, Found)
            engine.close()
        assert all(each.done for each in asyncio.run(peers.store(other)))


class Nonsense(Message, frozen=True):
    """Message unknown to every holder."""


@pytest.mark.parametrize("is_read", [True, False])
def test_what_an_engine_reads_or_writes_stays_its_own_after_its_connection_ended(
    path: Path, *, is_read: bool
) -> None:
    """Slots that it writes to stay its own while its process lives, which is this one."""
    blocks = MEMORY.describe(0, [0])

    def can_store() -> bool:
        another = [make_block_key(b"another block", 0)]
        return asyncio.run(other.store(another, blocks))[0].done

    with running_pool(path, capacity="76KiB"), attached(path) as other:
        namespace, keys = peers.namespace(), peers.KEYS
        engine = Attachment(PoolConfig(path=str(path)), namespace)
        if is_read:
            assert all(each.done for each in asyncio.run(peers.store(other)))
            pin = Pin(keys=keys, within_s=1.0)
            assert len(engine.ask(pin, Pinned).rows) == len(keys)
            greedy = Attachment(PoolConfig(path=str(path)), namespace)
            greedy.ask(pin, Pinned)
            greedy.tell(Unpin(keys=keys * 2))
            greedy.close()
            engine.tell(Nonsense())
            with pytest.raises(BackendUnavailableError, match="ended the connection"):
                engine.ask(pin, Pinned)
        else:
            starts, sizes = [0] * len(keys), [peers.BLOCK_BYTES] * len(keys)
            reserve = Reserve(number=1, keys=keys, starts=starts, sizes=sizes)
            assert len(engine.ask(reserve, Reserved).rows) == len(keys)
            engine._socket.shutdown(socket.SHUT_RDWR)
        assert not any(can_store() for _ in range(100)), "every block is pinned or reserved"
        engine.close()
        if is_read:
            assert any(can_store() for _ in range(1000))


def test_an_engine_that_was_cut_off_in_a_message_keeps_no_room(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    namespace, keys, may_go_on = peers.namespace(), peers.KEYS, threading.Event()

    async def lookup(_: HostBackend, asked: Sequence[BlockKey]) -> list[bool]:
        may_go_on.wait()  # blocks the whole holder
        return [False] * len(asked)

    with running_pool(path), attached(path) as other:
        engine = Attachment(PoolConfig(path=str(path)), namespace)
        starts, sizes = [0] * len(keys), [peers.BLOCK_BYTES] * len(keys)
        reserve = Reserve(number=1, keys=keys, starts=starts, sizes=sizes)
        assert len(engine.ask(reserve, Reserved).rows) == len(keys)
        monkeypatch.setattr(HostBackend, "lookup", lookup)
        engine._socket.sendall(
            encode(Lookup(keys=[make_block_key(b"another block", 0)], within_s=1.0))
        )
        engine._timeout_s = 0.1
        engine.tell(Unpin(keys=keys * 10_000))
        assert engine.timed_out
        engine.close()
        may_go_on.set()
        assert all(each.done for each in asyncio.run(peers.store(other)))


def test_an_engine_keeps_no_room_though_memory_was_short_as_it_unpinned_a_block(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, unpin = peers.KEYS, HostBackend.unpin

    def unpin_in_part(host: HostBackend, pinned: Sequence[BlockKey]) -> None:
        monkeypatch.undo()
        unpin(host, pinned)
        raise MemoryError

    with running_pool(path), attached(path) as other:
        engine = Attachment(PoolConfig(path=str(path)), peers.namespace())
        asyncio.run(other.store(keys[:1], MEMORY.describe(0, [0])))
        assert engine.ask(Pin(keys=keys[:1], within_s=1.0), Pinned).rows == [0]
        starts, sizes = [0] * len(keys[1:]), [peers.BLOCK_BYTES] * len(keys[1:])
        engine.ask(Reserve(number=1, keys=keys[1:], starts=starts, sizes=sizes), Reserved)
        monkeypatch.setattr(HostBackend, "unpin", unpin_in_part)
        engine.tell(Unpin(keys=keys[:1]))
        engine.close()
        assert any(all(each.done for each in asyncio.run(peers.store(other))) for _ in range(1000))


pytestmark = pytest.mark.processes

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - looked at only
EXACTLY_ENOUGH = "76KiB"  # for the blocks of `peers`, with their tags


class Engine:
    def __init__(self, path: Path, seed: int) -> None:
        self.told, told = multiprocessing.Pipe()
        self.process = start(move_blocks, path, seed, told)
        told.close()
        assert self.process.pid is not None
        self.pid = self.process.pid
        self.require_moves()

    def require_moves(self) -> None:
        assert self.told.recv() == "done"

    def kill(self, pool: ServeProcess) -> None:
        """Kill the process, and wait until the holder has noticed."""
        self.process.kill()
        pool.wait_for(rf"engine \d+ \(process {self.process.pid}\) ended")


async def require_room_for_all(path: Path) -> None:
    config = PoolConfig(path=str(path), timeout_s=30.0)
    async with PoolBackend(config, peers.namespace()) as last:
        assert all(each.done for each in await peers.store(last)), "every slot is free"
        assert await peers.load(last) == peers.PAYLOADS


def test_no_byte_is_wrong_and_no_slot_is_lost_while_everything_is_killed(tmp_path: Path) -> None:
    path, before = tmp_path / "pool.sock", set(SHARED_MEMORY.glob("kvxfer-pool*"))
    with contextlib.ExitStack() as stack:

        def open_engine(seed: int) -> Engine:
            engine = Engine(path, seed)
            stack.callback(engine.process.kill)
            return engine

        pool = stack.enter_context(serving("--capacity", EXACTLY_ENOUGH, pool=path))
        engines = [open_engine(0), open_engine(1)]
        engines.pop().kill(pool)
        os.kill(engines[0].pid, signal.SIGSTOP)
        engines.append(open_engine(2))
        os.kill(engines[0].pid, signal.SIGCONT)
        pool.process.kill()
        pool.process.wait()
        assert set(SHARED_MEMORY.glob("kvxfer-pool*")) <= before, "nothing is left behind"
        assert path.exists(), "as a killed process leaves it"
        pool = stack.enter_context(serving("--capacity", EXACTLY_ENOUGH, pool=path))
        for engine in engines * 3:
            engine.require_moves()
        engines.pop().kill(pool)
        (engine,) = engines
        engine.require_moves()
        engine.told.send("end")
        engine.process.join(peers.LIMIT_S)
        assert engine.process.exitcode == 0
        asyncio.run(require_room_for_all(path))
        assert pool.end() == 0
        assert not path.exists()
