"""Errors of kvxfer: the data is in their fields; the message only repeats it."""

from collections.abc import Sequence

MAX_SHOWN_CHARACTERS = 200
"""Maximum length of a value in an error: a tensor, a prompt or a list of keys is longer."""


def code_of(value: object) -> str:
    """Format a value with `repr`, or show just its type if that fails, as for a 5000-digit int."""
    try:
        return repr(value)
    except Exception:  # noqa: BLE001 - even if `__repr__` raises, the error must name the argument
        return f"<{type(value).__name__}>"


def _brief(code: str) -> str:
    """Truncate code that is too long for an error, and append its length."""
    if len(code) <= MAX_SHOWN_CHARACTERS:
        return code
    return f"{code[:MAX_SHOWN_CHARACTERS]}... ({len(code)} characters)"


class KVXferError(Exception):
    """Base class of every error that kvxfer raises."""


class InvalidArgumentError(KVXferError, ValueError):
    """Argument that cannot be used; nothing was read or written.

    Attributes:
        argument: Name of the argument, with an index if it is an element of one.
        value: The value that was passed.
        expected: Description of accepted values.
    """

    def __init__(self, argument: str, value: object, expected: str) -> None:
        self.argument, self.value, self.expected = argument, value, expected
        super().__init__(f"{argument} is {_brief(code_of(value))}; expected {expected}")


class BlockIdError(InvalidArgumentError, LookupError):
    """Block id that the cache does not have."""

    def __init__(self, group: int, block_id: int, num_blocks: int) -> None:
        self.group, self.block_id, self.num_blocks = group, block_id, num_blocks
        super().__init__(f"block_ids[{group}]", block_id, f"0 <= block id < {num_blocks}")


class DuplicateError(InvalidArgumentError):
    """Key or block id that appears twice in one batch."""

    def __init__(
        self, argument: str, value: object, expected: str = "each value once in a batch"
    ) -> None:
        super().__init__(argument, value, expected)


class UnknownGroupError(InvalidArgumentError, LookupError):
    """KV-cache group index that the caches do not have."""

    def __init__(self, group: int, num_groups: int) -> None:
        self.group, self.num_groups = group, num_groups
        super().__init__("group", group, f"0 <= group < {num_groups}")


class LengthMismatchError(InvalidArgumentError):
    """Keys and blocks that do not match one to one."""

    def __init__(self, num_keys: int, num_blocks: int, rule: str) -> None:
        self.num_keys, self.num_blocks = num_keys, num_blocks
        super().__init__("keys", num_keys, f"{num_blocks} keys ({rule})")


class LayoutError(KVXferError, ValueError):
    """Base class of errors about the layout of a KV-cache tensor."""


class AmbiguousLayoutError(LayoutError):
    """Tensor that fits two layouts; guessing would corrupt tokens.

    Attributes:
        layer_name: Layer whose tensor is ambiguous.
        readings: Every layout that fits, as axis strings.
    """

    def __init__(self, layer_name: str, actual: str, readings: Sequence[str]) -> None:
        self.layer_name = layer_name
        self.actual = actual
        self.readings = tuple(readings)
        both = " and ".join(repr(reading) for reading in self.readings)
        super().__init__(
            f"layer {layer_name!r}: {actual} fits {both}; "
            f"pass layouts={{{layer_name!r}: ...}} to say which one it is"
        )


class UnknownLayoutError(LayoutError):
    """Tensor that fits no layout of its spec.

    Attributes:
        layer_name: Layer whose tensor has an unknown layout.
        expected: The layouts of the spec, one line for each.
        actual: Shape, stride and dtype of the tensor.
    """

    def __init__(self, layer_name: str, actual: str, expected: Sequence[str]) -> None:
        self.layer_name = layer_name
        self.actual = actual
        self.expected = tuple(expected)
        wanted = "; ".join(self.expected)
        super().__init__(f"layer {layer_name!r}: got {actual}; expected one of: {wanted}")


