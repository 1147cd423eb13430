"""Prefix cache: keys and values of prompts that `generate()` of transformers need not compute."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Literal, NamedTuple, Self
from weakref import WeakKeyDictionary

from kvxfer import runtime
from kvxfer.checks import require_positive, require_text, require_timeout
from kvxfer.connect import BackendChoice, backend_choices, connect
from kvxfer.engine_side.vllm_keys import VLLMKeys
from kvxfer.engine_side.vllm_pages import VLLMPages, find_vllm_pages
from kvxfer.engine_side.weight_files import config_facts, hash_facts
from kvxfer.errors import ClosedError, InvalidArgumentError
from kvxfer.face import RowPool, RowStore, count_leading
from kvxfer.integrations.transformers import prompts
from kvxfer.integrations.transformers.interface import (
    CACHE_ARGUMENT,
    DynamicCache,
    Past,
    give_layer,
    require_interface,
)
from kvxfer.integrations.transformers.model_layers import count_tokens, find_layers
from kvxfer.integrations.transformers.module_state import is_thread_altering, require_unchanged
from kvxfer.integrations.transformers.page_pool import PagePool
from kvxfer.integrations.transformers.weights import Weights
from kvxfer.kvcache.describer import BlockDescriber
from kvxfer.runtime import begin_aside
from kvxfer.storage.call_guard import CallGuard
from kvxfer.storage.keys import BlockKey, Namespace
from kvxfer.storage.observer import Observer
from kvxfer.storage.prompt_keys import PromptKeys
from kvxfer.transfer.job import Direction


class _Loaded(NamedTuple):
    """Prompt that a cache was loaded for, and how the weights had changed by then."""

    tokens: list[int]
    change: str | None


class PrefixCache:
    """Cache of prompts' keys and values in any backend, for `generate()` of one model.

    `load` returns the longest stored prefix of a prompt as a `DynamicCache`, `store` keeps the
    complete pages of a sequence, and `generate` does both around the model's own `generate`. A
    damaged, missing or late page shortens the prefix, and the model computes the rest. Pages are
    found by their tokens and the bytes of the weights, in this and any later process.

    May be called from several threads; a call waits within its deadline for memory that others use.
    A cache that `load` returned belongs to the caller alone.

    Args:
        model: Model with `generate()`: a decoder with full or sliding-window attention.
        backend: URL or mapping of a backend, or several, fastest first, see `connect`.
        tokens_per_page: Tokens stored under one key; 128 by default, or as in the engine's pages.
        revision: Name of the weights, in addition to their digest; with `engine_keys`, the
            `--revision` of the engine.
        engine_keys: Keys of an engine to share pages with, `"vllm"` or `VLLMKeys`; by default,
            kvxfer's own keys.
        namespace: Fingerprint of the engine's namespace, if the store has several of the model.
        timeout_s: Deadline of calls without one of their own, in seconds; None for no limit.
        pool_bytes: Host memory that pages pass through; raised to one page, and one per tier.
        observers: Observers of pages, such as `kvxfer.telemetry.metrics.Metrics`.

    Raises:
        InvalidArgumentError: An argument is invalid, or prefixes of this model cannot be reused;
            the error names the reason.
        UnsupportedEngineError: This release of transformers has another interface.
    """

    def __init__(
        self,
        model: Any,
        backend: BackendChoice | Sequence[BackendChoice],
        *,
        tokens_per_page: int | None = None,
        revision: str = "",
        engine_keys: Literal["", "vllm"] | VLLMKeys = "",
        namespace: str = "",
        timeout_s: float | None = 30.0,
        pool_bytes: int = 256 << 20,
        observers: Sequence[Observer] = (),
    ) -> None:
        require_interface()
        if tokens_per_page is not None:
            tokens_per_page = require_positive("tokens_per_page", tokens_per_page)
        revision = require_text("revision", revision)
        fingerprint = require_text("namespace", namespace)
        self._timeout_s = require_timeout("timeout_s", timeout_s)
        pool_bytes = require_positive("pool_bytes", pool_bytes)
        self._vllm: VLLMPages | None = None
        self._layers = find_layers(model)
        self._model = model = dict(model.named_children()).get("_orig_mod", model)  # if compiled
        self._weights = Weights(model)
        self._change: str | None = ""  # of the model, as of the last call
        self._has_changed = False  # whether any call found a change
        if engine_keys:
            keys = VLLMKeys() if engine_keys == "vllm" else engine_keys
            if not isinstance(keys, VLLMKeys):
                raise InvalidArgumentError("engine_keys", engine_keys, "'vllm' or VLLMKeys")
            self._vllm = find_vllm_pages(
                model, backend, keys, revision=revision, fingerprint=fingerprint
            )
            require_unchanged(model)
            if tokens_per_page not in {None, self._vllm.tokens_per_page}:
                wanted = f"{self._vllm.tokens_per_page}, as the engine's pages have"
                raise InvalidArgumentError("tokens_per_page", tokens_per_page, wanted)
            identity, axes = self._vllm.namespace_of_model, self._vllm.axes
            self.tokens_per_page = self._vllm.tokens_per_page
        else:
            axes = {}
            identity = Namespace(  # of the weights in memory, wherever they came from
                model=type(model).__name__,
                revision=f"{revision} weights {self._weights.digest}".strip(),
                dtype=str(model.dtype).removeprefix("torch."),
                config_hash=hash_facts(config_facts(model.config)),
            )
            self.tokens_per_page = tokens_per_page or 128
        least = 1 + len(backend_choices(backend))
        self._pool = PagePool(self._layers, self.tokens_per_page, pool_bytes, axes, least)
        if self._vllm is not None:
            self._vllm.require_same_pages(self._pool.caches, self._pool.mappings)
        engine = connect(
            backend,
            self._pool.caches,
            namespace=identity,
            mappings=self._pool.mappings,
            timeout_s=self._timeout_s,
            observers=observers,
        )
        self._pages = RowStore(
            engine,
            dict.fromkeys(Direction, RowPool(range(self._pool.num_pages))),
            name="prefix cache",
            describer=BlockDescriber(self._pool.caches),
        )
        self._guard = CallGuard("prefix cache")
        self._ended = runtime.condition()  # notified when a call ends
        self._num_calls = 0
        self._loaded: WeakKeyDictionary[Past, _Loaded] = WeakKeyDictionary()

    def load(
        self, input_ids: Any, *, attention_mask: Any = None, timeout_s: float | None = None
    ) -> Past:
        """Load the longest stored prefix of a prompt, at most all but its last token.

        Args:
            input_ids: Token ids of the whole prompt, integers, `(1, num_tokens)`.
            attention_mask: Mask that `generate` will get, if any; must be all ones.
            timeout_s: Deadline from now, instead of the cache's; what has not arrived by then is
                left to the model.

        Returns:
            A new `DynamicCache`, to pass as `past_key_values` or `cache`; empty if there is no hit.

        Raises:
            InvalidArgumentError: There are several sequences, padding, or inputs besides text; or
                the model's `generation_config` computes whole prompts, as with `use_cache=False`.
            ClosedError: The cache was closed.
        """
        prompts.require_prefix_used({}, self._model)
        return self._load(input_ids, {"attention_mask": attention_mask}, timeout_s)

    def _load(self, input_ids: Any, settings: dict[str, Any], timeout_s: float | None) -> Past:
        self._guard.check()
        tokens = prompts.read_tokens("input_ids", input_ids)
        prompts.require_text(tokens, settings, self._model)
        is_altered = is_thread_altering(self._model.device)  # differs from thread to thread
        with self._call(timeout_s) as deadline:
            expected = self._change
            finding = begin_aside("kvxfer-weights", self._weights.find_change)
            try:
                past = self._find_prefix(tokens, None if is_altered else expected, deadline)
            finally:
                runtime.wait_futures([finding])
            change = self._note(finding.result())
            if is_altered:
                change = None
            elif change != expected:  # those pages are of other weights
                past = self._find_prefix(tokens, change, deadline)
            self._loaded[past] = _Loaded(tokens, change)
        return past

    def _find_prefix(self, tokens: Sequence[int], change: str | None, deadline: float) -> Past:
        """Make a cache with the prefix of a prompt that is stored for these weights."""
        past, keys = DynamicCache(), self._keys(tokens, len(tokens) - 1, change)
        found = count_leading(self._pages.lookup(keys, deadline))
        if not found:
            return past
        room = self._pool.make_room(found)
        copy = partial(self._pool.give_out, room)
        loaded = self._pages.move(Direction.LOAD, keys[:found], copy, deadline)
        if arrived := count_leading(loaded):
            stop = arrived * self.tokens_per_page
            for at, (layer_keys, layer_values) in enumerate(room):
                give_layer(past, at, layer_keys[:, :, :stop], layer_values[:, :, :stop])
        return past

    def store(self, output: Any, past: Past, *, timeout_s: float | None = None) -> int:
        """Store the complete pages of a sequence that are not there yet; return their tokens.

        The last sampled token has no keys and values, so it is never stored.

        Args:
            output: What `generate` returned: token ids `(1, num_tokens)`, or an output with
                `sequences`.
            past: The cache that `generate` was given, with the keys and values of these tokens.
            timeout_s: Deadline from now, instead of the cache's; the rest is not stored.

        Raises:
            InvalidArgumentError: There are several sequences or beams, the cache drops tokens or
                belongs to another model, or `output` has other tokens than the cache.
            ClosedError: The cache was closed.
        """
        self._guard.check()
        tokens = prompts.read_tokens("output", getattr(output, "sequences", output))
        if is_thread_altering(self._model.device):
            return 0
        num_tokens = count_tokens(past, self._layers)
        if num_tokens > len(tokens):
            wanted = f"at least the {num_tokens} tokens of past"
            raise InvalidArgumentError("output", f"{len(tokens)} tokens", wanted)
        loaded = self._loaded.get(past)
        if loaded is None:
            prompts.require_text(tokens, {}, self._model)
        elif tokens[: len(loaded.tokens)] != loaded.tokens:
            wanted = "the prompt that past was loaded for, and the tokens after it"
            raise InvalidArgumentError("output", "tokens with another beginning", wanted)
        with self._call(timeout_s) as deadline:
            change = self._note(self._weights.find_change())
            is_other = self._has_changed if loaded is None else loaded.change != change
            if is_other:
                return 0
            keys = self._keys(tokens, num_tokens, change)
            found = self._pages.lookup(keys, deadline)
            missing = [page for page, is_there in enumerate(found) if not is_there]

            def copy(some: Sequence[int], slots: Sequence[int]) -> None:
                self._pool.take_in(past, [missing[index] for index in some], slots)

            new = [keys[page] for page in missing]
            stored = self._pages.move(Direction.STORE, new, copy, deadline)
            return sum(stored) * self.tokens_per_page

    def generate(self, input_ids: Any, **settings: Any) -> Any:
        """Load a prefix, call the model's `generate`, and store what it computed.

        Args:
            input_ids: Token ids of the whole prompt, `(1, num_tokens)`.
            settings: Arguments of the model's `generate`.

        Returns:
            What the model's `generate` returned.

        Raises:
            InvalidArgumentError: As `load`; or there are beams, several sequences, inputs besides
                tokens, or settings with which the whole prompt is computed after the prefix.
            ClosedError: The cache was closed.
        """
        prompts.require_one_sequence(settings, self._model)
        prompts.require_tensor(input_ids)
        past = self._load(input_ids, settings, None)
        output = self._model.generate(input_ids, **{CACHE_ARGUMENT: past}, **settings)
        if self._loaded[past].change is not None:  # else its shapes may have changed, too
            with suppress(ClosedError):  # closed meanwhile
                self.store(output, past)
        return output

    def close(self) -> None:
        """Close the backend, which first tries to copy pages to every tier; may be called again.

        Waits for the calls of other threads, for at most `timeout_s`.
        """
        self._guard.close()
        with self._ended:
            self._ended.wait_for(lambda: not self._num_calls, self._timeout_s)
        self._pages.close()

    def __enter__(self) -> Self:
        self._guard.check()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @contextmanager
    def _call(self, timeout_s: float | None) -> Iterator[float]:
        """Count a call until it ends; yield its deadline."""
        given = require_timeout("timeout_s", timeout_s)
        left_s = self._timeout_s if given is None else given
        with self._ended:
            self._num_calls += 1
        try:
            yield math.inf if left_s is None else runtime.monotonic() + left_s
        finally:
            with self._ended:
                self._num_calls -= 1
                self._ended.notify_all()

    def _note(self, change: str | None) -> str | None:
        self._change = change
        if change != "":  # never reset: another thread may have set it
            self._has_changed = True
        return change

    def _keys(self, tokens: Sequence[int], num_tokens: int, change: str | None) -> list[BlockKey]:
        """Make the keys of the whole pages of the first tokens; none if weights have no name."""
        if change is None:
            return []
        whole = max(0, num_tokens - num_tokens % self.tokens_per_page)
        if self._vllm is None:
            made = PromptKeys(tokens, scope=change.encode())
            return made.block_keys(0, self.tokens_per_page, whole)
        if change:  # the engine's keys do not name the weights, which now differ from the engine's
            return []
        return self._vllm.page_keys(tokens[:whole])
