"""Violations of a plan, and the error that lists them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    "sharing",
    "cores",
    "kept",
    "demand",
    "served",
    "route",
    "handover",
    "engine",
    "model",
    "promise",
    "budget",
    "spot-share",
    "max-nodes",
    "spread",
    "survive",
    "cost",
    "bound",
    "status",
    "goal",
    "mix",
    "error",
    "floor",
]
"""Which promise of a plan is broken; `atoll.plan.validate.check` says what each one means."""

_FIXES: Mapping[Rule, tuple[str, str]] = {
    "problem": ("problem_hash", "name the fleet file that it was made for"),
    "name": ("instances", "use the names of the fleet file, each once"),
    "host": ("instances.nodes.host", "name each machine of the cluster once, as it is"),
    "graph": ("instances.flows", "lead flows from source over nodes to sink, each once"),
    "layers": ("instances.nodes.start", "let every way run all layers or parts once, in order"),
    "hops": ("instances.stages", "state as many stages as the longest way has"),
    "memory": ("instances.nodes", "give the node less to hold, or take a larger one"),
    "flow": ("instances.flows.per_s", "let what enters a node leave it"),
    "node-capacity": ("instances.flows.per_s", "send less over the node"),
    "link-capacity": ("instances.flows.per_s", "send less over the link"),
    "throughput": ("instances.throughput_per_s", "state what its flows and paths carry"),
    "region": ("instances.nodes.region", "keep all nodes of an instance in its region"),
    "offer": ("instances.nodes.node_type", "take nodes that the fleet file offers there"),
    "availability": ("instances.nodes", "use no more machines than there are"),
    "slice": ("instances.nodes.gpu_ids", "give every slice GPUs of its own of one machine"),
    "pinning": ("instances.nodes.node_type", "take a node that the service may stand on"),
    "sharing": (
        "instances.guests",
        "share executors of components that the services have in common",
    ),
    "cores": ("instances.nodes", "take a slice with more CPU cores, or fewer parts"),
    "kept": ("instances.kept", "say that only instances that run are kept"),
    "demand": ("status", "add instances, or say that the plan is partial"),
    "served": ("served_fraction", "state for every service the share that its instances serve"),
    "route": ("routes", "lead all requests to instances that have room for them"),
    "handover": ("routes", "pair instances that hand over in time"),
    "engine": ("instances.engine", "take an engine that the fleet allows and that runs this"),
    "model": ("models", "state the model of the fleet file"),
    "promise": ("promises", "state what simulations of this plan keep, for the fleet's targets"),
    "budget": ("usd_per_hour", "rent less, or raise limits.budget"),
    "spot-share": ("routes", "send more to instances off spot, or raise limits.spot_share"),
    "max-nodes": ("instances.nodes", "use fewer machines, or raise limits.max_nodes"),
    "spread": ("instances.region", "stand in more regions, or lower limits.spread"),
    "survive": ("instances", "stand on more machines or in more places, or lower limits.survive"),
    "cost": ("usd_per_hour", "state what the machines cost"),
    "bound": ("bound", "state a bound that is proven, and the gap to it"),
    "status": ("status", "state what the gap and the shares served say"),
    "goal": ("goal", "state cost for rented nodes, else a goal in tokens/s"),
    "mix": ("mixes", "answer every choice once, by its own services, in shares of 1 in all"),
    "error": ("mixes.error", "let models that err less answer more"),
    "floor": ("mixes.shares", "let the model answer at least its min_share"),
}
"""By rule the field of a plan that it is mostly about, and what to change."""


class Violation(Frozen):
    """One broken rule: where, in words, and by how much in the units of the message.

    `field` is what is wrong in the JSON of the plan, and `fix` what to change.
    """

    rule: Rule
    where: str
    message: str
    amount: float | None = None
    field: str
    fix: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.where}: {self.message}"


class InvalidPlanError(AtollError):
    """A plan breaks its own promises; carries every violation."""

    exit_code = 7

    def __init__(self, plan: str, violations: Sequence[Violation]) -> None:
        self.violations = tuple(violations)
        more = f" (and {len(violations) - 1} more)" if len(violations) > 1 else ""
        first = violations[0]
        super().__init__(
            f"the plan {plan!r} is not valid: {first}{more}",
            field=first.field,
            hint=f"{first.fix}, or plan again; `atoll validate PLAN --fleet FLEET` lists all that is wrong",
        )


def violation(
    rule: Rule, where: str, message: str, amount: float | None = None, *, field: str | None = None
) -> Violation:
    """Return a violation; `amount` is by how much the rule is broken, in the units of the message.

    `field` is the one that is wrong where it is not the rule's own.
    """
    own, fix = _FIXES[rule]
    return Violation(
        rule=rule, where=where, message=message, amount=amount, field=field or own, fix=fix
    )


def exceeds(value: float, limit: float) -> bool:
    """Return whether a value is above its limit by more than rounding."""
    return value > limit + TOLERANCE * max(abs(limit), TOLERANCE)


def differs(a: float, b: float) -> bool:
    """Return whether two values differ by more than rounding."""
    return abs(a - b) > TOLERANCE * max(abs(a), abs(b), TOLERANCE)
