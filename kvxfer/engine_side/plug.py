"""Plugs: classes of ours that a serving engine makes, and what they refuse."""

from typing import ClassVar, Self

from kvxfer.errors import UnsupportedEngineError
from kvxfer.extras import installed_version


class Plug:
    """Base of a class that implements an engine's interface; it refuses one that has grown.

    Implementors must name this base before that of the engine, and set the attributes: names
    under which the engine is published, and releases that are supported, for people.
    """

    packages: ClassVar[tuple[str, ...]]
    supported: ClassVar[str]

    def __new__(cls, *_: object, **__: object) -> Self:
        """Make the object, whose `__init__` has the arguments."""
        unknown = sorted(getattr(cls, "__abstractmethods__", ()))
        if unknown:
            base = next(each for each in cls.__mro__ if not each.__module__.startswith("kvxfer."))
            detail = f"its {base.__name__} wants {' and '.join(unknown)}"
            engine, version = cls.packages[0], installed_version(*cls.packages)
            raise UnsupportedEngineError(engine, version, cls.supported, detail)
        return super().__new__(cls)
