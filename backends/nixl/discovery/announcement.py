"""Announcement: what a holder says of itself where peers are discovered."""

import functools
from typing import Annotated

import msgspec

from kvxfer import runtime
from kvxfer.backends.nixl.wire.messages import OLDEST_VERSION, PROTOCOL_VERSION
from kvxfer.endpoint import Endpoint
from kvxfer.errors import InvalidArgumentError
from kvxfer.extras import installed_version

MAX_ANNOUNCEMENT_BYTES = 4096
"""Longest announcement that is read."""

MAX_NAME_BYTES = 300
"""Longest name of a holder that is read: a host of 253 characters, and a port."""

_Text = Annotated[str, msgspec.Meta(max_length=128)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


@functools.cache
def _release() -> str:
    return installed_version("kvxfer")


class Announcement(msgspec.Struct, frozen=True, kw_only=True):
    """Announcement of a holder, JSON under the holder's address as its name.

    It says nothing secret, and proves nothing: peers prove themselves when they connect. Fields
    that are not known are ignored, so that later releases may add some.

    Attributes:
        capacity: Bytes of memory for blocks; 0 where only the engine knows.
        namespace: Fingerprint of the holder's namespace; empty as long as it takes any.
        started: When the holder began to listen, in seconds since 1970.
        version: Release of kvxfer.
        protocol: Newest version of the protocol that the holder speaks.
        oldest_protocol: Oldest one.
    """

    capacity: _Count = 0
    namespace: _Text = ""
    started: float = msgspec.field(default_factory=runtime.wall_time)
    version: _Text = msgspec.field(default_factory=_release)
    protocol: _Count = PROTOCOL_VERSION
    oldest_protocol: _Count = OLDEST_VERSION

    def encode(self) -> bytes:
        """Encode it as JSON."""
        return msgspec.json.encode(self)


_DECODER = msgspec.json.Decoder(Announcement)


def decode_announcement(name: bytes, data: bytes) -> tuple[Endpoint, Announcement]:
    """Read what may be an announcement; anybody may have written it.

    Args:
        name: Name of the entry, the address at which the holder is reached.
        data: The announcement.

    Raises:
        InvalidArgumentError: It is none; the error says why, in printable characters.
    """
    if len(name) > MAX_NAME_BYTES or len(data) > MAX_ANNOUNCEMENT_BYTES:
        size = f"{len(name)} and {len(data)} bytes"
        wanted = f"at most {MAX_NAME_BYTES} and {MAX_ANNOUNCEMENT_BYTES}"
        raise InvalidArgumentError("name and announcement", size, wanted)
    endpoint = Endpoint.parse("name", name.decode("ascii", "backslashreplace"))
    if str(endpoint).encode() != name or not endpoint.port:
        wanted = "its one form, with a port from 1 on and no zeros before it"
        raise InvalidArgumentError("name", name, wanted)
    try:
        return endpoint, _DECODER.decode(data)
    except (msgspec.MsgspecError, RecursionError) as exc:
        raise InvalidArgumentError("announcement", data[:64], f"an announcement: {exc}") from exc
