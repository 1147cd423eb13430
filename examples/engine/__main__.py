"""`python -m examples.engine`: continues texts with a model that has tiers below its KV cache."""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.engine.engine import Engine
from kvxfer import BlockKey, Namespace
from kvxfer.engine_side import VLLMKeys
from kvxfer.engine_side.vllm_pages import find_vllm_pages
from kvxfer.engine_side.weight_files import find_weights_revision, hash_text
from kvxfer.errors import InvalidArgumentError, KVXferError
from kvxfer.storage.prompt_keys import PromptKeys

TOKENS_PER_BLOCK = 128


def keys_of(tokens: Sequence[int]) -> list[BlockKey]:
    """Make the keys of the whole blocks of some tokens."""
    whole = len(tokens) - len(tokens) % TOKENS_PER_BLOCK
    return PromptKeys(list(tokens)).block_keys(0, TOKENS_PER_BLOCK, whole)


def open_engine(folder: str, backend: Sequence[str], vllm_keys: VLLMKeys | None = None) -> Engine:
    """Open an engine with keys of its own, or with the keys and the namespace of vLLM's pages.

    Args:
        folder: Folder of a transformers model.
        backend: URLs of the tiers, fastest first.
        vllm_keys: Keys of the vLLM to share pages with; it must have opened the files before.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if vllm_keys:
        pages = find_vllm_pages(model, backend, vllm_keys)
        return Engine(
            model,
            backend,
            namespace=pages.namespace_of_model,
            keys=pages.page_keys,
            axes=pages.axes,
            tokens_per_block=pages.tokens_per_page,
        )
    revision = find_weights_revision(folder)
    namespace = Namespace(
        model=type(model).__name__,
        revision=revision,
        dtype="float32",
        config_hash=hash_text(model.config.to_json_string()),
    )
    return Engine(
        model,
        backend,
        namespace=namespace,
        keys=keys_of,
        axes={},
        tokens_per_block=TOKENS_PER_BLOCK,
    )


def main() -> None:
    """Continue texts, and print how many of their tokens were reused."""
    parser = argparse.ArgumentParser(prog="python -m examples.engine", description=__doc__)
    parser.add_argument("--model", required=True, help="folder of a model of transformers")
    parser.add_argument("--backend", required=True, action="append", help="URL; fastest first")
    parser.add_argument("--with-vllm", action="store_true", help="share pages with vLLM")
    parser.add_argument("--tokens", type=int, default=32, help="tokens to generate")
    parser.add_argument("texts", nargs="+", metavar="TEXT")
    options = parser.parse_args()

    try:
        run(options)
    except (ValueError, NotImplementedError, TimeoutError, KVXferError) as exc:
        parser.exit(2, f"{parser.prog}: error: {exc}\n")


def run(options: argparse.Namespace) -> None:
    """Continue texts as the command line says.

    Raises:
        ValueError: The model, a text or the number of tokens cannot be used.
        NotImplementedError: The engine does not support the attention of the model.
        TimeoutError: The texts were not continued in time.
        KVXferError: A backend cannot be opened.
    """
    if not Path(options.model, "config.json").is_file():
        raise InvalidArgumentError("--model", options.model, "a folder of a model of transformers")
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    prompts = [tokenizer(text).input_ids for text in options.texts]
    engine = open_engine(options.model, options.backend, VLLMKeys() if options.with_vllm else None)
    with engine.transfers:
        for prompt, request in zip(prompts, engine.generate(prompts, options.tokens), strict=True):
            print(f"{request.num_reused} of {len(prompt)} tokens were reused:")
            print(tokenizer.decode(request.tokens[len(prompt) :]).strip(), end="\n\n")


if __name__ == "__main__":
    main()
