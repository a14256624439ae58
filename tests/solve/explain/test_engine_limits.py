"""What engines' limits cost, and which engine lifts them; prices are checked by planning again."""

from __future__ import annotations

from functools import cache

import pytest

from atoll.core.ids import Phase
from atoll.core.units import format_price
from atoll.engines.engine import EngineLayout, Irregularity
from atoll.engines.table import list_planned
from atoll.plan.files.fleet_file import parse_fleet
from atoll.plan.plan import Plan
from atoll.report.explanation_report import list_engines
from atoll.solve.effort import Effort
from atoll.solve.explain.explain_plan import explain_problem
from atoll.solve.explain.plan_explanation import Explanation
from atoll.solve.plan_request import PlanRequest
from atoll.solve.registry import solve

FLEET = """\
services:
  chat: {{model: llama-3.1-8b, ttft: 2s, tpot: 100ms, rate: {rate}/s, lengths: 512x128, phases: together}}
pool:
  offers:
    - {{region: here, node_type: {old}, available: 4, whole: true, usd_per_hour: 0.30}}
    - {{region: here, node_type: L4:1, available: 4, usd_per_hour: 0.80}}
settings: {{engines: [{engines}], max_nodes_per_instance: 2}}
"""
EFFORT = Effort(cached=False)


@cache
def explained(old: str, engines: str, rate: float = 0.5) -> Explanation:
    request = PlanRequest(effort=EFFORT, deadline_s=120.0)
    text = FLEET.format(old=old, engines=engines, rate=rate)
    return explain_problem(parse_fleet(text), request=request)


def planned(old: str, engines: str, rate: float = 0.5) -> Plan:
    problem = parse_fleet(FLEET.format(old=old, engines=engines, rate=rate))
    return solve(problem, PlanRequest(effort=EFFORT))


def line(told: Explanation, *words: str) -> str:
    (found,) = [each for each in list_engines(told) if all(word in each for word in words)]
    return found


def test_what_only_one_engine_runs_is_named_with_both_prices() -> None:
    told = explained("V100-32:1", "vllm, atoll")
    now, without = planned("V100-32:1", "vllm, atoll"), planned("V100-32:1", "vllm")
    assert {one.engine for one in now.instances} == {"atoll"}
    assert now.usd_per_hour < without.usd_per_hour
    assert line(told, "except atoll") == (
        "no engine allowed here runs an instance on V100-32 except atoll; "
        f"with it {format_price(now.usd_per_hour)}, without {format_price(without.usd_per_hour)}"
    )
    # Nothing depends on the other one.
    assert line(told, "without vllm") == f"without vllm: {format_price(now.usd_per_hour)}"


def test_an_engine_that_is_not_allowed_is_offered() -> None:
    told = explained("V100-32:1", "vllm")
    now, with_it = planned("V100-32:1", "vllm"), planned("V100-32:1", "vllm, atoll")
    assert line(told, "atoll runs", "none of the others") == (
        "atoll runs an instance on V100-32, which none of the others does; "
        f"with it {format_price(with_it.usd_per_hour)}, without {format_price(now.usd_per_hour)}"
    )
    (cost,) = [cost for cost in told.engines if cost.engine == "atoll"]
    (limit,) = cost.limits
    assert (limit.missing_in, limit.run_by) == (("vllm",), ("atoll", "llamacpp"))
    assert set(limit.instances) == {one.id for one in with_it.instances}


def test_of_any_layout_it_says_what_no_engine_runs_together() -> None:
    # Two copies on a machine carry what two machines do that split layers.
    told = explained("V100-32:2", "vllm, atoll, sglang", 12.7)
    free = line(told, "any layout")
    assert "an instance on V100-32, which only atoll and llamacpp run" in free
    assert (
        "several copies of the layers on the GPUs of a node, which only vllm and sglang run" in free
    )
    free_plan = planned("V100-32:2", "free", 12.7)
    assert free.startswith(
        f"any layout, run by none of these: {format_price(free_plan.usd_per_hour)}; it has "
    )


def test_limits_say_whether_a_layout_runs() -> None:
    for irregular in ((), tuple(Irregularity), (Irregularity.OVERLAP,)):
        for nodes in (1, 2):
            phase = Phase.DECODE if nodes == 2 else Phase.BOTH
            layout = EngineLayout("i", nodes, 1, 1, (16,) * nodes, irregular, phase)
            for engine in list_planned():
                limits = engine.list_limits(layout)
                if limits:
                    with pytest.raises(Exception, match="i "):
                        engine.check_layout(layout)
                else:
                    engine.check_layout(layout)
                assert engine.runs(layout) == (not limits)
