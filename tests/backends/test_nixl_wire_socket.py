"""Frame sockets: read nothing past a frame, and wait for nothing past the deadline."""

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from kvxfer import InvalidArgumentError, PeerClosedError, PeerError, PeerTimeoutError, ProtocolError
from kvxfer.backends.nixl.config import client_context, server_context
from kvxfer.backends.nixl.frame_socket import FrameSocket
from kvxfer.backends.nixl.wire.frames import HEADER_BYTES, MAX_UNPROVEN_FRAME_BYTES, FrameCodec
from kvxfer.backends.nixl.wire.handshake import Role, Session
from kvxfer.backends.nixl.wire.messages import Ping, Proof
from tests.backends.nixl_wire import HOST, Authority

PING: msgspec.msgpack.Decoder[Ping] = msgspec.msgpack.Decoder(Ping)
PROOF: msgspec.msgpack.Decoder[Proof] = msgspec.msgpack.Decoder(Proof)
ONE = Ping(request_id=1)
LARGE = Proof(mac=bytes(MAX_UNPROVEN_FRAME_BYTES - 100))
TIMEOUT_S = 0.2
LIMIT_S = 4.0


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "authority")


@pytest.fixture(params=["plain", "TLS"])
def ends(
    request: pytest.FixtureRequest, authority: Authority
) -> Iterator[tuple[FrameSocket, FrameSocket]]:
    """Both ends of a connection, sealed."""
    with socket.create_server((HOST, 0)) as listener, ThreadPoolExecutor(1) as executor:
        accepted = executor.submit(lambda: listener.accept()[0])
        asking: socket.socket = socket.create_connection(listener.getsockname())
        serving = accepted.result()
        if request.param == "TLS":
            config = authority.config()
            client, server = client_context(config), server_context(config)
            assert client is not None
            assert server is not None
            wrapped = executor.submit(server.wrap_socket, serving, server_side=True)
            asking = client.wrap_socket(asking, server_hostname=HOST)
            serving = wrapped.result()
    both = FrameSocket(asking, "server"), FrameSocket(serving, "client")
    for end, role in zip(both, Role, strict=True):
        end.secure(Session(role, session_id=b"", key=b"").frame_keys())
    yield both
    for end in both:
        end.close()


def next_frame(role: Role = Role.ASKING) -> bytes:
    """The first frame that a side would send."""
    codec = FrameCodec("")
    codec.secure(Session(role, session_id=b"", key=b"").frame_keys())
    return bytes(codec.encode(ONE))


def send_large(end: FrameSocket, *, timeout_s: float) -> None:
    """Send more than the kernel's buffers take."""
    for _ in range(200):
        end.send(LARGE, timeout_s=timeout_s)


def test_bytes_behind_a_frame_are_left_alone(ends: tuple[FrameSocket, FrameSocket]) -> None:
    client, server = ends
    for number in range(3):
        client.send(Ping(request_id=number), timeout_s=1)
        client.socket.sendall(b"raw bytes")
    for number in range(3):
        assert server.receive(PING, timeout_s=1) == Ping(request_id=number)
        raw = b""
        while len(raw) < 9:
            raw += server.socket.recv(9 - len(raw))
        assert raw == b"raw bytes"


def test_a_large_message_arrives_in_pieces(ends: tuple[FrameSocket, FrameSocket]) -> None:
    client, server = ends
    message = Proof(mac=bytes(8 << 20))
    with ThreadPoolExecutor(1) as executor:
        sending = executor.submit(client.send, message, timeout_s=10)
        assert server.receive(PROOF, timeout_s=10) == message
        sending.result()


@pytest.mark.parametrize("length", range(1, HEADER_BYTES + 3))
def test_a_frame_that_is_cut_short_is_an_error(
    ends: tuple[FrameSocket, FrameSocket], length: int
) -> None:
    client, server = ends
    client.socket.sendall(next_frame()[:length])
    client.close()
    with pytest.raises(ProtocolError, match="in the middle of a frame"):
        server.receive(PING, timeout_s=1)


