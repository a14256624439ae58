"""Helix's figures 6 to 12 in Atoll's simulator: published placements, then those that Atoll finds.

Helix's placements have its own scheduler, Atoll's each router that they were planned for. Arrivals and
figures online are those of Helix's files. `benchmarks.helix_judge` judges by Helix's own rules.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from atoll.plan.files.helix import helix_problem, read_solution
from atoll.plan.problem import Router
from atoll.prove.rank import Simulated
from atoll.solve.place.evaluate import max_flow
from atoll.solve.place.from_problem import flow_instance, placement_of
from atoll.solve.place.place_service import FlowEffort
from atoll.solve.place.place_solver import solve
from benchmarks.placement.helix_runs import (
    Part,
    Ran,
    even_plan,
    flow_plan,
    kept_without_overflow,
    load,
    offline,
    offline_kept,
    online,
)
from benchmarks.report import Figure, finish, leave_out, options

B70, B30 = "LLaMA-2-70B", "LLaMA-1-30B"
KEYS = tuple(
    f"atoll_vs_helix_{cluster}_{when}"
    for cluster in ("single24", "geo24", "cluster42")
    for when in ("offline", "online")
)
"""What is there in any case, the ratios of the paper beside it."""
ROUTERS: tuple[Router, ...] = ("plain", "atoll")
"""Helix's scheduler on the plan's flows, and Atoll's router."""


@dataclass(frozen=True)
class Published:
    """What Helix's simulator says of a method: decode tokens/s offline, and online with median latencies."""

    offline: float
    online: float
    prompt_s: float
    decode_s: float


@dataclass(frozen=True)
class Case:
    """A cluster and a model: placements by method with what is published of each, and the paper's ratios."""

    name: str
    model: str
    methods: Mapping[str, tuple[Part, ...]]
    published: Mapping[str, Published]
    petals: str | None = None
    paper: tuple[tuple[str, float], ...] = ()


def _parts(
    cluster: str, files: str, flying: Sequence[int], arrives: Sequence[float]
) -> tuple[Part, ...]:
    """The placements of each node type by itself, on the part of the cluster that has that type."""
    return tuple(
        Part(f"{cluster}_{name}_only", files.format(name), number, arrives=rate)
        for name, number, rate in zip(("a100", "l4", "t4"), flying, arrives, strict=True)
    )


def _alone(flying: int, rate: float, name: str) -> Part:
    file = f"cluster42/llama70b/separate/{name}_solution_file.ini"
    return Part("cluster42", file, flying, own_nodes=True, arrives=rate)


_APART_42 = (
    _alone(1, 1.0, "a100"),
    _alone(60, 140.0, "l4"),
    _alone(35, 160.0, "l4x2"),
    _alone(110, 350.0, "t4x4"),
)

