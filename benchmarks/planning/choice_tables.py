"""GH/AGH's tables 2 to 5 and figure 2 on two families of instances; ratios beside the paper's.

Dollars are not comparable: the paper's source and numbers are not public. What can be compared is who is
dearer than whom, and by what factor. "benign" has the values that an author published for a related project
(`research.joint.public_values`), "harsh" those of the paper's text, where budget, storage and errors bind
(`research.joint.paper_instances`). (5h) is read as one cap on all storage, and once per type: with the cap
lifted, answers must keep it for every type.

No one instance has all of the paper's figures:

- 145.8 (S1 of table 2: GH and AGH, mean of stage 2), 89.88 (table 3: AGH as planned) and 381 to 468 (table 4
  at sigma 0.01, where a day's mean is the plan's own cost: spreads are 2 to 3 USD) are costs for the same
  size, budget and 24 h. Rent and storage are within the budget of 100 in all of them, so at least 281 of
  381, the optimum, are penalties of delay and unserved demand; in 145.8 at most 145.8 are, in 89.88 at most
  89.88. Scenarios move delays and errors by a quarter and arrivals by a fifth, not by a factor of two.
- GH pays 63.1 in S2 and in S3, under budgets of 75 and 72, and costs 314 and 1,162. What it pays is within
  both budgets: another placement of the same price, or another instance.
- AGH costs 145.8 with a budget of 100 and 136.6 with 75. A heuristic may do that, an optimum may not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from atoll.solve.joint.greedy.agh import agh
from atoll.solve.joint.greedy.gh import gh
from atoll.solve.joint.joint_check import violations
from atoll.solve.joint.joint_problem import Floats, JointAnswer, JointProblem, cost_of
from benchmarks.report import Figure, finish, options
from research.joint.exact.exact_search import exact
from research.joint.exchange.exchange import exchange
from research.joint.paper_instances import paper_instance
from research.joint.public_values import public_instance
from research.joint.robust import Uncertainty, plan_robustly
from research.joint.rolling import demand_walks, rolling, static
from research.joint.stage2 import draw_scenarios, evaluate

PAPER_SIZE = (6, 6, 10)
SCENARIOS = 500
JUDGED = 7_000
"""Seed of the scenarios that judge; robust plans are made with others."""
PLANNED = 9_000
STRESSES = (1.0, 1.2, 1.5)
PAPER_TABLE2 = {
    "S1": (145.8, 145.8),
    "S2": (314.4, 136.6),
    "S3": (1162.0, 343.0),
    "S4": (964.0, 140.0),
    "S5": (1811.0, 344.0),
}
"""Stage-2 cost of GH and AGH."""
TABLE2 = {
    "S1": (100.0, 1.0),
    "S2": (75.0, 1.0),
    "S3": (72.0, 1.0),
    "S4": (75.0, 5.0),
    "S5": (72.0, 5.0),
}
"""Budget in USD, factor on the unmet penalty of image and video types."""
PAPER_TABLE3 = {
    "all": "feasible, 89.88 USD",
    "without M1": "memory and delay broken",
    "without M2": "feasible, x1.50",
    "without M3": "delay broken",
}
PAPER_TABLE4 = {"DM-24h": 909.0, "GH-24h": 498.0, "AGH-24h": 564.0, "AGH-5min": 474.0}
"""USD at sigma 0.05."""
PAPER_GAPS = {"GH": 468.0 / 381.0, "AGH": 414.0 / 381.0}
"""Table 4 at sigma 0.01, over the exact solver: the nearest the paper has to costs beside the optimum."""
SEEDS = 30
AGH_MAX = 1.12
"""AGH over the optimum in the paper's table 4 at sigma 0.01 is 1.09; over ours it should be about that."""
PROVEN_SEEDS = {"benign": SEEDS, "harsh": 10}
"""Of the seeds, those for which the optimum is proven: where nothing binds that takes a tenth of a second."""
DAYS = {"benign": SEEDS, "harsh": 10}
"""Seeds of which days are rolled at a sigma of 0.05; a harsh day takes 12 CPU-seconds."""
STEADY_DAYS = 3
"""Those at a sigma of 0.01, where days are much alike."""
LOOSE = 400.0
PAPER_TABLE5_S = {
    (4, 4, 5): (0.39, 0.01, 0.0149),
    (6, 6, 10): (4.2, 0.01, 0.113),
    (10, 10, 10): (13.04, 0.3, 0.57),
    (15, 15, 10): (601.12, 0.5, 1.09),
    (20, 20, 20): (600.0, 0.9, 2.3),
}
"""Seconds of the exact solver, GH and AGH; some are bounds: GH less than 0.01, the exact solver over 600."""
PROOF_GAP, PROOF_NODES = 0.03, 100
"""What counts as proven in table 5, and the nodes that the search may look at for it."""

