"""Prefix cache of transformers: prefixes are found, and greedy tokens are those without it."""

import asyncio
import importlib
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from kvxfer.errors import ClosedError  # noqa: E402
from kvxfer.storage.keys import Namespace  # noqa: E402
from kvxfer.storage.observer import Operation  # noqa: E402
from kvxfer.testing import DictBackend, DictConfig, FaultRates, FaultyBackend  # noqa: E402
from tests.integrations.tiny_transformers import (  # noqa: E402
    FAMILIES,
    TOKENS_PER_PAGE,
    VOCAB_SIZE,
    files_url,
    fill,
    generate,
    make_model,
    num_loaded,
    open_cache,
    prompt_of,
    shared_model,
    with_cache,
)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_the_same_with_and_without_the_cache(family: str, tmp_path: Path) -> None:
    model, prompt = shared_model(family), prompt_of(70)
    alone = generate(model, prompt)
    with open_cache(model, tmp_path) as cache:
        assert fill(cache, model, prompt) == 80  # of 89 tokens that have keys and values
        past = cache.load(prompt)
        assert past.get_seq_length() == 64
        assert generate(model, prompt, **with_cache(past)) == alone
        longer = torch.cat((prompt, torch.tensor([alone])), dim=1)
        past = cache.load(longer)
        assert past.get_seq_length() == 80
        assert generate(model, longer, **with_cache(past)) == generate(model, longer)
        past = cache.load(prompt)
    for layer in past.layers:
        layer.values = layer.values.flip(2)
    assert generate(model, prompt, **with_cache(past)) != alone, "tokens depend on the cache"


def test_generate_does_all_three(tmp_path: Path) -> None:
    model, prompt = shared_model(), prompt_of(40)
    with open_cache(model, tmp_path) as cache:
        first, second = (
            cache.generate(prompt, max_new_tokens=4, do_sample=False, return_dict_in_generate=full)
            for full in (True, False)
        )
        assert num_loaded(cache, prompt) == 32
        assert cache.store(prompt, cache.load(prompt)) == 0, "it is there"
    assert torch.equal(first.sequences, second)
    assert torch.equal(second, model.generate(prompt, max_new_tokens=4, do_sample=False))


@pytest.mark.parametrize(("num_tokens", "hit"), [(15, 0), (16, 0), (17, 16), (32, 16), (33, 32)])
def test_a_prefix_leaves_the_last_token_to_the_model(
    num_tokens: int, hit: int, tmp_path: Path
) -> None:
    model = shared_model()
    with open_cache(model, tmp_path) as cache:
        assert fill(cache, model, prompt_of(64)) == 80
        assert num_loaded(cache, prompt_of(64)[:, :num_tokens]) == hit


def test_a_loaded_cache_is_a_copy(tmp_path: Path) -> None:
    model, prompt = shared_model(), prompt_of(70)
    with open_cache(model, tmp_path) as cache:
        fill(cache, model, prompt)
        one = cache.load(prompt)
        kept = [layer.keys.clone() for layer in one.layers]
        num_loaded(cache, prompt_of(70, seed=1))
        fill(cache, model, prompt_of(70, seed=2))
        assert all(map(torch.equal, kept, (layer.keys for layer in one.layers)))
        for layer in one.layers:
            layer.keys.zero_()
        assert all(map(torch.equal, kept, (each.keys for each in cache.load(prompt).layers)))


def test_tiers_and_host_memory_and_a_mapping(tmp_path: Path) -> None:
    model, prompt = shared_model(), prompt_of(70)
    host, files = "host://?capacity=4MiB", files_url(tmp_path)
    with open_cache(model, {"type": "host", "capacity": "4MiB"}) as cache:
        fill(cache, model, prompt)
        assert num_loaded(cache, prompt) == 64
    with open_cache(model, [host, files]) as cache:
        fill(cache, model, prompt)
        assert num_loaded(cache, prompt) == 64
    with open_cache(model, files) as cache:  # closing wrote all to the last tier
        assert num_loaded(cache, prompt) == 64


