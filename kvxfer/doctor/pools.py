"""Check of a host pool that another process holds: its socket, and whose it is."""

import os
import socket

from kvxfer import runtime
from kvxfer.backends.pool import PoolConfig
from kvxfer.backends.pool.messages import peer_of
from kvxfer.doctor.finding import Check, Examined, Finding

_MISSES = "Every lookup there is a miss: what engines before this one computed is computed again."


def check_pool(config: PoolConfig) -> Finding:
    """Check that a process of this user serves the pool; it is not asked for its model."""
    at = Examined(Check.POOL, f"pool://{config.path}")
    serve = f"kvxfer serve --pool {config.path} --capacity SIZE"
    with runtime.open_socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(config.timeout_s)
        try:
            connection.connect(config.path)
        except PermissionError:
            found = f"{config.path} is not for this user"
            return at.error(found, why=_MISSES, mend="run the engine as the user of the pool")
        except OSError as exc:
            found = f"nobody serves {config.path}: {exc.strerror or exc}"
            return at.error(found, why=_MISSES, mend=serve)
        process, user = peer_of(connection)
    if user not in (os.geteuid(), 0):
        found = f"its user is {user}, that of this process is {os.geteuid()}"
        return at.error(found, why=_MISSES, mend="run the engine as the user of the pool")
    return at.ok(f"served by process {process}")
