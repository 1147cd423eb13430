"""Settings of the connector: `kv_connector_extra_config`."""

from collections.abc import Mapping
from ipaddress import ip_address, ip_network
from typing import Any

import msgspec

from kvxfer.backends.nixl import Endpoint, NixlConfig
from kvxfer.checks import require_number, require_text, require_texts
from kvxfer.endpoint import MAX_PORT
from kvxfer.errors import InvalidArgumentError
from kvxfer.integrations.vllm.common.settings import OFFLOAD_SETTINGS
from kvxfer.lending.handover import reachable_host
from kvxfer.settings import convert_settings


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of `KVXferConnector`; all other names are those of `NixlConfig`.

    The last four are for this engine's own tiers: `KVXferOffloadingSpec` checks them.
    """

    exchange: NixlConfig
    advertise: str = ""  # host by which other machines reach `listen`; by default that of `listen`
    ask_timeout_s: float = 3.0  # how long a request of D waits for P's answer to its ticket
    # Networks, such as `10.0.0.0/8`, and hosts that a ticket may name; empty for all. With neither
    # a secret nor TLS, only loopback addresses in any case.
    allow: tuple[str, ...] = ()
    revision: str = ""  # of the weights; by default, the one that is found
    on_failure: str = "recompute"  # or `fail` requests whose pages do not arrive
    backend: Any = None
    max_load_ratio: float | None = None
    prefill_tokens_per_s: float | None = None
    purge_on_reset: bool | None = None

    def __post_init__(self) -> None:
        """Check each setting."""
        require_text("advertise", self.advertise)
        require_text("revision", self.revision)
        require_texts("allow", self.allow)
        require_number("ask_timeout_s", self.ask_timeout_s)
        for index, rule in enumerate(self.allow):
            _require_rule(f"allow[{index}]", rule)
        if self.on_failure not in ("recompute", "fail"):
            raise InvalidArgumentError("on_failure", self.on_failure, "'recompute' or 'fail'")
        for name in OFFLOAD_SETTINGS[1:]:
            if getattr(self, name) is not None and not self.backend:
                raise InvalidArgumentError(name, getattr(self, name), "no value without `backend`")
        reachable_host(self.exchange, self.advertise)

    @classmethod
    def parse(cls, extra: Mapping[str, Any]) -> "Settings":
        """Read the settings; errors as `convert_settings`."""
        names = cls.__struct_fields__[1:]
        ours = {name: extra[name] for name in names if name in extra}
        theirs = {name: value for name, value in extra.items() if name not in ours}
        argument, what = "kv_connector_extra_config", "settings of the connector"
        ours["exchange"] = convert_settings(
            argument, theirs, NixlConfig, what=what, shown_as=extra, beside=names
        )
        return convert_settings(argument, ours, cls, what=what, shown_as=extra)

    def of_replica(self, index: int, num_workers: int) -> "Settings":
        """Return the settings of a data-parallel replica, on the ports after those before it."""
        exchange = self.exchange.at_rank(index * num_workers)
        reachable_host(exchange, self.advertise, num_workers)
        if (listen := exchange.listen_endpoint) is not None and num_workers > 1:
            for name, port in (("listen", listen.port), ("data_port", exchange.data_port)):
                if port + num_workers - 1 > MAX_PORT:
                    rule = f"{num_workers} ports, one for each worker, up to {MAX_PORT}"
                    raise InvalidArgumentError(name, getattr(exchange, name), rule)
        return msgspec.structs.replace(self, exchange=exchange)

    @property
    def asking(self) -> NixlConfig:
        """Configuration of the scheduler, which asks but moves no blocks, and so needs no NIXL."""
        return msgspec.structs.replace(self.reading, transport="socket", integrity="full")

    @property
    def reading(self) -> NixlConfig:
        """Configuration of a worker that lends nothing."""
        return msgspec.structs.replace(self.exchange, listen="", data_port=0, capacity=None)

    def require_allowed(self, endpoint: Endpoint) -> None:
        """Refuse an endpoint that a ticket may not send us to."""
        is_proven = endpoint.is_loopback or self.exchange.proves_peers
        if not is_proven or (
            self.allow and not any(_matches(endpoint.host, r) for r in self.allow)
        ):
            rule = "an address that `allow` names, and a loopback one without a secret or TLS"
            raise InvalidArgumentError("kv_transfer_params.remote_host", str(endpoint), rule)


def _require_rule(name: str, rule: str) -> None:
    if "/" not in rule and rule.strip() == rule and rule:
        return
    try:
        ip_network(rule)
    except ValueError as exc:
        expected = f"a network such as '10.0.0.0/8', or the name of a host ({exc})"
        raise InvalidArgumentError(name, rule, expected) from exc


def _matches(host: str, rule: str) -> bool:
    try:
        return ip_address(host) in ip_network(rule)
    except ValueError:
        return host == rule