class PageMappingError(LayoutError):
    """Page that cannot be rearranged into a portable one.

    Attributes:
        axis: Name of the obstacle: an axis, or `dtype`, `encoding`, `layer`, `page`.
        actual: Value of the worker's page.
        expected: Value that a mapping would need.
    """

    def __init__(self, axis: str, actual: object, expected: str) -> None:
        self.axis, self.actual, self.expected = axis, actual, expected
        super().__init__(f"pages cannot be mapped along {axis!r}: {actual}; expected {expected}")


class CacheMismatchError(LayoutError):
    """Caches of two engines that cannot exchange blocks.

    Attributes:
        group: KV-cache group that differs; None if the difference is not in one group.
        field: Field of the caches' descriptions, or axis of their pages, that differs.
        ours: Value on this side.
        theirs: Value on the other side.
    """

    def __init__(self, group: int | None, field: str, ours: object, theirs: object) -> None:
        self.group, self.field, self.ours, self.theirs = group, field, ours, theirs
        where = "" if group is None else f" of group {group}"
        super().__init__(
            f"caches differ in {field}{where}: ours is {code_of(ours)}, theirs is {code_of(theirs)}"
        )


class SpecMergeError(KVXferError, ValueError):
    """KV-cache specs that cannot be merged into one.

    Attributes:
        field: The field in which they differ.
        values: The clashing values, in the order of the specs.
    """

    def __init__(self, field: str, values: Sequence[object]) -> None:
        self.field, self.values = field, tuple(values)
        super().__init__(f"cannot merge specs: {field} differs: {list(values)!r}")


class AttestationError(KVXferError):
    """Canonical view that does not show the bytes written through the engine's view."""

    def __init__(self, layer_name: str, block_id: int, detail: str) -> None:
        self.layer_name, self.block_id = layer_name, block_id
        super().__init__(f"layer {layer_name!r}, block {block_id}: {detail}")


class NamespaceMismatchError(KVXferError, ValueError):
    """Two namespaces that must agree and do not.

    Attributes:
        field: First field that differs, dotted if it is nested.
        ours: Value on this side.
        theirs: Value on the other side.
    """

    def __init__(self, field: str, ours: object, theirs: object) -> None:
        self.field, self.ours, self.theirs = field, ours, theirs
        super().__init__(f"namespaces differ in {field}: ours is {ours!r}, theirs is {theirs!r}")


class CapacityError(KVXferError, MemoryError):
    """Memory or disk that a backend was configured to use and that is not available."""

    def __init__(self, resource: str, needed_bytes: int, available_bytes: int) -> None:
        self.resource = resource
        self.needed_bytes, self.available_bytes = needed_bytes, available_bytes
        super().__init__(f"{resource}: needs {needed_bytes} bytes, {available_bytes} are available")


class ClosedError(KVXferError, RuntimeError):
    """Call on an object that was closed."""

    def __init__(self, what: str) -> None:
        self.what = what
        super().__init__(f"{what} is closed")


class ForkedError(KVXferError, RuntimeError):
    """Call, in a forked process, on an object that its parent opened.

    Attributes:
        pid: The process that opened it.
    """

    def __init__(self, what: str, pid: int) -> None:
        self.what, self.pid = what, pid
        rule = "cannot be used after a fork: open one in each process"
        super().__init__(f"{what} was opened by process {pid} and {rule}")


class EventLoopError(KVXferError, RuntimeError):
    """Call that could never end: its event loop waits for it, has stopped, or has no thread."""

    def __init__(self, what: str, detail: str) -> None:
        self.what = what
        super().__init__(f"{what}: {detail}")


class BackendUnavailableError(KVXferError, ConnectionError):
    """Backend that is gone: no block of any batch can be served."""


class DeviceUnavailableError(KVXferError, RuntimeError):
    """GPU that cannot be used for copies: nothing was copied, and nothing will be.

    Attributes:
        device_index: Ordinal of the GPU.
    """

    def __init__(self, device_index: int, reason: str) -> None:
        self.device_index = device_index
        super().__init__(f"device cuda:{device_index} cannot be used: {reason}")


