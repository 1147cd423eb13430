"""Root of a store: checks that it is one, and that no other user can write to it."""

import logging
import os
import stat
from pathlib import Path

from kvxfer.backends.file.ledger import LEDGER_NAME
from kvxfer.backends.file.namespace_file import NAMESPACE_FILE
from kvxfer.backends.file.tree import BlockTree
from kvxfer.errors import InvalidArgumentError

logger = logging.getLogger(__name__)


def require_store(tree: BlockTree) -> None:
    """Check that a folder is the root of a store: it has a count, a namespace or a block.

    Raises:
        InvalidArgumentError: The folder is something else.
        OSError: It is not a folder, or cannot be read.
    """
    has_block = any(True for _ in tree.blocks())  # first: reports a root that cannot be read
    namespaces = (tree.root / name / NAMESPACE_FILE for name in tree.fingerprints())
    if not has_block and not any(path.is_file() for path in (tree.root / LEDGER_NAME, *namespaces)):
        wanted = f"the root of a store, the folder with {LEDGER_NAME}"
        raise InvalidArgumentError("path", str(tree.root), wanted)


def warn_of_other_writers(root: Path) -> None:
    """Warn when other users can plant, replace and remove blocks in a root.

    Raises:
        OSError: The root does not exist.
    """
    found = root.stat()
    if found.st_uid not in (os.geteuid(), 0):  # to root, every folder is open anyway
        logger.warning(
            "%s: user %d owns it, and can plant, replace and remove blocks: chown it, or use a "
            "folder of your own",
            root,
            found.st_uid,
        )
    elif found.st_mode & stat.S_IWOTH:
        logger.warning(
            "%s: anybody can write to it, and plant, replace and remove blocks: chmod 700 it",
            root,
        )
