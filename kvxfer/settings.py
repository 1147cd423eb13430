"""Settings that users write: converted from a mapping to a struct, or refused by name."""

import enum
import logging
import os
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, TypeAlias, TypeVar, get_args, get_origin
from urllib.parse import unquote

import msgspec

from kvxfer.errors import InvalidArgumentError, code_of
from kvxfer.text import did_you_mean
from kvxfer.units import MAX_DURATION_S, decode_size

S = TypeVar("S", bound=msgspec.Struct)
Seconds: TypeAlias = Annotated[float, msgspec.Meta(gt=0, le=MAX_DURATION_S)]
"""Type of a duration in a struct that `convert_settings` makes."""

VARIABLES = tuple(
    f"KVXFER_{each}" for each in ("BACKEND", "CONFIG", "JOURNAL", "METRICS", "SECRET", "TRACE")
)
"""Environment variables that kvxfer reads, all of them optional."""
MISSPELT_VARIABLE_LIKENESS = 0.835
KUBERNETES_VARIABLE = re.compile("_(PORT|SERVICE)(_|$)")
"""Variables that Kubernetes sets, such as `KVXFER_METRICS_PORT` for a service `kvxfer-metrics`."""

HIDDEN = "..."
CREDENTIAL = re.compile(
    "secret|token(?!s)|(^|access|api|auth|bearer|refresh|session)_?tokens$|passw|pwd|credential"
    "|signature|^sig$|^sas|key_?id|(access|account|api|private|sas|shared)_?key"
)
"""Names of parameters whose values errors hide, but not names of files and numbers of tokens."""

logger = logging.getLogger(__name__)

_warned_of: set[str] = set()

_WORDS: Mapping[str, str] = {
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "array": "a list",
    "object": "a mapping",
    "null": "nothing",
}
"""Words for the names of types in msgspec's errors."""


def warn_of_misspelt_variables(environ: Iterable[str] = os.environ) -> None:
    """Warn, once per process, of each variable whose name is nearly one of `VARIABLES`."""
    for name in [each for each in environ if each not in (*VARIABLES, *_warned_of)]:
        near = did_you_mean(name, VARIABLES, likeness=MISSPELT_VARIABLE_LIKENESS)
        if near and not KUBERNETES_VARIABLE.search(name):
            _warned_of.add(name)
            logger.warning("the environment variable %s is ignored%s", name, near)


def convert_settings(
    argument: str,
    given: Mapping[str, Any],
    kind: type[S],
    *,
    what: str,
    shown_as: Any = None,
    beside: Iterable[str] = (),
    strict: bool = False,
) -> S:
    """Convert a mapping to a struct.

    Args:
        argument: Name of the argument that the settings are from, for the error.
        given: The settings.
        kind: Struct that has the settings as fields.
        what: Description of the settings, for the error.
        shown_as: The argument as the user wrote it, for the error; default: the mapping.
        beside: Names of valid settings that the caller has taken out, for suggestions.
        strict: Whether to refuse text in place of a number.

    Raises:
        InvalidArgumentError: A missing, unknown or invalid setting is named, credentials hidden.
    """
    try:
        return msgspec.convert(given, kind, strict=strict, dec_hook=decode_size)
    except msgspec.ValidationError as exc:
        whole = shown(given if shown_as is None else shown_as)
        problem = problem_of(exc, shown(given), kind, beside=beside)
        raise InvalidArgumentError(argument, whole, f"{what}: {problem}") from exc


def problem_of(
    error: msgspec.ValidationError,
    given: Any,
    kind: type[msgspec.Struct],
    *,
    beside: Iterable[str] = (),
) -> str:
    """Describe an error of msgspec in words that users know.

    Args:
        error: The error.
        given: Value that msgspec refused; None if it is not known.
        kind: Struct that the value was to be converted to.
        beside: As for `convert_settings`.
    """
    said, _, place = str(error).partition(" - at `")
    name = place.rstrip("`").removeprefix("$").removeprefix(".")
    fields = {each.encode_name: each.type for each in msgspec.structs.fields(kind)}
    if unknown := re.fullmatch("Object contains unknown field `(.*)`", said, re.DOTALL):
        names = [*beside, *fields]
        near = did_you_mean(unknown[1], names) or f", only {', '.join(names)}"
        return f"there is no {unknown[1]!r}{near}"
    if missing := re.fullmatch("Object missing required field `(.*)`", said):
        return f"{missing[1]} is missing"
    if isinstance(why := error.__cause__, InvalidArgumentError):
        # Raised by `ByteSize.parse`, which does not know the field's name, or by the struct.
        value = shown({why.argument: why.value})[why.argument]
        return f"{name or why.argument} is {code_of(value)}; expected {why.expected}"
    if said.startswith("Invalid enum value"):
        said = "Expected " + (_allowed_values(fields.get(name)) or "another value")
    said = re.sub("`[^`]*`", lambda found: found[0].replace(" | ", "` or `"), said)
    said = re.sub("`([a-z]+)`", lambda found: _WORDS.get(found[1], found[1]), said)
    said = said[:1].lower() + said[1:]
    if name.startswith("key` in "):
        return "a name is not text"
    if not name or given is None or "[...]" in name:  # msgspec does not name keys of a mapping
        return f"{name}: {said}" if name else said
    return f"{name} is {code_of(_value_at(given, name))}; {said.partition(', got ')[0]}"


def shown(given: Any) -> Any:
    """Copy settings, or a value that contains some, for an error, hiding possible credentials."""
    if isinstance(given, Mapping):
        return {name: HIDDEN if is_credential(name) else shown(one) for name, one in given.items()}
    if isinstance(given, (list, tuple)):
        return [shown(each) for each in given]
    if not isinstance(given, str):
        return given
    if "@" in given and "://" not in given:
        return HIDDEN
    head, mark, query = given.partition("?")
    parts = []
    for parameter in re.split("([&#])", query):
        name, equals, value = parameter.partition("=")
        hidden = is_credential(unquote(name)) or "@" in unquote(value)
        at = "@" * ("@" in value)  # may end the user's name and password, see below
        parts.append(f"{name}={at}{HIDDEN}" if equals and hidden else parameter)
    text = f"{head}{mark}{''.join(parts)}"
    return re.sub("(?s)//.*@", f"//{HIDDEN}@", text)  # a password may have a query's characters


def is_credential(setting: object) -> bool:
    """Whether a setting may hold a credential, judging by its name."""
    name = str(setting).lower()
    return CREDENTIAL.search(name) is not None and not name.endswith("_file")


def _allowed_values(kind: Any) -> str:
    kinds = kind, *get_args(kind)
    literals = [value for each in kinds if get_origin(each) is Literal for value in get_args(each)]
    enums = [each for each in kinds if isinstance(each, type) and issubclass(each, enum.Enum)]
    values = [*literals, *(each.value for kind in enums for each in kind)]
    return f"one of {', '.join(map(repr, values))}" if values else ""


def _value_at(given: Any, place: str) -> Any:
    for step in place.replace("[", ".[").removeprefix(".").split("."):
        given = given[int(step[1:-1])] if step.startswith("[") else given[step]
    return given