def test_pages_of_another_revision_size_or_data_type_are_others(tmp_path: Path) -> None:
    model, prompt = make_model(*FAMILIES["llama"]), prompt_of(40)
    with open_cache(model, tmp_path, revision="one") as cache:
        fill(cache, model, prompt)
    for revision, tokens_per_page, hit in (
        ("one", 16, 32),
        ("two", 16, 0),
        ("", 16, 0),
        ("one", 8, 0),
    ):
        settings = {"revision": revision, "tokens_per_page": tokens_per_page}
        with open_cache(model, tmp_path, **settings) as cache:
            assert num_loaded(cache, prompt) == hit
    with open_cache(model.to(torch.bfloat16), tmp_path, revision="one") as cache:
        assert num_loaded(cache, prompt) == 0
        fill(cache, model, prompt)
        assert num_loaded(cache, prompt) == 32


@pytest.mark.slow
@pytest.mark.property
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_any_prompts_with_shared_prefixes_give_the_tokens_without_the_cache(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    source = random.Random(data.draw(st.integers(0, 2**32)))
    model, text = shared_model(), [source.randrange(3, VOCAB_SIZE) for _ in range(100)]
    with open_cache(model, tmp_path_factory.mktemp("store"), pool_bytes=1) as cache:
        longest = 0
        for _ in range(data.draw(st.integers(1, 4))):
            shared = data.draw(st.integers(0, 90))
            own = data.draw(st.lists(st.integers(3, VOCAB_SIZE - 1), min_size=1, max_size=30))
            prompt = torch.tensor([text[:shared] + own])
            past = cache.load(prompt)
            least = min(shared, longest) // TOKENS_PER_PAGE * TOKENS_PER_PAGE
            assert past.get_seq_length() >= min(least, shared + len(own) - 1)
            output = model.generate(prompt, **with_cache(past), max_new_tokens=3, do_sample=False)
            assert torch.equal(output, model.generate(prompt, max_new_tokens=3, do_sample=False))
            cache.store(output, past)
            longest = max(longest, shared)


@pytest.mark.slow
def test_threads_take_turns(tmp_path: Path) -> None:
    model, faults = shared_model(), []
    expected = {seed: generate(model, prompt_of(40, seed=seed)) for seed in range(4)}
    with open_cache(model, tmp_path) as cache:

        def work(seed: int) -> None:
            for _ in range(5):
                prompt = prompt_of(40, seed=seed)
                past = cache.load(prompt)
                if generate(model, prompt, **with_cache(past)) != expected[seed]:
                    faults.append(seed)
                fill(cache, model, prompt)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in expected]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not faults


def test_a_thread_that_runs_an_event_loop_may_call_it(tmp_path: Path) -> None:
    model, prompt = shared_model(), prompt_of(40)

    async def call() -> int:
        with open_cache(model, ["host://?capacity=1MiB", files_url(tmp_path)]) as cache:
            fill(cache, model, prompt)
            return num_loaded(cache, prompt)

    assert asyncio.run(call()) == 32


def test_a_closed_cache_says_so(tmp_path: Path) -> None:
    model, prompt = shared_model(), prompt_of(20)
    cache = open_cache(model, tmp_path)
    past = cache.load(prompt)
    cache.close()
    cache.close()
    for call in (lambda: cache.load(prompt), lambda: cache.store(prompt, past), cache.__enter__):
        with pytest.raises(ClosedError, match="prefix cache"):
            call()


# Bad pages and late backends cost time, and no tokens.

EVERY = frozenset(Operation)


def flip_a_bit(page: Path) -> None:
    data = bytearray(page.read_bytes())
    data[-100] ^= 1
    page.write_bytes(data)


def truncate(page: Path) -> None:
    page.write_bytes(page.read_bytes()[:-100])


def empty(page: Path) -> None:
    page.write_bytes(b"")


