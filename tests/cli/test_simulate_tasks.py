"""`atoll simulate` of plans with any-to-any services."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from atoll.api.fleet import Fleet
from atoll.cli.main import run
from atoll.core.errors import UsageError
from atoll.plan.plan import Plan, RequestPath
from atoll.sim.tasks.from_plan import task_fleet
from atoll.sim.tasks.simulate_tasks import simulate_tasks
from atoll.sim.tasks.task_fleet import TokenPart

FLEET = """
services:
  assistant:
    model: qwen2.5-omni-7b
    rate: 0.5/s
    ttft: {ttft}
    tpot: 150ms
    classes:
      text: {{share: 60%, input: 200, output: 40}}
      image+text: {{share: 20%, input: 200, output: 40, images: {{count: 1, size: 640x360}}}}
      audio -> audio: {{share: 20%, input: 50, output: 30, audio: 4s, speech: 6s, ahead: 1s}}
{chat}
pool:
  cloud:
    regions: [aws/us-east-1]
    gpus: [L40S]
    available: 8
"""
RARE = """
services:
  assistant:
    model: qwen2.5-omni-7b
    rate: 4/s
    ttft: 3s
    tpot: 100ms
    classes:
      text: {share: 96%, input: 400, output: 150}
      audio -> audio: {share: 4%, input: 50, output: 60, audio: 8s, speech: 12s, ahead: 1s}
pool: {offers: [{region: here, node_type: "L40S:1", available: 1, usd_per_hour: 1.9}]}
"""
CHAT = "  chat: {model: qwen3-8b, rate: 0.5/s, ttft: 2s, tpot: 100ms, lengths: 200x40}"


def _write(folder: Path, name: str, *, ttft: str = "4s", chat: str = CHAT) -> Path:
    path = folder / name
    path.write_text(FLEET.format(ttft=ttft, chat=chat))
    return path


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A plan of one executor and one plain instance, and its fleet."""
    folder = tmp_path_factory.mktemp("mixed")
    fleet, plan = _write(folder, "fleet.yaml"), folder / "plan.json"
    Fleet.load(fleet).plan(capacity_only=True).save(plan)
    return plan, fleet


def _run(*args: object) -> int:
    return run([str(arg) for arg in args])


