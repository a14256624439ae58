"""Where savings in Coral's set-ups come from, and what is left of them: one change at a time.

Coral saves 1.62 times over Homo and 1.60 over Cauchy in its core set-up, 3.14 and 2.66 in the extended one.
Each row changes one thing about the row before, for everybody or for the baselines alone:

    largest     as the next two, but the model that costs most costs baselines as many times ours as in the
                paper (4.93 and 4.08 in the extended set-up): what the profile of this one model makes
    literal     Homo as its text has it: as many as cover demand of the replica with the most throughput per
                dollar, on single nodes whose GPUs hold one tensor-parallel replica, as in the paper's runs
    last        the last replica may be a cheaper one that covers the rest; Cauchy on the same nodes
    split       a node is split as carries most: copies side by side, tensor parallel, pipelines inside
    rows        replicas may also be pipelines over several equal nodes (the cheaper of both plans)
    engines     layouts are those that an engine of the fleet runs, for baselines and for ours
    together    prefill and decode may share an instance where that is cheaper
    cut         machines may be cut into slices for several instances

Rows to "rows" are figure 7 with free layouts, "engines" is what of that can be run. What is left between the
paper's ratio and the first row is not method: its performance model, prices of nodes that are not sold, the
split of BurstGPT's lengths and its trace of what is available are not public (`coral-core.yaml`). `--quick`
is the core set-up alone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from atoll.catalog import Catalog
from atoll.plan.plan import Plan
from atoll.plan.problem import Problem
from atoll.solve.plan_request import PlanRequest
from atoll.solve.registry import solve
from atoll.solve.rent.rent_baselines import plan_cauchy, plan_homogeneous, replicas
from atoll.solve.templates.generate import EngineSearch, generate
from atoll.solve.templates.library import Libraries, role_tables
from benchmarks.planning.coral import as_it_runs, core, extended
from benchmarks.report import Figure, finish, options

PAPER = {"core": (1.62, 1.60), "extended": (3.14, 2.66)}
LARGEST = {"core": ("qwen3-32b", 2.02, 1.88), "extended": ("qwen3-235b-a22b", 4.93, 4.08)}
"""The model that costs most, and the paper's savings on it."""
SETUPS: dict[str, Callable[[], Problem]] = {"core": core, "extended": extended}
DEADLINE_S = 3600.0
BASELINES = ("homogeneous", "cauchy")


@dataclass(frozen=True)
class Row:
    """USD per hour of ours and the two baselines after a change; None where it has no plan of its own."""

    change: str
    ours: float
    homo: float
    cauchy: float | None

    @property
    def ratios(self) -> tuple[float, float | None]:
        """Homo and Cauchy over ours."""
        return self.homo / self.ours, None if self.cauchy is None else self.cauchy / self.ours


def one_replica_per_node(problem: Problem, catalog: Catalog) -> Libraries:
    """Return single nodes whose GPUs hold one tensor-parallel replica."""
    search = EngineSearch(None, tuple(range(len(problem.kinds))), tp="all", max_nodes=1)
    roles = {
        str(role): generate(role_tables(problem, catalog, role, search), 1)
        for role in problem.roles
    }
    return Libraries(problem.kinds, roles)


def literal_usd(problem: Problem, libraries: Libraries) -> float:
    """Return Homo's cost by its text in USD per hour."""
    return sum(literal_costs(problem, libraries).values())


def literal_costs(problem: Problem, libraries: Libraries) -> dict[str, float]:
    """Return it by service: the most efficient replica of each role, as many as cover demand."""
    usd = dict.fromkeys((service.name for service in problem.services), 0.0)
    for role, options_of_role in replicas(problem, libraries, 1).items():
        best = options_of_role[0]
        count = math.ceil(problem.demand(role) / best.throughput - 1e-9)
        usd[role.partition("/")[0]] += count * best.usd
    return usd


def plan_by(solver: str, problem: Problem, catalog: Catalog) -> Plan:
    """Return a solver's plan, which must meet all demand."""
    plan = solve(problem, PlanRequest(solver=solver, deadline_s=DEADLINE_S, catalog=catalog))
    if not plan.instances or min(plan.served_fraction.values()) < 1.0:
        raise SystemExit(f"{problem.name}: {solver} does not meet demand")
    return plan


