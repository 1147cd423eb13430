"""Configuration of the host memory backend."""

import msgspec

from kvxfer.checks import require_number
from kvxfer.copy_engine.devices import DeviceCopyEngine
from kvxfer.copy_engine.engine import CopyEngine
from kvxfer.copy_engine.method_table import MethodTable
from kvxfer.storage.eviction.retaining_policy import BoundedConfig
from kvxfer.storage.integrity import Integrity, MemoryIntegrity

DEFAULT_SCRUB_MIB_PER_S = 64.0
"""Rate of the scrubber: half a percent of a core, and all of 100 GiB in 27 minutes."""


class HostConfig(BoundedConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Configuration of `host://`, with the attributes of `BoundedConfig`.

    Attributes:
        capacity: Bytes of host memory, tags included; reserved when the backend opens.
        integrity: See `MemoryIntegrity`; `fenced` by default, which is `full` where the memory is
            `shared`: other processes write there.
        methods: Fragment sizes below which a kernel copies to and from a GPU, such as
            `to_device=28KiB,to_host=0`. Measured when a GPU's caches are attached, if not given.
        scrub_mib_per_s: MiB that are read in a second, in the background, to find blocks that have
            changed in memory; 0 for none. See `Scrubber`.
        shared: Whether other processes can map the memory, as those that `kvxfer serve --pool`
            serves; it is not in huge pages then.
    """

    integrity: MemoryIntegrity = MemoryIntegrity.FENCED
    methods: str | None = None
    scrub_mib_per_s: float = DEFAULT_SCRUB_MIB_PER_S
    shared: bool = False

    def __post_init__(self) -> None:
        given: object = self.integrity
        if isinstance(given, Integrity):  # as other backends have it
            given.require_keyless()
            self._set_integrity(MemoryIntegrity(given.value))
        super().__post_init__()
        if self.shared and self.integrity is MemoryIntegrity.FENCED:
            self._set_integrity(MemoryIntegrity.FULL)
        require_number("scrub_mib_per_s", self.scrub_mib_per_s, "MiB, 0 or more")
        MethodTable.parse(self.methods)

    def _set_integrity(self, integrity: MemoryIntegrity) -> None:
        msgspec.structs.force_setattr(self, "integrity", integrity)

    def open_copy_engine(self) -> CopyEngine:
        """Open the engine that copies to and from the pool."""
        return DeviceCopyEngine(methods=MethodTable.parse(self.methods))
