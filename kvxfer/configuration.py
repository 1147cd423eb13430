"""Configurations: structs that check and convert their fields, however they are constructed."""

import contextlib
import enum
import math
from collections.abc import Callable
from functools import cache, partial
from threading import TIMEOUT_MAX
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import msgspec

from kvxfer.checks import (
    INT64_MAX,
    require_flag,
    require_instance,
    require_integer,
    require_number,
    require_text,
)
from kvxfer.errors import InvalidArgumentError
from kvxfer.text import find_control
from kvxfer.units import ByteSize

NUMBER = "a number, 0 or more"
LONGEST_S = (2**31 - 1) / 1000  # 24 days: the longest timeout of a socket, milliseconds in a C int


class Configuration(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base class of backend configurations, which checks the type of every field.

    msgspec checks what it decodes, such as the parameters of a URL, but not values that Python code
    passes. Numbers of any type are converted to the declared one. A float is finite and at least 0;
    a timeout is capped at `LONGEST_S`. Text is accepted neither for a number nor for an enum
    member, nor with control characters. A subclass with its own `__post_init__` calls this first.

    Raises:
        InvalidArgumentError: A field has the wrong type; the error names it and its value.
    """

    def __post_init__(self) -> None:
        """Convert every field to its declared type, or raise an error that names it."""
        for name, kind in _types_of(type(self)):
            msgspec.structs.force_setattr(self, name, _convert(name, getattr(self, name), kind))

    def _require_positive(self, *names: str) -> None:
        """Refuse 0 in fields that are counts or seconds; None passes."""
        for name in names:
            value = getattr(self, name)
            wanted = "seconds, more than 0" if isinstance(value, float) else "a positive integer"
            if value is not None and value <= 0:
                raise InvalidArgumentError(name, value, wanted)


@cache
def _types_of(config_type: type[Configuration]) -> list[tuple[str, Any]]:
    return [(field.name, field.type) for field in msgspec.structs.fields(config_type)]


def _convert(name: str, value: Any, kind: Any) -> Any:
    """Convert the value of a field to its declared type."""
    if get_origin(kind) in {Union, UnionType}:
        if value is None and NoneType in get_args(kind):
            return None
        (kind,) = [each for each in get_args(kind) if each is not NoneType]
    if get_origin(kind) is Literal or isinstance(kind, enum.EnumMeta):
        return _one_of(name, value, get_args(kind) or tuple(kind))
    if kind in _CONVERTERS:
        return _CONVERTERS[kind](name, value)
    require_instance(name, value, get_origin(kind) or kind)
    return value


def _one_of(name: str, value: object, allowed: tuple[object, ...]) -> object:
    found = [each for each in allowed if isinstance(value, type(each)) and each == value]
    if not found:
        raise InvalidArgumentError(name, value, f"one of {', '.join(map(str, allowed))}")
    return found[0]


def _number(name: str, value: Any) -> float:
    number = require_number(name, value, NUMBER)
    with contextlib.suppress(OverflowError):  # an int too large for a float
        if math.isfinite(value):
            return min(number, LONGEST_S if name.endswith("timeout_s") else TIMEOUT_MAX)
    raise InvalidArgumentError(name, value, NUMBER)


def _text(name: str, value: object) -> str:
    text = require_text(name, value)
    if control := find_control(text):
        raise InvalidArgumentError(name, value, f"text without {control}")
    return text


def _size(name: str, value: object) -> ByteSize:
    return ByteSize(require_integer(name, value, expected="a whole number of bytes, 0 or more"))


_CONVERTERS: dict[Any, Callable[[str, object], object]] = {
    bool: require_flag,
    str: _text,
    float: _number,
    int: partial(require_integer, minimum=-INT64_MAX, expected="a whole number"),
    ByteSize: _size,
}
