"""Checks of places for blocks: stores in files, buckets, peers, pools and Mooncake Store."""

import errno
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from kvxfer import runtime
from kvxfer.backends.file import BlockTree, Digester, FileConfig, read_count
from kvxfer.backends.file.io import open_engine, probe_direct
from kvxfer.backends.file.space import MIN_FREE_FILES
from kvxfer.backends.host.available_memory import read_mounts
from kvxfer.backends.mooncake import MooncakeConfig
from kvxfer.backends.nixl import NixlConfig, PeerProbe, probe_peer, tls_contexts
from kvxfer.backends.nixl.discovery import EtcdError, decode_announcement, look_once
from kvxfer.backends.object import Bucket, ObjectConfig, RequestFailedError
from kvxfer.backends.pool import PoolConfig
from kvxfer.backends.pool.messages import peer_of
from kvxfer.connect import BackendChoice, parse_backend
from kvxfer.doctor.finding import MAX_CHARACTERS, Finding, capacity_of, error, ok, warning
from kvxfer.endpoint import Endpoint
from kvxfer.errors import (
    BackendUnavailableError,
    HandshakeError,
    InvalidArgumentError,
    PeerError,
    PeerTimeoutError,
    ProtocolError,
)
from kvxfer.extras import MissingExtraError
from kvxfer.settings import shown
from kvxfer.storage.integrity import read_secret
from kvxfer.text import printable
from kvxfer.units import format_size

_IN_MEMORY = frozenset({"tmpfs", "ramfs"})
_OF_CONTAINERS = frozenset({"overlay", "aufs"})


def require_openable(argument: str, backend: BackendChoice) -> msgspec.Struct:
    """Return the parameters of a backend that can be opened, judging by what is on this machine.

    Raises:
        InvalidArgumentError: A parameter, the folder or the secret cannot be used.
        MissingExtraError: A package is not installed.
        BackendUnavailableError: A client cannot be used.
    """
    _, config = parse_backend(backend)
    findings = []
    if isinstance(config, (FileConfig, ObjectConfig, NixlConfig)):
        findings.append(check_secret(config))
    if isinstance(config, FileConfig):
        findings.append(check_folder(config, may_be_full=True))
    elif isinstance(config, ObjectConfig):
        config.open_store()
    elif isinstance(config, MooncakeConfig):
        config.require_mooncake()
    for finding in findings:
        if finding.mend:
            wanted = f"a backend that can be opened: {finding.found}"
            raise InvalidArgumentError(argument, shown(backend), wanted)
    return config


def check_folder(config: FileConfig, *, may_be_full: bool = False) -> Finding:
    """Check that the folder of a store exists or can be made, and can be written to.

    On a full disk, a store that has blocks makes room as it is opened; so one `may_be_full`.
    """
    path, folder = Path(config.path), existing_folder(config)
    why = "The store cannot be opened, or every store fails: nothing is kept, and nothing is found."
    try:
        for each in (path, *path.absolute().parents):
            if each.is_symlink() and not each.exists():
                target = os.path.realpath(each)
                found = f"{each} leads to {target}, which does not exist"
                return error(found, why=why, mend=f"mount its disk, or: mkdir -p {target}")
        if not folder.is_dir():
            return error(f"{folder} is no folder", why=why, mend=f"mv {folder} {folder}.old")
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as exc:
        if may_be_full and exc.errno in runtime.FULL_ERRORS:
            return ok(f"{folder} is on a full disk")
        found = f"{folder} cannot be written to: {exc.strerror}"
        room, own = f"df -h {folder}; df -i {folder}", f"install -d -m 700 -o $(id -un) {path}"
        return error(found, why=why, mend=room if exc.errno == errno.ENOSPC else own)
    if folder != path:
        return ok(f"will be made in {folder}")
    return ok(f"can be written to, namespaces: {len([*BlockTree(path).namespaces()])}")


def check_secret(config: FileConfig | ObjectConfig | NixlConfig) -> Finding:
    """Check that the secret and the packages for the configured integrity, or for peers, exist."""
    mend = "head -c 32 /dev/urandom > SECRET_FILE; chmod 600 SECRET_FILE"
    try:
        if isinstance(config, NixlConfig):
            tls_contexts(config)
            return ok("no secret is needed" if config.read_secret() is None else "a secret is set")
        mend = f"pip install 'kvxfer[keyed,sealed]'; {mend}"
        Digester(config.integrity, read_secret(config.secret_file), config.tenant)
    except (InvalidArgumentError, MissingExtraError) as exc:
        why = "It cannot be opened without its secret and the package for it."
        return error(str(exc), why=why, mend=mend)
    return ok(f"integrity={config.integrity.value}")


