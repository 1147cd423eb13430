"""Code of modules: the functions that compute keys and values, and what they look up by name.

A function of a known package is identified by its name, unless it was replaced. Other code is
identified by its bytes and the constants that it reads.
"""

import dis
import functools
import inspect
import logging
import sys
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from kvxfer.engine_side.weight_files import hash_text

PACKAGES = frozenset({"accelerate", "builtins", "peft", "torch", "transformers"})
"""Known packages, whose functions are identified by their names."""
ENTRIES = ("forward", "__call__")
"""Methods by which a module is called."""
TORCH_NAMESPACES: dict[str, Any] = {
    "torch": torch, "torch.nn.functional": torch.nn.functional, "torch.Tensor": torch.Tensor,
}  # fmt: skip
"""Places of torch's functions."""
IGNORED_TYPES = (logging.Logger, types.ModuleType, type(typing.Any), typing.TypeVar)
"""Types of objects that code reads, but that do not change what it computes."""

GLOBAL = frozenset({"LOAD_GLOBAL", "LOAD_NAME"})
ATTRIBUTE = frozenset({"LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "IMPORT_FROM"})
"""Operations of Python's bytecode that look up a name."""


class Unknown(Exception):  # noqa: N818 - found, not failed
    """Part of a model that cannot be hashed."""


@dataclass(slots=True)
class Code:
    """Code that is run for a class of modules, or for a function.

    Attributes:
        names: Functions that were replaced, and those of no known package, by place: the name of
            what is there, or the hash of its bytes.
        values: Objects that functions of no known package read, by name.
        links: Lookups: the namespace, the name, and what was there.
        bodies: Functions, and the code that each had.
        asks_for_training: Whether it looks up if a module is in training, as dropout does.
    """

    names: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    links: list[tuple[Mapping[str, Any], str, Any]] = field(default_factory=list)
    bodies: dict[types.FunctionType, types.CodeType] = field(default_factory=dict)
    asks_for_training: bool = False

    def is_same(self) -> bool:
        """Whether everything that was looked up is still there."""
        found = all(namespace.get(name) is value for namespace, name, value in self.links)
        return found and all(each.__code__ is code for each, code in self.bodies.items())


MAX_READ = 4096
"""Maximum entries of `_read`, which keep classes and functions in memory."""
_read: dict[Any, Code] = {}


def read_code(start: Any) -> Code:
    """Read the code that runs for a class of modules, or for a function; may raise `Unknown`."""
    known = _read.get(start)
    if known is None or not known.is_same():
        known = _Walk(start).code
        if len(_read) >= MAX_READ:
            _read.clear()
        _read[start] = known
    return known


def is_known(module: object) -> bool:
    """Whether a module belongs to a known package."""
    return str(module).partition(".")[0] in PACKAGES


def where_written(function: Any) -> tuple[str, str]:
    """Return the module and name that a function's code was written in, whatever its name now."""
    code = getattr(function, "__code__", None)
    if code is None:
        return str(function.__module__ or "builtins"), str(function.__qualname__)
    return str(function.__globals__.get("__name__")), code.co_qualname


class _Walk:
    """Walk through the functions that a class of modules, or a function, calls by name."""

    def __init__(self, start: Any) -> None:
        self.code = Code()
        self._seen: set[Any] = set()
        self._kind: type = start if isinstance(start, type) else object
        self._own = str(start.__module__).partition(".")[0]
        if not isinstance(start, type):
            module, name = where_written(start)
            self._follow(module, name, start)
            return
        for name in ENTRIES:
            self._find_method(name)

    def _find_method(self, name: str) -> None:
        """Follow what a class, and each of its bases, has under a name."""
        if name in self._seen or self._kind is object:
            return
        self._seen.add(name)
        bases = self._kind.__mro__
        if name not in ENTRIES and not any(name in vars(kind) for kind in bases):
            return
        for kind in bases:
            found = self._look_up(vars(kind), name)
            if found is not None and kind not in {object, torch.nn.Module}:
                self._follow(f"{kind.__module__}.{kind.__qualname__}", name, found)

    def _look_up(self, namespace: Mapping[str, Any], name: str) -> Any:
        found = namespace.get(name)
        self.code.links.append((namespace, name, found))
        return found

    def _follow(self, place: str, name: str, value: Any) -> None:
        """Follow the value that code finds under a name at a place."""
        value = _function_of(value)
        if isinstance(value, types.FunctionType):
            self._follow_function(place, f"{place}.{name}", value)
        elif is_known(place):
            kind = type(value)
            if callable(value) and not is_known(kind.__module__) and not _is_standard(kind):
                raise Unknown(f"{name} of {place}, a {kind.__qualname__} of {kind.__module__}")
        elif isinstance(value, (type, types.BuiltinFunctionType)):
            self.code.names[f"{place}.{name}"] = full = f"{value.__module__}.{value.__qualname__}"
            methods = vars(value) if self._is_own(value.__module__) else {}
            for method, each in methods.items():
                if isinstance(each, types.FunctionType):
                    self._follow(full, method, each)
        elif not isinstance(value, IGNORED_TYPES):
            self.code.values[f"{place}.{name}"] = value

    def _follow_function(self, home: str, called: str, function: Any) -> None:
        """Follow a function, as the code of `home` names it, and the functions that it wraps."""
        module, name = where_written(inspect.unwrap(function))
        if f"{module}.{name}" != called:
            is_import = called == f"{home}.{name}" and not module.startswith("transformers.models.")
            if not is_known(home) or not is_import:
                self.code.names[called] = f"{module}.{name}"
        while isinstance(function, types.FunctionType) and function not in self._seen:
            self._seen.add(function)
            code, module = function.__code__, where_written(function)[0]
            self.code.bodies[function] = code
            if is_known(home) and not is_known(module) and not _is_standard(function):
                raise Unknown(f"the function {code.co_qualname} of {module}")
            if is_known(module) or self._is_own(module):
                self._read_function(module, function)
            else:
                version = getattr(sys.modules.get(module.partition(".")[0]), "__version__", "")
                self.code.names[f"{module}.{code.co_qualname}"] = str(version)
            function = getattr(function, "__wrapped__", None)

    def _read_function(self, module: str, function: Any) -> None:
        """Follow what the code of a function looks up."""
        code, variables = function.__code__, function.__globals__
        if not is_known(module):
            if set(code.co_freevars) - {"__class__"}:
                raise Unknown(f"the function {code.co_qualname} of {module}")
            name = f"{module}.{code.co_qualname}"
            self.code.names[name] = hash_text(repr(list(_read_bytes(code))))
            self.code.values[f"{name} defaults"] = [function.__defaults__, function.__kwdefaults__]
        for cell in function.__closure__ or ():
            if isinstance(inner := _content(cell), types.FunctionType):
                self._follow_function(module, ".".join(where_written(inspect.unwrap(inner))), inner)
        found = [(each.opname, str(each.argval)) for each in _instructions(code)]
        self.code.asks_for_training |= any(name == "training" for _, name in found)
        of_globals, attributes = (
            sorted({name for operation, name in found if operation in kind})
            for kind in (GLOBAL, ATTRIBUTE)
        )
        for name in (*of_globals, *attributes):
            self._check_torch(name)
        if module.partition(".")[0] != "torch":
            self._follow_names(module, variables, of_globals, attributes)

    def _follow_names(
        self, module: str, variables: dict[str, Any], of_globals: list[str], attributes: list[str]
    ) -> None:
        """Follow globals, methods of the class, and names in other modules of the package."""
        modules: list[types.ModuleType] = []
        for name in filter(variables.__contains__, of_globals):
            found = self._look_up(variables, name)
            self._follow(module, name, found)
            if isinstance(found, types.ModuleType) and self._is_own(found.__name__):
                modules.append(found)
        for name in attributes:
            self._find_method(name)
            for other in modules:
                if (found := self._look_up(vars(other), name)) is not None:
                    self._follow(other.__name__, name, found)

    def _check_torch(self, name: str) -> None:
        """Check that torch has the original under a name; note a replacement."""
        if ("torch", name) in self._seen:
            return
        self._seen.add(("torch", name))
        for place, at in TORCH_NAMESPACES.items():
            found = self._look_up(vars(at), name)
            if isinstance(found, types.FunctionType):
                module, written = where_written(inspect.unwrap(found))
                if not is_known(where_written(found)[0]) or not is_known(module):
                    raise Unknown(f"the function {written} of {module}, as {place}.{name}")
                self.code.bodies[found] = found.__code__
            elif callable(found) and not isinstance(found, type):
                written = str(getattr(found, "__name__", name))
            else:
                continue
            if written.rpartition(".")[2] != name:
                self.code.names[f"{place}.{name}"] = written

    def _is_own(self, module: object) -> bool:
        """Whether a module is of the package that the walk began in, and that is no known one."""
        return not is_known(module) and str(module).partition(".")[0] == self._own


def _function_of(value: Any) -> Any:
    """Find the function of a method, a property or a wrapper; return anything else as it is."""
    if isinstance(value, property):
        value = value.fget
    elif isinstance(value, functools.cached_property):
        value = value.func
    while not isinstance(value, (type, types.FunctionType)) and hasattr(value, "__wrapped__"):
        value = value.__wrapped__
    return value


def _instructions(code: types.CodeType) -> Iterator[dis.Instruction]:
    yield from dis.get_instructions(code)
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from _instructions(each)


def _read_bytes(code: types.CodeType) -> Iterator[Any]:
    """Read what a function does, without its place in a file."""
    yield code.co_code
    yield code.co_names
    for each in code.co_consts:
        yield list(_read_bytes(each)) if isinstance(each, types.CodeType) else repr(each)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the variable has no value yet
        return None


def _is_standard(value: Any) -> bool:
    module = where_written(value)[0] if hasattr(value, "__code__") else str(value.__module__)
    return module.partition(".")[0] in sys.stdlib_module_names
