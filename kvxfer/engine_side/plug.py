"""Plugs: kvxfer's classes that a serving engine instantiates, and the interfaces they refuse."""

from typing import ClassVar, Self

from kvxfer.errors import UnsupportedEngineError
from kvxfer.extras import installed_version


class Plug:
    """Base of a class that implements an engine's interface; refuses one with unknown methods.

    Implementors must list this base before the engine's, and set `packages`, the names under which
    the engine is published, and `supported`, the supported releases as text.
    """

    packages: ClassVar[tuple[str, ...]]
    supported: ClassVar[str]

    def __new__(cls, *_: object, **__: object) -> Self:
        """Create the object; `UnsupportedEngineError` if it lacks a method of the interface."""
        unknown = sorted(getattr(cls, "__abstractmethods__", ()))
        if unknown:
            base = next(each for each in cls.__mro__ if not each.__module__.startswith("kvxfer."))
            detail = f"its {base.__name__} requires {' and '.join(unknown)}"
            engine, version = cls.packages[0], installed_version(*cls.packages)
            raise UnsupportedEngineError(engine, version, cls.supported, detail)
        return super().__new__(cls)
