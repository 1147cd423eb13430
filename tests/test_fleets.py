"""The page about fleets: Kubernetes accepts its manifests and chart, and kvxfer their commands."""

import importlib
import itertools
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from examples.proxy import __main__ as proxy
from kvxfer.cli import replay, serve
from kvxfer.connect import parse_backend
from kvxfer.endpoint import Endpoint
from kvxfer.replay.fleet import parse_fleet
from kvxfer.units import ByteSize, Duration
from tests import needs

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/fleets.md").read_text()
FILES = sorted((ROOT / "docs/fleets").glob("*.yaml"))
KUBERNETES = ("1.30", "1.37")
"""The oldest release whose objects the manifests must be, and the newest one that is known here."""

CHART = ROOT / "examples" / "chart"
VALUES: dict[str, dict[str, Any]] = {
    "as it is": {},
    "small": {"replicas": 1, "capacity": "4GiB", "memory": "6Gi", "etcd": {"replicas": 1}},
    "etcd of one's own": {"etcd": {"members": ["10.0.0.5:2379", "10.0.0.6:2379"]}},
    "tiers": {"tiers": ["s3://example-kv/fleet?region=eu-central-1"], "extraArgs": ["--lease=4s"]},
}
STAGING = ByteSize.parse("576MiB")
INFO = 1
"""Severity of what helm only recommends, such as an icon."""

POD_IP = "10.0.0.7"
SECRET_MODE = 0o440
ETCD = {f"etcd-{number}.etcd" for number in range(3)}
"""Names of etcd.yaml, which other manifests connect to."""

WORKLOADS = ("Deployment", "StatefulSet")
CITED = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


OBJECTS = {
    f"{path.stem}-{each['kind']}-{each['metadata']['name']}": each
    for path in FILES
    for each in documents(path)
}


def each_of(*kinds: str) -> pytest.MarkDecorator:
    """Try the objects of these kinds, each."""
    found = {name: each for name, each in OBJECTS.items() if each["kind"] in kinds}
    return pytest.mark.parametrize("manifest", found.values(), ids=found)


def validate(manifest: dict[str, Any]) -> None:
    for release in KUBERNETES:
        kubernetes_validate.validate(manifest, release, strict=True)


def words_of(container: dict[str, Any]) -> list[str]:
    """Words of the command of a container, with the address of its pod."""
    words = [*container["command"], *container["args"]]
    return [word.replace("$(POD_IP)", POD_IP) for word in words]


def check_command(words: list[str]) -> None:
    """Check a command as the program itself does when it starts."""
    match words[:2]:
        case ["kvxfer", "serve"]:
            arguments = serve.make_parser().parse_args(words[2:])
            Endpoint.parse("listen", arguments.listen)
            for tier in arguments.tier:
                parse_backend(tier)
        case ["python", "-m"]:
            assert words[2] == "examples.proxy"
            proxy._parser().parse_args(words[3:])
        case ["kvxfer", "replay"]:
            arguments = replay._parse(words[2:])
            if arguments.fleet:
                parse_fleet(arguments.fleet)
        case ["vllm", "serve"]:
            check_connector(json.loads(words[words.index("--kv-transfer-config") + 1]))
        case ["kubectl", "apply"]:
            assert (ROOT / words[words.index("-f") + 1]).exists()
        case ["etcd", *_]:
            assert all(word.startswith("--") and "=" in word for word in words[1:])
        case ["helm", "install"]:
            check_values(words[4:])
            assert (ROOT / words[3] / "Chart.yaml").exists()
        case _:
            assert words[:2] == ["kubectl", "create"] or words[0] in {"openssl", "export"}, words


def check_values(options: list[str]) -> None:
    """Check that the chart has the values that are set for it."""
    known = yaml.safe_load((CHART / "values.yaml").read_text())
    for flag, each in zip(options[::2], options[1::2], strict=True):
        assert flag == "--set"
        value = known
        for name in each.partition("=")[0].split("."):
            value = value[name]


