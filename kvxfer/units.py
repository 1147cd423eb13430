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
        size = cls(0)
        if match and match[2] in _UNITS:
            number = int(match[1]) if match[1].isdigit() else float(match[1])
            size = cls(number * _UNITS[match[2]])
        if size < 1:
            raise InvalidArgumentError("size", text, "a positive size such as '512MiB' or '4GiB'")
        return size
