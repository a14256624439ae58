"""What plans are said to draw, against what the simulator, which knows nothing of it, does step by step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atoll.api.fleet_plan import FleetPlan
from atoll.core.ids import Phase
from atoll.perf.batch import Batch
from atoll.perf.energy import dynamic_joules
from atoll.perf.step import analytic
from atoll.plan.footprint import PowerGrid
from atoll.plan.power import draw_of
from atoll.sim.sim_result import SimReport
from atoll.solve.registry import solve
from tests.solve.test_weighted import CATALOG, problem


def test_watts_are_those_of_simulated_steps() -> None:
    asked = problem(rate=9.0, grid=PowerGrid())
    made = solve(asked)
    draw = draw_of(made, asked, CATALOG)
    report = FleetPlan.of(made, asked).simulate()
    assert isinstance(report, SimReport)
    instances = {instance.id: instance for instance in made.instances}
    assert {node.instance for node in report.nodes} == set(instances)
    for node in report.nodes:
        instance = instances[node.instance]
        assert instance.phase is Phase.BOTH
        own, service = draw.instances[instance.id], asked.service(instance.service)
        assert own.busy == pytest.approx(node.utilisation, abs=0.1)
        spec = CATALOG.model(service.model).llm
        model = analytic(spec, CATALOG.node(node.node_type), engine=asked.engine_of(service))
        # The mean step of the run: sequences that decode, and its part of all prompts.
        prompts = node.prompt_tokens / node.steps / service.lengths.input_mean
        batch = Batch.decode(node.mean_sequences, service.lengths.mix().decode_context)
        batch = replace(
            batch, prefill_tokens=prompts * service.lengths.input_mean, prefill_sequences=prompts
        )
        joules = dynamic_joules(model, batch, 0, spec.layers)
        per_s = node.steps / report.clock_s
        assert own.dynamic_w == pytest.approx(per_s * joules, rel=0.15)
