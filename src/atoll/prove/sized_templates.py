"""Capacities of templates with promises kept, found once: for planning the same fleet many times.

A template is simulated alone at several loads (`load_curves`), and carries the largest at which as many
requests of its phase keep their promise as its service asks for. What requests lose beyond that where
instances serve together is for a simulation of whole plans to tell; `trim` takes it off.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from atoll.core.ids import parse_role
from atoll.prove.load_curves import LoadCurve, find_loads
from atoll.prove.prospects import find_prospects
from atoll.prove.sizing import Allowance, Multiple
from atoll.solve.derating import Derating, NodeSet

if TYPE_CHECKING:
    from atoll.catalog.catalog import Catalog
    from atoll.plan.plan import Instance
    from atoll.plan.problem import Problem

MAX = 12
"""Templates of a role that are simulated: those that carry most for their price."""


@dataclass(frozen=True, slots=True)
class SizedTemplate:
    """A template of a role, as an instance somewhere that carries what it does with promises kept.

    `share` is that over what the performance model gives it.
    """

    role: str
    nodes: NodeSet
    instance: Instance
    share: float

    @property
    def per_s(self) -> float:
        """Its capacity, in units of its role."""
        return self.instance.throughput_per_s

    def trim(self, factor: float) -> SizedTemplate:
        """Return the template carrying so much of what it did."""
        return replace(self, instance=_scale(self.instance, factor), share=self.share * factor)


def size_templates(
    problem: Problem, catalog: Catalog, *, limit: int = MAX, seed: int = 0
) -> tuple[SizedTemplate, ...]:
    """Return the templates of each role that carry most for their price, by what they carry in simulation.

    Those that keep their promise for too few requests at any load are left out.
    """
    from atoll.solve.templates.library import template_libraries

    asked = size_for_share(problem)
    roles = [str(role) for role in asked.roles]
    found = find_prospects(
        asked, catalog, template_libraries(asked, catalog), Derating(), roles, limit, 0.0
    )
    needed = {role: _share_of(asked, role) for role in roles}
    curves = {key: LoadCurve() for key in found}
    find_loads(asked, catalog, found, curves, needed.__getitem__, seed=seed)
    sized = []
    for key in sorted(found):
        share = curves[key].load(needed[key[0]])
        if share > 0.0:
            sized.append(SizedTemplate(*key, _scale(found[key], share), share))
    return tuple(sized)


def size_for_share(problem: Problem) -> Problem:
    """Return the problem whose capacities are those for the shares of requests that services ask for."""
    settings = problem.settings.model_copy(update={"sized_for": "share"})
    return problem.replace(settings=settings, running=())


def trim_templates(
    templates: Sequence[SizedTemplate], factors: Mapping[str, float]
) -> tuple[SizedTemplate, ...]:
    """Return templates carrying less, by the factor of their service."""
    return tuple(one.trim(factors.get(parse_role(one.role).model, 1.0)) for one in templates)


def _share_of(problem: Problem, role: str) -> float:
    """The share of requests that must keep the promise of a role alone."""
    target = problem.service(parse_role(role).model).target
    return Allowance(target, Multiple(1.0), Multiple(1.0)).share(parse_role(role).phase)


def _scale(instance: Instance, factor: float) -> Instance:
    flows = tuple(f.model_copy(update={"per_s": f.per_s * factor}) for f in instance.flows)
    carried = instance.throughput_per_s * factor
    return instance.model_copy(update={"flows": flows, "throughput_per_s": carried})
