"""Configuration of Mooncake Store: which master, and the time that its calls may take."""

import socket
from typing import TYPE_CHECKING, Literal

from kvxfer import runtime
from kvxfer.checks import require_number, require_positive
from kvxfer.configuration import Configuration
from kvxfer.endpoint import Endpoint
from kvxfer.errors import BackendUnavailableError, InvalidArgumentError
from kvxfer.extras import require_extra
from kvxfer.runtime import CLOSE_TIMEOUT_S
from kvxfer.storage.integrity import Integrity
from kvxfer.storage.staging_memory import DEFAULT_STAGING_BYTES
from kvxfer.units import ByteSize

if TYPE_CHECKING:
    from mooncake.store import MooncakeDistributedStore, ReplicateConfig

EXTRA = "mooncake"
HANDSHAKE = "P2PHANDSHAKE"
"""Metadata service of clusters without one: clients ask each other."""

NONSENSE = bytes(64)

_TIMES = ("timeout_s", "lookup_timeout_s", "retry_after_s")


class MooncakeConfig(Configuration, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Configuration of `mooncake://host:port`.

    Attributes:
        address: `host:port` of the master.
        metadata: Metadata service of the cluster, such as `http://10.0.0.5:8080/metadata`; by
            default the clients ask each other.
        host: Host by which other clients reach this process; by default the address from which
            the master is reached.
        protocol: Transport of the bytes.
        devices: Network cards for RDMA, with commas between; chosen by Mooncake by default.
        replicas: Copies of each block, in the memory of different processes.
        integrity: `fast` stores an XXH3 checksum with every block and verifies it before the
            block is read; `off` does neither.
        staging: Bytes of registered memory for blocks on their way; raised to two of the largest
            chunk.
        timeout_s: Time for one call of the client, which moves a quarter of `staging` at most; half
            of it at most is waited until the client is free.
        lookup_timeout_s: Time for a lookup; after it every block is a miss.
        retry_after_s: Time for which a master that has failed is left alone.
        close_timeout_s: Time that closing waits for calls that still run.

    Raises:
        InvalidArgumentError: Names the parameter that cannot be used, and its value.
    """

    address: str
    metadata: str = HANDSHAKE
    host: str = ""
    protocol: Literal["tcp", "rdma"] = "tcp"
    devices: str = ""
    replicas: int = 1
    integrity: Integrity = Integrity.FAST
    staging: ByteSize = ByteSize(DEFAULT_STAGING_BYTES)
    timeout_s: float = 10.0
    lookup_timeout_s: float = 2.0
    retry_after_s: float = 5.0
    close_timeout_s: float = CLOSE_TIMEOUT_S

    def __post_init__(self) -> None:
        """Check what can be checked without a connection."""
        super().__post_init__()
        self.integrity.require_keyless()
        if not self.master.port:
            raise InvalidArgumentError("address", self.address, "the port of the master")
        if "@" in self.metadata or not self.metadata:
            wanted = f"a URL without credentials, or {HANDSHAKE}"
            raise InvalidArgumentError("metadata", self.metadata.rpartition("@")[2], wanted)
        require_positive("replicas", self.replicas)
        for name in _TIMES:
            if not require_number(name, getattr(self, name)):
                raise InvalidArgumentError(name, getattr(self, name), "seconds, more than 0")
        require_number("close_timeout_s", self.close_timeout_s)

    @property
    def master(self) -> Endpoint:
        """The master."""
        return Endpoint.parse("address", self.address)

    def require_answer(self) -> None:
        """Check that the master answers, within `lookup_timeout_s`; blocks.

        It is sent what no protocol has, and hangs up, unless it is frozen: then its kernel accepts
        connections, and nobody reads.

        Raises:
            BackendUnavailableError: It does not answer.
        """
        try:
            with socket.create_connection(
                (self.master.host, self.master.port), self.lookup_timeout_s
            ) as connection:
                connection.sendall(NONSENSE)
                connection.recv(1)
        except ConnectionResetError:
            pass  # an answer, too
        except OSError as exc:
            raise BackendUnavailableError(f"mooncake://{self.address}: {exc}") from exc

    def require_mooncake(self) -> None:
        """Check that Mooncake is installed, and can be imported.

        Raises:
            MissingExtraError: It is not installed.
            BackendUnavailableError: A library that it needs is not there.
        """
        require_extra(EXTRA, "mooncake", what="mooncake://")
        try:
            import mooncake.store  # noqa: F401 - only whether it can be
        except ImportError as exc:
            raise BackendUnavailableError(f"mooncake cannot be imported: {exc}") from exc

    def open_store(self) -> "MooncakeDistributedStore":
        """Connect a client of Mooncake that has no memory of its own; blocks.

        Raises:
            BackendUnavailableError: It cannot be connected.
        """
        from mooncake.store import MooncakeDistributedStore

        # Without an answer `setup` holds the interpreter lock for half a minute and more.
        self.require_answer()
        store = MooncakeDistributedStore()
        host = self.host or _local_host(self.master)
        code = store.setup(host, self.metadata, 0, 0, self.protocol, self.devices, self.address)
        if code:
            raise BackendUnavailableError(f"mooncake://{self.address} cannot be reached ({code})")
        return store

    def replication(self) -> "ReplicateConfig":
        """Make the setting of a store: how many copies, none of them pinned."""
        from mooncake.store import ReplicateConfig

        setting = ReplicateConfig()
        setting.replica_num = self.replicas
        return setting


def _local_host(master: Endpoint) -> str:
    """Find the address of this machine from which a master is reached; nothing is sent.

    Raises:
        BackendUnavailableError: The host is not known, or there is no way to it.
    """
    try:
        [(family, _, _, _, address), *_] = socket.getaddrinfo(
            master.host, master.port, type=socket.SOCK_DGRAM
        )
        with runtime.open_socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as exc:
        raise BackendUnavailableError(f"no way to {master}: {exc}") from exc
