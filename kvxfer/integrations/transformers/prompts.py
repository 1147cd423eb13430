"""Prompts: token ids of one sequence, and the inputs that are refused."""

import re
from collections.abc import Iterator
from typing import Any

import torch

from kvxfer.checks import INT64_MAX
from kvxfer.errors import InvalidArgumentError
from kvxfer.integrations.transformers.interface import (
    CACHE_ARGUMENT,
    GENERATION_FIELDS,
    GenerationConfig,
)

TOKEN_FIELDS = re.compile(r"(.+)_token_(?:ids?|index|idx)")
"""Names of configuration fields with token ids; the group is what the token stands for."""
TEXT_TOKENS = frozenset({
    "assistant", "bos", "cls", "decoder_start", "eod", "eos", "forced_bos", "forced_eos", "im_end",
    "im_start", "mask", "pad", "sep", "system", "unk", "user",
})  # fmt: skip
"""What special tokens of text stand for. All others stand for inputs that are not text."""
AUDIO_PREFIXES = ("codebook_", "codec_", "t2u_", "tts_")
"""Prefixes for tokens of another vocabulary, whose ids may be those of words in a prompt."""
BEAMS = ("num_beams", "num_return_sequences")
WHOLE_PROMPT: dict[str, object] = {
    "use_cache": True,
    "assistant_model": None,
    "assistant_early_exit": None,
    "prompt_lookup_num_tokens": None,
    "prefill_chunk_size": None,
}
"""Settings of `generate()`, and the value of each with which it computes only what a cache lacks.
With another value, it computes the whole prompt after the cached prefix, and gets other tokens.
Source: transformers/generation/utils.py, `_prefill`, `_assisted_decoding`."""
OWN_CACHE = "cache_implementation"
HARMLESS = frozenset({
    # What `generate()` itself takes, besides its settings.
    "generation_config", "logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn",
    "synced_gpus", "streamer", "tokenizer", "attention_mask",
    # How tokens are chosen, and when it ends.
    "max_length", "max_new_tokens", "min_length", "min_new_tokens", "max_time", "stop_strings",
    "early_stopping", "length_penalty", "exponential_decay_length_penalty",
    "do_sample", "temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff",
    "eta_cutoff", "repetition_penalty", "encoder_repetition_penalty", "diversity_penalty",
    "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids", "suppress_tokens",
    "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id", "sequence_bias",
    "renormalize_logits", "remove_invalid_values", "guidance_scale", "watermarking_config",
    "pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id",
    # What it returns.
    "output_attentions", "output_hidden_states", "output_scores", "output_logits",
    "return_dict_in_generate",
    # For caches that it does not create, and assistants that it does not have.
    "max_cache_len", "cache_config", "compile_config", "disable_compile", "num_assistant_tokens",
    "num_assistant_tokens_schedule", "assistant_confidence_threshold", "assistant_lookbehind",
    "target_lookbehind", "assistant_ensemble_weight", "max_matching_ngram_size",
})  # fmt: skip
"""Arguments of `generate()` that do not change the keys and values of a token. `generate()` passes
unknown arguments to the model, which may compute anything with them."""


def read_tokens(name: str, ids: Any) -> list[int]:
    """Read the token ids of one sequence, `(1, num_tokens)` or `(num_tokens,)`."""
    found = _as_tensor(ids)
    if not isinstance(found, torch.Tensor) or found.dtype not in (torch.int64, torch.int32):
        raise InvalidArgumentError(name, ids, "token ids, an integer tensor (1, num_tokens)")
    if found.ndim == 2 and found.shape[0] != 1:
        raise InvalidArgumentError(name, f"{found.shape[0]} sequences", "one sequence at a time")
    if found.ndim not in (1, 2):
        raise InvalidArgumentError(name, f"shape {tuple(found.shape)}", "(1, num_tokens)")
    return [int(token) for token in found.flatten().tolist()]


def require_tensor(ids: Any) -> None:
    """Check that token ids are a tensor as `generate()` takes it, with at least one token."""
    num_tokens = len(read_tokens("input_ids", ids))
    found = f"shape {tuple(ids.shape)}" if isinstance(ids, torch.Tensor) else ids
    if not num_tokens or not isinstance(ids, torch.Tensor) or ids.ndim != 2:
        wanted = "a tensor (1, num_tokens), with at least one token"
        raise InvalidArgumentError("input_ids", found, wanted)


def _as_tensor(given: Any) -> Any:
    """Convert a list to a tensor; return anything else as it is."""
    try:
        return torch.as_tensor(given, device="cpu") if isinstance(given, (list, tuple)) else given
    except (TypeError, ValueError, RuntimeError):  # ragged, not numbers, or too large
        return given


