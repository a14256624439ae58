"""The joint problem by exchange: which few pairs are active, in which configuration; routing follows.

Rent dominates, so few pairs are active. The state is that set; its cost is that of routing all types to it
(`exchange_routing`). One step leaves out at most one member and takes in one offer or two
(`exchange_steps`). It begins with nothing, then with offers that can serve the hardest type (`anchors`),
and then with the best answer of which members are left out that are drawn. Work is counted, not timed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from atoll.core.compiling import entry, lean_part
from atoll.core.rng import stream
from atoll.solve.joint.joint_check import violations
from atoll.solve.joint.joint_problem import JointAnswer, JointProblem, cost_of
from atoll.solve.joint.joint_tables import TABLES_TYPE, JointTables, answer_of, tables_of
from research.joint.exchange.anchors import pair_up, scout
from research.joint.exchange.estimates import (
    BY_MODEL,
    BY_PAIR,
    SHORTLIST_TYPE,
    Shortlist,
    shortlist_of,
)
from research.joint.exchange.exchange_offers import OFFERS_TYPE, Offers, list_offers, offers_of
from research.joint.exchange.exchange_routing import (
    SELECTION_TYPE,
    WORKSPACE_TYPE,
    Selection,
    Workspace,
    duplicate,
    selection_of,
    workspace_of,
)
from research.joint.exchange.exchange_steps import (
    SEARCH_TYPE,
    Search,
    deepen,
    descend,
    draw,
    is_spent,
    leave_out,
    search_of,
    shake,
    take_in,
)

COMPILED_AS = "the choice of models"
EFFORT = 500_000
"""Ways and offers that may be looked at."""
KICKS = 30
"""Times that members of the best answer are left out."""
TRIES = 8
"""Searches more where demand is left."""
_SERVED = 1e-9


def exchange(
    problem: JointProblem, seed: int = 0, *, effort: int = EFFORT, tries: int = TRIES
) -> JointAnswer:
    """Return the best answer found; `seed` is that of the members drawn to be left out.

    Where demand is left unserved, the search is led elsewhere so many times: by dearer GPUs, other penalties
    and a larger budget, drawn. What it finds counts if it is feasible at the true ones, and cheaper.
    """
    best = _search(problem, seed, effort)
    if best.unmet.max() <= _SERVED:
        return best
    least, draw = cost_of(problem, best).total, stream(seed, "choice", "exchange", "tries")
    for _ in range(tries):
        elsewhere = replace(
            problem,
            gpu_usd=problem.gpu_usd * draw.uniform(1.0, 1.25, len(problem.gpu_usd)),
            unmet_usd=problem.unmet_usd * draw.uniform(0.7, 3.0, len(problem.rate)),
            budget=problem.budget * float(draw.uniform(1.0, 1.2)),
        )
        other = _search(elsewhere, seed, effort)
        usd = cost_of(problem, other).total
        if usd < least and not violations(problem, other):
            best, least = other, usd
    return best


def exchange_at_prices(problem: JointProblem, best: JointAnswer, draws: int) -> JointAnswer:
    """Return the cheapest of an answer and those that searches with dearer GPUs, drawn, end at.

    Where all demand is served one search often ends where no exchange helps, at other GPUs than are best.
    """
    least, draw = cost_of(problem, best).total, stream(0, "choice", "exchange", "prices")
    for _ in range(draws):
        prices = problem.gpu_usd * draw.uniform(1.0, 1.25, len(problem.gpu_usd))
        other = _search(replace(problem, gpu_usd=prices), 0, EFFORT)
        usd = cost_of(problem, other).total
        if usd < least and not violations(problem, other):
            best, least = other, usd
    return best


def _search(problem: JointProblem, seed: int, effort: int) -> JointAnswer:
    tables = tables_of(problem)
    types = tables.delay.shape[0]
    offers = offers_of(tables)
    search = search_of(problem.horizon_h * problem.storage_usd, seed, effort)
    best, now, trial, probe = (selection_of(types) for _ in range(4))
    _exchange(
        tuple(tables), tuple(offers), tuple(best), tuple(now), tuple(trial), tuple(probe),
        tuple(search), tuple(workspace_of(types)), tuple(shortlist_of(types, len(offers.pair))),
        problem.shape[2],
    )  # fmt: skip
    return _answer(problem, offers, best)


def _answer(problem: JointProblem, offers: Offers, selection: Selection) -> JointAnswer:
    types, models, tiers, _ = problem.shape
    config = np.full(models * tiers, -1, np.int64)
    share = np.zeros((types, models * tiers))
    for a in range(int(selection.number[0])):
        f = selection.members[a]
        # A member that nobody is routed to is not rented.
        if selection.share[:, a].any():
            config[offers.pair[f]] = offers.config[f]
            share[:, offers.pair[f]] = selection.share[:, a]
    return answer_of(problem, config, share)


@entry(
    f"({TABLES_TYPE}, {OFFERS_TYPE}, {SELECTION_TYPE}, {SELECTION_TYPE}, {SELECTION_TYPE},"
    f" {SELECTION_TYPE}, {SEARCH_TYPE}, {WORKSPACE_TYPE}, {SHORTLIST_TYPE}, int64)"
)
def _exchange(
    tables: tuple[Any, ...],
    offers: tuple[Any, ...],
    best: tuple[Any, ...],
    now: tuple[Any, ...],
    trial: tuple[Any, ...],
    probe: tuple[Any, ...],
    search: tuple[Any, ...],
    workspace: tuple[Any, ...],
    short: tuple[Any, ...],
    tiers: int,
) -> None:
    run(
        JointTables(*tables), Offers(*offers), Selection(*best), Selection(*now), Selection(*trial),
        Selection(*probe), Search(*search), Workspace(*workspace), Shortlist(*short), tiers,
    )  # fmt: skip


@lean_part
def run(
    tables: JointTables,
    offers: Offers,
    best: Selection,
    now: Selection,
    trial: Selection,
    probe: Selection,
    search: Search,
    workspace: Workspace,
    short: Shortlist,
    tiers: int,
) -> None:
    """Write the best selection found into `best`."""
    list_offers(tables, offers, tiers, np.inf)
    anchors = scout(tables, offers, trial, search, workspace, short)
    # Steps from nothing give the first answer; later starts must beat it.
    now.number[0] = 0
    descend(tables, offers, now, trial, probe, best, search, workspace, short)
    starts = pair_up(tables, offers, trial, probe, best, search, workspace, short, anchors)
    # Lists with one offer of each model and configuration are wider; those with one of each pair come second.
    for hopeful in (BY_MODEL, BY_PAIR):
        for n in range(starts):
            now.number[0] = 0
            take_in(now, search.starts[n, 0])
            deepen(tables, offers, now, trial, probe, best, search, workspace, short, hopeful)
        # What deepening found is only the best of pairs: steps go on from there.
        duplicate(best, now)
        descend(tables, offers, now, trial, probe, best, search, workspace, short)
        if hopeful == BY_MODEL:
            for n in range(starts):
                now.number[0] = 0
                take_in(now, search.starts[n, 0])
                take_in(now, search.starts[n, 1])
                descend(tables, offers, now, trial, probe, best, search, workspace, short)
    for kick in range(KICKS):
        if is_spent(search, workspace):
            break
        # Kicks take turns: replace one member by two others, or draw a change and descend from it.
        if kick % 2 == 0:
            leave_out(best, now, draw(search, max(1, best.number[0])), -1)
            deepen(tables, offers, now, trial, probe, best, search, workspace, short, BY_PAIR)
        else:
            shake(offers, best, now, search)
            descend(tables, offers, now, trial, probe, best, search, workspace, short)
