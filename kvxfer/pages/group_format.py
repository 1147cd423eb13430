"""Format of the block files of one KV-cache group: their sizes and tensors."""

from kvxfer.errors import InvalidArgumentError
from kvxfer.pages.header import MAX_HEADER_BYTES, header_size
from kvxfer.storage.keys import Namespace, StoredTensor


class GroupFormat:
    """Sizes of the files of a group, and the tensors that they list.

    A group whose chunks are tensors has files of whole chunks, which list those. Any other's
    files hold whole blocks of opaque bytes, listed as one tensor.

    Args:
        namespace: The namespace.
        group: Index of the group.

    Attributes:
        block_size_bytes: Bytes of one block.
        chunk_size_bytes: Bytes of a whole chunk.
        header_size_bytes: Bytes of the header of each file.
        file_size_bytes: Bytes of the file of a whole chunk.
        has_parts: Whether a file may hold a part of a chunk.

    Raises:
        InvalidArgumentError: The tensors are more than the largest header can list.
    """

    def __init__(self, namespace: Namespace, group: int) -> None:
        self.block_size_bytes = namespace.groups[group].block_size_bytes
        self.chunk_size_bytes = namespace.chunk_size_bytes(group)
        self._tensors = namespace.groups[group].tensors
        self.header_size_bytes = header_size(self._tensors)  # `blocks` fits into its first page
        self.file_size_bytes = self.header_size_bytes + self.chunk_size_bytes
        self.has_parts = not self._tensors and self.block_size_bytes < self.chunk_size_bytes
        if self.header_size_bytes > MAX_HEADER_BYTES:
            raise InvalidArgumentError(
                f"groups[{group}].tensors",
                f"{len(self._tensors)} tensors",
                f"as many as a header of {MAX_HEADER_BYTES} bytes can list",
            )

    def tensors(self, num_bytes: int) -> tuple[StoredTensor, ...]:
        """List the tensors of a file with `num_bytes` of data, which it can hold."""
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