def require_text(tokens: list[int], settings: dict[str, Any], model: Any) -> None:
    """Check that a prompt is text without padding, so that its tokens determine keys and values.

    Tokens that the model has no embedding for may stand for an image or a sound.
    """
    if (mask := settings.get("attention_mask")) is not None:
        given, wanted = _as_tensor(mask), f"ones (1, {len(tokens)}), for a prompt without padding"
        is_tensor = isinstance(given, torch.Tensor)
        if not is_tensor or given.shape not in ((len(tokens),), (1, len(tokens))):
            found = f"of shape {tuple(given.shape)}" if is_tensor else type(given).__name__
            raise InvalidArgumentError("attention_mask", found, wanted)
        if not bool((given == 1).all()):  # generate() sums it up to positions
            raise InvalidArgumentError("attention_mask", "values other than 1", wanted)
    padding = _find_setting("pad_token_id", settings, model)
    ends = _as_tensor(_find_setting("eos_token_id", settings, model))
    ends = ends.flatten().tolist() if isinstance(ends, torch.Tensor) else [ends]
    if mask is None and padding is not None and padding not in ends and padding in tokens:
        found = f"padding (token {padding}) at {tokens.index(padding)}"
        wanted = "a prompt without padding; or pass an attention_mask of ones"
        raise InvalidArgumentError("input_ids", found, wanted)
    try:
        limit = int(model.get_input_embeddings().num_embeddings)
    except (AttributeError, NotImplementedError):  # no known limit
        limit = INT64_MAX
    for token in (min(tokens, default=0), max(tokens, default=0)):
        if not 0 <= token < limit:
            found = f"token {token} at {tokens.index(token)}"
            raise InvalidArgumentError("input_ids", found, f"text: tokens from 0 to {limit - 1}")
    present = set(tokens)
    for name, token in _input_tokens(model.config.to_dict()):
        if token in present:
            found = f"{name} {token} at {tokens.index(token)}"
            raise InvalidArgumentError("input_ids", found, "text: tokens identify no other input")


def _input_tokens(config: Any, path: str = "") -> Iterator[tuple[str, int]]:
    """List the tokens that stand for inputs besides text, at any depth of a configuration."""
    if isinstance(config, (list, tuple)):
        for each in config:
            yield from _input_tokens(each, path)
    elif isinstance(config, dict):
        for name, value in config.items():
            found = TOKEN_FIELDS.fullmatch(str(name))
            if found is None:
                yield from _input_tokens(value, f"{path}{name}.")
            elif found[1] not in TEXT_TOKENS and not found[1].startswith(AUDIO_PREFIXES):
                several = value if isinstance(value, (list, tuple)) else (value,)
                yield from ((f"{path}{name}", token) for token in several if type(token) is int)


def require_prefix_used(settings: dict[str, Any], model: Any) -> None:
    """Check that `generate()` computes only what its cache lacks, with these settings.

    Those left open are the model's. A setting that is not known to be harmless is refused.
    """
    given = settings.get("generation_config")
    if given is not None and not isinstance(given, GenerationConfig):
        raise InvalidArgumentError("generation_config", _say(given), "a GenerationConfig, or None")
    for name, harmless in WHOLE_PROMPT.items():
        wanted = f"{harmless}; else generate() computes the whole prompt after the prefix"
        # As an argument, None is a value.
        allowed = (harmless,) if name in settings else (harmless, None)
        _require_one_of(allowed, name, settings, model, wanted)
    wanted = "None: generate() continues from the cache that it is given"
    # Old checkpoints have "hybrid", for which generate() creates no cache.
    _require_one_of((None, "hybrid"), OWN_CACHE, settings, model, wanted)
    wanted = "None: with another value, keys and values may not be those of the tokens"
    for name in GENERATION_FIELDS - HARMLESS - WHOLE_PROMPT.keys() - {OWN_CACHE, *BEAMS}:
        _require_one_of((None, False), name, settings, model, wanted)


def require_one_sequence(settings: dict[str, Any], model: Any) -> None:
    """Check arguments of `generate()`: one sequence of tokens, without beams, of text alone."""
    require_prefix_used(settings, model)
    for name in BEAMS:
        wanted = "1: beams and several sequences are not supported"
        _require_one_of((None, 1), name, settings, model, wanted)
    for name in settings.keys() - GENERATION_FIELDS - HARMLESS - WHOLE_PROMPT.keys():
        if settings[name] is not None or name in {"past_key_values", CACHE_ARGUMENT}:
            raise InvalidArgumentError(name, _say(settings[name]), "no input besides input_ids")


def _say(value: object) -> object:
    return value if isinstance(value, (bool, int, float, str)) else type(value).__name__


def _require_one_of(
    allowed: tuple[object, ...], name: str, settings: dict[str, Any], model: Any, wanted: str
) -> None:
    """Check a setting. Values of other types are not compared: their `==` may do anything."""
    value = _find_setting(name, settings, model)
    if not any(value is each or (type(value) is type(each) and value == each) for each in allowed):
        raise InvalidArgumentError(name, _say(value), wanted)


def _find_setting(name: str, settings: dict[str, Any], model: Any) -> Any:
    """Find a setting as `generate()` does: an argument, else as configured, else the model's."""
    value = getattr(settings.get("generation_config"), name, None)
    value = getattr(model.generation_config, name, None) if value is None else value
    return settings.get(name, value)
