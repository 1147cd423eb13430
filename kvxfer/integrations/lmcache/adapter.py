"""L2 adapter of LMCache over any backends of kvxfer."""

import itertools
import logging
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from functools import partial
from typing import Any

from kvxfer import runtime
from kvxfer.backends.file import FileBackend
from kvxfer.backends.host import HostBackend
from kvxfer.checks import require_positive
from kvxfer.connect import open_backend
from kvxfer.engine_side.plug import Plug
from kvxfer.errors import InvalidArgumentError, KVXferError
from kvxfer.integrations.lmcache.answers import Answers, Deadlines, Task
from kvxfer.integrations.lmcache.interface import (
    SUPPORTED,
    Bitmap,
    KeyEntry,
    KeyListPage,
    L1MemoryDesc,
    L2AdapterInterface,
    L2AdapterListener,
    L2StoreResult,
    MemoryLayoutDesc,
    MemoryObj,
    ObjectKey,
)
from kvxfer.integrations.lmcache.object_keys import object_id_of
from kvxfer.integrations.lmcache.object_store import ObjectStore, StoredObject
from kvxfer.integrations.lmcache.residents import Residents
from kvxfer.integrations.lmcache.settings import AdapterSettings
from kvxfer.runtime import begin_aside
from kvxfer.storage.backend import Backend
from kvxfer.storage.keys import Namespace
from kvxfer.storage.observer import Observer
from kvxfer.tiering.tiered_backend import tiers_of

PIN_S = 60.0
"""How long an object that was found, but never unlocked, is kept from being deleted."""

logger = logging.getLogger(__name__)


