"""Compiling ahead of time: all of it, once, and nothing else is compiled when it is used."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.cli.main import run
from atoll.plan.files.fleet_file import load_fleet
from atoll.prove import warm as warming
from atoll.sim.tasks.from_plan import simulate_services
from atoll.solve.place.from_problem import flow_instance
from atoll.solve.place.search.flow_search import search
from atoll.solve.place.sustained.sustained import best_flows, evaluator, site_of
from atoll.solve.registry import solve
from tests.solve.graph.fleets import fleet as graph_fleet
from tests.solve.graph.fleets import seeing

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
# Small, yet all that is compiled for renting has work to do.
FLEET = """
services:
  code: {model: gpt-oss-20b, ttft: 1500ms, tpot: 100ms, rate: 6/s, lengths: azure-code}
  small: {model: llama-3.1-8b, ttft: 800ms, tpot: 50ms, rate: 8/s, lengths: 512x128}
pool:
  cloud: {regions: [aws/us-east-2], gpus: [L4, L40S], available: 4}
settings: {max_nodes_per_instance: 2}
"""


def place(cluster: str) -> None:
    """Place the service of a cluster by all objectives there are, with few evaluations."""
    problem = load_fleet(cluster)
    instance = flow_instance(problem, problem.catalog(), problem.services[0].name)
    best = search(instance, evaluations=100).placement
    assert evaluator(site_of(instance))(best.start, best.end) > 0.0
    assert best_flows(instance, best).tokens_per_s > 0.0


def see() -> None:
    """Simulate an any-to-any service."""
    problem = graph_fleet({"see": seeing(rate="1/s")})
    found = simulate_services(
        solve(problem), problem, problem.catalog(), ["see"], requests=20, seed=1
    )
    assert found.executors


def test_everything_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, int, str]] = []
    known: set[int] = set()
    one = warming.entries()[0]

    class Recorded(type(one)):  # type: ignore[misc]
        @property
        def is_compiled(self) -> bool:
            return id(self) in known

        def compile(self) -> None:
            known.add(id(self))

    recorded = [Recorded(e.dispatcher, e.arguments, e.what) for e in warming.entries()]
    monkeypatch.setattr(warming, "entries", lambda *_: recorded)
    assert not warming.is_warm()
    assert warming.warm(lambda *said: told.append(said)) == len(recorded)
    assert warming.is_warm()
    assert warming.warm() == 0
    assert [done for done, _, _ in told] == list(range(len(recorded)))
    whats = list(dict.fromkeys(what for _, _, what in told))
    assert whats == [
        "capacities of nodes",
        "the search for templates",
        "the allocator",
        "the fast planner",
        "the simulator",
        "the simulator of tasks",
        "the search for placements",
        "the search for placements that last",
    ]


def test_entries_are_called_with_the_types_they_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another type would compile a second version, which `warm` does not know."""
    monkeypatch.setenv("ATOLL_CACHE", str(tmp_path))
    fleet, plan = str(tmp_path / "fleet.yaml"), str(tmp_path / "plan.json")
    Path(fleet).write_text(FLEET)
    assert run(["plan", fleet, "--capacity-only", "-o", plan]) == 0
    fast = ["--solver", "fast", "-o", str(tmp_path / "fast.json")]
    assert run(["plan", fleet, "--capacity-only", *fast]) == 0
    assert run(["simulate", plan, "--fleet", fleet, "--for", "5s"]) == 0
    place(str(EXAMPLES / "cluster-mixed.yaml"))
    see()
    used = [one for one in warming.entries() if one.dispatcher.overloads]
    assert {one.what for one in used} == {one.what for one in warming.entries()}
    for one in used:
        assert set(one.dispatcher.overloads) == {one.types}, one.dispatcher.py_func.__qualname__
