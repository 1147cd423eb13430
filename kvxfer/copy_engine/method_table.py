"""Method table: the faster way to copy fragments, by direction and size."""

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import log
from typing import Self

from kvxfer.errors import InvalidArgumentError
from kvxfer.units import ByteSize

MEASURED_BYTES = (4 << 10, 8 << 10, 16 << 10, 32 << 10, 64 << 10)
"""Fragment sizes that `MethodTable.measure` measures."""

ROUNDS = 3
"""Number of measurements of each size, the best of which counts."""


class CopyMethod(enum.Enum):
    """Method by which the fragments of a batch are copied."""

    BATCH = "batch"
    """The device's copy engines, in one call of its driver."""
    KERNEL = "kernel"
    """The device's processors, by `FragmentKernel`."""


class Way(enum.Enum):
    """Direction of a copy, seen from the GPU's memory."""

    TO_DEVICE = "to_device"
    TO_HOST = "to_host"


def _default() -> Mapping[Way, int]:
    # Source: https://github.com/vllm-project/vllm/pull/42212, measured on H100: batched copies of
    # less than 28 KiB to the device reach a sixth of the bus's throughput; those to the host need
    # no kernel. Crossover on another GPU: https://github.com/vllm-project/vllm/issues/57555
    return {Way.TO_DEVICE: 28 << 10, Way.TO_HOST: 0}


@dataclass(frozen=True, slots=True)
class MethodTable:
    """Table of the copy method for each direction and fragment size.

    Attributes:
        kernel_below: For each way, the mean size of fragments, in bytes, below which they are
            copied by kernel; larger ones by batch. 0: all by batch. Defaults measured on an H100.

    Raises:
        InvalidArgumentError: A way is missing, or a size is negative.
    """

    kernel_below: Mapping[Way, int] = field(default_factory=_default)

    def __post_init__(self) -> None:
        if set(self.kernel_below) != set(Way) or min(self.kernel_below.values()) < 0:
            raise InvalidArgumentError("kernel_below", self.kernel_below, "0 or more for each Way")

    def choose(self, way: Way, fragment_bytes: float) -> CopyMethod:
        """Choose the method for fragments of a mean size."""
        is_small = fragment_bytes < self.kernel_below[way]
        return CopyMethod.KERNEL if is_small else CopyMethod.BATCH

    @classmethod
    def parse(cls, text: str | None) -> Self | None:
        """Parse a table such as `to_device=28KiB,to_host=0`; ways not named keep their default.

        None, for no table, stays None.

        Raises:
            InvalidArgumentError: A way is unknown or named twice, or a size is not valid.
        """
        if text is None:
            return None
        found: dict[Way, int] = {}
        for part in text.split(","):
            name, _, size = (word.strip() for word in part.partition("="))
            if name not in {way.value for way in Way} or Way(name) in found:
                expected = "each of to_device and to_host once at most, as 'to_device=28KiB'"
                raise InvalidArgumentError("methods", part, expected)
            found[Way(name)] = _parse_size(name, size)
        return cls({**_default(), **found})

    def __str__(self) -> str:
        return ",".join(f"{way.value}={_format_size(self.kernel_below[way])}" for way in Way)

    @classmethod
    def measure(cls, seconds: Callable[[Way, CopyMethod, int], float]) -> Self:
        """Find the sizes at which the two methods take equally long.

        Each combination is measured three times, in rounds through all of them, and its best time
        counts: other load on the machine only adds time, and rarely in every round. The result is
        the size with the least loss: the product, over all sizes, of the ratio of the chosen
        method's time to the other's. So a wrong measurement moves the result only past sizes
        at which the methods differ less; on a tie, fewer sizes go by kernel.

        Args:
            seconds: Copies fragments of a size in bytes and returns the seconds that took. All
                measurements of one size must copy the same amount.
        """
        best: dict[tuple[Way, CopyMethod, int], float] = {}
        for _ in range(ROUNDS):
            for way in Way:
                for num_bytes in MEASURED_BYTES:
                    for method in CopyMethod:
                        case = way, method, num_bytes
                        best[case] = min(best.get(case, float("inf")), seconds(*case))
        return cls({way: _crossover(way, best) for way in Way})


def _crossover(way: Way, best: Mapping[tuple[Way, CopyMethod, int], float]) -> int:
    """Find the size halfway between the last one copied by kernel and the next; 0 if none is."""
    lost, least, crossover = 0.0, 0.0, 0
    for num_bytes in MEASURED_BYTES:
        by_kernel = best[way, CopyMethod.KERNEL, num_bytes]
        by_batch = best[way, CopyMethod.BATCH, num_bytes]
        lost += log(by_kernel / by_batch)
        if lost < least:
            least, crossover = lost, num_bytes * 3 // 2
    return crossover


def _parse_size(name: str, text: str) -> int:
    if text == "0":
        return 0
    try:
        return int(ByteSize.parse(text))
    except InvalidArgumentError as exc:
        raise InvalidArgumentError(name, text, "0 (never), or a size such as '28KiB'") from exc


def _format_size(num_bytes: int) -> str:
    return f"{num_bytes >> 10}KiB" if num_bytes and not num_bytes % 1024 else str(num_bytes)
