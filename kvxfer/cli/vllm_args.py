"""Command `kvxfer vllm-args`: checks tiers, and prints vLLM's `--kv-transfer-config` for them."""

import sys
from collections.abc import Sequence
from typing import Any

from kvxfer.cli.command_line import CommandLine, exit_statuses, print_json


def main(argv: Sequence[str]) -> int:
    """Check the tiers that URLs or the environment name, and print the argument; return 0."""
    parser = CommandLine(
        prog="kvxfer vllm-args",
        description="Print the argument of vLLM's --kv-transfer-config for tiers, once they are "
        'checked: vllm serve MODEL --kv-transfer-config "$(kvxfer vllm-args URL...)".',
        epilog=exit_statuses("when it is printed"),
    )
    parser.add_argument(
        "url",
        nargs="*",
        metavar="URL",
        help="tier, the fastest first, such as host://?capacity=64GiB; without any, the settings "
        "are those of KVXFER_BACKEND and KVXFER_CONFIG",
    )
    urls = parser.parse_args(argv).url

    from kvxfer import doctor
    from kvxfer.connect import backend_choices
    from kvxfer.integrations.vllm.common.plugin import CONNECTORS, MODULE, why_not_loaded
    from kvxfer.integrations.vllm.common.settings import EXPLICIT, find_settings

    found = find_settings({"backend": urls} if urls else {})
    found.check_tiers()
    with found.checked():
        for tier in backend_choices(found.values["backend"]):
            doctor.require_openable("backend", tier)
    arguments: dict[str, Any] = {"kv_connector": CONNECTORS[0], "kv_role": "kv_both"}
    if why := why_not_loaded():
        arguments["kv_connector_module_path"] = MODULE
        note = f"vLLM does not load the plug-in ({why}): the argument names its module instead"
        sys.stderr.write(f"kvxfer vllm-args: {note}\n")
    print_json(arguments | {EXPLICIT: found.values})
    return 0
