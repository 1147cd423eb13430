"""Move KV-cache blocks of serving engines to and from any medium, whatever their layout."""

import importlib.util
import sys
from collections.abc import Iterable
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvxfer import engine_side as engine_side  # the alias marks it as public
    from kvxfer import errors as errors
    from kvxfer import kvcache as kvcache
    from kvxfer import lending as lending
    from kvxfer import storage as storage
    from kvxfer import tiering as tiering
    from kvxfer import transfer as transfer
    from kvxfer.public import *  # noqa: F403

    __version__: str


class _Package(ModuleType):
    """Package that imports its public names on first use: `kvxfer --help` does without torch."""

    def __getattr__(self, name: str) -> object:
        if name == "__version__":
            return importlib.import_module("kvxfer.extras").installed_version("kvxfer")
        if name.startswith("__") and name != "__all__":
            raise AttributeError(name)
        module = f"{self.__name__}.{name}"
        if name != "connect" and importlib.util.find_spec(module):
            return importlib.import_module(module)
        public = importlib.import_module("kvxfer.public")
        names = {each: getattr(public, each) for each in public.__all__}
        self.__dict__.update(names, __all__=public.__all__)
        if name not in self.__dict__:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return self.__dict__[name]

    def __setattr__(self, name: str, value: object) -> None:
        # Importing the module `kvxfer.connect` must not replace the function `connect`.
        if name != "connect" or not isinstance(value, ModuleType):
            super().__setattr__(name, value)

    def __dir__(self) -> Iterable[str]:
        self.__getattr__("__all__")
        return super().__dir__()


sys.modules[__name__].__class__ = _Package