CASES = (
    Case(
        "single24",
        B70,
        {
            "helix": (Part("single24", "single24/llama70b/ilp/ilp_sol.ini", arrives=700.0),),
            "swarm": (
                Part("single24", "single24/llama70b/swarm/swarm_sol.ini", 180, arrives=350.0),
            ),
            "sp": _parts(
                "single24",
                "single24/llama70b/separate/{}_solution_file.ini",
                (18, 40, 3),
                (240.0, 120.0, 10.0),
            ),
        },
        {
            "helix": Published(252.1, 141.6, 2.64, 0.98),
            "swarm": Published(124.7, 69.8, 3.32, 1.04),
            "sp": Published(124.3, 84.0, 0.80, 0.22),
        },
        "single24/llama70b/petals/petals_sol.ini",
        (("offline_vs_swarm", 1.94), ("offline_vs_sp", 1.86), ("online_vs_swarm", 2.00)),
    ),
    Case(
        "geo24",
        B70,
        {
            "helix": (Part("3cluster24", "3cluster24/llama70b/ilp/ilp_sol.ini", arrives=320.0),),
            "swarm": (
                Part("3cluster24", "3cluster24/llama70b/swarm/swarm_sol.ini", 180, arrives=160.0),
            ),
            "sp": _parts(
                "3cluster24",
                "3cluster24/llama70b/separate/{}_solution_file.ini",
                (1, 60, 50),
                (1.0, 120.0, 60.0),
            ),
        },
        {
            "helix": Published(98.0, 59.3, 5.79, 0.93),
            "swarm": Published(51.9, 31.0, 7.22, 1.23),
            "sp": Published(61.9, 33.6, 4.96, 1.20),
        },
        "3cluster24/llama70b/petals/petals_sol.ini",
        (("offline_vs_swarm", 1.92), ("offline_vs_sp", 1.61), ("online_vs_swarm", 1.97)),
    ),
    Case(
        "cluster42",
        B70,
        {
            "helix": (Part("cluster42", "cluster42/llama70b/ilp/ilp_sol.ini", arrives=2150.0),),
            "swarm": (
                Part("cluster42", "cluster42/llama70b/swarm/swarm_sol.ini", 500, arrives=1450.0),
            ),
            "sp": _APART_42,
            "sp_plus": (*_APART_42, _alone(90, 200.0, "v100_t4")),
        },
        {
            "helix": Published(645.6, 459.8, 2.09, 0.73),
            "swarm": Published(473.2, 309.6, 2.70, 0.77),
            "sp": Published(219.3, 140.2, 2.21, 0.47),
            "sp_plus": Published(285.1, 181.3, 2.22, 0.57),
        },
        "cluster42/llama70b/petals/petals_sol.ini",
        (("offline_vs_swarm", 1.37), ("offline_vs_sp", 2.91), ("offline_vs_sp_plus", 2.24)),
    ),
    Case(
        "single24_30b",
        B30,
        {
            "helix": _parts(
                "single24",
                "single24/llama30b/ilp/{}/ilp_sol.ini",
                (20, 20, 20),
                (600.0, 200.0, 170.0),
            ),
            "swarm": (
                Part("single24", "single24/llama30b/swarm/swarm_sol.ini", 50, arrives=450.0),
            ),
            "sp": _parts(
                "single24",
                "single24/llama30b/separate/{}_solution_file.ini",
                (30, 25, 25),
                (500.0, 150.0, 150.0),
            ),
        },
        {
            "helix": Published(339.6, 216.7, 0.43, 0.13),
            "swarm": Published(151.6, 104.9, 1.42, 0.26),
            "sp": Published(309.0, 189.8, 0.42, 0.11),
        },
        paper=(("offline_vs_swarm", 2.14), ("offline_vs_sp", 1.04)),
    ),
    Case(
        "geo24_30b",
        B30,
        {
            "helix": _parts(
                "3cluster24",
                "3cluster24/llama30b/ilp/{}/ilp_sol.ini",
                (20, 20, 20),
                (560.0, 140.0, 140.0),
            ),
            "swarm": (
                Part("3cluster24", "3cluster24/llama30b/swarm/swarm_sol.ini", 60, arrives=380.0),
            ),
            "sp": _parts(
                "3cluster24",
                "3cluster24/llama30b/separate/{}_solution_file.ini",
                (35, 40, 40),
                (520.0, 100.0, 140.0),
            ),
        },
        {
            "helix": Published(232.7, 183.5, 0.51, 0.23),
            "swarm": Published(98.7, 82.1, 3.25, 0.48),
            "sp": Published(223.2, 173.8, 0.50, 0.23),
        },
        paper=(("offline_vs_swarm", 2.41), ("offline_vs_sp", 1.07)),
    ),
)
POLICIES: Mapping[str, str] = {"swarm": "swarm", "sp": "random", "sp_plus": "random"}
"""How baselines choose: by speed seen, and at random among a node type's own."""
ABLATION = (
    ("24_pruned", "3cluster24", "raw_24", B70),
    ("24_all", "3cluster24", "no_prune_24", B70),
    ("42_pruned", "cluster42", "raw_42", B70),
    ("42_all", "cluster42", "no_prune_42", B70),
    ("cluster10", "cluster10", "quality", B30),
)
"""Figures 11 and 12: placements of Helix's program with pruned links and with all, and at its longest."""
SCHEDULING = (("swarm", 1.30), ("random", 1.29))
GEO_SCHEDULING = (("swarm", 1.22), ("random", 1.15), ("shortest-queue", 1.19))
FLYING = 180
_SAFETY_S = 3600.0
"""Seconds after which a search is cut short: work is what ends it."""


def main() -> None:
    """Run all cases and print them beside the paper."""
    arguments = options(__doc__ or "")
    data: Path = arguments.data
    if not (data / "helix").is_dir():
        leave_out("no data of Helix here")
        finish([Figure(name, None) for name in KEYS])
        return
    figures: list[Figure] = []
    values: dict[str, float] = {}
    began = time.process_time()
    for case in CASES:
        figures += _case(case, data, values, quick=arguments.quick)
    figures += _scheduling(data, values)
    figures += _ablation(data)
    figures.append(Figure("cpu_s", time.process_time() - began))
    paper = {f"{key}_paper": value for key, value in _papers().items()}
    finish(figures, **paper)


