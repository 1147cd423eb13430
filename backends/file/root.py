"""The root of a store: whether it is one, and who else may write to it."""

import logging
import os
import stat
from pathlib import Path

logger = logging.getLogger(__name__)


def warn_of_strangers(root: Path) -> None:
    """Say when others than this user can plant, replace and remove blocks in a root.

    Raises:
        OSError: It is not there.
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
