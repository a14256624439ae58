"""What is known of how good a plan is, in the words that terminal, report, dashboard and JSON share.

bound by the capacity model      nothing within the settings is better, if instances carry what the
                                 performance model says (`Plan.capacity_bound`; `bound` of plans that were
                                 not simulated)
bound with simulated capacities  the same, if each carries what a simulation of it alone found
                                 (`Plan.bound` of plans with promises)
gap                              how far the plan is from its bound, as a share of its cost; of the bound
                                 where more is better
cut short                        the deadline came before the search had ended
no bound is known                the plan is valid, and nobody knows how far from the best it is
"""

from __future__ import annotations

from dataclasses import dataclass

from atoll.core.units import format_price, format_share
from atoll.plan.plan import Plan

CAPACITY = "by the capacity model"
SIMULATED = "with simulated capacities"
NO_BOUND = "No bound is known"
CUT_SHORT = "Cut short by the deadline"
LATE = "the deadline came before the search had ended"
"""The reason that a plan gives where it was cut short."""
_SAME = 1e-6
"""Bounds that differ by less than this share are equal, and so are a plan and a bound so close to it."""


@dataclass(frozen=True, slots=True)
class Proof:
    """What is known of a plan: a sentence on its bound, one where it was cut short, and the same as figures.

    `gap` is that to the bound, in words; None where there is none. `may_improve` says that a longer search
    may find a better plan. `figures` are names and values.
    """

    bound: str
    late: str | None
    gap: str | None
    may_improve: bool
    figures: tuple[tuple[str, str], ...]

    @property
    def text(self) -> str:
        """All of it, in one or two sentences."""
        return " ".join(said for said in (self.late, self.bound) if said)

    @property
    def in_words(self) -> dict[str, str | None]:
        """The same for JSON: the gap, the sentence on the bound, and the one where it was cut short."""
        return {"gap": self.gap, "bound": self.bound or None, "late": self.late}


def proof_of(plan: Plan) -> Proof:
    """Return what is known of how good a plan is."""
    if plan.status == "infeasible":
        late = f"{CUT_SHORT}: with more time there may be a plan." if plan.cut_short else None
        return Proof("", late, None, plan.cut_short, _late_figure(plan))
    best = plan.bound is not None and _is_best(plan, plan.bound)
    late = _say_late(plan, best=best) if plan.cut_short else None
    may_improve = plan.cut_short and (plan.status == "partial" or not best or not _keeps(plan))
    gap = None if plan.bound is None or plan.gap is None else format_gap(plan.gap)
    return Proof(_say_bounds(plan, gap), late, gap, may_improve, _figures(plan, gap))


def binding_reasons(plan: Plan) -> tuple[str, ...]:
    """Return what keeps a plan from being better, but for the deadline: `Proof.late` says what that means."""
    return tuple(reason for reason in plan.reasons if reason != LATE)


def format_gap(gap: float) -> str:
    """Write a gap: "0.08%", and "below 0.01%" for what hardly is one."""
    return "0%" if gap < 1e-9 else "below 0.01%" if gap < 1e-4 else format_share(gap)


def say_bound(how: str, claim: str, gap: str) -> str:
    """Return the sentence of a bound: what it rests on, what it says, and how far the plan is from it."""
    return f"Bound {how}: {claim} (gap {gap})."


def _is_best(plan: Plan, bound: float) -> bool:
    return abs((plan.objective or 0.0) - bound) <= _SAME * max(abs(bound), _SAME)


def _keeps(plan: Plan) -> bool:
    return all(promise.is_kept for promise in plan.promises)


def _say_late(plan: Plan, *, best: bool) -> str:
    if plan.status == "partial":
        return f"{CUT_SHORT}: with more time there may be a plan that serves more."
    if not _keeps(plan):
        return f"{CUT_SHORT}: with more time there may be a plan that keeps its promises."
    if best:
        return f"{LATE[:1].upper()}{LATE[1:]}, and no better plan was left to find."
    within = "" if plan.bound is None else ", within the gap"
    return f"{CUT_SHORT}: with more time there may be a better plan{within}."


def _amount(plan: Plan, value: float) -> str:
    return format_price(value) if plan.goal == "cost" else f"{value:,.1f} tokens/s"


def _claim(plan: Plan, bound: float) -> str:
    """What a bound says of all plans."""
    if plan.goal != "cost":
        even = ", even with endless KV caches" if plan.goal == "sustained" else ""
        than = "" if _is_best(plan, bound) else f" than {_amount(plan, bound)}"
        return f"no placement carries more{than}{even}"
    does = "serves that share for" if plan.status == "partial" else "costs"
    starts = ", starts included" if plan.init_usd > 0.0 else ""
    return f"nothing within its settings {does} less than {_amount(plan, bound)}{starts}"


def _has_two(plan: Plan) -> bool:
    """Whether there is a bound with simulated capacities that differs from the one by the capacity model."""
    known, bound = plan.capacity_bound, plan.bound
    if not plan.promises or bound is None or known is None:
        return False
    return abs(known - bound) > _SAME * max(abs(known), abs(bound))


def _rests_on(plan: Plan) -> str:
    """What the bound of a plan rests on: where both are equal, it holds by the capacity model."""
    only = plan.promises and plan.goal == "cost" and plan.capacity_bound is None
    return SIMULATED if only or _has_two(plan) else CAPACITY


def _say_bounds(plan: Plan, gap: str | None) -> str:
    known = plan.capacity_bound
    if plan.power is not None and plan.power.weighted_usd_per_hour is not None:
        return ""  # what was made small is no price: `describe_power` says it in the same words
    if plan.bound is not None and gap is not None:
        said = say_bound(_rests_on(plan), _claim(plan, plan.bound), gap)
        if _has_two(plan) and known is not None:
            said = f"{said.removesuffix('.')}; {CAPACITY}: {_amount(plan, known)}."
        return said
    if plan.robustness is not None:
        less = "" if known is None else f"; of less sure ones, {CAPACITY}: {_amount(plan, known)}"
        return f"{NO_BOUND} of plans as sure as this{less}."
    if known is not None:
        return f"{NO_BOUND} {SIMULATED}; {CAPACITY}: {_claim(plan, known)}."
    return f"{NO_BOUND} (solver: {plan.solver})."


def _figures(plan: Plan, gap: str | None) -> tuple[tuple[str, str], ...]:
    """The same in cards: each bound under its name, the gap to the one that it is the gap to."""
    found: list[tuple[str, str]] = []
    if plan.bound is not None and gap is not None:
        how = _rests_on(plan)
        found += [(f"bound {how}", _amount(plan, plan.bound)), (f"gap {how}", gap)]
    if plan.capacity_bound is not None and (_has_two(plan) or plan.bound is None):
        found.append((f"bound {CAPACITY}", _amount(plan, plan.capacity_bound)))
    if plan.bound is None and not (plan.power and plan.power.weighted_bound is not None):
        found.append(("gap", "no bound is known"))
    return (*found, *_late_figure(plan))


def _late_figure(plan: Plan) -> tuple[tuple[str, str], ...]:
    return (("cut short", "by the deadline"),) if plan.cut_short else ()
