"""Quantities as people write them."""

import re
from typing import Self

from kvxfer.errors import InvalidArgumentError

_UNITS = {"": 1, "B": 1}
for _power, _prefix in enumerate("KMGT", start=1):
    _UNITS[f"{_prefix}B"] = 1000**_power
    _UNITS[f"{_prefix}iB"] = 1024**_power


class ByteSize(int):
    """A number of bytes, also from text such as `4GiB`, `1.5 GB` or `65536`."""

    @classmethod
    def parse(cls, text: str | int) -> Self:
        """Read a size.

        Raises:
            InvalidArgumentError: The text is not a positive size with a known unit.
        """
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(text))
        if not match or match[2] not in _UNITS or not float(match[1]):
            raise InvalidArgumentError("size", text, "a positive size such as '512MiB' or '4GiB'")
        number = int(match[1]) if match[1].isdigit() else float(match[1])
        return cls(number * _UNITS[match[2]])
