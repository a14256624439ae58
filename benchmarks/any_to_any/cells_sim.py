"""Latency of any-to-any models in parts, and static against dynamic routing, as Cornserve measures them.

Section 7.2: Qwen2.5-Omni-7B on two boxes of eight A100-80 under ServeGen-like requests (`cells_sim_fleets`),
without promises. The plan that carries most is simulated beside sixteen monoliths at the same request rates:
90 % of what the monoliths sustain, and 15 % more than all of it, where they saturate. Monoliths are simulated
twice: as a modern engine would run them, parts step by step in turn, and "blocking": talkers take one request
after another and hold the GPU meanwhile, which is what the paper says of its baseline (Hugging Face
transformers). Sustained is the largest rate at which 8,000 requests leave a backlog of 5 % at most.

Section 7.4: InternVL3-38B as four encoders and six monoliths of two GPUs each, 67.5 % of requests over the
encoders; requests bring one image. All are submitted at once and throughput is requests over makespan, as in
the paper. Dynamic routing asks all executors that could be next for their queue, one after the other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from atoll.catalog import Catalog
from atoll.plan.plan import Plan
from atoll.plan.problem import Problem
from atoll.sim.tasks.simulate_tasks import Routing, simulate_tasks
from atoll.sim.tasks.task_demand import Arrivals
from atoll.sim.tasks.task_fleet import TaskFleet
from atoll.sim.tasks.task_result import TaskResult
from benchmarks.any_to_any.cells_sim_fleets import (
    fleet_at,
    images_problem,
    internvl_routed,
    omni_monoliths,
    omni_problem,
    omni_published,
    plan_most,
    run_to_the_end,
    talker_alone_s,
)
from benchmarks.report import Figure, finish, options

TABLE2 = {
    "image+video+audio -> text": ((33.6, 128.9, 181.4), (7.1, 18.4, 19.8)),
    "image+video -> text": ((20.8, 88.8, 150.4), (7.3, 18.7, 22.6)),
    "image+audio -> text": ((20.1, 114.7, 128.6), (7.9, 19.1, 24.8)),
    "image -> text": ((28.9, 95.8, 125.2), (8.5, 16.3, 21.0)),
    "image+video+audio -> audio": ((26.9, 156.9, 167.0), (24.8, 36.5, 37.8)),
    "image+video -> audio": ((88.8, 236.5, 340.5), (21.9, 36.7, 44.3)),
    "image+audio -> audio": ((29.6, 182.5, 284.5), (23.1, 33.6, 37.7)),
    "image -> audio": ((86.2, 288.6, 375.2), (21.3, 30.4, 39.6)),
}
"""Seconds at P50, P90 and P99 in the paper: of monoliths, and of its plan."""
PAPER = {"p50": 3.24, "p95": 5.3, "p99": 5.79, "throughput": 3.81}
PAPER_ROUTING = {"static": 9.27, "dynamic": 2.50}
DEDICATED = 0.675
PERCENTILES = (50, 95, 99)
LOAD, OVERLOAD = 0.9, 1.15
"""Of what monoliths sustain."""
REQUESTS = 2_000
"""Requests of a run, as many as in the paper: where a deployment saturates, latency grows with them."""
QUERY_S = 0.005
BACKLOG = 0.05
"""Share of what has arrived that may be under way at the end where a rate is sustained."""
_LONG = 8_000
"""Requests of a run that looks for a backlog."""
_HALVINGS = 6
_ROUTING_SEED = 1

Make = Callable[[float], TaskFleet]
"""The fleet of a deployment at so many requests/s."""


@dataclass(frozen=True)
class Compared:
    """A deployment and the plan at the same rate, over some seeds."""

    per_s: float
    theirs: list[TaskResult]
    ours: list[TaskResult]

    def ratio(self, percentile: int) -> float:
        """Return their latency over ours at a percentile, over all requests; the median over seeds."""
        return float(
            np.median(
                [
                    latency(one, percentile) / latency(other, percentile)
                    for one, other in zip(self.theirs, self.ours, strict=True)
                ]
            )
        )


def latency(result: TaskResult, percentile: float) -> float:
    """Return the seconds of whole requests at a percentile."""
    return float(np.percentile(result.columns.e2e_s, percentile))


def sustained(make: Make, most: float, routing: Routing = "dealt", query_s: float = 0.0) -> float:
    """Return the largest rate found, in requests/s, at which hardly anything piles up."""
    low, high = 0.0, most
    for _ in range(_HALVINGS):
        middle = 0.5 * (low + high)
        result = simulate_tasks(
            make(middle), duration_s=_LONG / middle, seed=1, routing=routing, query_s=query_s
        )
        if result.in_flight <= BACKLOG * result.arrived:
            low = middle
        else:
            high = middle
    return low


def compare(theirs: Make, ours: Make, per_s: float, seeds: Sequence[int]) -> Compared:
    """Simulate two deployments under the same arrivals."""
    runs = [
        [simulate_tasks(make(per_s), requests=REQUESTS, seed=seed) for seed in seeds]
        for make in (theirs, ours)
    ]
    return Compared(per_s, *runs)


def busy(results: Sequence[TaskResult]) -> float:
    """Return the mean share of time that executors are busy."""
    return float(np.mean([executor.busy for result in results for executor in result.executors]))


def show_table2(compared: Compared) -> None:
    """Print latencies by type of request beside the paper's."""
    print(f"\nSeconds at P50 / P90 / P99 by type of request, at {compared.per_s:.2f}/s")
    print(f"  {'':28s} {'monolith':>20s} {'paper':>20s} {'planned':>20s} {'paper':>20s}")
    for name, (paper_theirs, paper_ours) in TABLE2.items():
        columns = []
        for results, paper in ((compared.theirs, paper_theirs), (compared.ours, paper_ours)):
            found = [
                float(np.median([getattr(r.klass(name).e2e_s, p) for r in results]))
                for p in ("p50", "p90", "p99")
            ]
            columns += [_three(found), _three(paper)]
        print(f"  {name:28s} " + " ".join(f"{column:>20s}" for column in columns))


