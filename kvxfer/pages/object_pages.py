"""Pages of a namespace as objects, with the names and bytes of the file backend's files."""

import weakref
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvxfer.copy_engine.cpu import CPUCopyEngine
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.pages.digest import Digester
from kvxfer.pages.header import BlockHeader, header_in
from kvxfer.pages.names import NAMESPACE_FILE, file_name, key_in_name
from kvxfer.pages.namespace_format import NamespaceFormat
from kvxfer.pages.texts import describe_namespace
from kvxfer.pages.verification import require_readable
from kvxfer.storage.backend import DONE, PARTIAL, Outcome
from kvxfer.storage.keys import BlockKey, Namespace

MAX_INLINE_BYTES = (2 << 20) + (64 << 10)
"""Size, with the header, up to which a page is verified and copied on the event loop. 2 MiB take
about 0.2 ms, no longer than the switch to a thread and back while all cores are busy."""

MAX_FREE_BYTES = 64 << 20
"""Maximum bytes of memory kept for later pages."""

SEALED_COSTS = 8
"""How many times longer a sealed page takes to decrypt than any other to verify and copy."""


class Pages(NamespaceFormat):
    """Pages of one namespace in a store of objects; thread-safe.

    All names begin with `folder`. The object `description_name` holds the `description`.
    """

    def __init__(self, prefix: str, namespace: Namespace, digester: Digester) -> None:
        super().__init__(namespace, digester)
        self.folder = f"{prefix}{namespace.fingerprint}/"
        self.description_name = self.folder + NAMESPACE_FILE
        self.description = describe_namespace(namespace).encode()
        self._copy_engine = CPUCopyEngine()
        self._memory = PageMemory()

    def name(self, key: BlockKey) -> str:
        """Name the object of a key: the prefix, and the path below the root of a file store."""
        return self.place(key) + file_name(key)

    def place(self, key: bytes) -> str:
        """Name the folder of a key, or of all keys with a prefix, after the first byte."""
        return f"{self.folder}{key[:1].hex()}/"

    def key_in(self, name: str) -> BlockKey:
        """Extract the key from an object's name; empty if it is not the name of a page."""
        key = key_in_name(name.rpartition("/")[2])
        return key if self.has_group(key) and name == self.name(key) else BlockKey(b"")

    def encode(self, key: BlockKey, block: Descriptors) -> memoryview:
        """Make a block's page, header and data, in memory of its own."""
        page = self._memory.take(self.format(key).header_size_bytes + block.num_bytes)
        self.write(key, block, page)
        return page.data

    def write(self, key: BlockKey, block: Descriptors, page: NDArray[np.uint8]) -> None:
        """Make a block's page, header and data, in memory of exactly its size."""
        size, head_size = block.num_bytes, self.format(key).header_size_bytes
        self._copy_engine.gather(block, _address(page) + head_size)
        data = page.data[head_size:]
        page.data[:head_size] = self.headers(
            [key], [int(block.payload_starts[0])], [size], [[data]]
        )[0]

    def decode(self, key: BlockKey, page: Any, block: Descriptors) -> Outcome:
        """Verify a whole page, and copy the bytes that `block` describes to the block's memory.

        `page` is any buffer. The block's memory is written only if the outcome is `DONE`.

        Raises:
            OtherIntegrityError: The page was stored with another integrity, or another key.
            BlockFileError: A byte differs from what was stored, or it is another block's page.
        """
        data = np.frombuffer(page, np.uint8)
        size = self.data_size(key, len(data))
        head_size = len(data) - size
        plain = np.empty(size, np.uint8) if self.is_encrypted else data[head_size:]
        start = self.check(key, bytes(data[:head_size]), data.data[head_size:], plain.data)
        skip = int(block.payload_starts[0]) - start
        if skip < 0 or skip + block.num_bytes > size:
            return PARTIAL
        self._copy_engine.scatter(_address(plain) + skip, block)
        return DONE

    @property
    def max_inline_bytes(self) -> int:
        """Size of the largest page that is decoded on the event loop sooner than on a thread."""
        return MAX_INLINE_BYTES // SEALED_COSTS if self.is_encrypted else MAX_INLINE_BYTES

    def require_readable(self, head: memoryview) -> BlockHeader | None:
        """Read a page's header; None if it is damaged, which a load will report.

        An `OtherIntegrityError` if the page has another integrity, or another key.
        """
        header = header_in(bytes(head))
        if header is not None:
            require_readable(header, self.digester)
        return header

    def covers(self, key: BlockKey, head: memoryview, size_bytes: int, block: Descriptors) -> bool:
        """Whether an object has all bytes of a block, by its header; errors: `require_readable`."""
        header = self.require_readable(head)
        extent = int(block.payload_starts[0]), block.num_bytes
        return header is not None and header.covers(key, *extent, size_bytes)

    def close(self) -> None:
        """Close the copy engine."""
        self._copy_engine.close()


class PageMemory:
    """Memory for pages on their way to a bucket, reused once nothing refers to it.

    Fresh memory costs more than the copy of a page into it, because the kernel maps 4 KiB at a
    time. The client of a late request may hold its page beyond the deadline; the memory is not
    reused before the client has dropped it. Thread-safe.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[NDArray[np.uint8]]] = {}

    def take(self, num_bytes: int) -> NDArray[np.uint8]:
        """Take memory of this size; it is given back when the array has no reference left."""
        free = self._free.setdefault(num_bytes, [])
        try:
            memory = free.pop()
        except IndexError:
            memory = np.empty(num_bytes, np.uint8)
        page = memory[:]
        weakref.finalize(page, self._give, free, memory).atexit = False
        return page

    def _give(self, free: list[NDArray[np.uint8]], memory: NDArray[np.uint8]) -> None:
        kept = sum(len(each) * num_bytes for num_bytes, each in tuple(self._free.items()))
        if kept + len(memory) <= MAX_FREE_BYTES:
            free.append(memory)


def _address(memory: NDArray[np.uint8]) -> int:
    address: int = memory.__array_interface__["data"][0]
    return address
