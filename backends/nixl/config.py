"""Configuration of the NIXL backend, and the TLS contexts that it describes."""

import asyncio
import contextlib
import logging
import os
import ssl
from concurrent.futures import Future
from pathlib import Path
from typing import Literal

import msgspec

from kvxfer.backends.nixl.discovery import EtcdConfig, EtcdDiscovery, load_certificates
from kvxfer.backends.nixl.wire.handshake import HANDSHAKE_TIMEOUT_S
from kvxfer.checks import require_integer
from kvxfer.configuration import Configuration
from kvxfer.endpoint import MAX_PORT, Endpoint, is_any_host
from kvxfer.errors import InvalidArgumentError
from kvxfer.runtime import DaemonThreads, fetch_error
from kvxfer.storage.integrity import read_secret
from kvxfer.units import ByteSize

SECRET_VARIABLE = "KVXFER_SECRET"  # noqa: S105 - the name of it
MIN_SECRET_BYTES = 16
"""Minimum length of a secret: strangers can test guesses offline, against a recorded handshake."""

RENEW_S = 1.0
"""How long a new connection waits for replaced TLS files: a disk that hangs must not block it."""

logger = logging.getLogger(__name__)

Transport = Literal["auto", "nixl", "socket"]
IntegrityGrade = Literal["full", "fenced"]