Solver = Callable[[JointProblem], JointAnswer]
FAMILIES: dict[str, Callable[..., JointProblem]] = {
    "benign": public_instance,
    "harsh": paper_instance,
}


def solve_exactly(problem: JointProblem) -> JointAnswer:
    """Return the proven optimum, from the exchange heuristic's answer."""
    return exact(problem, incumbent=exchange(problem)).answer


NOMINAL: dict[str, Solver] = {
    "MILP": solve_exactly,
    "GH": gh,
    "AGH": agh,
    "ours": exchange,
}


def exchange_once(problem: JointProblem) -> JointAnswer:
    """Return ours without another try: for those who ask for hundreds of answers."""
    return exchange(problem, tries=0)


def solve_robustly(problem: JointProblem, stresses: Sequence[float]) -> JointAnswer:
    """Return the robust placement for this uncertainty."""
    told = Uncertainty(stresses=tuple(stresses))
    return plan_robustly(problem, exchange_once, told, seed=PLANNED).answer


@dataclass(frozen=True)
class StressRow:
    """Mean stage-2 cost in USD and the share of (scenario, type) unserved, by method and stress."""

    cost: dict[str, dict[float, float]]
    violated: dict[str, dict[float, float]]


def measure_stress(seeds: Sequence[int]) -> StressRow:
    """Judge nominal and robust placements under stress, means over seeds (figure 2a, 2b).

    "robust" is told the stress that comes; "robust, all" is one placement for all three.
    """
    names = [*NOMINAL, "robust", "robust, all"]
    cost = {name: dict.fromkeys(STRESSES, 0.0) for name in names}
    violated = {name: dict.fromkeys(STRESSES, 0.0) for name in names}
    for seed in seeds:
        problem = paper_instance(*PAPER_SIZE, seed)
        nominal = {name: solver(problem) for name, solver in NOMINAL.items()}
        nominal["robust, all"] = solve_robustly(problem, STRESSES)
        for stress in STRESSES:
            answers = nominal | {"robust": solve_robustly(problem, (stress,))}
            drawn = draw_scenarios(problem, SCENARIOS, JUDGED + seed, stress=stress)
            for name, answer in answers.items():
                found = evaluate(problem, answer, drawn)
                cost[name][stress] += found.mean / len(seeds)
                violated[name][stress] += found.violation_rate / len(seeds)
    print(
        f"\nStage 2, {SCENARIOS} scenarios of +-25 % and +-20 %, mean over {len(seeds)} instances"
    )
    print(f"  {'':14s}" + "".join(f"{f'x{stress:g}':>12s}{'unserved':>10s}" for stress in STRESSES))
    for name in names:
        cells = "".join(f"{cost[name][s]:12.1f}{violated[name][s]:10.1%}" for s in STRESSES)
        print(f"  {name:14s}{cells}")
    return StressRow(cost, violated)


