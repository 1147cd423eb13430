"""Deprecation: warnings about names that still work and will be removed."""

import threading
import warnings

_warned: set[str] = set()
_warning = threading.Lock()


def warn_deprecated(name: str, *, replacement: str, gone_in: str) -> None:
    """Warn, once per process, that a name will be removed.

    The warning is a `FutureWarning`: parameters of URLs are set by operators, to whom Python shows
    no `DeprecationWarning`. From release `gone_in` on, `tests/test_deprecation.py` fails until the
    name is removed.

    Args:
        name: The name, as callers write it, such as `host://?size=`.
        replacement: Name to use instead.
        gone_in: First release without the name, such as `0.3.0`; a literal, for that test.
    """
    with _warning:
        if name in _warned:
            return
        _warned.add(name)
    text = f"{name} is deprecated and will be removed in kvxfer {gone_in}; use {replacement}"
    warnings.warn(text, FutureWarning, stacklevel=3)  # the caller's caller