def _papers() -> dict[str, float]:
    found = {f"{case.name}_{key}": value for case in CASES for key, value in case.paper}
    found |= {f"scheduling_vs_{name}": value for name, value in SCHEDULING}
    return found | {f"scheduling_geo_vs_{name}": value for name, value in GEO_SCHEDULING}


def _line(name: str, what: str, ran: Ran, published: float | None = None) -> None:
    beside = (
        ""
        if published is None
        else f"  published {published:7.1f} ({ran.tokens_per_s / published - 1:+.1%})"
    )
    print(
        f"  {name:13s} {what:22s} {ran.tokens_per_s:7.1f} tokens/s   prompt {ran.prompt_s:6.2f} s   "
        f"decode {ran.decode_s:5.2f} s{beside}",
        flush=True,
    )


def _run(data: Path, case: Case, method: str, *, arriving: bool) -> Ran:
    """What a method's parts do together."""
    found: list[Ran] = []
    for part in case.methods[method]:
        problem, instance, placement = load(data, part, case.model)
        policy = POLICIES.get(method)
        make = flow_plan if policy is None else even_plan
        plan = make(problem, instance, placement)
        if arriving:
            router: Router = "plain" if policy is None else "atoll"
            found.append(
                online(data, problem, plan, case.model, part.arrives, policy or "iwrr", router)
            )
        elif policy is None:
            found.append(offline(data, problem, plan, case.model))
        else:
            found.append(offline_kept(data, problem, plan, case.model, policy, part.flying))
    return _sum(found)


def _sum(runs: Sequence[Ran]) -> Ran:
    total = sum(ran.tokens_per_s for ran in runs)
    weigh = [ran.tokens_per_s / total for ran in runs] if total > 0 else [0.0 for _ in runs]
    return Ran(
        total,
        sum(w * ran.prompt_s for w, ran in zip(weigh, runs, strict=True)),
        sum(w * ran.decode_s for w, ran in zip(weigh, runs, strict=True)),
        sum(ran.retries for ran in runs),
    )


def _case(case: Case, data: Path, values: dict[str, float], *, quick: bool) -> list[Figure]:
    print(f"{case.name}, {case.model}")
    figures: list[Figure] = []
    for when in ("offline", "online"):
        ran: dict[str, Ran] = {}
        for method in case.methods:
            ran[method] = _run(data, case, method, arriving=when == "online")
            said = getattr(case.published[method], when)
            _line(case.name, f"{method} {when}", ran[method], said)
            figures.append(Figure(f"{case.name}_{method}_{when}", ran[method].tokens_per_s))
            values[f"{case.name}_{method}_{when}"] = ran[method].tokens_per_s
            if method != "helix":
                ratio = ran["helix"].tokens_per_s / ran[method].tokens_per_s
                values[f"{case.name}_{when}_vs_{method}"] = ratio
        if when == "online":
            figures += _latencies(case, ran)
    if case.model == B70:
        if case.petals is not None:
            _petals(case, data)
        figures += _atoll(case, data, values, seconds=15.0 if quick else _SAFETY_S)
    for key, paper in dict(case.paper).items():
        figures += _beside(f"{case.name}_{key}", values[f"{case.name}_{key}"], paper)
    return figures


def _latencies(case: Case, ran: Mapping[str, Ran]) -> list[Figure]:
    """Median latencies online beside those that Helix's simulator says, which pools what parts answer."""
    return [
        figure
        for method, one in ran.items()
        if len(case.methods[method]) == 1
        for what in ("prompt_s", "decode_s")
        for figure in _beside(
            f"{case.name}_{method}_online_{what}",
            getattr(one, what),
            getattr(case.published[method], what),
        )
    ]


def _beside(name: str, ratio: float, paper: float) -> list[Figure]:
    """A figure found here and the paper's."""
    return [Figure(name, ratio), Figure(f"{name}_paper", paper)]


def _petals(case: Case, data: Path) -> None:
    """Helix's scheduler on the placement of Petals, which needs partial inference."""
    assert case.petals is not None
    part = Part(case.methods["helix"][0].cluster, case.petals)
    problem, instance, placement = load(data, part, case.model, partial=True)
    plan = flow_plan(problem, instance, placement)
    _line(case.name, "petals offline", offline(data, problem, plan, case.model))


