"""`atoll simulate` and the files it writes."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from atoll.cli.main import run
from atoll.sim.api import simulate
from atoll.sim.problem_demand import demand_of
from atoll.sim.sim_options import SimOptions
from atoll.sim.sim_result import write_requests
from atoll.solve.assembly import assemble
from atoll.workload.requests import collect
from tests.sim.builders import CATALOG, poisson, problem, service, whole

OWN = problem(service(), service("other"))
PLAN = assemble(OWN, whole(OWN).instances, status="feasible", solver="test")


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    plan, fleet = tmp_path / "plan.json", tmp_path / "problem.json"
    plan.write_text(PLAN.to_json())
    fleet.write_text(OWN.to_json())
    return plan, fleet


def _run(*args: object) -> int:
    return run([str(arg) for arg in args])


def test_a_plan_is_simulated_under_its_own_demand(
    files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    plan, fleet = files
    assert _run("simulate", plan, "--fleet", fleet, "--for", "60s", "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert [own["name"] for own in data["services"]] == ["m", "other"]
    for own in data["services"]:
        # One request a second each.
        assert 30 <= own["requests"] <= 100
        assert own["attainment"] == 1.0
    assert data["usd_per_hour"] == pytest.approx(PLAN.usd_per_hour)
    assert len(data["nodes"]) == 2


def test_tables_files_and_report(
    files: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, fleet = files
    rows, page = tmp_path / "requests.csv", tmp_path / "report.html"
    spec = "poisson:5/s lengths=200x20 n=200 model=m"
    code = _run(
        "simulate", plan, "--fleet", fleet, "--trace", spec, "--requests", rows, "--report", page
    )
    assert code == 0
    printed = capsys.readouterr()
    assert "200 requests" in printed.out
    assert "promised" in printed.out
    with rows.open() as file:
        table = list(csv.DictReader(file))
    assert len(table) == 200
    assert {row["service"] for row in table} == {"m"}
    assert all(float(row["e2e_s"]) >= float(row["ttft_s"]) > 0.0 for row in table)
    text = page.read_text()
    assert text.startswith("<!doctype html>")
    assert "<script" not in text
    assert "http" not in text.replace("http-equiv", "")
    assert text.count("<polyline") >= 8


def test_a_failure_and_a_new_plan_are_told_in_words(
    files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    plan, fleet = files
    ran = _run(
        "simulate",
        plan,
        "--fleet",
        fleet,
        "--trace",
        "poisson:5/s lengths=200x100 n=100 model=m",
        "--fail",
        "5s-30s m-both-0/n0",
        "--then",
        f"60s {plan}",
        "--json",
    )
    assert ran == 0
    data = json.loads(capsys.readouterr().out)
    assert data["retries"] > 0
    assert data["finished"] == 100


def test_a_trace_without_models_goes_to_all_services_by_their_share(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    busy = service().model_copy(update={"rate_per_s": 3.0})
    own = problem(busy, service("other"))
    made = assemble(own, whole(own, copies=3).instances, status="feasible", solver="test")
    plan, fleet = tmp_path / "plan.json", tmp_path / "problem.json"
    plan.write_text(made.to_json())
    fleet.write_text(own.to_json())
    rows = "".join(f"{i / 10},50,5\n" for i in range(400))
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,input_tokens,output_tokens\n" + rows)
    asked = ("simulate", plan, "--fleet", fleet, "--trace", trace, "--json")
    assert _run(*asked) == 0
    shared = {s["name"]: s["requests"] for s in json.loads(capsys.readouterr().out)["services"]}
    assert sum(shared.values()) == 400
    # Three of four, give or take four standard deviations.
    assert abs(shared["m"] - 300) < 4 * (400 * 0.75 * 0.25) ** 0.5
    assert _run(*asked, "--service", "other") == 0
    one = {s["name"]: s["requests"] for s in json.loads(capsys.readouterr().out)["services"]}
    assert one == {"m": 0, "other": 400}


def test_a_trace_of_other_models_goes_where_it_is_sent(
    files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    plan, fleet = files
    trace = "poisson:5/s lengths=100x10 n=50 model=someone-elses"
    asked = ("simulate", plan, "--fleet", fleet, "--trace", trace, "--json")
    assert _run(*asked) == 4
    capsys.readouterr()
    assert _run(*asked, "--service", "other") == 0
    found = {s["name"]: s["finished"] for s in json.loads(capsys.readouterr().out)["services"]}
    assert found == {"m": 0, "other": 50}


def test_an_invalid_plan_is_refused(
    files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    plan, fleet = files
    plan.write_text(PLAN.model_copy(update={"usd_per_hour": 0.5}).to_json())
    assert _run("simulate", plan, "--fleet", fleet, "--for", "5s") == 7
    printed = capsys.readouterr()
    assert "is not valid: cost" in printed.err
    assert not printed.out


def test_a_plan_for_another_fleet_is_simulated_with_a_warning(
    files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    plan, fleet = files
    # Forty times the demand: the plan would be invalid there, and how it fares is worth knowing.
    more = service().model_copy(update={"rate_per_s": 40.0})
    fleet.write_text(problem(more, service("other")).to_json())
    assert _run("simulate", plan, "--fleet", fleet, "--for", "5s") == 0
    warned = capsys.readouterr().err
    assert "was made for another fleet" in warned
    assert "would not be valid" in warned
    # Without a service of that name it cannot stand at all.
    fleet.write_text(problem(service("someone")).to_json())
    assert _run("simulate", plan, "--fleet", fleet, "--for", "5s") == 7


def test_the_first_line_says_which_promises_are_kept(
    files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    plan, fleet = files
    crowd = "poisson:500/s lengths=2000x200 n=500"
    asked = ("simulate", plan, "--fleet", fleet, "--trace", crowd, "--service", "m")
    assert _run(*asked) == 0
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith("m keeps its promises for only ")
    assert "(95% promised): TTFT " in first
    assert second.startswith("500 requests in ")


def test_flags_are_checked_before_a_fleet_is_planned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = tmp_path / "problem.json"
    fleet.write_text(OWN.to_json())

    def plan(*_: object, **__: object) -> None:
        raise AssertionError("planning began")

    monkeypatch.setattr("atoll.api.fleet.Fleet.plan", plan)
    for flags in (
        ["--for", "soon"],
        ["--startup", "soon"],
        ["--until", "0s"],
        ["--fail", "soon m-both-0"],
        ["--then", "5s missing.json"],
        ["--trace", "nothing-known"],
        ["--service", "m"],
        ["--trace", "azure-conv@1/s", "--service", "nobody"],
        ["--requests", "nowhere/out.csv"],
        ["--report", str(fleet.with_suffix(".pdf"))],
    ):
        assert _run("simulate", fleet, *flags) in (2, 3, 4), flags
        assert "planning began" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--batching", "huge"], "unknown batching"),
        (["--fail", "60s"], "INSTANCE/NODE"),
        (["--fail", "60s nobody"], "unknown machine of the plan"),
        (["--then", "60s"], "PLAN.json"),
        (["--requests", "out.txt"], ".csv or .parquet"),
        (["--scheduling", "sometimes"], "unknown scheduling"),
        (["--max-num-seqs", "64", "--max-num-batched-tokens", "32"], "no room for 64 sequences"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    files: tuple[Path, Path], args: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, fleet = files
    assert _run("simulate", plan, "--fleet", fleet, "--for", "5s", *args) != 0
    error = capsys.readouterr().err.strip()
    assert said in error
    assert "\n" not in error


def test_a_plan_alone_does_not_say_what_was_promised(
    files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run("simulate", files[0]) == 2
    assert "--fleet" in capsys.readouterr().err


def test_a_share_that_is_asked_for_must_be_attained(
    files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    plan, fleet = files
    crowd = "poisson:500/s lengths=2000x200 n=500 model=m"
    args = ("simulate", plan, "--fleet", fleet, "--trace", crowd, "--attain", "99%")
    assert _run(*args) == 5
    assert "kept their promises" in capsys.readouterr().err


def test_engines_with_other_limits_than_the_fleet_file_sets(
    files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    plan, fleet = files
    asked = ("simulate", plan, "--fleet", fleet, "--for", "60s", "--json")

    def simulated(*more: str) -> dict[str, float]:
        assert _run(*asked, *more) == 0
        own = json.loads(capsys.readouterr().out)
        nodes = own["nodes"]
        return {
            "batch": max(node["mean_sequences"] for node in nodes),
            "tpot": own["services"][0]["tpot_s"]["mean"],
            "kv": nodes[0]["kv_tokens"],
        }

    plain = simulated()
    assert simulated("--max-num-seqs", "1", "--max-num-batched-tokens", "256")["batch"] <= 1.0
    assert simulated("--scheduling", "sync")["tpot"] > plain["tpot"]
    assert simulated("--kv-cache-dtype", "fp8")["kv"] == pytest.approx(2 * plain["kv"], rel=1e-3)
    assert simulated("--gpu-memory-utilization", "50%")["kv"] < 0.6 * plain["kv"]
    assert simulated("--prefix-caching", "--kv-cache-dtype", "auto") == plain


def test_csv_and_parquet_hold_the_same(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    found = simulate(whole(problem()), problem(), CATALOG, poisson(50, 5.0), SimOptions())
    one, two = tmp_path / "a.csv", tmp_path / "a.parquet"
    write_requests(found, one)
    write_requests(found, two)
    table = parquet.read_table(two)
    assert table.column_names == list(found.columns())
    with one.open() as file:
        read = [float(row["ttft_s"]) for row in csv.DictReader(file)]
    assert read == pytest.approx(table["ttft_s"].to_pylist(), abs=1e-6)


def test_demand_follows_rates_and_lengths() -> None:
    work = collect(demand_of(OWN, 2000.0), 0)
    assert len(work) == pytest.approx(4000, rel=0.1)
    assert set(work.models) == {"m", "other"}
    assert work.input.mean() == pytest.approx(512, rel=0.05)
    assert work.output.mean() == pytest.approx(64, rel=0.05)
