"""Check of discovery: whether etcd answers, and who is announced there."""

from kvxfer import runtime
from kvxfer.backends.nixl import NixlConfig
from kvxfer.backends.nixl.discovery import EtcdError, decode_announcement, look_once
from kvxfer.doctor.finding import Check, Examined, Finding
from kvxfer.endpoint import Endpoint
from kvxfer.errors import InvalidArgumentError
from kvxfer.extras import MissingExtraError
from kvxfer.text import printable

MAX_SHOWN = 8
"""Most holders that a finding names."""

_MAX_CHARACTERS = 200
_NO_PEERS = "An engine that starts finds no peers, and no blocks; one that runs keeps its peers."


def check_discovery(config: NixlConfig, *, timeout_s: float) -> Finding:
    """Check that etcd answers, and that what is announced there can be used.

    Args:
        config: Configuration with `discover`.
        timeout_s: Time for each step.
    """
    at = Examined(Check.DISCOVERY, config.discover)
    etcd = config.etcd
    assert etcd is not None
    try:
        entries = runtime.run(look_once(etcd, timeout_s))
    except EtcdError as exc:
        mend = f"etcdctl --endpoints {etcd.endpoints[0]} get --prefix {etcd.prefix}"
        return at.error(str(exc), why=_NO_PEERS, mend=mend)
    except MissingExtraError as exc:
        return at.error(str(exc), why=_NO_PEERS, mend="pip install 'kvxfer[etcd]'")
    except InvalidArgumentError as exc:
        return at.error(str(exc), why=_NO_PEERS, mend=f"{exc.argument}={exc.expected}")
    holders: list[Endpoint] = []
    reasons: list[str] = []
    for name, data in entries.items():
        try:
            endpoint, _ = decode_announcement(name, data)
            config.require_proof("peer", endpoint)
            holders.append(endpoint)
        except InvalidArgumentError as exc:
            reasons.append(printable(exc, _MAX_CHARACTERS))
    if reasons:
        return at.warning(
            f"{len(reasons)} of {len(entries)} entries are skipped; the first: {reasons[0]}",
            why="What cannot be read as a holder that may be connected to is not used.",
            mend=f"etcdctl --endpoints {etcd.endpoints[0]} get --prefix {etcd.prefix}",
        )
    if not holders:
        return at.warning(
            "answers, and no holder is announced there",
            why=_NO_PEERS,
            mend=f"kvxfer serve --listen HOST:PORT --capacity SIZE --discover {etcd}",
        )
    shown = ", ".join(map(str, holders[:MAX_SHOWN])) + (", ..." if len(holders) > MAX_SHOWN else "")
    return at.ok(f"answers; {len(holders)} holders are announced: {shown}")
