"""Sustained throughput in simulation: the default placement beside Helix's, and how well it is predicted."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from statistics import median

import numpy as np

from atoll.core.rng import stream
from atoll.plan.plan import SINK, SOURCE, Plan
from atoll.plan.problem import Problem
from atoll.prove.rank import Simulated
from atoll.sim.api import simulate
from atoll.solve.array_types import Floats
from atoll.solve.place.flow_instance import FlowInstance, Flows, Placement
from atoll.solve.place.place_service import FlowEffort
from atoll.solve.place.place_solver import solve
from atoll.solve.place.sustained.residence import Site
from atoll.solve.place.sustained.sustained import Sustained, site_of, sustain
from benchmarks.placement.helix_runs import (
    Part,
    flow_plan,
    lengths,
    load,
    offline,
    offline_work,
    online,
)
from benchmarks.placement.helix_runs import options as helix_options
from benchmarks.report import ROOT, Figure, finish, leave_out, options

MODEL = "LLaMA-2-70B"
KEYS = ("error_median", "within15_of_18", "within10_of_18")
MARK = 0.8
"""Share of KV cache that Helix's offline rule books."""
STEADY = (3000.0, 6000.0)
"""Seconds from and to which the steady state is measured: long answers take 3,000 on slow links."""
STEADY_REQUESTS = 60_000
"""Enough not to run out before."""
TRIED = 400_000
"""Requests tried to see which are let in where there is little room."""
ONLINE_SHARE = 0.65 * (763.1 + 232.4) / 232.4
PICTURE = ROOT / "docs/img/sustained.svg"


@dataclass(frozen=True)
class Case:
    """A cluster, its published placements (Helix's first), arrivals online in tokens/s, and the aim."""

    name: str
    cluster: str
    published: tuple[str, ...]
    rate: float | None
    aim: float


CASES = (
    Case(
        "single24",
        "single24",
        ("single24/llama70b/ilp/ilp_sol.ini", "single24/llama70b/swarm/swarm_sol.ini"),
        700.0,
        1.2,
    ),
    Case(
        "geo24",
        "3cluster24",
        (
            "3cluster24/llama70b/ilp/ilp_sol.ini",
            "3cluster24/llama70b/swarm/swarm_sol.ini",
            "ablation/raw_24_ilp_sol.ini",
            "ablation/no_prune_24_ilp_sol.ini",
        ),
        320.0,
        1.3,
    ),
    Case(
        "cluster42",
        "cluster42",
        (
            "cluster42/llama70b/ilp/ilp_sol.ini",
            "cluster42/llama70b/swarm/swarm_sol.ini",
            "ablation/no_prune_42_ilp_sol.ini",
        ),
        None,
        1.2,
    ),
)
PETALS = "{}/llama70b/petals/petals_sol.ini"


@dataclass(frozen=True)
class Point:
    """A placement: predicted decode tokens/s, and simulated in Helix's window and in the steady state."""

    cluster: str
    name: str
    predicted: float
    window: float
    steady: float

    @property
    def error(self) -> float:
        """Of the prediction, against the steady state."""
        return self.predicted / self.steady - 1.0


def main() -> None:
    """Run all cases, draw the points and print the figures."""
    arguments = options(__doc__ or "")
    data: Path = arguments.data
    if not (data / "helix").is_dir():
        leave_out("no data of Helix here")
        finish([Figure(name, None) for name in KEYS])
        return
    began = time.process_time()
    figures: list[Figure] = []
    points: list[Point] = []
    for case in CASES:
        points += _published(case, data)
        more, own = _found(case, data, seconds=30.0 if arguments.quick else 120.0)
        points += more
        figures += own
    for point in points:
        beside = point.predicted / point.window - 1.0
        print(
            f"  {point.cluster:10s} {point.name:16s} predicted {point.predicted:6.1f}   steady "
            f"{point.steady:6.1f} ({point.error:+.0%})   60-660 s {point.window:6.1f} ({beside:+.0%})"
        )
    errors = [abs(point.error) for point in points]
    windows = [abs(point.predicted / point.window - 1.0) for point in points]
    figures += [
        Figure("error_median", median(errors), note="steady state"),
        Figure("error_max", max(errors), 0.15, note="steady state"),
        Figure("within15_of_18", sum(e <= 0.15 for e in errors), 18, at_least=True),
        Figure("within10_of_18", sum(e <= 0.10 for e in errors), 16, at_least=True),
        Figure("error_window_median", median(windows), note="Helix's 60 to 660 s"),
        Figure("error_window_max", max(windows), note="Helix's 60 to 660 s"),
        Figure("cpu_s", time.process_time() - began),
    ]
    if not arguments.quick:
        _draw(points)
    finish(figures)


