"""Prompts: the content keys of a request's pages, the same at P and at D."""

from typing import Any

import msgspec

from kvxfer.errors import InvalidArgumentError
from kvxfer.storage.prompt_keys import PromptKeys


def prompt_keys(request: Any) -> PromptKeys | None:
    """Make the keys of a request's prompt.

    Whatever changes the bytes of pages at equal tokens is in the scope of the keys: images, whose
    placeholder tokens are those of every image, adapters, and the salt of a tenant.

    Args:
        request: A `vllm.v1.request.Request`.

    Returns:
        None for a prompt of embeddings, or of whatever else is not tokens.
    """
    if not request.prompt_token_ids or getattr(request, "prompt_embeds", None) is not None:
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
        return PromptKeys(request.prompt_token_ids, scope=scope)
    except InvalidArgumentError:
        return None


def _encode(text: str) -> bytes:
    """Encode any text of a client's, half of a surrogate pair included."""
    return str(text).encode("utf-8", "surrogatepass")
