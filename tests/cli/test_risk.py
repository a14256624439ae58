"""What `atoll plan` is told about risk, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.cli import main as cli
from atoll.cli.risk import parse_risk, parse_robust
from atoll.core.errors import AtollError, InputError
from atoll.plan.robustness import RiskModel
from tests.prove.test_rent_promises import PROBLEM

ROOT = Path(__file__).parents[2]


def test_a_share_or_the_whole_curve() -> None:
    assert parse_robust(False, None) is None
    assert parse_robust(False, "95%") == parse_robust(True, "0.95") == 0.95
    assert parse_robust(True, None) == "curve"


@pytest.mark.parametrize("text", ["fleet.yaml", "0", "100%", "1", "-5%", "95 per cent", ""])
def test_what_is_no_share_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="share of scenarios"):
        parse_robust(True, text)


def test_risk_is_changed_name_by_name() -> None:
    base = PROBLEM.replace(risk=RiskModel(demand_correlation=0.9))
    found = parse_risk(["demand=30%", "demand.chat=0.5", "spot_loss=10%", "performance=off"], base)
    assert found == RiskModel(
        demand_sd=0.3,
        demand_sd_of={"chat": 0.5},
        demand_correlation=0.9,
        spot_loss=0.1,
        performance=False,
    )
    assert parse_risk([], base) is None


@pytest.mark.parametrize(
    "text", ["demand", "demnd=3%", "demand=much", "demand.chta=3%", "performance=maybe", "=1"]
)
def test_what_is_no_risk_is_refused(text: str) -> None:
    with pytest.raises(AtollError):
        parse_risk([text], PROBLEM)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["examples/cluster-mixed.yaml", "--certainty", "95%"], "fixed cluster"),
        (["examples/any-to-any.yaml", "--robust"], "classes of requests"),
        (["examples/quickstart.yaml", "--risk", "demand=3%"], "without --robust"),
        (["examples/quickstart.yaml", "--unserved-usd", "1"], "without --robust"),
        (["examples/quickstart.yaml", "--robust", "--capacity-only"], "--capacity-only"),
        (["examples/quickstart.yaml", "--robust", "--solver", "cauchy"], "--solver"),
        (["examples/quickstart.yaml", "--certainty", "2"], "share of scenarios"),
    ],
)
def test_what_does_not_go_together_is_said_in_a_line(
    args: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    assert cli.run(["plan", *args]) != 0
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error