def _published(case: Case, data: Path) -> list[Point]:
    found = []
    for file in (*case.published, PETALS.format(case.cluster)):
        partial = "petals" in file
        problem, instance, placement = load(data, Part(case.cluster, file), MODEL, partial=partial)
        plan = flow_plan(problem, instance, placement)
        own = file.split("/")
        name = own[-1].removesuffix("_ilp_sol.ini") if own[0] == "ablation" else own[2]
        found.append(_point(case, name, data, problem, instance, plan))
    return found


def _found(case: Case, data: Path, *, seconds: float) -> tuple[list[Point], list[Figure]]:
    """Compare the default placement with Helix's, and predict it and the best by its analytic value."""
    problem, instance, placement = load(data, Part(case.cluster, case.published[0]), MODEL)
    catalog = problem.catalog()
    helix = flow_plan(problem, instance, placement)
    plain = solve("flow.search", problem, catalog, FlowEffort(seconds=seconds))
    effort = FlowEffort(seconds=seconds, rank=Simulated(problem, catalog))
    plan = solve("flow.search", problem, catalog, effort)
    points = [
        _point(case, "found, analytic", data, problem, instance, plain),
        _point(case, "found, ranked", data, problem, instance, plan),
    ]
    base, best = (offline(data, problem, own, MODEL) for own in (helix, plan))
    ratio = best.tokens_per_s / base.tokens_per_s
    rate = case.rate or ONLINE_SHARE * base.tokens_per_s
    before = online(data, problem, helix, MODEL, rate)
    same = online(data, problem, plan, MODEL, rate)
    more = online(data, problem, plan, MODEL, rate * max(1.0, ratio))
    aim = f"aim {case.aim}"
    return points, [
        Figure(f"{case.name}_offline", ratio, note=aim),
        Figure(f"{case.name}_online", more.tokens_per_s / before.tokens_per_s, note=aim),
        Figure(f"{case.name}_prompt_s", same.prompt_s, before.prompt_s, note="at Helix's arrivals"),
        Figure(f"{case.name}_analytic_only", points[0].window / base.tokens_per_s),
    ]


def _point(
    case: Case, name: str, data: Path, problem: Problem, instance: FlowInstance, plan: Plan
) -> Point:
    predicted = _predict(data, instance, plan)
    own = helix_options(
        MODEL, feed="watermark", high_water=0.85, until_s=STEADY[1], from_s=STEADY[0]
    )
    work = offline_work(data, STEADY_REQUESTS)
    steady = simulate(plan, problem, problem.catalog(), work, own).tokens_per_s
    window = offline(data, problem, plan, MODEL).tokens_per_s
    return Point(case.name, name, predicted, window, steady)


def _predict(data: Path, instance: FlowInstance, plan: Plan) -> float:
    """Return the analytic decode tokens/s of a plan for the requests that Helix's rules let in."""
    table = lengths(data).astype(np.float64)
    placement, flows = _flows(instance, plan)
    site = _site(instance, table, float(table[:, 1].mean()))
    found = sustain(instance, placement, flows, site)
    if _turns_away(site, placement, found):
        assert instance.timing is not None
        kept = _kept(data)
        prompt, answer = (float(mean) for mean in kept.mean(axis=0))
        timing = replace(instance.timing, input_mean=prompt, output_mean=answer)
        site = _site(replace(instance, timing=timing), kept, float(table[:, 1].mean()))
        found = sustain(instance, placement, flows, site)
    return found.decode_tokens_per_s


def _site(instance: FlowInstance, table: Floats, estimate: float) -> Site:
    """Return the site with the moments of (prompt, answer) tokens; answers are booked as `estimate`."""
    prompts, answers = table[:, 0], table[:, 1]
    held = float((prompts * answers).mean() / answers.mean()) + estimate
    return site_of(instance, fill=MARK, input_square=float((prompts**2).mean()), held=held)


