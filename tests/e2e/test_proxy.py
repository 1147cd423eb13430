"""The endpoints of a router: each prompt is computed by P, and loaded by D."""

import re
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from examples.proxy.config import ProxyConfig
from examples.proxy.server import Proxy
from tests.e2e.engine_process import REPOSITORY
from tests.e2e.prefill_decode.deployment import SOURCE, Deployment, Shape
from tests.e2e.prefill_decode.engines import EngineShape

LIMIT_S = 120
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

SHAPE = EngineShape(model="smollm2", cache_mib=256, is_audited=False, takes_text=True)
MAX_TOKENS = 8
QUESTION = (REPOSITORY / "LICENSE").read_text()[:4000]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": QUESTION, "max_tokens": MAX_TOKENS},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "Sum up: " + QUESTION}],
        "max_tokens": MAX_TOKENS,
    },
    "/v1/responses": {"input": "Explain: " + QUESTION, "max_output_tokens": MAX_TOKENS},
    "/v1/messages": {
        "messages": [{"role": "user", "content": "Rewrite: " + QUESTION}],
        "max_tokens": MAX_TOKENS,
    },
}


async def ask(url: str, body: dict[str, Any]) -> str:
    """Ask an endpoint; return the text of its answer."""
    body = {"model": SHAPE.model, "temperature": 0, **body}
    limit = aiohttp.ClientTimeout(total=LIMIT_S)
    async with aiohttp.ClientSession(timeout=limit) as client, client.post(url, json=body) as got:
        answer = await got.text()
        assert got.status == 200, answer
    found = re.findall(r'"(?:text|content)":"([^"]+)"', answer)
    assert found, answer
    return "".join(found)


async def test_each_endpoint_hands_its_prompt_over(tmp_path: Path) -> None:
    async with Deployment("kvxfer", Shape([SHAPE], [SHAPE]), tmp_path) as engines:
        prefill, decode = engines.engines
        config = ProxyConfig(prefill=(prefill.url,), decode=(decode.url,), listen="127.0.0.1:0")
        loaded = f"{SOURCE}{{external_kv_transfer}}"
        async with Proxy(config) as proxy:
            for path, body in BODIES.items():
                before = await decode.metrics()
                answer = await ask(f"http://{proxy.endpoint}{path}", body)
                after = await decode.metrics()
                assert after[loaded] - before[loaded] > len(QUESTION) / 10, path
                # P answers from its own pages, D from the pages that it loaded.
                assert answer == await ask(prefill.url + path, body), path
