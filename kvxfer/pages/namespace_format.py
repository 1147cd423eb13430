"""Format of the block files of one namespace: their headers, and checks of files that were read."""

from collections.abc import Sequence
from itertools import zip_longest

import numpy as np

from kvxfer.errors import InvalidArgumentError
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.pages.digest import Digester
from kvxfer.pages.header import MAX_HEADER_BYTES, BlockFileError, HeaderFrame, header_size
from kvxfer.pages.verification import check_data, check_header, require_readable
from kvxfer.storage.backend import Outcome, Status
from kvxfer.storage.keys import GROUP_INDEX_BYTES, BlockKey, Namespace, StoredTensor

PART = Outcome(Status.FAILED, reason="a part of a chunk: this group is stored in whole chunks")
"""Outcome of storing bytes that no file or object of their group can hold."""


class GroupFormat:
    """Sizes of a group's files, and the tensors that they list.

    If the group lists tensors, each file has those of a whole chunk. Otherwise each file has one
    tensor, whole blocks of opaque bytes.
    """

    def __init__(self, namespace: Namespace, group: int) -> None:
        self.block_size_bytes = namespace.groups[group].block_size_bytes
        self.chunk_size_bytes = namespace.chunk_size_bytes(group)
        self._tensors = namespace.groups[group].tensors
        self.header_size_bytes = header_size(self._tensors)  # one disk page has room for `blocks`
        self.file_size_bytes = self.header_size_bytes + self.chunk_size_bytes
        self.has_parts = not self._tensors and self.block_size_bytes < self.chunk_size_bytes
        if self.header_size_bytes > MAX_HEADER_BYTES:
            found = f"{len(self._tensors)} tensors"
            expected = f"as many as a header of {MAX_HEADER_BYTES} bytes can list"
            raise InvalidArgumentError(f"groups[{group}].tensors", found, expected)

    def tensors(self, num_bytes: int) -> tuple[StoredTensor, ...]:
        """List the tensors of a file with `num_bytes` of data, for which `can_hold` is true."""
        if self._tensors:
            return self._tensors
        shape = num_bytes // self.block_size_bytes, self.block_size_bytes
        return (StoredTensor(name="blocks", dtype="U8", shape=shape),)

    def can_hold(self, num_bytes: int) -> bool:
        """Whether a file may have `num_bytes` of data."""
        if self._tensors:
            return num_bytes == self.chunk_size_bytes
        is_whole = num_bytes % self.block_size_bytes == 0
        return is_whole and 0 < num_bytes <= self.chunk_size_bytes