def _three(values: Sequence[float]) -> str:
    return " / ".join(f"{value:.1f}" for value in values)


def measure_omni(catalog: Catalog, *, quick: bool) -> list[Figure]:
    """Simulate section 7.2 and return its figures."""
    seeds = (1,) if quick else (1, 2, 3, 4, 5)
    problem = omni_problem()
    plan, most = plan_most(problem, catalog)
    ours = _making(plan, problem, catalog)
    monoliths = _making(omni_monoliths(problem, catalog), problem, catalog)
    published = _making(omni_published(problem, catalog), problem, catalog)
    carried = sustained(ours, 1.5 * most)
    print("Qwen2.5-Omni-7B on 16 A100-80, ServeGen-like requests")
    print(f"  {len(plan.instances)} executors planned for {most:.2f}/s sustain {carried:.2f}/s")
    figures = [
        Figure("planned_per_s", most, note="proven by the program"),
        Figure("sustained_per_s", carried, note="the same plan, simulated"),
        Figure("published_plan_per_s", sustained(published, 1.5 * most), note="1 + 15"),
    ]
    alone_s = talker_alone_s(problem, catalog)
    for suffix, theirs in (
        ("monolith", monoliths),
        ("blocking", lambda rate: run_to_the_end(monoliths(rate), alone_s)),
    ):
        capacity = sustained(theirs, 1.5 * most)
        figures += [
            Figure(f"{suffix}_per_s", capacity),
            Figure(
                f"throughput_vs_{suffix}", carried / capacity, note=f"paper {PAPER['throughput']}"
            ),
        ]
        for load, where in ((LOAD, ""), (OVERLOAD, "_saturated")):
            compared = compare(theirs, ours, load * capacity, seeds)
            print(
                f"  {suffix}{where} at {compared.per_s:.2f}/s: P50 / P99 "
                f"{latency(compared.theirs[0], 50):.1f} / {latency(compared.theirs[0], 99):.1f} s, planned "
                f"{latency(compared.ours[0], 50):.1f} / {latency(compared.ours[0], 99):.1f} s"
            )
            figures += [
                Figure(
                    f"p{p}_vs_{suffix}{where}", compared.ratio(p), note=f"paper {PAPER[f'p{p}']}"
                )
                for p in PERCENTILES
            ]
            figures += [
                Figure(f"busy_{suffix}{where}", busy(compared.theirs)),
                Figure(f"busy_planned_vs_{suffix}{where}", busy(compared.ours)),
            ]
            if suffix == "blocking" and where:
                show_table2(compared)
    return figures


def _making(plan: Plan, problem: Problem, catalog: Catalog) -> Make:
    return lambda per_s: fleet_at(plan, problem, catalog, per_s)


