"""Checks of arguments at the public boundary, where they become plain values.

A computation in a caller's `np.int8` would overflow. So a number is converted here, once, and
nothing behind a public function sees another type than `int`, `float` or an int64 array.
"""

import operator
import threading
from collections import Counter
from collections.abc import Iterable, Mapping
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
    """Convert a whole number of any type, such as `np.int8(3)`; a bool is refused.

    Args:
        name: The argument, for the error.
        value: Value that the caller passed.
        minimum: Smallest number that is accepted.
        maximum: Largest number that is accepted.
        expected: Description of accepted values for the error; by default the bounds.

    Raises:
        InvalidArgumentError: `value` is not a whole number, or out of bounds.
    """
    if type(value) is not int or not minimum <= value <= maximum:
        number = _index(value)
        if number is None or not minimum <= number <= maximum:
            raise InvalidArgumentError(name, value, expected or _bounds(minimum, maximum))
        return number
    return value


def require_positive(name: str, value: object) -> int:
    """Convert a count.

    Raises:
        InvalidArgumentError: `value` is not a positive integer.
    """
    return require_integer(name, value, minimum=1)


def set_counts(instance: object, *names: str, optional: bool = False) -> None:
    """Convert fields of a frozen dataclass that are counts, while it is made.

    Args:
        instance: The dataclass.
        names: Its fields.
        optional: Whether the fields may be None.

    Raises:
        InvalidArgumentError: A field is not a positive integer.
    """
    for name in names:
        value = getattr(instance, name)
        if value is not None or not optional:
            object.__setattr__(instance, name, require_positive(name, value))


def require_timeout(name: str, value: object) -> float | None:
    """Convert a timeout in seconds; None stays None: no limit.

    Raises:
        InvalidArgumentError: `value` is neither None nor a real number of at least 0.
    """
    if value is None:
        return None
    return require_number(name, value, "seconds, 0 or more, or None")


def require_number(name: str, value: object, expected: str = "seconds, 0 or more") -> float:
    """Convert a real number of at least 0; infinity becomes as long as the platform can wait.

    Raises:
        InvalidArgumentError: `value` is not such a number.
    """
    number: Any = value if isinstance(value, Real) else -1
    if isinstance(value, bool) or not number >= 0:
        raise InvalidArgumentError(name, value, expected)
    return float(min(number, threading.TIMEOUT_MAX))


def require_text(name: str, value: object) -> str:
    """Check a text, which must be encodable as UTF-8.

    Raises:
        InvalidArgumentError: `value` is not text, or has half of a surrogate pair.
    """
    if not isinstance(value, str):
        raise InvalidArgumentError(name, value, "text")
    try:
        value.encode()
    except UnicodeEncodeError as exc:
        raise InvalidArgumentError(name, value, "text that can be written in UTF-8") from exc
    return str.__str__(value)  # of a subclass, too, such as `np.str_`


def require_texts(name: str, values: Any) -> tuple[str, ...]:
    """Check a sequence of texts; a single text, a sequence of letters, is refused.

    Raises:
        InvalidArgumentError: `values` is not a sequence, or an element is not text.
    """
    require_sequence(name, values, "a sequence of texts")
    return tuple(require_text(f"{name}[{index}]", value) for index, value in enumerate(values))


def require_flag(name: str, value: object) -> bool:
    """Check a boolean.

    Raises:
        InvalidArgumentError: `value` is not a bool.
    """
    if not isinstance(value, (bool, np.bool_)):
        raise InvalidArgumentError(name, value, "True or False")
    return bool(value)


def require_instance(name: str, value: object, kind: type) -> None:
    """Check the type of an argument.

    Raises:
        InvalidArgumentError: `value` is not a `kind`.
    """
    if not isinstance(value, kind):
        raise InvalidArgumentError(name, value, _with_article(kind))


