"""Check of Mooncake Store: whether its client can be used here, and its master answers."""

import msgspec

from kvxfer.backends.mooncake import MooncakeConfig
from kvxfer.doctor.finding import Check, Examined, Finding
from kvxfer.errors import BackendUnavailableError
from kvxfer.extras import MissingExtraError

_MISSES = "Every lookup there is a miss, and nothing is stored."


def check_mooncake(config: MooncakeConfig, *, timeout_s: float) -> Finding:
    """Check that the master answers; it is not asked which processes have memory.

    Args:
        config: Where the master is.
        timeout_s: Time for its answer.
    """
    at = Examined(Check.MOONCAKE, f"mooncake://{config.address}")
    try:
        config.require_mooncake()
        msgspec.structs.replace(config, lookup_timeout_s=timeout_s).require_answer()
    except MissingExtraError as exc:
        return at.error(str(exc), why=_MISSES, mend="pip install 'kvxfer[mooncake]'")
    except BackendUnavailableError as exc:
        mend = f"mooncake_master -rpc_port={config.master.port}  # at {config.master.host}"
        return at.error(str(exc), why=_MISSES, mend=mend)
    return at.ok("the master answers")
