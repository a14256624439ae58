"""How hard a solver tries, and what for.

Effort is counted work, so the same problem gets the same plan on an idle and on a loaded machine. A deadline
is a safety net beside it: whoever reaches it says so in the plan (`cut_short`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from atoll.core.errors import UsageError
from atoll.plan.plan import Goal, OfferKey, Plan
from atoll.plan.problem import Problem
from atoll.solve.derating import Derating, NodeSet

GAP = 1e-3
DEADLINE_S = 300.0
"""A safety net that the usual effort does not reach, on a busy laptop either."""
LEVELS = {"low": 0.1, "normal": 1.0, "high": 10.0}
"""Effort in words, as a multiple of the usual work."""
_MIN_WORK = 0.01
"""Least effort, relative to the usual one."""
MAX_WORK = 1000.0

_SOONER = 0.2
"""Weight of prompt latency, and of the seconds from token to token: with either a tenth less a plan may give
2 % less (`refine`: 5 % at most)."""


@dataclass(frozen=True)
class Measured:
    """Tokens/s that a plan generates, median seconds until a prompt is done and from token to token.

    Seconds are infinite where nobody looked: so few tokens/s are not worth it.
    """

    tokens_per_s: float
    prompt_s: float
    token_s: float

    @property
    def score(self) -> float:
        """How good that is; only ratios mean something."""
        waits = max(self.prompt_s, 1e-3) * max(self.token_s, 1e-3)
        return self.tokens_per_s / float(waits**_SOONER)

    @classmethod
    def mean(cls, measured: Sequence[Measured]) -> Measured:
        """The mean of some measurements of one plan."""
        count = len(measured)
        return cls(
            sum(one.tokens_per_s for one in measured) / count,
            sum(one.prompt_s for one in measured) / count,
            sum(one.token_s for one in measured) / count,
        )


Rank = Callable[[Plan, int], Measured]
"""Values a plan, by simulating it say, under one of some draws of requests (0, 1, ...)."""


@dataclass(frozen=True)
class RentLimit:
    """A budget in USD per hour of what machines of each offer cost, where prices stand for more than rent."""

    usd_per_hour: Mapping[OfferKey, float]
    budget_usd_per_hour: float


@dataclass(frozen=True)
class Answered:
    """Seconds from a request's arrival to its last token: the mean, the median and the 95th percentile."""

    mean_s: float
    p50_s: float
    p95_s: float


Latency = Callable[[Plan, Problem, float], Answered]
"""Says how soon a plan answers what a problem asks in so many seconds, all requests to their end."""


KnownPlacement = Mapping[str, tuple[int, int]]
"""Layers [start, end) by machine."""

Used = tuple[str, str, NodeSet]
"""An executor or template that a plan has: service, parts or role, nodes."""


@dataclass(frozen=True)
class KnownPlan:
    """A plan for the same problem with executors that take no longer: what it has, its cost, what is proven.

    No plan with slower executors costs less than `at_least` USD per hour, and where what it has still carries
    all for `objective` USD per hour nothing else needs to be looked for.
    """

    used: frozenset[Used]
    objective: float
    at_least: float


@dataclass(frozen=True)
class Effort:
    """How close to the optimum to come, with how much work, and on a fixed cluster what for.

    `gap` is the proven distance to the optimum, as a share, at which the search may stop. `cached` keeps
    templates on disk and uses those that are there. `work` multiplies every budget of counted work: linear
    programs, integer nodes, evaluations, simulations. Templates carry what `derating` leaves of them, and
    executors of any-to-any services take `slowdown` times as long, by service, parts and kind of node ("*":
    kinds that are not named): what simulation found. With `likely` executors and templates (service, parts or
    role, nodes), those of plans found before, the search for such plans begins; `unproven` ends it there, for
    plans to learn from. It ends sooner where the `known` plan will do. `rent_limit` is a budget where prices
    of the problem stand for more than rent. `simpler_than` is a plan of rented nodes: asked for is the
    simplest one that costs at most the share `settings.simplicity` more, instead of the cheapest. Without
    `patterns` executors of any-to-any services are not put on machines one by one where links between those
    bind: every link counts as slow as the slowest then.
    The rest is for fixed clusters: `objective` is what the plan is best at (None: what lasts), `partial`
    lets a node run only some of its layers, `promise` allows no pipeline slower than ttft and tpot
    (False: best effort), and `rank` values the best few plans, of which it takes the best. `latency`
    fills the tables of solvers that go by it. `placements` are known ones: no result is worse than any.
    """

    gap: float = GAP
    cached: bool = True
    objective: Goal | None = None
    partial: bool = False
    promise: bool = True
    rank: Rank | None = None
    latency: Latency | None = None
    placements: tuple[KnownPlacement, ...] = ()
    work: float = 1.0
    derating: Derating | None = None
    rent_limit: RentLimit | None = None
    simpler_than: Plan | None = None
    slowdown: Mapping[tuple[str, str, str], float] = field(default_factory=dict)
    likely: frozenset[Used] = frozenset()
    unproven: bool = False
    patterns: bool = True
    known: KnownPlan | None = None

    def __post_init__(self) -> None:
        if not _MIN_WORK <= self.work <= MAX_WORK:
            raise UsageError(
                f"{self.work:g} times the usual effort",
                hint=f"take {_MIN_WORK:g} to {MAX_WORK:g}, or low, normal or high",
                field="effort",
            )

    def slowdown_of(self, service: str, parts: str, kind: str) -> float:
        """How many times as long executors of these parts take on a kind of node as the model says."""
        # What was found for the kind, else for the parts on any kind, else nothing.
        others = self.slowdown.get((service, parts, "*"), 1.0)
        return self.slowdown.get((service, parts, kind), others)

    def refuse_cluster_options(self) -> None:
        """Raise UsageError where something is set that only fixed clusters know."""
        options = {
            "objective": self.objective is not None,
            "partial": self.partial,
            "best-effort": not self.promise,
            "known": bool(self.placements),
        }
        for option, is_set in options.items():
            if is_set:
                raise UsageError(f"--{option} is for fixed clusters", hint="leave it out")


def parse_work(text: str) -> float:
    """Return effort in words ("high") or as a number ("2.5") as a multiple of the usual work."""
    if text in LEVELS:
        return LEVELS[text]
    try:
        work = float(text)
    except ValueError:
        work = math.nan
    if not _MIN_WORK <= work <= MAX_WORK:
        raise UsageError(
            f"cannot read '{text}' as an effort",
            hint=f"write low, normal, high, or a number from {_MIN_WORK:g} to {MAX_WORK:g}",
            field="effort",
        )
    return work
