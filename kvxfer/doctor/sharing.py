"""Sharing: whether two engines, stores or descriptions have one namespace, else what differs."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

from kvxfer import runtime
from kvxfer.backends.file import BlockTree
from kvxfer.backends.nixl import NixlConfig, probe_peer
from kvxfer.connect import parse_backend
from kvxfer.doctor.configuration import is_configuration, plan_namespaces
from kvxfer.doctor.examination import STEPS_OF_PEER, PlannedCheck, run_checks
from kvxfer.doctor.finding import Check, Finding, error, ok
from kvxfer.doctor.places import hasten, refuse_peer
from kvxfer.endpoint import Endpoint, split_url
from kvxfer.errors import (
    BackendUnavailableError,
    CacheMismatchError,
    InvalidArgumentError,
    PeerError,
)
from kvxfer.integrations.vllm.common.planned_namespaces import HANDED_OVER, PlannedNamespace
from kvxfer.kvcache.portable import CacheDescription, map_peers
from kvxfer.pages.texts import load_namespace
from kvxfer.storage.keys import Difference, Namespace
from kvxfer.text import printable

NAMESPACE_FILE = "namespace.json"
MAX_CHARACTERS = 300
"""Most characters of a value in a finding; `--json` has them, too."""

STEPS_OF_VLLM = 12
"""Times of a check that vLLM may take to be imported and to read the configuration of a model."""

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
    "tokens_per_block": "--block-size, the same for both engines",
    "tokens_per_chunk": "the same --block-size, and blocks_per_chunk or block_size of a connector",
    "prefix_caching_hash_algo": "--prefix-caching-hash-algo, the same for both engines",
}


ALL_FIELDS = Namespace.__struct_fields__


@dataclass(frozen=True, slots=True)
class Party:
    """Engine, store or description that is compared.

    Attributes:
        name: Argument that names it.
        namespaces: Its namespaces, as far as they are known: several of a store or a configuration,
            none where nothing was stored or settled.
        description: Description of the caches of an engine that lends them.
    """

    name: str
    namespaces: tuple[PlannedNamespace, ...]
    description: bytes | None = None

    def of(self, kind: str) -> "Party":
        """Choose the namespaces of a kind."""
        return replace(self, namespaces=tuple(n for n in self.namespaces if n.kind == kind))

    def name_of(self, chosen: PlannedNamespace) -> str:
        """Name one of the namespaces."""
        if chosen.kind:
            return f"{self.name} ({chosen.kind})"
        is_only = len(self.namespaces) == 1
        return self.name if is_only else f"{self.name}/{chosen.namespace.fingerprint}"


def _known(namespace: Namespace) -> PlannedNamespace:
    """Make a namespace of which everything is known, and not what kind it is."""
    return PlannedNamespace(kind="", namespace=namespace, fields=ALL_FIELDS)


def is_comparable(argument: str) -> bool:
    """Whether an argument names what has a namespace, and is no tier with parameters.

    That is a peer, a `file://` URL without parameters, or a path.
    """
    try:
        parts = split_url(argument)
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
        timeout_s: Time for each step of a peer's handshake; vLLM has `STEPS_OF_VLLM` times as much
            to read a configuration.

    Raises:
        InvalidArgumentError: An argument names nothing that has a namespace.
    """
    refused: list[InvalidArgumentError] = []

    def run() -> list[Finding]:
        try:
            return _find(arguments, timeout_s)
        except InvalidArgumentError as exc:  # of the arguments, not of what they name
            refused.append(exc)
            return []

    num_steps = sum(STEPS_OF_PEER if _is_peer(each) else STEPS_OF_VLLM for each in arguments)
    planned = PlannedCheck(Check.SHARING, " ".join(arguments), run, num_steps)
    findings = run_checks([planned], timeout_s=timeout_s)
    for problem in refused:
        raise problem
    return findings


def _is_peer(argument: str) -> bool:
    return argument.startswith("nixl:")


def _find(arguments: Sequence[str], timeout_s: float) -> list[Finding]:
    parties: list[Party] = []
    findings: list[Finding] = []
    for argument in arguments:
        if _is_peer(argument):
            config, endpoint = _parse_peer(argument, timeout_s)
            try:
                probe = runtime.run(probe_peer(config, endpoint))
            except (PeerError, BackendUnavailableError) as exc:
                refused = refuse_peer(endpoint, exc)
                findings.append(refused.of(Check.PEER, f"nixl://{endpoint}"))
            else:
                known = () if probe.namespace is None else (_known(probe.namespace),)
                parties.append(Party(argument, known, probe.description))
        else:
            parties.append(_of_path(argument, timeout_s))
    if len(parties) == len(arguments):
        findings += _compare(*parties)
    return findings


def _parse_peer(argument: str, timeout_s: float) -> tuple[NixlConfig, Endpoint]:
    config = parse_backend(argument)[1]
    assert isinstance(config, NixlConfig)
    config.read_secret()  # what is wrong with it is wrong with the argument
    (endpoint,) = config.peers
    return hasten(config, timeout_s), endpoint


