"""Stubs for packages that SGLang imports and that nothing on the way of a page calls.

Imported before SGLang; a process that an engine spawns imports it again with the main module.
"""

import importlib.abc
import importlib.util
import sys
import types
from collections.abc import Sequence
from importlib.machinery import ModuleSpec

# These look for torchvision themselves, and must not find a stub.
import transformers  # noqa: F401
from transformers import AutoConfig, AutoProcessor, PreTrainedTokenizerBase  # noqa: F401

STUBBED = frozenset({
    "IPython", "av", "datasets", "decord", "modelscope", "outlines", "timm", "torchaudio",
    "torchcodec", "torchvision",
})  # fmt: skip


class Stub(types.ModuleType):
    """Module in which every name is a class that takes anything."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (), {"__init__": lambda self, *args, **kwargs: None})
        setattr(self, name, made)
        return made


class StubFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finder of stubs, asked after all others: a package that is installed is not stubbed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] not in STUBBED:
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        made = Stub(spec.name)
        made.__path__ = []
        return made

    def exec_module(self, module: types.ModuleType) -> None:
        pass


sys.meta_path.append(StubFinder())
