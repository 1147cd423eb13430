"""Roster: the holders that are announced, as far as is known."""

import logging
from collections.abc import Callable, Mapping

from kvxfer.backends.nixl.discovery.announcement import Announcement, decode_announcement
from kvxfer.backends.nixl.wire.messages import OLDEST_VERSION, PROTOCOL_VERSION
from kvxfer.endpoint import Endpoint
from kvxfer.errors import InvalidArgumentError
from kvxfer.text import printable

MAX_PEERS = 4096
"""Most holders that are known; any more are ignored."""

MAX_WARNED = 64
"""Most entries at a time that the log has said it skips."""

_MAX_CHARACTERS = 300
_MAX_SHOWN = 8

logger = logging.getLogger(__name__)


class Roster:
    """Roster of the holders of one namespace, from entries that anybody may have written.

    Whoever lists the entries can lose sight of them: after such a time, holders that are not listed
    any more are kept until they had the time to announce themselves again, since the list may
    have lost them, and not they their blocks.

    Args:
        namespace: Fingerprint of the namespace; holders that announce another one are left out.
        require: Checks that an address may be connected to; raises `InvalidArgumentError` if not.
        grace_s: Time that holders have to announce themselves again.

    Attributes:
        endpoints: Endpoints of the holders, in a new tuple after each change.
    """

    def __init__(
        self, namespace: str, require: Callable[[Endpoint], None], *, grace_s: float
    ) -> None:
        self.endpoints: tuple[Endpoint, ...] = ()
        self._namespace = namespace
        self._require = require
        self._grace_s = grace_s
        self._present: dict[bytes, Endpoint] = {}
        self._doubtful: set[bytes] = set()
        self._settles_at = 0.0
        self._was_listed = False
        self._warned: set[bytes] = set()
        self._is_full = False

    def replace(self, entries: Mapping[bytes, bytes], now: float) -> None:
        """Take a list of all entries, by name: the first one, or one after a loss of sight."""
        self._settles_at = now + self._grace_s if self._was_listed else now
        self._was_listed = True
        self._warned &= entries.keys()
        self._doubtful.clear()
        for name in [each for each in self._present if each not in entries]:
            self._drop(name, now)
        for name, data in entries.items():
            self._take(name, data, now)
        self._publish()

    def change(self, changes: Mapping[bytes, bytes | None], now: float) -> None:
        """Take entries that are new or changed; None where one is gone."""
        for name, data in changes.items():
            if data is None:
                self._drop(name, now)
                self._warned.discard(name)
            else:
                self._take(name, data, now)
        self._publish()

    def settle(self, now: float) -> None:
        """Forget holders that had their time; not while nobody can tell who is there."""
        if self._doubtful and now >= self._settles_at:
            for name in self._doubtful:
                del self._present[name]
            self._doubtful.clear()
            self._publish()

    def _drop(self, name: bytes, now: float) -> None:
        if name in self._present and now < self._settles_at:
            self._doubtful.add(name)
        else:
            self._present.pop(name, None)
            self._doubtful.discard(name)

    def _take(self, name: bytes, data: bytes, now: float) -> None:
        try:
            endpoint, announcement = decode_announcement(name, data)
            self._check(endpoint, announcement)
        except InvalidArgumentError as exc:
            self._drop(name, now)
            self._skip(name, exc)
            return
        self._warned.discard(name)
        if announcement.namespace not in ("", self._namespace):
            self._present.pop(name, None)
            self._doubtful.discard(name)
        elif name in self._present or len(self._present) < MAX_PEERS:
            self._present[name] = endpoint
            self._doubtful.discard(name)
        elif not self._is_full:
            self._is_full = True
            logger.warning("%d holders are announced; any more are ignored", MAX_PEERS)

    def _check(self, endpoint: Endpoint, announcement: Announcement) -> None:
        self._require(endpoint)
        oldest, newest = announcement.oldest_protocol, announcement.protocol
        if oldest > PROTOCOL_VERSION or newest < OLDEST_VERSION:
            ours = f"one of {OLDEST_VERSION} to {PROTOCOL_VERSION}, which this process speaks"
            raise InvalidArgumentError("protocol", f"{oldest} to {newest}", ours)

    def _skip(self, name: bytes, exc: InvalidArgumentError) -> None:
        if name not in self._warned and len(self._warned) < MAX_WARNED:
            self._warned.add(name)
            shown = name[:_MAX_CHARACTERS].decode("ascii", "backslashreplace")
            logger.warning(
                "skipped what is announced as %s: %s",
                *(printable(text, _MAX_CHARACTERS) for text in (shown, exc)),
            )

    def _publish(self) -> None:
        if (endpoints := tuple(self._present.values())) != self.endpoints:
            self.endpoints = endpoints
            shown = ", ".join(map(str, endpoints[:_MAX_SHOWN]))
            more = ", ..." if len(endpoints) > _MAX_SHOWN else ""
            logger.info("%d holders are announced: %s%s", len(endpoints), shown, more)
