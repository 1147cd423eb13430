"""Tickets: what P hands to D through a router, in the conventional `kv_transfer_params`.

The fields are those of vLLM's NixlConnector, so that routers pass them on. D gets them from
outside, so nothing in them is trusted. They say where to ask, and for which lease; D finds the
pages by the tokens of its own prompt.

    {"do_remote_decode": true, "do_remote_prefill": false, ...}      router -> P
    {"do_remote_prefill": true, "remote_request_id": TICKET,         P -> router -> D
     "remote_host": HOST, "remote_port": PORT, "tp_size": N, ...}
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvxfer.checks import require_integer
from kvxfer.endpoint import MAX_PORT, Endpoint
from kvxfer.errors import InvalidArgumentError, code_of
from kvxfer.text import printable

MAX_TP_SIZE = 1024
MAX_HOST_CHARACTERS = 255
MAX_SHOWN_CHARACTERS = 80
OVERLAP = "overlap"
"""Transfer mode of a router that asks P and D at the same time, with a ticket of its own making."""

_TICKET = re.compile(r"[0-9A-Za-z_.:-]{16,128}")


@dataclass(frozen=True, slots=True)
class Ticket:
    """Ticket of D: the lease that it may read under, and where P's workers are asked."""

    lease: str  # as P's workers know it
    endpoint: Endpoint  # of P's worker of rank 0; that of rank r listens r ports after it
    overlaps: bool = False  # P may still be computing


def wants_prefill(params: object) -> bool:
    """Whether a request is P's: its pages are to be lent when it is finished."""
    return isinstance(params, Mapping) and params.get("do_remote_decode") is True


def wants_decode(params: object) -> bool:
    """Whether a request is D's: its pages are to be read from P."""
    return isinstance(params, Mapping) and params.get("do_remote_prefill") is True


def lease_of_router(params: Mapping[str, Any]) -> str | None:
    """Return the lease that a router named for an overlapping request; None without one."""
    lease = params.get("remote_request_id")
    return lease if isinstance(lease, str) and _TICKET.fullmatch(lease) else None


def make_params(
    lease: str, endpoint: Endpoint, *, engine_id: str, tp_size: int, num_tokens: int
) -> dict[str, Any]:
    """Build the parameters that P returns for D."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": engine_id,
        "remote_request_id": lease,
        "remote_host": endpoint.host,
        "remote_port": endpoint.port,
        "remote_block_ids": [[0]],  # routers check that there are any
        "remote_num_tokens": num_tokens,
        "tp_size": tp_size,
        "transfer_mode": "pull",
    }


def read_ticket(params: Mapping[str, Any]) -> Ticket:
    """Read the parameters of a request at D; an error names the invalid field."""
    if (lease := lease_of_router(params)) is None:
        rule = "a ticket of 16 to 128 letters, digits or _.:-"
        raise _error("remote_request_id", params.get("remote_request_id"), rule)
    host = params.get("remote_host")
    if not isinstance(host, str) or not 0 < len(host) <= MAX_HOST_CHARACTERS:
        raise _error("remote_host", host, "the name or address of a host")
    port = _integer(params, "remote_port", MAX_PORT)
    try:
        endpoint = Endpoint.parse("remote_host", str(Endpoint(host, port)))
    except InvalidArgumentError as exc:
        raise _error("remote_host", host, "the name or address of a host") from exc
    if "tp_size" in params:
        _integer(params, "tp_size", MAX_TP_SIZE)
    return Ticket(lease, endpoint, overlaps=params.get("transfer_mode") == OVERLAP)


def _integer(params: Mapping[str, Any], name: str, maximum: int) -> int:
    value = params.get(name)
    try:
        return require_integer(name, value, minimum=1, maximum=maximum)
    except InvalidArgumentError as exc:
        raise _error(name, value, f"an integer from 1 to {maximum}") from exc


def _error(name: str, value: object, expected: str) -> InvalidArgumentError:
    """Build an error that shows as much of a stranger's value as fits in a line of the log."""
    shown = code_of(value)
    is_short = len(shown) <= MAX_SHOWN_CHARACTERS and shown.isprintable()
    fit = value if is_short else printable(shown, MAX_SHOWN_CHARACTERS)
    return InvalidArgumentError(f"kv_transfer_params.{name}", fit, expected)
