"""`atoll operate --simulate`: one command says what a fleet would have cost."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from atoll.cli.operate import OperateSettings, operate
from atoll.control.virtual import fluid_calibration as calibrate
from atoll.control.virtual.fluid_calibration import CalibratedFleet
from atoll.control.virtual.operation import read_failures
from atoll.core.errors import AtollError, UsageError
from atoll.plan.problem import Problem
from tests.control.virtual import toys


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OperateSettings:
    """A fleet whose templates are given: nothing is simulated event by event."""

    def give(asked: Problem, _catalog: object, **_more: object) -> CalibratedFleet:
        return replace(toys.fleet(asked), problem=asked)

    monkeypatch.setattr(calibrate, "calibrate_fleet", give)
    path = tmp_path / "fleet.json"
    path.write_text(toys.problem().to_json())
    return OperateSettings(
        fleet=str(path),
        simulate="generated",
        days=0.05,
        prices="generated",
        failures="0.01/h",
        seed=2,
        as_json=True,
    )


def test_all_contenders_are_shown_with_what_they_cost(
    options: OperateSettings, capsys: pytest.CaptureFixture[str]
) -> None:
    operate(options)
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows][:2] == ["atoll", "static-peak"]
    atoll, peak = rows[:2]
    assert peak["atoll_saves_usd"] == pytest.approx(peak["usd"] - atoll["usd"])
    assert atoll["usd_per_day"] == pytest.approx(atoll["usd"] / 0.05)
    operate(options)
    assert json.loads(capsys.readouterr().out) == rows


def test_a_table_and_a_page_for_people(
    options: OperateSettings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "week.html"
    operate(options.model_copy(update={"as_json": False, "output": page}))
    said = capsys.readouterr()
    assert "reactive" in said.out
    assert f"wrote {page}" in said.err
    text = page.read_text()
    assert "dollars per hour" in text
    assert "chat, requests/s" in text
    assert text.count("<svg") >= 5
    assert "src=" not in text


def test_a_trace_and_prices_from_files(
    options: OperateSettings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "last-month.csv"
    rows = "\n".join(f"{0.5 * k},100,10" for k in range(3600))
    trace.write_text(f"arrival_s,input_tokens,output_tokens\n{rows}\n")
    prices = tmp_path / "prices.csv"
    prices.write_text(
        "time,region,node_type,market,price,available\n600,us-east,L4:1,spot,0.1,50\n"
    )
    changes = {"simulate": str(trace), "days": None, "prices": str(prices)}
    operate(options.model_copy(update=changes))
    rows_shown = json.loads(capsys.readouterr().out)
    assert rows_shown[0]["kept_share"] > 0.9
    assert rows_shown[0]["usd_per_day"] == pytest.approx(48.0 * rows_shown[0]["usd"])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"days": -1.0}, "-1 days"),
        ({"failures": "often"}, "often"),
        ({"failures": "1e9/h"}, "failures an hour"),
        ({"prices": "nowhere.csv"}, "nowhere.csv"),
        ({"simulate": "nowhere.csv"}, "nowhere.csv"),
        ({"output": Path("report.pdf")}, "report.pdf"),
    ],
)
def test_what_cannot_be_is_said_in_a_line(
    options: OperateSettings, changes: dict[str, object], says: str
) -> None:
    with pytest.raises(AtollError, match=says):
        operate(options.model_copy(update=changes))


def test_failures_are_per_hour() -> None:
    assert read_failures("24/day").failures_per_h == pytest.approx(1.0)
    assert read_failures("0.5").failures_per_h == 0.5
    assert read_failures(None).failures_per_h > 0.0
    with pytest.raises(UsageError):
        read_failures("-1")
