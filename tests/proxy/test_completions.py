"""Completions through the proxy: both legs, streams, engines that fail, and bad requests."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import parser

from tests.proxy.fake_engines import BODY, CHAT, COMPLETIONS, PARAMS, routed

UNKNOWN = ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")
LENT = {"do_remote_decode": True, "do_remote_prefill": False, **dict.fromkeys(UNKNOWN)}
KEPT = {"model": "m", "prompt": [1, 2, 3], "temperature": 0.25, "stop": ["\u00e9\n"]}
LIMITS = {"max_tokens": 7, "max_completion_tokens": 8, "n": 2}
LONG = {**KEPT, **LIMITS, "min_tokens": 5, "stream_options": {"include_usage": True}}
SHORT = {**KEPT, **dict.fromkeys(LIMITS, 1), "stream": False}


@pytest.mark.parametrize(
    ("path", "body", "for_prefill"),
    [
        (COMPLETIONS, LONG, SHORT),
        (CHAT, LONG, SHORT),
        (
            "/v1/responses",
            {"input": "x", "max_output_tokens": 9, "store": True, "background": True},
            {"input": "x", "max_output_tokens": 1, "store": False, "stream": False},
        ),
        (
            "/v1/messages",
            {"messages": [], "max_tokens": 9, "thinking": {"budget_tokens": 5}},
            {"messages": [], "max_tokens": 1, "thinking": {"budget_tokens": 5}, "stream": False},
        ),
    ],
)
async def test_the_prefill_leg_computes_one_token_and_its_params_go_to_the_decode_leg(
    path: str, body: dict[str, Any], for_prefill: dict[str, Any]
) -> None:
    async with routed() as it:
        status, answer = await it.post(body, path, {"Authorization": "Bearer key"})
        assert (status, answer) == (200, {"by": it.decode[0].url})
        (prefill,), (decode,) = it.prefill[0].asked, it.decode[0].asked
    assert prefill.body == {**for_prefill, "kv_transfer_params": LENT}
    assert decode.body == {**body, "kv_transfer_params": PARAMS}
    assert prefill.path == decode.path == path
    assert prefill.headers["Authorization"] == decode.headers["Authorization"] == "Bearer key"
    assert prefill.headers["X-Request-Id"] == decode.headers["X-Request-Id"]


@pytest.mark.parametrize(
    ("path", "alone", "other", "reason"),
    [
        ("/v1/responses", "resp_1", None, "previous_response"),
        (COMPLETIONS, ["one", "two"], ["one"], "several_prompts"),
        (COMPLETIONS, [[1, 2], [3, 4]], [1, 2], "several_prompts"),
    ],
)
async def test_what_params_of_one_prompt_cannot_say_is_decoded_alone(
    path: str, alone: Any, other: Any, reason: str
) -> None:
    field = "prompt" if path == COMPLETIONS else "previous_response_id"
    async with routed() as it:
        for value in (alone, other):
            assert (await it.post({**BODY, field: value}, path))[0] == 200
        (asked,) = it.prefill[0].asked
        assert asked.body[field] == other
        assert (await it.samples())[f'decoded_alone_total{{reason="{reason}"}}'] == 1


async def test_an_answer_with_an_odd_reason_phrase_is_passed_on() -> None:
    async with routed() as it:
        it.decode[0].raw = b"HTTP/1.1 200 O\x01K\r\nContent-Length: 2\r\n\r\n{}"
        assert await it.post() == (200, {})


@pytest.mark.parametrize("status", [404, 501])
async def test_an_error_of_the_decode_engine_about_the_request_is_passed_on(status: int) -> None:
    async with routed() as it:
        it.decode[0].status = it.prefill[0].status = status
        assert await it.post() == (status, {"error": {"message": "as told"}})
        samples = await it.samples()
        leg = f'engine="{it.decode[0].url}",leg="decode",outcome="refused"'
        assert samples[f"legs_total{{{leg}}}"]
        assert not [name for name in samples if name.startswith("ejections_total")]
        assert (await it.get("/health"))[0] == 200


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ({"status": 500}, "failed"),
        ({"status": 400}, "refused"),
        ({"hangs": True}, "timed_out"),
        ({"params": None}, "no_params"),
        ({"params": {}}, "no_params"),
        ({"params": "nonsense"}, "no_params"),
        ({"params": b'{"remote_host": "\xff"}'}, "no_params"),
        ({"params": b'{"deep": ' * 10_000 + b"1" + b"}" * 10_000}, "no_params"),
    ],
)
async def test_decodes_alone_when_the_prefill_engine_is_of_no_use(
    fault: dict[str, Any], reason: str
) -> None:
    async with routed(prefill_timeout_s=0.2) as it:
        for name, value in fault.items():
            setattr(it.prefill[0], name, value)
        assert await it.post() == (200, {"by": it.decode[0].url})
        assert it.decode[0].asked[0].body == BODY
        assert (await it.samples())[f'decoded_alone_total{{reason="{reason}"}}'] == 1


async def test_params_of_a_client_are_dropped_wherever_vllm_takes_them_from() -> None:
    stolen = {"do_remote_prefill": True, "remote_host": "evil"}
    async with routed() as it:
        it.prefill[0].params = None
        for extra in ({"kv_transfer_params": stolen, "x": 1}, {"x": 1}, [1]):
            await it.post({**BODY, "vllm_xargs": extra, "kv_transfer_params": stolen})
        bodies = [asked.body for asked in it.decode[0].asked]
        assert {str(asked.params) for asked in it.prefill[0].asked} == {str(LENT)}
    assert [body["vllm_xargs"] for body in bodies] == [{"x": 1}, {"x": 1}, [1]]
    assert not any("kv_transfer_params" in body for body in bodies)


async def test_an_error_in_the_form_of_openai_when_all_decode_engines_fail() -> None:
    async with routed(num_decode=2) as it:
        for engine in it.decode:
            engine.status = engine.health = 500
        for _ in range(2):  # also when all are ejected
            status, answer = await it.post()
            assert status == 502
            message = "none of 2 decode engines answered"
            kind = {"type": "server_error", "param": None, "code": 502}
            assert answer == {"error": {"message": message, **kind}}
        assert (await it.get("/health"))[0] == 503
        for engine in it.decode:
            engine.status = engine.health = 200
        assert (await it.post())[0] == 200  # ejected or not
        assert (await it.get("/health"))[0] == 200


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b'{"a": "\xff"}', b'{"a": NaN}', b'{"a":' + b"[" * 100_000]
)
async def test_a_body_that_is_no_json_object_is_a_bad_request(body: bytes) -> None:
    async with routed() as it:
        status, answer = await it.post(body)
        assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
        assert "expected a JSON object" in answer["error"]["message"]
        assert not it.prefill[0].asked
        assert not it.decode[0].asked


async def test_a_body_that_is_too_large_is_refused() -> None:
    async with routed(max_body_bytes=1000) as it:
        status, answer = await it.post({**BODY, "prompt": "x" * 1000})
        assert (status, answer["error"]["message"]) == (413, "the body has more than 1000 bytes")
        assert not it.prefill[0].asked


async def test_other_questions_go_to_a_decode_engine_as_they_are() -> None:
    async with routed() as it:
        status, text = await it.get("/v1/models?limit=3")
        assert (status, json.loads(text)) == (200, {"by": it.decode[0].url})
        (asked,) = it.decode[0].asked
        assert (asked.method, asked.path) == ("GET", "/v1/models?limit=3")
        assert (await it.get("/v2/models"))[0] == 404
        assert (await it.post(BODY, "/v1/embeddings"))[0] == 404
        assert len(it.decode[0].asked) == 1


async def test_both_legs_begin_at_once_with_one_ticket_once_the_lender_is_known() -> None:
    async with routed(overlap=True) as it:
        assert (await it.post())[0] == 200
        assert it.decode[0].asked[0].params == PARAMS
        it.prefill[0].hangs = True  # so only a decode leg that does not wait for it can end
        assert await it.post() == (200, {"by": it.decode[0].url})
        lent, params = it.prefill[0].asked[1].params, it.decode[0].asked[1].params
    ticket = params["remote_request_id"]
    assert len(ticket) == 32
    assert int(ticket, 16) >= 0
    assert lent["remote_request_id"] == ticket
    assert lent["do_remote_decode"] is True
    known = {"remote_request_id": ticket, "remote_engine_id": "", "remote_block_ids": [[0]]}
    assert params == {**PARAMS, **known, "transfer_mode": "overlap"}


async def test_one_leg_comes_after_the_other_where_an_engine_lends_at_several_places() -> None:
    async with routed(overlap=True) as it:
        for port in (7100, 7200, 7100, 7200):  # as replicas behind one server do
            it.prefill[0].params = {**PARAMS, "remote_port": port}
            await it.post()
        params = [asked.params for asked in it.decode[0].asked]
    assert [each["remote_port"] for each in params] == [7100, 7100, 7100, 7200]
    assert [each.get("transfer_mode") for each in params] == [None, "overlap", None, None]


async def test_prometheus_reads_the_metrics_that_the_page_explains() -> None:
    async with routed() as it:
        it.prefill[0].status = 500
        await it.post(BODY)
        async with it.session.get(it.url + "/metrics") as response:
            assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            read = parser.text_string_to_metric_families(await response.text())
    families = {each.name: each for each in read if not each.name.endswith("_created")}
    page = (Path(__file__).parents[2] / "examples" / "proxy" / "README.md").read_text()
    explained = set(re.findall(r"^\| `(kvxfer_proxy_\w+)`", page, re.MULTILINE))
    assert {name.removesuffix("_total") for name in explained} == set(families)
    (alone,) = families["kvxfer_proxy_decoded_alone"].samples
    assert (alone.labels, alone.value) == ({"reason": "failed"}, 1)
