"""An engine on a new machine has its hits from object storage, verified."""

import re
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from kvxfer.endpoint import free_ports
from tests.backends.object_servers import BUCKET, CREDENTIALS, REGION, seaweedfs
from tests.e2e import models, oracle, text
from tests.e2e.engine_process import TOKENS_PER_BLOCK
from tests.e2e.harness import (
    REPOSITORY,
    AuditedEngine,
    require_same,
    require_same_bits,
)

pytestmark = [pytest.mark.e2e, pytest.mark.exhaustive]

SHARED_TOKENS = 400
WHOLE_BLOCKS_TOKENS = 3 * TOKENS_PER_BLOCK
NUM_SHARED = WHOLE_BLOCKS_TOKENS // TOKENS_PER_BLOCK
MAX_TOKENS = 8
LOADED = 'vllm:kvxfer_load_blocks{cause="promotion",outcome="done",tier="lower"}'
LOADED_BYTES = 'vllm:kvxfer_load_bytes{cause="promotion",outcome="done",tier="lower"}'
SENT_BYTES = rf'SeaweedFS_s3_bucket_traffic_sent_bytes_total{{bucket="{BUCKET}"}} (\S+)'


def sent_bytes(metrics_port: int) -> float:
    """Bytes of objects that the server has sent."""
    with urllib.request.urlopen(f"http://127.0.0.1:{metrics_port}/metrics") as answer:
        found = re.search(SENT_BYTES, answer.read().decode())
    return float(found[1]) if found else 0.0


def test_a_restart_on_an_empty_disk_hits_from_the_bucket(tmp_path: Path) -> None:
    folder = models.make("smollm2", REPOSITORY / models.DEFAULT_DIRECTORY)
    prompts = text.prompts(folder / "tokenizer.json", 2, shared_tokens=SHARED_TOKENS)
    audited = tmp_path / "audit"
    audited.mkdir()
    metrics_port = free_ports()
    with seaweedfs(metrics_port=metrics_port) as server:
        place = f"s3://{BUCKET}/e2e?endpoint={server.endpoint}&region={REGION}"
        settings: dict[str, Any] = {
            "directory": audited,
            "objects": f"{place}&timeout_s=60&lookup_timeout_s=60",
            "environment": CREDENTIALS,
        }
        with AuditedEngine("smollm2", files=tmp_path / "old", **settings) as first:
            reference = oracle.run_reference(first, prompts, max_tokens=MAX_TOKENS)
            first.settle()
        assert "Traceback" not in first.log(), first.log()
        before = sent_bytes(metrics_port)

        with AuditedEngine("smollm2", files=tmp_path / "new", **settings) as second:
            returned = second.generate(prompts, max_tokens=MAX_TOKENS)
            metrics = second.metrics()
            second.offload()
            returned_alone = oracle.run_one_by_one(second, prompts, max_tokens=MAX_TOKENS)
            audit = second.audit()
        assert "Traceback" not in second.log(), second.log()
        sent = sent_bytes(metrics_port) - before

    require_same(returned, reference.computed, dtype=second.dtype)
    require_same_bits(returned_alone, reference.device_hits)
    assert all(one.cached_tokens >= WHOLE_BLOCKS_TOKENS for one in returned)
    assert metrics[LOADED] >= NUM_SHARED
    assert sent >= metrics[LOADED_BYTES] > 0
    assert audit.clean, audit