class KVXferL2Adapter(Plug, L2AdapterInterface):
    """L2 adapter that keeps LMCache's objects in a kvxfer backend, verified, with a deadline.

    Configured as `lmcache server --l2-adapter '{"type": "plugin", "module_path":
    "kvxfer.integrations.lmcache", "class_name": "KVXferL2Adapter", "adapter_params": {"backend":
    "file:///var/cache/kv?capacity=200GiB", "revision": "..."}}'`. Every task is answered by its
    deadline, even one that cannot be done; no method raises into LMCache's controllers. An object
    that is corrupt, late, or of another size, shape or type is a miss.

    Args:
        params: The `adapter_params`, see `AdapterSettings`.
        l1_memory_desc: LMCache's memory, or its first region; unused, since objects are stored and
            loaded wherever they are in host memory.

    Raises:
        InvalidArgumentError: A parameter is missing, unknown or invalid.
        CapacityError: Less memory or disk is available than was configured.
        BackendUnavailableError: The backend cannot be opened.
        UnsupportedEngineError: This release of LMCache requires methods that kvxfer does not have.
    """

    packages, supported = ("lmcache",), SUPPORTED

    def __init__(
        self,
        params: Mapping[str, Any],
        *,
        l1_memory_desc: L1MemoryDesc | None = None,  # noqa: ARG002 - as LMCache passes it
    ) -> None:
        settings = AdapterSettings.parse(params)
        super().__init__(max_capacity_bytes=int(settings.capacity))
        self._settings = settings
        self._task_ids = itertools.count()
        self._submission = runtime.lock()
        # Number of pins, and until when they hold; the first to expire comes first.
        self._pins = OrderedDict[ObjectKey, tuple[int, float]]()
        self._pins_lock = runtime.lock()
        self._closed = False
        self._ready = False  # to tell LMCache of objects: its events have the adapter's name
        with ExitStack() as opened:
            answers = [opened.enter_context(closing(Answers())) for _ in range(3)]
            self._stored, self._found, self._loaded = answers
            self._residents = Residents(settings.piece, settings.namespace.fingerprint, self._wake)
            self._objects = ObjectStore(self._open_observed, settings, self._residents)
            opened.callback(self._close_store)
            self._deadlines = opened.enter_context(closing(Deadlines()))
            self._objects.start()
            self._opened = opened.pop_all()

    def open_backend(self, namespace: Namespace, observers: Sequence[Observer]) -> Backend:
        """Open the backend; a subclass may open one of its own."""
        return open_backend(self._settings.backend, namespace, observers=observers)

    def set_backend_identity(self, name: str, shared: bool = False) -> None:  # noqa: FBT001, FBT002 - LMCache's signature
        """Take the name for events; from now on, report objects, even those of old files."""
        super().set_backend_identity(name, shared)
        self._ready = True
        self._wake()

    def register_listener(self, listener: L2AdapterListener) -> None:
        """Register a listener, and tell it of the objects that are there."""
        register = super().register_listener
        tell = partial(_tell, listener.on_l2_keys_stored)
        self._residents.introduce(lambda: register(listener), tell)

    def get_store_event_fd(self) -> int:
        """See `L2AdapterInterface`."""
        return self._stored.fd

    def get_lookup_and_lock_event_fd(self) -> int:
        """See `L2AdapterInterface`."""
        return self._found.fd

    def get_load_event_fd(self) -> int:
        """See `L2AdapterInterface`."""
        return self._loaded.fd

    def submit_store_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        """Begin to store objects; each is stored or fails by itself."""
        return self._submit(
            len(keys),
            self._stored,
            lambda task: L2StoreResult(all(task.done), task.num_bytes),
            lambda task: self._objects.store(task, _locate(keys, objects)),
        )

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        """Take the results of the stores that have ended."""
        return self._stored.take_all()

    def submit_lookup_and_lock_task(
        self,
        keys: list[ObjectKey],
        group_layout_descs: Mapping[int, MemoryLayoutDesc],  # noqa: ARG002 - LMCache's signature
    ) -> int:
        """Begin to look up objects; `delete` spares those found until unlocked, or for `PIN_S`."""

        def answer(task: Task) -> Bitmap:
            done = list(task.done)  # a late lookup may still change it
            found = _bitmap(done)
            self._pin([key for key, is_there in zip(keys, done, strict=True) if is_there])
            return found

        return self._submit(
            len(keys), self._found, answer, lambda task: self._objects.lookup(task, keys)
        )

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        """Take the result of a lookup; None while there is none."""
        return self._found.take(task_id)

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        """Unlock objects that were found."""
        with self._pins_lock:
            for key in keys:
                num_pins, until = self._pins.get(key, (0, 0.0))
                if num_pins > 1:
                    self._pins[key] = num_pins - 1, until
                else:
                    self._pins.pop(key, None)

    def submit_load_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        """Begin to load objects into their memory, which is not touched after the answer."""

        async def work(task: Task) -> None:
            await self._objects.load(task, _locate(keys, objects))
            if loaded := [key for key, done in zip(keys, task.done, strict=True) if done]:
                _tell(self._notify_keys_accessed, loaded)

        return self._submit(len(keys), self._loaded, lambda task: _bitmap(task.done), work)

    def query_load_result(self, task_id: int) -> Bitmap | None:
        """Take the result of a load; None while there is none."""
        return self._loaded.take(task_id)

    def delete(self, keys: list[ObjectKey]) -> None:
        """Delete objects, except those that were found and are not unlocked yet."""
        try:
            with self._pins_lock:
                self._drop_expired_pins()
                ids = [object_id_of(key) for key in keys if key not in self._pins]
            if ids and not (self._closed or self._objects.is_suspended):
                deleting = self._objects.ask(partial(self._objects.delete, ids))
                runtime.result(deleting, self._settings.timeout_s + 1)
            self._deliver()
        except Exception as exc:
            logger.warning("a delete of %d objects failed", len(keys), exc_info=exc)

    def list_l2_keys(
        self, model_name: str | None = None, page_size: int = 500, cursor: str | None = None
    ) -> KeyListPage:
        """List the objects that are there and whose keys are known, in the order of their ids.

        Raises:
            InvalidArgumentError: `page_size` is not positive, or `cursor` is not hexadecimal.
        """
        page_size = require_positive("page_size", page_size)
        try:
            after = bytes.fromhex(cursor or "")
        except (TypeError, ValueError) as exc:
            raise InvalidArgumentError("cursor", cursor, "a cursor of an earlier page") from exc
        left = self._residents.list_objects(after, page_size + 1, model_name)
        page = left[:page_size]
        entries = tuple(KeyEntry(key.to_encoded_object_key(), size) for _, key, size in page)
        return KeyListPage(entries, page[-1][0].hex() if len(left) > page_size else None)

    def report_status(self) -> dict[str, Any]:
        """Report whether the backend is healthy: open, in time, and accepting blocks."""
        suspended, is_open = self._objects.is_suspended, self._residents.breaker_is_open
        return {
            "is_healthy": not (suspended or is_open or self._closed),
            "type": type(self).__name__,
            "suspended": suspended,
            "breaker_open": is_open,
            "closed": self._closed,
            "num_objects": self._residents.num_objects,
        }

    def close(self) -> None:
        """Answer all tasks and close the backend, within a deadline; may be called again."""
        with self._submission:
            if self._closed:
                return
            self._closed = True
        self._opened.close()

    def _open_observed(self) -> Backend:
        """Open the backend, whose tiers report to `Residents` which pieces they have."""
        backend = self.open_backend(self._settings.namespace, [self._residents])
        self._residents.num_tiers = len(tiers_of(backend))
        exact = (backend.provide(kind) for kind in (HostBackend, FileBackend))
        self._residents.is_exact = any(each is not None for each in exact)
        return backend

    def _close_store(self) -> None:
        closed = begin_aside("kvxfer-close", self._objects.close)
        runtime.wait_futures([closed], 2 * self._settings.close_timeout_s)

    def _submit(
        self,
        num_keys: int,
        answers: Answers,
        answer: Callable[[Task], object],
        work: Callable[[Task], Coroutine[Any, Any, None]],
    ) -> int:
        """Begin a task; if that fails, the answer is that no key is done.

        LMCache's listeners are called on the event loop, before the answer. At the deadline, the
        answer no longer waits for them, since one may block.
        """
        self._ready = True
        task_id = next(self._task_ids)

        async def work_and_tell() -> None:
            try:
                await work(task)
            finally:
                self._deliver()

        with self._submission:
            deadline = runtime.monotonic() + self._settings.timeout_s
            task = Task(num_keys, deadline, lambda of: answers.give(task_id, lambda: answer(of)))
            if not self._closed:
                self._deadlines.watch(task)
        try:
            if num_keys and not self._closed:
                self._objects.begin(task, work_and_tell)
            else:
                task.end()
        except Exception as exc:
            logger.warning("a task of %d objects could not begin", num_keys, exc_info=exc)
            task.end()
        return task_id

    def _pin(self, keys: Sequence[ObjectKey]) -> None:
        with self._pins_lock:
            self._drop_expired_pins()
            until = runtime.monotonic() + PIN_S
            for key in keys:
                self._pins[key] = self._pins.get(key, (0, 0.0))[0] + 1, until
                self._pins.move_to_end(key)

    def _drop_expired_pins(self) -> None:
        now = runtime.monotonic()
        while self._pins and next(iter(self._pins.values()))[1] < now:
            self._pins.popitem(last=False)

    def _wake(self) -> None:
        """Deliver changes, and delete what is left of broken objects, on the event loop."""
        if self._ready:
            with suppress(KVXferError):  # the store was closed
                self._objects.call_soon(self._tidy)

    def _tidy(self) -> None:
        self._deliver()
        if not self._objects.is_suspended and (broken := self._residents.take_broken()):
            self._objects.ask(partial(self._objects.delete_broken, broken))

    def _deliver(self) -> None:
        self._residents.deliver(
            partial(_tell, self._notify_keys_stored), partial(_tell, self._notify_keys_deleted)
        )


