"""Transfer agents move bytes between processes, by the carrier that reaches the peer."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from benchmarks.nixl.raw import TCP_ALONE
from kvxfer import runtime
from kvxfer.backends.nixl import choose_carrier, has_active_port
from kvxfer.backends.nixl.agents import MAX_LINES, Fragments, NixlAgent, SocketAgent, TransferAgent
from kvxfer.backends.nixl.agents.nixl_module import ENVIRONMENT, import_nixl
from kvxfer.backends.nixl.wire.data import DataConnection
from kvxfer.backends.nixl.wire.messages import Hello
from kvxfer.errors import ClosedError, InvalidArgumentError, PeerLostError, TransferFailedError
from kvxfer.kvcache.memory_region import MemoryRegion
from kvxfer.testing import FakeNixlAgent
from tests.backends import agent_contract as contract
from tests.backends.agent_process import PeerProcess
from tests.backends.device_agent_contract import DeviceAgentContract, DevicePeer
from tests.backends.nixl_wire import local_hello
from tests.cuda.gpu import Gpu
from tests.interpreter import run_python

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("nixl")]


class TestFakeNixlAgent(contract.SharedAgentContract):
    def make_agent(self) -> TransferAgent:
        return FakeNixlAgent()

    async def peers(self) -> AsyncIterator[contract.Peer]:
        agent = FakeNixlAgent()
        yield contract.LocalPeer(agent)
        await agent.aclose()


@pytest.fixture
def process() -> Iterator[PeerProcess]:
    process = PeerProcess()
    yield process
    process.end()


SMALL_PIECES = {"piece_bytes": 1 << 20, "piece_fragments": 1000}
"""Pieces so small that pools are several, and more than are in flight at one time."""


class TestNixlAgentAndAnotherProcess(contract.SharedAgentContract):
    @pytest.fixture(autouse=True)
    def _process(self, process: PeerProcess) -> None:
        self.process = process

    def make_agent(self) -> TransferAgent:
        return NixlAgent(**SMALL_PIECES)

    async def peers(self) -> AsyncIterator[contract.Peer]:
        yield self.process


class ConnectedSocketAgent(SocketAgent):
    """Agent whose peers are agents of this process, with connections opened as reads need them."""

    agents: ClassVar["weakref.WeakValueDictionary[str, ConnectedSocketAgent]"] = (
        weakref.WeakValueDictionary()
    )

    def __init__(self) -> None:
        super().__init__(timeout_s=5.0, piece_bytes=1 << 20, piece_fragments=1500)
        self.serving: set[asyncio.Task[None]] = set()
        self.agents[self.name] = self

    async def add_peer(self, metadata: bytes) -> str:
        name = await super().add_peer(metadata)
        self.use(name, partial(self._connect, name))
        return name

    async def _connect(self, name: str) -> DataConnection:
        connections = [DataConnection(end, name) for end in socket.socketpair()]
        serving = asyncio.create_task(self.agents[name].serve(connections[0]))
        self.serving.add(serving)
        serving.add_done_callback(lambda task: task.cancelled() or task.exception())
        return connections[1]


class TestSocketAgent(contract.AgentContract):
    def make_agent(self) -> TransferAgent:
        return ConnectedSocketAgent()

    async def peers(self) -> AsyncIterator[contract.Peer]:
        agent = ConnectedSocketAgent()
        yield contract.LocalPeer(agent)
        await agent.aclose()


class OneReadingThread(runtime.Runtime):
    """Machine on which a second thread that reads cannot be started."""

    num_reading = 0

    def start_thread(
        self, target: Callable[..., object], *, name: str, args: tuple[Any, ...] = ()
    ) -> threading.Thread:
        reads = "_read" in repr(asyncio.current_task())
        self.num_reading += reads
        if reads and self.num_reading > 1:
            raise RuntimeError("can't start new thread")
        return super().start_thread(target, name=name, args=args)


async def test_one_thread_is_enough_to_read_a_batch_of_several_pieces() -> None:
    agent, pool, peer = ConnectedSocketAgent(), contract.Pool(), ConnectedSocketAgent()
    there = contract.LocalPeer(peer)
    agent.register(pool.regions())
    name = await agent.add_peer(there.metadata)
    machine = OneReadingThread()
    with runtime.use(machine):
        await read_all(agent, name, pool, there)
    assert machine.num_reading == 2
    await agent.aclose()
    await peer.aclose()


async def test_a_short_run_before_long_ones_leaves_them_both_connections() -> None:
    agent, pool, peer = ConnectedSocketAgent(), contract.Pool(), ConnectedSocketAgent()
    there = contract.LocalPeer(peer)
    agent.register(pool.regions())
    name = await agent.add_peer(there.metadata)
    starts, sizes = (0, 1 << 20), (100, 2 << 20)
    runs = [
        Fragments.of(*map(contract.words, (pool.address + start, there.address + start, size)))
        for start, size in zip(starts, sizes, strict=True)
    ]
    await asyncio.wrap_future(agent.begin(name, runs, lambda _: None).done)
    assert len(agent.serving) == MAX_LINES
    await agent.aclose()
    await peer.aclose()


def run_child(code: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    # Agents of earlier tests have set them in this process.
    inherited = {name: value for name, value in os.environ.items() if name not in ENVIRONMENT}
    given = {**inherited, "PYTHONASYNCIODEBUG": "", **environment}
    return run_python("-c", PREAMBLE + code, environment=given)


PREAMBLE = """
import asyncio, logging, os, sys, threading, time
from kvxfer.backends.nixl.agents.nixl import NixlAgent
from tests.backends.agent_contract import LocalPeer, Pool, read, words

