"""Driver calls of one GPU: memory, streams, events and copies."""

import contextlib
import ctypes
import importlib
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any, NewType

import numpy as np

from kvxfer.errors import DeviceError, DeviceLostError, DeviceUnavailableError
from kvxfer.kvcache.fragments import Addresses

CudaStream = NewType("CudaStream", int)
"""Handle of a stream, never 0: whether 0 is the legacy default stream or that of the thread depends
on how the program was compiled, and on the environment."""

LEGACY_STREAM = CudaStream(1)
"""The legacy default stream. Source: cuda.h, CU_STREAM_LEGACY."""

CudaEvent = NewType("CudaEvent", int)

NUM_EVENTS = 32
"""Events created in advance, for as many concurrent marks or batches of a direction: one that is
created later may fall into the capture of a graph."""

BATCH_VERSION = 12080
"""CUDA release that introduced `cuMemcpyBatchAsync`; later drivers still have this signature.
Source: cudaTypedefs.h, PFN_cuMemcpyBatchAsync_v12080."""
COPY_VERSION = 4000
"""CUDA release whose `cuMemcpyAsync` takes any two addresses.
Source: cudaTypedefs.h, PFN_cuMemcpyAsync_v4000."""

STICKY = frozenset({
    "CUDA_ERROR_DEINITIALIZED",
    "CUDA_ERROR_DEVICE_UNAVAILABLE",
    "CUDA_ERROR_ECC_UNCORRECTABLE",
    "CUDA_ERROR_NVLINK_UNCORRECTABLE",
    "CUDA_ERROR_CONTAINED",
    "CUDA_ERROR_ILLEGAL_ADDRESS",
    "CUDA_ERROR_LAUNCH_TIMEOUT",
    "CUDA_ERROR_CONTEXT_IS_DESTROYED",
    "CUDA_ERROR_ASSERT",
    "CUDA_ERROR_HARDWARE_STACK_ERROR",
    "CUDA_ERROR_ILLEGAL_INSTRUCTION",
    "CUDA_ERROR_MISALIGNED_ADDRESS",
    "CUDA_ERROR_INVALID_ADDRESS_SPACE",
    "CUDA_ERROR_INVALID_PC",
    "CUDA_ERROR_LAUNCH_FAILED",
    "CUDA_ERROR_EXTERNAL_DEVICE",
    "CUDA_ERROR_UNKNOWN",
})  # fmt: skip
"""Errors after which every call fails until the process ends. Source: cuda.h, `cudaError_enum`:
"leaves the process in an inconsistent state"."""

_SIZES = ctypes.POINTER(ctypes.c_size_t)
_BATCH = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p,  # destinations
    ctypes.c_void_p,  # sources
    ctypes.c_void_p,  # lengths
    ctypes.c_size_t,
    ctypes.c_void_p,  # attributes
    _SIZES,  # index of the first copy that each of the attributes is for
    ctypes.c_size_t,
    _SIZES,  # out: index of the copy that failed
    ctypes.c_void_p,  # stream
)
_COPY = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p
)


