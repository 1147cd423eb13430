"""Configurations of vLLM: the backends that they name, and the namespaces that follow from them."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from kvxfer.connect import BackendChoice
from kvxfer.doctor.finding import MAX_CHARACTERS
from kvxfer.engine_side.vllm_keys import DEFAULT_HASH
from kvxfer.errors import InvalidArgumentError
from kvxfer.integrations.vllm.common.planned_namespaces import PlannedNamespace
from kvxfer.integrations.vllm.common.plugin import CONNECTORS
from kvxfer.integrations.vllm.common.settings import EXPLICIT, find_settings
from kvxfer.named_files import read_named_file
from kvxfer.text import printable

TRANSFER = "kv_transfer_config"
PROGRAM = "kvxfer.integrations.vllm.common.planned_namespaces"


def read_configuration(path: str) -> dict[str, Any]:
    """Read the arguments of an engine, or its `kv_transfer_config` alone, from a file.

    Names in the result have underscores, and `kv_transfer_config` is a mapping.
    """
    form = "a file with the arguments of vllm serve, or its kv-transfer-config, as JSON"
    try:
        found = json.loads(read_named_file(path).data)
        arguments = {str(name).replace("-", "_"): value for name, value in found.items()}
        if "kv_connector" in arguments:
            arguments = {TRANSFER: arguments}
        if isinstance(arguments.get(TRANSFER), str):
            arguments[TRANSFER] = json.loads(arguments[TRANSFER])
    except (OSError, ValueError, AttributeError, RecursionError) as exc:
        reason = getattr(exc, "strerror", None) or exc
        raise InvalidArgumentError("argument", path, f"{form}: {reason}") from exc
    if not isinstance(arguments.get(TRANSFER), Mapping):
        raise InvalidArgumentError("argument", path, form)
    return arguments


def is_configuration(path: str) -> bool:
    """Whether a file is a configuration; whoever reads it as something else reports its errors."""
    try:
        found = json.loads(read_named_file(path).data)
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(found, dict) and TRANSFER in {name.replace("-", "_") for name in found}


def read_backends(path: str) -> list[BackendChoice]:
    """Read every `backend` of a configuration, also those of nested connectors.

    Our connectors without a `backend` in the configuration get that of the environment.
    """
    found = list(_find_backends(read_configuration(path)[TRANSFER]))
    if not found:
        raise InvalidArgumentError("argument", path, "a configuration with a backend in it")
    return found


def environment_backends() -> list[BackendChoice]:
    """Read the `backend` that `KVXFER_BACKEND` or `KVXFER_CONFIG` gives to engines, if any."""
    return list(_find_backends({"kv_connector": CONNECTORS[0]}))


def read_hash_name(path: str) -> str:
    """Read the `--prefix-caching-hash-algo` of a configuration, or vLLM's default."""
    return str(read_configuration(path).get("prefix_caching_hash_algo", DEFAULT_HASH))


def plan_namespaces(path: str, *, timeout_s: float) -> list[PlannedNamespace]:
    """Find out which namespaces an engine will have, from a file with its arguments.

    A child process reads them, since vLLM logs and may end its process.
    """
    arguments = json.dumps(read_configuration(path)).encode()
    with tempfile.NamedTemporaryFile(prefix="kvxfer-doctor-") as answer:
        try:
            done = subprocess.run(  # noqa: S603 - this interpreter, and a module of ours
                [sys.executable, "-m", PROGRAM, "/dev/stdin", answer.name],
                env={**os.environ, "VLLM_CONFIGURE_LOGGING": "0"},
                input=arguments,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired as exc:
            wanted = f"one that vLLM reads within {timeout_s:g} s"
            raise InvalidArgumentError("argument", path, wanted) from exc
        if done.returncode:
            last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2] or "no reason"
            wanted = f"one that vLLM accepts: {printable(last, MAX_CHARACTERS)}"
            raise InvalidArgumentError("argument", path, wanted)
        return msgspec.json.decode(answer.read(), type=list[PlannedNamespace])


def _find_backends(value: Any) -> Iterator[BackendChoice]:
    if isinstance(value, Mapping):
        if value.get("kv_connector") in CONNECTORS:
            explicit = value.get(EXPLICIT)
            value = find_settings(explicit if isinstance(explicit, Mapping) else {}).values
        backend = value.get("backend", [])
        yield from backend if isinstance(backend, list) else [backend]
        value = [each for name, each in value.items() if name != "backend"]
    if isinstance(value, list):
        for each in value:
            yield from _find_backends(each)
