"""Checks of arguments at the public boundary."""

from kvxfer.errors import InvalidArgumentError


def require_positive(name: str, value: object, *, optional: bool = False) -> None:
    """Check a count.

    Raises:
        InvalidArgumentError: `value` is not a positive integer.
    """
    if optional and value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise InvalidArgumentError(name, value, "a positive integer")


def require_instance(name: str, value: object, kind: type) -> None:
    """Check the type of an argument.

    Raises:
        InvalidArgumentError: `value` is not a `kind`.
    """
    if not isinstance(value, kind):
        raise InvalidArgumentError(name, value, f"a {kind.__name__}")
