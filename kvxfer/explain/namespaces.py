"""Namespaces: where else a block is, and in which fields that namespace differs from ours."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kvxfer.backends.file import BlockTree, FileConfig, read_namespaces, refuse_partial_walk
from kvxfer.backends.file.folders.block_tree import require_store
from kvxfer.backends.file.io.file_io import require_known
from kvxfer.connect import parse_backend
from kvxfer.errors import InvalidArgumentError
from kvxfer.explain.answer import Answer, Cause, Explained
from kvxfer.explain.history import History, Place
from kvxfer.storage.keys import BlockKey, Namespace
from kvxfer.telemetry.journal_file import Kind
from kvxfer.text import printable

MAX_FIELDS = 3
MAX_CHARACTERS = 100
"""Most fields, and characters of a value, that are shown."""

_MAY_BE_ELSEWHERE = frozenset({Answer.NEVER_STORED, Answer.UNKNOWN})


@dataclass(frozen=True, slots=True)
class FileStore:
    """Store in files whose folders are looked into.

    Attributes:
        url: As given.
        tree: Its folders.
        namespaces: Its namespaces, as far as they are described.
    """

    url: str
    tree: BlockTree
    namespaces: Sequence[Namespace]

    @classmethod
    def open(cls, url: str) -> "FileStore":
        """Open the store that a URL names; nothing in it is changed.

        Raises:
            InvalidArgumentError: It names none.
        """
        if not url.startswith("file:"):
            raise InvalidArgumentError("store", url, "a store in files, such as file:///var/kv")
        joint = "&" if "?" in url else "?"
        complete = url if "capacity=" in url else f"{url}{joint}capacity=1GiB"  # of no use here
        _, config = parse_backend(complete)
        assert isinstance(config, FileConfig)
        tree = BlockTree(Path(config.path), on_error=refuse_partial_walk)
        try:
            require_store(tree)
            return cls(url.partition("?")[0], tree, list(read_namespaces(tree)))
        except OSError as exc:
            wanted = f"a store that can be read: {exc.strerror}"
            raise InvalidArgumentError("store", url, wanted) from exc

    def has(self, namespace: Namespace, key: BlockKey) -> bool:
        """Whether the file of a block is there."""
        with self.tree.folder(namespace.fingerprint) as folder:
            return require_known(folder.sizes([key])) != [None]

    def has_in_quarantine(self, namespace: Namespace, key: BlockKey) -> bool:
        """Whether a corrupt file of a block was kept."""
        with self.tree.folder(namespace.fingerprint) as folder:
            return folder.quarantined_size(key) is not None


class Elsewhere:
    """Places in which blocks are that an engine missed: other engines, and stores in files.

    Args:
        history: What the journals say.
        stores: Stores to look into.
    """

    def __init__(self, history: History, stores: Sequence[FileStore]) -> None:
        self._history = history
        self._stores = stores

    def look(self, explained: Explained, place: Place) -> Explained:
        """Look for a block that no journal of its engine explains."""
        ours = self._history.namespace_of(place)
        if explained.answer not in _MAY_BE_ELSEWHERE or ours is None:
            return explained
        key = explained.key
        for store in self._stores:
            if ours not in store.namespaces:
                continue
            if store.has_in_quarantine(ours, key):
                text = f"corrupt: in the quarantine of {store.url}"
                return replace(explained, answer=Answer.CORRUPT, causes=(_cause(text),))
            if store.has(ours, key):
                cause = _cause(f"by now it is in {store.url}")
                return replace(explained, causes=(*explained.causes, cause))
        theirs = [each for each in self._namespaces_with(key, ours) if each[0] != ours]
        if not theirs or explained.answer is Answer.UNKNOWN:
            return explained
        namespace, where = min(theirs, key=lambda each: len(ours.differences(each[0])))
        text = _differ(ours, namespace, where)
        cause = Cause(Answer.OTHER_NAMESPACE, "", text, None)
        return replace(explained, answer=Answer.OTHER_NAMESPACE, causes=(cause,))

    def _namespaces_with(self, key: BlockKey, ours: Namespace) -> list[tuple[Namespace, str]]:
        """List namespaces in which a key was stored, and where."""
        found = [
            (namespace, store.url)
            for store in self._stores
            for namespace in store.namespaces
            if namespace != ours and store.has(namespace, key)
        ]
        for each in self._history.happenings[key]:
            namespace = self._history.sources[each.place].namespace
            if each.kind is Kind.STORED and not each.namespace and namespace is not None:
                found.append((namespace, f"{each.tier} of process {each.place.process}"))
        return found


def _cause(text: str) -> Cause:
    return Cause(Answer.UNKNOWN, "", text, None)


def _differ(ours: Namespace, theirs: Namespace, where: str) -> str:
    differences = ours.differences(theirs)
    texts = [
        f"{printable(field)} is {_show(our)} here, {_show(their)} there"
        for field, our, their in differences[:MAX_FIELDS]
    ]
    if more := len(differences) - MAX_FIELDS:
        texts += [f"{more} more fields differ"] if more > 0 else []
    return f"in another namespace, of {where}: {'; '.join(texts)}"


def _show(value: object) -> str:
    return printable(repr(value), MAX_CHARACTERS)
