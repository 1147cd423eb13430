"""Every error kvxfer raises. Data is in fields; the message only repeats it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvxfer.kvcache.allocation_refusal import AllocationRefusal


class KVXferError(Exception):
    """Base of every error that kvxfer raises."""


class InvalidArgumentError(KVXferError, ValueError):
    """Report an argument that cannot be used; nothing was read or written.

    Attributes:
        argument: Name of the argument, with an index where it is one of many.
        value: The value that was passed.
        expected: What would have been accepted, in words.
    """

    def __init__(self, argument: str, value: object, expected: str) -> None:
        self.argument = argument
        self.value = value
        self.expected = expected
        super().__init__(f"{argument} is {value!r}; expected {expected}")


class BlockIdError(InvalidArgumentError, LookupError):
    """Report a block id that the cache does not have."""

    def __init__(self, group: int, block_id: int, num_blocks: int) -> None:
        self.group = group
        self.block_id = block_id
        self.num_blocks = num_blocks
        super().__init__(f"block_ids[{group}]", block_id, f"0 <= block id < {num_blocks}")


class DuplicateError(InvalidArgumentError):
    """Report a key or block id that appears twice in one batch."""

    def __init__(
        self, argument: str, value: object, expected: str = "each value once in a batch"
    ) -> None:
        super().__init__(argument, value, expected)


class UnknownGroupError(InvalidArgumentError, LookupError):
    """Report a KV-cache group index that the caches do not have."""

    def __init__(self, group: int, num_groups: int) -> None:
        self.group = group
        self.num_groups = num_groups
        super().__init__("group", group, f"0 <= group < {num_groups}")


class LengthMismatchError(InvalidArgumentError):
    """Report keys and blocks that do not match one to one."""

    def __init__(self, num_keys: int, num_blocks: int, rule: str) -> None:
        self.num_keys = num_keys
        self.num_blocks = num_blocks
        super().__init__("keys", num_keys, f"{num_blocks} keys ({rule})")


class LayoutError(KVXferError, ValueError):
    """Base of errors about the layout of a KV-cache tensor."""


class AmbiguousLayoutError(LayoutError):
    """Report a tensor that fits two layouts; guessing would corrupt tokens.

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
    """Report a tensor that fits no layout of its spec.

    Attributes:
        layer_name: Layer whose tensor was not understood.
        expected: What was looked for, one line per layout.
        actual: Shape, stride and dtype of the tensor.
    """

    def __init__(self, layer_name: str, actual: str, expected: Sequence[str]) -> None:
        self.layer_name = layer_name
        self.actual = actual
        self.expected = tuple(expected)
        wanted = "; ".join(self.expected)
        super().__init__(f"layer {layer_name!r}: got {actual}; expected one of: {wanted}")


class PageMappingError(LayoutError):
    """Report a page that cannot be rearranged into a portable one.

    Attributes:
        axis: What is in the way: an axis, or `dtype`, `encoding`, `layer`, `page`.
        actual: What the worker has.
        expected: What a mapping would need.
    """

    def __init__(self, axis: str, actual: object, expected: str) -> None:
        self.axis = axis
        self.actual = actual
        self.expected = expected
        super().__init__(f"pages cannot be mapped along {axis!r}: {actual}; expected {expected}")


class AllocationRefusedError(KVXferError, ValueError):
    """Report that blocks of all layers cannot be allocated; register per-layer tensors instead.

    Attributes:
        refusals: Every condition that does not hold, as `why_not_canonical` lists them.
    """

    def __init__(self, refusals: "Sequence[AllocationRefusal]") -> None:
        self.refusals = tuple(refusals)
        super().__init__("; ".join(map(str, self.refusals)))


class SpecMergeError(KVXferError, ValueError):
    """Report KV-cache specs that cannot be merged into one.

    Attributes:
        field: The field in which they differ.
        values: The clashing values, in the order of the specs.
    """

    def __init__(self, field: str, values: Sequence[object]) -> None:
        self.field = field
        self.values = tuple(values)
        super().__init__(f"cannot merge specs: {field} differs: {list(values)!r}")