def _of_path(argument: str, timeout_s: float) -> Party:
    """Read the namespaces of a store, of a folder in it, of one file, or of a configuration."""
    parts = split_url(argument)
    path = Path(unquote(parts.path) if parts.scheme == "file" else argument)
    if path.is_dir() and not (path / NAMESPACE_FILE).exists():
        try:
            found = tuple(BlockTree(path).namespaces())
        except OSError as exc:
            wanted = f"a store that can be read: {exc.strerror}"
            raise InvalidArgumentError("argument", argument, wanted) from exc
        if not found:
            raise InvalidArgumentError("argument", argument, "a store with namespaces in it")
        return Party(argument, tuple(map(_known, found)))
    file = str(path / NAMESPACE_FILE if path.is_dir() else path)
    if is_configuration(file):
        return Party(argument, tuple(plan_namespaces(file, timeout_s=timeout_s * STEPS_OF_VLLM)))
    return Party(argument, (_known(load_namespace(file)),))


def _compare(ours: Party, theirs: Party) -> list[Finding]:
    for party in (ours, theirs):
        if not party.namespaces:
            return [ok(f"{party.name} takes the model of the first engine that connects")]
    kinds = dict.fromkeys(each.kind for each in ours.namespaces)
    common = [kind for kind in kinds if kind and theirs.of(kind).namespaces]
    if not common:
        return _compare_nearest(ours, theirs)
    return [
        finding for kind in common for finding in _compare_nearest(ours.of(kind), theirs.of(kind))
    ]


def _compare_nearest(ours: Party, theirs: Party) -> list[Finding]:
    """Compare those two namespaces that differ least."""
    pairs = [_Pair.of(our, their) for our in ours.namespaces for their in theirs.namespaces]
    nearest = min(pairs, key=lambda pair: len(pair.differences))
    if not nearest.differences:
        return _compare_caches(ours, theirs) or [ok(_agree(nearest))]
    names = ours.name_of(nearest.ours), theirs.name_of(nearest.theirs)
    return [_differ(each, *names) for each in nearest.differences]


class _Pair(NamedTuple):
    """Two namespaces, the fields and keys known of both, and those in which they differ."""

    ours: PlannedNamespace
    theirs: PlannedNamespace
    known: list[str]
    differences: list[Difference]

    @classmethod
    def of(cls, ours: PlannedNamespace, theirs: PlannedNamespace) -> "_Pair":
        fields = [each for each in ours.fields if _is_among(each, theirs.fields)]
        fields += [
            each for each in theirs.fields if each not in fields and _is_among(each, ours.fields)
        ]
        found = ours.namespace.differences(theirs.namespace)
        keys = [name for name in ours.keys if name in theirs.keys]
        pairs = [Difference(name, ours.keys[name], theirs.keys[name]) for name in keys]
        return cls(
            ours,
            theirs,
            [*fields, *keys],
            [
                *(each for each in found if _is_among(each.field, fields)),
                *(each for each in pairs if each.ours != each.theirs),
            ],
        )


def _agree(pair: _Pair) -> str:
    ours, theirs = pair.ours, pair.theirs
    what = f"{ours.kind}: " if ours.kind and ours.kind == theirs.kind else ""
    model = printable(repr(ours.namespace.model), MAX_CHARACTERS)
    said = f"{what}one namespace, {ours.namespace.fingerprint} of {model}"
    if not set(ALL_FIELDS) <= set(pair.known):
        said = f"{what}both of {model}, and equal in {', '.join(pair.known)}"
    if unknown := list(dict.fromkeys(filter(None, (ours.unknown, theirs.unknown)))):
        said += f"; not known before an engine runs: {'; '.join(unknown)}"
    if HANDED_OVER not in (ours.kind, theirs.kind):  # which has keys of its own
        said += "; keys are the same where seeds of hashes (PYTHONHASHSEED) and salts are"
    return said


def _is_among(field: str, known: Collection[str]) -> bool:
    """Whether a field, or what it is a part of, is among those that are known."""
    return any(field == each or field.startswith((f"{each}.", f"{each}[")) for each in known)


def _differ(difference: Difference, our_name: str, their_name: str) -> Finding:
    field, ours, theirs = difference
    found = f"{_show(ours)} in {our_name}, {_show(theirs)} in {their_name}"
    mend = _MENDS[field.split(".")[0].split("[")[0]]
    return error(found, why=_WHY, mend=mend).of(Check.SHARING, printable(field))


def _compare_caches(ours: Party, theirs: Party) -> list[Finding]:
    """Compare the caches of two engines that lend them: one has to be read as the other."""
    if ours.description is None or theirs.description is None:
        return []
    described = []
    for party, encoded in ((ours, ours.description), (theirs, theirs.description)):
        try:
            described.append(CacheDescription.decode(encoded))
        except InvalidArgumentError as exc:
            found = f"the caches of {party.name} are not understood: "
            return [_of_another_release(found + printable(exc, MAX_CHARACTERS))]
        except CacheMismatchError as exc:
            found = f"{exc.field}: {_show(exc.theirs)} in {party.name}, and no field of this kvxfer"
            return [_of_another_release(found)]
    try:
        map_peers(described[0], described[1])
    except CacheMismatchError as exc:
        where = "" if exc.group is None else f" of group {exc.group}"
        found = f"{exc.field}{where}: {_show(exc.ours)} in {ours.name}, {_show(exc.theirs)} in "
        return [
            error(
                f"{found}{theirs.name}",
                why="The model is the same, but one engine cannot read the other's blocks: each "
                "computes its prompts.",
                mend="see 'Which pairs fit' in docs/prefill-decode.md",
            )
        ]
    return []


def _of_another_release(found: str) -> Finding:
    return error(
        found,
        why="It is an engine of another release, or none: prompts are computed twice.",
        mend="pip install -U kvxfer  # the same release for both engines, and for this command",
    )


def _show(value: object) -> str:
    return printable(repr(value), MAX_CHARACTERS)
