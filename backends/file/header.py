"""The head of a block file: a safetensors header that says what the block is."""

import struct
from dataclasses import dataclass

import msgspec

from kvxfer.backends.file.digest import Digester, Integrity
from kvxfer.errors import KVXferError
from kvxfer.storage.keys import BlockKey

HEADER_BYTES = 4096
"""Every header fills one page, so that the data starts on a page: O_DIRECT and GDS need it."""

FORMAT_VERSION = "1"
MAX_KEY_BYTES = 119
"""A key in hexadecimal with the suffixes of a file is a name of less than 255 bytes."""

_LENGTH_PREFIX = struct.pack("<Q", HEADER_BYTES - 8)


class BlockFileError(KVXferError, ValueError):
    """Report a file that is not a block file, or not the one it should be."""


class _Metadata(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: str
    version: str
    namespace: str
    key: str
    start: str
    integrity: str
    checksum: str
    seal: str


class _Tensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[int, int]
    data_offsets: tuple[int, int]


class _Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    metadata: _Metadata = msgspec.field(name="__metadata__")
    blocks: _Tensor


_decoder = msgspec.json.Decoder(_Header)


@dataclass(frozen=True, slots=True)
class BlockHeader:
    """What a block file says about its data.

    The file holds one tensor, `blocks`: uint8, `(num_blocks, block_size_bytes)`, the blocks of
    the chunk from the one at byte `start` of the chunk on. What the pages of a block are is
    written in the `namespace.json` of the folder.

    The header is sealed: its own checksum covers every field, that of the data included, so that
    a changed header is never mistaken for another block's.

    Attributes:
        namespace: Fingerprint of the namespace.
        key: Key of the chunk.
        start: Where the data belongs in the chunk, in bytes.
        num_blocks: Rows of the tensor.
        block_size_bytes: Columns of the tensor.
        integrity: How `checksum` was made.
        checksum: Hexadecimal digits over the data.

    Source: https://github.com/huggingface/safetensors#format
    """

    namespace: str
    key: BlockKey
    start: int
    num_blocks: int
    block_size_bytes: int
    integrity: Integrity
    checksum: str

    @property
    def num_bytes(self) -> int:
        """Bytes of the data."""
        return self.num_blocks * self.block_size_bytes

    @property
    def stop(self) -> int:
        """Where the data ends in the chunk, in bytes."""
        return self.start + self.num_bytes

    def encode(self, digester: Digester) -> bytes:
        """Write the header, `HEADER_BYTES` long."""
        frame = HeaderFrame(
            self.namespace, self.start, self.num_blocks, self.block_size_bytes, digester
        )
        return frame.fill(self.key, self.checksum, self.integrity)

    @classmethod
    def decode(cls, page: bytes) -> "BlockHeader":
        """Read a header; its seal is not checked.

        Raises:
            BlockFileError: It is not the header of a block file of this version.
        """
        if len(page) != HEADER_BYTES or not page.startswith(_LENGTH_PREFIX):
            raise BlockFileError("no block file: the header is not one page")
        try:
            header = _decoder.decode(page[len(_LENGTH_PREFIX) :])
            metadata, blocks = header.metadata, header.blocks
            found = cls(
                namespace=metadata.namespace,
                key=BlockKey(bytes.fromhex(metadata.key)),
                start=int(metadata.start),
                num_blocks=blocks.shape[0],
                block_size_bytes=blocks.shape[1],
                integrity=Integrity(metadata.integrity),
                checksum=metadata.checksum,
            )
        except (msgspec.MsgspecError, ValueError) as exc:
            raise BlockFileError(f"no block file: {exc}") from exc
        if (metadata.format, metadata.version) != ("kvxfer-block", FORMAT_VERSION):
            said = f"{metadata.format} {metadata.version}"
            raise BlockFileError(f"format is {said!r}; expected 'kvxfer-block {FORMAT_VERSION}'")
        return found

    @classmethod
    def verify(cls, page: bytes, digester: Digester) -> "BlockHeader":
        """Read a header and check its seal.

        Raises:
            BlockFileError: It is not a header of this version, a byte of it changed, or it was
                written with another integrity or secret.
        """
        header = cls.decode(page)
        if digester.integrity not in (header.integrity, Integrity.OFF):
            said, wanted = header.integrity.value, digester.integrity.value
            raise BlockFileError(f"integrity is {said!r}; expected {wanted!r}")
        has_secret = digester.integrity is Integrity.KEYED
        sealed_by_secret = header.integrity is Integrity.KEYED
        if (has_secret or not sealed_by_secret) and header.encode(digester) != page:
            raise BlockFileError("the header does not match its seal")
        return header


class HeaderFrame:
    """What the headers of many blocks have in common: all but the key and the checksums.

    Args:
        namespace: See `BlockHeader`, as the next three.
        start: As above.
        num_blocks: As above.
        block_size_bytes: As above.
        digester: Makes the seals.
    """

    def __init__(
        self,
        namespace: str,
        start: int,
        num_blocks: int,
        block_size_bytes: int,
        digester: Digester,
    ) -> None:
        self._digester = digester
        self._before_key = (
            f'{{"__metadata__":{{"format":"kvxfer-block","version":"{FORMAT_VERSION}",'
            f'"namespace":"{namespace}","start":"{start}","key":"'
        )
        self._after_seal = (
            f'}},"blocks":{{"dtype":"U8","shape":[{num_blocks},{block_size_bytes}],'
            f'"data_offsets":[0,{num_blocks * block_size_bytes}]}}}}'
        )

    def fill(self, key: BlockKey, checksum: str, integrity: Integrity) -> bytes:
        """Write the header of one block, `HEADER_BYTES` long."""
        head = (
            f'{self._before_key}{key.hex()}","integrity":"{integrity.value}",'
            f'"checksum":"{checksum}"'
        )
        text = f'{head},"seal":"{self._digester.seal(head + self._after_seal)}"{self._after_seal}'
        return _LENGTH_PREFIX + text.encode().ljust(HEADER_BYTES - len(_LENGTH_PREFIX))
