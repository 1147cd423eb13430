"""What the proxy counts, in a form that Prometheus reads."""

import re
from pathlib import Path

from prometheus_client import parser

from tests.proxy.fake_engines import BODY, routed


async def test_requests_legs_and_durations_are_counted() -> None:
    async with routed(num_decode=2) as it:
        failing, other = it.decode
        failing.status = failing.health = 500
        for _ in range(2):
            await it.post()
        await it.post(b"nonsense")
        samples = await it.samples()
        prefill = it.prefill[0].url
    assert samples['requests_total{outcome="done"}'] == 2
    assert samples['requests_total{outcome="refused"}'] == 1
    assert samples["requests_under_way"] == 0
    assert samples[f'legs_total{{engine="{prefill}",leg="prefill",outcome="done"}}'] == 2
    assert samples[f'legs_total{{engine="{failing.url}",leg="decode",outcome="failed"}}'] == 1
    assert samples[f'legs_total{{engine="{other.url}",leg="decode",outcome="done"}}'] == 2
    assert samples[f'engine_ejected{{engine="{failing.url}",leg="decode"}}'] == 1
    assert samples[f'engine_ejected{{engine="{other.url}",leg="decode"}}'] == 0
    assert samples["prefill_seconds_count"] == samples['prefill_seconds_bucket{le="+Inf"}'] == 2
    assert 0 < samples["prefill_seconds_sum"] < 120
    buckets = [value for name, value in samples.items() if "seconds_bucket" in name]
    assert buckets == sorted(buckets)


async def test_prometheus_reads_all_of_it() -> None:
    async with routed() as it:
        it.prefill[0].status = 500
        await it.post(BODY)
        async with it.session.get(it.url + "/metrics") as response:
            content_type = response.headers["Content-Type"]
            text = await response.text()
    read = parser.text_string_to_metric_families(text)
    families = {each.name: each for each in read if not each.name.endswith("_created")}
    assert content_type.startswith("text/plain; version=0.0.4")
    kinds = {name.removeprefix("kvxfer_proxy_"): each.type for name, each in families.items()}
    assert kinds == {
        "requests": "counter",
        "legs": "counter",
        "decoded_alone": "counter",
        "ejections": "counter",
        "prefill_seconds": "histogram",
        "requests_under_way": "gauge",
        "engine_ejected": "gauge",
    }
    page = (Path(__file__).parents[2] / "examples" / "proxy" / "README.md").read_text()
    explained = set(re.findall(r"^\| `(kvxfer_proxy_\w+)`", page, re.MULTILINE))
    assert {name.removesuffix("_total") for name in explained} == set(families)
    (alone,) = families["kvxfer_proxy_decoded_alone"].samples
    assert (alone.labels, alone.value) == ({"reason": "failed"}, 1)