async def move(agent):
    peer = LocalPeer(NixlAgent())
    pool = Pool()
    agent.register(pool.regions())
    name = await agent.add_peer(peer.metadata)
    await read(agent, name, words(pool.address), words(peer.address), words(100))
    return peer
"""


class TestProcess:
    @pytest.mark.parametrize("error", ["ImportError('no libucp.so.0')", "OSError('a\\nb')"])
    def test_a_wheel_that_is_broken_is_one_line(self, tmp_path: Path, error: str) -> None:
        (tmp_path / "nixl").mkdir()
        (tmp_path / "nixl" / "__init__.py").write_text(f"raise {error}")
        serve = ["serve", "--listen", "127.0.0.1:0", "--capacity", "1MiB", "--transport", "nixl"]
        code = f"from kvxfer.cli import main\nsys.exit(main({serve!r}))"
        child = run_child(code, PYTHONPATH=str(tmp_path))
        assert child.returncode == 2
        assert child.stderr.startswith("kvxfer serve: NIXL cannot be imported (")
        assert child.stderr.count("\n") == 1
        assert "install nixl" in child.stderr

    @pytest.mark.parametrize(
        "end", ["", "asyncio.run(agent.aclose())", "agent.itself = agent; del agent"]
    )
    def test_it_ends_in_silence_with_peers_however_agents_are_left(self, end: str) -> None:
        child = run_child(f"""
agent = NixlAgent()
peer = asyncio.run(move(agent))
{end}
""")
        assert (child.returncode, child.stdout, child.stderr) == (0, "", "")

    def test_a_child_that_was_forked_ends_though_it_has_no_thread_of_nixl(self) -> None:
        child = run_child("""
import signal
agent = NixlAgent()
peer = asyncio.run(move(agent))
if not (child := os.fork()):
    signal.alarm(10)
    sys.exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
""")
        assert (child.returncode, child.stdout, child.stderr) == (0, "7\n", "")

    def test_what_the_application_configured_stays(self, tmp_path: Path) -> None:
        child = run_child(f"""