def test_a_peer_that_closes_between_frames_is_gone(ends: tuple[FrameSocket, FrameSocket]) -> None:
    client, server = ends
    client.send(ONE, timeout_s=1)
    client.close()
    assert server.receive(PING, timeout_s=1) == ONE
    with pytest.raises(PeerClosedError):
        server.receive(PING, timeout_s=1)
    with pytest.raises(PeerClosedError):
        send_large(server, timeout_s=1)


def test_a_frame_that_was_changed_is_an_error(ends: tuple[FrameSocket, FrameSocket]) -> None:
    client, server = ends
    frame = bytearray(next_frame())
    frame[-1] ^= 1
    client.socket.sendall(frame)
    with pytest.raises(ProtocolError, match="was changed"):
        server.receive(PING, timeout_s=1)


def test_a_frame_that_is_sent_back_is_an_error(ends: tuple[FrameSocket, FrameSocket]) -> None:
    client, server = ends
    server.socket.sendall(next_frame(Role.ASKING))
    with pytest.raises(ProtocolError, match="was changed"):
        client.receive(PING, timeout_s=1)


def test_an_announcement_of_too_much_is_an_error_at_once(
    ends: tuple[FrameSocket, FrameSocket],
) -> None:
    client, server = ends
    client.socket.sendall(b"\xff\xff\xff\xff")
    with pytest.raises(ProtocolError, match="announced a frame of 4294967295 bytes"):
        server.receive(PING, timeout_s=LIMIT_S)


@pytest.mark.parametrize("said", [b"", b"\0\0", b"\0\0\0\x40", b"\0\0\0\x40half"])
def test_a_silent_peer_is_given_up_in_time(
    ends: tuple[FrameSocket, FrameSocket], said: bytes
) -> None:
    client, server = ends
    client.socket.sendall(said)
    start = time.monotonic()
    with pytest.raises(PeerTimeoutError, match=r"took longer than 0\.2 s"):
        server.receive(PING, timeout_s=TIMEOUT_S)
    assert time.monotonic() - start < LIMIT_S


def test_a_peer_that_trickles_does_not_get_more_time(
    ends: tuple[FrameSocket, FrameSocket],
) -> None:
    client, server = ends

    def trickle() -> None:
        for byte in next_frame():
            client.socket.sendall(bytes([byte]))
            time.sleep(TIMEOUT_S / 10)

    with ThreadPoolExecutor(1) as executor:
        trickling = executor.submit(trickle)
        start = time.monotonic()
        with pytest.raises(PeerTimeoutError):
            server.receive(PING, timeout_s=TIMEOUT_S)
        assert time.monotonic() - start < LIMIT_S
        trickling.result()


def test_a_peer_that_reads_nothing_is_given_up(ends: tuple[FrameSocket, FrameSocket]) -> None:
    client, _ = ends
    with pytest.raises(PeerTimeoutError):
        send_large(client, timeout_s=TIMEOUT_S)


def test_a_message_that_is_too_large_is_an_error_before_anything_is_sent() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        with pytest.raises(InvalidArgumentError, match="size of a message Proof"):
            FrameSocket(ours, "p").send(Proof(mac=bytes(MAX_UNPROVEN_FRAME_BYTES)), timeout_s=1)
        ours.close()
        assert theirs.recv(1) == b""


def test_closing_wakes_up_who_waits(ends: tuple[FrameSocket, FrameSocket]) -> None:
    client, _ = ends
    with ThreadPoolExecutor(1) as executor:
        receiving = executor.submit(client.receive, PING, timeout_s=10)
        start = time.monotonic()
        time.sleep(0.1)  # whether it waits by now or not, it must end
        client.close()
        client.close()
        with pytest.raises(PeerError):
            receiving.result()
        assert time.monotonic() - start < LIMIT_S
