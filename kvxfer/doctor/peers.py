"""Checks of a peer: whether it is reached, accepts this process, and how its bytes travel."""

from collections.abc import Iterator

import msgspec

from kvxfer import runtime
from kvxfer.backends.nixl import NixlConfig, PeerProbe, probe_peer
from kvxfer.doctor.finding import Check, Examined, Finding
from kvxfer.endpoint import Endpoint
from kvxfer.errors import (
    BackendUnavailableError,
    HandshakeError,
    InvalidArgumentError,
    PeerError,
    PeerTimeoutError,
    ProtocolError,
)

_MISSES = "Every lookup at this peer is a miss, and every store fails; the log says it once."

_MENDS = {
    "secret": "the same secret_file, or KVXFER_SECRET, on both sides",
    "version": "the same release of kvxfer on both sides: pip install -U kvxfer",
    "authentication": "nixl://{endpoint}?secret_file=FILE, and --secret-file FILE at the peer",
}


def check_peer(config: NixlConfig, endpoint: Endpoint, *, timeout_s: float) -> Iterator[Finding]:
    """Check that a peer is reached and accepts this process, and by what carrier.

    Args:
        config: Configuration of the backend that names the peer.
        endpoint: Endpoint of the peer.
        timeout_s: Time for each step of the handshake, if that of the configuration is longer.
    """
    limit_s = min(timeout_s, config.handshake_timeout_s)
    hasty = msgspec.structs.replace(config, handshake_timeout_s=limit_s)
    try:
        probe = runtime.run(probe_peer(hasty, endpoint))
    except (PeerError, InvalidArgumentError, BackendUnavailableError) as exc:
        yield refuse_peer(endpoint, exc)
        return
    at = Examined(Check.PEER, f"nixl://{endpoint}")
    if probe.namespace is None:
        yield at.ok("reached and accepted; no engine has settled its model yet")
        return
    assert probe.round_trip_s is not None
    model, fingerprint = probe.namespace.model, probe.namespace.fingerprint
    yield at.ok(
        f"reached by {probe.carrier}, round trip {probe.round_trip_s * 1e3:.2g} ms; "
        f"{model!r}, namespace {fingerprint}"
    )
    yield _judge_carrier(config, probe)


def refuse_peer(endpoint: Endpoint, exc: Exception) -> Finding:
    """Make the finding of a peer that cannot be reached, or refuses this process.

    Args:
        endpoint: Endpoint of the peer.
        exc: Error of `probe_peer`.
    """
    at = Examined(Check.PEER, f"nixl://{endpoint}")
    return at.error(str(exc), why=_MISSES, mend=_mend(endpoint, exc))


def _judge_carrier(config: NixlConfig, probe: PeerProbe) -> Finding:
    """Judge the carrier: sockets are what there is between machines without RDMA."""
    at = Examined(Check.PEER_CARRIER, f"nixl://{probe.endpoint}")
    if probe.carrier != "socket":
        return at.ok(f"{probe.carrier}")
    if config.transport == "socket":
        return at.ok("socket, as asked for")
    if not probe.is_here:
        return at.ok("socket: there is no network card for RDMA, or the peer does not use NIXL")
    return at.warning(
        "socket, between two processes of one machine",
        why="The kernel could copy from one process to the other, several times faster. It "
        "refuses, or NIXL is missing on one side: the processes have other users or containers.",
        mend="docker run --pid=host --cap-add=SYS_PTRACE ...  # both; pip install nixl",
    )


def _mend(endpoint: Endpoint, exc: Exception) -> str:
    if isinstance(exc, HandshakeError) and exc.field in _MENDS:
        return _MENDS[exc.field].format(endpoint=endpoint)
    if isinstance(exc, ProtocolError):
        return f"the address of a kvxfer peer: something else listens at {endpoint}"
    if isinstance(exc, PeerTimeoutError):
        return f"restart the peer, or let the firewall pass TCP to {endpoint}"
    if isinstance(exc, PeerError):
        return f"kvxfer serve --listen {endpoint} --capacity SIZE  # on that machine"
    if isinstance(exc, BackendUnavailableError):
        return f"nixl://{endpoint}?transport=auto"
    return f"nixl://{endpoint}?secret_file=FILE"
