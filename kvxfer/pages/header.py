"""Header of a block file: a safetensors header with the block's key, namespace and checksum."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from kvxfer.errors import InvalidArgumentError, KVXferError
from kvxfer.pages.digest import Digester
from kvxfer.pages.page_cipher import key_id_in
from kvxfer.storage.backend import Outcome, Status
from kvxfer.storage.integrity import Integrity
from kvxfer.storage.keys import BlockKey, StoredTensor
from kvxfer.text import printable

PAGE_BYTES = 4096
"""Size of a disk page, the unit in which disks, O_DIRECT and GDS move bytes."""

LENGTH_BYTES = 8
"""Size of the number at the start of a file: the length, little-endian, of the text after it."""

MAX_HEADER_BYTES = 1 << 20
"""Maximum size of a header, enough for about 10,000 tensors; a longer one is not read."""

FORMAT_VERSION = "1"
MAX_KEY_BYTES = 119
"""Maximum size of a key: a file's name, hexadecimal with a suffix, must stay below 255 bytes."""

MAX_DETAIL_CHARS = 1000
"""Maximum length of an error: text from a file must not fill a log."""
OTHER_KEY_REASON = "sealed with another key, of another tenant or another secret"
_METADATA_BYTES = 1024  # more than the metadata takes, with the longest key and keyed checksums


class BlockFileError(KVXferError, ValueError):
    """File that is not a block file, or not the expected one."""

    def __init__(self, detail: str) -> None:  # text from a file must not control a terminal
        super().__init__(printable(detail, MAX_DETAIL_CHARS)[:MAX_DETAIL_CHARS])


class OtherIntegrityError(BlockFileError):
    """Block of another integrity, or sealed with another key, which other engines can read.

    Attributes:
        said: Integrity of the block.
        key_id: Id of the key of a sealed block, if this process seals with other keys; else empty.
    """

    def __init__(self, said: Integrity, expected: Integrity, *, key_id: str = "") -> None:
        self.said = said
        self.key_id = key_id
        other = f"integrity is {said.value!r}; expected {expected.value!r}"
        super().__init__(OTHER_KEY_REASON if key_id else other)

    @property
    def outcome(self) -> Outcome:
        """Outcome of a load of the block: `MISSING` if it was sealed with another key."""
        return Outcome(Status.MISSING if self.key_id else Status.FAILED, reason=str(self))


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
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


_header_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_metadata_decoder = msgspec.json.Decoder(_Metadata)
_tensor_decoder = msgspec.json.Decoder(_Tensor)


