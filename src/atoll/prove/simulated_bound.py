"""The least that any plan costs, if no instance carries more than a simulation of it alone finds.

Instances of a service need not keep the promise of the same share of requests: where one keeps all, another
may lose more. So a template counts with the most requests/s that keep the promise of its phase at any load,
over the share that must (`GoodCurve`), whatever its engine and however its GPUs split layers. Templates that
nobody has simulated count with `UNKNOWN` of what the performance model gives them. The cheapest allocation of
all that is a bound. Where it uses templates that are unknown they are simulated, and it is looked for again,
until it has none or is as dear as the plan it is for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from atoll.perf.layers import node_splits
from atoll.prove.load_curves import STEPS, TOP, LoadCurve, find_loads
from atoll.prove.simulation_deadline import SimulationCutShortError
from atoll.solve.assembly import keep
from atoll.solve.derating import Derating, node_set
from atoll.solve.templates.library import engine_searches

if TYPE_CHECKING:
    from atoll.catalog.catalog import Catalog
    from atoll.plan.plan import Instance, Plan
    from atoll.plan.problem import Problem
    from atoll.prove.load_curves import Watch
    from atoll.prove.prospects import Key

UNKNOWN = 1.1
"""What a template that nobody has simulated carries at most, over what the performance model says: one of 120
random ones carried more (docs/internals/promises.md)."""
_MIN_GAIN = 1.02
"""By how much more a template might carry at loads that nobody has simulated, for them to be."""
_MIN_SHARE = 0.1
"""Targets below this count as this."""
_ROUNDS = 6
"""Allocations at most; a bound that is found with fewer holds as well, and is lower."""


class GoodCurve(LoadCurve):
    """A load curve of which the most requests/s that keep their promise is wanted, also where too few do."""

    def next_step(self, share: float) -> int | None:
        """Return the load to simulate next, None where the most is known to a step or to `_MIN_GAIN`."""
        step = super().next_step(share)
        if step is not None:
            return step
        least = _MIN_GAIN * max([self.max_load(share), *self._at_points(share)])
        open_ends = [
            (most, a, b) for most, a, b in self._beyond(share) if b - a > 1 and most > least
        ]
        if not open_ends:
            return None
        _, a, b = max(open_ends)
        return (a + b) // 2

    def max_good(self, share: float) -> float:
        """Return the most that keep their promise at any load, over the share that must."""
        beyond = [most for most, _, _ in self._beyond(share)]
        return max([self.max_load(share), *self._at_points(share), *beyond])

    def _at_points(self, share: float) -> list[float]:
        return [at / STEPS * kept / share for at, kept in self.kept.items()]

    def _beyond(self, share: float) -> list[tuple[float, int, int]]:
        """By range of loads, from the first that is too much on, what is kept there at most.

        With more load no larger share keeps its promise, so at the start of a range that is most.
        """
        first = round(self.max_load(share) * STEPS)
        points = sorted(at for at in self.kept if at >= first and self.kept[at] < share)
        ends = [*points[1:], *([self.top] if points and points[-1] < self.top else [])]
        return [
            (b / STEPS * self.kept[a] / share, a, b) for a, b in zip(points, ends, strict=False)
        ]


class SimulatedBound:
    """What templates carry at most, as far as they were simulated, and the bound that follows.

    `plan_with` finds the cheapest allocation for a problem with templates carrying so much. `share_of` says
    by role which share of requests must keep its promise for the service's to be kept.
    """

    def __init__(
        self,
        problem: Problem,
        catalog: Catalog,
        plan_with: Callable[[Problem, Derating], Plan],
        share_of: Callable[[str], float],
        *,
        watch: Watch | None = None,
    ) -> None:
        self._problem, self._catalog, self._watch = problem, catalog, watch
        self._plan_with, self._share_of = plan_with, share_of
        self._most: dict[Key, float] = {}
        # What any template may count with: the largest load, all of whose requests keep their promise.
        least = min((share_of(str(role)) for role in problem.roles), default=1.0)
        self._largest = TOP / STEPS / max(least, _MIN_SHARE)
        # No plan carries more than the model says: so less is asked for than there is, by as much as
        # templates may carry more.
        self._eased = problem.replace(
            services=tuple(
                service.model_copy(update={"headroom": service.headroom / self._largest})
                for service in problem.services
            )
        )

    def find(self, enough: float) -> float | None:
        """Return a bound, as high as is found up to `enough`; None where there is none."""
        found: float | None = None
        for _ in range(_ROUNDS):
            shares = {key: most / self._largest for key, most in self._most.items()}
            unknown = min(1.0, UNKNOWN / self._largest)
            try:
                plan = self._plan_with(self._eased, Derating(shares, default=unknown))
                if plan.bound is None:
                    return found
                # All capacities so far were upper bounds, so each of the allocations is one.
                found = plan.bound if found is None else max(found, plan.bound)
                if found >= enough or plan.cut_short or not self._simulate(plan.instances):
                    break
            except SimulationCutShortError:
                break  # what was found before holds
        return found

    def _simulate(self, instances: Iterable[Instance]) -> bool:
        """Find what the templates of instances carry at most; say whether there were any to simulate."""
        new = {(i.role, node_set(i)): i for i in instances}
        new = {key: one for key, one in new.items() if key not in self._most}
        known = {key: self._variants(one) for key, one in new.items()}
        most = dict.fromkeys(new, 0.0)
        while True:
            # The best of what is left of each template, if it may carry more than what was simulated.
            asked: dict[Key, tuple[Key, Instance]] = {}
            for key, variants in known.items():
                best = max(variants, key=lambda one: variants[one].throughput_per_s, default=None)
                if best is not None and variants[best].throughput_per_s * UNKNOWN > most[key]:
                    asked[best] = key, variants.pop(best)
            if not asked:
                break
            curves = {one: GoodCurve(top=TOP) for one in asked}
            find_loads(
                self._problem,
                self._catalog,
                {one: instance for one, (_, instance) in asked.items()},
                curves,
                self._share_of,
                seed=self._problem.settings.seed,
                watch=self._watch,
                at_best=True,
            )
            for one, (key, instance) in asked.items():
                share = max(self._share_of(key[0]), _MIN_SHARE)
                most[key] = max(most[key], curves[one].max_good(share) * instance.throughput_per_s)
        for key, template in new.items():
            analytic = keep(self._problem, self._catalog, template).throughput_per_s
            self._most[key] = most[key] / analytic if analytic > 0.0 else UNKNOWN
        return bool(new)

    def _variants(self, instance: Instance) -> dict[Key, Instance]:
        """The same nodes and layers with every engine and split of the GPUs of a node."""
        problem, role = self._problem, instance.role_id
        spec = self._catalog.model(problem.service(instance.service).model).llm
        kinds = {node.kind for node in instance.nodes}
        found: dict[Key, Instance] = {}
        for search in engine_searches(problem, self._catalog, role):
            columns = {problem.kinds[c] for c in search.columns}
            if not kinds <= columns or len(instance.nodes) > search.max_nodes:
                continue
            node = self._catalog.node(instance.nodes[0].kind)
            splits = node_splits(spec, node) if len(instance.nodes) == 1 else ()
            if search.tp is not None:
                splits = (node.count if search.tp == "all" else search.tp,)
            for tp in splits or (instance.nodes[0].tp,):
                nodes = tuple(one.model_copy(update={"tp": tp}) for one in instance.nodes)
                if len({self._catalog.node(kind).count for kind in kinds}) > 1:
                    nodes = instance.nodes
                variant = instance.model_copy(update={"engine": search.engine, "nodes": nodes})
                named = ((search.engine or "", tp),)
                key = (instance.role, (*node_set(instance), *named))
                found[key] = keep(problem, self._catalog, variant)
        return found
