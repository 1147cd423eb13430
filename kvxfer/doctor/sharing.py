"""Sharing: whether two engines, stores or descriptions have one namespace, or how they differ."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from urllib.parse import unquote

from kvxfer import runtime
from kvxfer.backends.file import BlockTree
from kvxfer.backends.nixl import NixlConfig, probe_peer
from kvxfer.connect import parse_backend
from kvxfer.doctor.configuration import is_configuration, plan_namespaces
from kvxfer.doctor.examination import STEPS_OF_PEER, Check, run_checks
from kvxfer.doctor.finding import MAX_CHARACTERS, Finding, error, ok
from kvxfer.doctor.places import describe_peer_failure, limit_handshake
from kvxfer.endpoint import Endpoint, split_url
from kvxfer.errors import (
    BackendUnavailableError,
    CacheMismatchError,
    InvalidArgumentError,
    PeerError,
)
from kvxfer.integrations.vllm.common.planned_namespaces import HANDED_OVER, PlannedNamespace
from kvxfer.kvcache.portable import CacheDescription, map_peers
from kvxfer.pages.names import NAMESPACE_FILE
from kvxfer.pages.texts import load_namespace
from kvxfer.storage.keys import Difference, Namespace
from kvxfer.text import printable

PEER = "nixl:"
STEPS_OF_VLLM = 12
"""Multiples of the timeout that vLLM may take to be imported and to read a configuration."""

_WHY = (
    "Blocks are found only where every field of the namespace is the same: these two never share."
)

_MENDS = {
    "model": "the same model name for both engines",
    "revision": "--revision COMMIT for both engines; a copied local folder has its own revision",
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


@dataclass(frozen=True, slots=True)
class Party:
    """Engine, store or description to compare, with the argument that names it.

    A store or a configuration may have several namespaces; a holder has none before an engine has
    settled its model. An engine that lends its caches has a description of them.
    """

    name: str
    namespaces: Sequence[PlannedNamespace]
    description: bytes | None = None

    def name_of(self, chosen: PlannedNamespace) -> str:
        """Name one of the namespaces in a finding."""
        if chosen.kind:
            return f"{self.name} ({chosen.kind})"
        is_only = len(self.namespaces) == 1
        return self.name if is_only else f"{self.name}/{chosen.namespace.fingerprint}"


def _known(namespace: Namespace) -> PlannedNamespace:
    """Wrap a namespace of which every field is known, but not the kind."""
    return PlannedNamespace(kind="", namespace=namespace, fields=Namespace.__struct_fields__)


def is_comparable(argument: str) -> bool:
    """Whether an argument names something to compare, rather than a tier with parameters.

    That is one peer, a `file://` URL without parameters, or a path.
    """
    try:
        parts = split_url(argument)
    except ValueError:
        return False
    if parts.scheme == "nixl":
        return bool(parts.netloc) and "," not in parts.netloc
    if parts.scheme == "file":
        return not parts.query
    return bool(argument) and "://" not in argument


def compare(arguments: Sequence[str], *, timeout_s: float) -> list[Finding]:
    """Find out whether two engines, stores or descriptions would share blocks.

    `timeout_s` is for each step of a peer's handshake; vLLM has `STEPS_OF_VLLM` times as long to
    read a configuration.

    Raises:
        InvalidArgumentError: An argument names nothing that has a namespace.
    """
    refused: list[InvalidArgumentError] = []

    def run() -> list[Finding]:
        try:
            return _find(arguments, timeout_s)
        except InvalidArgumentError as exc:  # which is no finding
            refused.append(exc)
            return []

    steps = (STEPS_OF_PEER if each.startswith(PEER) else STEPS_OF_VLLM for each in arguments)
    planned = Check("sharing", " ".join(arguments), run, sum(steps))
    findings = run_checks([planned], timeout_s=timeout_s)
    for problem in refused:
        raise problem
    return findings


def _find(arguments: Sequence[str], timeout_s: float) -> list[Finding]:
    parties: list[Party] = []
    findings: list[Finding] = []
    for argument in arguments:
        if argument.startswith(PEER):
            config, endpoint = _parse_peer(argument, timeout_s)
            try:
                probe = runtime.run(probe_peer(config, endpoint))
            except (PeerError, BackendUnavailableError) as exc:
                refused = describe_peer_failure(endpoint, exc)
                findings.append(refused.of("peer", f"nixl://{endpoint}"))
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
    config.read_secret()  # an error here is one of the argument
    (endpoint,) = config.peers
    return limit_handshake(config, timeout_s), endpoint


def _of_path(argument: str, timeout_s: float) -> Party:
    """Read the namespaces of a store, of a folder in it, of one file, or of a configuration."""
    parts = split_url(argument)
    if parts.scheme == "file" and (parts.netloc or parts.fragment):
        raise InvalidArgumentError("argument", argument, "file:///PATH, with three slashes alone")
    path = Path(unquote(parts.path) if parts.scheme == "file" else argument)
    if path.is_dir() and not (path / NAMESPACE_FILE).exists():
        try:
            found = [*BlockTree(path).namespaces()]
        except OSError as exc:
            wanted = f"a store that can be read: {exc.strerror}"
            raise InvalidArgumentError("argument", argument, wanted) from exc
        if not found:
            raise InvalidArgumentError("argument", argument, "a store with namespaces in it")
        return Party(argument, [*map(_known, found)])
    file = str(path / NAMESPACE_FILE if path.is_dir() else path)
    if is_configuration(file):
        return Party(argument, plan_namespaces(file, timeout_s=timeout_s * STEPS_OF_VLLM))
    return Party(argument, [_known(load_namespace(file))])


def _compare(ours: Party, theirs: Party) -> list[Finding]:
    """Compare namespaces of one kind if both sides have it, else the two that differ least."""
    for party in (ours, theirs):
        if not party.namespaces:
            return [ok(f"{party.name} takes the model of the first engine that connects")]
    pairs = [*product(ours.namespaces, theirs.namespaces)]
    alike = [pair for pair in pairs if pair[0].kind and pair[0].kind == pair[1].kind]
    compared = [
        [pair for pair in alike if pair[0].kind == kind]
        for kind in dict.fromkeys(our.kind for our, _ in alike)
    ]
    findings: list[Finding] = []
    for each in compared or [pairs]:
        our, their = min(each, key=lambda pair: len(_differences(*pair)))
        names = ours.name_of(our), theirs.name_of(their)
        differ = [_differ(difference, *names) for difference in _differences(our, their)]
        findings += differ or _compare_caches(ours, theirs) or [ok(_agree(our, their))]
    return findings


def _differences(ours: PlannedNamespace, theirs: PlannedNamespace) -> list[Difference]:
    """List how two namespaces differ, in the fields and keys that both are known to have."""
    known = {*ours.fields} & {*theirs.fields}
    found = ours.namespace.differences(theirs.namespace)
    keys = [
        Difference(name, value, theirs.keys[name])
        for name, value in ours.keys.items()
        if name in theirs.keys and value != theirs.keys[name]
    ]
    return [*(each for each in found if _name_of_field(each) in known), *keys]


def _agree(ours: PlannedNamespace, theirs: PlannedNamespace) -> str:
    kind = f"{ours.kind}: " if ours.kind and ours.kind == theirs.kind else ""
    model = printable(repr(ours.namespace.model), MAX_CHARACTERS)
    said = f"{kind}one namespace, {ours.namespace.fingerprint} of {model}"
    both = {*theirs.fields, *theirs.keys}
    known = [name for name in (*ours.fields, *ours.keys) if name in both]
    if not {*Namespace.__struct_fields__} <= {*known}:
        said = f"{kind}both of {model}, and equal in {', '.join(known)}"
    if unknown := dict.fromkeys(filter(None, (ours.unknown, theirs.unknown))):
        said += f"; not known before an engine runs: {'; '.join(unknown)}"
    if HANDED_OVER not in (ours.kind, theirs.kind):  # whose keys need no seed
        said += "; keys are the same if the seeds of hashes (PYTHONHASHSEED) and salts are"
    return said


def _name_of_field(difference: Difference) -> str:
    """Name the field that a difference is in, such as `parallel` for `parallel.tp_size`."""
    return re.split(r"[.[]", difference.field)[0]


def _differ(difference: Difference, our_name: str, their_name: str) -> Finding:
    field, ours, theirs = difference
    found = f"{_show(ours)} in {our_name}, {_show(theirs)} in {their_name}"
    mend = _MENDS[_name_of_field(difference)]
    return error(found, why=_WHY, mend=mend).of("sharing", printable(field))


def _compare_caches(ours: Party, theirs: Party) -> list[Finding]:
    """Check that our engine can read the blocks of theirs, if both lend their caches."""
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
            found = f"{exc.field}: {_show(exc.theirs)} in {party.name}, unknown to this kvxfer"
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
                "computes its own prompts.",
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
