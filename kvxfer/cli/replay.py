"""Command `kvxfer replay`: replays a trace on simulated caches, to plan the real ones."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvxfer.cli.command_line import CommandLine, exit_statuses, show
from kvxfer.errors import InvalidArgumentError
from kvxfer.units import ByteSize

if TYPE_CHECKING:
    from kvxfer.replay import Machine, Trace

SHARES = (64, 32, 16, 8, 4, 2, 1)
MAX_BYTES_PER_TOKEN = 10**12
PREFILL_TOKENS_PER_S = 1e-3, 1e12


def main(argv: Sequence[str]) -> int:
    """Replay a trace and print the hits of caches; return 0."""
    arguments = _parse(argv)
    from kvxfer import replay
    from kvxfer.replay import fleet

    trace = _trace(arguments)
    machine = _machine(arguments)
    if arguments.fleet is not None:
        asked = fleet.parse_fleet(arguments.fleet)
        study = fleet.study_fleet(trace, machine, asked, seed=arguments.seed)
        show(study, fleet.format_fleet, as_json=arguments.json)
        return 0
    budget = None if arguments.budget is None else replay.parse_budget(arguments.budget)
    report = replay.Report(
        trace=replay.summarise(trace),
        machine=machine,
        capacities=replay.plan_capacities(trace, machine, _capacities(arguments, trace, machine)),
        lists=[replay.plan_list(trace, machine, backend) for backend in arguments.backend],
        recommendation=replay.recommend(trace, machine, budget) if budget else None,
    )
    show(report, replay.format_report, as_json=arguments.json)
    return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = CommandLine(
        prog="kvxfer replay",
        description="Replay a trace of requests on simulated caches: hits by policy, capacity and "
        "tier, bytes moved, and the backend list that makes the most of a budget.",
        epilog=exit_statuses("when it is done"),
    )
    add = parser.add_argument
    add("trace", type=Path, nargs="?", help="file in Mooncake's format, one request per line")
    add("--synthetic", metavar="KIND,...", help="make a trace, e.g. agentic or rag,requests=500")
    add("--seed", type=int, default=0, help="seed of --synthetic")
    add("--tokens-per-block", type=int, metavar="N", help="replaces that of the trace")
    add("--bytes-per-token", type=int, metavar="N", help="bytes of keys and values per token")
    add("--model", type=Path, metavar="DIR", help="model whose config.json gives these bytes")
    add("--capacities", metavar="SIZE,...", help="of host memory, e.g. 16GiB,64GiB")
    add("--backend", nargs="+", action="append", default=[], metavar="URL", help="a list of tiers")
    add("--budget", metavar="TIER=SIZE,...", help="recommend a list, e.g. host=64GiB,file=1TiB")
    add("--prefill-tokens-per-s", type=float, metavar="N", help="tokens computed per second")
    add("--host-bandwidth", metavar="SIZE", help="bytes per second loaded from host memory")
    add("--file-bandwidth", metavar="SIZE", help="bytes per second loaded from files")
    add("--object-bandwidth", metavar="SIZE", help="bytes per second loaded from object storage")
    add("--fleet", metavar="NAME=VALUE,...", help="replay a fleet instead, e.g. holders=1000")
    add("--json", action="store_true", help="print an object")
    arguments = parser.parse_args(argv)
    if (arguments.trace is None) == (arguments.synthetic is None):
        parser.error("expected either a trace or --synthetic")
    return arguments


def _trace(arguments: argparse.Namespace) -> "Trace":
    from kvxfer.replay import make_synthetic, parse_workload, read_trace
    from kvxfer.telemetry.trace_recorder import MAX_TOKENS_PER_BLOCK

    tokens = arguments.tokens_per_block
    _require("tokens_per_block", tokens, 1, MAX_TOKENS_PER_BLOCK)
    if arguments.synthetic is None:
        return read_trace(arguments.trace, tokens_per_block=tokens)
    sizes = {} if tokens is None else {"tokens_per_block": tokens}
    return make_synthetic(parse_workload(arguments.synthetic), seed=arguments.seed, **sizes)


def _machine(arguments: argparse.Namespace) -> "Machine":
    from kvxfer.replay import DEFAULT_BANDWIDTHS, Machine, bytes_per_token

    _require("prefill_tokens_per_s", arguments.prefill_tokens_per_s, *PREFILL_TOKENS_PER_S)
    per_token = arguments.bytes_per_token
    if per_token is None and arguments.model is not None:
        per_token = bytes_per_token(arguments.model)
    _require("bytes_per_token", per_token, 1, MAX_BYTES_PER_TOKEN)
    bandwidths = {**DEFAULT_BANDWIDTHS}
    for medium in bandwidths:
        if (text := getattr(arguments, f"{medium}_bandwidth")) is not None:
            bandwidths[medium] = float(ByteSize.parse(text, name=f"{medium}-bandwidth"))
    speed = arguments.prefill_tokens_per_s
    return Machine(bytes_per_token=per_token, prefill_tokens_per_s=speed, bandwidths=bandwidths)


def _capacities(
    arguments: argparse.Namespace, trace: "Trace", machine: "Machine"
) -> list[tuple[int, int | None]]:
    """List the capacities to compare, in blocks and, if known, in bytes."""
    from kvxfer.replay import plan_tiers

    if arguments.capacities is None:
        block = machine.bytes_per_token and machine.block_size_bytes(trace.tokens_per_block)
        slots = sorted({max(1, trace.num_unique // share) for share in SHARES})
        return [(number, number * block if block else None) for number in slots]
    block = machine.block_size_bytes(trace.tokens_per_block)
    sizes = [
        int(ByteSize.parse(text, name="capacities")) for text in arguments.capacities.split(",")
    ]
    return [(plan_tiers(f"host://?capacity={size}", block)[0].num_slots, size) for size in sizes]


def _require(name: str, value: float | None, least: float, most: float) -> None:
    if value is not None and not least <= value <= most:
        raise InvalidArgumentError(name, value, f"a positive number, {least:,} to {most:,}")