@dataclass(frozen=True, slots=True)
class BlockHeader:
    """Header of a block file: the identity, place and checksum of its data.

    The data is that of the tensors, in order. If the group lists tensors for its chunks, the file
    has those. Otherwise it has one tensor, `blocks`: uint8, `(num_blocks, block_size_bytes)`, the
    blocks from byte `start` of the chunk on; `namespace.json` describes their pages. A sealed file
    lists the tensor `sealed`, uint8, `(num_bytes,)`, instead, and its header is as long as an
    unsealed one.

    The header's own checksum, its seal, covers every other field, the checksum of the data
    included, so that a changed header is never mistaken for another block's.

    Source: https://github.com/huggingface/safetensors#format
    """

    namespace: str  # fingerprint
    key: BlockKey
    start: int  # offset of the data in the chunk, in bytes
    tensors: tuple[StoredTensor, ...]
    integrity: Integrity
    checksum: str  # of the data, in hexadecimal digits
    min_size_bytes: int = 0  # of the header, if it is longer than `tensors` need

    @property
    def num_bytes(self) -> int:
        """Bytes of the data."""
        return sum(tensor.num_bytes for tensor in self.tensors)

    @property
    def stop(self) -> int:
        """Offset in the chunk at which the data ends, in bytes."""
        return self.start + self.num_bytes

    @property
    def data_offset(self) -> int:
        """Offset of the data in the file, in bytes: the size of the header."""
        return max(header_size(self.tensors), self.min_size_bytes)

    def covers(self, key: BlockKey, start: int, num_bytes: int, size_bytes: int) -> bool:
        """Whether a file of `size_bytes` is whole, and has these bytes of the key's chunk."""
        is_whole = self.key == key and self.data_offset + self.num_bytes == size_bytes
        return is_whole and self.start <= start and start + num_bytes <= self.stop

    def encode(self, digester: Digester) -> bytes:
        """Encode the header, `data_offset` bytes long."""
        return self.frame(digester).fill(self.key, self.checksum)

    @classmethod
    def decode(cls, data: bytes) -> "BlockHeader":
        """Decode a whole header of this version, without a check of its seal."""
        if header_size_in(data) != len(data):
            raise BlockFileError(f"not a block file: {len(data)} bytes are not the whole header")
        try:
            entries = _header_decoder.decode(data[LENGTH_BYTES:])
            metadata = _metadata_decoder.decode(entries.pop("__metadata__", b"null"))
            found = cls(
                namespace=metadata.namespace,
                key=BlockKey(bytes.fromhex(metadata.key)),
                start=int(metadata.start),
                tensors=_read_tensors(entries),
                integrity=Integrity(metadata.integrity),
                checksum=metadata.checksum,
            )
            if found.integrity is Integrity.SEALED:
                found = _complete_sealed(found, len(data))
        except (msgspec.MsgspecError, ValueError, RecursionError) as exc:
            raise BlockFileError(f"not a block file: {exc}") from exc
        if (metadata.format, metadata.version) != ("kvxfer-block", FORMAT_VERSION):
            said = f"{metadata.format} {metadata.version}"
            raise BlockFileError(f"format is {said!r}; expected 'kvxfer-block {FORMAT_VERSION}'")
        if found.data_offset != len(data):
            wanted = f"expected {found.data_offset} for its tensors"
            raise BlockFileError(f"not a block file: the header has {len(data)} bytes, {wanted}")
        return found

    @classmethod
    def verify(cls, data: bytes, digester: Digester) -> "BlockHeader":
        """Decode a whole header and check its seal; that of a keyed one only with the secret.

        Raises:
            OtherIntegrityError: It has another integrity, and no fault that shows without a secret.
            BlockFileError: It is damaged, or not the header of a block file.
        """
        header = cls.decode(data)
        is_other = digester.integrity not in (header.integrity, Integrity.OFF)
        if header.integrity is not Integrity.KEYED:
            sealer: Digester | None = Digester(Integrity.FAST)
        else:
            sealer = digester if digester.integrity is Integrity.KEYED else None
        if sealer and header.encode(sealer) != data:
            raise BlockFileError("the header does not match its seal")
        if is_other:
            raise OtherIntegrityError(header.integrity, digester.integrity)
        return header

    def frame(self, digester: Digester) -> "HeaderFrame":
        """Make the frame of all headers that differ from this one only in key and checksums."""
        return HeaderFrame(
            self.namespace,
            self.start,
            self.tensors,
            digester,
            integrity=self.integrity,
            min_size_bytes=self.min_size_bytes,
        )


