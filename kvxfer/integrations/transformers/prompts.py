"""Prompts: token ids of one sequence, and the inputs that are refused."""

from typing import Any

import torch

from kvxfer.errors import InvalidArgumentError

INPUT_TOKENS = tuple(
    f"{kind}_token_{number}" for kind in ("image", "video", "audio") for number in ("id", "index")
)
"""Fields of a configuration with the token that stands for an input that is no text."""
BEAMS = ("num_beams", "num_return_sequences")
WHOLE_PROMPT: dict[str, object] = {
    "use_cache": True,
    "assistant_model": None,
    "assistant_early_exit": None,
    "prompt_lookup_num_tokens": None,
    "prefill_chunk_size": None,
}
"""Settings of `generate()`, and the value of each with which it computes only what a cache lacks.
With another value it computes the whole prompt behind the cache, and goes on with other tokens.
Source: transformers/generation/utils.py, `_prefill`, `_assisted_decoding`."""


def read_tokens(name: str, ids: Any) -> list[int]:
    """Read the token ids of one sequence, `(1, num_tokens)` or `(num_tokens,)`.

    Raises:
        InvalidArgumentError: They are no token ids, or those of several sequences.
    """
    found = torch.as_tensor(ids) if isinstance(ids, (list, tuple)) else ids
    if not isinstance(found, torch.Tensor) or found.dtype not in (torch.int64, torch.int32):
        raise InvalidArgumentError(name, ids, "token ids, an integer tensor (1, num_tokens)")
    if found.ndim == 2 and found.shape[0] != 1:
        raise InvalidArgumentError(name, f"{found.shape[0]} sequences", "one sequence at a time")
    if found.ndim not in (1, 2):
        raise InvalidArgumentError(name, f"shape {tuple(found.shape)}", "(1, num_tokens)")
    return [int(token) for token in found.flatten().tolist()]


def require_text(tokens: list[int], mask: Any, model: Any) -> None:
    """Check that a prompt is text without padding, so that its tokens say all about it.

    Raises:
        InvalidArgumentError: Tokens are masked or padding, or stand for an image or a sound.
    """
    if mask is not None and not bool(torch.as_tensor(mask).bool().all()):
        raise InvalidArgumentError("attention_mask", "zeros in it", "a prompt without padding")
    config = model.generation_config
    padding, ends = config.pad_token_id, config.eos_token_id
    ends = ends if isinstance(ends, (list, tuple)) else [ends]
    if mask is None and padding is not None and padding not in ends and padding in tokens:
        found = f"padding (token {padding}) at {tokens.index(padding)}"
        wanted = "a prompt without padding; or pass an attention_mask of ones"
        raise InvalidArgumentError("input_ids", found, wanted)
    for name in INPUT_TOKENS:
        token = getattr(model.config, name, None)
        if token is not None and token in tokens:
            found = f"{name} {token} at {tokens.index(token)}"
            raise InvalidArgumentError("input_ids", found, "text: its tokens do not say what it is")


def require_prefix_used(settings: dict[str, Any], model: Any) -> None:
    """Check that `generate()` computes only what its cache lacks, by its arguments and the model's.

    Raises:
        InvalidArgumentError: A setting has it compute the whole prompt behind the cache.
    """
    for name, harmless in WHOLE_PROMPT.items():
        value = _setting(name, settings, model)
        if value is not None and value != harmless:
            found = value if isinstance(value, (bool, int)) else type(value).__name__
            wanted = f"{harmless}: it computes the whole prompt behind the prefix"
            raise InvalidArgumentError(name, found, wanted)


def require_one_sequence(settings: dict[str, Any], model: Any) -> None:
    """Check arguments of `generate()`: one sequence of tokens, without beams, of text alone.

    Raises:
        InvalidArgumentError: There are beams, several sequences, or inputs besides tokens, or as
            `require_prefix_used`.
    """
    require_prefix_used(settings, model)
    for name in BEAMS:
        number = _setting(name, settings, model) or 1
        if number != 1:
            raise InvalidArgumentError(name, number, "1: beams and several sequences are not kept")
    for name, value in settings.items():
        is_input = isinstance(value, torch.Tensor) and name != "attention_mask"
        if is_input or name == "past_key_values":
            raise InvalidArgumentError(name, type(value).__name__, "no input besides input_ids")


def _setting(name: str, settings: dict[str, Any], model: Any) -> Any:
    """Find a setting as `generate()` does: what a configuration leaves open is the model's."""
    if name in settings:
        return settings[name]
    given = getattr(settings.get("generation_config"), name, None)
    return getattr(model.generation_config, name, None) if given is None else given
