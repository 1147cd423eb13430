"""`python -m tests.e2e.prefill_decode`: scenarios of prefill and decode engines.

Runs scenarios with real vLLM engines on this machine, and prints a table of the results in
Markdown. Names are such as `late` (with one prefill and one decode engine), `gemma3` (all scenarios
of a deployment) or `gemma3:late`; by default, all run. The exit status is 1 if one fails with
kvxfer.
"""

import argparse
import asyncio
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.e2e.engine_process import REPOSITORY
from tests.e2e.prefill_decode.engines import CONNECTORS
from tests.e2e.prefill_decode.plan import SCENARIOS, SHAPES, Result, choose, run, table

LOGS = REPOSITORY / "build" / "prefill-decode"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tests.e2e.prefill_decode", description=__doc__)
    parser.add_argument(
        "names",
        nargs="*",
        metavar="SCENARIO",
        help=f"of {', '.join(SCENARIOS)}; or a deployment, of {', '.join(SHAPES)}",
    )
    parser.add_argument(
        "--connector",
        action="append",
        choices=CONNECTORS,
        help="connector to run with; may be given again, kvxfer by default",
    )
    parser.add_argument("--logs", type=Path, default=LOGS, help="folder of the engines' logs")
    options = parser.parse_args(arguments)
    try:
        chosen = choose(options.names or SHAPES)
    except KeyError as exc:
        parser.error(f"no such scenario: {exc.args[0]}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the engines have to end, too
    results: list[Result] = []
    try:
        asyncio.run(_run(options.connector or ["kvxfer"], chosen, options.logs, results))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
    print("\n".join(table(results)))
    return int(any(one.failure for one in results if one.connector == "kvxfer"))


async def _run(
    connectors: Sequence[str],
    chosen: Mapping[str, Sequence[str]],
    logs: Path,
    results: list[Result],
) -> None:
    for connector in connectors:
        async for result in run(connector, chosen, logs):
            results.append(result)
            print(f"{connector} {result.shape}: {result.scenario}: {result}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