def check_connector(config: dict[str, Any]) -> None:
    extra = config["kv_connector_extra_config"]
    if config["kv_connector"] == "KVXferConnector":
        pytest.importorskip("vllm")
        from kvxfer.integrations.vllm.prefill_decode.settings import Settings

        Settings.parse(extra)
        return
    assert extra["spec_name"] == "KVXferOffloadingSpec"
    for tier in extra["backend"]:
        parse_backend(tier)


@pytest.mark.parametrize("manifest", OBJECTS.values(), ids=OBJECTS)
def test_a_manifest_is_valid(manifest: dict[str, Any]) -> None:
    validate(manifest)


@each_of(*WORKLOADS)
def test_what_a_pod_starts_is_a_command_of_this_release(manifest: dict[str, Any]) -> None:
    spec = manifest["spec"]["template"]["spec"]
    assert manifest["spec"]["selector"]["matchLabels"].items() <= labels(manifest).items()
    for container in spec["containers"]:
        check_command(words_of(container))
        mounted = {mount["name"] for mount in container.get("volumeMounts", ())}
        volumes = {volume["name"]: volume for volume in spec.get("volumes", ())}
        claims = manifest["spec"].get("volumeClaimTemplates", ())
        assert mounted == volumes.keys() | {claim["metadata"]["name"] for claim in claims}
        for volume in volumes.values():
            assert volume.get("secret", {"defaultMode": SECRET_MODE})["defaultMode"] == SECRET_MODE


def labels(manifest: dict[str, Any]) -> dict[str, str]:
    found: dict[str, str] = manifest["spec"]["template"]["metadata"]["labels"]
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_what_is_listened_at_is_reachable_and_what_is_connected_to_is_there(path: Path) -> None:
    objects = documents(path)
    pods = [each for each in objects if each["kind"] in WORKLOADS]
    names = {
        f"{pod['metadata']['name']}-{number}.{pod['spec']['serviceName']}"
        for pod in pods
        if pod["kind"] == "StatefulSet"
        for number in range(pod["spec"]["replicas"])
    }
    services = {each["metadata"]["name"]: each for each in objects if each["kind"] == "Service"}
    for pod in pods:
        [container] = pod["spec"]["template"]["spec"]["containers"]
        ports = {port["containerPort"] for port in container["ports"]}
        text = " ".join(words_of(container))
        own = {
            int(port)
            for port in re.findall(r"(?:10\.0\.0\.7:|0\.0\.0\.0:|port[=\" :]+)(\d+)", text)
        }
        assert own == ports
        connected = set(re.findall(r"[\w-]+-\d\.[\w-]+(?=:\d)", text))
        assert connected <= names | ETCD
    assert names
    for name in names:
        service = services[name.partition(".")[2]]
        selected = service["spec"]["selector"].items()
        assert any(selected <= labels(pod).items() for pod in pods)


