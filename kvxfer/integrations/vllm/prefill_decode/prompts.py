"""Prompts: the content keys of a request's pages, the same at P and at D."""

from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import msgspec

from kvxfer.engine_side.adapter_files import Adapter, LoadedAdapters
from kvxfer.errors import InvalidArgumentError
from kvxfer.integrations.vllm.common.model_identity import names_images
from kvxfer.integrations.vllm.prefill_decode.groups import Groups
from kvxfer.storage.prompt_keys import PromptKeys

OF_REQUESTS = frozenset({
    "lora_name", "lora_int_id", "lora_path", "base_model_name", "load_inplace",
    "is_3d_lora_weight",
})  # fmt: skip
"""Known fields of vLLM's `LoRARequest`; any other may mean other weights."""
OF_ENGINES = frozenset({
    "max_lora_rank", "max_loras", "max_cpu_loras", "fully_sharded_loras", "default_mm_loras",
    "specialize_active_lora", "max_lora_cls_labels", "lora_extra_vocab_size",
})  # fmt: skip
"""Harmless settings of vLLM's `LoRAConfig`: sizes, kernels, and adapters that requests name."""


@dataclass(frozen=True, slots=True)
class Prompts:
    """Prompts of an engine's requests: which part is handed over, and under which keys."""

    num_last_tokens: int = 0  # at the end of a prompt, which P leaves to D
    knows_images: bool = True  # see `names_images`
    lora: tuple[str, ...] = ()  # settings of the engine that change what an adapter computes
    adapters: LoadedAdapters = field(default_factory=LoadedAdapters, compare=False)

    @classmethod
    def of(cls, vllm_config: Any, groups: Groups) -> "Prompts":
        """Read a `vllm.config.VllmConfig`."""
        config = getattr(vllm_config, "lora_config", None)
        lora = sorted(
            f"{each.name}={getattr(config, each.name)}"
            for each in (fields(config) if is_dataclass(config) else ())
            if each.name not in OF_ENGINES
        )
        return cls(groups.num_last_tokens, names_images(vllm_config), tuple(lora))

    def note(self, request: Any) -> None:
        """Note a request as soon as it is known, handed over or not; see `LoadedAdapters`."""
        if (lora := getattr(request, "lora_request", None)) is not None:
            self.adapters.note(_adapter(lora))

    def why_not(self, request: Any) -> str:
        """Say why the weights of a request's adapter are not known; empty if they are."""
        try:
            self._name_adapter(request)
        except InvalidArgumentError as exc:
            return str(exc)
        return ""

    def _name_adapter(self, request: Any) -> list[Any] | None:
        """Name the adapter of a request by the digest of its files, None without one."""
        lora = getattr(request, "lora_request", None)
        if lora is None:
            return None
        names = getattr(type(lora), "__struct_fields__", None) or vars(lora).keys()
        for name in set(names) - OF_REQUESTS:
            if getattr(lora, name) is not None:
                rule = "an adapter without this field, which kvxfer does not know"
                raise InvalidArgumentError(f"lora_request.{name}", lora.lora_name, rule)
        digest = self.adapters.digest(_adapter(lora))
        is_3d = bool(getattr(lora, "is_3d_lora_weight", False))
        return [_encode(lora.lora_name), digest, is_3d, self.lora]

    def keys(self, request: Any, *, num_left_out: int = 0) -> PromptKeys | None:
        """Build the keys of a request's prompt without its last `num_left_out` tokens.

        None if its tokens cannot identify the prompt, or none is left. Whatever changes the bytes
        of pages at equal tokens is in the scope of the keys: images, whose placeholder tokens are
        those of every image, adapters, and the salt of a tenant.
        """
        num_tokens = len(request.prompt_token_ids or ()) - num_left_out
        if num_tokens <= 0 or getattr(request, "prompt_embeds", None) is not None:
            return None
        salt = getattr(request, "cache_salt", None)
        images = [
            [_encode(each.identifier), each.mm_position.offset, each.mm_position.length]
            for each in getattr(request, "mm_features", None) or ()
        ]
        if images and not self.knows_images:
            return None
        try:
            adapter = self._name_adapter(request)
            scope = msgspec.msgpack.encode([adapter, salt and _encode(salt), images])
            return PromptKeys(request.prompt_token_ids[:num_tokens], scope=scope)
        except InvalidArgumentError:
            return None

    def keys_for_decode(self, request: Any) -> PromptKeys | None:
        """Build the keys of the part of a request's prompt that D loads; see `keys`."""
        return self.keys(request, num_left_out=self.num_last_tokens)

    def leave_out_last(self, request: Any) -> None:
        """Cut the last tokens off a prompt before vLLM schedules it: D computes them.

        A request whose answer is wanted, or whose last tokens are more than tokens, is left as it
        is: D will not find its pages.

        Source: `_truncate_request_for_prefill` of vLLM's NixlConnector; there is no interface.
        """
        num_left = request.num_prompt_tokens - self.num_last_tokens
        images = getattr(request, "mm_features", None) or ()
        if (
            self.num_last_tokens == 0
            or num_left <= 0
            or request.max_tokens != 1
            or self.keys(request) is None
            or getattr(request, "skip_reading_prefix_cache", False)
            or getattr(request, "resumable", False)  # its prompt may grow
            or any(each.mm_position.offset + each.mm_position.length > num_left for each in images)
        ):
            return
        request.prompt_token_ids = request.prompt_token_ids[:num_left]  # vLLM's client shares it
        del request._all_token_ids[num_left:]  # noqa: SLF001 - see above
        request.num_prompt_tokens = num_left


def _adapter(lora: Any) -> Adapter:
    anew = bool(getattr(lora, "load_inplace", False))
    return Adapter(lora.lora_int_id, lora.lora_name, lora.lora_path, anew)


def _encode(text: str) -> bytes:
    """Encode any text from a client, even with half of a surrogate pair."""
    return str(text).encode("utf-8", "surrogatepass")
