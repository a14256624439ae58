"""The seeded changes of the check of rollouts: what is asked, what machines cost, and the plan for that.

Every change is one that the controller has a reason to make: more is asked than stands, or the same is to be
had for less. Deciding only; nothing here starts anything.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from atoll.control.decision.route_weights import spread_routes
from atoll.core.frozen import Frozen
from atoll.core.ids import Phase
from atoll.core.rng import stream
from atoll.plan.plan import Flow, Instance, Node, Plan
from atoll.plan.problem import Lengths, Offer, Problem, Service, Settings
from tests.tiny_model import LAYERS

SERVICE = "tiny"
REGION = "here"
MACHINES = 8
"""Of each kind: room for what runs, what replaces it, and one more that is lost meanwhile."""
_PRICE_USD = {"CORE-L:1": 4.0, "CORE-M:1": 3.0, "CORE-S:1": 2.0}
_SPARE_PER_S = 2.0
"""What the strongest instance carries: planned for beyond what is asked, so that any one may die."""
_LENGTHS = Lengths(
    input_mean=60.0, output_mean=60.0, input_mean_square=4000.0, output_mean_square=4000.0
)

Trouble = Literal[
    "", "kill-controller", "kill-daemon", "kill-join", "kill-engine", "kill-node", "broken-program",
    "broken-weights", "no-room",
]  # fmt: skip
"""What goes wrong during a change."""


class RolloutTemplate(Frozen):
    """A way to stand: the kind of each node with its layers, and the requests/s that it carries."""

    nodes: tuple[tuple[str, int, int], ...]
    per_s: float
    phase: Phase = Phase.BOTH


TemplateGroup = tuple[RolloutTemplate, ...]
"""What is planned and given up together: one instance, or one that prefills and one that decodes."""


def _whole(kind: str, per_s: float) -> TemplateGroup:
    return (RolloutTemplate(nodes=((kind, 0, LAYERS),), per_s=per_s),)


def _pair(first: str, second: str, cut: int, per_s: float) -> TemplateGroup:
    return (RolloutTemplate(nodes=((first, 0, cut), (second, cut, LAYERS)), per_s=per_s),)


def _apart(prefill: str, decode: str, per_s: float) -> TemplateGroup:
    return tuple(
        RolloutTemplate(nodes=((kind, 0, LAYERS),), per_s=per_s, phase=phase)
        for kind, phase in ((prefill, Phase.PREFILL), (decode, Phase.DECODE))
    )


GROUPS = (
    _whole("CORE-L:1", 2.0),
    _whole("CORE-M:1", 1.5),
    _whole("CORE-S:1", 1.0),
    _pair("CORE-L:1", "CORE-S:1", 3, 1.75),
    _pair("CORE-L:1", "CORE-S:1", 2, 1.25),
    _pair("CORE-M:1", "CORE-S:1", 2, 1.6),
    _pair("CORE-S:1", "CORE-S:1", 1, 1.1),
    _apart("CORE-L:1", "CORE-M:1", 1.9),
    _apart("CORE-M:1", "CORE-S:1", 1.3),
)


class AskedOfFleet(Frozen):
    """What a controller is given: requests/s, with how much to spare, prices, and the plan for them.

    `broken` makes the commands of instances that are started unable to work, until the file says otherwise.
    """

    number: int
    rate_per_s: float
    headroom: float
    prices_usd: dict[str, float]
    templates: tuple[RolloutTemplate, ...]
    broken: Literal["", "program", "weights"] = ""

    def offers(self) -> tuple[Offer, ...]:
        """Return what can be had."""
        return tuple(
            Offer(
                region=REGION,
                node_type=kind,
                market="owned",
                available=MACHINES,
                usd_per_hour=usd,
            )
            for kind, usd in sorted(self.prices_usd.items())
        )

    def problem(self, fleet: str) -> Problem:
        """Return what the fleet asks for."""
        service = Service(
            name=SERVICE,
            model="smollm2-135m",
            ttft_s=5.0,
            tpot_s=1.0,
            rate_per_s=self.rate_per_s,
            lengths=_LENGTHS,
            phases="auto",
            headroom=self.headroom,
        )
        return Problem(name=fleet, services=(service,), offers=self.offers(), settings=Settings())

    def plan(self, asked: Problem) -> Plan:
        """Return the plan if its machines can be had, as a planner would; else that there is none."""
        free = {offer.node_type: offer.available for offer in asked.offers}
        needs = _count_machines(self.templates)
        lacking = [kind for kind, count in sorted(needs.items()) if count > free.get(kind, 0)]
        instances = () if lacking else self.instances()
        return Plan(
            problem_hash=asked.content_hash(),
            problem_name=asked.name,
            instances=instances,
            routes=spread_routes(asked, instances, ()),
            served_fraction={SERVICE: 0.0 if lacking else 1.0},
            usd_per_hour=sum(one.usd_per_hour for one in instances),
            status="infeasible" if lacking else "feasible",
            solver="seeded",
            reasons=tuple(f"there is too little of {kind}" for kind in lacking),
        )

    def instances(self) -> tuple[Instance, ...]:
        """Return the instances of the plan."""
        return tuple(
            make_instance(f"{SERVICE}-{at}", each, self.prices_usd)
            for at, each in enumerate(self.templates)
        )


def make_instance(
    name: str, template: RolloutTemplate, prices_usd: Mapping[str, float]
) -> Instance:
    """Return an instance that stands as a template says."""
    units = {Phase.PREFILL: _LENGTHS.input_mean, Phase.DECODE: _LENGTHS.output_mean}
    per_s = template.per_s * units.get(template.phase, 1.0)
    nodes = tuple(
        Node(id=f"n{at}", node_type=kind, market="owned", start=start, end=end, tp=1)
        for at, (kind, start, end) in enumerate(template.nodes)
    )
    ends = ["source", *(node.id for node in nodes), "sink"]
    return Instance(
        id=name,
        service=SERVICE,
        role=f"{SERVICE}/llm/{template.phase}",
        region=REGION,
        stages=len(nodes),
        nodes=nodes,
        flows=tuple(Flow(src=a, dst=b, per_s=per_s) for a, b in itertools.pairwise(ends)),
        throughput_per_s=per_s,
        usd_per_hour=sum(prices_usd[kind] for kind, _, _ in template.nodes),
    )


@dataclass(frozen=True, slots=True)
class PlanChange:
    """A change of what is asked, and what goes wrong meanwhile, so many seconds after it was asked."""

    asked: AskedOfFleet
    trouble: Trouble
    after_s: float


_TROUBLES: tuple[Trouble, ...] = (
    "",
    "kill-controller",
    "kill-node",
    "no-room",
    "kill-daemon",
    "broken-program",
    "kill-controller",
    "kill-join",
    "kill-engine",
    "broken-weights",
)


def seed_changes(
    count: int,
    seed: int,
    *,
    most: int = 3,
    groups: Sequence[TemplateGroup] = GROUPS,
    troubles: Sequence[Trouble] = _TROUBLES,
) -> tuple[AskedOfFleet, list[PlanChange]]:
    """Return what is asked first, and the changes after it; `most` groups each."""
    chance = stream(seed, "rollout")
    standing: tuple[TemplateGroup, ...] = (groups[0], groups[2])
    first = AskedOfFleet(
        number=0,
        rate_per_s=1.0,
        headroom=1.0 + _SPARE_PER_S,
        prices_usd=_PRICE_USD,
        templates=_flatten(standing),
    )
    changes: list[PlanChange] = []
    before = first
    while len(changes) < count:
        drawn = _edit(chance, standing, most, groups)
        asked = _draw(chance, before, drawn, len(changes) + 1)
        if asked is None:
            continue
        trouble = troubles[len(changes) % len(troubles)]
        # Only what is started can fail to start.
        if trouble.startswith(("broken", "no-room")) and not _fresh(before, asked):
            continue
        changes.append(PlanChange(asked, trouble, round(float(chance.uniform(0.2, 3.0)), 3)))
        before, standing = asked, drawn
    return first, changes


def _fresh(before: AskedOfFleet, after: AskedOfFleet) -> Counter[RolloutTemplate]:
    """Return what a change starts."""
    return Counter(after.templates) - Counter(before.templates)


def _flatten(groups: Sequence[TemplateGroup]) -> tuple[RolloutTemplate, ...]:
    """Return the templates of groups, in an order of their own."""
    flat = [template for group in groups for template in group]
    return tuple(sorted(flat, key=lambda one: (one.nodes, one.phase)))


def carried_per_s(templates: Sequence[RolloutTemplate]) -> float:
    """Return the requests/s that instances carry together: pairs as much as their weaker side."""
    by_phase = {phase: sum(one.per_s for one in templates if one.phase is phase) for phase in Phase}
    return by_phase[Phase.BOTH] + min(by_phase[Phase.PREFILL], by_phase[Phase.DECODE])


def _draw(
    chance: np.random.Generator,
    before: AskedOfFleet,
    groups: Sequence[TemplateGroup],
    number: int,
) -> AskedOfFleet | None:
    """Return a change to these groups that a controller makes, or None where it makes none."""
    drawn = _flatten(groups)
    had, has = carried_per_s(before.templates), carried_per_s(drawn)
    if Counter(drawn) == Counter(before.templates) or has < _SPARE_PER_S + 0.5:
        return None
    if max(_count_machines((*drawn, *before.templates)).values()) + 2 > MACHINES:
        return None
    prices = {
        kind: round(usd * float(chance.uniform(0.5, 2.0)), 2) for kind, usd in _PRICE_USD.items()
    }
    low = _SPARE_PER_S + 0.5
    if has > had + 0.1 and chance.random() < 0.7:
        planned = float(chance.uniform(had + 0.05, has))
    else:
        planned = float(chance.uniform(low, min(had, has)))
        if _rent(drawn, prices) > 0.9 * _rent(before.templates, prices):
            return None
    rate = round(planned - _SPARE_PER_S, 6)
    return AskedOfFleet(
        number=number,
        rate_per_s=rate,
        headroom=planned / rate,
        prices_usd=prices,
        templates=drawn,
    )


def _edit(
    chance: np.random.Generator,
    before: Sequence[TemplateGroup],
    most: int,
    groups: Sequence[TemplateGroup],
) -> tuple[TemplateGroup, ...]:
    """Return a plan with one group more, one less, or one or two others."""
    plan = list(before)
    plan = [plan[int(at)] for at in chance.permutation(len(plan))]
    taken = int(chance.integers(0, 3))
    added = int(chance.integers(0, 3))
    plan = plan[taken:] + [groups[int(at)] for at in chance.integers(0, len(groups), added)]
    return tuple(plan[:most])


def _count_machines(templates: Sequence[RolloutTemplate]) -> Counter[str]:
    """Return how many machines of each kind they take together."""
    return Counter(kind for template in templates for kind, _, _ in template.nodes)


def _rent(templates: Sequence[RolloutTemplate], prices_usd: Mapping[str, float]) -> float:
    return sum(prices_usd[kind] for template in templates for kind, _, _ in template.nodes)
