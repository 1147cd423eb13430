"""Events of a real engine: an index from what vLLM publishes is that of the tiers."""

from pathlib import Path

import pytest

from kvxfer.backends.file import BlockTree, refuse_partial_walk
from tests.e2e.conftest import Start
from tests.e2e.harness import random_prompts
from tests.telemetry.event_subscriber import EventSubscriber

pytestmark = pytest.mark.e2e


def test_an_index_from_vllms_events_is_that_of_the_tiers(start: Start, tmp_path: Path) -> None:
    files, events, replay = (tmp_path / name for name in ("files", "events", "replay"))
    engine = start(
        "llama",
        files=files,
        capacity="1MiB",
        events={
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"ipc://{events}",
            "replay_endpoint": f"ipc://{replay}",
        },
        environment={"VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "0"},
    )
    for seed in range(3):
        prompts = random_prompts(1, shared_tokens=700, own_tokens=5, seed=seed)
        engine.generate(prompts, max_tokens=2)
        engine.settle()  # a reset of the device would tell routers to forget everything
    engine.generate(random_prompts(1, shared_tokens=5, own_tokens=5), max_tokens=2)  # one more step

    found = list(BlockTree(files, on_error=refuse_partial_walk).blocks())
    in_host = engine.metrics()['vllm:kvxfer_stored_blocks{tier="host"}']
    with EventSubscriber.opened(f"ipc://{events}", f"ipc://{replay}") as subscriber:
        subscriber.catch_up()
    assert subscriber.kept["file"] == {each.key for each in found}
    assert len(subscriber.kept["CPU"]) == in_host
    assert len(found) > in_host > 0
    assert subscriber.kept["GPU"]
