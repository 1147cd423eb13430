"""Routers between clients and engines, as they are run in production."""

import asyncio
import contextlib
import functools
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path

from tests.e2e.engine_process import REPOSITORY, Generation, launch, signal_all
from tests.e2e.prefill_decode.deployment import MAX_TOKENS, Deployment
from tests.e2e.prefill_decode.engines import HOST, Engine, Failure
from tests.e2e.prefill_decode.scenarios import (
    LENGTHS,
    NUM_MANY,
    at_once,
    require_clean,
    require_handed_over,
)
from tests.ports import free_ports

TOY_PROXY = REPOSITORY / "build" / "toy_proxy_server.py"
"""vLLM's proxy, from tests/v1/kv_connector/nixl_integration/ of its sources; not in its wheel."""
SIDECAR = REPOSITORY / "build" / "llm-d-routing-sidecar"
"""llm-d's router, built from its sources in Go: github.com/llm-d/llm-d-routing-sidecar."""
PROXY = [sys.executable, "-m", "examples.proxy"]
ROUTER_LIMIT_S = 60.0

Command = Callable[[Deployment, int], list[str]]
"""Make the command of a router for engines that listens at a port."""


def _kvxfer(deployment: Deployment, port: int, *options: str) -> list[str]:
    prefills = [engine.url for engine in deployment.prefills]
    decodes = [engine.url for engine in deployment.decodes]
    listen = f"{HOST}:{port}"
    legs = ["--prefill", *prefills, "--decode", *decodes]
    return [*PROXY, *legs, "--listen", listen, *options]


def _toy(deployment: Deployment, port: int) -> list[str]:
    if not TOY_PROXY.exists():
        raise Failure(f"there is no {TOY_PROXY}")

    def legs(name: str, engines: Sequence[Engine]) -> list[str]:
        ports = [str(engine.port) for engine in engines]
        return [f"--{name}-hosts", *[HOST] * len(ports), f"--{name}-ports", *ports]

    engines = [*legs("prefiller", deployment.prefills), *legs("decoder", deployment.decodes)]
    return [sys.executable, str(TOY_PROXY), "--port", str(port), *engines]


def _sidecar(deployment: Deployment, port: int) -> list[str]:
    if not SIDECAR.exists():
        raise Failure(f"there is no {SIDECAR}")
    decode = str(deployment.decodes[0].port)
    options = ["--secure-proxy=false", "--connector", "nixlv2", "--vllm-port", decode]
    return [str(SIDECAR), "--port", str(port), *options]


def _vllm_router(deployment: Deployment, port: int) -> list[str]:
    legs = [
        *(word for each in deployment.prefills for word in ("--prefill", each.url)),
        *(word for each in deployment.decodes for word in ("--decode", each.url)),
    ]
    metrics = ["--prometheus-port", str(free_ports())]
    name = Path(sys.executable).with_name("vllm-router")
    own = [str(name), "--vllm-pd-disaggregation", "--host", HOST, "--port", str(port)]
    return [*own, "--policy", "round_robin", *metrics, *legs]


async def _complete(deployment: Deployment, url: str, prompt: list[int]) -> Generation:
    # In production, llm-d's scheduler chooses the prefill engine, and names it in this header.
    chosen = {"x-prefiller-host-port": f"{HOST}:{deployment.prefills[0].port}"}
    return await deployment.decodes[0].complete(
        prompt, max_tokens=MAX_TOKENS, url=url, headers=chosen
    )


async def _through(command: Command, deployment: Deployment) -> str:
    """Send prompts to a router, one by one and several at a time."""
    with _running(deployment, command) as url:
        await _reached(deployment, url)
        before = await deployment.counts()
        prompts = [deployment.prompt(length) for length in LENGTHS]
        prompts += [
            deployment.prompt(deployment.chance.randrange(2, 1000)) for _ in range(NUM_MANY)
        ]
        some = len(LENGTHS)
        answers = [await _complete(deployment, url, prompt) for prompt in prompts[:some]]
        answers += await at_once([_complete(deployment, url, each) for each in prompts[some:]])
        note = await require_handed_over(deployment, prompts, answers, before)
    return note + await require_clean(deployment)


async def _reached(deployment: Deployment, url: str) -> None:
    """Wait until a router passes requests on, and has reached every engine."""
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + ROUTER_LIMIT_S
    while True:
        try:
            await _complete(deployment, url, deployment.prompt(9))
        except Failure as exc:
            if loop.time() > deadline_s:
                raise Failure(f"the router does not start: {exc}") from exc
            await asyncio.sleep(0.5)
        else:
            return


@contextlib.contextmanager
def _running(deployment: Deployment, command: Command) -> Iterator[str]:
    """Run a router; its log is beside those of the engines."""
    port = free_ports()
    log_path = deployment.directory / f"router{command.__name__}.log"
    with log_path.open("wb") as log:
        process = launch(command(deployment, port), log, {})
    try:
        yield f"http://{HOST}:{port}"
    finally:
        signal_all(process, signal.SIGKILL)
        process.wait()


ROUTER_SCENARIOS: dict[str, Callable[[Deployment], Awaitable[str]]] = {
    name: functools.partial(_through, command)
    for name, command in {
        "proxy": _kvxfer,
        "proxy-overlap": lambda deployment, port: _kvxfer(deployment, port, "--overlap"),
        "sidecar": _sidecar,
        "toy-proxy": _toy,
        "vllm-router": _vllm_router,
    }.items()
}
