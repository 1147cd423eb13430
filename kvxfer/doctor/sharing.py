"""Sharing: whether two engines, stores or descriptions have one namespace, else what differs."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

import msgspec

from kvxfer.backends.file import BlockTree, load_namespace, read_namespaces
from kvxfer.backends.nixl import NixlConfig, PeerProbe, probe_peer
from kvxfer.connect import parse_backend
from kvxfer.doctor.finding import Check, Examined, Finding
from kvxfer.doctor.peers import refuse_peer
from kvxfer.endpoint import Endpoint
from kvxfer.errors import (
    BackendUnavailableError,
    CacheMismatchError,
    InvalidArgumentError,
    PeerError,
)
from kvxfer.kvcache.portable import CacheDescription, map_peers
from kvxfer.storage.keys import Difference, Namespace
from kvxfer.text import printable

NAMESPACE_FILE = "namespace.json"
MAX_CHARACTERS = 300
"""Most characters of a value in a finding; `--json` has them, too."""

_WHY = (
    "Blocks are found only where every field of the namespace is the same: these two never share."
)

_MENDS = {
    "model": "the same name of the model for both engines",
    "revision": "--revision COMMIT for both engines; a copy of a local folder has another one",
    "dtype": "--dtype, the same for both engines",
    "quantization": "--quantization and --kv-cache-dtype, the same for both engines",
    "config_hash": "the same config.json, --hf-overrides and attention backend for both engines",
    "layout": "the same release of vLLM and the same attention backend for both engines",
    "groups": "the same layers, --block-size and tokens per chunk for both engines",
    "blocks_per_chunk": "the same number of blocks per chunk for both engines",
    "parallel": "the same --tensor-parallel-size and -pp for both engines, or portable pages",
    "instruction_set": "processors of one kind for both engines",
}


@dataclass(frozen=True, slots=True)
class Party:
    """Engine, store or description that is compared.

    Attributes:
        name: Argument that names it.
        namespaces: Its namespaces: several of a store, none where nothing was stored or settled.
        description: Description of the caches of an engine that lends them.
    """

    name: str
    namespaces: tuple[Namespace, ...]
    description: bytes | None = None


def is_comparable(argument: str) -> bool:
    """Whether an argument names what has a namespace, and is no tier with parameters.

    That is a peer, a `file://` URL without parameters, or a path.
    """
    try:
        parts = urlsplit(argument)
    except ValueError:
        return False
    if parts.scheme == "nixl":
        return bool(parts.netloc) and "," not in parts.netloc
    if parts.scheme == "file":
        return not parts.query
    return "://" not in argument


def compare(arguments: Sequence[str], *, timeout_s: float) -> list[Finding]:
    """Find out whether two engines, stores or descriptions would share blocks.

    Args:
        arguments: Two arguments that are comparable.
        timeout_s: Time for each step of a peer's handshake.

    Raises:
        InvalidArgumentError: An argument names nothing that has a namespace.
    """
    parties: list[Party] = []
    findings: list[Finding] = []
    for argument in arguments:
        if argument.startswith("nixl:"):
            config, endpoint = _parse_peer(argument, timeout_s)
            try:
                parties.append(_of_peer(argument, asyncio.run(probe_peer(config, endpoint))))
            except (PeerError, BackendUnavailableError) as exc:
                findings.append(refuse_peer(endpoint, exc))
        else:
            parties.append(_of_path(argument))
    if len(parties) == len(arguments):
        findings += _compare(*parties)
    return findings


def _parse_peer(argument: str, timeout_s: float) -> tuple[NixlConfig, Endpoint]:
    config = parse_backend(argument)[1]
    assert isinstance(config, NixlConfig)
    limit_s = min(timeout_s, config.handshake_timeout_s)
    config.read_secret()  # what is wrong with it is wrong with the argument
    (endpoint,) = config.peers
    return msgspec.structs.replace(config, handshake_timeout_s=limit_s), endpoint


def _of_peer(argument: str, probe: PeerProbe) -> Party:
    found = () if probe.namespace is None else (probe.namespace,)
    return Party(argument, found, probe.description)


def _of_path(argument: str) -> Party:
    """Read the namespaces of a store, of a folder in it, or of one file."""
    parts = urlsplit(argument)
    path = Path(unquote(parts.path) if parts.scheme == "file" else argument)
    if path.is_dir() and not (path / NAMESPACE_FILE).exists():
        try:
            found = tuple(read_namespaces(BlockTree(path)))
        except OSError as exc:
            wanted = f"a store that can be read: {exc.strerror}"
            raise InvalidArgumentError("argument", argument, wanted) from exc
        if not found:
            raise InvalidArgumentError("argument", argument, "a store with namespaces in it")
        return Party(argument, found)
    return Party(argument, (load_namespace(str(path / NAMESPACE_FILE if path.is_dir() else path)),))


def _compare(ours: Party, theirs: Party) -> list[Finding]:
    at = Examined(Check.SHARING, f"{ours.name} {theirs.name}")
    for party in (ours, theirs):
        if not party.namespaces:
            return [at.ok(f"{party.name} takes the model of the first engine that connects")]
    pairs = [(a, b, a.differences(b)) for a in ours.namespaces for b in theirs.namespaces]
    first, second, differences = min(pairs, key=lambda pair: len(pair[2]))
    if not differences:
        caches = _compare_caches(at, ours, theirs)
        same = f"one namespace, {first.fingerprint} of {printable(first.model)!r}"
        return caches or [at.ok(f"{same}; keys are the same where PYTHONHASHSEED and salts are")]
    names = [
        party.name if len(party.namespaces) == 1 else f"{party.name}/{namespace.fingerprint}"
        for party, namespace in ((ours, first), (theirs, second))
    ]
    return [_differ(each, *names) for each in differences]


def _differ(difference: Difference, our_name: str, their_name: str) -> Finding:
    field, ours, theirs = difference
    top = field.split(".")[0].split("[")[0]
    at = Examined(Check.SHARING, printable(field))
    found = f"{_show(ours)} in {our_name}, {_show(theirs)} in {their_name}"
    return at.error(found, why=_WHY, mend=_MENDS[top])


def _compare_caches(at: Examined, ours: Party, theirs: Party) -> list[Finding]:
    """Compare the caches of two engines that lend them: one has to be read as the other."""
    if ours.description is None or theirs.description is None:
        return []
    mine, other = map(CacheDescription.decode, (ours.description, theirs.description))
    try:
        _require_mapping(mine, other)
    except CacheMismatchError as exc:
        where = "" if exc.group is None else f" of group {exc.group}"
        found = f"{exc.field}{where}: {_show(exc.ours)} in {ours.name}, {_show(exc.theirs)} in "
        return [
            at.error(
                f"{found}{theirs.name}",
                why="The model is the same, but one engine cannot read the other's blocks: each "
                "computes its prompts.",
                mend="see 'Which pairs fit' in docs/prefill-decode.md",
            )
        ]
    return []


def _require_mapping(ours: CacheDescription, theirs: CacheDescription) -> None:
    """Check that blocks of one engine can be read as those of another; see `match_caches`."""
    if len(ours.groups) != len(theirs.groups):
        raise CacheMismatchError(None, "groups", len(ours.groups), len(theirs.groups))
    for group, described in enumerate(ours.groups):
        map_peers([described.payload_size_bytes], group, ours, [theirs])


def _show(value: object) -> str:
    return printable(repr(value), MAX_CHARACTERS)
