"""Interfaces of engines that have grown: a release with an abstract method more."""

import abc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

NAME = "do_something_new"


@contextmanager
def grown(plug: Any) -> Iterator[None]:
    """Add an abstract method to the interface that a plug implements, for the time being."""
    base = next(each for each in plug.__mro__ if not each.__module__.startswith("kvxfer."))
    between = [each for each in plug.__mro__ if issubclass(each, base)]

    def update() -> None:
        for each in reversed(between):
            abc.update_abstractmethods(each)

    setattr(base, NAME, abc.abstractmethod(lambda self: self))
    update()
    try:
        yield
    finally:
        delattr(base, NAME)
        update()
