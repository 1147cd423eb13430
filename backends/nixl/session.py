"""Session of two authenticated peers: keys of the control and data connections."""

import enum
import hmac
from dataclasses import dataclass, field

from kvxfer.backends.nixl.frames import FrameKeys
from kvxfer.backends.nixl.messages import Attach
from kvxfer.errors import HandshakeError


class Role(enum.Enum):
    """Role of a process in a connection."""

    ASKING = b"asking"
    SERVING = b"serving"

    @property
    def other(self) -> "Role":
        """Role of the other side."""
        return Role.SERVING if self is Role.ASKING else Role.ASKING


def mac(key: bytes, purpose: str, *parts: bytes) -> bytes:
    """Compute the HMAC-SHA256 over a purpose and parts, with the length of each.

    Returns:
        32 bytes.
    """
    sized = (len(part).to_bytes(8, "big") + part for part in (purpose.encode(), *parts))
    return hmac.digest(key, b"".join(sized), "sha256")


@dataclass(slots=True, repr=False)
class Session:
    """Session: one control connection and its data connections.

    Attributes:
        role: Role of this process.
        session_id: The holder's nonce.
        key: 32 bytes that only the two sides know; hidden in `repr`, and so in logs.
        last_serial: Serial of the latest data connection; 0 before the first.
    """

    role: Role
    session_id: bytes
    key: bytes
    last_serial: int = field(default=0, init=False)

    def frame_keys(self, serial: int = 0) -> FrameKeys:
        """Derive the keys of a data connection; for 0, those of the control connection itself."""
        number = serial.to_bytes(8, "big")
        sending, receiving = self.role, self.role.other
        return FrameKeys(
            sending=mac(self.key, "frames", sending.value, number),
            receiving=mac(self.key, "frames", receiving.value, number),
        )

    def attach(self) -> Attach:
        """Make the first message of the next data connection.

        These messages must arrive in the order in which they were made.
        """
        self.last_serial += 1
        return Attach(
            session=self.session_id, serial=self.last_serial, mac=self._mac(self.last_serial)
        )

    def admit(self, attach: Attach, peer: str) -> None:
        """Check the first message of a data connection to the holder.

        Args:
            attach: The message; its `session` was used to find this object.
            peer: Address of the sender, for the error.

        Raises:
            HandshakeError: The message was made without the key of this session, or was used
                before.
        """
        serial = attach.serial
        known = 0 < serial < 1 << 63 and hmac.compare_digest(attach.mac, self._mac(serial))
        if not known or attach.session != self.session_id:
            raise HandshakeError(peer, "session key", "that of the session", "another one")
        if serial <= self.last_serial:
            raise HandshakeError(peer, "serial", f"above {self.last_serial}", str(serial))
        self.last_serial = serial

    def _mac(self, serial: int) -> bytes:
        return mac(self.key, "attach", self.session_id, serial.to_bytes(8, "big"))
