"""Violations of a plan, and the error that lists them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from atoll.core.errors import AtollError
from atoll.core.frozen import Frozen

TOLERANCE = 1e-6
"""Relative difference that is taken for rounding."""

Rule = Literal[
    "problem",
    "name",
    "host",
    "graph",
    "layers",
    "hops",
    "memory",
    "flow",
    "node-capacity",
    "link-capacity",
    "throughput",
    "region",
    "offer",
    "availability",
    "slice",
    "pinning",
    "kept",
    "demand",
    "served",
    "route",
    "handover",
    "engine",
    "budget",
    "spot-share",
    "max-nodes",
    "spread",
    "cost",
    "bound",
    "status",
    "goal",
    "mix",
    "error",
    "floor",
]
"""Which promise of a plan is broken; `atoll.plan.validate.check` says what each one means."""


class Violation(Frozen):
    """One broken rule: where, in words, and by how much in the units of the message."""

    rule: Rule
    where: str
    message: str
    amount: float | None = None

    def __str__(self) -> str:
        return f"{self.rule}: {self.where}: {self.message}"


class InvalidPlanError(AtollError):
    """A plan breaks its own promises; carries every violation."""

    exit_code = 7

    def __init__(self, plan: str, violations: Sequence[Violation]) -> None:
        self.violations = tuple(violations)
        more = f" (and {len(violations) - 1} more)" if len(violations) > 1 else ""
        super().__init__(
            f"the plan {plan!r} is not valid: {violations[0]}{more}",
            hint="plan again; `atoll validate PLAN --fleet FLEET` lists all that is wrong",
        )


def violation(rule: Rule, where: str, message: str, amount: float | None = None) -> Violation:
    """Return a violation; `amount` is by how much the rule is broken, in the units of the message."""
    return Violation(rule=rule, where=where, message=message, amount=amount)


def exceeds(value: float, limit: float) -> bool:
    """Return whether a value is above its limit by more than rounding."""
    return value > limit + TOLERANCE * max(abs(limit), TOLERANCE)


def differs(a: float, b: float) -> bool:
    """Return whether two values differ by more than rounding."""
    return abs(a - b) > TOLERANCE * max(abs(a), abs(b), TOLERANCE)