def _atoll(case: Case, data: Path, values: dict[str, float], *, seconds: float) -> list[Figure]:
    """The placements that Atoll finds by default for each router, with the same work and the same rules."""
    (part,) = case.methods["helix"]
    given, _, _ = load(data, part, case.model)
    figures: list[Figure] = []
    for router in ROUTERS:
        problem = given.replace(settings={**dict(given.settings), "router": router})
        catalog = problem.catalog()
        effort = FlowEffort(seconds=seconds, rank=Simulated(problem, catalog))
        plan = solve("flow.search", problem, catalog, effort)
        found = offline(data, problem, plan, case.model, router)
        ratio = found.tokens_per_s / values[f"{case.name}_helix_offline"]
        _line(case.name, f"atoll, {router} offline", found)
        # Helix scales arrivals to a share of what a method carries offline.
        more = part.arrives * max(1.0, ratio)
        at = {
            rate: online(data, problem, plan, case.model, rate, router=router)
            for rate in sorted({part.arrives, more})
        }
        for rate, run in at.items():
            _line(case.name, f"atoll, {router} at {rate:.0f}", run)
        same, ran = at[part.arrives], at[more]
        name = f"atoll_{router}_vs_helix_{case.name}"
        gained = ran.tokens_per_s / values[f"{case.name}_helix_online"]
        figures += [
            Figure(f"{name}_offline", ratio, note="at least 1, aim 1.2 to 1.3"),
            Figure(f"{name}_online", gained, note="arrivals scaled alike"),
            Figure(f"{name}_online_prompt_s", same.prompt_s, note="at Helix's arrivals"),
            Figure(f"{name}_online_decode_s", same.decode_s, note="at Helix's arrivals"),
        ]
        if router == "atoll":
            # The names that earlier results have.
            figures += [
                Figure(f"atoll_vs_helix_{case.name}_offline", ratio, 1, at_least=True),
                Figure(f"atoll_vs_helix_{case.name}_online", gained, 1, at_least=True),
            ]
    return figures


def _ablation(data: Path) -> list[Figure]:
    """Figures 11 and 12: the flow of each of the program's placements, and Atoll's largest there."""
    figures: list[Figure] = []
    found: dict[str, float] = {}
    for name, cluster, file, model in ABLATION:
        folder = data / "helix"
        problem = helix_problem(folder / f"clusters/{cluster}.ini", model=model)
        instance = flow_instance(problem, problem.catalog(), problem.services[0])
        path = folder / f"solutions/ablation/{file}_ilp_sol.ini"
        published = max_flow(instance, placement_of(instance, read_solution(path, instance.size)))
        if cluster not in found:
            effort = FlowEffort(objective="max-flow", bounded=False)
            plan = solve("flow.search", problem, problem.catalog(), effort)
            found[cluster] = plan.objective or 0.0
        print(
            f"  ablation {name:10s} flow {published.value:7.1f} tokens/s   atoll {found[cluster]:7.1f}",
            flush=True,
        )
        figures += [
            Figure(f"flow_{name}", published.value),
            Figure(f"flow_{name}_atoll", found[cluster]),
        ]
    return figures


def _scheduling(data: Path, values: dict[str, float]) -> list[Figure]:
    """Other schedulers on the placements that Helix published.

    How many requests are kept in flight decides the ratio. On geo24 Helix's files say 180. On single24 the
    paper ran its prototype and no file says it: shown are 180 and the most that the KV caches hold.
    """
    figures: list[Figure] = []
    for case, schedulers, name in (
        (CASES[0], SCHEDULING, "scheduling"),
        (CASES[1], GEO_SCHEDULING, "scheduling_geo"),
    ):
        problem, instance, placement = load(data, case.methods["helix"][0], B70)
        plan = even_plan(problem, instance, placement)
        helix = values[f"{case.name}_helix_offline"]
        for policy, paper in schedulers:
            few = offline_kept(data, problem, plan, B70, policy, FLYING)
            _line(case.name, f"its placement, {policy}, {FLYING}", few)
            ratio = helix / few.tokens_per_s
            if case is CASES[0]:
                figures += _beside(f"{name}_vs_{policy}_180", ratio, paper)
                most = kept_without_overflow(data, problem, plan, B70, policy)
                _line(case.name, f"its placement, {policy}, most", most)
                ratio = helix / most.tokens_per_s
            figures += _beside(f"{name}_vs_{policy}", ratio, paper)
    return figures


if __name__ == "__main__":
    main()
