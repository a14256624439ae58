"""Plans valued by simulation: lengths of requests, and that more machines generate more."""

from __future__ import annotations

from dataclasses import replace
from inspect import signature
from typing import Any

import numpy as np
import pytest

from atoll.catalog.catalog import Catalog
from atoll.plan.plan import Plan
from atoll.plan.problem import Lengths, Settings
from atoll.plan.validate.check import validate
from atoll.prove import rank as ranking
from atoll.prove.rank import Simulated
from atoll.sim import api
from atoll.solve.effort import Measured
from atoll.solve.place import place_solver
from atoll.solve.place.place_service import FlowEffort
from atoll.solve.place.place_solver import solve
from atoll.solve.place.refine import DRAWS
from atoll.workload.lengths import LengthMix
from tests.plan.clusters import problem, service
from tests.reference.helix_events import run as helix_run

CATALOG = Catalog.default()


def mean(rank: Simulated, plan: Plan) -> Measured:
    """What a plan generates on average over the draws by which plans are ranked."""
    return Measured.mean([rank(plan, draw) for draw in range(DRAWS)])


def test_requests_of_one_length_vary_around_it() -> None:
    found = Simulated(problem(), CATALOG).requests(6000)
    assert len(found) == 6000
    assert found.input.mean() == pytest.approx(150.0, rel=0.05)
    assert found.output.mean() == pytest.approx(50.0, rel=0.05)
    assert found.input.min() < 100 < 200 < found.input.max()
    # Long answers belong to long prompts.
    assert np.corrcoef(found.input, found.output)[0, 1] > 0.2


def test_requests_that_vary_are_drawn_as_they_are() -> None:
    mix = LengthMix.lognormal(300.0, 250.0, 80.0, 60.0)
    asked = problem(services=(service(lengths=Lengths.of(mix)),))
    found = Simulated(asked, CATALOG).requests(8000)
    assert found.input.mean() == pytest.approx(300.0, rel=0.05)
    assert (found.input.astype(float) ** 2).mean() == pytest.approx(mix.input_mean_square, rel=0.15)


def test_more_requests_begin_with_the_same() -> None:
    own = Simulated(problem(), CATALOG)
    few, many = own.requests(500), own.requests(5000)
    assert few.input.tolist() == many.input[:500].tolist()
    assert few.output.tolist() == many.output[:500].tolist()
    assert own.requests(500, draw=1).input.tolist() != few.input.tolist()


def test_the_plan_is_the_best_of_those_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    # Long enough for the first answers to end.
    monkeypatch.setattr(ranking, "_WINDOW_S", 60.0)
    monkeypatch.setattr(ranking, "_CALM_S", 60.0)
    monkeypatch.setattr(place_solver, "_LEAST_MEASURED", 12)
    asked = problem()
    told: list[str] = []
    rank = Simulated(asked, CATALOG, told.append)
    made = solve("flow.search", asked, CATALOG, FlowEffort(work=0.1, bounded=False, rank=rank))
    assert validate(made, asked, CATALOG) == []
    assert made.goal == "sustained"
    note, router = made.notes
    assert note.startswith("generates ")
    assert router.startswith("ranked under Atoll's router and under plain round robin")
    assert told
    assert told[-1].startswith(f"simulated {len(told)} plans: best ")
    # One node of four holds few layers; the plan that is chosen generates at least what a simple rule does.
    swarm = solve("swarm", asked, CATALOG, FlowEffort(work=0.1))
    assert mean(rank, made).score >= mean(rank, swarm).score
    assert rank(made) == rank(made)


def test_the_worse_of_two_routers_counts_unless_one_is_named() -> None:
    asked = problem()
    made = solve("swarm", asked, CATALOG, FlowEffort(work=0.1))
    alone = {
        router: Simulated(
            asked.replace(settings={**dict(asked.settings), "router": router}), CATALOG
        )(made)
        for router in ("atoll", "plain")
    }
    assert Simulated(asked, CATALOG)(made).score == min(one.score for one in alone.values())
    assert asked.settings.routers == ("atoll", "plain")
    own = asked.replace(settings={**dict(asked.settings), "engine": "atoll"})
    assert own.settings.routers == ("atoll",)


def test_what_runs_or_is_known_is_among_those_measured() -> None:
    """By analytic value it is none of the best, and no change of a few leads there."""
    odd = {"a": (0, 5), "b": (5, 11), "c": (11, 16), "d": (5, 11)}

    def likes_odd(plan: Plan, _draw: int = 0) -> Measured:
        held = {str(n.host): (n.start, n.end) for one in plan.instances for n in one.nodes}
        return Measured(200.0 if held == odd else 100.0, 1.0, 1.0)

    asked = problem(settings=Settings(router="plain"))
    effort = FlowEffort(work=0.01, bounded=False, rank=likes_odd)
    made = solve("flow.search", asked, CATALOG, effort)
    assert likes_odd(made).tokens_per_s == 100.0
    assert any("ranked under plain round robin" in note for note in made.notes)
    known = solve("flow.search", asked, CATALOG, replace(effort, known=(odd,)))
    assert likes_odd(known).tokens_per_s == 200.0
    running = asked.replace(running=known.instances)
    assert likes_odd(solve("flow.search", running, CATALOG, effort)).tokens_per_s == 200.0


def test_latencies_are_those_of_a_calm_load() -> None:
    asked = problem(settings=Settings(router="plain"))
    rank = Simulated(asked, CATALOG)
    swarm, chain = (
        solve(name, asked, CATALOG, FlowEffort(work=0.1)) for name in ("swarm", "chain")
    )
    first, other = rank(swarm), rank(chain)
    # One that generates far less than another is not looked at.
    assert other.tokens_per_s < 0.9 * first.tokens_per_s
    assert np.isfinite(first.score)
    assert other.score == 0.0
    # Alone it is: then prompts come as it can take them, and wait little.
    alone = Simulated(asked, CATALOG)(chain)
    assert alone.tokens_per_s == other.tokens_per_s
    assert 0.0 < alone.token_s < alone.prompt_s < 10.0


def test_full_load_is_measured_as_long_as_helix_does(monkeypatch: pytest.MonkeyPatch) -> None:
    own, windows = api.simulate, []

    def simulate(
        plan: Plan, asked: Any, catalog: Any, requests: Any, options: Any, **kept: Any
    ) -> Any:
        windows.append((options.feed, options.from_s, options.until_s))
        return own(plan, asked, catalog, requests, options, **kept)

    asked = problem(settings=Settings(router="plain"))
    made = solve("swarm", asked, CATALOG, FlowEffort(work=0.1))
    monkeypatch.setattr(api, "simulate", simulate)
    Simulated(asked, CATALOG)(made)
    # Shorter, plans whose answers take minutes come in another order.
    helix = signature(helix_run).parameters
    assert windows[0] == ("watermark", helix["from_s"].default, helix["until_s"].default)
    assert len(windows) == 2
