"""Format of the block files of one namespace: their headers, and the checks of what was read."""

from itertools import zip_longest

from kvxfer.backends.file.format.digest import Digester
from kvxfer.backends.file.format.group_format import GroupFormat
from kvxfer.backends.file.format.header import BlockFileError, HeaderFrame
from kvxfer.backends.file.format.verification import check_data, check_header
from kvxfer.storage.keys import GROUP_INDEX_BYTES, BlockKey, Namespace


class NamespaceFormat:
    """Format of the block files of a namespace, wherever they are kept.

    Args:
        namespace: Namespace, which says how large the chunks of each group are.
        digester: Makes and checks the checksums.

    Attributes:
        fingerprint: Fingerprint of the namespace.
        digester: As given.
    """

    def __init__(self, namespace: Namespace, digester: Digester) -> None:
        self.fingerprint = namespace.fingerprint
        self.digester = digester
        # By the last bytes of a key, which are its group.
        self._formats = {
            group.to_bytes(GROUP_INDEX_BYTES, "big"): GroupFormat(namespace, group)
            for group in range(len(namespace.groups))
        }
        # By group, start and size; at most one per way to cut a chunk at its blocks.
        self._frames: dict[tuple[bytes, int, int], HeaderFrame] = {}

    @property
    def num_groups(self) -> int:
        """KV-cache groups of the namespace."""
        return len(self._formats)

    def format(self, key: BlockKey) -> GroupFormat:
        """Get the format of the files of a key's group."""
        return self._formats[key[-GROUP_INDEX_BYTES:]]

    def header(self, key: BlockKey, start: int, num_bytes: int, checksum: str) -> bytes:
        """Make the header of a file with this data."""
        group = key[-GROUP_INDEX_BYTES:]
        frame = self._frames.get((group, start, num_bytes))
        if frame is None:
            tensors = self._formats[group].tensors(num_bytes)
            frame = HeaderFrame(self.fingerprint, start, tensors, self.digester)
            self._frames[group, start, num_bytes] = frame
        return frame.fill(key, checksum, self.digester.integrity)

    def data_size(self, key: BlockKey, file_size_bytes: int) -> int:
        """Compute the bytes of data of a file, which must be such as a file of its group has.

        Raises:
            BlockFileError: No file of the group has this size.
        """
        expected = self.format(key)
        num_bytes = file_size_bytes - expected.header_size_bytes
        if not expected.can_hold(num_bytes):
            whole = f"that of a whole chunk {expected.file_size_bytes}"
            raise BlockFileError(f"the file has {file_size_bytes} bytes, {whole}")
        return num_bytes

    def check(self, key: BlockKey, head: bytes, data: memoryview) -> int:
        """Check everything that was read of a file; return the offset of its data in the chunk.

        Raises:
            OtherIntegrityError: The block was stored with another integrity.
            BlockFileError: A byte is not what was stored, or the file is another block's.
        """
        digester, namespace = self.digester, self.fingerprint
        if head == self.header(key, 0, len(data), digester.checksum([data])):
            return 0
        header = check_header(head, digester, namespace=namespace, key=key, num_bytes=len(data))
        tensors = self.format(key).tensors(len(data))
        for said, expected in zip_longest(header.tensors, tensors):
            if said != expected:
                raise BlockFileError(f"tensor: the file says {said}, expected {expected}")
        check_data(header, digester, [data])
        return header.start