@dataclass(frozen=True)
class Ratios:
    """Ratios of two costs over seeds."""

    each: Floats

    @property
    def median(self) -> float:
        """The middle one."""
        return float(np.median(self.each))

    @property
    def text(self) -> str:
        """Median, and from the least to the largest."""
        return f"{self.median:7.2f} ({self.each.min():.2f} to {self.each.max():.2f})"


def measure_gaps(family: str, seeds: Sequence[int], proven: Sequence[int]) -> dict[str, Ratios]:
    """Costs as planned: GH over AGH, AGH over ours, both readings of (5h), and ours over the optimum."""
    found: dict[str, list[float]] = {}
    for seed in seeds:
        whole = FAMILIES[family](*PAPER_SIZE, seed)
        by_type = replace(whole, storage_gb=whole.storage_gb * len(whole.rate))
        for reading, problem in (("", whole), (", (5h) per type", by_type)):
            cost = {}
            for name in ("GH", "AGH", "ours"):
                answer = NOMINAL[name](problem)
                wrong = violations(whole, answer, per_type=problem is by_type)
                if wrong:
                    raise SystemExit(f"{family}, seed {seed}, {name}{reading}: {wrong[0]}")
                cost[name] = cost_of(problem, answer).total
            found.setdefault(f"GH/AGH{reading}", []).append(cost["GH"] / cost["AGH"])
            found.setdefault(f"AGH/ours{reading}", []).append(cost["AGH"] / cost["ours"])
            if seed in proven and problem is whole:
                best = cost_of(problem, solve_exactly(problem)).total
                for name in ("GH", "AGH", "ours"):
                    found.setdefault(f"{name}/optimum", []).append(cost[name] / best)
    ratios = {name: Ratios(np.array(each)) for name, each in found.items()}
    print(f"\nCosts as planned, {family}, {len(seeds)} seeds ({len(proven)} with a proven optimum)")
    for name, ratio in ratios.items():
        told = PAPER_GAPS.get(name.removesuffix("/optimum"))
        paper = f"   paper, table 4 at sigma 0.01: {told:.2f}" if told and "optimum" in name else ""
        print(f"  {name:24s}{ratio.text}{paper}")
    return ratios


def measure_budgets(family: str, seeds: Sequence[int]) -> dict[str, tuple[Ratios, float]]:
    """Table 2: GH and AGH under tight budgets and high penalties; AGH / GH by seed, and in the paper."""
    names = ("GH", "AGH", "ours")
    print(f"\nTable 2, {family}, {len(seeds)} seeds: medians of stage-2 cost (paid, unserved)")
    print(f"  {'':4s}" + "".join(f"{name:>26s}" for name in names), end="")
    print(f"{'AGH/GH':>10s}{'paper':>24s}")
    ratios = {}
    for label, (budget, penalty) in TABLE2.items():
        rows: dict[str, list[tuple[float, float, float]]] = {name: [] for name in names}
        for seed in seeds:
            problem = FAMILIES[family](*PAPER_SIZE, seed, budget=budget, media_unmet=penalty)
            drawn = draw_scenarios(problem, SCENARIOS, JUDGED + seed)
            for name in names:
                answer = NOMINAL[name](problem)
                cost = evaluate(problem, answer, drawn)
                rows[name].append((cost.mean, cost_of(problem, answer).paid, cost.violation_rate))
        own = {name: np.array(each) for name, each in rows.items()}
        paper = PAPER_TABLE2[label]
        ratio = Ratios(own["AGH"][:, 0] / own["GH"][:, 0])
        ratios[label] = (ratio, paper[1] / paper[0])
        cells = ""
        for name in names:
            usd, paid, unserved = np.median(own[name], axis=0)
            cells += f"{usd:12.1f} ({paid:5.1f}, {unserved:4.1%})"
        print(f"  {label:4s}{cells}{ratio.text:>26s}{ratios[label][1]:8.2f}")
    return ratios


