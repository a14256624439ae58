"""The chart: what it renders to, against published schemas, and that its commands are understood."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from atoll.control.operation.fleet_operator import FINALIZER, VERSION
from atoll.deploy.kubernetes.kube_client import KubeClient
from atoll.deploy.kubernetes.kube_settings import KubernetesSettings
from tests.control.operation.test_fleet_operator import CRD, FLEET, Stage
from tests.deploy.kubernetes.test_base import read_all

CHART = CRD.parents[1]
VALUES: dict[str, Any] = {
    "hubs": [{"name": "h0", "secret": "hub-0"}, {"name": "h1", "secret": "hub-1"}],
    "gateway": {"replicas": 2, "database": "postgresql://db/atoll"},
    "target": {"priority_class": "high", "image": "engine:1"},
    "fleets": {"lab": FLEET},
    "inferencePool": {"enabled": True, "endpointPicker": {"name": "picker"}},
    "httpRoute": {"enabled": True, "parentRefs": [{"name": "front"}], "hostnames": ["a.example"]},
}


TEXT, NUMBER = {"type": "string"}, {"type": "integer", "minimum": 1, "maximum": 65535}


def closed(required: tuple[str, ...] = (), **fields: Any) -> dict[str, Any]:
    """Return the schema of an object that has these fields and no others."""
    return {
        "type": "object",
        "properties": fields,
        "required": list(required),
        "additionalProperties": False,
    }


def several(item: dict[str, Any], max_items: int) -> dict[str, Any]:
    return {"type": "array", "items": item, "minItems": 1, "maxItems": max_items}


OWN_SCHEMAS = {
    # Written from the documentation of the Gateway API v1 and of its inference extension v1.
    "HTTPRoute": closed(
        ("parentRefs", "rules"),
        parentRefs=several(
            closed(
                ("name",),
                name=TEXT,
                namespace=TEXT,
                sectionName=TEXT,
                group=TEXT,
                kind=TEXT,
                port=NUMBER,
            ),
            32,
        ),
        hostnames=several(TEXT, 16),
        rules=several(
            closed(
                matches={"type": "array"},
                filters={"type": "array"},
                timeouts={"type": "object"},
                backendRefs=several(
                    closed(
                        ("name",),
                        name=TEXT,
                        namespace=TEXT,
                        group=TEXT,
                        kind=TEXT,
                        port=NUMBER,
                        weight={"type": "integer"},
                    ),
                    16,
                ),
            ),
            16,
        ),
    ),
    "InferencePool": closed(
        ("selector", "targetPorts", "endpointPickerRef"),
        selector=closed(
            ("matchLabels",), matchLabels={"type": "object", "additionalProperties": TEXT}
        ),
        targetPorts=several(closed(("number",), number=NUMBER), 8),
        endpointPickerRef=closed(
            ("name",),
            name=TEXT,
            group=TEXT,
            kind=TEXT,
            port=closed(("number",), number=NUMBER),
            failureMode={"enum": ["FailOpen", "FailClose"]},
        ),
    ),
}


def validate_own(made: dict[str, Any]) -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")
    jsonschema.validate(made["spec"], OWN_SCHEMAS[made["kind"]])


def merge(base: Any, over: Any) -> Any:
    if not isinstance(base, dict) or not isinstance(over, dict):
        return over
    return {**base, **{key: merge(base.get(key), value) for key, value in over.items()}}


def render(folder: Path, values: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what Helm makes of the chart, or Go's own templates where it is not installed."""
    helm, go = shutil.which("helm"), shutil.which("go")
    if helm is not None:
        (folder / "values.yaml").write_text(yaml.safe_dump(values))
        command = [helm, "template", "lab", str(CHART), "--namespace", "atoll"]
        command += ["--values", str(folder / "values.yaml")]
    elif go is not None:
        defaults = yaml.safe_load((CHART / "values.yaml").read_text())
        release = {"Name": "lab", "Namespace": "atoll", "Service": "Helm"}
        data = {"Values": merge(defaults, values), "Release": release}
        (folder / "values.json").write_text(json.dumps(data))
        program = Path(__file__).with_name("render_chart.go")
        command = [go, "run", str(program), str(CHART), str(folder / "values.json")]
    else:
        pytest.skip("neither helm nor go is installed: the chart was not rendered")
    done = subprocess.run(
        command, capture_output=True, check=True, env={**os.environ, "GOCACHE": str(folder)}
    )
    return [made for made in yaml.safe_load_all(done.stdout) if made]


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return render(tmp_path_factory.mktemp("chart"), VALUES)


def of_kind(made: list[dict[str, Any]], kind: str) -> dict[str, dict[str, Any]]:
    return {each["metadata"]["name"]: each for each in made if each["kind"] == kind}


@pytest.mark.slow
def test_what_is_rendered_keeps_the_published_schemas(rendered: list[dict[str, Any]]) -> None:
    validate = pytest.importorskip(
        "kubernetes_validate", reason="kubernetes-validate is not installed"
    )
    for made in rendered:
        if made["kind"] in OWN_SCHEMAS:
            validate_own(made)
        elif made["kind"] != "Fleet":
            validate.validate(made, "1.30", strict=True)
    validate.validate(yaml.safe_load(CRD.read_text()), "1.30", strict=True)