class HeaderFrame:
    """Part that headers of many blocks have in common: all but key and checksums."""

    def __init__(
        self,
        namespace: str,
        start: int,
        tensors: Sequence[StoredTensor],
        digester: Digester,
        *,
        integrity: Integrity,
        min_size_bytes: int = 0,
    ) -> None:
        listed = _list(tensors)
        self._digester = digester
        self._num_bytes = max(_size(listed), min_size_bytes)
        self._length = (self._num_bytes - LENGTH_BYTES).to_bytes(LENGTH_BYTES, "little")
        self._before_key = (
            f'{{"__metadata__":{{"format":"kvxfer-block","version":"{FORMAT_VERSION}",'
            f'"namespace":"{namespace}","start":"{start}","key":"'
        )
        self._after_key = f'","integrity":"{integrity.value}","checksum":"'
        self._after_seal = b"}" + listed + b"}"

    def fill(self, key: BlockKey, checksum: str) -> bytes:
        """Encode the header of one block, in whole disk pages."""
        head = f'{self._before_key}{key.hex()}{self._after_key}{checksum}"'.encode()
        seal = self._digester.seal(head + self._after_seal).encode()
        parts = (self._length, head, b',"seal":"', seal, b'"', self._after_seal)
        return b"".join(parts).ljust(self._num_bytes)

    def checksum_in(self, head: bytes, key: BlockKey) -> str:
        """Read the checksum where `fill` writes it; arbitrary text from a different header."""
        start = LENGTH_BYTES + len(f"{self._before_key}{key.hex()}{self._after_key}")
        return head[start : head.find(b'"', start)].decode(errors="replace")

    def bound(self, key: BlockKey) -> bytes:
        """List what a sealed block's tag covers of its header: all but integrity and checksums."""
        return b"".join(
            (self._length, f'{self._before_key}{key.hex()}"'.encode(), self._after_seal)
        )


def header_in(head: bytes) -> BlockHeader | None:
    """Decode a whole header; None if it is not that of a block file."""
    try:
        return BlockHeader.decode(head)
    except BlockFileError:
        return None


def padded(num_bytes: int) -> int:
    """Round up to whole disk pages, the bytes that a file occupies on the disk."""
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


def header_size(tensors: Sequence[StoredTensor]) -> int:
    """Compute the size of any header that lists `tensors`: whole disk pages."""
    return _size(_list(tensors))


def header_size_in(data: bytes) -> int:
    """Read the size of a header from the first `LENGTH_BYTES` of its file."""
    if len(data) < LENGTH_BYTES:
        raise BlockFileError(f"not a block file: {len(data)} bytes are too few")
    size = LENGTH_BYTES + int.from_bytes(data[:LENGTH_BYTES], "little")
    if size % PAGE_BYTES or not PAGE_BYTES <= size <= MAX_HEADER_BYTES:
        wanted = f"expected a multiple of {PAGE_BYTES}, at most {MAX_HEADER_BYTES}"
        raise BlockFileError(f"not a block file: a header of {size} bytes, {wanted}")
    return size


def _size(listed: bytes) -> int:
    return padded(LENGTH_BYTES + _METADATA_BYTES + len(listed))


def _list(tensors: Sequence[StoredTensor]) -> bytes:
    """Encode tensors as safetensors lists them, each after a comma."""
    entries, start = {}, 0
    for tensor in tensors:
        stop = start + tensor.num_bytes
        entries[tensor.name] = _Tensor(tensor.dtype, tensor.shape, (start, stop))
        start = stop
    return b"," + msgspec.json.encode(entries)[1:-1] if entries else b""


def _complete_sealed(header: BlockHeader, size_bytes: int) -> BlockHeader:
    if not key_id_in(header.checksum):
        raise InvalidArgumentError("checksum", header.checksum, "the checksum of a sealed block")
    is_longer = header.data_offset < size_bytes
    return replace(header, min_size_bytes=size_bytes) if is_longer else header


def _read_tensors(entries: dict[str, msgspec.Raw]) -> tuple[StoredTensor, ...]:
    tensors, start = [], 0
    for name, entry in entries.items():
        listed = _tensor_decoder.decode(entry)
        tensor = StoredTensor(name=name, dtype=listed.dtype, shape=listed.shape)
        offsets = start, start + tensor.num_bytes
        if listed.data_offsets != offsets:
            raise InvalidArgumentError(
                f"data_offsets of {name!r}", listed.data_offsets, str(offsets)
            )
        tensors.append(tensor)
        start = offsets[1]
    return tuple(tensors)
