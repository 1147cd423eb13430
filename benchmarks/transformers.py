"""Benchmark of prefixes for `generate()` of transformers, against computing them."""

import copy
import random
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.batches import bench_folder
from benchmarks.report import BenchRow, compare_all, time_in_turn
from benchmarks.vllm.model import find_model, random_prompt

PROMPT_TOKENS = 1_500
SPEED_GOAL = ">= 5"


def run(*, quick: bool) -> list[BenchRow]:
    """Measure the first token of a prompt whose prefix is stored, loading included.

    Baselines in the same rounds: the whole prompt is computed; or the prefix is a deep copy of a
    cache in the same process, as in transformers' documentation.

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
    how = {"max_new_tokens": 1, "do_sample": False}
    for cache in (files, host):
        cache.generate(prompt, **how)
    kept = files.load(prompt)
    hit = kept.get_seq_length()
    if hit < prompt.shape[1] - files.tokens_per_page or host.load(prompt).get_seq_length() != hit:
        raise RuntimeError(f"{hit} of {prompt.shape[1]} tokens of the prompt were found in files")
    tokens: set[int] = set()

    def first_token(past: Callable[[], Any]) -> Callable[[], None]:
        def call() -> None:
            tokens.add(int(model.generate(prompt, past_key_values=past(), **how)[0, -1]))

        return call

    calls = {
        "prefix in files": first_token(lambda: files.load(prompt)),
        "prefix in host memory": first_token(lambda: host.load(prompt)),
        "a deep copy in the process": first_token(lambda: copy.deepcopy(kept)),
        "computed": lambda: model.generate(prompt, **how),
    }
    times = dict(zip(calls, time_in_turn([*calls.values()], rounds=rounds), strict=True))
    if len(tokens) > 1:
        raise RuntimeError(f"prefixes gave different tokens: {sorted(tokens)}")
    case = f"first token of {prompt.shape[1]} tokens in {str(model.dtype).removeprefix('torch.')},"
    in_files, in_host, copied, computed = calls
    comparisons = (
        (f"{case} {ours} against {baseline}", ours, baseline, goal)
        for baseline, goal in ((computed, SPEED_GOAL), (copied, ""))
        for ours in (in_files, in_host)
    )
    return compare_all(comparisons, times, unit="ms", of_time=True)
