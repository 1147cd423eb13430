"""A real etcd for tests."""

import contextlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc
from aetcd import rpc

from tests.backends.outages import Program
from tests.ports import free_ports

PROGRAM = shutil.which("etcd")
HOST = "127.0.0.1"
PREFIX = "/kvxfer/test"
LIMIT_S = 30.0


class EtcdServer(Program):
    """One etcd in a process of its own, in a cluster if it has one; started at once."""

    def __init__(
        self,
        folder: Path,
        *,
        scheme: str = "http",
        options: Sequence[str] = (),
        credentials: Any = None,
        name: str = "test",
        port: int = 0,
        cluster: Mapping[str, str] | None = None,
    ) -> None:
        self.port = port or free_ports(2)
        self.url = f"etcd://{HOST}:{self.port}{PREFIX}"
        self._credentials = credentials
        self._is_alone = cluster is None
        at, peer_at = f"{scheme}://{HOST}:{self.port}", _peer_url(self.port)
        members = [f"{each}={url}" for each, url in (cluster or {name: peer_at}).items()]
        command = [
            *(str(PROGRAM), "--name", name, "--data-dir", str(folder / "data")),
            *("--listen-client-urls", at, "--advertise-client-urls", at),
            *("--listen-peer-urls", peer_at, "--initial-advertise-peer-urls", peer_at),
            *("--initial-cluster", ",".join(members), "--logger", "zap", "--log-level", "error"),
            # So that it elects itself at once, and grants leases of one second.
            *("--heartbeat-interval", "20", "--election-timeout", "200"),
            *options,
        ]
        super().__init__(command, folder)

    def start(self) -> None:
        """Start it; a member answers once most of its cluster has started."""
        super().start()
        if self._is_alone:
            self.wait()

    def wait(self) -> None:
        self.wait_until(self._answers)

    def _answers(self) -> bool:
        try:
            self.call(rpc.KVStub, "Range", rpc.RangeRequest(key=b"ready"))
        except grpc.RpcError as exc:
            return bool(exc.code() != grpc.StatusCode.UNAVAILABLE)  # a refusal is an answer
        return True

    def call(self, stub: Any, method: str, request: Any) -> Any:
        """Make a call, as a user could from a shell."""
        at = f"{HOST}:{self.port}"
        options = [("grpc.use_local_subchannel_pool", 1)]
        with (
            grpc.secure_channel(at, self._credentials, options)
            if self._credentials
            else grpc.insecure_channel(at, options)
        ) as channel:
            return getattr(stub(channel), method)(request, timeout=5)

    def put(self, name: str, value: bytes) -> None:
        """Put an entry under the prefix."""
        request = rpc.PutRequest(key=f"{PREFIX}/{name}".encode(), value=value)
        self.call(rpc.KVStub, "Put", request)

    def entries(self) -> dict[str, bytes]:
        first, end = f"{PREFIX}/".encode(), f"{PREFIX}0".encode()
        found = self.call(rpc.KVStub, "Range", rpc.RangeRequest(key=first, range_end=end)).kvs
        return {entry.key[len(first) :].decode(): entry.value for entry in found}

    def revoke_leases(self) -> None:
        """End all leases, as if their holders had been silent."""
        answer = self.call(rpc.LeaseStub, "LeaseLeases", rpc.LeaseLeasesRequest())
        for lease in answer.leases:
            self.call(rpc.LeaseStub, "LeaseRevoke", rpc.LeaseRevokeRequest(ID=lease.ID))


@contextlib.contextmanager
def etcd_cluster(folder: Path, num_members: int) -> Iterator[list[EtcdServer]]:
    first = free_ports(2 * num_members)
    ports = {f"member-{index}": first + 2 * index for index in range(num_members)}
    cluster = {name: _peer_url(port) for name, port in ports.items()}
    with contextlib.ExitStack() as stack:
        members = []
        for name, port in ports.items():
            (folder / name).mkdir()
            member = EtcdServer(folder / name, name=name, port=port, cluster=cluster)
            members.append(stack.enter_context(member))
        for member in members:
            member.wait()
        yield members


def _peer_url(port: int) -> str:
    return f"http://{HOST}:{port + 1}"
