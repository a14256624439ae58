"""`atoll simulate` and the files it writes."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from atoll.cli.main import run
from atoll.sim.api import simulate
from atoll.sim.demand import demand_of
from atoll.sim.files import write_requests
from atoll.sim.options import SimOptions
from atoll.workload.requests import collect
from tests.sim.builders import CATALOG, poisson, problem, service, whole

OWN = problem(service(), service("other"))
PLAN = whole(OWN)


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


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--policy", "best"], "unknown policy"),
        (["--batching", "huge"], "unknown batching"),
        (["--fail", "60s"], "INSTANCE/NODE"),
        (["--fail", "60s nobody"], "unknown machine of the plan"),
        (["--then", "60s"], "PLAN.json"),
        (["--trace", "poisson:1/s lengths=10x10 n=5 model=x"], "unknown model of the workload"),
        (["--requests", "out.txt"], ".csv or .parquet"),
        (["--scheduling", "sometimes"], "unknown scheduling"),
        (["--kv-cache-dtype", "fp7"], "did you mean fp8"),
        (["--gpu-memory-utilization", "150%"], "share"),
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