class NamespaceFormat:
    """Format of the block files of a namespace, in any medium."""

    def __init__(self, namespace: Namespace, digester: Digester) -> None:
        self.fingerprint = namespace.fingerprint
        self.digester = digester
        # By the last bytes of a key, its group.
        self._formats = {
            group.to_bytes(GROUP_INDEX_BYTES, "big"): GroupFormat(namespace, group)
            for group in range(len(namespace.groups))
        }
        # By group, start and size; at most one per way to cut a chunk at its blocks.
        self._frames: dict[tuple[bytes, int, int], HeaderFrame] = {}

    @property
    def largest_file_bytes(self) -> int:
        """Bytes of the largest file of any group."""
        return max(each.file_size_bytes for each in self._formats.values())

    def has_group(self, key: BlockKey) -> bool:
        """Whether the namespace has a key's group; a foreign file's name may give any group."""
        return key[-GROUP_INDEX_BYTES:] in self._formats

    def format(self, key: BlockKey) -> GroupFormat:
        """Get the format of the files of a key's group."""
        return self._formats[key[-GROUP_INDEX_BYTES:]]

    def formats(self, keys: Sequence[BlockKey]) -> list[GroupFormat]:
        """Get the format of each key's files."""
        return [self._formats[key[-GROUP_INDEX_BYTES:]] for key in keys]

    def require_whole_blocks(self, keys: Sequence[BlockKey], blocks: Descriptors) -> None:
        """Check that parts of chunks are whole blocks; `CallGuard` checks that they lie within."""
        formats = self.formats(keys)
        block_sizes = np.array([each.block_size_bytes for each in formats])
        starts, sizes = blocks.payload_starts, blocks.block_sizes
        good = (sizes % block_sizes == 0) & (starts % block_sizes == 0)
        if not good.all():
            at = int(good.argmin())
            chunk = formats[at].chunk_size_bytes
            wanted = f"whole blocks of {block_sizes[at]} bytes, up to {chunk} in all"
            extent = int(starts[at]), int(starts[at] + sizes[at])
            raise InvalidArgumentError(f"block of {keys[at]!r}", extent, wanted)

    @property
    def is_encrypted(self) -> bool:
        """Whether data is stored encrypted, and so never straight from the caller's memory."""
        return self.digester.cipher is not None

    def headers(
        self,
        keys: Sequence[BlockKey],
        starts: Sequence[int],
        sizes: Sequence[int],
        data: Sequence[Sequence[memoryview]],
    ) -> list[bytes]:
        """Make the headers of files with this data; sealing encrypts the data in place."""
        frames, digester, headers = self._frames, self.digester, []
        for key, start, num_bytes, pieces in zip(keys, starts, sizes, data, strict=True):
            frame = frames.get((key[-GROUP_INDEX_BYTES:], start, num_bytes))
            if frame is None:
                frame = self._frame(key, start, num_bytes)
            if digester.cipher is None:
                checksum = digester.checksum(pieces)
            else:
                (whole,) = pieces
                bound = frame.bound(key)
                checksum = digester.cipher.encrypt(self.fingerprint, key, bound, whole)
            headers.append(frame.fill(key, checksum))
        return headers

    def are_whole(
        self,
        keys: Sequence[BlockKey],
        heads: Sequence[bytes],
        sizes: Sequence[int],
        data: Sequence[Sequence[memoryview]],
        into: memoryview | None = None,
    ) -> list[bool]:
        """Whether files are intact and begin at byte 0 of their chunks; decrypts like `check`."""
        cipher = self.digester.cipher
        if cipher is None:
            # One comparison for the seal, the key, the namespace, the size and the checksum.
            wanted = self.headers(keys, [0] * len(keys), sizes, data)
            return [head == each for head, each in zip(heads, wanted, strict=True)]
        whole = []
        for key, head, num_bytes, pieces in zip(keys, heads, sizes, data, strict=True):
            frame = self._frame(key, 0, num_bytes)
            checksum = frame.checksum_in(head, key)
            whole.append(
                head == frame.fill(key, checksum)
                and cipher.decrypt(self.fingerprint, key, frame.bound(key), checksum, pieces, into)
            )
        return whole

    def data_size(self, key: BlockKey, file_size_bytes: int) -> int:
        """Compute the bytes of data in a file; a `BlockFileError` if no file can have its size."""
        expected = self.format(key)
        num_bytes = file_size_bytes - expected.header_size_bytes
        if not expected.can_hold(num_bytes):
            whole = f"the file of a whole chunk has {expected.file_size_bytes}"
            raise BlockFileError(f"the file has {file_size_bytes} bytes; {whole}")
        return num_bytes

    def check(
        self, key: BlockKey, head: bytes, data: memoryview, into: memoryview | None = None
    ) -> int:
        """Verify a whole file that was read; return the offset of its data in the chunk.

        Sealed data is decrypted in place, or `into` other memory.

        Raises:
            OtherIntegrityError: The block was stored with another integrity, or sealed with a key
                that this process lacks.
            BlockFileError: A byte differs from what was stored, or the file is another block's.
        """
        digester, namespace = self.digester, self.fingerprint
        if self.are_whole([key], [head], [len(data)], [[data]], into)[0]:
            return 0
        header = check_header(head, digester, namespace=namespace, key=key, num_bytes=len(data))
        require_readable(header, digester)  # first: a sealed header rightly lists another tensor
        for said, expected in zip_longest(header.tensors, self._tensors(key, len(data))):
            if said != expected:
                raise BlockFileError(f"tensor: the file says {said}, expected {expected}")
        check_data(header, digester, [data], into)
        return header.start

    def _frame(self, key: BlockKey, start: int, num_bytes: int) -> HeaderFrame:
        group = key[-GROUP_INDEX_BYTES:]
        frame = self._frames.get((group, start, num_bytes))
        if frame is None:
            frame = self._frames[group, start, num_bytes] = HeaderFrame(
                self.fingerprint,
                start,
                self._tensors(key, num_bytes),
                self.digester,
                integrity=self.digester.integrity,
                min_size_bytes=self.format(key).header_size_bytes,
            )
        return frame

    def _tensors(self, key: BlockKey, num_bytes: int) -> tuple[StoredTensor, ...]:
        if self.is_encrypted:
            return (StoredTensor(name="sealed", dtype="U8", shape=(num_bytes,)),)
        return self.format(key).tensors(num_bytes)