os.environ["UCX_LOG_FILE"] = "stdout"
logging.basicConfig(filename={str(tmp_path / "log")!r}, filemode="w", format="%(message)s")
logging.warning("before")
NixlAgent()
logging.warning("after")
assert logging.raiseExceptions
assert not logging.getLogger("nixl").handlers
assert os.environ["UCX_LOG_FILE"] == "stdout"
logging.config.dictConfig({{"version": 1, "loggers": {{"other": {{"level": "ERROR"}}}}}})
assert logging.getLogger("other").level == logging.ERROR
""")
        assert (child.returncode, child.stdout, child.stderr) == (0, "", "")
        assert (tmp_path / "log").read_text() == "before\nafter\n"

    def test_without_the_plug_in_the_error_names_it(self, tmp_path: Path) -> None:
        child = run_child("NixlAgent()", NIXL_PLUGIN_DIR=str(tmp_path))
        assert child.returncode == 1
        assert "BackendUnavailableError: NIXL's UCX plug-in is missing" in child.stderr


@pytest.fixture
async def agent() -> AsyncIterator[NixlAgent]:
    agent = NixlAgent(**SMALL_PIECES)
    yield agent
    await agent.aclose()


class TestPeerInTrouble:
    async def test_a_peer_that_only_tcp_reaches_is_not_added(self, agent: NixlAgent) -> None:
        process = await asyncio.to_thread(PeerProcess, UCX_TLS=TCP_ALONE["UCX_TLS"])
        for _ in range(2):
            with pytest.raises(PeerLostError, match="cannot be reached"):
                await agent.add_peer(process.metadata)
        assert await asyncio.to_thread(process.close) == 0, "no process ends with a signal"

    async def test_a_peer_that_dies_is_lost_and_others_are_not(
        self, agent: NixlAgent, process: PeerProcess
    ) -> None:
        pool = contract.Pool()
        agent.register(pool.regions())
        other = contract.LocalPeer(NixlAgent(**SMALL_PIECES))
        names = [await agent.add_peer(each.metadata) for each in (process, other)]
        moves = [asyncio.create_task(read_all(agent, names[0], pool, process)) for _ in range(50)]
        await moves[0]
        process.end()
        results = await asyncio.gather(*moves, return_exceptions=True)
        assert {type(result) for result in results} <= {type(None), PeerLostError}
        with pytest.raises(PeerLostError):
            await read_all(agent, names[0], pool, process)
        pool.bytes[:] = 9
        await agent.remove_peer(names[0])
        assert np.all(pool.bytes == 9)
        await read_all(agent, names[1], pool, other)
        await other.agent.aclose()

    async def test_adding_a_peer_that_stalls_ends_when_cancelled_and_works_when_it_goes_on(
        self, agent: NixlAgent, process: PeerProcess
    ) -> None:
        os.kill(process.pid, signal.SIGSTOP)
        for _ in range(2):
            with pytest.raises((TimeoutError, InvalidArgumentError)):
                await asyncio.wait_for(agent.add_peer(process.metadata), 0.2)
        os.kill(process.pid, signal.SIGCONT)
        while agent._thread.peers._remotes:  # noqa: ASYNC110 - the thread tells nobody
            await asyncio.sleep(0)
        await agent.add_peer(process.metadata)


async def read_all(
    agent: TransferAgent, name: str, pool: contract.Pool, peer: contract.Peer
) -> None:
    half = contract.POOL_BYTES // 2
    starts, lengths = contract.words(0, half), contract.words(half, half)
    here, there = contract.words(pool.address) + starts, contract.words(peer.address) + starts
    await contract.read(agent, name, here, there, lengths)


def test_without_rdma_nothing_listens_on_the_network() -> None:
    child = run_child("""
from pathlib import Path
agent = NixlAgent()
open_ones = [os.readlink(file) for file in Path("/proc/self/fd").iterdir() if file.is_symlink()]
for row in map(str.split, Path("/proc/net/tcp").read_text().splitlines()[1:]):
    if row[3] == "0A" and f"socket:[{row[9]}]" in open_ones:
        print(row[1][:8])
""")
    assert child.stdout == "0100007F\n"  # 127.0.0.1, in the byte order of /proc/net/tcp


@pytest.fixture
def ours() -> Hello:
    ours = local_hello(bytes(16), None)
    assert (bool(ours.boot_id), ours.pid, bool(ours.pid_namespace)) == (True, os.getpid(), True)
    return ours


def test_the_kernel_carries_to_processes_that_it_lets_us_reach(ours: Hello, tmp_path: Path) -> None:
    child = subprocess.Popen(["sleep", "60"])
    theirs = msgspec.structs.replace(ours, pid=child.pid)
    assert choose_carrier(ours, theirs, tmp_path) == "cma"
    child.kill()
    child.wait()
    assert choose_carrier(ours, theirs, tmp_path) == "socket"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
@pytest.mark.processes
def test_the_kernel_does_not_carry_to_processes_of_other_users(ours: Hello) -> None:
    code = f"""
