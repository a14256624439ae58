"""The choice problem by exchange: which few pairs are active, in which configuration; routing follows.

Rent dominates, so few pairs are active. The state is that set; its cost is that of routing all types to it
(`routing`). One step leaves out at most one member and takes in one offer or two (`steps`). It begins with
nothing, then with offers that can serve the hardest type (`anchors`), and then with the best answer of which
members are left out that are drawn. Work is counted, not timed.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from atoll.core.compiling import entry, lean_part
from atoll.solve.choice.exchange.anchors import pair_up, scout
from atoll.solve.choice.exchange.estimates import (
    BY_MODEL,
    BY_PAIR,
    SHORTLIST_TYPE,
    Shortlist,
    shortlist_of,
)
from atoll.solve.choice.exchange.offers import OFFERS_TYPE, Offers, list_offers, offers_of
from atoll.solve.choice.exchange.routing import (
    DESK_TYPE,
    SELECTION_TYPE,
    Desk,
    Selection,
    desk_of,
    duplicate,
    selection_of,
)
from atoll.solve.choice.exchange.steps import (
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
from atoll.solve.choice.problem import ChoiceAnswer, ChoiceProblem
from atoll.solve.choice.tables import TABLES_TYPE, ChoiceTables, answer_of, tables_of

COMPILED_AS = "the choice of models"
EFFORT = 500_000
"""Ways and offers that may be looked at."""
KICKS = 30
"""Times that members of the best answer are left out."""


def exchange(problem: ChoiceProblem, seed: int = 0, *, effort: int = EFFORT) -> ChoiceAnswer:
    """Return the best answer found; `seed` is that of the members drawn to be left out."""
    tables = tables_of(problem)
    types = tables.delay.shape[0]
    offers = offers_of(tables)
    search = search_of(problem.horizon_h * problem.storage_usd, seed, effort)
    best, now, trial, probe = (selection_of(types) for _ in range(4))
    _exchange(
        tuple(tables), tuple(offers), tuple(best), tuple(now), tuple(trial), tuple(probe),
        tuple(search), tuple(desk_of(types)), tuple(shortlist_of(types, len(offers.pair))),
        problem.shape[2],
    )  # fmt: skip
    return _answer(problem, offers, best)


def _answer(problem: ChoiceProblem, offers: Offers, selection: Selection) -> ChoiceAnswer:
    types, models, tiers, _ = problem.shape
    config = np.full(models * tiers, -1, np.int64)
    share = np.zeros((types, models * tiers))
    for a in range(int(selection.number[0])):
        f = selection.members[a]
        if selection.share[:, a].any():
            config[offers.pair[f]] = offers.config[f]
            share[:, offers.pair[f]] = selection.share[:, a]
    return answer_of(problem, config, share)


@entry(
    f"({TABLES_TYPE}, {OFFERS_TYPE}, {SELECTION_TYPE}, {SELECTION_TYPE}, {SELECTION_TYPE},"
    f" {SELECTION_TYPE}, {SEARCH_TYPE}, {DESK_TYPE}, {SHORTLIST_TYPE}, int64)"
)
def _exchange(
    tables: tuple[Any, ...],
    offers: tuple[Any, ...],
    best: tuple[Any, ...],
    now: tuple[Any, ...],
    trial: tuple[Any, ...],
    probe: tuple[Any, ...],
    search: tuple[Any, ...],
    desk: tuple[Any, ...],
    short: tuple[Any, ...],
    tiers: int,
) -> None:
    run(
        ChoiceTables(*tables), Offers(*offers), Selection(*best), Selection(*now), Selection(*trial),
        Selection(*probe), Search(*search), Desk(*desk), Shortlist(*short), tiers,
    )  # fmt: skip


@lean_part
def run(
    tables: ChoiceTables,
    offers: Offers,
    best: Selection,
    now: Selection,
    trial: Selection,
    probe: Selection,
    search: Search,
    desk: Desk,
    short: Shortlist,
    tiers: int,
) -> None:
    """Write the best selection found into `best`."""
    list_offers(tables, offers, tiers, np.inf)
    anchors = scout(tables, offers, trial, search, desk, short)
    now.number[0] = 0
    descend(tables, offers, now, trial, probe, best, search, desk, short)
    starts = pair_up(tables, offers, trial, probe, best, search, desk, short, anchors)
    for hopeful in (BY_MODEL, BY_PAIR):
        for n in range(starts):
            now.number[0] = 0
            take_in(now, search.starts[n, 0])
            deepen(tables, offers, now, trial, probe, best, search, desk, short, hopeful)
        duplicate(best, now)
        descend(tables, offers, now, trial, probe, best, search, desk, short)
        if hopeful == BY_MODEL:
            for n in range(starts):
                now.number[0] = 0
                take_in(now, search.starts[n, 0])
                take_in(now, search.starts[n, 1])
                descend(tables, offers, now, trial, probe, best, search, desk, short)
    for kick in range(KICKS):
        if is_spent(search, desk):
            break
        if kick % 2 == 0:
            leave_out(best, now, draw(search, max(1, best.number[0])), -1)
            deepen(tables, offers, now, trial, probe, best, search, desk, short, BY_PAIR)
        else:
            shake(offers, best, now, search)
            descend(tables, offers, now, trial, probe, best, search, desk, short)
