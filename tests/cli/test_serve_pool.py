"""`kvxfer serve --pool` and `--warm`: blocks of a file tier are in memory before it is ready."""

import asyncio
import os
import shutil
from pathlib import Path

import pytest

from kvxfer.backends.file import FileBackend, FileConfig
from kvxfer.backends.host import HostBackend, HostConfig
from kvxfer.backends.nixl import NixlConfig
from kvxfer.backends.pool import PoolBackend, PoolConfig
from kvxfer.cli import main
from kvxfer.storage.keys import Namespace, make_block_key
from kvxfer.testing import BlockMemory
from kvxfer.testing.payloads import make_payload
from kvxfer.tiering import TieredBackend
from kvxfer.tiering.preloading import preload
from kvxfer.units import ByteSize
from tests.backends.test_host import capacity_for
from tests.cli import peers
from tests.cli.peers import serving
from tests.cli.stores import DATA_BYTES, Store, flip

NUM_WARM = 5
CORRUPT = 6


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


@pytest.fixture
def namespace(store: Store) -> Namespace:
    """Namespace of a store of eight blocks, used one after the other, one of which is corrupt."""
    namespace = store.fill()
    for number, key in enumerate(store.keys):
        os.utime(store.path(namespace, key), (1e9 + number, 1e9 + number))
    corrupt = store.path(namespace, store.keys[CORRUPT])
    flip(corrupt, corrupt.stat().st_size - 1)
    os.utime(corrupt, (1e9 + CORRUPT, 1e9 + CORRUPT))
    return namespace


def options(store: Store, namespace: Namespace) -> list[str]:
    described = store.root / namespace.fingerprint / "namespace.json"
    tier = f"file://{store.root}?capacity=64MiB&min_free=1MiB"
    usual = ["--capacity", "1MiB", "--tier", tier, "--namespace", str(described)]
    return [*usual, "--warm", str(NUM_WARM)]


def expected(store: Store) -> list[bytes | None]:
    """Payloads of the intact blocks among those used last."""
    first = len(store.keys) - NUM_WARM
    return [
        make_payload(key, DATA_BYTES) if number >= first and number != CORRUPT else None
        for number, key in enumerate(store.keys)
    ]


async def test_the_blocks_used_last_are_preloaded_and_evicted_last(
    store: Store, namespace: Namespace, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    files = FileConfig(path=str(store.root), capacity=ByteSize(1 << 26), min_free=ByteSize(1))
    host = HostBackend(HostConfig(capacity=capacity_for(namespace, NUM_WARM - 1)), namespace)
    async with TieredBackend([host, FileBackend(files, namespace)], namespace) as tiers:
        assert await preload(tiers, NUM_WARM, timeout_s=30.0) == NUM_WARM - 1
        there = await host.lookup(store.keys)
        assert there == [payload is not None for payload in expected(store)]
        assert "preloaded 4 of the 5 blocks used last" in caplog.text
        assert store.keys[CORRUPT].hex() in caplog.text, "the corrupt one is named"
        other = make_block_key(b"another block", 0)
        blocks = BlockMemory(peers.PAGES, num_blocks=1).describe(0, [0])
        assert [outcome.done for outcome in await host.store([other], blocks)] == [True]
        kept = [number for number, each in enumerate(there) if each]
        assert await host.lookup(store.keys) == [each in kept[1:] for each in range(8)]
        assert await preload(tiers, 1, timeout_s=0.0) == 0
        assert "cut off after 0 s" in caplog.text


@pytest.mark.processes
def test_a_pool_has_the_blocks_in_memory_when_it_is_ready(
    store: Store, namespace: Namespace, tmp_path: Path
) -> None:
    path = tmp_path / "pool.sock"

    async def load() -> list[bytes | None]:
        async with PoolBackend(PoolConfig(path=str(path)), namespace) as engine:
            return await peers.load(engine)

    with serving(*options(store, namespace), pool=path) as pool:
        said = "".join(pool.said)
        assert "preloaded 4 of the 5 blocks used last" in said, "before it was ready"
        assert pool.readiness() == 200
        shutil.rmtree(store.root)
        assert asyncio.run(load()) == expected(store)
        assert pool.end() == 0
    assert not path.exists()


@pytest.mark.processes
def test_a_peer_has_the_blocks_in_memory_when_it_is_ready(
    store: Store, namespace: Namespace
) -> None:
    async def load(address: str) -> list[bytes | None]:
        async with peers.connected(NixlConfig(address=address)) as engine:
            return await peers.load(engine)

    with serving(*options(store, namespace)) as peer:
        assert "preloaded 4 of the 5 blocks used last" in "".join(peer.said)
        shutil.rmtree(store.root)
        assert asyncio.run(load(str(peer.endpoint))) == expected(store)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--warm", "3"], "warm is 3; expected a number of blocks, with --namespace and --tier"),
        (["--warm", "-1"], "warm is -1"),
        (["--secret-file", "s"], "secret-file is 's'; expected none with --pool"),
        (["--lease", "3s"], "lease is '3s'; expected none with --pool"),
        (["--transport", "socket"], "transport is 'socket'; expected none with --pool"),
        (["--timeout", "1s"], "timeout is '1s'; expected none with --pool"),
        (["--warm-timeout", "soon"], "warm-timeout is 'soon'"),
        (["--tier", "tape://"], "backend is 'tape'"),
        (
            ["--tier", "pool:///nonexistent/../nonexistent/pool.sock"],
            "pool.sock'; expected another process than this one",
        ),
        (["--tier", "file:///kv?capacity=1MiB&priority_share=2"], "priority_share is 2.0"),
        (["--tier", "file:///kv?capacity=1MiB&read_threads=0"], "read_threads is 0"),
        ([], "cannot listen at /nonexistent/pool.sock: "),
    ],
)
def test_what_cannot_be_is_said_in_one_line(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    usual = ["serve", "--pool", "/nonexistent/pool.sock", "--capacity", "1MiB", *arguments]
    assert main(usual) == 2
    said = capsys.readouterr().err
    assert said.splitlines()[-1].count(complaint) == 1