def _read(capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    data = json.loads(capsys.readouterr().out)
    assert isinstance(data, dict)
    data["tasks"].pop("cpu_s")
    data["plain"].pop("cpu_s")
    return data


def test_classes_executors_machines_and_plain_services_as_data(
    files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    plan, fleet = files
    asked = ("simulate", plan, "--fleet", fleet, "--for", "2min", "--json")
    assert _run(*asked) == 0
    data = json.loads(capsys.readouterr().out)
    (service,) = data["services"]
    assert service["name"] == "assistant"
    assert service["target"] == 0.95
    assert set(service["each"]) == {"ttft", "tpot", "ahead"}
    classes = {klass["name"]: klass for klass in data["classes"]}
    assert set(classes) == {"text", "image+text", "audio -> audio"}
    assert sum(k["arrived"] for k in classes.values()) == service["requests"]
    assert 30 <= service["requests"] <= 100
    spoken = classes["audio -> audio"]
    assert spoken["promised_s"] == {"ttft": 4.0, "tpot": 0.15, "ahead": 1.0}
    assert 0.0 < spoken["ttft_s"]["p50"] < spoken["first_audio_s"]["p50"] <= spoken["e2e_s"]["p50"]
    assert spoken["ahead_s"]["p99"] <= spoken["ahead_s"]["p50"]
    assert classes["text"]["first_audio_s"]["p50"] is None
    (executor,) = data["executors"]
    assert executor["busy"] == pytest.approx(sum(p["busy"] for p in executor["parts"]))
    assert {p["part"] for p in executor["parts"]} == {"vision", "audio", "llm", "talker", "vocoder"}
    assert len(data["machines"]) == 1
    assert [s["name"] for s in data["plain"]["services"]] == ["chat"]
    assert data["finished"] == data["tasks"]["finished"] + data["plain"]["finished"]


@pytest.mark.slow
def test_equal_seeds_give_equal_runs(
    files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    plan, fleet = files
    asked = ("simulate", plan, "--fleet", fleet, "--for", "30s", "--json", "--seed")
    runs = []
    for seed in (3, 3, 4):
        assert _run(*asked, seed) == 0
        runs.append(_read(capsys))
    assert runs[0] == runs[1]
    assert runs[0]["classes"] != runs[2]["classes"]


def test_tables_report_and_requests(
    files: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, fleet = files
    rows, page = tmp_path / "requests.csv", tmp_path / "report.html"
    asked = ("simulate", plan, "--fleet", fleet, "--for", "60s")
    assert _run(*asked, "--requests", rows, "--report", page) == 0
    printed = capsys.readouterr().out
    for text in (
        "assistant keeps its promises",
        "chat keeps its promises",
        "speech ahead",
        "vocoder",
    ):
        assert text in printed
    with rows.open() as file:
        table = list(csv.DictReader(file))
    assert {row["service"] for row in table} == {"assistant", "chat"}
    for row in table:
        assert (row["class"] == "") == (row["service"] == "chat")
        assert float(row["e2e_s"]) >= float(row["ttft_s"]) > 0.0
        assert bool(row["ahead_s"]) == ("-> audio" in row["class"])
    text = page.read_text()
    assert text.startswith("<!doctype html>")
    assert "<script" not in text
    # Five measures of the classes (no image is wanted: four), four of the plain service.
    assert text.count("<figure>") == 8
    assert "audio -&gt; audio" in text


def test_a_share_that_is_missed_ends_with_code_5(
    files: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, fleet = files
    asked = ("simulate", plan, "--for", "60s", "--attain", "99%", "--fleet")
    assert _run(*asked, fleet) == 0
    strict = _write(tmp_path, "strict.yaml", ttft="30ms")
    assert _run(*asked, strict) == 5
    printed = capsys.readouterr()
    assert "assistant keeps its promises for only" in printed.out
    assert "99.0% asked for" in printed.err


def test_a_class_of_which_few_keep_their_promises_is_not_hidden_by_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Speech and text take turns on one GPU: text is in time, and speech stutters."""
    fleet, plan = tmp_path / "rare.yaml", tmp_path / "plan.json"
    fleet.write_text(RARE)
    Fleet.load(fleet).plan(capacity_only=True).save(plan)
    asked = ("simulate", plan, "--fleet", fleet, "--for", "5min")
    assert _run(*asked, "--json") == 0
    (service,) = json.loads(capsys.readouterr().out)["services"]
    groups = {group["name"]: group for group in service["groups"]}
    assert service["kept"] > 0.95
    assert groups["text"]["is_kept"] is True
    speech = groups["audio -> audio"]
    assert speech["is_kept"] is False
    assert speech["kept"] <= speech["high"] < 0.5
    assert speech["requests"] < 100
    assert set(speech["each"]) == {"ttft", "tpot", "ahead"}
    assert _run(*asked, "--attain", "90%") == 5
    printed = capsys.readouterr()
    assert "assistant, audio -> audio: kept for only" in printed.out
    assert "assistant, audio -> audio: " in printed.err
    # In ten seconds one or two of them come: too few to say anything.
    assert _run("simulate", plan, "--fleet", fleet, "--for", "20s", "--attain", "90%") == 0
    assert "too few to tell" in capsys.readouterr().out


def test_dynamic_routing_asks_executors(
    files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    plan, fleet = files
    asked = ("simulate", plan, "--fleet", fleet, "--for", "60s", "--json")
    assert _run(*asked) == 0
    dealt = _read(capsys)
    assert _run(*asked, "--routing", "dynamic", "--query-ms", "200") == 0
    dynamic = _read(capsys)
    assert dealt["tasks"]["queries"] == 0  # type: ignore[index]
    assert dynamic["tasks"]["queries"] > 0  # type: ignore[index]
    assert dynamic["query_s"] == 0.2
    first = [
        {k["name"]: k["ttft_s"]["p50"] for k in data["classes"]}  # type: ignore[attr-defined]
        for data in (dealt, dynamic)
    ]
    assert all(first[1][name] >= first[0][name] + 0.19 for name in first[0])


@pytest.mark.parametrize(
    "option",
    [
        ("--trace", "poisson:5/s lengths=200x20 n=20 model=chat"),
        ("--fail", "10s assistant-vision-audio-llm-talker-vocoder-0"),
        ("--startup", "1min"),
        ("--then", "10s {plan}"),
    ],
)
def test_options_that_make_no_sense_are_refused_by_name(
    files: tuple[Path, Path], option: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    plan, fleet = files
    name, value = option
    code = _run("simulate", plan, "--fleet", fleet, name, value.format(plan=plan))
    printed = capsys.readouterr()
    assert code == 2
    assert not printed.out
    assert printed.err.startswith(f"error: {name}: ")
    assert len(printed.err.splitlines()) == 1


def test_query_time_and_routing_are_checked(
    files: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, fleet = files
    asked = ("simulate", plan, "--fleet", fleet)
    assert _run(*asked, "--query-ms", "5") == 2
    assert "--query-ms" in capsys.readouterr().err
    assert _run(*asked, "--routing", "dinamic") == 4
    assert "did you mean dynamic" in capsys.readouterr().err
    chat = tmp_path / "chat.yaml"
    chat.write_text("services:\n" + CHAT + "\n" + FLEET[FLEET.index("pool:") :])
    assert _run("simulate", chat, "--routing", "static") == 2
    assert "--routing: this is for any-to-any services" in capsys.readouterr().err
    alone = _write(tmp_path, "alone.yaml", chat="")
    assert _run("simulate", alone, "--policy", "random") == 2
    assert "--policy: this is for plain services" in capsys.readouterr().err


def test_python_simulates_any_to_any_plans_as_all_others(files: tuple[Path, Path]) -> None:
    plan = Fleet.load(files[1]).load_plan(files[0])
    with pytest.raises(UsageError, match="any-to-any"):
        plan.simulate("azure-conv@1/s for=1min")
    report = plan.simulate(duration_s=30.0)
    assert set(report.kept) == {"assistant", "chat"}
    assert "audio -&gt; audio" in report._repr_html_()
    assert "vocoder" in str(report)


def _beside(plan: Plan) -> Plan:
    """The plan with the vocoder moved to an executor whose other parts have no room to run."""
    (executor,) = plan.executor_instances
    (node,) = executor.nodes
    cramped = executor.model_copy(
        update={
            "id": "cramped",
            "role": "assistant/vision+llm+talker+vocoder/serve",
            "nodes": (node.model_copy(update={"node_type": "L4:1"}),),
        }
    )
    paths: list[RequestPath] = []
    for path in plan.paths:
        steps = []
        for step in path.steps:
            left = tuple(part for part in step.parts if part != "vocoder")
            steps.append(step.model_copy(update={"parts": left}))
            if left != step.parts:
                steps.append(
                    step.model_copy(update={"parts": ("vocoder",), "instances": {"cramped": 1.0}})
                )
        paths.append(path.model_copy(update={"steps": tuple(steps)}))
    return plan.model_copy(update={"instances": (*plan.instances, cramped), "paths": tuple(paths)})


def test_parts_that_nobody_asks_an_executor_for_set_no_limits(files: tuple[Path, Path]) -> None:
    plan = Fleet.load(files[1]).load_plan(files[0])
    problem, catalog = plan.problem, plan.problem.catalog()
    before = simulate_tasks(task_fleet(plan, problem, catalog), requests=100, seed=1)
    fleet = task_fleet(_beside(plan), problem, catalog)
    after = simulate_tasks(fleet, requests=100, seed=1)
    (cramped,) = [executor for executor in fleet.executors if executor.name == "cramped"]
    assert set(cramped.parts) == {"vocoder"}
    assert not any(isinstance(part, TokenPart) for part in cramped.parts.values())
    # Its 39 tokens of KV cache once cut the speech of everybody.
    assert before.cut == after.cut == 0
    spoken = [sum(p.decode_tokens for e in r.executors for p in e.parts) for r in (before, after)]
    assert spoken[0] == spoken[1]
