"""Planning where energy or carbon count beside rent.

Solvers rent what is cheapest. So machines get a price that stands for all that counts: their rent, and what
they draw, each with its weight. What a machine draws depends on the plan: the first prices are for machines
that wait, the second for machines at capacity, and after that for what the best plan so far makes of them, a
few times over. Of all plans the one is taken whose true objective is least; the cheapest plan is among them,
so none is worse than that one. Where rent has no weight, machines go to the cheapest market of their region
at last: there they count as much. Budgets and other limits hold in true dollars throughout.

The bound: what waiting machines count is linear, so the proven bound of the first prices holds for that
part; the steps of every request add at least what the best kind of node on offer would take for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from atoll.core.errors import UsageError
from atoll.core.units import format_price
from atoll.plan.footprint import ObjectiveWeights, PowerGrid
from atoll.plan.power import (
    PlanDraw,
    draw_of,
    guess_machine_w,
    machine_idle_w,
    min_request_joules,
    power_use,
    usd_per_watt,
    weighted_usd,
)
from atoll.plan.validate.violation import InvalidPlanError
from atoll.solve.assembly import price
from atoll.solve.deadline import Deadline
from atoll.solve.effort import Effort, RentLimit
from atoll.solve.packing import rent
from atoll.solve.plan_request import FindPlan, PlanRequest

if TYPE_CHECKING:
    from atoll.catalog.catalog import Catalog
    from atoll.plan.plan import OfferKey, Plan
    from atoll.plan.problem import Problem

_ROUNDS = 3
"""How often prices are made anew of what the best plan draws."""
_TIE = 0.02
"""Weight of rent where it has none, as a share of all: of equal machines the cheaper one."""
_DIGITS = 9
_ALL_SERVED = 1.0 - 1e-9
"""Share of demand from which on it counts as met: the rest is rounding."""
_SURVIVAL = "the price of surviving"


@dataclass(frozen=True)
class WeighedPlan:
    """A plan in true dollars, what it draws, its objective in USD per hour, and watts by machine."""

    plan: Plan
    draw: PlanDraw
    value: float
    machine_w: Mapping[OfferKey, float]

    def merit(self, problem: Problem) -> tuple[float, ...]:
        """More is better: what is served, promises kept, then how little it counts, then costs."""
        from atoll.solve.explain.plan_explanation import served_share

        settled = problem.settled(self.plan.mixes)
        served = (served_share(self.plan, settled), served_share(self.plan, settled, mean=True))
        kept = sum(promise.is_kept for promise in self.plan.promises)
        # Rounded, so that what differs by rounding only is decided by what comes next.
        return (
            *(round(share, _DIGITS) for share in served),
            float(kept),
            -float(f"{self.value:.9g}"),
            -self.plan.usd_per_hour,
        )


def plan_weighted(
    problem: Problem,
    request: PlanRequest,
    find: FindPlan,
    *,
    keep: FindPlan | None = None,
    on_plan: Callable[[WeighedPlan], None] | None = None,
) -> Plan:
    """Return the plan with the least weighted objective found, in true dollars, with its `power`.

    `find` plans for capacity where nothing but prices counts. With `keep`, which keeps promises, it is asked
    for the cheapest plan and for one at the prices of the best plan for capacity, and the better of them is
    taken. `on_plan` is told of every plan that was to choose from.
    """
    search = _Weighing(problem, request)
    best = search.run(find, keep)
    if on_plan is not None:
        for one in search.found:
            on_plan(one)
    return best


def stamp_power(plan: Plan, problem: Problem, catalog: Catalog) -> Plan:
    """Return a plan with what it draws; one without instances as it is."""
    if not plan.instances:
        return plan
    settled = problem.settled(plan.mixes)
    use = power_use(plan, settled, draw_of(plan, settled, catalog))
    return plan.model_copy(update={"power": use})


def refuse_unweighable(problem: Problem) -> None:
    """Raise UsageError where weights cannot be kept: clusters, a grid that nobody knows."""
    if problem.family == "place":
        raise UsageError(
            f"{problem.name} has a fixed cluster: energy and carbon are weighed where nodes are rented",
            hint="leave `objective` out, or set it to cost",
            field="objective",
        )
    for offer in problem.offers:
        if offer.available > 0:
            usd_per_watt(problem.weights, problem.grid, offer.region)


class _Weighing:
    """Where the search for the best weighted plan stands."""

    def __init__(self, problem: Problem, request: PlanRequest) -> None:
        refuse_unweighable(problem)
        self.problem, self.request = problem, request
        self.catalog = catalog = request.catalog_for(problem)
        self.deadline = Deadline(request.deadline_s)
        self.offers = {offer.key: offer for offer in problem.offers}
        weights, grid = problem.weights, problem.grid
        self.per_watt = {
            key: usd_per_watt(weights, grid, offer.region) if offer.available > 0 else 0.0
            for key, offer in self.offers.items()
        }
        self.idle_w = {key: machine_idle_w(catalog, key[1]) for key in self.offers}
        self.guess_w = {
            key: guess_machine_w(problem, catalog, offer) for key, offer in self.offers.items()
        }
        # What simplicity may cost is a share of rent, which is not what counts here.
        self._cheapest = problem.settings.model_copy(update={"simplicity": 0.0})
        self.found: list[WeighedPlan] = []
        self.asked = 0

    def run(self, find: FindPlan, keep: FindPlan | None) -> Plan:
        """Return the best plan found; `found` holds all of them."""
        # Without weights: what is asked for below plans at prices alone.
        plain = self.problem.replace(
            weights=ObjectiveWeights(), grid=PowerGrid(), settings=self._cheapest
        )
        cheapest = find(plain, self._step(self.request.effort))
        if not cheapest.instances:
            return self._rename(cheapest)
        first = self._take(cheapest, self.guess_w)
        bound = self._bound(find)
        machine_w: Mapping[OfferKey, float] = self.guess_w
        # The bound was planned for at these prices.
        asked = {self._key(self.idle_w)}
        for _ in range(_ROUNDS):
            if self._key(machine_w) in asked:
                break
            asked.add(self._key(machine_w))
            self._try(find, machine_w)
            # What the best plan draws is a better guess: prices of the next round.
            machine_w = self._linearise(self._best().draw)
        if self.problem.weights.usd == 0.0:
            # Without what decides between equals there may be a better one.
            self._try(find, self._linearise(self._best().draw), tie=False)
        best = self._best()
        if keep is not None:
            # Plans for capacity do not keep promises: only those found from here on are to choose from.
            self.found.clear()
            first = self._take(keep(plain, self._step(self.request.effort)), first.machine_w)
            self._try(keep, self._linearise(best.draw))
            best = self._best()
        if self.problem.weights.usd == 0.0:
            best = self._exchange(best)
        return self._stamp(best, first, bound)

    def _step(self, effort: Effort) -> PlanRequest:
        """The request for one plan on the way: half of the time left."""
        return replace(self.request, effort=effort, deadline_s=self.deadline.share(0.5))

    def _best(self) -> WeighedPlan:
        return max(self.found, key=lambda one: one.merit(self.problem))

    def _try(
        self, find: FindPlan, machine_w: Mapping[OfferKey, float], *, tie: bool = True
    ) -> Plan:
        """Plan at the prices of machines that draw this much."""
        surrogate, effort, _ = self._surrogate(machine_w, tie=tie)
        plan = find(surrogate, self._step(effort))
        self._take(plan, machine_w)
        return plan

    def _exchange(self, best: WeighedPlan) -> WeighedPlan:
        """Have the machines of a plan on the cheapest markets of their region: they draw as much there."""
        plan, limits = best.plan, self.problem.limits
        # What is lost now and then is another machine, and what runs stays where it is.
        if limits.spot_loss_per_h > 0.0 or any(one.kept for one in plan.instances):
            return best
        free = {key: offer.available for key, offer in self.offers.items()}
        moved: dict[tuple[str, str, str, str], tuple[OfferKey, int]] = {}
        instances = []
        for one in plan.instances:
            nodes = []
            for node in one.nodes:
                where = (one.region_of(node), node.node_type)
                own = f"{one.id} {node.id}" if node.gpu_ids is None else f"{node.slot}"
                machine = (*where, node.market, own)
                if machine not in moved:
                    here = [k for k in free if k[:2] == where and free[k] > 0]
                    if node.gpu_ids is not None:
                        here = [k for k in here if not self.offers[k].whole]
                    if not here:
                        return best
                    key = min(here, key=lambda k: (self.offers[k].usd_per_hour, k))
                    free[key] -= 1
                    moved[machine] = key, self.offers[key].available - free[key] - 1
                key, slot = moved[machine]
                update = {"market": key[2]} | ({} if node.gpu_ids is None else {"slot": slot})
                nodes.append(node.model_copy(update=update))
            instances.append(one.model_copy(update={"nodes": tuple(nodes)}))
        self._take(plan.model_copy(update={"instances": tuple(instances)}), best.machine_w)
        return self._best()

    def _take(self, plan: Plan, machine_w: Mapping[OfferKey, float]) -> WeighedPlan:
        """Note a plan in true dollars; one that breaks a limit there is left out."""
        from atoll.plan.validate.check import check

        true = self._recost(plan)
        draw = draw_of(true, self.problem, self.catalog)
        value = weighted_usd(true, self.problem.weights, self.problem.grid, draw)
        one = WeighedPlan(true, draw, value, machine_w)
        self.asked += 1
        text = f"plan {self.asked}: {format_price(true.usd_per_hour)}, weighed {value:.4g}"
        self.request.say("weighing", text)
        try:
            check(true, self.problem.settled(true.mixes), self.catalog)
        except InvalidPlanError:
            # The first is planned at true prices: that it breaks a limit is a fault, not bad luck.
            if not self.found:
                raise
            return one
        if true.instances:
            self.found.append(one)
        return one

    def _key(self, machine_w: Mapping[OfferKey, float]) -> tuple[float, ...]:
        # Prices that agree to six digits count as the same.
        return tuple(float(f"{machine_w[key]:.6g}") for key in self.offers)

    def _linearise(self, draw: PlanDraw) -> dict[OfferKey, float]:
        """Return the power of machines in a plan, those in use; the others are guessed."""
        used = {key: draw.machines[key] / n for key, n in draw.counts.items() if n}
        return {**self.guess_w, **used}

    def _surrogate(
        self, machine_w: Mapping[OfferKey, float], *, tie: bool
    ) -> tuple[Problem, Effort, float]:
        """The problem at prices that stand for all that counts, on the scale of rents; and that scale."""
        weight = self.problem.weights.usd
        drawn = {key: watts * self.per_watt[key] for key, watts in machine_w.items()}
        rents = {key: offer.usd_per_hour for key, offer in self.offers.items()}
        total = sum(rents.values())
        if tie and weight == 0.0 and total > 0.0:
            weight = _TIE * sum(drawn.values()) / total
        prices = {key: weight * rents[key] + drawn[key] for key in self.offers}
        counted = sum(prices.values())
        # Solvers know what a cent is; weights may be of any size.
        scale = total / counted if total > 0.0 and counted > 0.0 else 1.0
        offers = tuple(
            offer.model_copy(update={"usd_per_hour": prices[key] * scale})
            for key, offer in self.offers.items()
        )
        budget = self.problem.limits.budget_usd_per_hour
        effort = self.request.effort
        limits = self.problem.limits
        # A budget is in true dollars, which these prices are not: it goes with the true rents.
        if budget is not None:
            effort = replace(effort, rent_limit=RentLimit(rents, budget))
            limits = limits.model_copy(update={"budget_usd_per_hour": None})
        surrogate = self.problem.replace(
            offers=offers,
            limits=limits,
            weights=ObjectiveWeights(),
            grid=PowerGrid(),
            settings=self._cheapest,
        )
        return surrogate, effort, scale

    def _bound(self, find: FindPlan) -> float | None:
        """Return a lower bound on any plan that serves all demand; the plan of those prices is tried, too."""
        surrogate, effort, scale = self._surrogate(self.idle_w, tie=False)
        plan = find(surrogate, self._step(effort))
        if plan.instances:
            self._take(plan, self.idle_w)
        if plan.bound is None or plan.status not in ("optimal", "feasible"):
            return None
        # Starting counts in dollars alone: at most this share of the bound is for that.
        waiting = plan.bound / scale / (1.0 + self.problem.settings.init_penalty)
        min_per_watt = min(self.per_watt[key] for key, o in self.offers.items() if o.available > 0)
        # Variants need not be used, so their energy is no part of a lower bound.
        optional = {name for names in self.problem.variants.values() for name in names}
        working = sum(
            service.rate_per_s * min_request_joules(self.problem, self.catalog, service)
            for service in self.problem.services
            if service.name not in optional
        )
        return waiting + min_per_watt * working

    def _recost(self, plan: Plan) -> Plan:
        """The plan at true prices; nothing is proven of its dollars."""
        instances = tuple(
            one.model_copy(update={"usd_per_hour": price(self.problem, one.region, one.nodes)})
            for one in plan.instances
        )
        usd = rent(self.problem, instances)
        fresh = sum(one.usd_per_hour for one in instances if not one.kept)
        init = self.problem.settings.init_penalty * fresh
        return self._rename(plan).model_copy(
            update={
                "instances": instances,
                "usd_per_hour": usd,
                "init_usd": init,
                "objective": usd + init if plan.objective is not None else None,
                "bound": None,
                "gap": None,
                "capacity_bound": None,
                # What a point of error saves was found at other prices.
                "mixes": tuple(
                    mix.model_copy(update={"usd_per_point": None}) for mix in plan.mixes
                ),
                "status": "feasible" if plan.status == "optimal" else plan.status,
                "notes": tuple(note for note in plan.notes if not note.startswith(_SURVIVAL)),
            }
        )

    def _rename(self, plan: Plan) -> Plan:
        settled = self.problem.settled(plan.mixes)
        return plan.model_copy(update={"problem_hash": settled.content_hash()})

    def _stamp(self, best: WeighedPlan, cheapest: WeighedPlan, bound: float | None) -> Plan:
        """The best plan with what it draws, and the dollars of the cheapest one beside."""
        settled = self.problem.settled(best.plan.mixes)
        use = power_use(best.plan, settled, best.draw)
        served = min(best.plan.served_fraction.values(), default=1.0) >= _ALL_SERVED
        known = bound is not None and served
        use = use.model_copy(
            update={
                "weighted_bound": min(bound or 0.0, best.value) if known else None,
                # So that nobody rents dear nodes unawares.
                "cheapest_usd_per_hour": cheapest.plan.usd_per_hour,
                "cheapest_watts": cheapest.draw.watts * self.problem.grid.pue,
            }
        )
        return best.plan.model_copy(update={"power": use})
