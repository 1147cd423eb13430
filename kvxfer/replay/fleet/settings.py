"""Fleet to simulate: its holders and engines, as `--fleet` names them."""

from typing import Literal

import msgspec

from kvxfer.backends.nixl import NixlConfig
from kvxfer.backends.nixl.discovery import LEASE_S
from kvxfer.checks import require_integer, require_number
from kvxfer.errors import InvalidArgumentError
from kvxfer.settings import convert_settings
from kvxfer.units import ByteSize

Routing = Literal["spread", "prefix"]

COUNTS = ("holders", "engines", "replicas", "groups", "rack", "connections", "max_connections")
MAX_COUNT = 10**6


class Fleet(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fleet of engines, each with host memory of its own, above holders that they share.

    Attributes:
        holders: Processes that hold blocks.
        engines: Engines.
        capacity: Memory of a holder.
        engine_capacity: Host memory of an engine, in front of the holders.
        replicas: Holders that each block is stored at.
        groups: Groups that holders and engines are divided into; a group shares nothing with
            another one.
        rack: Holders in a rack, which fail together. Placement does not know them.
        connections: Connections of an engine to a holder: 1 where NIXL moves the bytes, up to 5
            through sockets.
        max_connections: Most connections of a holder.
        lease_s: Seconds after which a holder that failed has left the list of peers.
        routing: Engine of a request: any one, or the one that has most of its prompt.

    Raises:
        InvalidArgumentError: Names the size that cannot be used, and its value.
    """

    holders: int = 1000
    engines: int = 10_000
    capacity: ByteSize = ByteSize(64 << 30)
    engine_capacity: ByteSize = ByteSize(4 << 30)
    replicas: int = 1
    groups: int = 1
    rack: int = 40
    connections: int = 1
    max_connections: int = NixlConfig(address="localhost:1").max_connections
    lease_s: float = LEASE_S
    routing: Routing = "spread"

    def __post_init__(self) -> None:
        """Check what the types do not say."""
        for name in COUNTS:
            require_integer(name, getattr(self, name), minimum=1, maximum=MAX_COUNT)
        require_number("lease_s", self.lease_s)
        for name, most, what in (
            ("groups", min(self.holders, self.engines), "as many as holders and engines"),
            ("replicas", self.holders // self.groups, "as many as a group has holders"),
            ("rack", self.holders, "as many as holders"),
        ):
            if getattr(self, name) > most:
                raise InvalidArgumentError(name, getattr(self, name), f"at most {most}, {what}")


def parse_fleet(text: str) -> Fleet:
    """Make a fleet of a text such as `holders=1000,engines=10000`.

    Raises:
        InvalidArgumentError: There is no such size, or it is out of range.
    """
    settings = {name: value for name, _, value in (part.partition("=") for part in text.split(","))}
    return convert_settings("fleet", settings, Fleet, what="sizes of a fleet", shown_as=text)
