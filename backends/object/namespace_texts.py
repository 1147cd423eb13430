"""Texts beside the pages of a namespace in a bucket: its description, the kinds of its pages."""

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
"""Number of times that a record is written anew where others write it, too."""

LOOK_AGAIN_S = 60.0
"""Time for which the texts are taken to be there, once they were."""

logger = logging.getLogger(__name__)


class NamespaceTexts:
    """Texts beside the pages of a namespace, as those in a folder of files.

    They describe the namespace, and record of which kinds its pages are: each engine notes its own
    before it stores a page. So a namespace is known to have pages that an engine cannot read before
    it meets one. Before a later store it looks for them again: `kvxfer gc` removes the texts of a
    namespace that has no pages at that moment. Belongs to one event loop.

    Attributes:
        overwrites: Whether the server ignores `If-None-Match`; known when the texts were written.
        has_others: Whether there may be pages of another integrity, or sealed with another key;
            taken to be so until the record was read.
    """

    def __init__(self, bucket: Bucket, pages: Pages) -> None:
        self._bucket = bucket
        self._pages = pages
        self._writing, self._reading = Once(), Once()
        self._look_at = -inf  # until they were written
        self._read_again = Pause(LOOK_AGAIN_S, 60 * LOOK_AGAIN_S)  # after a list that failed
        self._met_others = False
        self.overwrites = False
        self.has_others = True

    def meet_others(self) -> bool:
        """Note a page that we cannot read; return whether none was expected."""
        was_news = not self.has_others
        self._met_others = self.has_others = True
        return was_news

    async def write(self) -> None:
        """Describe the namespace and note the kind of our pages, unless that was seen just now."""
        if self._writing.is_done and runtime.monotonic() >= self._look_at:
            self._writing = Once()
        try:
            await self._writing.run(self._write)
        except RequestFailedError as exc:
            if self._look_at == -inf:
                raise
            logger.warning("%s: texts cannot be looked for: %s", self._bucket.place, exc)
            self._look_at = runtime.monotonic() + LOOK_AGAIN_S

    async def read(self) -> None:
        """Find out which kinds of pages there may be, where the texts can be listed."""
        if self._reading.is_done and not self._read_again.is_on(runtime.monotonic()):
            self._reading = Once()
        await self._reading.run(self._read)

    async def aclose(self, timeout_s: float) -> None:
        """Wait for what is under way."""
        await self._writing.wait(timeout_s)
        await self._reading.wait(timeout_s)

    async def _write(self) -> None:
        name, text = self._pages.description_name, memoryview(self._pages.description)
        create = self._bucket.create
        is_gone = self._look_at == -inf or await self._bucket.head(name) is None
        # What the first request has made, the second must not make again.
        if is_gone and await create(name, text) and await create(name, text):
            self.overwrites = True
            logger.warning("%s: the server ignores If-None-Match", self._bucket.place)
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
        except RequestFailedError:  # for want of a right, or since a list takes the server long
            # Pages are told apart by their headers meanwhile.
            self._read_again.begin(runtime.monotonic())
            return
        kinds = [kind for kind, name in RECORDS.items() if name in names]
        has_others = not all(map(digester.integrity.reads, kinds))
        if digester.cipher is not None and Integrity.SEALED in kinds:
            _, record = await self._read_record(folder + RECORDS[Integrity.SEALED])
            has_others |= has_other_keys(record, digester, self._pages.fingerprint)
        self.has_others = has_others or self._met_others
        self._read_again.until = inf
