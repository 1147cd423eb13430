"""NIXL on this machine: its import on first use, and the choice of a carrier for each peer."""

import ctypes
import errno
import importlib
import logging
import logging.config
import os
import threading
from pathlib import Path
from typing import Any, Literal

from kvxfer.backends.nixl.wire.messages import Hello
from kvxfer.errors import BackendUnavailableError
from kvxfer.text import printable

ENVIRONMENT = {
    "UCX_MODULES": "^efa",
    "UCX_LOG_FILE": "stderr",
    "UCX_DEBUG_SIGNO": "0",
    "NIXL_LOG_LEVEL": "WARN",
}
"""Environment variables that are set before the import, unless the user has set them.

UCX's EFA module loads a second copy of libibverbs, which crashes processes at exit. UCX logs to
standard output unless told otherwise. UCX also takes a signal from the process, SIGHUP by default;
from the first such signal on it logs every message.
"""

Carrier = Literal["cma", "rdma", "socket"]
"""`cma`: NIXL lets the kernel copy between the two processes (cross-memory attach). `rdma`: NIXL
lets the network cards copy. `socket`: NIXL can do neither; kvxfer's own TCP carries the bytes."""

PORTS = Path("/sys/class/infiniband")
"""Source: https://www.kernel.org/doc/Documentation/ABI/stable/sysfs-class-infiniband"""

UCX_SETTING = "PROTO_EMULATION_ENABLE=n"
"""Setting that keeps UCX from emulating a read by messages over TCP where it cannot reach a peer's
memory: that is slower than a socket, and has crashed processes."""

_importing = threading.Lock()


def import_nixl(*, otherwise: str) -> Any:
    """Import NIXL; blocks for up to a second the first time. `otherwise` is advice for the user.

    NIXL reconfigures logging when it is imported: that would close the application's handlers,
    silence its logging errors, and write to standard output. This function prevents that; NIXL's
    Python messages go where the application's go.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    with _importing:
        raise_exceptions, configure = logging.raiseExceptions, logging.config.dictConfig

        def configure_others(config: Any) -> None:
            if set(config.get("loggers", ())) != {"nixl"}:
                configure(config)

        logging.config.dictConfig = configure_others
        try:
            return importlib.import_module("nixl")
        except Exception as exc:  # a broken wheel raises what it likes
            reason, _, _ = printable(str(exc) or type(exc).__name__).partition("\\n")
            advice = f"install nixl, or {otherwise}"
            raise BackendUnavailableError(f"NIXL cannot be imported ({reason}); {advice}") from exc
        finally:
            logging.config.dictConfig = configure
            logging.raiseExceptions = raise_exceptions


def nixl_errors(nixl: Any) -> tuple[type[Exception], ...]:
    """List the exceptions that NIXL's calls raise; they have no base class of their own."""
    named = (error for name, error in vars(nixl).items() if name.endswith("Error"))
    return (RuntimeError, *named)


class _IOVector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def identify_host() -> tuple[str, int, str]:
    """Identify this process: `boot_id`, `pid` and `pid_namespace` of a `Hello`."""
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        pid_namespace = str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return "", os.getpid(), ""
    return boot_id, os.getpid(), pid_namespace


def choose_carrier(ours: Hello, theirs: Hello, ports: Path = PORTS) -> Carrier:
    """Choose the carrier for this side's reads from the other side.

    Both sides must have opened their `NixlAgent`, which lets others reach its memory. Whether the
    other side has an active port, too, shows only when it is added to the agent: with `rdma`, be
    prepared for a `PeerLostError`, and then use sockets. `ports` is as for `has_active_port`.
    """
    try:
        import_nixl(otherwise="let peers use sockets")
    except BackendUnavailableError:
        return "socket"
    here, there = ((each.boot_id, each.pid_namespace) for each in (ours, theirs))
    if all(here) and here == there and _may_reach(theirs.pid):
        return "cma"
    return "rdma" if has_active_port(ports) else "socket"


def _may_reach(pid: int) -> bool:
    """Probe for the kernel's permission by a read at address 0: if granted, the error is EFAULT.

    Source: process_vm_readv(2), EPERM, ESRCH and EFAULT.
    """
    read = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)
    if not read:
        return False
    byte = ctypes.create_string_buffer(1)
    local, remote = _IOVector(ctypes.addressof(byte), 1), _IOVector(None, 1)
    read.restype = ctypes.c_ssize_t
    found = read(
        ctypes.c_int(pid), ctypes.byref(local), ctypes.c_ulong(1),
        ctypes.byref(remote), ctypes.c_ulong(1), ctypes.c_ulong(0),
    )  # fmt: skip
    return found >= 0 or ctypes.get_errno() == errno.EFAULT


def has_active_port(ports: Path = PORTS) -> bool:
    """Whether this machine has an active RDMA port."""
    try:
        return any(state.read_text().startswith("4:") for state in ports.glob("*/ports/*/state"))
    except OSError:
        return False


def choose_ucx_settings() -> str:
    """Keep UCX off the network unless a card can do RDMA: it listens there, and trusts anyone."""
    if "UCX_NET_DEVICES" in os.environ or has_active_port():
        return UCX_SETTING
    return f"{UCX_SETTING},NET_DEVICES=lo"
