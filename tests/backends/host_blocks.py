"""Stored blocks of a host backend, in its memory."""

from kvxfer import BlockKey, Descriptors
from kvxfer.backends.host import HostBackend
from kvxfer.testing.payloads import read_payloads, write_payloads


def locate(backend: HostBackend, key: BlockKey) -> Descriptors:
    sight = backend.peek([key], fenced=True)  # without a checksum, too
    assert sight is not None
    assert sight.blocks is not None, "the block is not stored"
    return sight.blocks


def flip(backend: HostBackend, key: BlockKey, at: int = 5) -> None:
    """Flip a bit of a stored block behind the backend's back."""
    blocks = locate(backend, key)
    [payload] = read_payloads(blocks)
    write_payloads(blocks, [payload[:at] + bytes([payload[at] ^ 1]) + payload[at + 1 :]])