def _turns_away(site: Site, placement: Placement, found: Sustained) -> bool:
    """Return whether all ways are full, for a mean request, before the fullest layer is at its mark.

    Compares the requests that the layers hold with the largest flow of requests along the ways of the
    plan, each node taking as many as leave less than one more's room.
    """
    from scipy.optimize import linprog

    start, end, flows = placement.start, placement.end, found.flows
    through = flows.edge.sum(axis=0) + flows.enter
    used = [int(i) for i in np.flatnonzero(through > 0.0)]
    held = end - start
    run = held * flows.enter + (
        flows.edge * (end - np.maximum(end[:, None], start[None, :]))
    ).sum(axis=0)  # fmt: skip
    rooms = np.zeros(len(start))
    for i in used:
        rooms[i] = site.kv[i, held[i]] * held[i] * through[i] / (site.held * run[i])
    layers = min(
        float(rooms[(start <= layer) & (layer < end)].sum()) for layer in range(site.layers)
    )
    arcs = [(-1, k) for k in used if flows.enter[k] > 0.0]
    arcs += [(i, k) for i in used for k in used if flows.edge[i, k] > 0.0]
    arcs += [(i, -1) for i in used if flows.leave[i] > 0.0]
    into = np.array([[float(k == i) for _, k in arcs] for i in used])
    out = np.array([[float(k == i) for k, _ in arcs] for i in used])
    enters = np.array([float(i < 0) for i, _ in arcs])
    most = np.maximum(site.spare * rooms[used] - 1.0, 0.0)
    ways = -linprog(-enters, A_ub=into, b_ub=most, A_eq=into - out, b_eq=np.zeros(len(used))).fun
    return bool(ways < layers)


@lru_cache(maxsize=1)
def _kept(data: Path) -> Floats:
    """Return (prompt, answer) tokens of the requests that are let in where all ways are full.

    One is tried whenever a prompt or a request ends, so twice for each that is let in, and one that
    finds no room is gone: the small ones get in. What is free grows when a request ends and shrinks when
    one comes in.
    """
    table = lengths(data)
    needs = (table[:, 0] + table[:, 1].mean()).tolist()
    random = stream(0, "kept")
    tried = random.integers(len(table), size=TRIED).tolist()
    ends = (random.random(TRIED) < 0.5).tolist()
    which = random.random(TRIED).tolist()
    free, inside, kept = 0.0, tried[:1000], []
    for row, ended, at in zip(tried, ends, which, strict=True):
        if ended:
            k = int(at * len(inside))
            inside[k], inside[-1] = inside[-1], inside[k]
            free += needs[inside.pop()]
        if needs[row] <= free:
            free -= needs[row]
            inside.append(row)
            kept.append(row)
    return table[kept[len(kept) // 4 :]].astype(np.float64)


def _flows(instance: FlowInstance, plan: Plan) -> tuple[Placement, Flows]:
    """Return the placement and the flow of a plan, in requests/s: only their shares count."""
    names = {name: i for i, name in enumerate(instance.names)}
    start, end = (np.zeros(instance.size, np.int64) for _ in range(2))
    edge = np.zeros((instance.size, instance.size))
    enter, leave = np.zeros(instance.size), np.zeros(instance.size)
    used: list[int] = []
    # Pipelines that share no machine are instances of their own.
    for own in plan.instances:
        at = {node.id: names[node.host or ""] for node in own.nodes}
        used += at.values()
        for node in own.nodes:
            start[at[node.id]], end[at[node.id]] = node.start, node.end
        for flow in own.flows:
            if flow.src == SOURCE:
                enter[at[flow.dst]] = flow.per_s
            elif flow.dst == SINK:
                leave[at[flow.src]] = flow.per_s
            else:
                edge[at[flow.src], at[flow.dst]] = flow.per_s
    # What the weights at each node make of what comes in; small ways that were left out break the sums.
    for i in sorted(used, key=lambda k: (int(end[k]), k)):
        into, out = enter[i] + edge[:, i].sum(), edge[i].sum() + leave[i]
        share = into / out if out > 0 else 0.0
        edge[i] *= share
        leave[i] *= share
    return Placement(start, end), Flows(float(enter.sum()), edge, enter, leave)


def _draw(points: Sequence[Point]) -> None:
    """Draw predicted against simulated tokens/s."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt

    plt.rcParams["svg.hashsalt"] = "sustained"
    figure, axes = plt.subplots(figsize=(5, 4.4))
    low, high = 40.0, 1200.0
    line = np.array([low, high])
    axes.fill_between(line, line * 0.85, line * 1.15, color="0.9", label="within 15 %")
    axes.plot(line, line, color="0.6", linewidth=1)
    for case, marker in zip(CASES, "os^", strict=True):
        for found, filled in ((False, "none"), (True, None)):
            own = [
                p for p in points if p.cluster == case.name and p.name.startswith("found") == found
            ]
            label = f"{case.name}, {'found' if found else 'published'}"
            axes.plot(
                [p.steady for p in own],
                [p.predicted for p in own],
                marker,
                fillstyle="none" if filled else "full",
                color=f"C{'os^'.index(marker)}",
                label=label,
            )
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high))
    axes.set_xlabel("simulated decode tokens/s, steady state")
    axes.set_ylabel("predicted decode tokens/s")
    axes.legend(fontsize=7)
    figure.tight_layout()
    PICTURE.parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE, metadata={"Date": None})


if __name__ == "__main__":
    main()
