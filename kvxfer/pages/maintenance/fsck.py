"""Check of every block in a store, for `kvxfer fsck`."""

import contextlib
import enum
import functools
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass

from kvxfer import runtime
from kvxfer.errors import BackendUnavailableError, InvalidArgumentError
from kvxfer.pages.digest import Digester, require_secrets
from kvxfer.pages.header import BlockFileError, BlockHeader, OtherIntegrityError
from kvxfer.pages.maintenance.block_store import BlockStore, OpenBlock, StoredNamespace
from kvxfer.pages.names import FoundBlock
from kvxfer.pages.page_cipher import SECRET_BYTES
from kvxfer.pages.texts import (
    NUM_SAMPLES,
    TextFolder,
    has_keyed,
    kinds_in,
    read_namespace,
    require_secret,
)
from kvxfer.pages.verification import check_data, check_header
from kvxfer.runtime import DaemonThreads
from kvxfer.storage.integrity import Integrity

FILES_PER_ROUND = 1024
"""Files given to the threads at a time; a check that is interrupted drops those not begun."""


class Verdict(enum.Enum):
    """Verdict on a block file.

    `GOOD`: every byte is as stored. `KEYED`, `SEALED`: the check lacks the secret or the key of the
    block, and found no fault that shows without it. `UNCHECKED`: the header is intact, and the data
    has no checksum. `CORRUPT`: no lookup may find the file. `OTHER`: engines with another integrity
    stored it and can read it. `UNREADABLE`: the operating system, or the server, cannot read it.
    `GONE`: it was removed meanwhile.
    """

    GOOD = "good"
    KEYED = "not verified: keyed"
    SEALED = "not verified: sealed"
    UNCHECKED = "no checksum"
    CORRUPT = "corrupt"
    OTHER = "of another integrity"
    UNREADABLE = "unreadable"
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class Finding:
    """Verdict on one file, and its reason.

    Attributes:
        reason: Why the file is bad; empty if it is not.
        quarantined: Whether the check moved the file to quarantine.
        not_moved: Error that kept the check from moving it.
    """

    block: FoundBlock
    verdict: Verdict
    reason: str = ""
    quarantined: bool = False
    not_moved: OSError | None = None

    @property
    def bad(self) -> bool:
        """Whether the check found a fault."""
        return self.verdict in (Verdict.CORRUPT, Verdict.OTHER, Verdict.UNREADABLE)


class BlockCheck:
    """Check of single files, whose headers tell their integrity; blocks; thread-safe.

    Args:
        secret: Secret of `integrity=keyed` or `sealed`, or several of the latter; files without
            theirs cannot be verified. With any, files of the other integrities are refused.
        tenant: Tenant whose sealed files are verified.

    Raises:
        InvalidArgumentError: The secret has a wrong length, or a tenant is given without one.
    """

    def __init__(self, secret: bytes | None = None, tenant: str = "") -> None:
        if tenant and secret is None:
            raise InvalidArgumentError("tenant", tenant, "no tenant without a secret file")
        if secret is not None:
            require_secrets(secret, several=True)
        self._secret, self._tenant = secret, tenant

    def has_secret_of(self, integrity: Integrity) -> bool:
        """Whether keyed or sealed files can be verified; several secrets are for sealed ones."""
        is_sealed, num_bytes = integrity is Integrity.SEALED, len(self._secret or b"")
        return num_bytes == SECRET_BYTES or (is_sealed and num_bytes > 0)

    def digester(self, integrity: Integrity) -> Digester:
        """Make the digester for files of an integrity: that of `OFF` if its secret is missing."""
        if not integrity.needs_secret:
            return Digester(integrity)
        if not self.has_secret_of(integrity):
            return Digester(Integrity.OFF)
        tenant = self._tenant if integrity is Integrity.SEALED else ""
        return Digester(integrity, self._secret, tenant)

    def require_secret_for(self, header: BlockHeader, expected: Integrity) -> None:
        """Check that a file needs the secret, if this check has one.

        Raises:
            OtherIntegrityError: Anybody could have made the file.
        """
        if self._secret is not None and not header.integrity.needs_secret:
            raise OtherIntegrityError(header.integrity, expected)

    def check(
        self, namespace: StoredNamespace, block: FoundBlock, *, repair: bool = False
    ) -> Finding:
        """Read a whole file and compare it with its name, its folder, its seal and its checksum.

        With `repair`, a corrupt file is moved to quarantine, or the finding has the error.

        Raises:
            BackendUnavailableError: The server is gone.
        """
        with contextlib.ExitStack() as stack:
            try:
                opened = stack.enter_context(namespace.open(block))
                return Finding(block, self._verify(opened, block, namespace))
            except OtherIntegrityError as exc:
                if exc.said is Integrity.SEALED:
                    return Finding(block, Verdict.SEALED)
                return Finding(block, Verdict.OTHER, str(exc))
            except BlockFileError as exc:
                reason = str(exc)
            except FileNotFoundError:
                return Finding(block, Verdict.GONE)
            except BackendUnavailableError:
                raise
            except OSError as exc:
                return Finding(block, Verdict.UNREADABLE, exc.strerror or str(exc))
            try:
                return Finding(block, Verdict.CORRUPT, reason, repair and opened.quarantine())
            except OSError as exc:  # as on a full disk: the other blocks are verified
                return Finding(block, Verdict.CORRUPT, reason, not_moved=exc)

    def _verify(self, opened: OpenBlock, block: FoundBlock, namespace: StoredNamespace) -> Verdict:
        if block.misplaced:
            raise BlockFileError(f"no lookup finds it in the folder {block.folder!r}")
        head, num_bytes = opened.read_header()
        said = BlockHeader.decode(head)
        digester = self.digester(said.integrity)
        header = check_header(
            head, digester, namespace=block.fingerprint, key=block.key, num_bytes=num_bytes
        )
        if self._secret is not None and not header.integrity.needs_secret:
            raise OtherIntegrityError(header.integrity, _expected_in(namespace))
        check_data(header, digester, opened.read_data(len(head)))
        if digester.integrity is not Integrity.OFF:
            return Verdict.GOOD
        return Verdict.KEYED if header.integrity is Integrity.KEYED else Verdict.UNCHECKED


