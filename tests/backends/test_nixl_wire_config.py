"""A configuration that cannot work is refused by name before anything is opened."""

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.backends.nixl import SECRET_VARIABLE, Endpoint, NixlConfig
from kvxfer.errors import InvalidArgumentError
from kvxfer.units import ByteSize

GIB = ByteSize(1 << 30)
SECRET = bytes(range(33, 65))


@pytest.fixture(autouse=True)
def _no_secret_around(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("node-1:7000", "node-1", 7000),
        ("node-1.example.com:1", "node-1.example.com", 1),
        ("10.0.0.1:65535", "10.0.0.1", 65535),
        ("[::1]:0", "::1", 0),
        ("[fe80::1]:7000", "fe80::1", 7000),
        ("[fe80::1%eth0.4]:7000", "fe80::1%eth0.4", 7000),
    ],
)
def test_an_endpoint_is_written_as_it_was_read(text: str, host: str, port: int) -> None:
    endpoint = Endpoint.parse("listen", text)
    assert endpoint == Endpoint(host, port)
    assert str(endpoint) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "node-1",
        ":7000",
        "node-1:",
        "node-1:70000",
        "node-1:-1",
        "node-1:+1",
        "node-1:\N{FULLWIDTH DIGIT SEVEN}",
        "node-1:7000 ",
        " node-1:7000",
        "node 1:7000",
        "user@node-1:7000",
        "http://node-1:7000",
        "::1:7000",
        "[::1]",
        "[::1:7000",
        "[node-1]:7000",
        "[10.0.0.1]:7000",
        "[::1%]:7000",
        "[::1%eth0\nforged line]:7000",
        "[::1%eth\N{LATIN SMALL LETTER E WITH ACUTE}]:7000",
        "a..b:7000",
    ],
)
def test_what_is_no_endpoint_is_refused_by_name(text: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        Endpoint.parse("listen", text)
    assert (caught.value.argument, caught.value.value) == ("listen", text)


@given(st.text())
def test_any_text_is_an_endpoint_or_an_error(text: str) -> None:
    try:
        endpoint = Endpoint.parse("listen", text)
    except InvalidArgumentError:
        return
    assert Endpoint.parse("listen", str(endpoint)) == endpoint


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("localhost", True),
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("10.0.0.1", False),
        ("0.0.0.0", False),  # noqa: S104 - not bound to
        ("::", False),
        ("::ffff:10.0.0.1", False),
        ("node-1", False),
        ("localhost.example.com", False),
    ],
)
def test_loopback_is_what_is_on_this_machine_for_sure(host: str, *, loopback: bool) -> None:
    assert Endpoint(host, 7000).is_loopback is loopback


@pytest.mark.parametrize(
    ("parameters", "argument"),
    [
        ({"address": "a:1,"}, "address"),
        ({"address": "a:1,b"}, "address"),
        ({"address": "a:1,a:1"}, "address"),
        ({"listen": "a", "capacity": GIB}, "listen"),
        ({"address": "a:1", "capacity": GIB}, "capacity"),
        ({"address": "a:1", "tls_ca": "ca.pem"}, "tls_cert, tls_key, tls_ca"),
        ({"address": "a:1", "tls_cert": "c", "tls_key": "k"}, "tls_cert, tls_key, tls_ca"),
        ({"address": "a:1", "replicas": 0}, "replicas"),
        ({"address": "a:1", "replicas": 2}, "replicas"),
        ({"address": "a:1", "timeout_s": 0.0}, "timeout_s"),
        ({"address": "a:1", "timeout_s": float("nan")}, "timeout_s"),
        ({"address": "a:1", "timeout_s": float("inf")}, "timeout_s"),
        ({"address": "a:1", "lease_s": -1.0}, "lease_s"),
        ({"address": "a:1", "heartbeat_s": 0.0}, "heartbeat_s"),
        ({"address": "a:1", "handshake_timeout_s": 0.0}, "handshake_timeout_s"),
        ({"address": "a:1", "release_within_s": -1.0}, "release_within_s"),
        ({"address": "a:1", "hash_run": 0}, "hash_run"),
        ({"address": "a:1", "staging": 0}, "staging"),
        ({"address": "a:1", "max_connections": 0}, "max_connections"),
        ({"address": "a:1", "max_unauthenticated": 0}, "max_unauthenticated"),
        ({"address": "a:1", "lease_s": 3.0, "heartbeat_s": 2.0}, "lease_s"),
        ({"address": "a:1", "transport": "tcp"}, "transport"),
        ({"address": "a:1", "quarantine": -1}, "quarantine"),
        ({"address": "a:1", "data_port": 7001}, "data_port"),
        ({"listen": "127.0.0.1:7000", "capacity": 0}, "capacity"),
        ({"listen": "127.0.0.1:7000", "capacity": GIB, "data_port": 7000}, "data_port"),
        ({"listen": "127.0.0.1:7000", "capacity": GIB, "data_port": -1}, "data_port"),
        ({"listen": "127.0.0.1:7000", "capacity": GIB, "data_port": 1 << 16}, "data_port"),
    ],
)
def test_parameters_that_do_not_fit_are_refused_by_name(
    parameters: dict[str, Any], argument: str
) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        NixlConfig(**parameters)
    assert caught.value.argument == argument


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n"])
def test_the_secret_comes_from_the_file_or_else_the_environment_without_the_end_of_the_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: bytes
) -> None:
    path = tmp_path / "secret"
    config = NixlConfig(address="127.0.0.1:1", secret_file=str(path))
    monkeypatch.setitem(os.environb, SECRET_VARIABLE.encode(), bytes(reversed(SECRET)) + end)
    with pytest.raises(InvalidArgumentError, match="secret_file"):  # and not no secret, or another
        config.read_secret()
    path.write_bytes(SECRET + end)
    assert config.read_secret() == SECRET
    assert NixlConfig(address="a:1").read_secret() == bytes(reversed(SECRET))


@pytest.mark.parametrize("secret", [b"", b"\n", b"fifteen bytes..", b"fifteen bytes..\n"])
def test_a_secret_that_is_too_short_is_refused_and_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, secret: bytes
) -> None:
    (tmp_path / "file").write_bytes(secret)
    with pytest.raises(InvalidArgumentError, match="at least 16 bytes") as of_file:
        NixlConfig(address="a:1", secret_file=str(tmp_path / "file")).read_secret()
    monkeypatch.setenv(SECRET_VARIABLE, secret.decode())
    with pytest.raises(InvalidArgumentError, match="at least 16 bytes") as of_variable:
        NixlConfig(address="a:1").read_secret()
    assert (of_file.value.argument, of_file.value.value) == ("secret_file", str(tmp_path / "file"))
    assert of_variable.value.value == SECRET_VARIABLE
    assert "fifteen" not in f"{of_file.value} {of_variable.value}"


def test_without_a_secret_and_tls_every_address_is_on_this_machine() -> None:
    local = NixlConfig(address="127.0.0.1:1,[::1]:2", listen="localhost:0", capacity=GIB)
    assert local.read_secret() is None
    for strange in (
        NixlConfig(address="127.0.0.1:1,10.0.0.1:1"),
        NixlConfig(listen="0.0.0.0:1", capacity=GIB),
        NixlConfig(listen="[::]:1", capacity=GIB),
        NixlConfig(address="node-1:1"),
    ):
        with pytest.raises(InvalidArgumentError, match="a loopback address; any other needs"):
            strange.read_secret()
    tls = NixlConfig(address="10.0.0.1:1", tls_cert="c", tls_key="k", tls_ca="a")
    assert tls.read_secret() is None