@pytest.mark.slow
@pytest.mark.parametrize("damage", [flip_a_bit, truncate, empty, Path.unlink])
@pytest.mark.parametrize("bad_page", [0, 2])
def test_a_bad_page_is_a_shorter_prefix(
    damage: Callable[[Path], object], bad_page: int, tmp_path: Path
) -> None:
    model, prompt = shared_model(), prompt_of(70)
    alone = generate(model, prompt)
    with open_cache(model, tmp_path) as cache:
        pages: list[Path] = []
        for num_pages in range(1, 5):
            before = set(tmp_path.rglob("*.safetensors"))
            past = cache.load(prompt)
            tokens = prompt[:, : 16 * num_pages]
            model(tokens[:, past.get_seq_length() :], **with_cache(past))
            assert cache.store(prompt, past) == 16
            pages += set(tmp_path.rglob("*.safetensors")) - before
    damage(pages[bad_page])
    with open_cache(model, tmp_path) as cache:
        past = cache.load(prompt)
        assert past.get_seq_length() == 16 * bad_page
        assert generate(model, prompt, **with_cache(past)) == alone
        assert generate(model, prompt, **with_cache(cache.load(prompt))) == alone
        assert fill(cache, model, prompt) > 0
        assert num_loaded(cache, prompt) == 64


class Faulty:
    """Backend type whose backends inject faults; the last one that was opened is kept."""

    config_type = DictConfig

    def __init__(self) -> None:
        self.opened: FaultyBackend | None = None

    def __call__(self, config: Any, namespace: Namespace) -> FaultyBackend:
        inner = DictBackend(config, namespace)
        self.opened = FaultyBackend(inner, seed=0, rates=FaultRates())
        return self.opened


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Faulty:
    kind = Faulty()
    module = importlib.import_module("kvxfer.connect")
    monkeypatch.setattr(module, "_find_backend", lambda name: kind)
    return kind


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["hang", "stuck", "late", "error", "failure"])
def test_a_backend_that_fails_costs_the_hit_and_no_more_than_the_deadline(
    fault: str, faulty: Faulty
) -> None:
    model, prompt = shared_model(), prompt_of(70)
    with open_cache(model, "faulty://", timeout_s=5) as cache:
        fill(cache, model, prompt)
        assert faulty.opened is not None
        faulty.opened.rates = FaultRates(**{fault: 1.0}, operations=EVERY)
        past = cache.load(prompt, timeout_s=0.2)
        output = model.generate(prompt, **with_cache(past), max_new_tokens=20, do_sample=False)
        cache.store(output, past, timeout_s=0.2)
        assert output[0, 70:].tolist() == generate(model, prompt)
        faulty.opened.rates = FaultRates()
        faulty.opened.release()
        deadline = time.monotonic() + 10
        while not num_loaded(cache, prompt) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert num_loaded(cache, prompt) == 64


def test_no_time_is_no_hit(tmp_path: Path) -> None:
    model, prompt = shared_model(), prompt_of(70)
    with open_cache(model, tmp_path) as cache:
        past = cache.load(prompt)
        output = model.generate(prompt, **with_cache(past), max_new_tokens=2, do_sample=False)
        assert cache.store(output, past, timeout_s=0) == 0
        assert cache.store(output, past) == 64
        assert num_loaded(cache, prompt, timeout_s=0) == 0
        assert num_loaded(cache, prompt, timeout_s=None) == 64


AT_THE_END = """
import atexit, sys, threading
from pathlib import Path
from tests.integrations.tiny_transformers import fill, num_loaded, open_cache, prompt_of
from tests.integrations.tiny_transformers import shared_model

cache, prompt = open_cache(shared_model(), Path(sys.argv[1])), prompt_of(100)
assert fill(cache, shared_model(), prompt) > 0

def refuse(_):
    raise RuntimeError("can't create new thread at interpreter shutdown")

def load():
    threading.Thread.start = refuse  # as Python 3.12 and later
    print(num_loaded(cache, prompt))
    cache.close()

atexit.register(load)
"""


@pytest.mark.processes
def test_a_prefix_is_loaded_when_the_interpreter_ends(tmp_path: Path) -> None:
    command = [sys.executable, "-c", AT_THE_END, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "96\n"), done.stderr
