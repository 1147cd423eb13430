"""Settings of the storage: the value of `--hicache-storage-backend-extra-config`."""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from kvxfer.checks import require_text
from kvxfer.connect import require_revision
from kvxfer.errors import InvalidArgumentError
from kvxfer.settings import Seconds, convert_settings
from kvxfer.storage.staging_memory import DEFAULT_STAGING_BYTES
from kvxfer.tiering import TierTimeouts
from kvxfer.units import MAX_DURATION_S, ByteSize

SGLANG_FIELDS = frozenset({
    "backend_name", "module_path", "class_name", "interface_v1", "tp_lcm_size", "file_storage_path",
    "prefetch_threshold", "prefetch_timeout_base", "prefetch_timeout_per_ki_token",
    "prefetch_timeout_max", "hicache_storage_pass_prefix_keys",
})  # fmt: skip
"""Fields of SGLang's own in the same mapping.

Source: `parse_storage_backend_extra_config` and `StorageBackendFactory` of SGLang.
"""


class StorageSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the storage.

    Attributes:
        backend: A URL or a mapping, or several of them for tiers, as in `kvxfer.connect`.
        revision: Revision of the weights, which SGLang does not pass on; required if pages outlive
            the process.
        timeout_s: Deadline of a call by SGLang, in seconds: of a batch of pages, or of a lookup.
        pause_s: How long the backend is not called after a call missed its deadline, in seconds.
        staging: Bytes of memory that pages pass through between host pools and backend.
    """

    backend: str | dict[str, Any] | list[str | dict[str, Any]]
    revision: str = ""
    timeout_s: Seconds = TierTimeouts().move_s
    pause_s: Annotated[float, msgspec.Meta(ge=0, le=MAX_DURATION_S)] = TierTimeouts().pause_s
    staging: ByteSize = ByteSize(4 * DEFAULT_STAGING_BYTES)


def read_settings(extra_config: Mapping[str, Any] | None) -> StorageSettings:
    """Read and check the settings.

    Raises:
        InvalidArgumentError: `interface_v1` is not set, a setting is unknown or invalid, or blocks
            outlive the process without a `revision`; the error names it.
    """
    given = dict(extra_config or {})
    if not given.get("interface_v1"):
        rule = "1: with SGLang's older interface, every page would be copied once more"
        raise InvalidArgumentError("interface_v1", given.get("interface_v1"), rule)
    ours = {name: value for name, value in given.items() if name not in SGLANG_FIELDS}
    settings = convert_settings(
        "extra_config", ours, StorageSettings, what="settings of the storage", strict=True
    )
    require_text("revision", settings.revision)
    require_revision("revision", settings.revision, settings.backend)
    return settings
