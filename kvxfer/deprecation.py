"""Deprecation: a name that still works, and the release that no longer has it."""

import threading
import warnings

_warned: set[str] = set()
_warning = threading.Lock()


def warn_deprecated(name: str, *, replacement: str, gone_in: str) -> None:
    """Warn that a name goes away, once in a process.

    The warning is a `FutureWarning`, which Python shows by default: parameters of URLs are set by
    operators, who see no `DeprecationWarning`. `tests/test_deprecation.py` fails from the release
    `gone_in` on, until the name is removed.

    Args:
        name: The name, as callers write it, such as `host://?size=`.
        replacement: Name to use instead.
        gone_in: Release without the name, such as `0.3.0`, written as a literal.
    """
    with _warning:
        if name in _warned:
            return
        _warned.add(name)
    text = f"{name} is deprecated, and gone in kvxfer {gone_in}; use {replacement}"
    warnings.warn(text, FutureWarning, stacklevel=3)  # who called the caller