def strongest(baseline: str, problem: Problem, catalog: Catalog) -> float:
    """Return the cheaper of a baseline's plans on single nodes and on rows of equal ones, USD per hour."""
    return min(
        plan_by(name, problem, catalog).usd_per_hour for name in (baseline, f"{baseline}-node")
    )


def cost_of_service(plan: Plan, service: str) -> float:
    """Return what the instances of a service cost, USD per hour."""
    return sum(i.usd_per_hour for i in plan.instances if i.service == service)


def measure(setup: str, problem: Problem, catalog: Catalog) -> list[Row]:
    """Print the table of a set-up and return it."""
    began = time.process_time()
    ours = plan_by("optimal", problem, catalog)
    nodes = one_replica_per_node(problem, catalog)
    homo = plan_homogeneous(problem, catalog, nodes, max_nodes=1)
    cauchy = plan_cauchy(problem, catalog, nodes, max_nodes=1)
    model, *told = LARGEST[setup]
    own = cost_of_service(ours, model)
    literal = literal_costs(problem, nodes)
    others = (
        sum(literal.values()) - literal[model],
        cauchy.usd_per_hour - cost_of_service(cauchy, model),
    )
    largest = [rest + ratio * own for rest, ratio in zip(others, told, strict=True)]
    rows = [
        Row("largest", ours.usd_per_hour, *largest),
        Row("literal", ours.usd_per_hour, sum(literal.values()), None),
        Row("last", ours.usd_per_hour, homo.usd_per_hour, cauchy.usd_per_hour),
    ]
    split = [plan_by(f"{name}-node", problem, catalog) for name in BASELINES]
    rows.append(Row("split", ours.usd_per_hour, *(plan.usd_per_hour for plan in split)))
    rows.append(
        Row("rows", ours.usd_per_hour, *(strongest(n, problem, catalog) for n in BASELINES))
    )
    here = [cost_of_service(plan, model) / own for plan in split]
    print(
        f"\n{setup}: {model}, {own / ours.usd_per_hour:.0%} of our cost, alone costs Homo {here[0]:.2f}"
        f" and Cauchy {here[1]:.2f} times as much on nodes split best (paper {told[0]:.2f}, {told[1]:.2f})"
    )
    for change, changed in (
        ("engines", as_it_runs(problem)),
        ("together", as_it_runs(problem, together=True)),
        ("cut", as_it_runs(problem, together=True, cut=True)),
    ):
        best = plan_by("optimal", changed, catalog).usd_per_hour
        rows.append(Row(change, best, *(strongest(name, changed, catalog) for name in BASELINES)))
    print(f"{'':10s}{'ours':>10s}{'Homo':>18s}{'Cauchy':>18s}")
    homo_told, cauchy_told = PAPER[setup]
    print(f"{'paper':10s}{'':>10s}{f'x{homo_told:.2f}':>18s}{f'x{cauchy_told:.2f}':>18s}")
    for row in rows:
        first, second = row.ratios
        shown = "-" if second is None else f"${row.cauchy:.2f} x{second:.2f}"
        print(
            f"{row.change:10s}{f'${row.ours:.2f}':>10s}{f'${row.homo:.2f} x{first:.2f}':>18s}{shown:>18s}"
        )
    print(f"({time.process_time() - began:.0f} CPU-s)", flush=True)
    return rows


def main() -> None:
    """Print a table for each set-up."""
    quick = options(__doc__ or "").quick
    catalog = Catalog.default()
    figures = []
    for setup, make in SETUPS.items():
        if quick and setup != "core":
            continue
        for row in measure(setup, make(), catalog):
            for name, ratio, told in zip(("homo", "cauchy"), row.ratios, PAPER[setup], strict=True):
                if ratio is not None:
                    figures.append(
                        Figure(f"{setup}_{row.change}_vs_{name}", ratio, None, f"paper {told}")
                    )
    finish(figures)


if __name__ == "__main__":
    main()
