"""Checks of arguments at the public boundary, which also convert them to plain values.

Arithmetic in a caller's `np.int8` would overflow. So numbers are converted here, once: behind a
public function there are only `int`, `float` and int64 arrays. A value that cannot be converted
raises an `InvalidArgumentError` that names the argument, the value and the rule.
"""

import operator
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sized
from collections.abc import Set as AbstractSet
from numbers import Real
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvxfer.errors import InvalidArgumentError

T = TypeVar("T")

INT64_MAX = int(np.iinfo(np.int64).max)


def require_integer(
    name: str, value: object, *, minimum: int = 0, maximum: int = INT64_MAX, expected: str = ""
) -> int:
    """Convert an integer of any type, such as `np.int8(3)`; refuse a bool."""
    number = value if type(value) is int else _index(value)
    if number is None or not minimum <= number <= maximum:
        raise InvalidArgumentError(name, value, expected or _bounds(minimum, maximum))
    return number


def require_positive(name: str, value: object) -> int:
    """Convert a count, a positive integer."""
    return require_integer(name, value, minimum=1)


def set_counts(instance: object, *names: str, optional: bool = False) -> None:
    """Convert count fields of a frozen dataclass in its `__post_init__`; `optional` allows None."""
    for name in names:
        value = getattr(instance, name)
        if value is not None or not optional:
            object.__setattr__(instance, name, require_positive(name, value))


def require_timeout(name: str, value: object) -> float | None:
    """Convert a timeout in seconds; None, for no limit, stays None."""
    expected = "seconds, 0 or more, or None"
    return None if value is None else require_number(name, value, expected)


def require_number(name: str, value: object, expected: str = "seconds, 0 or more") -> float:
    """Convert a real number of at least 0; cap it, even infinity, at `threading.TIMEOUT_MAX`."""
    number: Any = value if isinstance(value, Real) else -1
    if isinstance(value, bool) or not number >= 0:
        raise InvalidArgumentError(name, value, expected)
    return float(min(number, threading.TIMEOUT_MAX))


def require_text(name: str, value: object) -> str:
    """Check that a value is text that UTF-8 can encode, i.e. without lone surrogates."""
    if not isinstance(value, str):
        raise InvalidArgumentError(name, value, "text")
    try:
        value.encode()
    except UnicodeEncodeError as exc:
        raise InvalidArgumentError(name, value, "text that UTF-8 can encode") from exc
    return str.__str__(value)  # a plain `str` even of a subclass such as `np.str_`


def require_texts(name: str, values: Any) -> tuple[str, ...]:
    """Check a sequence of texts; refuse a single text, although it is a sequence of letters."""
    require_sequence(name, values, "a sequence of texts")
    return tuple(require_text(f"{name}[{index}]", value) for index, value in enumerate(values))


def require_flag(name: str, value: object) -> bool:
    """Check a boolean."""
    if not isinstance(value, (bool, np.bool_)):
        raise InvalidArgumentError(name, value, "True or False")
    return bool(value)


def require_instance(name: str, value: object, kind: type) -> None:
    """Check the type of an argument."""
    if not isinstance(value, kind):
        raise InvalidArgumentError(name, value, _with_article(kind))


def require_iterable(name: str, value: Iterable[T]) -> list[T]:
    """Convert any iterable argument to a list."""
    try:
        return list(value)
    except TypeError as exc:
        raise InvalidArgumentError(name, value, "a collection") from exc


def require_sequence(name: str, value: Any, expected: str = "a sequence") -> None:
    """Check that an argument is a sequence: its elements can be counted and read repeatedly.

    Lists, tuples and arrays pass; text does not, nor does a generator, which can be read only once.
    """
    if isinstance(value, (list, tuple)):
        return
    others = (str, bytes, bytearray, memoryview, Mapping, AbstractSet, np.dtype)
    has_length = isinstance(value, Sized) and getattr(value, "ndim", 1) != 0
    if isinstance(value, others) or not hasattr(value, "__getitem__") or not has_length:
        raise InvalidArgumentError(name, value, expected)


def require_instances(name: str, values: Any, kind: type, *, at_least_one: bool = False) -> None:
    """Check the type of every element of a sequence."""
    require_sequence(name, values, f"a sequence, each element {_with_article(kind)}")
    if at_least_one and not len(values):
        raise InvalidArgumentError(name, values, f"at least one {kind.__name__}")
    for index, value in enumerate(values):
        require_instance(f"{name}[{index}]", value, kind)


def require_one_per_group(name: str, values: Any, num_groups: int, *, what: str = "one") -> None:
    """Check that a sequence has an element for each KV-cache group."""
    expected = f"{what} for each of {num_groups} groups"
    require_sequence(name, values, expected)
    if len(values) != num_groups:
        raise InvalidArgumentError(name, values, expected)


def require_integers(name: str, values: ArrayLike, *, dtype: Any = np.int64) -> NDArray[Any]:
    """Convert a one-dimensional array of integers to `dtype`; copy only if necessary."""
    wanted = "integers in one dimension"
    if isinstance(values, bytearray):  # numpy reads its bytes as numbers
        raise InvalidArgumentError(name, values, wanted)
    try:
        array = np.asarray(values)
    except Exception as exc:  # a ragged list, device memory, or any error of `__array__`
        raise InvalidArgumentError(name, values, wanted) from exc
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise InvalidArgumentError(name, values, f"{wanted}, not {array.dtype} in {array.ndim}")
    if array.dtype == dtype:
        return array
    limits = np.iinfo(dtype)
    if array.size and not limits.min <= int(array.min()) <= int(array.max()) <= limits.max:
        raise InvalidArgumentError(name, values, f"numbers that fit in {np.dtype(dtype)}")
    return array.astype(dtype)


def find_repeated(values: Iterable[T]) -> T | None:
    """Find the first value that occurs more than once, else None; hash each value only once."""
    return next((value for value, count in Counter(values).items() if count > 1), None)


def _index(value: Any) -> int | None:
    """Read a value as an integer; None if it is not one."""
    if isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool"):
        return None
    try:
        return int(operator.index(value))
    except Exception:  # noqa: BLE001 - if `__index__` raises, this is not a number
        return None


def _with_article(kind: type) -> str:
    article = "an" if kind.__name__[0] in "AEIO" else "a"
    return f"{article} {kind.__name__}"


def _bounds(minimum: int, maximum: int) -> str:
    if maximum < INT64_MAX:
        return f"a whole number from {minimum} to {maximum}"
    return "a positive integer" if minimum == 1 else f"a whole number, {minimum} or more"
