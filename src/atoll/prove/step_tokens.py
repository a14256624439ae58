"""How many tokens a step takes where prompts and decoding share it: found by simulation, per service.

Everyone who decodes waits for the prompts in the same step, once in every stage: a pipeline of five slow
machines with 2,048 tokens in a step takes seconds per token, with 128 it keeps a promise of 300 ms. Short
steps read the weights more often, so the prompts wait longer and nodes carry less, as the flows of the plan
then say. It carries what was found to its engines.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from atoll.core.ids import Phase
from atoll.engines.limits import EngineLaunch
from atoll.plan.capacities import tokens_per_unit
from atoll.plan.validate.check import goal_value
from atoll.plan.validate.validate_cluster import node_limits
from atoll.prove.kept import find_worst, is_large, simulate_kept
from atoll.solve.assembly import assemble

if TYPE_CHECKING:
    from atoll.catalog.catalog import Catalog
    from atoll.plan.plan import Plan
    from atoll.plan.problem import Problem
    from atoll.solve.deadline import Deadline

_SIZES = (1024, 512, 256, 128, 64)
_FEW_SIZES = (512, 256)
"""The same for a large cluster, whose simulations take seconds."""
_TOKEN_GRID = 16
"""Tokens per step are rounded to multiples of this."""
_SEED = 1
_REQUESTS = 2_000
_TARGET_MARGIN = 0.01
"""Margin over the target in one simulation above which a service is left as it is."""


def fit_steps(
    plan: Plan, problem: Problem, catalog: Catalog, deadline: Deadline | None = None
) -> Plan:
    """Return the plan with the tokens per step that keep most promises, for services that keep too few.

    Services whose fleet file sets `max_num_batched_tokens`, or whose phases never share a node, stay as they
    are; so do those that keep enough with the engine's own.
    """
    left_open = {
        service.name: service.target
        for service in problem.services
        if service.engine_limits.max_num_batched_tokens is None
        and any(one.service == service.name and one.phase is Phase.BOTH for one in plan.instances)
    }
    if not left_open:
        return plan
    search = _StepSearch(plan, problem, catalog, deadline)
    first = search.simulate({})
    short = {
        n for n, target in left_open.items() if n in first and first[n] < target + _TARGET_MARGIN
    }
    if not short:
        return plan
    search.best = {name: (first[name], None) for name in sorted(short)}
    large = is_large(problem)
    for tokens in _FEW_SIZES if large else _SIZES:
        search.take(dict.fromkeys(search.best, tokens))
    for factor in () if large else (1.5, 0.75):
        search.take(
            {n: round(t * factor / _TOKEN_GRID) * _TOKEN_GRID for n, t in search.chosen.items()},
            search.chosen,
        )
    chosen = search.chosen
    told = (f"{name} takes {tokens} tokens in a step" for name, tokens in chosen.items())
    fitted = carry_less(with_step_tokens(plan, chosen), problem, catalog)
    return fitted.model_copy(update={"notes": (*plan.notes, *told)})


def carry_less(plan: Plan, problem: Problem, catalog: Catalog) -> Plan:
    """Return the plan with the flows that its nodes carry in steps of so many tokens."""
    started = problem.started_as(plan.engines)
    instances = []
    for one in plan.instances:
        limits = node_limits(one, started, catalog)
        tokens = tokens_per_unit(problem.service(one.service), one.phase)
        carried = dict.fromkeys(limits, 0.0)
        for flow in one.flows:
            if flow.dst in carried:
                carried[flow.dst] += flow.per_s * tokens
        share = min([1.0, *(limits[node] / flow for node, flow in carried.items() if flow > 0.0)])
        flows = tuple(f.model_copy(update={"per_s": f.per_s * share}) for f in one.flows)
        update = {"flows": flows, "throughput_per_s": one.throughput_per_s * share}
        instances.append(one.model_copy(update=update) if share < 1.0 else one)
    if tuple(instances) == plan.instances:
        return plan
    value = goal_value(plan.model_copy(update={"instances": tuple(instances)}), problem)
    lower = assemble(
        problem,
        instances,
        status=plan.status,
        solver=plan.solver,
        bound=plan.bound,
        reasons=plan.reasons,
        cut_short=plan.cut_short,
        goal=plan.goal,
        value=value,
        catalog=catalog,
    )
    return lower.model_copy(update={"engines": plan.engines, "problem_hash": plan.problem_hash})


@dataclass
class _StepSearch:
    """The best sizes so far: what is kept with them, None for the engine's own."""

    plan: Plan
    problem: Problem
    catalog: Catalog
    deadline: Deadline | None
    best: dict[str, tuple[float, int | None]] = field(default_factory=dict)

    @property
    def chosen(self) -> dict[str, int]:
        """The tokens of services that keep more with them than with the engine's own."""
        return {name: tokens for name, (_, tokens) in self.best.items() if tokens is not None}

    def simulate(self, tokens: dict[str, int]) -> dict[str, float]:
        """Return what every service keeps with these sizes."""
        tried = with_step_tokens(self.plan, tokens)
        found = simulate_kept(
            tried, self.problem, self.catalog, _SEED, self.deadline, requests=_REQUESTS
        )
        services = {name: self.problem.service(name) for name in found}
        return {name: find_worst(one, services[name].target).both for name, one in found.items()}

    def take(self, tokens: dict[str, int], beside: dict[str, int] | None = None) -> None:
        """Try these sizes, all in one simulation, and keep those that are better."""
        if not tokens:
            return
        found = self.simulate((beside or {}) | tokens)
        for name, count in tokens.items():
            if found[name] > self.best[name][0]:
                self.best[name] = found[name], count


def with_step_tokens(plan: Plan, tokens: dict[str, int]) -> Plan:
    """Return the plan with so many tokens in a step of a service's engines."""
    engines = dict(plan.engines)
    for name, count in tokens.items():
        own = engines.get(name, EngineLaunch())
        sequences = own.max_num_seqs
        engines[name] = own.model_copy(
            update={
                "max_num_batched_tokens": count,
                "max_num_seqs": None if sequences is None else min(sequences, count),
            }
        )
    return plan.model_copy(update={"engines": engines})
