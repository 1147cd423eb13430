"""Prompts: the content keys of a request's pages, the same at P and at D."""

from typing import Any

import msgspec

from kvxfer.errors import InvalidArgumentError
from kvxfer.storage.prompt_keys import PromptKeys


def prompt_keys(request: Any, *, num_left_out: int = 0) -> PromptKeys | None:
    """Make the keys of a request's prompt.

    Whatever changes the bytes of pages at equal tokens is in the scope of the keys: images, whose
    placeholder tokens are those of every image, adapters, and the salt of a tenant.

    Args:
        request: A `vllm.v1.request.Request`.
        num_left_out: Tokens at the end of the prompt that are left out.

    Returns:
        None for a prompt of embeddings, or of whatever else is not tokens; also if none is left.
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
    scope = msgspec.msgpack.encode([adapter, salt and _encode(salt), images])
    try:
        return PromptKeys(request.prompt_token_ids[:num_tokens], scope=scope)
    except InvalidArgumentError:
        return None


def leave_out_last(request: Any, num_tokens: int) -> None:
    """Let vLLM compute a prompt without its last tokens, before it is scheduled.

    Its answer is of no use then but for its parameters. A request that could give another answer,
    or whose last tokens are not just tokens, is left as it is: D will not find its states.

    Args:
        request: A `vllm.v1.request.Request` that is new.
        num_tokens: Tokens to leave out.

    Source: `_truncate_request_for_prefill` of vLLM's NixlConnector; there is no interface for it.
    """
    num_left = request.num_prompt_tokens - num_tokens
    images = getattr(request, "mm_features", None) or ()
    if (
        num_tokens == 0
        or num_left <= 0
        or request.max_tokens != 1
        or prompt_keys(request) is None
        or getattr(request, "skip_reading_prefix_cache", False)
        or any(each.mm_position.offset + each.mm_position.length > num_left for each in images)
    ):
        return
    request.prompt_token_ids = request.prompt_token_ids[:num_left]  # vLLM's client has the list too
    del request._all_token_ids[num_left:]  # noqa: SLF001 - see above
    request.num_prompt_tokens = num_left


def _encode(text: str) -> bytes:
    """Encode any text of a client's, half of a surrogate pair included."""
    return str(text).encode("utf-8", "surrogatepass")
