"""Any-to-any fleets on the command line: planned, reported, explained, compared; served on one machine."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from atoll import Fleet
from atoll.catalog.catalog import Catalog
from atoll.cli import main as cli
from atoll.cli.plan_commands import write_commands
from atoll.deploy.commands.executor_node import ExecutorOffer
from atoll.plan.files.read import read_plan
from atoll.runtime.graph_server.graph_config import GraphServerConfig
from tests.cli.commands import Captured, run
from tests.cli.graphs import SMALL

MIXED = SMALL.replace(
    "pool:",
    "  chat: {model: llama-3.2-1b, ttft: 1s, tpot: 60ms, rate: 1/s, lengths: 200x50}\npool:",
).replace("name: small", "name: mixed\nsettings: {max_nodes_per_instance: 1}")
PLAIN = """\
services:
  chat: {model: llama-3.2-1b, ttft: 1s, tpot: 60ms, rate: 1/s, lengths: 200x50}
pool:
  offers:
    - {region: east, node_type: L4:1, available: 6, usd_per_hour: 0.80}
"""


@pytest.fixture(autouse=True)
def folder(planning: Path) -> Path:
    """Fleet files in the current folder."""
    Path("fleet.yaml").write_text(SMALL, encoding="utf-8")
    Path("mixed.yaml").write_text(MIXED, encoding="utf-8")
    return planning


def refused(capsys: Captured, *args: str) -> str:
    capsys.readouterr()
    assert cli.run(list(args)) != 0
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert "bug" not in lines[0]
    return lines[0]


def plan(capsys: Captured, fleet: str, *args: str) -> str:
    return run(capsys, "plan", fleet, "--capacity-only", *args)


def test_a_plan_is_shown_written_and_drawn(capsys: Captured) -> None:
    out = plan(capsys, "fleet.yaml", "-o", "plan.json", "--report", "plan.html")
    assert "Executors of look: qwen2.5-vl-7b" in out
    assert "Paths of look" in out
    assert '<svg class="machines"' in Path("plan.html").read_text("utf-8")
    assert "valid: small" in run(capsys, "validate", "plan.json", "--fleet", "fleet.yaml")
    assert "valid: small" in run(capsys, "validate", "plan.json")
    plan(capsys, "fleet.yaml", "--report", "plan.svg")
    assert Path("plan.svg").read_text("utf-8").startswith("<svg")


def test_json_carries_executors_classes_and_handovers(capsys: Captured) -> None:
    data = json.loads(plan(capsys, "fleet.yaml", "--json"))
    assert data["executors"]
    assert all(0 < one["busy"] <= 1 + 1e-6 for one in data["executors"] if one["requests_per_s"])
    assert {one["klass"] for one in data["classes"]} == {"text", "image+text"}
    assert all(abs(sum(p["share"] for p in c["paths"]) - 1) < 1e-6 for c in data["classes"])
    assert "handovers" in data
    spent = sum(one["usd_per_hour"] for one in data["executors"])
    assert spent == pytest.approx(data["cost"]["services"][0]["usd_per_hour"])


def test_plain_services_keep_their_tables_beside(capsys: Captured) -> None:
    out = plan(capsys, "mixed.yaml", "-o", "mixed.json")
    for part in ("Instances in east", "Executors of look", "Demand and capacity", "chat"):
        assert part in out
    assert cli.run(["plan", "mixed.json", "--commands"]) == 8  # executors have no command
    assert "llama-3.2-1b" in capsys.readouterr().out.lower()


def test_baselines_are_beside_the_plan(capsys: Captured) -> None:
    out = plan(capsys, "fleet.yaml", "--compare")
    assert "Next to the baselines" in out
    assert "E/P/D" in out


def test_plans_are_compared_by_pattern(capsys: Captured) -> None:
    plan(capsys, "fleet.yaml", "-o", "one.json")
    plan(capsys, "fleet.yaml", "--solver", "E/PD", "-o", "two.json")
    assert run(capsys, "diff", "one.json", "one.json") == "nothing changes\n"
    out = run(capsys, "diff", "one.json", "two.json")
    assert "look: vision on" in out
    assert "path of look, 'image+text'" in out
    assert json.loads(run(capsys, "diff", "one.json", "two.json", "--json"))["executors"]


def test_a_plan_explains_itself(capsys: Captured) -> None:
    plan(capsys, "fleet.yaml", "-o", "plan.json")
    out = run(capsys, "explain", "plan.json", "--fleet", "fleet.yaml", "--plans", "2")
    for part in (
        "Ways to deploy that have a name",
        "monolith",
        "the bottleneck first",
        "memory",
    ):
        assert part in " ".join(out.split())
    data = json.loads(run(capsys, "explain", "--fleet", "fleet.yaml", "--json", "--plans", "2"))
    assert data["ways"]
    assert data["parts"]
    assert data["fits"]


def test_parts_without_components_are_refused_in_a_line(
    capsys: Captured, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    plan(capsys, "fleet.yaml", "-o", "plan.json")
    Path("parts.yaml").write_text("services: {look: {parts: {vision: [smollm2-vision]}}}")
    Path("other.yaml").write_text("services: {other: {parts: {llm: [smollm2]}}}")
    Path("odd.yaml").write_text("services: {look: {parts: {vision: [], llm: [smolm2]}}}")
    for command, reason in (
        (("plan.json",), "nothing here runs the parts of qwen2.5-vl-7b (look)"),
        (("fleet.yaml",), "nothing here runs the parts of qwen2.5-vl-7b (look)"),
        (("plan.json", "--parts", "parts.yaml"), "none of the library's tasks can be done"),
        (("plan.json", "--parts", "other.yaml"), "unknown any-to-any service 'other'"),
        (("plan.json", "--parts", "odd.yaml"), "unknown component 'smolm2'; did you mean"),
        (("plan.json", "--only", "nobody"), "unknown model 'nobody'"),
    ):
        line = refused(capsys, "serve", *command)
        assert reason in line, command
        assert "(fix: " in line or "known: " in line or "did you mean" in line
    assert not list(folder.rglob("run-*"))


def test_what_executors_run_is_named_or_stands_in(capsys: Captured) -> None:
    assert "nothing here runs the parts of qwen2.5-vl-7b" in refused(
        capsys, "up", "fleet.yaml", "--dry-run"
    )
    said = run(capsys, "up", "fleet.yaml", "--dry-run", "--stand-in", "-o", "orders")
    assert "look as vision+llm" in said
    (script,) = Path("orders").glob("*.sh")
    assert "executor_node" in script.read_text("utf-8")
    Path("parts.yaml").write_text("services: {hear: {parts: {audio: [hibari]}}}")
    line = refused(capsys, "up", "fleet.yaml", "--dry-run", "--parts", "parts.yaml")
    assert line.startswith("error: --parts: unknown any-to-any service 'hear'")
    assert "graph server stands beside" in refused(
        capsys, "up", "fleet.yaml", "--dry-run", "--fabric", "@x.token"
    )


def test_lines_to_paste_start_executors_and_their_graph_server(capsys: Captured) -> None:
    plan(capsys, "fleet.yaml", "-o", "plan.json")
    made = read_plan(Path("plan.json"))
    told = run(capsys, "plan", "plan.json", "--commands", "--stand-in").splitlines()
    *lines, server = told
    assert len(lines) == len(made.instances)
    for one, line in zip(made.instances, lines, strict=True):
        words = shlex.split(line)
        assert words[:2] == ["ATOLL_EXECUTORS=executors.token", "ATOLL_FABRIC=@fabric.token"]
        assert words[words.index("--pool") + 1] == "small.executors"
        offer = ExecutorOffer.from_json(words[words.index("--offer") + 1])
        assert offer.id == words[words.index("--name") + 1] == one.id
        assert set(json.loads(words[words.index("--components") + 1])) == set(offer.runs)
    # What the graph server reads is the plan's paths over just these executors.
    words = shlex.split(server)
    config = GraphServerConfig.from_json(words[words.index("%s") + 1])
    (served,) = config.services
    assert served.name == "look"
    assert served.paths == made.paths
    assert words[words.index("--fleet") + 1] == "small"
    assert words[words.index("--config") + 1] == words[words.index(">") + 1] == "graph.json"
    ports = [words[words.index("--port") + 1] for words in map(shlex.split, told)]
    assert len(set(ports)) == len(told)


def test_executors_that_nothing_runs_have_no_line_to_paste(capsys: Captured) -> None:
    plan(capsys, "fleet.yaml", "-o", "plan.json")
    assert cli.run(["plan", "plan.json", "--commands"]) == 8
    told = capsys.readouterr()
    assert "nothing here runs the parts of qwen2.5-vl-7b (look)" in told.err
    assert "named by --parts" in told.err
    assert told.out == ""
    assert cli.run(["plan", "plan.json", "--commands", "--executors", "vllm-omni"]) == 8
    assert "vLLM-Omni has no stages of qwen2.5-vl-7b" in capsys.readouterr().err
    assert "vllm-omni" in refused(capsys, "plan", "plan.json", "--commands", "--executors", "vllm")


def test_how_far_classes_move_is_a_share_and_needs_classes(capsys: Captured) -> None:
    simulate = ("operate", "fleet.yaml", "--simulate", "generated", "--mix")
    assert "cannot read 'much' as a share" in refused(capsys, *simulate, "much")
    Path("plain.yaml").write_text(PLAIN)
    line = refused(capsys, *(w.replace("fleet", "plain") for w in simulate), "30%")
    assert "no service has classes that could move" in line


def test_python_knows_executors_and_paths() -> None:
    fleet = Fleet.load("fleet.yaml")
    assert {k.name for k in fleet.classes["look"]} == {"text", "image+text"}
    made = fleet.plan(capacity_only=True)
    assert made.paths
    assert {one.id for one in made.executors} == {i.id for i in made.instances}
    assert {c.klass for c in made.classes} == {"text", "image+text"}
    assert all(h.src != h.dst for h in made.handovers)
    assert made.executors is made.executors, "worked out once"
    assert "Executors of look" in str(made)
    assert "machines" in made._repr_html_()
    assert made.diff(made).empty
    made.validate()


def test_templates_are_of_the_llm_alone(capsys: Captured) -> None:
    out = run(capsys, "templates", "qwen2.5-vl-7b", "--nodes", "L40S:1", "--max-nodes", "1")
    assert out.startswith("qwen2.5-vl-7b (its llm alone): ")
    assert "has no llm" in refused(capsys, "templates", "qwen-image")


def test_one_server_of_vllm_omni_is_all_executors_of_a_service(capsys: Captured) -> None:
    plan(capsys, "fleet.yaml", "-o", "plan.json")
    made = read_plan(Path("plan.json"))
    role = "look/vision+llm+talker+vocoder/serve"
    whole = made.instances[0].model_copy(update={"id": "look-whole", "role": role})
    models = {"look": "qwen2.5-omni-7b"}
    made = made.model_copy(update={"models": models, "instances": (whole,), "paths": ()})
    (found,) = write_commands(made, Catalog.default(), executors="vllm-omni")
    assert (found.instance, found.refusal) == ("look", None)
    (line,) = found.lines
    assert line.startswith("CUDA_VISIBLE_DEVICES=0 vllm serve ")
    assert " --omni --host 127.0.0.1 --port 8001 --served-model-name look " in line
    stages = json.loads(shlex.split(line)[-1])
    assert [stage["devices"] for stage in stages.values()] == ["0", "0", "0"]
    shares = [stage["gpu_memory_utilization"] for stage in stages.values()]
    assert 0.89 < sum(shares) <= 0.9