@pytest.mark.slow
def test_values_reach_what_is_rendered(rendered: list[dict[str, Any]]) -> None:
    assert set(of_kind(rendered, "Deployment")) == {
        "atoll-hub-h0",
        "atoll-hub-h1",
        "atoll-operator",
    }
    gateway = of_kind(rendered, "StatefulSet")["atoll-gateway"]
    assert gateway["spec"]["replicas"] == 2
    # The operator asks and tells each of them, by the name that its Service gives it.
    (operator,) = of_kind(rendered, "Deployment")["atoll-operator"]["spec"]["template"]["spec"][
        "containers"
    ]
    (option,) = (each for each in operator["command"] if each.startswith("--gateway="))
    service = of_kind(rendered, "Service")[gateway["spec"]["serviceName"]]
    assert service["spec"]["clusterIP"] == "None"
    assert option.removeprefix("--gateway=").split(",") == [
        f"http://atoll-gateway-{index}.{service['metadata']['name']}:8080" for index in (0, 1)
    ]
    assert set(of_kind(rendered, "PodDisruptionBudget")) == {"atoll-gateway", "atoll-hub"}
    (container,) = gateway["spec"]["template"]["spec"]["containers"]
    assert "--db=postgresql://db/atoll" in container["command"]
    settings = yaml.safe_load(
        of_kind(rendered, "ConfigMap")["atoll-target"]["data"]["targets.yaml"]
    )
    assert KubernetesSettings.parse(settings["kubernetes"]) == KubernetesSettings(
        image="engine:1",
        priority_class="high",
        secrets={"ATOLL_FABRIC": "atoll-worker/token"},
        user=1000,
        read_only_root=True,
    )
    assert of_kind(rendered, "Fleet")["lab"]["spec"] == {"fleet": FLEET}
    (route,) = of_kind(rendered, "HTTPRoute").values()
    assert route["spec"]["parentRefs"] == [{"name": "front"}]
    (pool,) = of_kind(rendered, "InferencePool").values()
    labels = gateway["spec"]["template"]["metadata"]["labels"]
    assert pool["spec"]["selector"]["matchLabels"].items() <= labels.items()
    (port,) = container["ports"]
    assert pool["spec"]["targetPorts"] == [{"number": port["containerPort"]}]
    assert pool["spec"]["endpointPickerRef"]["name"] == "picker"
    (rule,) = route["spec"]["rules"]
    (backend,) = rule["backendRefs"]
    assert (backend["kind"], backend["name"]) == ("InferencePool", pool["metadata"]["name"])
    for made in rendered:
        pod = made.get("spec", {}).get("template", {}).get("spec")
        if pod is not None:
            assert pod["securityContext"]["runAsNonRoot"] is True
            (container,) = pod["containers"]
            security = container["securityContext"]
            assert security["readOnlyRootFilesystem"] is True
            assert security["capabilities"] == {"drop": ["ALL"]}


@pytest.mark.slow
def test_several_gateways_need_a_database_that_they_share(tmp_path: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError) as caught:
        render(tmp_path, {"gateway": {"replicas": 2}})
    assert b"gateway.database that they share" in caught.value.stderr


@pytest.mark.slow
def test_the_operator_may_do_what_it_does(rendered: list[dict[str, Any]], tmp_path: Path) -> None:
    rules = of_kind(rendered, "Role")["atoll-operator"]["rules"]
    (everywhere,) = of_kind(rendered, "ClusterRole").values()
    stage = Stage(tmp_path)
    stage.add()
    stage.api.rules = [*rules, *({**rule, "everywhere": True} for rule in everywhere["rules"])]
    stage.operator.turn()
    stage.act(stage.processes[0])
    stage.operator.turn()
    assert stage.fleet()["status"]["phase"] == "Changing"
    stage.fleet()["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    stage.operator.turn()
    stage.processes[-1].code = 0
    stage.operator.turn()
    assert not stage.fleet()["metadata"].get("finalizers")


def test_the_chart_gives_the_rights_of_the_base() -> None:
    """The operator's controllers are those that the base runs."""
    (base,) = [made for made in read_all() if made["kind"] == "Role"]
    text = (CHART / "templates" / "rbac.yaml").read_text()
    start = text.index("rules:")
    given = yaml.safe_load(text[start : text.index("---", start)])["rules"]
    assert [rule for rule in given if rule["apiGroups"] != [VERSION.partition("/")[0]]] == base[
        "rules"
    ]


def test_commands_of_the_chart_are_understood() -> None:
    from typer.testing import CliRunner

    from atoll.cli.main import app

    for name, verb in (("operator", "operator"), ("gateway", "gateway")):
        text = (CHART / "templates" / f"{name}.yaml").read_text()
        options = [
            line.strip()[2:].partition("=")[0]
            for line in text.splitlines()
            if line.strip().startswith("- --")
        ]
        assert options
        shown = CliRunner().invoke(app, [verb, "--help"], env={"COLUMNS": "200", "NO_COLOR": "1"})
        for option in options:
            assert option in shown.output


def test_names_of_the_definition_are_those_of_the_operator() -> None:
    definition = yaml.safe_load(CRD.read_text())["spec"]
    assert f"{definition['group']}/{definition['versions'][0]['name']}" == VERSION
    assert FINALIZER.startswith(definition["group"])
    path = KubeClient(Stage(Path("/nowhere")).api, "n")._path("Fleet", "lab")
    assert path == f"/apis/{VERSION}/namespaces/n/{definition['names']['plural']}/lab"
