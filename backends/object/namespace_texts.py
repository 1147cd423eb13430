"""Texts beside the pages in a bucket: the namespace's description, the pages' integrity."""

import logging
from math import inf

from kvxfer import runtime
from kvxfer.backends.object.bucket import Bucket, ObjectVersion
from kvxfer.backends.object.request_failure import RequestFailedError
from kvxfer.pages.object_pages import Pages
from kvxfer.pages.texts import MAX_TEXT_BYTES, RECORDS, has_other_keys, make_record
from kvxfer.runtime import Once, Pause
from kvxfer.storage.integrity import Integrity

NOTE_ATTEMPTS = 5
"""Attempts to write a record that other engines write at the same time."""

LOOK_AGAIN_S = 60.0
"""How long texts that were seen are assumed to be there."""

logger = logging.getLogger(__name__)


class NamespaceTexts:
    """Texts beside the pages of a namespace, the same as in a folder of files.

    They describe the namespace, and record the integrities of its pages: each engine notes its own
    before it stores a page. So an engine knows that there may be pages that it cannot read before
    it meets one. A later store looks for the texts again, because `kvxfer gc` removes those of a
    namespace that has no pages at that moment. Belongs to one event loop.

    Attributes:
        overwrites: Whether the server ignores `If-None-Match`; known once the texts are written.
        has_others: Whether there may be pages of another integrity, or sealed with another key;
            True until the records were read.
    """

    def __init__(self, bucket: Bucket, pages: Pages) -> None:
        self._bucket = bucket
        self._pages = pages
        self._writing, self._reading = Once(), Once()
        self._look_at = -inf  # until the texts were written
        self._read_again = Pause(LOOK_AGAIN_S, 60 * LOOK_AGAIN_S)  # after a list that failed
        self._met_others = False
        self.overwrites = False
        self.has_others = True

    def meet_others(self) -> bool:
        """Note a page that we cannot read; return whether `has_others` was False."""
        was_news = not self.has_others
        self._met_others = self.has_others = True
        return was_news

    async def write(self) -> None:
        """Describe the namespace and note our integrity, unless both were seen a short time ago."""
        if self._writing.is_done and runtime.monotonic() >= self._look_at:
            self._writing = Once()
        try:
            await self._writing.run(self._write)
        except RequestFailedError as exc:
            if self._look_at == -inf:
                raise
            text = "%s: cannot look for %s: %s"
            logger.warning(text, self._bucket.place, self._pages.description_name, exc)
            self._look_at = runtime.monotonic() + LOOK_AGAIN_S

    async def read(self) -> None:
        """Find out whether there may be pages that we cannot read, if the texts can be listed."""
        if self._reading.is_done and not self._read_again.is_on(runtime.monotonic()):
            self._reading = Once()
        await self._reading.run(self._read)

    async def aclose(self, timeout_s: float) -> None:
        """Wait for a read and a write that are under way."""
        await self._writing.wait(timeout_s)
        await self._reading.wait(timeout_s)

    async def _write(self) -> None:
        name, text = self._pages.description_name, memoryview(self._pages.description)
        create = self._bucket.create
        is_gone = self._look_at == -inf or await self._bucket.head(name) is None
        # The second request must fail, since the first has created the object.
        if is_gone and await create(name, text) and await create(name, text):
            self.overwrites = True
            logger.warning("%s ignores If-None-Match, so each store asks first", self._bucket.place)
        await self._note_kind()
        self._look_at = runtime.monotonic() + LOOK_AGAIN_S

    async def _note_kind(self) -> None:
        bucket, name = self._bucket, self._pages.folder + RECORDS[self._pages.digester.integrity]
        for _ in range(NOTE_ATTEMPTS):
            version, said = await self._read_record(name)
            text = make_record(self._pages.digester, self._pages.fingerprint, said)
            if said == text:
                return
            data = memoryview(text.encode())
            storing = bucket.replace(name, data, version) if version else bucket.create(name, data)
            if await storing:
                return

    async def _read_record(self, name: str) -> tuple[ObjectVersion | None, str | None]:
        found = await self._bucket.read_begin(name, MAX_TEXT_BYTES)
        return (None, None) if found is None else (found[0], str(found[1], errors="replace"))

    async def _read(self) -> None:
        digester, folder = self._pages.digester, self._pages.folder
        try:
            _, names = await self._bucket.list_folder(folder)
        except RequestFailedError:  # without permission, or because the list takes too long
            # Meanwhile headers tell the pages apart.
            self._read_again.begin(runtime.monotonic())
            return
        kinds = [kind for kind, name in RECORDS.items() if name in names]
        has_others = not all(map(digester.integrity.reads, kinds))
        if digester.cipher is not None and Integrity.SEALED in kinds:
            _, record = await self._read_record(folder + RECORDS[Integrity.SEALED])
            has_others |= has_other_keys(record, digester, self._pages.fingerprint)
        self.has_others = has_others or self._met_others
        self._read_again.until = inf