import ctypes, os
from kvxfer.backends.nixl.agents.nixl_module import _may_reach
os.setgroups([]); os.setgid(65534); os.setuid(65534)
print(_may_reach({os.getpid()}), _may_reach(os.getpid()))
"""
    child = run_python("-c", code)
    assert child.stdout == "False True\n", child.stderr


@pytest.mark.parametrize("field", ["boot_id", "pid_namespace"])
def test_a_number_means_nothing_on_another_machine_or_in_another_container(
    ours: Hello, field: str, tmp_path: Path
) -> None:
    assert choose_carrier(ours, ours, tmp_path) == "cma"
    for value in ("another", ""):
        changed = msgspec.structs.replace(ours, **{field: value})
        assert choose_carrier(ours, changed, tmp_path) == "socket"
        assert choose_carrier(changed, ours, tmp_path) == "socket"
        assert choose_carrier(changed, changed, tmp_path) == ("cma" if value else "socket")


@pytest.mark.parametrize(("state", "expected"), [("4: ACTIVE\n", "rdma"), ("1: DOWN\n", "socket")])
def test_a_network_card_carries_to_other_machines_while_it_is_up(
    ours: Hello, tmp_path: Path, state: str, expected: str
) -> None:
    port = tmp_path / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    (port / "state").write_text(state)
    theirs = msgspec.structs.replace(ours, boot_id="another")
    assert choose_carrier(ours, theirs, tmp_path) == expected


def test_without_nixl_there_are_sockets(ours: Hello, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl", None)
    assert choose_carrier(ours, ours) == "socket"


Row = tuple[int, int, int, str]


@pytest.mark.gpu
class TestNixlAgentOfGpu(DeviceAgentContract):
    @pytest.fixture(autouse=True)
    def _process(self) -> Iterator[None]:
        self.process = PeerProcess(has_gpu=True)
        yield
        self.process.end()

    @pytest.fixture
    def gpu(self) -> Iterator[Gpu]:
        gpu = Gpu()
        yield gpu
        gpu.release()

    def make_agent(self) -> TransferAgent:
        return NixlAgent()

    async def peers(self, gpu: Gpu) -> AsyncIterator[DevicePeer]:
        yield self.process

    async def read(self, agent: TransferAgent, name: str, fragments: Fragments) -> None:
        """Read, or skip the test if UCX has no way without RDMA.

        UCX has none between the memory of a host and a GPU; within a GPU it needs CUDA IPC, which
        some virtual machines lack.
        """
        try:
            await super().read(agent, name, fragments)
        except PeerLostError as exc:  # what NIXL calls a read for which UCX has no way
            if has_active_port():
                raise
            pytest.skip(f"no RDMA port here, and without one: {exc}")


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, set[int]]]:
    """Record the kinds of memory and devices given to NIXL, which then takes all as host memory."""
    nixl = import_nixl(otherwise="skip these tests")
    told: list[tuple[str, set[int]]] = []

    base: Any = nixl.nixl_agent

    class Agent(base):  # type: ignore[misc]
        def register_memory(self, rows: Sequence[Row], kind: str) -> Any:
            told.append((kind, {row[2] for row in rows}))
            return super().register_memory([(*row[:2], 0, "") for row in rows], "DRAM")

        def get_xfer_descs(self, rows: NDArray[np.uint64], kind: str) -> Any:
            told.append((kind, set(rows[:, 2].tolist())))
            return super().get_xfer_descs(rows * np.array([1, 1, 0], np.uint64), "DRAM")

    monkeypatch.setattr(nixl, "nixl_agent", Agent)
    return told


async def test_nixl_is_told_the_kind_and_the_device_of_either_side(
    named: list[tuple[str, set[int]]],
) -> None:
    agents, pools = [NixlAgent(), NixlAgent()], [contract.Pool(), contract.Pool()]
    devices = [torch.device("cuda", 3), torch.device("cuda", 5)]
    for agent, pool, device in zip(agents, pools, devices, strict=True):
        first, second = pool.regions()
        on_gpu = MemoryRegion(second.address, second.num_bytes, pool, device)
        named.clear()
        agent.register([first, on_gpu])
        assert named == [("DRAM", {0}), ("VRAM", {device.index})]
    name = await agents[0].add_peer(agents[1].metadata)
    named.clear()
    half = first.num_bytes
    starts = [(0, half), (half, half), (half, 0), (0, 0), (half + 99, half + 99)]
    local, remote = (contract.words(*column) for column in zip(*starts, strict=True))
    fragments = Fragments(
        local + contract.words(pools[0].address),
        remote + contract.words(pools[1].address),
        contract.words(*[7] * 5),
    )
    await contract.read_runs(agents[0], name, [fragments], lambda _: None)
    sides = list(zip(named[::2], named[1::2], strict=True))
    host, ours, theirs = ("DRAM", {0}), ("VRAM", {3}), ("VRAM", {5})
    assert len(sides) == 4, "one transfer for each pair of kinds"
    assert all(
        side in sides for side in [(host, theirs), (ours, theirs), (ours, host), (host, host)]
    )
    for agent in agents:
        await agent.aclose()


async def test_a_thread_that_fails_ends_its_reads_once_the_agent_is_gone() -> None:
    agents, pools = [NixlAgent(), NixlAgent()], [contract.Pool(), contract.Pool()]
    for agent, pool in zip(agents, pools, strict=True):
        agent.register(pool.regions())
    name = await agents[0].add_peer(agents[1].metadata)
    thread = agents[0]._thread
    alive, were_alive = weakref.ref(thread._agent), list[bool]()

    def fail(handle: object) -> str:
        mine = thread._agent  # a name in a frame of the error keeps it
        raise TypeError(f"{mine} does not know {handle}")

    thread._agent.transfer = fail
    ours, theirs = (contract.words(pool.address) for pool in pools)
    wanted = Fragments.of(ours, theirs, contract.words(64))
    flight = agents[0].begin(name, [wanted], lambda _: None)
    flight.done.add_done_callback(lambda _: were_alive.append(alive() is not None))
    with pytest.raises(TransferFailedError, match="the agent was closed"):
        await asyncio.wait_for(asyncio.wrap_future(flight.done), 10)
    assert were_alive == [False]
    assert agents[0].is_closed
    with pytest.raises(ClosedError):
        await agents[0].remove_peer(name)
    for agent in agents:
        await agent.aclose()


async def test_a_read_that_waits_for_a_connection_ends_when_its_peer_is_removed() -> None:
    agent, other, pool = SocketAgent(timeout_s=60), SocketAgent(timeout_s=60), contract.Pool()
    for each in (agent, other):
        each.register(pool.regions())
    name = await agent.add_peer(other.metadata)
    place = contract.words(pool.address)
    flight = agent.begin(name, [Fragments.of(place, place, contract.words(64))], lambda _: None)
    await asyncio.sleep(0)
    await agent.remove_peer(name)
    with pytest.raises(PeerLostError):
        await asyncio.wait_for(asyncio.wrap_future(flight.done), 10)
    for each in (agent, other):
        await each.aclose()


async def test_a_connection_that_opens_after_its_peer_was_removed_is_closed() -> None:
    agent, other, pool = SocketAgent(timeout_s=60), SocketAgent(timeout_s=60), contract.Pool()
    began, may_open, sockets = asyncio.Event(), asyncio.Event(), socket.socketpair()

    async def connect() -> DataConnection:
        began.set()
        await may_open.wait()
        return DataConnection(sockets[0], "peer")

    for each in (agent, other):
        each.register(pool.regions())
    peer = await agent.add_peer(other.metadata)
    agent.use(peer, connect)
    place = contract.words(pool.address)
    flight = agent.begin(peer, [Fragments.of(place, place, contract.words(64))], lambda _: None)
    await began.wait()
    await agent.remove_peer(peer)
    may_open.set()
    with pytest.raises(PeerLostError):
        await asyncio.wrap_future(flight.done)
    assert sockets[0].fileno() == -1
    sockets[1].close()
    for each in (agent, other):
        await each.aclose()
