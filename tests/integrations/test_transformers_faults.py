"""Prefix cache of transformers: bad pages, late backends and other weights cost time, no tokens."""

import importlib
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

from kvxfer.errors import BackendUnavailableError  # noqa: E402
from kvxfer.storage.keys import Namespace  # noqa: E402
from kvxfer.storage.observer import Operation  # noqa: E402
from kvxfer.testing import DictBackend, DictConfig, FaultRates, FaultyBackend  # noqa: E402
from tests.integrations.tiny_transformers import (  # noqa: E402
    fill,
    generate,
    num_loaded,
    open_cache,
    prompt_of,
    shared_model,
    with_cache,
)

pytestmark = pytest.mark.timeout(120)  # the first call of a model imports and compiles

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


def test_a_store_that_cannot_be_opened_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(BackendUnavailableError, match="file"):
        open_cache(shared_model(), tmp_path / "file")


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
