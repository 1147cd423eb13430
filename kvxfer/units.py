"""Sizes and durations: parsed from text such as `4GiB` or `30d`, and formatted for people."""

import re
from typing import Any, Self

from kvxfer.checks import INT64_MAX
from kvxfer.errors import InvalidArgumentError

_NUMBER = r"\d{1,20}(?:\.\d{1,20})?"
_UNITS = {"": 1, "B": 1}
for _power, _prefix in enumerate("KMGT", start=1):
    _UNITS[f"{_prefix}B"] = 1000**_power
    # A single letter is binary, as in Docker, systemd, Java and the GNU tools.
    for _name in (f"{_prefix}iB", f"{_prefix}i", _prefix, _prefix.lower()):
        _UNITS[_name] = 1024**_power

_SECONDS = {"s": 1, "min": 60, "h": 3600, "d": 86400}

MAX_DURATION_S = 36500 * 86400.0
"""A century: every clock and lock can represent it."""


class ByteSize(int):
    """Number of bytes, also parsed from text such as `4GiB`, `4G`, `1.5 GB` or `65536`."""

    @classmethod
    def parse(cls, text: str | int, *, name: str = "size") -> Self:
        """Parse a positive size with a known unit."""
        match = re.fullmatch(rf"\s*({_NUMBER})\s*([A-Za-z]*)\s*", str(text))
        size = cls(0)
        if match and match[2] in _UNITS:
            number, unit = float(match[1]), _UNITS[match[2]]
            if match[1].isdigit():
                size = cls(int(match[1]) * unit)
            elif unit > 1 or number.is_integer():  # half a byte means a forgotten unit
                size = cls(number * unit)
        if not 1 <= size <= INT64_MAX:
            wanted = "a positive size such as '512MiB' or '4GiB', less than 8388608TiB"
            raise InvalidArgumentError(name, text, wanted)
        return size


def decode_size(kind: type, value: Any) -> Any:
    """Decode a `ByteSize`, as a `dec_hook` of msgspec."""
    if kind is ByteSize:
        return ByteSize.parse(value)
    raise NotImplementedError(kind)


class Duration(float):
    """Number of seconds, also parsed from text such as `30d`, `12h`, `90 s`."""

    @classmethod
    def parse(
        cls,
        text: str,
        *,
        name: str = "duration",
        minimum_s: float = 0.0,
        maximum_s: float = MAX_DURATION_S,
    ) -> Self:
        """Parse a number with a known unit, within bounds."""
        match = re.fullmatch(rf"\s*({_NUMBER})\s*([a-z]+)\s*", text)
        if match is None or match[2] not in _SECONDS:
            raise InvalidArgumentError(name, text, "a number with s, min, h or d, such as '30d'")
        duration = cls(float(match[1]) * _SECONDS[match[2]])
        if not minimum_s <= duration <= maximum_s:
            bounds = f"from {minimum_s:g} s to {format_duration(maximum_s)}"
            raise InvalidArgumentError(name, text, bounds)
        return duration


def format_size(num_bytes: int) -> str:
    """Format a number of bytes with a unit: `1.2 GiB`."""
    size, units = float(num_bytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1023.95 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.1f} {units[0]}" if units[0] != "B" else f"{num_bytes} B"


def format_duration(seconds: float) -> str:
    """Format a duration in its largest whole unit, such as `3 d`; less than a second is `0 s`."""
    for unit, length in reversed(_SECONDS.items()):
        if seconds >= length:
            return f"{seconds // length:.0f} {unit}"
    return "0 s"
