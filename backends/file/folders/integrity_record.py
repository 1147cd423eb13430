"""Record of the integrities of blocks in a namespace's folder, with proof of the secret."""

import contextlib
import itertools
import logging
from collections.abc import Sequence

from kvxfer.backends.file.folders.block_tree import BlockTree
from kvxfer.backends.file.folders.ledger import Ledger
from kvxfer.backends.file.folders.namespace_folder import NamespaceFolder
from kvxfer.backends.file.io.file_io import Size, SuppressAbsent, closing
from kvxfer.errors import InvalidArgumentError
from kvxfer.pages.digest import Digester
from kvxfer.pages.header import OTHER_KEY_REASON, BlockFileError, OtherIntegrityError, header_in
from kvxfer.pages.page_cipher import key_id_in
from kvxfer.pages.texts import (
    NUM_SAMPLES,
    RECORDS,
    has_other_keys,
    make_record,
    proof_in,
    read_record,
    require_secret,
    with_key,
)
from kvxfer.pages.verification import read_header, require_readable
from kvxfer.storage.backend import Outcome, Status
from kvxfer.storage.integrity import Integrity
from kvxfer.storage.keys import BlockKey

OTHER_SECRET = Outcome(
    Status.FAILED, reason="secret_file: the blocks in the folder are sealed with another secret"
)

logger = logging.getLogger(__name__)


class IntegrityRecord:
    """Record of the integrities of blocks in a namespace's folder, shared by its processes.

    Each process notes its integrity in a file. The file for keyed blocks proves the secret without
    revealing it, and the file for sealed blocks lists the ids of their keys. So a block that this
    process cannot read is neither offered by a lookup nor taken for stored, and a block whose seal
    fails is corrupt only if the secret is right. The ledger is locked while a process notes its
    integrity. Thread-safe; every method blocks.
    """

    def __init__(
        self, folder: NamespaceFolder, digester: Digester, tree: BlockTree, ledger: Ledger
    ) -> None:
        self._folder = folder
        self._digester = digester
        self._tree = tree
        self._ledger = ledger
        self._kind = digester.integrity
        self._unreadable = tuple(kind for kind in Integrity if not self._kind.reads(kind))
        self._text = make_record(digester, folder.fingerprint)

    def open(self) -> None:
        """Note our integrity, and warn if there may be blocks that this process cannot read.

        Raises:
            InvalidArgumentError: The blocks are sealed with another secret.
        """
        self._note_own_kind()
        found = []
        if others := ", ".join(sorted(kind.value for kind in self._other_kinds())):
            found += [f"of integrity={others}, which integrity={self._kind.value} does not read"]
        if self._has_other_keys():
            found += [f"that are {OTHER_KEY_REASON}"]
        for blocks in found:
            where = self._folder.root / self._folder.fingerprint
            text = "%s holds blocks %s: they are misses, and are not stored again until they are "
            text += "evicted or removed"
            logger.warning(text, where, blocks)

    def is_sealed_with_our_secret(self) -> bool:
        """Whether the blocks are sealed with our secret, if any; notes our integrity if need be."""
        try:
            self._note_own_kind()
        except InvalidArgumentError:
            return False
        except OSError:  # unknown without a record
            return self._kind is not Integrity.KEYED
        return True

    def note(self, kind: Integrity, key_id: str = "") -> None:
        """Note that there is a block of another integrity, or sealed with another key."""
        before = self._read(kind)
        record = with_key(before, key_id) if key_id else before or f"{kind.value}\n"
        if record != before:
            self._folder.put_text(RECORDS[kind], record)

    def unreadable(
        self, keys: Sequence[BlockKey], sizes: Sequence[Size]
    ) -> dict[int, Outcome | OSError]:
        """Find the blocks that are stored, as `sizes` tell, and that this process cannot read.

        Returns the outcome of each, or the error of reading its header, by its index in `keys`.
        """
        there = [index for index, size in enumerate(sizes) if isinstance(size, int)]
        if not there:
            return {}
        if self._has_other_secret():
            return dict.fromkeys(there, OTHER_SECRET)
        found: dict[int, Outcome | OSError] = {}
        if self._other_kinds() or self._has_other_keys():
            for index in there:
                try:
                    if header := header_in(_read_head(self._folder, keys[index])):
                        require_readable(header, self._digester)
                except OtherIntegrityError as exc:
                    found[index] = Outcome(Status.FAILED, reason=str(exc))
                except OSError as exc:
                    found[index] = exc
        return found

    def _note_own_kind(self) -> None:
        record = self._read(self._kind)
        if record == self._with_ours(record):
            return
        with self._ledger.locked():
            with contextlib.closing(self._tree.blocks(self._folder.fingerprint)) as found:
                blocks = list(itertools.islice(found, NUM_SAMPLES))
            if self._kind is Integrity.KEYED:
                some = [block for block in blocks if not block.quarantined]
                heads = (read_head(self._folder, block.key, block.folder) for block in some)
                where = str(self._folder.root / self._folder.fingerprint)
                require_secret(self._folder, self._digester, heads, where)
            if not any(map(self._folder.has_text, RECORDS.values())):  # an earlier version's
                heads = (read_head(self._folder, block.key, block.folder) for block in blocks)
                headers = filter(None, map(header_in, heads))
                for said in dict.fromkeys((h.integrity, key_id_in(h.checksum)) for h in headers):
                    self.note(*said)
            record = self._with_ours(self._read(self._kind))
            self._folder.put_text(RECORDS[self._kind], record)

    def _with_ours(self, record: str | None) -> str:
        """Make the record of our integrity; that of sealed blocks keeps the ids of other keys."""
        return make_record(self._digester, self._folder.fingerprint, record)

    def _has_other_keys(self) -> bool:
        if self._kind is not Integrity.SEALED:
            return False
        return has_other_keys(self._read(self._kind), self._digester, self._folder.fingerprint)

    def _has_other_secret(self) -> bool:
        """Whether the record proves a secret other than ours."""
        said = proof_in(self._read(self._kind)) if self._kind is Integrity.KEYED else ""
        return said not in ("", proof_in(self._text))

    def _other_kinds(self) -> list[Integrity]:
        return [kind for kind in self._unreadable if self._folder.has_text(RECORDS[kind])]

    def _read(self, kind: Integrity) -> str | None:
        return read_record(self._folder, kind)


def read_head(folder: NamespaceFolder, key: BlockKey, found_in: str = "") -> bytes:
    """Read the header of a block file; empty if there is none, or it cannot be read."""
    with contextlib.suppress(OSError):
        return _read_head(folder, key, found_in)
    return b""


def _read_head(folder: NamespaceFolder, key: BlockKey, found_in: str = "") -> bytes:
    """Read the header of a block file, or raise an OSError; empty if there is none."""
    with (
        SuppressAbsent(),
        contextlib.suppress(BlockFileError),
        closing(folder.open_block(key, found_in=found_in)) as fd,
    ):
        return read_header(fd)[0]
    return b""