class AttestationError(KVXferError):
    """Report that the canonical view does not show what the engine's view wrote."""

    def __init__(self, layer_name: str, block_id: int, detail: str) -> None:
        self.layer_name = layer_name
        self.block_id = block_id
        super().__init__(f"layer {layer_name!r}, block {block_id}: {detail}")


class NamespaceMismatchError(KVXferError, ValueError):
    """Report two namespaces that must agree and do not.

    Attributes:
        field: First field that differs, dotted where it is nested.
        ours: Value on this side.
        theirs: Value on the other side.
    """

    def __init__(self, field: str, ours: object, theirs: object) -> None:
        self.field = field
        self.ours = ours
        self.theirs = theirs
        super().__init__(f"namespaces differ in {field}: ours is {ours!r}, theirs is {theirs!r}")


class CapacityError(KVXferError, MemoryError):
    """Report that the memory or disk a backend was configured with is not there."""

    def __init__(self, resource: str, needed_bytes: int, available_bytes: int) -> None:
        self.resource = resource
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes
        super().__init__(f"{resource}: needs {needed_bytes} bytes, {available_bytes} are available")


class ClosedError(KVXferError, RuntimeError):
    """Report a call on something that was closed."""

    def __init__(self, what: str) -> None:
        self.what = what
        super().__init__(f"{what} is closed")


class ForkedError(KVXferError, RuntimeError):
    """Report a call on something that another process opened, before it was forked.

    Attributes:
        pid: The process that opened it.
    """

    def __init__(self, what: str, pid: int) -> None:
        self.what = what
        self.pid = pid
        super().__init__(
            f"{what} was opened by process {pid} and cannot be used after a fork: "
            f"open one in each process"
        )


class EventLoopError(KVXferError, RuntimeError):
    """Report a call that could never end, because of the event loop that has to serve it."""

    def __init__(self, what: str, detail: str) -> None:
        self.what = what
        super().__init__(f"{what}: {detail}")


class BackendUnavailableError(KVXferError, ConnectionError):
    """Report a backend that is gone: no block of any batch can be served."""


class DeviceUnavailableError(KVXferError, RuntimeError):
    """Report a GPU that copies cannot use: nothing was copied, and nothing will be.

    Attributes:
        device_index: Ordinal of the GPU.
    """

    def __init__(self, device_index: int, reason: str) -> None:
        self.device_index = device_index
        super().__init__(f"device cuda:{device_index} cannot be used: {reason}")


class DeviceError(KVXferError, RuntimeError):
    """Report a call that the driver of a GPU refused.

    Attributes:
        device_index: Ordinal of the GPU.
        call: Name of the driver's call.
        code: Name of the error.
    """

    def __init__(self, device_index: int, call: str, code: str) -> None:
        self.device_index = device_index
        self.call = call
        self.code = code
        super().__init__(f"device cuda:{device_index}: {call} returned {code}")


class DeviceLostError(DeviceError):
    """Report a GPU that this process cannot use any more; only a new process can.

    Memory of the host that it was copying to may be written a last time.
    """


class TransferFailedError(KVXferError):
    """Report bytes that were not all moved; the memory on this side is quiet.

    Attributes:
        peer: Name of the other side's agent.
    """

    def __init__(self, peer: str, detail: str) -> None:
        self.peer = peer
        super().__init__(f"transfer with {peer}: {detail}")


class PeerLostError(TransferFailedError, ConnectionError):
    """Report a peer whose memory can no longer be reached, or never could."""


class PeerError(KVXferError, ConnectionError):
    """Base of errors that end a connection to a peer; no block is lost by one, only its copy.

    Attributes:
        peer: Address of the other side.
    """

    def __init__(self, peer: str, detail: str) -> None:
        self.peer = peer
        super().__init__(f"peer {peer}: {detail}")


class PeerClosedError(PeerError):
    """Report a connection that the other side, or the network, ended between two messages."""


