"""Mooncake Store keeps every promise of `Backend`, on a real master; pages, and what is refused."""

import itertools
import sys
from typing import Any

import msgspec
import pytest
from safetensors.numpy import load as load_tensors

from kvxfer.backends.mooncake import MooncakeBackend, MooncakeConfig
from kvxfer.errors import InvalidArgumentError
from kvxfer.extras import MissingExtraError
from kvxfer.storage import Backend, BlockKey, Namespace, Status
from kvxfer.storage.observer import Gauge, Reports
from kvxfer.testing import BackendTests
from kvxfer.testing.conformance.suite import (
    make_keys,
    make_large_memory,
    make_memory,
    statuses,
    store_generated,
)
from kvxfer.testing.payloads import make_payload, read_payloads, write_payloads
from tests import needs
from tests.backends.mooncake_servers import Cluster, mooncake_cluster, open_mooncake
from tests.recorder import Recorder

pytestmark = [needs.mooncake, pytest.mark.processes]

MEMORY = make_memory()
KEYS = make_keys(8)

_numbers = itertools.count()


class TestMooncakeBackend(BackendTests):
    persistent = True

    @pytest.fixture(autouse=True)
    def _cluster(self, mooncake: Cluster, shared_client: None) -> None:
        self.cluster = mooncake
        mooncake.client.remove_all(True)

    async def make_backend(self, namespace: Namespace) -> Backend:
        return open_mooncake(self.cluster, namespace)

    async def corrupt(self, backend: Backend, key: BlockKey) -> None:
        assert isinstance(backend, MooncakeBackend)
        name = backend._pages.name(key)
        page = bytearray(self.cluster.client.get(name))
        page[5000] ^= 1
        assert self.cluster.client.upsert(name, bytes(page)) == 0


@pytest.fixture
def namespace() -> Namespace:
    return MEMORY.namespace(revision=f"pages {next(_numbers)}")


@pytest.mark.usefixtures("shared_client")
async def test_pages_of_another_integrity_are_not_in_the_way(
    mooncake: Cluster, namespace: Namespace
) -> None:
    blocks, target = MEMORY.describe(0, range(8)), MEMORY.describe(0, range(8, 16))
    async with (
        open_mooncake(mooncake, namespace, integrity="off") as theirs,
        open_mooncake(mooncake, namespace) as ours,
    ):
        for others, backend in ((theirs, ours), (ours, theirs)):
            await store_generated(others, KEYS, blocks)
            assert await backend.lookup(KEYS) == [backend is theirs] * 8
            payloads = await store_generated(backend, KEYS, blocks)
            assert statuses(await backend.load(KEYS, target)) == [Status.DONE] * 8
            assert read_payloads(target) == payloads


@pytest.mark.usefixtures("shared_client")
async def test_what_is_there_is_not_sent_again_others_read_it_and_all_is_told(
    mooncake: Cluster, namespace: Namespace
) -> None:
    async with (
        open_mooncake(mooncake, namespace) as ours,
        open_mooncake(mooncake, namespace) as theirs,
    ):
        recorder = Recorder()
        ours.observe(Reports([recorder], "mooncake"))
        payloads = await store_generated(ours, KEYS, MEMORY.describe(0, range(8)))
        await store_generated(theirs, KEYS, MEMORY.describe(0, range(8)), version=1)
        assert theirs._gauges()[Gauge.SENT_BYTES] == 0
        pages_bytes = sum(len(payload) + 4096 for payload in payloads)
        assert ours._gauges()[Gauge.SENT_BYTES] == pages_bytes
        digits = KEYS[0].hex()
        name = f"kvxfer/fast/{namespace.fingerprint}/{digits[:2]}/{digits}.safetensors"
        page = load_tensors(mooncake.client.get(name))
        assert page["blocks"].tobytes() == payloads[0]
        assert await ours.delete(KEYS[:2]) == [True, True]
        assert recorder.kept["mooncake"] == set(KEYS[2:])
        assert not recorder.mistakes


async def test_a_full_cluster_refuses_blocks_and_evicts_for_later_ones() -> None:
    memory = make_large_memory()
    size = memory.chunk_size_bytes(0)
    with mooncake_cluster(segment_bytes=32 << 20) as cluster:
        async with open_mooncake(cluster, memory.namespace()) as backend:
            blocks, target = memory.describe(0, range(8)), memory.describe(0, range(8, 16))
            refused: list[str] = []
            for nth in range(16):
                keys = make_keys(8, first=8 * nth)
                payloads = [make_payload(key, size) for key in keys]
                write_payloads(blocks, payloads)
                stored = await backend.store(keys, blocks)
                assert set(statuses(stored)) <= {Status.DONE, Status.FAILED}
                refused += [each.reason for each in stored if not each.done]
                loaded = await backend.load(keys, target)
                assert set(statuses(loaded)) <= {Status.DONE, Status.MISSING}
                for each, found, payload in zip(
                    loaded, read_payloads(target), payloads, strict=True
                ):
                    assert not each.done or found == payload
            assert refused
            assert all(reason.startswith("no room") for reason in refused)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"address": "master"}, "address.*'master'.*host and a port"),
        ({"address": "master:0"}, "address.*'master:0'.*host and port of the master"),
        ({"metadata": ""}, "metadata.*''"),
        ({"metadata": "http://user:hide-and-seek@host/metadata"}, "metadata.*without credentials"),
        ({"replicas": 0}, "replicas.*0"),
        ({"integrity": "keyed"}, "integrity.*keyed.*'off' or 'fast'"),
    ],
)
def test_parameters_that_cannot_be_are_named(fields: dict[str, Any], said: str) -> None:
    with pytest.raises((InvalidArgumentError, msgspec.ValidationError), match=said) as error:
        msgspec.convert({"address": "master:50051"} | fields, MooncakeConfig)
    assert "hide-and-seek" not in str(error.value)


def test_without_the_package_an_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake", None)
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    with pytest.raises(MissingExtraError, match=r"kvxfer\[mooncake\]"):
        MooncakeBackend(MooncakeConfig(address="127.0.0.1:1"), MEMORY.namespace())