def check_space(config: FileConfig) -> Finding:
    """Check that the file system has room for the capacity."""
    found = os.statvfs(existing_folder(config))
    if not found.f_blocks:
        return ok("the file system does not say how much it has")
    free = found.f_bavail * found.f_frsize
    used = read_count(Path(config.path)) or 0
    usable = min(config.capacity, used + max(0, free - config.min_free))
    shown = f"{format_size(free)} free, {format_size(used)} of the capacity in use"
    if usable >= config.capacity:
        return ok(f"{shown}, {format_size(config.capacity)} asked for")
    limits = f"{shown}; with min_free={format_size(config.min_free)} no more than "
    limits += f"{format_size(usable)} of {format_size(config.capacity)} can be used"
    why = "Blocks are evicted long before the capacity is reached, or none is stored at all."
    if not usable:
        return error(limits, why=why, mend=f"df {existing_folder(config)}  # and make room")
    return warning(limits, why=why, mend=capacity_of(usable))


def check_inodes(config: FileConfig) -> Finding:
    """Check that the file system has room for as many files as the capacity has blocks."""
    found = os.statvfs(existing_folder(config))
    if not found.f_files:
        return ok("the file system makes as many as are needed")
    path, needed = Path(config.path), MIN_FREE_FILES
    namespaces = BlockTree(path).namespaces() if path.is_dir() else ()
    sizes = [size for each in namespaces for size in each.chunk_sizes]
    if sizes:
        missing_bytes = config.capacity - (read_count(path) or 0)
        needed = max(needed, missing_bytes * len(sizes) // sum(sizes))
    if found.f_favail >= needed:
        return ok(f"{found.f_favail} files can be made")
    return warning(
        f"{found.f_favail} files can be made, {needed} are needed",
        why="Each block is a file. Without inodes blocks are evicted, or none is stored, although "
        "there is space.",
        mend="mkfs.ext4 -i 65536 ...  # or XFS, which makes them as needed",
    )


def check_medium(config: FileConfig, *, root: Path = Path("/")) -> Finding:
    """Check that files outlive a restart of the machine, and the container."""
    folder = existing_folder(config).resolve()
    kind = point = ""
    for mount in read_mounts(root):
        if folder.is_relative_to(mount.point) and len(mount.point) >= len(point):
            kind, point = mount.kind, mount.point
    if kind in _IN_MEMORY:
        return warning(
            f"{kind} at {point}",
            why="Files in memory are lost when the machine restarts, and take memory that host:// "
            "could use without a file system.",
            mend=f"host://?{capacity_of(config.capacity)}",
        )
    if kind in _OF_CONTAINERS:
        return warning(
            f"{kind} at {point}, the layer of a container",
            why="Its files are gone with the container, and every access goes through another file "
            "system.",
            mend=f"docker run -v {config.path}:{config.path} ...",
        )
    return ok(f"{kind or 'unknown'} at {point or '/'}")


def check_direct_io(config: FileConfig) -> Finding:
    """Check that the file system supports O_DIRECT."""
    if config.direct == "off":
        return ok("not asked for")
    if alignment := probe_direct(existing_folder(config)):
        return ok(f"works, aligned to {alignment} bytes")
    return warning(
        "the file system refuses O_DIRECT",
        why="Every block is copied through the page cache, which takes memory from the engine.",
        mend="a folder on ext4 or XFS; direct=off if this is intended",
    )


def check_io_uring(config: FileConfig) -> Finding:
    """Check that the kernel permits io_uring."""
    if config.engine == "posix":
        return ok("not asked for")
    try:
        open_engine("uring").close()
    except InvalidArgumentError as exc:
        make = error if config.engine == "uring" else warning
        return make(
            exc.expected,
            why="Small blocks are read and written with a system call each, several times slower.",
            mend="sysctl kernel.io_uring_disabled=0  # in a container also: --security-opt "
            "seccomp=PROFILE; engine=posix if this is intended",
        )
    return ok("works")


def existing_folder(config: FileConfig) -> Path:
    """Find the folder of the store, or the nearest one above it that exists."""
    path = Path(config.path)
    return next(each for each in (path, *path.absolute().parents) if os.access(each, os.F_OK))


PROBE = "kvxfer-doctor"
"""Name, below the prefix, of an object that is made and removed again."""

_NO_BLOCKS = "Every lookup there is a miss, and nothing is stored."
_CREDENTIALS = "docs/objects.md#credentials  # in the environment of the engine, never in the URL"


def check_bucket(config: ObjectConfig) -> Finding:
    """Check that a bucket can be read and written: an object is made twice, and removed."""
    try:
        return runtime.run(_try_bucket(config))
    except MissingExtraError as exc:
        return error(str(exc), why=_NO_BLOCKS, mend="pip install 'kvxfer[object]'")
    except (BackendUnavailableError, InvalidArgumentError) as exc:
        return error(str(exc), why="An engine does not start.", mend=_CREDENTIALS)
    except RequestFailedError as exc:
        mend = _CREDENTIALS if exc.denied else f'kvxfer ls "{config.url}?..."  # when it answers'
        return error(str(exc), why=_NO_BLOCKS, mend=mend)


async def _try_bucket(config: ObjectConfig) -> Finding:
    bucket = Bucket(config)
    began_at = runtime.monotonic()
    try:
        await bucket.list_folder(config.prefix)
        answer_s = runtime.monotonic() - began_at
        name, text = f"{config.prefix}{PROBE}", memoryview(b"made by kvxfer doctor")
        try:
            # If an earlier run left the object, the first call creates nothing, as intended.
            overwrites = await bucket.create(name, text) and await bucket.create(name, text)
        except RequestFailedError as exc:
            why = "Blocks that other engines stored are hits; this one stores nothing."
            if exc.denied:
                mend = "allow the engine's role to put objects below the prefix"
                return warning(f"may be read only: {exc}", why=why, mend=mend)
            return error(f"stores nothing: {exc}", why=why, mend="mend what it names")
        try:
            await bucket.delete(name)
        except RequestFailedError as exc:
            return warning(
                f"objects cannot be removed: {exc}",
                why="Corrupt blocks stay, and are misses until a lifecycle rule removes them.",
                mend="allow the engine's role to delete objects below the prefix",
            )
    finally:
        await bucket.aclose(config.timeout_s)
    if overwrites:
        return warning(
            "the server ignores If-None-Match",
            why="Every store asks first, a request more for each block.",
            mend="a release of the server that honours If-None-Match: *",
        )
    return ok(f"answers within {answer_s * 1e3:.0f} ms; blocks can be read and stored")


STEPS_OF_DISCOVERY = 5
"""Steps that share the timeout: credentials, a token, the list, the end, and one to spare."""
MAX_SHOWN = 8
"""Maximum number of holders that a finding names."""

_NO_PEERS = "A starting engine finds no peers, and so no blocks; a running one keeps its peers."


def check_discovery(config: NixlConfig, timeout_s: float) -> Finding:
    """Check that etcd answers, and that the holders announced there can be used."""
    etcd = config.etcd
    assert etcd is not None
    files = {"cacert": etcd.ca, "cert": etcd.cert, "key": etcd.key}
    given = "".join(f" --{name} {path}" for name, path in files.items() if path)
    mend = f"etcdctl --endpoints {etcd.endpoints[0]}{given} get --prefix {etcd.prefix}"
    try:
        entries = runtime.run(look_once(etcd, timeout_s / STEPS_OF_DISCOVERY))
    except EtcdError as exc:
        return error(str(exc), why=_NO_PEERS, mend=mend)
    except MissingExtraError as exc:
        return error(str(exc), why=_NO_PEERS, mend="pip install 'kvxfer[etcd]'")
    except InvalidArgumentError as exc:
        return error(str(exc), why=_NO_PEERS, mend=f"{exc.argument}={exc.expected}")
    holders: list[Endpoint] = []
    reasons: list[str] = []
    for name, data in entries.items():
        try:
            endpoint, _ = decode_announcement(name, data)
            config.require_proof("peer", endpoint)
            holders.append(endpoint)
        except InvalidArgumentError as exc:
            reasons.append(printable(exc, MAX_CHARACTERS))
    if reasons:
        return warning(
            f"{len(reasons)} of {len(entries)} entries are skipped; the first: {reasons[0]}",
            why="Entries that name no holder, or one that must not be connected to, are not used.",
            mend=mend,
        )
    if not holders:
        mend = f"kvxfer serve --listen HOST:PORT --capacity SIZE --discover {etcd}"
        return warning("answers, and no holder is announced there", why=_NO_PEERS, mend=mend)
    shown = ", ".join(map(str, holders[:MAX_SHOWN])) + (", ..." if len(holders) > MAX_SHOWN else "")
    return ok(f"answers; {len(holders)} holders are announced: {shown}")


def check_mooncake(config: MooncakeConfig) -> Finding:
    """Check that the master answers; it is not asked which processes have memory."""
    try:
        config.require_mooncake()
        config.require_answer()
    except MissingExtraError as exc:
        return error(str(exc), why=_NO_BLOCKS, mend="pip install 'kvxfer[mooncake]'")
    except BackendUnavailableError as exc:
        mend = f"mooncake_master -rpc_port={config.master.port}  # at {config.master.host}"
        return error(str(exc), why=_NO_BLOCKS, mend=mend)
    return ok("the master answers")


_NO_POOL = "Every lookup there is a miss: blocks of earlier engines are computed again."


def check_pool(config: PoolConfig) -> Finding:
    """Check that a process of this user serves the pool, without asking for its model."""
    mend = "run the engine as the user of the pool"
    with runtime.open_socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(config.timeout_s)
        try:
            connection.connect(config.path)
            process, user = peer_of(connection)
            if user in (os.geteuid(), 0):
                return ok(f"served by process {process}")
            found = f"its user is {user}, that of this process is {os.geteuid()}"
        except PermissionError:
            found = f"this user may not open {config.path}"
        except BlockingIOError:  # its queue is full
            found = f"the process that serves {config.path} accepts no connection"
            mend = "restart the process that serves the pool"
        except OSError as exc:
            found = f"no process serves {config.path}: {exc.strerror or exc}"
            mend = f"kvxfer serve --pool {config.path} --capacity SIZE"
    return error(found, why=_NO_POOL, mend=mend)


_NO_PEER = "Every lookup at this peer is a miss, and every store fails; the log says it once."

_PEER_MENDS = {
    "secret": "the same secret_file, or KVXFER_SECRET, on both sides",
    "version": "the same release of kvxfer on both sides: pip install -U kvxfer",
    "authentication": "nixl://{endpoint}?secret_file=FILE, and --secret-file FILE at the peer",
}


def check_peer(config: NixlConfig, endpoint: Endpoint) -> Iterator[Finding]:
    """Check that a peer can be reached and accepts this process, and judge the carrier."""
    try:
        probe = runtime.run(probe_peer(config, endpoint))
    except (PeerError, InvalidArgumentError, BackendUnavailableError) as exc:
        yield describe_peer_failure(endpoint, exc)
        return
    if probe.namespace is None:
        yield ok("reached and accepted; no engine has settled its model yet")
        return
    assert probe.round_trip_s is not None
    model, fingerprint = probe.namespace.model, probe.namespace.fingerprint
    yield ok(
        f"reached by {probe.carrier}, round trip {probe.round_trip_s * 1e3:.2f} ms; "
        f"{model!r}, namespace {fingerprint}"
    )
    yield _judge_carrier(config, probe).of("peer-carrier")


def limit_handshake(config: NixlConfig, timeout_s: float) -> NixlConfig:
    """Limit the time for each step of a handshake to `timeout_s`, if more is configured."""
    limit_s = min(timeout_s, config.handshake_timeout_s)
    return msgspec.structs.replace(config, handshake_timeout_s=limit_s)


def describe_peer_failure(endpoint: Endpoint, exc: Exception) -> Finding:
    """Make the finding of a peer that cannot be reached, or refuses this process."""
    return error(str(exc), why=_NO_PEER, mend=_mend_peer(endpoint, exc))


def _judge_carrier(config: NixlConfig, probe: PeerProbe) -> Finding:
    """Judge the carrier: between machines without RDMA, there are only sockets."""
    if probe.carrier != "socket":
        return ok(f"{probe.carrier}")
    if config.transport == "socket":
        return ok("socket, as asked for")
    if not probe.is_here:
        return ok("socket: there is no network card for RDMA, or the peer does not use NIXL")
    return warning(
        "socket, between two processes of one machine",
        why="The kernel could copy from one process to the other, several times faster. It "
        "refuses, or NIXL is missing on one side: the processes have other users or containers.",
        mend="docker run --pid=host --cap-add=SYS_PTRACE ...  # both; pip install nixl",
    )


def _mend_peer(endpoint: Endpoint, exc: Exception) -> str:
    if isinstance(exc, HandshakeError) and exc.field in _PEER_MENDS:
        return _PEER_MENDS[exc.field].format(endpoint=endpoint)
    if isinstance(exc, ProtocolError):
        return f"the address of a kvxfer peer: something else listens at {endpoint}"
    if isinstance(exc, PeerTimeoutError):
        return f"restart the peer, or let the firewall pass TCP to {endpoint}"
    if isinstance(exc, PeerError):
        return f"kvxfer serve --listen {endpoint} --capacity SIZE  # on that machine"
    if isinstance(exc, BackendUnavailableError):
        return f"nixl://{endpoint}?transport=auto"
    return f"nixl://{endpoint}?secret_file=FILE"