def measure_loose(seeds: Sequence[int]) -> dict[str, float]:
    """Gaps to the optimum where the budget hardly binds; returns the largest by method, as shares.

    With the paper's budget, GH and AGH, taken literally, leave demand unserved: a share that does not fit is
    skipped, and nobody serves it later. This is what they cost where that seldom happens.
    """
    names = ("GH", "AGH", "ours")
    gaps: dict[str, list[float]] = {name: [] for name in names}
    for seed in seeds:
        problem = paper_instance(*PAPER_SIZE, seed, budget=LOOSE)
        best = cost_of(problem, NOMINAL["MILP"](problem)).total
        for name in names:
            gaps[name].append(cost_of(problem, NOMINAL[name](problem)).total / best - 1.0)
    print(f"\nGap to the optimum with a budget of {LOOSE:g} USD, {len(seeds)} instances")
    for name in names:
        print(f"  {name:5s} mean {np.mean(gaps[name]):7.1%}  worst {max(gaps[name]):7.1%}")
    return {name: max(gaps[name]) for name in names}


def measure_ablation(family: str, seeds: Sequence[int]) -> dict[str, tuple[float, float]]:
    """Table 3: GH or AGH without a mechanism; the share of instances that either breaks, and AGH's cost.

    Delay limits are halved, so that configurations matter, and the budget is loose. Costs are over AGH's with
    all mechanisms, medians.
    """
    print(f"\nTable 3, {family}: GH and AGH without a mechanism, delay limits halved")
    found = {}
    full: list[float] = []
    for label, left_out in (
        ("all", {}),
        ("without M1", {"select": False}),
        ("without M2", {"rank": False}),
        ("without M3", {"upgrade": False}),
    ):
        broken, constraints, costs = 0, set(), []
        for seed in seeds:
            problem = FAMILIES[family](*PAPER_SIZE, seed, budget=LOOSE)
            problem = replace(problem, delay_limit=0.5 * problem.delay_limit)
            answer = agh(problem, **left_out)
            wrong = violations(problem, answer) + violations(problem, gh(problem, **left_out))
            broken += bool(wrong)
            constraints |= {violation.constraint for violation in wrong}
            costs.append(cost_of(problem, answer).total)
        full = full or costs
        dearer = float(np.median(np.array(costs) / np.array(full)))
        found[label] = (broken / len(seeds), dearer)
        print(
            f"  {label:12s} {broken:3d} of {len(seeds)} instances broken "
            f"{', '.join(sorted(constraints)):14s} cost x{dearer:.2f}   paper: {PAPER_TABLE3[label]}"
        )
    return found


def measure_rolling(family: str, sigma: float, seeds: Sequence[int]) -> dict[str, Ratios]:
    """Table 4: a day kept or planned anew every 5 minutes, one walk an instance; ratios to DM-24h."""
    found: dict[str, list[float]] = {}
    began = time.process_time()
    for seed in seeds:
        problem = FAMILIES[family](*PAPER_SIZE, seed)
        walks = demand_walks(problem, sigma, trials=1, seed=seed)
        day = {
            "DM-24h": static(problem, NOMINAL["MILP"](problem), walks).mean,
            "GH-24h": static(problem, gh(problem), walks).mean,
            "AGH-24h": static(problem, agh(problem), walks).mean,
            "ours-24h": static(problem, exchange_once(problem), walks).mean,
            "GH-5min": rolling(problem, gh, walks).mean,
            "AGH-5min": rolling(problem, agh, walks).mean,
            "ours-5min": rolling(problem, exchange_once, walks).mean,
        }
        for name, usd in day.items():
            found.setdefault(name, []).append(usd / day["DM-24h"])
        # Sums of costs say what medians hide: a few days in which a type goes unserved.
        found.setdefault("usd ours-5min", []).append(day["ours-5min"])
        found.setdefault("usd ours-24h", []).append(day["ours-24h"])
    ratios = {name: Ratios(np.array(each)) for name, each in found.items()}
    print(
        f"\nTable 4, {family}, sigma {sigma:g}: over DM-24h, {len(seeds)} instances of 288 windows"
        f" ({time.process_time() - began:.0f} CPU-s)"
    )
    for name, ratio in ratios.items():
        if name.startswith("usd"):
            continue
        told = PAPER_TABLE4.get(name, PAPER_TABLE4["GH-24h"] if name == "GH-5min" else None)
        paper = "" if told is None else f"   paper at 0.05: {told / PAPER_TABLE4['DM-24h']:.2f}"
        print(f"  {name:10s}{ratio.text}{paper}")
    return ratios


