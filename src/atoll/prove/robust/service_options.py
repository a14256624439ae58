"""Several ways to serve each service: parts of plans that are made for worse than the fleet file says.

A *rung* is a problem made harder: GPUs that are slower by so many standard deviations of what the
performance model may be off by, more demand by so many of its own, or both; and of spot machines all, some or
none. A rung is planned like any problem, instances carrying what those of the plan without risk do. Whatever
is planned for a rung is a plan for the fleet, too, with more than it needs. The instances that a rung gives a
service are an *option* of that service: options of several rungs can stand side by side.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from atoll.catalog.overlay import apply_overlay
from atoll.core.errors import InternalError
from atoll.core.ids import parse_node_type
from atoll.perf.constants import SERVER_ERROR, OpClass, default_constants
from atoll.plan.validate.check import check
from atoll.plan.validate.violation import InvalidPlanError
from atoll.prove.robust.scenarios import spot_pools
from atoll.solve.assembly import assemble
from atoll.solve.packing import pack
from atoll.solve.resizing import sized_like

if TYPE_CHECKING:
    from atoll.catalog.catalog import Catalog
    from atoll.plan.plan import Instance, Plan
    from atoll.plan.problem import Offer, Problem
    from atoll.plan.robustness import RiskModel
    from atoll.solve.effort import Effort

Solve = Callable[["Problem", "Catalog", "Effort"], "Plan"]
STEPS = (0.5, 1.0, 1.5, 2.0, 2.5, 3.0)
"""How many standard deviations worse things are on the rungs."""
_SAFE_STEPS = (0.0, 1.0, 2.0, 3.0)
"""Standard deviations for which plans without spot are made."""
_MIXED_STEPS = (1.0, 2.0)
"""Those for which plans with less spot, or with spot of more pools, are made."""
_MIXED_SPOT_SHARE = 0.4
"""The largest share of GPUs that may be spot in a plan with less of it."""
_OPS = (OpClass.GEMM, OpClass.ATTENTION_PREFILL, OpClass.ATTENTION_DECODE)
"""Operators that take most of the time: by how much they are off is by how much a GPU is."""
SOLVER = "robust"


@dataclass(frozen=True)
class Rung:
    """A problem made harder, by so many standard deviations, in demand alone or with slower GPUs.

    `spot` is the largest share of GPUs that may be spot; None as the fleet says. With `spread` no pool of
    spot machines gives more than half of what it would.
    """

    steps: float
    slower: bool = True
    spot: float | None = None
    spread: bool = False


def list_rungs(problem: Problem, risk: RiskModel) -> list[Rung]:
    """Return the rungs that are worth planning, easiest first."""
    rungs = [Rung(steps, slower=False) for steps in STEPS]
    # Slower GPUs are a rung of their own only where the risk model has them.
    if risk.performance:
        rungs += [Rung(steps) for steps in STEPS]
    if spot_pools(problem) and (risk.spot_loss or 0.0) > 0.0:
        rungs += [Rung(steps, risk.performance, spot=0.0) for steps in _SAFE_STEPS]
        rungs += [Rung(steps, risk.performance, spot=_MIXED_SPOT_SHARE) for steps in _MIXED_STEPS]
        rungs += [Rung(steps, risk.performance, spread=True) for steps in _MIXED_STEPS]
    return rungs


class Rungs:
    """Rungs of one problem, planned and turned into plans for the problem itself."""

    def __init__(
        self,
        problem: Problem,
        catalog: Catalog,
        risk: RiskModel,
        nominal: Plan,
        solve: Solve,
        effort: Effort,
    ) -> None:
        self.problem, self.catalog, self.risk, self.nominal = problem, catalog, risk, nominal
        self._solve = solve
        self._sized, derating = sized_like(nominal, problem, catalog)
        # Options are only candidates, so they are solved to a rougher gap.
        self._effort = replace(effort, derating=derating, gap=max(effort.gap, 5e-3))

    def plan(self, rung: Rung) -> Plan | None:
        """Return a plan for the problem that serves all of a rung's demand; None where there is none."""
        found, catalog = self._harder(rung)
        plan = self._solve(found, catalog, self._effort)
        if plan.status not in ("optimal", "feasible"):
            return None
        return compose(self.problem, self.catalog, plan.instances)

    def _harder(self, rung: Rung) -> tuple[Problem, Catalog]:
        spread = {s.name: self.risk.demand_spread(s.name) for s in self.problem.services}
        slow = self._spreads() if self.risk.performance else {}
        typical = sorted(slow.values())[len(slow) // 2] if slow else 0.0
        everyone = sum(spread.values()) / len(spread)
        # Without slower GPUs all of the margin goes to demand: both spreads together.
        part = _part if rung.slower else math.hypot
        more = {name: rung.steps * part(own, typical) for name, own in spread.items()}
        services = tuple(
            s.model_copy(update={"headroom": s.headroom * math.exp(more[s.name])})
            for s in self._sized.services
        )
        # What demand does not take of a margin is for slower GPUs: what counts is both together.
        margin = rung.steps * part(everyone, typical)
        factors = {
            gpu: math.exp(max(0.0, rung.steps * math.hypot(everyone, own) - margin))
            for gpu, own in slow.items()
            if rung.slower
        }
        limits = self.problem.limits
        if rung.spot is not None:
            max_spot = rung.spot if limits.spot_share is None else min(rung.spot, limits.spot_share)
            limits = limits.model_copy(update={"spot_share": max_spot})
        offers = self._spread_out() if rung.spread else self.problem.offers
        harder = self._sized.replace(services=services, limits=limits, offers=offers)
        overlay = _slow_gpus(self.catalog, factors)
        if not overlay:
            return harder, self.catalog
        harder = harder.replace(overlays=(*harder.overlays, overlay))
        return harder, apply_overlay(self.catalog, overlay)

    def _spreads(self) -> dict[str, float]:
        """By GPU, the relative standard deviation of its times: operators that matter, and whole servers."""
        table, found = default_constants(), {}
        for name in sorted({parse_node_type(kind).whole_gpu for kind in self.problem.kinds}):
            ops = table.for_gpu(self.catalog.gpu(name)).ops
            found[name] = math.hypot(sum(ops[op].error for op in _OPS) / len(_OPS), SERVER_ERROR)
        return found

    def _spread_out(self) -> tuple[Offer, ...]:
        used = self.nominal.count_nodes()
        return tuple(
            # Half of what the plan takes of a pool, rounded up.
            offer.model_copy(update={"available": min(offer.available, -(-used[offer.key] // 2))})
            if offer.market == "spot" and used[offer.key] > 1
            else offer
            for offer in self.problem.offers
        )


def _part(own: float, other: float) -> float:
    """Of a margin against two independent spreads together, the part that is due to the first."""
    both = math.hypot(own, other)
    return own * own / both if both > 0.0 else 0.0


def _slow_gpus(catalog: Catalog, factors: Mapping[str, float]) -> dict[str, object]:
    """An overlay in which GPUs take so many times as long; kernel launches take what they do."""
    gpus: dict[str, object] = {}
    for name, factor in sorted(factors.items()):
        # A factor of rounding is no change of the catalog.
        if factor <= 1.0 + 1e-9:
            continue
        gpu = catalog.gpu(name)
        entry: dict[str, object] = {
            "fp16_tflops": gpu.fp16_tflops / factor,
            "bandwidth": gpu.bandwidth_bytes_per_s / factor,
        }
        if gpu.fp8_tflops is not None:
            entry["fp8_tflops"] = gpu.fp8_tflops / factor
        if gpu.fp4_tflops is not None:
            entry["fp4_tflops"] = gpu.fp4_tflops / factor
        gpus[name] = entry
    return {"gpus": gpus} if gpus else {}


def compose(problem: Problem, catalog: Catalog, instances: Iterable[Instance]) -> Plan | None:
    """Return instances as a plan for the problem; None where they do not stand together within its limits."""
    # Sorted, so that the same instances are always packed the same way.
    standing = sorted(instances, key=lambda i: i.id)
    try:
        packed = pack(problem, standing)
        plan = assemble(problem, packed, status="feasible", solver=SOLVER, catalog=catalog)
        check(plan, problem, catalog)
    except (InternalError, InvalidPlanError):
        return None
    return plan if plan.status in ("optimal", "feasible") else None
