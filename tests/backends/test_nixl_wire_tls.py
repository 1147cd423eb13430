"""TLS: a client without a certificate of the authority does not even get a greeting."""

import asyncio
import contextlib
import shutil
import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization

from kvxfer.backends.nixl import NixlBackend, NixlConfig, client_context, server_context
from kvxfer.backends.nixl.wire.frames import FrameChannel
from kvxfer.backends.nixl.wire.handshake import greet_as_client
from kvxfer.errors import InvalidArgumentError, PeerError
from kvxfer.storage.backend import Status
from kvxfer.testing import BlockMemory
from kvxfer.testing.conformance.suite import make_keys, statuses
from kvxfer.units import ByteSize
from tests.backends.nixl_wire import HOST, Authority, Offer, connected, hello, listening

MEMORY = BlockMemory([[4096]], num_blocks=4)
KEYS = make_keys(2)


@pytest.fixture(autouse=True)
async def _failed_tls_is_expected() -> None:
    asyncio.get_running_loop().set_debug(False)  # it would be logged as an error


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "stranger")


async def test_a_client_does_not_talk_to_a_server_of_another_authority(
    authority: Authority, stranger: Authority
) -> None:
    theirs = server_context(stranger.config(**authority.files("tls_ca")))
    async with listening(tls=theirs) as listener:
        with pytest.raises(ssl.SSLCertVerificationError):
            await asyncio.open_connection(
                HOST, listener.port, ssl=client_context(authority.config())
            )


@pytest.mark.parametrize("client", ["another authority", "no certificate", "no TLS", "older TLS"])
async def test_a_server_does_not_talk_to_a_client_that_it_cannot_trust(
    client: str, authority: Authority, stranger: Authority
) -> None:
    tls = None if client == "no TLS" else client_context(authority.config())
    if client == "another authority":
        tls = client_context(stranger.config(**authority.files("tls_ca")))
    elif client == "no certificate":
        tls = ssl.create_default_context(cafile=authority.config().tls_ca)
    elif tls is not None:
        tls.minimum_version = tls.maximum_version = ssl.TLSVersion.TLSv1_2

    async def greet(port: int) -> None:  # it learns of a refusal when it connects or reads
        channel = FrameChannel(*await asyncio.open_connection(HOST, port, ssl=tls))
        await greet_as_client(channel, hello(b"client"), secret=None, reach=Offer(b""))

    async with listening(tls=server_context(authority.config())) as listener:
        with pytest.raises(OSError if client == "older TLS" else PeerError):
            await greet(listener.port)
        assert not listener.writers


def test_a_private_key_with_a_passphrase_is_refused_and_nobody_is_asked_for_it(
    authority: Authority, tmp_path: Path
) -> None:
    config = authority.config()
    key = serialization.load_pem_private_key(Path(config.tls_key).read_bytes(), None)
    encryption = serialization.BestAvailableEncryption(b"passphrase")
    formats = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    locked = tmp_path / "locked.pem"
    locked.write_bytes(key.private_bytes(*formats, encryption))
    with pytest.raises(InvalidArgumentError, match="its private key, not encrypted"):
        client_context(authority.config(tls_key=str(locked)))  # or it waits for it


async def test_encryption_alone_is_not_authentication(authority: Authority) -> None:
    """A server that asks for no certificate cannot authenticate its clients."""
    blind = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    config = authority.config()
    blind.load_cert_chain(config.tls_cert, config.tls_key)
    async with connected(tls=(client_context(config), blind)) as ends:
        assert ends.client.has_verified_certificate
        assert not ends.server.has_verified_certificate
    async with connected() as ends:
        assert not ends.client.has_verified_certificate


@pytest.mark.parametrize("name", ["tls_cert", "tls_key", "tls_ca"])
@pytest.mark.parametrize("content", [None, b"", b"not a certificate"])
def test_a_file_that_is_not_what_it_must_be_is_named(
    name: str, content: bytes | None, authority: Authority, tmp_path: Path
) -> None:
    path = tmp_path / "file.pem"
    if content is not None:
        path.write_bytes(content)
    config = authority.config(**{name: str(path)})
    for make_context in (client_context, server_context):
        with pytest.raises(InvalidArgumentError, match=name) as caught:
            make_context(config)
        assert str(path) in str(caught.value)


def test_a_certificate_and_the_key_of_another_one_are_refused(
    authority: Authority, stranger: Authority
) -> None:
    with pytest.raises(InvalidArgumentError, match="KEY_VALUES_MISMATCH"):
        server_context(authority.config(**stranger.files("tls_key")))


def replace(files: dict[str, Any], authority: Authority) -> None:
    """Replace files of TLS, as those of a secret in Kubernetes are."""
    for name, source in authority.files().items():
        shutil.copy(source, f"{files[name]}~")
        Path(f"{files[name]}~").replace(files[name])


@pytest.fixture
def renewed(tmp_path: Path, authority: Authority) -> dict[str, Any]:
    """Files of TLS in one place, where others replace them."""
    files = {name: str(tmp_path / name) for name in authority.files()}
    replace(files, authority)
    return files


@contextlib.asynccontextmanager
async def holding(files: dict[str, Any]) -> AsyncIterator[str]:
    config = NixlConfig(listen=f"{HOST}:0", capacity=ByteSize(1 << 20), transport="socket", **files)
    async with NixlBackend(config, MEMORY.namespace()) as holder:
        await holder.start()
        assert holder.server is not None
        yield str(holder.server.endpoint)


def engine(address: str, files: dict[str, Any]) -> NixlBackend:
    config = NixlConfig(address=address, transport="socket", **files)
    return NixlBackend(config, MEMORY.namespace())


async def moves(engine: NixlBackend) -> list[Status]:
    """Store a block and load it, by connections for the answers and for the bytes."""
    stored = await engine.store(KEYS[:1], MEMORY.describe(0, [0]))
    loaded = await engine.load(KEYS[:1], MEMORY.describe(0, [1]))
    return statuses([*stored, *loaded])


async def test_certificates_that_were_replaced_are_shown_and_wanted_from_the_next_connection_on(
    renewed: dict[str, Any], stranger: Authority
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        address = await stack.enter_async_context(holding(renewed))
        old = await stack.enter_async_context(engine(address, renewed))
        later = await stack.enter_async_context(engine(address, stranger.files()))
        assert await moves(old) == [Status.DONE] * 2
        assert await moves(later) != [Status.DONE] * 2
        replace(renewed, stranger)
        elsewhere = await stack.enter_async_context(engine(address, stranger.files()))
        assert await moves(elsewhere) == [Status.DONE] * 2, "the holder read them again"
        [client] = old._exchange.clients.values()
        client.disconnect()
        assert await moves(old) == [Status.DONE] * 2, "and so did the engine"


@pytest.mark.parametrize(
    "spoil", [lambda path: path.write_bytes(b"not a certificate"), Path.unlink], ids=["bad", "away"]
)
async def test_while_new_files_cannot_be_used_those_of_before_count(
    spoil: Callable[[Path], object],
    renewed: dict[str, Any],
    authority: Authority,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with holding(renewed) as address, engine(address, authority.files()) as backend:
        spoil(Path(renewed["tls_cert"]))
        assert await moves(backend) == [Status.DONE] * 2
    assert caplog.text.count("cannot be used") == 1
    assert renewed["tls_cert"] in caplog.text