@dataclass(frozen=True)
class SizeRatios:
    """A size in table 5: AGH's time over GH's, costs, the share of seeds proven (None where not tried)."""

    agh_time_vs_gh: float
    gh_vs_agh: Ratios
    agh_vs_ours: Ratios
    proven: float | None


def time_once(solver: Solver, problem: JointProblem) -> tuple[float, float]:
    """Return what a solver's answer costs in USD and the CPU seconds it took, once it is checked."""
    began = time.process_time()
    answer = solver(problem)
    cpu_s = time.process_time() - began
    wrong = violations(problem, answer)
    if wrong:
        raise SystemExit(f"{solver.__name__}: {wrong[0]}")
    return cost_of(problem, answer).total, cpu_s


def prove(problem: JointProblem) -> tuple[float, float]:
    """Return the gap that the exact solver leaves to its bound, from ours on, and its CPU seconds."""
    best = exchange(problem)
    began = time.process_time()
    gap = exact(problem, incumbent=best, gap=0.99 * PROOF_GAP, node_limit=PROOF_NODES).gap
    return gap, time.process_time() - began


def measure_sizes(family: str, seeds: Sequence[int]) -> dict[tuple[int, int, int], SizeRatios]:
    """Table 5: CPU seconds and costs by size, heuristics over each other; proofs where nothing binds."""
    names = ("GH", "AGH", "ours")
    print(f"\nTable 5, {family}, {len(seeds)} seeds: medians of CPU ms, and ratios")
    print(f"  {'':14s}{'GH':>9s}{'AGH':>9s}{'ours':>9s}{'AGH/GH time':>13s}{'paper':>7s}", end="")
    print(f"{'GH/AGH cost':>26s}{'AGH/ours cost':>26s}  proven to {PROOF_GAP:.0%}")
    rows = {}
    for size, (_, gh_s, agh_s) in PAPER_TABLE5_S.items():
        problems = [FAMILIES[family](*size, seed) for seed in seeds]
        each = {name: np.array([time_once(NOMINAL[name], p) for p in problems]) for name in names}
        proofs = np.array([prove(p) for p in problems]) if family == "benign" else None
        usd = {name: own[:, 0] for name, own in each.items()}
        cpu_s = {name: float(np.median(own[:, 1])) for name, own in each.items()}
        row = rows[size] = SizeRatios(
            cpu_s["AGH"] / cpu_s["GH"],
            Ratios(usd["GH"] / usd["AGH"]),
            Ratios(usd["AGH"] / usd["ours"]),
            None if proofs is None else float((proofs[:, 0] <= PROOF_GAP).mean()),
        )
        times = "".join(f"{1e3 * cpu_s[name]:9.2f}" for name in names)
        proven = "see benchmarks.choice"
        if proofs is not None:
            middle, most = np.median(proofs[:, 1]), proofs[:, 1].max()
            proven = f"{row.proven:.0%}, {middle:.2f} CPU-s (most {most:.1f})"
        print(
            f"  {size!s:14s}{times}{row.agh_time_vs_gh:13.1f}{agh_s / gh_s:7.1f}"
            f"{row.gh_vs_agh.text:>26s}{row.agh_vs_ours.text:>26s}  {proven}",
            flush=True,
        )
    return rows