@each_of("StatefulSet")
def test_what_a_pod_listens_at_is_open_to_those_who_need_it_alone(manifest: dict[str, Any]) -> None:
    policies = [each["spec"] for each in OBJECTS.values() if each["kind"] == "NetworkPolicy"]
    own = labels(manifest).items()
    rules = [
        rule
        for policy in policies
        if policy["podSelector"]["matchLabels"].items() <= own
        for rule in policy["ingress"]
    ]
    [container] = manifest["spec"]["template"]["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert {port["port"] for rule in rules for port in rule["ports"]} == set(ports.values())
    to_all = {port["port"] for rule in rules if "from" not in rule for port in rule["ports"]}
    assert to_all <= {ports.get("pages")}, "only pages that tell no secret"


def commands() -> Iterator[list[str]]:
    """Commands in the blocks of the page, each ended by a line end outside of quotes."""
    for block in re.findall(r"^```bash\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL):
        lexer = shlex.shlex(block.replace("\\\n", " "), posix=True, punctuation_chars="\n")
        lexer.whitespace, lexer.whitespace_split = " \t", True
        for is_end, words in itertools.groupby(lexer, key=lambda word: not word.strip("\n")):
            if not is_end:
                yield list(words)


def test_the_commands_of_the_page_are_those_of_this_release() -> None:
    found = list(commands())
    assert {tuple(words[:2]) for words in found} >= {
        ("kvxfer", "serve"),
        ("python", "-m"),
        ("kvxfer", "replay"),
        ("vllm", "serve"),
        ("kubectl", "apply"),
    }
    for words in found:
        check_command(words)


def test_every_manifest_is_on_the_page() -> None:
    assert len(FILES) >= 3
    assert [path.name for path in FILES if f"(fleets/{path.name})" not in PAGE] == []


def test_the_tests_that_the_page_cites_exist() -> None:
    cited = CITED.findall(PAGE)
    assert len(cited) > 10
    assert [
        (path, name) for path, name in cited if f"def {name}(" not in (ROOT / path).read_text()
    ] == []


@pytest.fixture
def helm(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(needs.HELM))
    return importlib.import_module("helm_python")


def render(helm: Any, values: dict[str, Any]) -> list[dict[str, Any]]:
    """Render the chart as `helm install rack-a` does; return the objects."""
    with helm.Chart.load(CHART) as chart:
        files = chart.render(values, name="rack-a")
    texts = [text for name, text in files.items() if name.endswith(".yaml")]
    return [each for text in texts for each in yaml.safe_load_all(text) if each]


@needs.helm
@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_helm_and_kubernetes_accept_the_chart(helm: Any, values: dict[str, Any]) -> None:
    for release in KUBERNETES:
        told = helm.lint(CHART, values, strict=True, kube_version=f"v{release}.0")
        assert [each for each in told["messages"] if each["severity"] > INFO] == []
        assert not told["errors"]
    for each in render(helm, values):
        validate(each)


@needs.helm
@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_the_chart_starts_a_command_of_this_release_and_probes_where_it_answers(
    helm: Any, values: dict[str, Any]
) -> None:
    objects = {(each["kind"], each["metadata"]["name"]): each for each in render(helm, values)}
    holder = objects["StatefulSet", "rack-a-holder"]["spec"]["template"]["spec"]
    [container] = holder["containers"]
    words = words_of(container)
    check_command(words)
    arguments = serve.make_parser().parse_args(words[2:])
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert ports == {
        "control": Endpoint.parse("listen", arguments.listen).port,
        "data": arguments.data_port,
        "pages": Endpoint.parse("ready", arguments.ready).port,
    }
    assert arguments.metrics == arguments.ready
    assert container["readinessProbe"]["httpGet"] == {"path": "/ready", "port": "pages"}
    assert holder["terminationGracePeriodSeconds"] > Duration.parse(arguments.drain_timeout)
    memory = ByteSize.parse(container["resources"]["limits"]["memory"])
    assert memory > ByteSize.parse(arguments.capacity) + STAGING
    [mount] = container["volumeMounts"]
    assert arguments.secret_file == f"{mount['mountPath']}/secret"
    assert [each for each in holder["volumes"] if each["name"] == mount["name"]]
    served = objects["Service", "rack-a-holder"]["spec"]["ports"]
    assert {each["name"]: each["port"] for each in served}.items() <= ports.items()
    rules = objects["NetworkPolicy", "rack-a-holder"]["spec"]["ingress"]
    assert {each["port"] for rule in rules for each in rule["ports"]} == set(ports.values())
    members, _, group = arguments.discover.removeprefix("etcd://").partition("/")
    etcd = objects.get(("StatefulSet", "rack-a-etcd"))
    installed = [
        f"rack-a-etcd-{number}.rack-a-etcd:2379"
        for number in range(etcd["spec"]["replicas"] if etcd else 0)
    ]
    assert members.split(",") == (installed or values["etcd"]["members"])
    assert group == "rack"


@needs.helm
@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"capactiy": "1GiB"}, "capactiy"),
        ({"tiers": ["/var/cache/kv"]}, "tiers"),
        ({"etcd": {"members": ["10.0.0.5"]}}, "members"),
    ],
)
def test_a_value_that_is_wrong_is_named(helm: Any, values: dict[str, Any], named: str) -> None:
    with pytest.raises(helm.HelmValuesError, match=named):
        render(helm, values)


def test_the_chart_is_of_the_release_that_is_cited() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"]
    assert chart["version"] == chart["appVersion"] == cited