class DeviceError(KVXferError, RuntimeError):
    """Call that the driver of a GPU refused.

    Attributes:
        device_index: Ordinal of the GPU.
        call: Name of the driver's call.
        code: Name of the error.
    """

    def __init__(self, device_index: int, call: str, code: str) -> None:
        self.device_index, self.call, self.code = device_index, call, code
        super().__init__(f"device cuda:{device_index}: {call} returned {code}")


class DeviceLostError(DeviceError):
    """GPU that this process can no longer use; only a new process can.

    Host memory that the GPU was copying to may still be written once more.
    """


class TransferFailedError(KVXferError):
    """Transfer that did not move all its bytes; it no longer touches memory on this side.

    Attributes:
        peer: Name of the other side's agent.
    """

    def __init__(self, peer: str, detail: str) -> None:
        self.peer = peer
        super().__init__(f"transfer with {peer}: {detail}")


class PeerLostError(TransferFailedError, ConnectionError):
    """Peer whose memory can no longer be reached, or never could."""


class PeerError(KVXferError, ConnectionError):
    """Base class of errors that end a connection to a peer; only copies of blocks are lost.

    Attributes:
        peer: Address of the other side.
    """

    def __init__(self, peer: str, detail: str) -> None:
        self.peer = peer
        super().__init__(f"peer {peer}: {detail}")


class PeerClosedError(PeerError):
    """Connection that the other side, or the network, ended between two messages."""


class PeerTimeoutError(PeerError, TimeoutError):
    """Peer that did not answer within its deadline.

    Attributes:
        timeout_s: The deadline, in seconds after the request.
    """

    def __init__(self, peer: str, what: str, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        super().__init__(peer, f"{what} took longer than {timeout_s:g} s")


class ProtocolError(PeerError):
    """Message that breaks the protocol: truncated, altered, repeated, too long or meaningless."""


class HandshakeError(PeerError):
    """Handshake that failed: the peer differs in a field that both sides must agree on.

    Attributes:
        field: The field that differs.
        ours: Value on this side; for a secret, only whether there is one.
        theirs: Value on the other side.
    """

    def __init__(self, peer: str, field: str, ours: str, theirs: str) -> None:
        self.field, self.ours, self.theirs = field, ours, theirs
        super().__init__(peer, f"{field} differs: ours is {ours!r}, theirs is {theirs!r}")


class UnsupportedEngineError(KVXferError, RuntimeError):
    """Release of a serving engine whose interface kvxfer does not support.

    Attributes:
        engine: Name of the engine.
        version: Release that was found.
        supported: Releases that are supported.
    """

    def __init__(self, engine: str, version: str, supported: str, detail: str) -> None:
        self.engine, self.version, self.supported = engine, version, supported
        super().__init__(f"{engine} {version} is not supported ({detail}); supported: {supported}")


class BlockStateError(KVXferError, LookupError):
    """Block that is absent, or not in the state that a call needs.

    Attributes:
        key: Key of the block.
        state: State the block is in, None when it is absent.
        expected: Description of the states that the call accepts.
    """

    def __init__(self, key: bytes, state: str | None, expected: str) -> None:
        self.key, self.state, self.expected = key, state, expected
        super().__init__(f"block {key.hex()} is {state or 'absent'}; expected {expected}")


class OverlapError(LayoutError):
    """Layers whose pages share some bytes, but not all.

    Attributes:
        layer_names: The layers.
    """

    def __init__(self, layer_names: Sequence[str], detail: str) -> None:
        self.layer_names = tuple(layer_names)
        super().__init__(f"pages of layers {list(self.layer_names)!r} overlap: {detail}")


class PageBoundsError(LayoutError):
    """Pages that reach beyond the end of their storage.

    Attributes:
        layer_name: Layer whose pages these are.
        needed_bytes: Bytes from the start of the storage to the end of the last page.
        storage_bytes: Bytes of the storage.
    """

    def __init__(self, layer_name: str, needed_bytes: int, storage_bytes: int) -> None:
        self.layer_name = layer_name
        self.needed_bytes, self.storage_bytes = needed_bytes, storage_bytes
        super().__init__(
            f"layer {layer_name!r}: pages end at byte {needed_bytes} of a storage of "
            f"{storage_bytes} bytes"
        )
