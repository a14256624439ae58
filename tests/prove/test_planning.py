"""What holds of every plan, whoever found it."""

from __future__ import annotations

import pytest

from atoll.plan.plan import KeptPromise
from atoll.prove import planning
from atoll.solve.plan_request import PlanRequest
from tests.plan.builders import small


@pytest.mark.parametrize(("kept", "status"), [(0.97, "optimal"), (0.007, "feasible")])
def test_a_plan_that_misses_a_promise_is_not_called_optimal(
    kept: float, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    promise = KeptPromise(
        service="chat", target=0.95, kept=kept, low=kept, high=kept, kept_ttft=1.0, kept_tpot=kept
    )
    problem, known = small()
    found = known.model_copy(update={"status": "optimal", "promises": (promise,)})
    monkeypatch.setattr(planning, "_find", lambda _problem, _request: found)
    made = planning.plan(problem, PlanRequest(error_bars=False))
    assert made.status == status
    assert made.promises == found.promises
