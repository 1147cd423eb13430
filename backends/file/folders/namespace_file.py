"""`namespace.json`: the description of a namespace in its folder, for people to read."""

import contextlib
import logging
from collections.abc import Iterator
from typing import Protocol

import msgspec

from kvxfer.backends.file.folders.block_tree import BlockTree
from kvxfer.backends.file.folders.namespace_folder import NamespaceFolder
from kvxfer.errors import InvalidArgumentError, NamespaceMismatchError
from kvxfer.named_files import read_named_file
from kvxfer.pages.header import BlockFileError
from kvxfer.pages.names import NAMESPACE_FILE
from kvxfer.storage.keys import Namespace

logger = logging.getLogger(__name__)


def load_namespace(path: str) -> Namespace:
    """Read a namespace from a `namespace.json`, wherever the file is now.

    Raises:
        InvalidArgumentError: The file cannot be read, or describes no namespace.
    """
    try:
        return msgspec.json.decode(read_named_file(path).data, type=Namespace)
    except (OSError, ValueError, msgspec.MsgspecError) as exc:  # ValueError: a NUL in the path
        reason = getattr(exc, "strerror", None) or exc
        wanted = f"a {NAMESPACE_FILE} of a file store: {reason}"
        raise InvalidArgumentError("namespace", path, wanted) from exc


class TextFolder(Protocol):
    """Folder of a namespace, as far as it has texts."""

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the namespace."""

    def read_text(self, name: str) -> str:
        """Read a text, or raise an OSError."""


def read_namespace(folder: TextFolder) -> Namespace:
    """Read the description of a folder's namespace.

    Raises:
        BlockFileError: The file is missing, damaged, or that of another folder.
    """
    try:
        namespace = msgspec.json.decode(folder.read_text(NAMESPACE_FILE), type=Namespace)
    except OSError as exc:
        raise BlockFileError(f"{NAMESPACE_FILE}: {exc.strerror or exc}") from exc
    except msgspec.MsgspecError as exc:
        raise BlockFileError(f"{NAMESPACE_FILE} is damaged: {exc}") from exc
    if namespace.fingerprint != folder.fingerprint:
        raise BlockFileError(
            f"{NAMESPACE_FILE} is damaged, or that of namespace {namespace.fingerprint}"
        )
    return namespace


def read_namespaces(tree: BlockTree) -> Iterator[Namespace]:
    """Read the descriptions of a store's namespaces; those that are missing or damaged are skipped.

    Raises:
        OSError: The root cannot be read.
    """
    for fingerprint in tree.fingerprints():
        with contextlib.suppress(BlockFileError), NamespaceFolder(tree.root, fingerprint) as folder:
            yield read_namespace(folder)


def log_other_namespaces(tree: BlockTree, namespace: Namespace) -> None:
    """Log why blocks of the same model are misses: the first field in which each namespace differs.

    Raises:
        OSError: The root cannot be read.
    """
    for theirs in read_namespaces(tree):
        if theirs.model != namespace.model:
            continue
        try:
            namespace.require_same(theirs)
        except NamespaceMismatchError as exc:
            found = theirs.fingerprint
            logger.info("blocks of the same model in %s are not found here: %s", found, exc)