class NixlConfig(Configuration, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Configuration of `nixl://host:port,host:port`.

    Attributes:
        address: Peers that hold blocks, as `host:port`, separated by commas.
        discover: `etcd://host:port/prefix` at which peers are found, in place of `address`, and at
            which this process announces itself if it has `listen`. Several members of the etcd
            cluster are separated by commas.
        advertise: `host:port` to announce, by which others reach `listen`; by default `listen`
            itself. Port 0 means that of `listen`.
        etcd_user_file: File with the user name and the password for etcd, `name:password`.
        etcd_ca: File with the certificate, in PEM, of the authority that signs etcd's certificates.
            Without it, etcd is asked without TLS.
        etcd_cert: File with the certificate, in PEM, by which etcd knows this process.
        etcd_key: File with the private key of `etcd_cert`, in PEM.
        listen: `host:port` at which this process serves its blocks to others.
        data_port: Port for blocks that go through sockets; needs `listen`. 0 means any free one.
        staging: Bytes of host memory for blocks on their way from and to memory that is not
            registered; raised to two of the largest chunk if need be.
        capacity: Bytes of host memory for the blocks that a `NixlBackend` serves; required with
            `listen`, and refused without.
        secret_file: File with the secret of all peers, at least 16 bytes, better 32 random ones; a
            trailing line end is ignored. Without a file, the environment variable `KVXFER_SECRET`
            is used. Without either, and without TLS, every address must be a loopback address.
        tls_cert: File with this process's certificate, in PEM. Give all three TLS files, or none.
        tls_key: File with the private key of `tls_cert`, in PEM.
        tls_ca: File with the certificate, in PEM, of the authority that signs all peers'
            certificates. Anyone with a certificate of this authority is a peer: use one that signs
            nothing else.
        transport: Transport of the bytes: `nixl`, or `socket`, kvxfer's own TCP connections. `auto`
            chooses for each peer.
        integrity: Proof that a block arrived as it was stored. `full`: the XXH3-64 of its bytes.
            `fenced`: its generation, which the holder changes before and after it overwrites the
            block; no bytes are hashed. See docs/peers.md for what each of them catches. None means
            `full`, unless a hand-over of a GPU's caches chooses otherwise.
        replicas: Number of peers that store each block.
        timeout_s: Deadline for a request to a peer.
        lookup_timeout_s: Deadline for a lookup at one of several peers. The blocks of a peer that
            exceeds it are misses, and that peer is not asked for a while.
        quarantine: Bytes that transfers past their deadline may keep in quarantine before NIXL is
            restarted.
        lease_s: How long blocks stay pinned for a silent peer.
        heartbeat_s: Interval of heartbeats to a peer.
        handshake_timeout_s: Deadline each for connecting to a peer, for the handshake, and for the
            steps after it until the peer is ready.
        max_connections: Maximum number of connections from peers, control and data together.
        max_unauthenticated: Maximum number of those that have not authenticated. Beyond it, others
            wait until one has, or until the oldest has had half a second and is closed. A peer
            authenticates within milliseconds.

    Raises:
        InvalidArgumentError: A parameter cannot be used; the error names it and its value.
    """

    address: str = ""
    discover: str = ""
    advertise: str = ""
    etcd_user_file: str = ""
    etcd_ca: str = ""
    etcd_cert: str = ""
    etcd_key: str = ""
    listen: str = ""
    data_port: int = 0
    capacity: ByteSize | None = None
    secret_file: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    tls_ca: str = ""
    transport: Transport = "auto"
    integrity: IntegrityGrade | None = None
    replicas: int = 1
    timeout_s: float = 10.0
    lookup_timeout_s: float = 1.0
    quarantine: ByteSize = ByteSize(256 << 20)
    lease_s: float = 8.0
    heartbeat_s: float = 2.0
    handshake_timeout_s: float = HANDSHAKE_TIMEOUT_S
    max_connections: int = 1024
    max_unauthenticated: int = 128
    staging: ByteSize = ByteSize(64 << 20)

    def __post_init__(self) -> None:
        super().__post_init__()
        times = [name for name in self.__struct_fields__ if name.endswith("_s")]
        self._require_positive("capacity", "staging", "max_unauthenticated", *times)
        most = (1 << 31) - 1  # the largest backlog of a listening socket
        require_integer("max_connections", self.max_connections, minimum=1, maximum=most)
        require_integer("data_port", self.data_port, maximum=MAX_PORT)
        peers, listen = self.peers, self.listen_endpoint
        if len(set(peers)) < len(peers):
            raise InvalidArgumentError("address", self.address, "each peer once")
        if not all(peer.port for peer in peers):
            raise InvalidArgumentError("address", self.address, "a port above 0 for each peer")
        if self.capacity is not None and not self.listen:
            raise InvalidArgumentError("capacity", self.capacity, "none without listen=HOST:PORT")
        tls = (self.tls_cert, self.tls_key, self.tls_ca)
        if any(tls) and not all(tls):
            raise InvalidArgumentError("tls_cert, tls_key, tls_ca", tls, "all three, or none")
        if self.replicas < 1 or (peers and self.replicas > len(peers)):
            wanted = f"1 to {len(peers)}, the number of peers"
            raise InvalidArgumentError("replicas", self.replicas, wanted)
        if self.data_port and self.data_port == getattr(listen, "port", 0):
            raise InvalidArgumentError("data_port", self.data_port, "a port other than listen's")
        if self.data_port and not self.listen:
            raise InvalidArgumentError("data_port", self.data_port, "0 without listen=HOST:PORT")
        self._require_discovery()
        if self.lease_s < 2 * self.heartbeat_s:
            wanted = f"at least twice heartbeat_s={self.heartbeat_s:g}, which renews leases"
            raise InvalidArgumentError("lease_s", self.lease_s, wanted)

    @property
    def peers(self) -> tuple[Endpoint, ...]:
        """Peers that hold blocks."""
        if not self.address:
            return ()
        return tuple(Endpoint.parse("address", text) for text in self.address.split(","))

    @property
    def listen_endpoint(self) -> Endpoint | None:
        """Endpoint at which this process serves blocks; None if it serves none."""
        return Endpoint.parse("listen", self.listen) if self.listen else None

    @property
    def etcd(self) -> EtcdConfig | None:
        """Configuration of the discovery of peers; None if they are listed."""
        if not self.discover:
            return None
        return EtcdConfig.parse(
            self.discover,
            user_file=self.etcd_user_file,
            ca=self.etcd_ca,
            cert=self.etcd_cert,
            key=self.etcd_key,
        )

    def open_discovery(self, namespace: str = "") -> EtcdDiscovery | None:
        """Open the discovery, which finds and announces peers; None without `discover`.

        A holder, which looks for no peers, gives no namespace.
        """
        etcd = self.etcd
        if etcd is None:
            return None
        return EtcdDiscovery(
            etcd, namespace=namespace, require=lambda peer: self.require_proof("peer", peer)
        )

    def advertised(self, listening: Endpoint) -> Endpoint:
        """Return the endpoint by which others reach the one that this process listens at."""
        if not self.advertise:
            return listening
        at = Endpoint.parse("advertise", self.advertise)
        return Endpoint(at.host, at.port or listening.port)

    def at_rank(self, rank: int) -> "NixlConfig":
        """Make the configuration of a worker, which listens at the rank-th port after `listen`.

        Raises:
            InvalidArgumentError: There is no such port, or an earlier worker uses it for data.
        """
        listen = self.listen_endpoint
        if listen is None or not listen.port or not rank:
            return self
        if self.data_port and abs(self.data_port - listen.port) <= rank:
            wanted = f"more than {rank} ports from listen={self.listen}: a worker adds its rank"
            raise InvalidArgumentError("data_port", self.data_port, wanted)
        at = str(Endpoint(listen.host, listen.port + rank))
        data_port = self.data_port and self.data_port + rank
        advertise = self.advertise
        if advertise and (known := Endpoint.parse("advertise", advertise)).port:
            advertise = str(Endpoint(known.host, known.port + rank))
        return msgspec.structs.replace(self, listen=at, data_port=data_port, advertise=advertise)

    @property
    def uses_tls(self) -> bool:
        """Whether connections are encrypted, and peers authenticate by certificate."""
        return bool(self.tls_ca)

    @property
    def is_fenced(self) -> bool:
        """Whether blocks are proven by their generations, if their holder keeps any."""
        return self.integrity == "fenced"

    @property
    def proves_peers(self) -> bool:
        """Whether peers must authenticate; if not, only loopback addresses are used."""
        return self.uses_tls or bool(self.secret_file) or SECRET_VARIABLE in os.environ

    def read_secret(self) -> bytes | None:
        """Read the secret of all peers from the file or the environment; None without one."""
        secret = read_secret(self.secret_file)
        argument, source = "secret_file", self.secret_file
        if secret is None and SECRET_VARIABLE in os.environ:
            secret = os.environb[SECRET_VARIABLE.encode()]
            argument, source = "environment variable", SECRET_VARIABLE
        if secret is None:
            for peer in self.peers:
                self.require_proof("address", peer)
            if self.listen_endpoint is not None:
                self.require_proof("listen", self.listen_endpoint)
            return None
        secret = secret.rstrip(b"\r\n")
        if len(secret) < MIN_SECRET_BYTES:
            wanted = f"a secret of at least {MIN_SECRET_BYTES} bytes, e.g. openssl rand -hex 32"
            raise InvalidArgumentError(argument, source, wanted)
        return secret

    def require_proof(self, argument: str, endpoint: Endpoint) -> None:
        """Refuse an address beyond this machine unless peers must authenticate."""
        if not self.proves_peers and not endpoint.is_loopback:
            wanted = "a loopback address; any other needs secret_file or TLS"
            raise InvalidArgumentError(argument, str(endpoint), wanted)

    def _require_discovery(self) -> None:
        if self.etcd is None:
            for name in ("advertise", "etcd_user_file", "etcd_ca", "etcd_cert", "etcd_key"):
                if value := getattr(self, name):
                    raise InvalidArgumentError(name, value, "none without discover=etcd://...")
            return
        if self.address:
            wanted = "none, since discover finds the peers"
            raise InvalidArgumentError("address", self.address, wanted)
        listen = self.listen_endpoint
        if self.advertise and listen is None:
            raise InvalidArgumentError("advertise", self.advertise, "none without listen=HOST:PORT")
        if listen is not None and is_any_host(self.advertised(listen).host):
            wanted = "an address that others reach, here or as advertise=HOST:PORT"
            argument = "advertise" if self.advertise else "listen"
            raise InvalidArgumentError(argument, str(listen), wanted)


class TLSContexts:
    """TLS contexts of a process, renewed for the next connection after their files were replaced.

    If the new files cannot be read or do not match, as between the renewal of a key and that of its
    certificate, the previous contexts stay in use, with a warning.
    """

    def __init__(self, config: NixlConfig) -> None:
        self._config = config
        self._renews = config.uses_tls
        self._state = self._stat_files()
        self._contexts = tls_contexts(config)
        self._refused: object = None  # state of the files that the log has called unusable
        self._threads = DaemonThreads("kvxfer-tls-files", 1)
        self._reading: Future[None] | None = None

    async def client(self) -> ssl.SSLContext | None:
        """Get the context for a connection to a peer; None without TLS."""
        await self._renew()
        return self._contexts[0]

    async def server(self) -> ssl.SSLContext | None:
        """Get the context for a connection of a peer; None without TLS."""
        await self._renew()
        return self._contexts[1]

    def close(self) -> None:
        """Read no more files."""
        self._renews = False
        self._threads.shutdown()

    async def _renew(self) -> None:
        if not self._renews:
            return
        if self._reading is None or self._reading.done():
            self._reading = self._threads.submit(self._read)
        reading = asyncio.wrap_future(self._reading)
        reading.add_done_callback(fetch_error)
        await asyncio.wait([reading], timeout=RENEW_S)

    def _read(self) -> None:
        if (state := self._stat_files()) == self._state:  # later changes are read the next time
            return
        try:
            self._contexts = tls_contexts(self._config)
        except InvalidArgumentError as exc:
            if state != self._refused:
                logger.warning("replaced TLS files cannot be used, keeping the old ones: %s", exc)
            self._refused = state
            return
        self._state = state
        logger.info("TLS files were replaced: new connections use the new certificate")

    def _stat_files(self) -> list[tuple[int, ...] | None]:
        """Return what identifies the present version of each file, without reading it."""
        config, found = self._config, list[tuple[int, ...] | None]()
        for path in (config.tls_cert, config.tls_key, config.tls_ca) if config.uses_tls else ():
            found.append(None)
            with contextlib.suppress(OSError, ValueError):
                at = Path(path).stat()
                found[-1] = at.st_dev, at.st_ino, at.st_size, at.st_mtime_ns, at.st_ctime_ns
        return found


def tls_contexts(config: NixlConfig) -> tuple[ssl.SSLContext, ssl.SSLContext] | tuple[None, None]:
    """Make the TLS contexts for connections to peers and from peers; `(None, None)` without TLS.

    The certificate of a peer must name the host that we connect to.

    Raises:
        InvalidArgumentError: A file cannot be read, or is not a PEM file of its kind.
    """
    if not config.uses_tls:
        return None, None
    both = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    for context in both:
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        load_certificates(context, "tls", config.tls_ca, config.tls_cert, config.tls_key)
    return both