def _tell(notify: Callable[..., object], *args: object) -> None:
    """Notify LMCache's listeners; what one of them raises is logged."""
    try:
        notify(*args)
    except Exception:
        logger.exception("a listener of LMCache raised an error")


def _bitmap(done: Sequence[bool]) -> Bitmap:
    bitmap = Bitmap(len(done))
    for index, is_done in enumerate(done):
        if is_done:
            bitmap.set(index)
    return bitmap


def _locate(keys: Sequence[ObjectKey], objects: Sequence[MemoryObj]) -> list[StoredObject]:
    """Find objects in host memory; those elsewhere, or without bytes, are left out."""
    inside: list[StoredObject] = []
    for index, (key, memory) in enumerate(zip(keys, objects, strict=True)):
        device = getattr(getattr(memory, "raw_data", None), "device", None)
        if getattr(device, "type", "") == "cpu" and (size := memory.get_size()):
            meta = memory.metadata
            layout = str((meta.shapes or [meta.shape], meta.dtypes or [meta.dtype]))
            inside.append(StoredObject(key, memory.data_ptr, size, layout, index, memory))
    if len(inside) < len(keys):
        text = "%d of %d objects cannot be moved: they are not in host memory"
        logger.warning(text, len(keys) - len(inside), len(keys))
    return inside
