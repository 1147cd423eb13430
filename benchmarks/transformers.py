"""Benchmark of prefixes for `generate()` of transformers, against computing them."""

import copy
import random
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.disk import bench_folder
from benchmarks.report import BenchRow, compare, time_in_turn
from benchmarks.vllm.model import find_model, random_prompt

PROMPT_TOKENS = 1_500
SPEED_GOAL = ">= 5"


def run(*, quick: bool) -> list[BenchRow]:
    """Measure the first token of a prompt whose prefix is stored, loading included.

    Baselines of the same rounds: the whole prompt is computed; or the prefix is a deep copy of a
    cache in the same process, as transformers' documentation has it.

    Raises:
        FileNotFoundError: There is no model.
        RuntimeError: A prefix was not found, or gave another token than the copy.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from kvxfer.integrations.transformers import PrefixCache

    logging.disable_progress_bar()
    model_to_load = find_model()
    dtype = getattr(torch, model_to_load.dtype)
    model = AutoModelForCausalLM.from_pretrained(model_to_load.folder, dtype=dtype)
    prompt = torch.tensor([random_prompt(random.Random(22), PROMPT_TOKENS)])
    with (
        bench_folder("transformers") as folder,
        PrefixCache(model, f"file://{folder}?capacity=4GiB") as files,
        PrefixCache(model, "host://?capacity=1GiB") as host,
    ):
        return _measure(model, prompt, files, host, rounds=3 if quick else 9)


def _measure(
    model: Any, prompt: torch.Tensor, files: Any, host: Any, *, rounds: int
) -> list[BenchRow]:
    for cache in (files, host):
        cache.generate(prompt, max_new_tokens=1, do_sample=False)
    kept = files.load(prompt)
    hit = kept.get_seq_length()
    if hit < prompt.shape[1] - files.tokens_per_page or host.load(prompt).get_seq_length() != hit:
        raise RuntimeError(f"{hit} tokens of the prompt are stored")
    tokens: set[int] = set()

    def first_token(past: Callable[[], Any]) -> Callable[[], None]:
        def call() -> None:
            output = model.generate(
                prompt, past_key_values=past(), max_new_tokens=1, do_sample=False
            )
            tokens.add(int(output[0, -1]))

        return call

    def compute() -> None:
        model.generate(prompt, max_new_tokens=1, do_sample=False)

    from_files, from_host, from_copy, computed = time_in_turn(
        [
            first_token(lambda: files.load(prompt)),
            first_token(lambda: host.load(prompt)),
            first_token(lambda: copy.deepcopy(kept)),
            compute,
        ],
        rounds=rounds,
    )
    if len(tokens) > 1:
        raise RuntimeError(f"prefixes gave different tokens: {sorted(tokens)}")
    case = f"first token of {prompt.shape[1]} tokens in {str(model.dtype).removeprefix('torch.')},"
    return [
        compare(f"{case} {name}", ours, theirs, unit="ms", goal=goal, of_time=not goal)
        for name, ours, theirs, goal in (
            ("prefix in files against computed", from_files, computed, SPEED_GOAL),
            ("prefix in host memory against computed", from_host, computed, SPEED_GOAL),
            ("prefix in files against a deep copy in the process", from_files, from_copy, ""),
            ("prefix in host memory against a deep copy in the process", from_host, from_copy, ""),
        )
    ]
