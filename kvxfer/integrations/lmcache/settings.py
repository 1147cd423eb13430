"""Settings of the adapter: the `adapter_params` of LMCache's configuration."""

from collections.abc import Mapping
from typing import Any

import msgspec

from kvxfer.errors import InvalidArgumentError
from kvxfer.settings import Seconds, convert_settings
from kvxfer.storage.keys import GroupIdentity, Namespace
from kvxfer.units import ByteSize

LAYOUT = "LMCache objects in pieces, form 1"

UNIT_BYTES = 4096
"""The last piece of an object is padded to a multiple of this many bytes."""


class AdapterSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of `KVXferL2Adapter`.

    Attributes:
        backend: URL or mapping of a backend, or several, fastest first.
        revision: Name of the weights, and of all else that changes keys and values, such as a
            `serde`: LMCache passes only the name of the model.
        timeout_s: Deadline of a store, a lookup or a load, in seconds.
        pause_s: How long the backend is not called after a call missed the deadline, in seconds.
        piece: Bytes of the pieces that objects are stored in.
        staging: Bytes of the buffers that pieces pass through, half of them for loads; at least two
            pieces for each tier.
        capacity: Bytes that LMCache may fill before it evicts globally; by default no limit, since
            the backend evicts by itself. LMCache's quotas need no limit.
        close_timeout_s: Deadline of closing.
    """

    backend: str | dict[str, Any] | list[str | dict[str, Any]]
    revision: str
    timeout_s: Seconds = 30.0
    pause_s: Seconds = 10.0
    piece: ByteSize = ByteSize(4 << 20)
    staging: ByteSize = ByteSize(256 << 20)
    capacity: ByteSize = ByteSize(0)
    close_timeout_s: Seconds = 10.0

    @classmethod
    def parse(cls, params: Mapping[str, Any]) -> "AdapterSettings":
        """Read and check the parameters that LMCache passes on.

        Raises:
            InvalidArgumentError: A parameter is missing, unknown or invalid.
        """
        settings = convert_settings("adapter_params", params, cls, what="settings of the adapter")
        if not settings.revision:
            rule = "a name for the weights, such as their commit, quantization, overrides and serde"
            raise InvalidArgumentError("revision", settings.revision, rule)
        if settings.piece % UNIT_BYTES:
            raise InvalidArgumentError("piece", settings.piece, f"a multiple of {UNIT_BYTES} bytes")
        if settings.staging < 4 * settings.piece:
            wanted = f"at least {4 * settings.piece} bytes, four pieces"
            raise InvalidArgumentError("staging", settings.staging, wanted)
        return settings

    @property
    def namespace(self) -> Namespace:
        """Namespace of the objects of all models."""
        return Namespace(
            model="lmcache",
            revision=self.revision,
            layout=LAYOUT,
            groups=(GroupIdentity(page_sizes_bytes=(UNIT_BYTES,)),),
            blocks_per_chunk=self.piece // UNIT_BYTES,
        )