def measure_routing(catalog: Catalog, *, quick: bool) -> list[Figure]:
    """Simulate section 7.4 and return its figures."""
    requests = 4_000 if quick else 16_000
    problem = images_problem()
    make = _making(internvl_routed(problem, catalog, DEDICATED), problem, catalog)

    def run(routing: Routing, query_s: float = 0.0) -> TaskResult:
        return simulate_tasks(
            make(1.0),
            requests=requests,
            seed=_ROUTING_SEED,
            routing=routing,
            query_s=query_s,
            arrivals=Arrivals(at_once=True),
        )

    print("\nInternVL3-38B, 4 encoders and 6 monoliths, all requests at once")
    static, free, asked = run("static"), run("dynamic"), run("dynamic", QUERY_S)
    per_request = asked.queries / requests
    # The control plane asks one after the other: this long a question holds it to the paper's throughput.
    paper_query_s = 1.0 / (PAPER_ROUTING["dynamic"] * per_request)
    slow = run("dynamic", paper_query_s)
    for name, result in (
        ("static", static),
        ("dealt", run("dealt")),
        ("dynamic, questions free", free),
        (f"dynamic, {QUERY_S * 1e3:g} ms a question", asked),
        (f"dynamic, {paper_query_s * 1e3:.1f} ms a question", slow),
    ):
        encoders = [e.busy for e in result.executors if e.name.startswith("encoder")]
        print(
            f"  {name:32s} {result.by_makespan_per_s:6.2f}/s, encoders {np.mean(encoders):.0%} busy, "
            f"monoliths {np.mean([e.busy for e in result.executors if e.name.startswith('whole')]):.0%}"
        )
    kinds: tuple[tuple[Routing, float], ...] = (
        ("static", 0.0),
        ("dealt", 0.0),
        ("dynamic", 0.0),
        ("dynamic", QUERY_S),
    )
    most = 2.0 * static.by_makespan_per_s
    held = [sustained(make, most, routing, query_s) for routing, query_s in kinds]
    print("  sustained, arrivals at random: static {:.2f}/s, dealt {:.2f}/s,".format(*held), end="")
    print(f" dynamic {held[2]:.2f}/s, with {QUERY_S * 1e3:g} ms a question {held[3]:.2f}/s")
    rate = static.by_makespan_per_s
    paper = PAPER_ROUTING["static"] / PAPER_ROUTING["dynamic"]
    return [
        Figure("static_per_s", rate, note=f"paper {PAPER_ROUTING['static']}"),
        Figure("static_vs_dynamic", rate / free.by_makespan_per_s, note="questions free"),
        Figure("static_vs_dynamic_5ms", rate / asked.by_makespan_per_s, note=f"paper {paper:.1f}"),
        Figure("questions_per_request", per_request),
        Figure("query_ms_of_paper", 1e3 * paper_query_s, note="holds dynamic to 2.50/s"),
        Figure("static_vs_dynamic_sustained", held[0] / held[2], note="arrivals at random, free"),
        Figure("dealt_vs_dynamic_sustained", held[1] / held[2], note="arrivals at random, free"),
        Figure("static_vs_dynamic_5ms_sustained", held[0] / held[3], note="arrivals at random"),
        Figure("static_vs_dynamic_slow", rate / slow.by_makespan_per_s, note=f"paper {paper:.1f}"),
    ]


DIFFERENCES = {
    "throughput": "the paper's monolith is Hugging Face transformers; here it is an engine that batches, "
    "and of the 'blocking' one all but talkers do",
    "latencies": "the paper's plan carries 3.81 times what its monoliths do and has a quarter of its load "
    "where they have 90 %; here it has nearly as much as they, and both saturate together",
    "planned and sustained": "the program counts seconds at full batches; simulated ones are as large as "
    "what waits (a vocoder's 3 of 16), and parts that share a GPU wait for each other",
    "published plan": "one GPU cannot encode and prefill all these videos; those of ServeGen are not "
    "published, and may be much shorter than footnote 2's",
    "table 2": "the paper does not say at which rate; here it is where its kind of baseline saturates",
    "static_vs_dynamic": "asking costs nothing until the control plane is full, at some 9 ms a question; 25 "
    "hold it to the paper's 2.50/s. With all requests at once free questions lose, too: images go "
    "out evenly before any work of the llm is known, and monoliths get too many",
    "static_per_s": "the paper's images are ServeGen's, of unknown size; here all are 800 x 600",
}


def main() -> None:
    """Run all, print figures beside the paper's and, as the last line, JSON."""
    args = options(__doc__ or "")
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    catalog = Catalog.default()
    figures = measure_omni(catalog, quick=args.quick) + measure_routing(catalog, quick=args.quick)
    print("\nWhere it differs from the paper, and why:")
    for what, why in DIFFERENCES.items():
        print(f"  {what}: {why}")
    figures += [
        Figure("cpu_s", time.process_time() - cpu_s),
        Figure("wall_s", time.perf_counter() - wall_s, note="other work may run beside it"),
    ]
    finish(figures, quick=args.quick)


if __name__ == "__main__":
    main()