class StoreCheck:
    """Check of every block of every namespace; can quarantine corrupt files; blocks.

    Engines may use the store meanwhile: blocks that they remove are skipped.

    Attributes:
        num_bytes: Bytes of the blocks to verify, without those in quarantine.
        errors: Errors of folders and files that could not be read, which are not verified.
        num_quarantined: Files that were in quarantine already.

    Raises:
        OSError: The store cannot be read.
        InvalidArgumentError: There is no store, or keyed blocks are sealed with another secret. In
            a namespace whose records tell of sealed blocks alone, they are corrupt instead.
    """

    def __init__(self, store: BlockStore, check: BlockCheck) -> None:
        store.require()
        self._store = store
        self._check = check
        self.errors: list[OSError] = []
        self.num_bytes = self.num_quarantined = 0
        self._not_moved: OSError | None = None
        for fingerprint in store.fingerprints():
            samples: list[FoundBlock] = []
            for block in store.blocks(fingerprint, errors=self.errors):
                self.num_quarantined += block.quarantined
                self.num_bytes += 0 if block.quarantined else block.num_bytes
                if not block.quarantined and len(samples) < NUM_SAMPLES:
                    samples.append(block)
            if check.has_secret_of(Integrity.KEYED) and samples:
                with store.namespace(fingerprint) as namespace:
                    heads = [namespace.read_head(block) for block in samples]
                    is_sealed = _expected_in(namespace) is Integrity.SEALED  # keyed ones are forged
                    if has_keyed(namespace, heads) and not is_sealed:
                        where = f"{store.place}/{fingerprint}"
                        require_secret(namespace, check.digester(Integrity.KEYED), heads, where)

    def verify(self, *, repair: bool = False) -> Iterator[Finding]:
        """Read every block, several at a time; yield the findings, namespace by namespace.

        With `repair`, corrupt files are moved to quarantine.
        """
        for fingerprint in self._store.fingerprints():
            with self._store.namespace(fingerprint) as namespace:
                check = functools.partial(self._check.check, namespace, repair=repair)
                found = self._store.blocks(fingerprint, errors=[])
                blocks = (block for block in found if not block.quarantined)
                for finding in _map_in_threads(check, blocks, self._store.num_at_once):
                    self._not_moved = self._not_moved or finding.not_moved
                    yield finding

    def namespace_problems(self) -> Iterator[str]:
        """Report missing or damaged descriptions of namespaces; no block depends on them."""
        for fingerprint in self._store.fingerprints():
            try:
                with self._store.namespace(fingerprint) as namespace:
                    read_namespace(namespace)
            except BlockFileError as exc:
                yield f"{fingerprint}: {exc}"

    def clean_up(self) -> int:
        """Remove temporary files of dead writers, return how many, and correct the count of bytes.

        Raises:
            OSError: The store or the count cannot be read, and the count is unchanged; or `verify`
                could not move a file to quarantine.
        """
        num_removed = self._store.collect()
        with contextlib.closing(self._store.open_count()) as count:
            count.recount_blocks(self._store.blocks(), lambda: self._store.num_skipped)
        if self._not_moved:
            raise self._not_moved
        return num_removed


def _expected_in(folder: TextFolder) -> Integrity:
    """Find the integrity that a secret is for: `SEALED` if only that needs one, else `KEYED`."""
    secret_kinds = {kind for kind in kinds_in(folder) if kind.needs_secret}
    return Integrity.SEALED if secret_kinds == {Integrity.SEALED} else Integrity.KEYED


def _map_in_threads(
    check: Callable[[FoundBlock], Finding], blocks: Iterator[FoundBlock], num_threads: int
) -> Iterator[Finding]:
    threads, checks = DaemonThreads("kvxfer-fsck", num_threads), list[Future[Finding]]()
    try:
        while some := list(itertools.islice(blocks, FILES_PER_ROUND)):
            checks = [threads.submit(check, block) for block in some]
            yield from map(runtime.result, checks)
    finally:
        for each in checks:
            each.cancel()
        threads.shutdown()
        threads.join()