def require_iterable(name: str, value: Iterable[T]) -> list[T]:
    """Convert any iterable argument to a list.

    Raises:
        InvalidArgumentError: `value` is not iterable.
    """
    try:
        return list(value)
    except TypeError as exc:
        raise InvalidArgumentError(name, value, "a collection") from exc


def require_sequence(name: str, value: Any, expected: str = "a sequence") -> None:
    """Check that an argument is a sequence: its elements can be counted and read repeatedly.

    A list, a tuple, an array; neither text nor a generator, which is empty after its first use.

    Raises:
        InvalidArgumentError: `value` is not a sequence.
    """
    if isinstance(value, (list, tuple)):
        return
    is_other = isinstance(value, (str, bytes, bytearray, memoryview, Mapping, AbstractSet))
    if is_other or not hasattr(value, "__getitem__") or not _has_length(value):
        raise InvalidArgumentError(name, value, expected)


def require_instances(name: str, values: Any, kind: type, *, at_least_one: bool = False) -> None:
    """Check the type of every element of a sequence.

    Raises:
        InvalidArgumentError: `values` is not a sequence, or an element is not a `kind`; or it is
            empty in spite of `at_least_one`.
    """
    require_sequence(name, values, f"a sequence, each element {_with_article(kind)}")
    if at_least_one and not len(values):
        raise InvalidArgumentError(name, values, f"at least one {kind.__name__}")
    for index, value in enumerate(values):
        require_instance(f"{name}[{index}]", value, kind)


def require_one_per_group(name: str, values: Any, num_groups: int, *, what: str = "one") -> None:
    """Check that a sequence has an element for each KV-cache group.

    Raises:
        InvalidArgumentError: `values` is not a sequence, or has more or fewer elements.
    """
    expected = f"{what} for each of {num_groups} groups"
    require_sequence(name, values, expected)
    if len(values) != num_groups:
        raise InvalidArgumentError(name, values, expected)


def require_integers(name: str, values: ArrayLike, *, dtype: Any = np.int64) -> NDArray[Any]:
    """Convert a one-dimensional array of whole numbers of any type; copies only if it must.

    Args:
        name: The argument, for the error.
        values: Value that the caller passed.
        dtype: Type to convert to, of 64 bits.

    Raises:
        InvalidArgumentError: `values` has another number of dimensions, or an element is not a
            whole number, or does not fit the type.
    """
    wanted = "integers in one dimension"
    try:
        array = np.asarray(values)
    except Exception as exc:  # ragged lists, memory of a device, whatever `__array__` does
        raise InvalidArgumentError(name, values, wanted) from exc
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise InvalidArgumentError(name, values, f"{wanted}, not {array.ndim} of {array.dtype}")
    if array.dtype == dtype:
        return array
    limits = np.iinfo(dtype)
    if array.size and not limits.min <= int(array.min()) <= int(array.max()) <= limits.max:
        raise InvalidArgumentError(name, values, f"numbers that fit in {np.dtype(dtype)}")
    return array.astype(dtype)


def find_repeated(values: Iterable[T]) -> T | None:
    """Find the first value that occurs more than once; None without one. Hashes each value once."""
    return next((value for value, count in Counter(values).items() if count > 1), None)


def _index(value: Any) -> int | None:
    """Read a value as a whole number; None when it is not one."""
    if isinstance(value, (bool, np.bool_)):
        return None
    try:
        number = operator.index(value)
    except Exception:  # noqa: BLE001 - whatever `__index__` does, this is no number
        return None
    return None if isinstance(number, bool) else int(number)


def _with_article(kind: type) -> str:
    article = "an" if kind.__name__[0] in "AEIO" else "a"
    return f"{article} {kind.__name__}"


def _has_length(value: Any) -> bool:
    try:
        len(value)
    except TypeError:
        return False
    return True


def _bounds(minimum: int, maximum: int) -> str:
    if maximum < INT64_MAX:
        return f"a whole number from {minimum} to {maximum}"
    return "a positive integer" if minimum == 1 else f"a whole number, {minimum} or more"
