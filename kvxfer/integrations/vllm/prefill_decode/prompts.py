"""Prompts: the content keys of a request's pages, the same at P and at D."""

from dataclasses import dataclass
from typing import Any

import msgspec

from kvxfer.errors import InvalidArgumentError
from kvxfer.integrations.vllm.prefill_decode.groups import Groups
from kvxfer.storage.prompt_keys import PromptKeys


@dataclass(frozen=True, slots=True)
class Prompts:
    """Prompts of an engine's requests: what of them is handed over, and under which keys.

    Attributes:
        num_last_tokens: Tokens at the end of a prompt that P leaves to D.
        knows_images: Whether vLLM names images by their content. Without a cache to find them in it
            counts them instead, and the first one of each engine has the same name.
    """

    num_last_tokens: int = 0
    knows_images: bool = True

    @classmethod
    def of(cls, vllm_config: Any, groups: Groups) -> "Prompts":
        """Read a `vllm.config.VllmConfig`.

        Source: `_process_mm_uuids` of vllm/renderers/base.py.
        """
        images = getattr(vllm_config.model_config, "multimodal_config", None)
        has_cache = getattr(images, "mm_processor_cache_gb", 0)
        has_cache = has_cache or vllm_config.cache_config.enable_prefix_caching
        return cls(groups.num_last_tokens, bool(has_cache))

    def keys(self, request: Any, *, num_left_out: int = 0) -> PromptKeys | None:
        """Make the keys of a request's prompt.

        Whatever changes the bytes of pages at equal tokens is in the scope of the keys: images,
        whose placeholder tokens are those of every image, adapters, and the salt of a tenant.

        Args:
            request: A `vllm.v1.request.Request`.
            num_left_out: Tokens at the end of the prompt that are left out.

        Returns:
            None for a prompt of embeddings, or of whatever else is not tokens, and for one with
            images that have no names; also if no token is left.
        """
        num_tokens = len(request.prompt_token_ids or ()) - num_left_out
        if num_tokens <= 0 or getattr(request, "prompt_embeds", None) is not None:
            return None
        lora = getattr(request, "lora_request", None)
        adapter = [_encode(lora.lora_name), _encode(lora.lora_path)] if lora else None
        salt = getattr(request, "cache_salt", None)
        images = [
            [_encode(each.identifier), each.mm_position.offset, each.mm_position.length]
            for each in getattr(request, "mm_features", None) or ()
        ]
        if images and not self.knows_images:
            return None
        scope = msgspec.msgpack.encode([adapter, salt and _encode(salt), images])
        try:
            return PromptKeys(request.prompt_token_ids[:num_tokens], scope=scope)
        except InvalidArgumentError:
            return None

    def keys_for_decode(self, request: Any) -> PromptKeys | None:
        """Make the keys of what D loads of a request's prompt; see `keys`."""
        return self.keys(request, num_left_out=self.num_last_tokens)

    def leave_out_last(self, request: Any) -> None:
        """Let vLLM compute a prompt without its last tokens, before it is scheduled.

        Its answer is of no use then but for its parameters. A request that could give another
        answer, or whose last tokens are not just tokens, is left as it is: D will not find its
        pages.

        Args:
            request: A `vllm.v1.request.Request` that is new.

        Source: `_truncate_request_for_prefill` of vLLM's NixlConnector; there is no interface for
        it.
        """
        num_left = request.num_prompt_tokens - self.num_last_tokens
        images = getattr(request, "mm_features", None) or ()
        if (
            self.num_last_tokens == 0
            or num_left <= 0
            or request.max_tokens != 1
            or self.keys(request) is None
            or getattr(request, "skip_reading_prefix_cache", False)
            or getattr(request, "resumable", False)  # its prompt goes on
            or any(each.mm_position.offset + each.mm_position.length > num_left for each in images)
        ):
            return
        request.prompt_token_ids = request.prompt_token_ids[:num_left]  # vLLM's client has it too
        del request._all_token_ids[num_left:]  # noqa: SLF001 - see above
        request.num_prompt_tokens = num_left


def _encode(text: str) -> bytes:
    """Encode any text of a client's, half of a surrogate pair included."""
    return str(text).encode("utf-8", "surrogatepass")
