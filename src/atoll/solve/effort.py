"""How hard a solver tries, and what for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from atoll.plan.plan import Goal, Plan

GAP = 1e-3
DEADLINE_S = 30.0


_SOONER = 0.2
"""What prompt latency counts: a plan with prompts a tenth sooner may generate 2 % less."""


@dataclass(frozen=True)
class Measured:
    """What a plan generates, in tokens/s, and the median seconds until a prompt is done."""

    tokens_per_s: float
    prompt_s: float

    @property
    def score(self) -> float:
        """How good that is; only ratios mean something."""
        return self.tokens_per_s / float(max(self.prompt_s, 1e-3) ** _SOONER)


Rank = Callable[[Plan], Measured]
"""Values a plan, by simulating it say."""


@dataclass(frozen=True)
class Effort:
    """How close to the optimum to come, and on a fixed cluster what for.

    `gap` is the proven distance to the optimum, as a share, at which the search may stop. `cached` keeps
    templates on disk and uses those that are there. The rest is for fixed clusters: `objective` is what the
    plan is best at (None: what lasts), `partial` lets a node run only some of its layers, `promise` allows
    no pipeline slower than ttft and tpot, and `rank` values the best few plans, of which it takes the best.
    """

    gap: float = GAP
    cached: bool = True
    objective: Goal | None = None
    partial: bool = False
    promise: bool = False
    rank: Rank | None = None