class CudaDriver:
    """Driver calls for copies to and from one GPU; their errors name the call.

    Each call makes the device's primary context, which torch uses, too, current for its own
    duration only, and then restores the calling thread's context. Thread-safe. `has_batch` tells
    whether the driver copies many fragments in one call.

    `DeviceUnavailableError`: `cuda-bindings` or a driver is not installed, or there is no such
    device.
    """

    def __init__(self, device_index: int) -> None:
        self.device_index = device_index
        self._api = _import_bindings(device_index)
        self._success = self._api.CUresult.CUDA_SUCCESS
        self._not_ready = self._api.CUresult.CUDA_ERROR_NOT_READY
        relaxed = self._api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        try:
            self._call("cuInit", 0)
            self._device = self._call("cuDeviceGet", device_index)
            self._context = self._call("cuDevicePrimaryCtxRetain", self._device)
        except DeviceError as exc:
            raise DeviceUnavailableError(device_index, str(exc)) from exc
        except RuntimeError as exc:  # the text differs from one release of the bindings to another
            raise DeviceUnavailableError(device_index, f"no NVIDIA driver: {exc}") from exc
        copy = self._find("cuMemcpyAsync", COPY_VERSION)
        batch = self._find("cuMemcpyBatchAsync", BATCH_VERSION)
        if not copy:
            raise DeviceUnavailableError(device_index, "the driver has no cuMemcpyAsync")
        self._copy, self._batch = _COPY(copy), _BATCH(batch) if batch else None
        self.has_batch = self._batch is not None
        order = self._api.CUmemcpySrcAccessOrder
        self._in_order = self._api.CUmemcpyAttributes()
        self._in_order.srcAccessOrder = order.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
        self._current = _Current(self._call, self._context, relaxed)
        self._open = True

    def current(self) -> contextlib.AbstractContextManager[None]:
        """Make the device current in the calling thread for as long as the context lasts.

        Meanwhile, calls do not break a capture of a graph on this or any other thread: nothing that
        is done here belongs to a graph. Source: CUDA driver API,
        cuThreadExchangeStreamCaptureMode. Nested contexts of one device cost nothing; contexts of
        different devices must not be nested.
        """
        return self._current

    def allocate(self, num_bytes: int) -> int:
        """Allocate memory of the device; return its address.

        Raises:
            DeviceError: The device does not have as much free memory.
        """
        with self.current():
            return int(self._call("cuMemAlloc", num_bytes))

    def free(self, address: int) -> None:
        """Free memory that `allocate` returned."""
        with self.current():
            self._call("cuMemFree", address)

    def open_stream(self) -> CudaStream:
        """Create a stream of the lowest priority, which waits for no other."""
        with self.current():
            least, _greatest = self._call("cuCtxGetStreamPriorityRange")
            flags = self._api.CUstream_flags.CU_STREAM_NON_BLOCKING
            return CudaStream(int(self._call("cuStreamCreateWithPriority", flags, least)))

    def close_stream(self, stream: CudaStream) -> None:
        """Destroy a stream; work that it has begun still completes."""
        with self.current():
            self._call("cuStreamDestroy", stream)

    def is_captured(self, stream: CudaStream) -> bool:
        """Whether work given to a stream becomes a part of a graph instead of being done."""
        with self.current():
            none = self._api.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE
            return bool(self._call("cuStreamIsCapturing", stream) != none)

    def open_event(self, *, times: bool = False) -> CudaEvent:
        """Create an event, which counts as passed until it is recorded.

        With `times`, it also records when it passes, for `seconds_between`.
        """
        flags = self._api.CUevent_flags
        flag = flags.CU_EVENT_DEFAULT if times else flags.CU_EVENT_DISABLE_TIMING
        with self.current():
            return CudaEvent(int(self._call("cuEventCreate", flag)))

    def close_event(self, event: CudaEvent) -> None:
        """Destroy an event."""
        with self.current():
            self._call("cuEventDestroy", event)

    def record(self, event: CudaEvent, stream: CudaStream) -> None:
        """Record an event, which passes once the stream has done all its work so far."""
        with self.current():
            self._call("cuEventRecord", event, stream)

    def has_passed(self, event: CudaEvent) -> bool:
        """Whether the event has passed since it was last recorded; never blocks.

        Raises:
            DeviceLostError: The device is gone, and the event never passes.
        """
        try:
            with self.current():
                (result,) = self._ask("cuEventQuery", event)
                if result != self._not_ready:
                    self._check("cuEventQuery", result)
                return bool(result == self._success)
        except DeviceError as exc:  # whatever the error: whether the event has passed stays unknown
            raise DeviceLostError(exc.device_index, exc.call, exc.code) from exc

    def seconds_between(self, start: CudaEvent, end: CudaEvent) -> float:
        """Return the time between two events that have passed, by the device's clock."""
        with self.current():
            return float(self._call("cuEventElapsedTime", start, end)) / 1e3

    def wait(self, stream: CudaStream, event: CudaEvent) -> None:
        """Make later work of a stream wait for an event; does not block the caller."""
        with self.current():
            self._call("cuStreamWaitEvent", stream, event, 0)

    def copy_each(
        self, destinations: Addresses, sources: Addresses, lengths: Addresses, stream: CudaStream
    ) -> None:
        """Begin copies, one call for each; uint64 `(n,)`."""
        with self.current():
            triples = (array.tolist() for array in (destinations, sources, lengths))
            for triple in zip(*triples, strict=True):
                if failed := self._copy(*triple, stream):
                    self._check("cuMemcpyAsync", self._result("cuMemcpyAsync", failed))

    def copy_batch(
        self,
        destinations: Addresses,
        sources: Addresses,
        lengths: Addresses,
        stream: CudaStream,
    ) -> None:
        """Begin copies in one call, in no order among themselves; uint64 `(n,)`.

        The arrays are not needed after the call.
        """
        assert self._batch is not None
        first, failed_index = ctypes.c_size_t(0), ctypes.c_size_t(0)
        arrays = [np.ascontiguousarray(array) for array in (destinations, sources, lengths)]
        with self.current():
            failed = self._batch(
                *(array.ctypes.data for array in arrays),
                len(lengths),
                self._in_order.getPtr(),
                ctypes.byref(first),
                1,
                ctypes.byref(failed_index),
                stream,
            )
            self._check("cuMemcpyBatchAsync", self._result("cuMemcpyBatchAsync", failed))

    def copy_rows(
        self,
        destination: int,
        source: int,
        steps: tuple[int, int],
        row_bytes: int,
        num_rows: int,
        stream: CudaStream,
        *,
        to_host: bool,
    ) -> None:
        """Begin to copy evenly spaced rows, the first of them from `source` to `destination`.

        `steps` are the bytes from row to row in the destination and the source, `row_bytes` or
        more. One of the two is in host memory: the destination with `to_host`, else the source.
        """
        copy = self._api.CUDA_MEMCPY2D()
        kinds = self._api.CUmemorytype
        host, device = kinds.CU_MEMORYTYPE_HOST, kinds.CU_MEMORYTYPE_DEVICE
        if to_host:
            copy.srcMemoryType, copy.dstMemoryType = device, host
            copy.srcDevice, copy.dstHost = source, destination
        else:
            copy.srcMemoryType, copy.dstMemoryType = host, device
            copy.srcHost, copy.dstDevice = source, destination
        copy.dstPitch, copy.srcPitch = steps
        copy.WidthInBytes, copy.Height = row_bytes, num_rows
        with self.current():
            self._call("cuMemcpy2DAsync", copy, stream)

    def register(self, address: int, num_bytes: int) -> None:
        """Pin host memory, so that the device reads and writes it directly."""
        with self.current():
            portable = self._api.CU_MEMHOSTREGISTER_PORTABLE
            self._call("cuMemHostRegister", address, num_bytes, portable)

    def unregister(self, address: int) -> None:
        """Undo `register`."""
        with self.current():
            self._call("cuMemHostUnregister", address)

    def holds(self, address: int) -> bool:
        """Whether an address is in the memory of this device."""
        attributes, kinds = self._api.CUpointer_attribute, self._api.CUmemorytype
        with self.current():
            return self._attributes_of(
                address,
                attributes.CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
                attributes.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
            ) == [int(kinds.CU_MEMORYTYPE_DEVICE), self.device_index]

    def has_pinned(self, address: int, num_bytes: int) -> bool:
        """Whether host memory is pinned in one piece, by this library or any other."""
        attributes, kinds = self._api.CUpointer_attribute, self._api.CUmemorytype
        kind = attributes.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
        piece = attributes.CU_POINTER_ATTRIBUTE_BUFFER_ID
        try:
            with self.current():
                first, last = (
                    self._attributes_of(each, kind, piece)
                    for each in (address, address + num_bytes - 1)
                )
        except DeviceError:
            return False
        return first == last and first[:1] == [int(kinds.CU_MEMORYTYPE_HOST)]

    @property
    def numa_node(self) -> int | None:
        """NUMA node whose memory is nearest to the device; None if unknown."""
        attribute = self._api.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID
        result, node = self._ask("cuDeviceGetAttribute", attribute, self._device)
        return int(node) if result == self._success and node >= 0 else None

    @property
    def reads_registered_memory(self) -> bool:
        """Whether kernels may use host addresses of registered memory."""
        attribute = (
            self._api.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
        )
        return bool(self._call("cuDeviceGetAttribute", attribute, self._device))

    def close(self) -> None:
        """Release the context; may be called again."""
        if self._open:
            self._open = False
            self._call("cuDevicePrimaryCtxRelease", self._device)

    def _attributes_of(self, address: int, *attributes: Any) -> list[int]:
        """Get attributes of an address; an empty list if CUDA does not know the address."""
        found = []
        for attribute in attributes:
            result, value = self._ask("cuPointerGetAttribute", attribute, address)
            if result == self._api.CUresult.CUDA_ERROR_INVALID_VALUE:
                return []
            self._check("cuPointerGetAttribute", result)
            found.append(int(value))
        return found

    def _find(self, name: str, version: int) -> int:
        """Find the address of a call with its signature as of a release; 0 if there is none."""
        _result, address, _status = self._ask("cuGetProcAddress", name.encode(), version, 0)
        return int(address or 0)

    def _call(self, name: str, *args: Any) -> Any:
        result, *values = self._ask(name, *args)
        self._check(name, result)
        return values[0] if len(values) == 1 else values

    def _ask(self, name: str, *args: Any) -> Any:
        try:
            return getattr(self._api, name)(*args)
        except ValueError as exc:  # a result that is newer than these bindings
            raise DeviceError(self.device_index, name, str(exc)) from exc

    def _result(self, call: str, code: int) -> Any:
        """Convert the result of a call that was made without the bindings."""
        try:
            return self._api.CUresult(code)
        except ValueError as exc:
            raise DeviceError(self.device_index, call, str(exc)) from exc

    def _check(self, call: str, result: Any) -> None:
        if result == self._success:
            return
        error = DeviceLostError if result.name in STICKY else DeviceError
        raise error(self.device_index, call, result.name)


class _Current(threading.local):
    """Context that makes a device current in each thread: only the outermost one calls CUDA."""

    def __init__(self, call: Callable[..., Any], context: Any, relaxed: Any) -> None:
        self._call, self._context, self._relaxed = call, context, relaxed
        self._depth = 0
        self._mode: Any = None

    def __enter__(self) -> None:
        if not self._depth:
            self._call("cuCtxPushCurrent", self._context)
            try:
                self._mode = self._call("cuThreadExchangeStreamCaptureMode", self._relaxed)
            except BaseException:
                self._call("cuCtxPopCurrent")
                raise
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            try:
                self._call("cuThreadExchangeStreamCaptureMode", self._mode)
            finally:
                self._call("cuCtxPopCurrent")


def _import_bindings(device_index: int) -> ModuleType:
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError as exc:
        reason = "the package cuda-bindings is not installed"
        raise DeviceUnavailableError(device_index, reason) from exc
