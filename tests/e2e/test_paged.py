"""Generation from a paged cache whose blocks come and go, with a real model and real text."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvxfer.connect import connect
from kvxfer.storage.keys import Namespace
from tests.e2e import models
from tests.e2e.text import REPOSITORY, prompts
from tests.kvcache.paged_runner import PagedRunner, cache_config, one_thread
from tests.kvcache.test_paged_generation import (
    NHD,
    generate_with_preemptions,
    require_as_unpaged,
)

pytestmark = pytest.mark.e2e


def test_smollm2_generates_as_unpaged_while_its_blocks_go_to_files_and_back(tmp_path: Path) -> None:
    folder = models.make("smollm2", REPOSITORY / models.DEFAULT_DIRECTORY)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    config = cache_config(
        model.config,
        num_blocks=60,
        tokens_per_block=16,
        layers_per_group=model.config.num_hidden_layers,
    )
    runner = PagedRunner(model, config, layout=NHD, tokens_per_kernel_block=[16])
    texts = prompts(folder / "tokenizer.json", 2, shared_tokens=120)
    with_files = f"file://{tmp_path}?capacity=4GiB"
    engine = connect(with_files, runner.caches, namespace=Namespace(model="smollm2", revision="1"))
    try:
        with one_thread():
            requests = generate_with_preemptions(runner, engine, texts, max_tokens_per_request=64)
            require_as_unpaged(model, texts, requests)
    finally:
        engine.close()