@dataclass(frozen=True)
class FamilyTables:
    """Tables 2 to 5 on a family of instances; `rolled` is by sigma, `sized` by size."""

    family: str
    gaps: dict[str, Ratios]
    budgets: dict[str, tuple[Ratios, float]]
    ablated: dict[str, tuple[float, float]]
    rolled: dict[float, dict[str, Ratios]]
    sized: dict[tuple[int, int, int], SizeRatios]

    def figures(self) -> list[Figure]:
        """Return the figures to record."""
        agh, greedy = self.gaps["AGH/ours"], self.gaps["GH/AGH"]
        first = self.budgets["S1"]
        benign = self.family == "benign"
        name = self.family
        inside = f"{(agh.each <= AGH_MAX).mean():.0%} of seeds within {AGH_MAX}"
        largest = self.sized[max(self.sized)]
        m1, m2, m3 = (self.ablated[f"without {m}"] for m in ("M1", "M2", "M3"))
        return [
            Figure(f"{name}_agh_vs_ours", agh.median, AGH_MAX if benign else None, inside),
            Figure(
                f"{name}_agh_vs_ours_max",
                float(agh.each.max()),
                AGH_MAX if benign else None,
                f"seed {agh.each.argmax()}",
            ),
            *(
                Figure(
                    f"{name}_{who.lower()}_vs_optimum_max",
                    float(self.gaps[f"{who}/optimum"].each.max()),
                    None,
                    f"{len(self.gaps[f'{who}/optimum'].each)} proven",
                )
                for who in ("AGH", "ours")
            ),
            Figure(f"{name}_gh_vs_agh", greedy.median, None, "as planned"),
            Figure(f"{name}_gh_vs_agh_s1", 1.0 / first[0].median, None, "stage 2; paper 1.00"),
            *(
                Figure(
                    f"{name}_agh_vs_gh_{label.lower()}",
                    ratio.median,
                    None,
                    f"{ratio.each.min():.2f} to {ratio.each.max():.2f}, paper {paper:.2f}",
                )
                for label, (ratio, paper) in self.budgets.items()
                if label != "S1"
            ),
            Figure(f"{name}_broken_without_m1", m1[0], None, "share of instances"),
            Figure(f"{name}_cost_without_m2", m2[1], None, "paper 1.50"),
            Figure(f"{name}_broken_without_m3", m3[0], None, "share of instances"),
            Figure(
                f"{name}_rolling_agh_vs_milp_sigma05",
                self.rolled[0.05]["AGH-5min"].median,
                None,
                f"paper {PAPER_TABLE4['AGH-5min'] / PAPER_TABLE4['DM-24h']:.2f}",
            ),
            Figure(f"{name}_gh_vs_agh_202020", largest.gh_vs_agh.median, None, "as planned"),
            Figure(f"{name}_agh_vs_ours_202020", largest.agh_vs_ours.median, None, "as planned"),
            Figure(f"{name}_agh_time_vs_gh_202020", largest.agh_time_vs_gh, None, "CPU; paper 2.6"),
            Figure(f"{name}_proven_202020", largest.proven, None, "share of seeds, to 3 %"),
        ]


def measure_family(family: str, quick: bool) -> FamilyTables:
    """Print and return tables 2 to 5 of a family."""
    seeds = range(3 if quick else SEEDS)
    return FamilyTables(
        family,
        measure_gaps(family, seeds, range(1 if quick else PROVEN_SEEDS[family])),
        measure_budgets(family, seeds),
        measure_ablation(family, seeds),
        {
            sigma: measure_rolling(family, sigma, range(days))
            for sigma, days in (
                ((0.05, 1),) if quick else ((0.01, STEADY_DAYS), (0.05, DAYS[family]))
            )
        },
        measure_sizes(family, seeds),
    )


def main() -> None:
    """Measure both families; `--quick` takes three seeds."""
    quick = options(__doc__ or "").quick
    tables = [measure_family(family, quick) for family in FAMILIES]
    finish([figure for table in tables for figure in table.figures()], seeds=3 if quick else SEEDS)


if __name__ == "__main__":
    main()