class PeerTimeoutError(PeerError, TimeoutError):
    """Report a peer that did not say in time what it had to.

    Attributes:
        timeout_s: How long it had.
    """

    def __init__(self, peer: str, what: str, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        super().__init__(peer, f"{what} took longer than {timeout_s:g} s")


class ProtocolError(PeerError):
    """Report bytes that no honest peer sends: cut, changed, repeated, too long or meaningless."""


class HandshakeError(PeerError):
    """Report a peer that one must not talk to.

    Attributes:
        field: What the two do not agree on.
        ours: Value on this side; of a secret only whether there is one.
        theirs: Value on the other side.
    """

    def __init__(self, peer: str, field: str, ours: str, theirs: str) -> None:
        self.field = field
        self.ours = ours
        self.theirs = theirs
        super().__init__(peer, f"{field} differs: ours is {ours!r}, theirs is {theirs!r}")


class UnsupportedEngineError(KVXferError, RuntimeError):
    """Report a serving-engine release whose interface kvxfer does not speak.

    Attributes:
        engine: Name of the engine.
        version: Release that was found.
        supported: Releases that are supported.
    """

    def __init__(self, engine: str, version: str, supported: str, detail: str) -> None:
        self.engine = engine
        self.version = version
        self.supported = supported
        super().__init__(f"{engine} {version} is not supported ({detail}); supported: {supported}")


class BlockStateError(KVXferError, LookupError):
    """Report a block that is not there, or not in the state that a call needs.

    Attributes:
        key: Key of the block.
        state: State the block is in, None when it is absent.
        expected: States that would have been accepted, in words.
    """

    def __init__(self, key: bytes, state: str | None, expected: str) -> None:
        self.key = key
        self.state = state
        self.expected = expected
        super().__init__(f"block {key.hex()} is {state or 'absent'}; expected {expected}")


class OverlapError(LayoutError):
    """Report layers whose pages share some bytes, but not all.

    Attributes:
        layer_names: The layers.
    """

    def __init__(self, layer_names: Sequence[str], detail: str) -> None:
        self.layer_names = tuple(layer_names)
        super().__init__(f"pages of layers {list(self.layer_names)!r} overlap: {detail}")


class PageBoundsError(LayoutError):
    """Report pages that reach beyond the memory they are said to lie in.

    Attributes:
        layer_name: Layer whose pages these are.
        needed_bytes: Bytes from the start of the storage to the end of the last page.
        storage_bytes: Bytes of the storage.
    """

    def __init__(self, layer_name: str, needed_bytes: int, storage_bytes: int) -> None:
        self.layer_name = layer_name
        self.needed_bytes = needed_bytes
        self.storage_bytes = storage_bytes
        super().__init__(
            f"layer {layer_name!r}: pages end at byte {needed_bytes} of a storage of "
            f"{storage_bytes} bytes"
        )


class BatchOrderError(KVXferError, ValueError):
    """Report a KV-cache group whose attention backend wants a batch in an order it cannot have.

    Attributes:
        group: The group.
        builder: Its metadata builder.
        order: The order that it wants: for each place the request that is to be there.
    """

    def __init__(self, group: int, builder: str, order: Sequence[int], detail: str) -> None:
        self.group = group
        self.builder = builder
        self.order = tuple(order)
        super().__init__(
            f"group {group}: {builder} wants the requests in the order {order!r}; {detail}"
        )


class TooManyGroupsError(InvalidArgumentError):
    """Report a model with more KV-cache groups than an attention backend serves.

    Attributes:
        group: The group whose backend it is.
        builder: The backend's metadata builder.
        max_num_groups: Groups that it serves.
        num_groups: Groups of the model.
    """

    def __init__(self, group: int, builder: str, max_num_groups: int, num_groups: int) -> None:
        self.group = group
        self.builder = builder
        self.max_num_groups = max_num_groups
        self.num_groups = num_groups
        super().__init__(
            "num_groups",
            num_groups,
            f"at most {max_num_groups}: that is all that {builder}, the "
            f"metadata builder of group {group}, serves",
        )
