"""TLS: a client without a certificate of the authority does not even get a greeting."""

import asyncio
import ssl
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE

import pytest
from cryptography.hazmat.primitives import serialization

from kvxfer.backends.nixl import NixlConfig, client_context, server_context
from kvxfer.backends.nixl.wire import (
    FrameChannel,
    greet_as_client,
)
from kvxfer.errors import InvalidArgumentError, PeerError
from tests.backends.nixl_wire import HOST, Authority, Offer, connected, hello, listening


@pytest.fixture(autouse=True)
async def _failed_tls_is_expected() -> None:
    asyncio.get_running_loop().set_debug(False)  # it would be logged as an error


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "authority")


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Certificate authority that no peer trusts."""
    return Authority(tmp_path_factory.mktemp("tls") / "stranger")


def test_without_files_there_is_no_tls() -> None:
    config = NixlConfig(address="127.0.0.1:1")
    assert client_context(config) is None
    assert server_context(config) is None


async def test_a_client_does_not_talk_to_a_server_of_another_authority(
    authority: Authority, stranger: Authority
) -> None:
    theirs = server_context(stranger.config(ca=authority))
    async with listening(tls=theirs) as listener:
        with pytest.raises(ssl.SSLCertVerificationError):
            await asyncio.open_connection(
                HOST, listener.port, ssl=client_context(authority.config())
            )


async def test_a_client_does_not_talk_to_a_server_of_another_name(authority: Authority) -> None:
    config = authority.config()
    async with listening(tls=server_context(config)) as listener:
        with pytest.raises(ssl.SSLCertVerificationError, match="not valid for 'localhost'"):
            await asyncio.open_connection(
                HOST, listener.port, ssl=client_context(config), server_hostname="localhost"
            )


@pytest.mark.parametrize("certificate", ["of another authority", "none"])
async def test_a_server_does_not_talk_to_a_client_without_a_certificate(
    certificate: str, authority: Authority, stranger: Authority
) -> None:
    tls = client_context(stranger.config(ca=authority))
    if certificate == "none":
        tls = ssl.create_default_context(cafile=authority.config().tls_ca)
    async with listening(tls=server_context(authority.config())) as listener:
        streams = await asyncio.open_connection(HOST, listener.port, ssl=tls)
        client = FrameChannel(*streams)  # it learns of the refusal when it reads
        with pytest.raises(PeerError):
            await greet_as_client(client, hello(b"client"), secret=None, reach=Offer(b""))
        assert not listener.writers


async def test_a_plain_client_gets_no_further_than_a_tls_server(authority: Authority) -> None:
    async with listening(tls=server_context(authority.config())) as listener:
        client = FrameChannel(*await asyncio.open_connection(HOST, listener.port))
        with pytest.raises(PeerError):
            await greet_as_client(client, hello(b"client"), secret=None, reach=Offer(b""))
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
    program = (
        "from kvxfer.backends.nixl import NixlConfig, client_context\n"
        f"client_context(NixlConfig(address='127.0.0.1:1', tls_cert={config.tls_cert!r},"
        f" tls_key={str(locked)!r}, tls_ca={config.tls_ca!r}))"
    )
    command = [sys.executable, "-c", program]
    # Whoever asks waits for a line of the standard input, which never comes.
    with subprocess.Popen(
        command, stdin=PIPE, stderr=PIPE, text=True, start_new_session=True
    ) as it:
        assert it.stderr
        try:
            assert it.wait(timeout=15) == 1
        finally:
            it.kill()
        assert "expected a certificate and its private key, not encrypted" in it.stderr.read()


async def test_an_older_tls_is_refused(authority: Authority) -> None:
    old = client_context(authority.config())
    assert old is not None
    old.minimum_version = ssl.TLSVersion.TLSv1_2
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    async with listening(tls=server_context(authority.config())) as listener:
        with pytest.raises(OSError):  # ssl.SSLError is one
            await asyncio.open_connection(HOST, listener.port, ssl=old)
        assert not listener.writers


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
    good = authority.config()
    files = {field: getattr(good, field) for field in ("tls_cert", "tls_key", "tls_ca")}
    config = NixlConfig(address="127.0.0.1:1", **{**files, name: str(path)})
    for make_context in (client_context, server_context):
        with pytest.raises(InvalidArgumentError, match=name) as caught:
            make_context(config)
        assert str(path) in str(caught.value)


def test_a_certificate_and_the_key_of_another_one_are_refused(
    authority: Authority, stranger: Authority
) -> None:
    ours, theirs = authority.config(), stranger.config()
    config = NixlConfig(
        address="127.0.0.1:1", tls_cert=ours.tls_cert, tls_key=theirs.tls_key, tls_ca=ours.tls_ca
    )
    with pytest.raises(InvalidArgumentError, match="KEY_VALUES_MISMATCH"):
        server_context(config)
