"""OpenFabric's table 1 and figure 5: placement by constraint programming, by memP, and our own, simulated.

Llama-2-13b, CodeLlama-34b and Llama-3.3-70B share 32 GH200 and 24 A100 at 110, 185.5 and 221 requests/s,
lengths normal. What the paper leaves open, and what is taken here:

- Machines. Of four GPUs each, joined by NVLink: then memP's shares, in whole machines, are exactly table 1's,
  and Alps, whose GH200 these are, has such machines. 70B in bf16 needs two GPUs, so tensor parallel inside a
  machine suffices, and all weights stay bf16.
- Lengths. The paper gives ranges of means: prompts of about 600 to 1170 tokens, answers of 64 to 530. The
  ends go to the small and the large model, the middle to the one between. "light": the large model has
  the short requests, which this cluster comes nearest to serving; "heavy": the small one has. Standard
  deviations are 0.3 of the mean.
- Load. At the paper's rates no placement keeps up here (the best carry about half), so latency is that of a
  burst: 30 s of arrivals, all simulated to their end. Throughput is all tokens over the time until the last
  request has ended, and beside it requests that ended while more arrived. At 0.4 times the rates the cluster
  keeps up and memP does not; at 0.04 times memP does, too.

Every plan is judged by the same arrivals, which no planner has seen. "atoll" is `flow.search` with the
objective "latency"; "atoll default" has the default one: the largest share of demand for the worst-served
model.
The figures of figure 5 are not in the paper's text: only who wins can be compared. What its scheduler's
roofline is off (figure 6) is in docs/measurements.md.
"""

from __future__ import annotations

import resource
import time
from collections import Counter
from dataclasses import dataclass

import numpy as np

from atoll.catalog.catalog import Catalog
from atoll.plan.files.fleet_file import parse_fleet
from atoll.plan.plan import Plan
from atoll.plan.problem import Problem
from atoll.prove.cp_tables import SimulatedLatency
from atoll.sim.api import simulate
from atoll.sim.sim_options import SimOptions
from atoll.solve.effort import Effort
from atoll.solve.place.cp.latency_table import horizon_of
from atoll.solve.plan_request import PlanRequest
from atoll.solve.registry import solve
from atoll.workload.arrival_rates import RateClock
from atoll.workload.arrivals import Renewal
from atoll.workload.requests import Requests, collect
from atoll.workload.sampling import Independent, Normal
from atoll.workload.synthetic import Mixed, Synthetic
from benchmarks.report import Figure, finish, options

RATES = {"13b": 110.0, "34b": 185.5, "70b": 221.0}
MODELS = {"13b": "llama-2-13b", "34b": "codellama-34b", "70b": "llama-3.3-70b"}
ENDS = ((1170, 530), (885, 297), (600, 64))
"""Mean prompt and answer in tokens: the ends of the paper's ranges, and their middle."""
LENGTHS = {
    "light": dict(zip(RATES, ENDS, strict=True)),
    "heavy": dict(zip(RATES, ENDS[::-1], strict=True)),
}
CV = 0.3
TABLE_1 = {
    "memp": {"13b": "4xA100", "34b": "16xA100", "70b": "4xA100+32xGH200"},
    "cp": {"13b": "6xA100", "34b": "10xA100+16xGH200", "70b": "8xA100+16xGH200"},
}
SEEDS = (101, 102, 103)
MEMP, CP, ATOLL, DEFAULT = "memp", "cp", "atoll", "atoll default"
FIRST_TOKEN_S, TOKEN_S = 60, 1
"""Promises wide enough that none decides: OpenFabric makes none."""


@dataclass(frozen=True)
class Judged:
    """A plan under arrivals it has not seen: seconds, tokens/s and requests/s, means over seeds."""

    mean_s: float
    p50_s: float
    p95_s: float
    tokens_per_s: float
    ended_per_s: float
    by_service_s: dict[str, float]


def fleet(lengths: str, scale: float) -> Problem:
    """Return table 1's cluster and workload with the rates times `scale`."""
    models = "".join(
        f"  {name}: {{model: {MODELS[name]}, rate: {rate * scale:.6g}/s, ttft: {FIRST_TOKEN_S}s, "
        f"tpot: {TOKEN_S}s, phases: together, lengths: {{input: {prompt}, output: {answer}, "
        f"input_cv: {CV}, output_cv: {CV}}}}}\n"
        for name, rate in RATES.items()
        for prompt, answer in [LENGTHS[lengths][name]]
    )
    return parse_fleet(
        f"services:\n{models}"
        "cluster:\n"
        "  nodes: {site: {'GH200:4': 8, 'A100-80:4': 6}}\n"
        "  links: [{between: ['*', '*'], bandwidth: 200Gbit/s, latency: 10us}]\n"
        # The shipped catalog knows GH200 alone in a machine.
        "catalog: {nodes: {'GH200:2': {interconnect: nvlink4}, 'GH200:4': {interconnect: nvlink4}}}\n"
    )


def arrivals(problem: Problem, seconds: float, seed: int) -> Requests:
    """Return Poisson arrivals with normal lengths."""
    parts = tuple(
        Synthetic(
            s.name,
            RateClock(s.rate_per_s),
            Independent(Normal(s.lengths.input_mean, CV), Normal(s.lengths.output_mean, CV)),
            Renewal(),
            duration_s=seconds,
            models=(s.name,),
        )
        for s in problem.services
    )
    return collect(Mixed("openfabric", parts), seed)


def judge(plan: Plan, problem: Problem, catalog: Catalog, seeds: tuple[int, ...]) -> Judged:
    """Simulate a plan, all requests to their end."""
    seconds = horizon_of(problem)
    found = []
    for seed in seeds:
        requests = arrivals(problem, seconds, seed)
        report = simulate(plan, problem, catalog, requests, SimOptions(seed=seed))
        late = report.requests.e2e_s
        assert np.isfinite(late).all(), "every request ends"
        ends = report.requests.arrival_s + late
        tokens = float(requests.input.sum() + requests.output.sum())
        own = [late[report.requests.service == k].mean() for k in range(len(problem.services))]
        found.append(
            (late.mean(), *np.quantile(late, (0.5, 0.95)), tokens / ends.max(),
             (ends <= seconds).sum() / seconds, *own)
        )  # fmt: skip
    means = [float(value) for value in np.mean(found, axis=0)]
    by_service = dict(zip((s.name for s in problem.services), means[5:], strict=True))
    return Judged(means[0], means[1], means[2], means[3], means[4], by_service)


def make(name: str, problem: Problem, catalog: Catalog) -> tuple[Plan, float, float, int]:
    """Return a planner's plan, its wall and CPU seconds (children's too), and its simulations."""
    latency = SimulatedLatency(catalog)
    effort = Effort(latency=latency, objective="latency" if name == ATOLL else None)
    solver = "flow.search" if name in (ATOLL, DEFAULT) else name
    began, cpu = time.perf_counter(), _cpu_s()
    plan = solve(
        problem, PlanRequest(solver=solver, effort=effort, deadline_s=3600.0, catalog=catalog)
    )
    assert not plan.cut_short
    return plan, time.perf_counter() - began, _cpu_s() - cpu, latency.runs


def gpus_of(plan: Plan) -> dict[str, str]:
    """Return by service how many GPUs of which type it has, as table 1 writes it."""
    held: dict[str, Counter[str]] = {name: Counter() for name in RATES}
    for instance in plan.instances:
        for node in instance.nodes:
            gpu, count = node.kind.rsplit(":", 1)
            held[instance.service][gpu.removesuffix("-80")] += int(count)
    return {
        name: "+".join(f"{count}x{gpu}" for gpu, count in sorted(own.items()))
        for name, own in held.items()
    }


def replicas_of(plan: Plan) -> str:
    """Return the replicas in words: how many of which GPUs, stages and tensor parallel size."""
    kinds = Counter(
        (i.service, f"{i.nodes[0].kind}{f' in {len(i.nodes)} stages' if len(i.nodes) > 1 else ''}")
        for i in plan.instances
    )
    return ", ".join(f"{name} {count} x {what}" for (name, what), count in sorted(kinds.items()))


def run_case(lengths: str, scale: float, quick: bool) -> dict[str, Judged]:
    """Plan and judge one workload with every planner."""
    problem = fleet(lengths, scale)
    catalog = problem.catalog()
    seeds = SEEDS[:1] if quick else SEEDS
    asked = sum(s.rate_per_s for s in problem.services)
    print(f"\n{lengths} lengths, {scale:g} x the paper's rates ({asked:.1f} requests/s), ", end="")
    print(f"{horizon_of(problem):.0f} s of arrivals")
    print(
        "                  mean s   p50 s   p95 s  tokens/s ended/s | mean s 13b    34b    70b |",
        end="",
    )
    print("  wall s   cpu s  sims")
    found = {}
    for name in (MEMP, CP, ATOLL, DEFAULT):
        plan, wall_s, cpu_s, sims = make(name, problem, catalog)
        own = found[name] = judge(plan, problem, catalog, seeds)
        parts = " ".join(f"{own.by_service_s[s]:6.1f}" for s in RATES)
        print(
            f"  {name:14s} {own.mean_s:7.2f} {own.p50_s:7.2f} {own.p95_s:7.2f} {own.tokens_per_s:9,.0f}"
            f" {own.ended_per_s:7.1f} |     {parts} | {wall_s:7.1f} {cpu_s:7.1f} {sims:5d}"
        )
        gpus = gpus_of(plan)
        print("      " + "  ".join(f"{s}: {gpus[s]}" for s in RATES) + f"  ({replicas_of(plan)})")
        for note in plan.notes[:1] if name in (CP, ATOLL) else ():
            print(f"      {note}")
        if name == MEMP:
            assert gpus == TABLE_1[MEMP], gpus
        if name in TABLE_1 and scale == 1.0:
            print("      table 1: " + "  ".join(f"{s}: {TABLE_1[name][s]}" for s in RATES))
    return found


def main() -> None:
    """Run every case and print the figures."""
    chosen = options(str(__doc__).partition("\n")[0])
    cases = [("light", 1.0), ("light", 0.4)]
    if not chosen.quick:
        cases += [("light", 0.04), ("heavy", 1.0), ("heavy", 0.2)]
    results = {case: run_case(*case, chosen.quick) for case in cases}
    paper = results["light", 1.0]

    def latency(one: str, other: str) -> dict[str, float]:
        return {
            f"{lengths} {scale:g}": found[one].mean_s / found[other].mean_s
            for (lengths, scale), found in results.items()
        }

    def told(ratios: dict[str, float]) -> str:
        return ", ".join(f"{case} {ratio:.3f}" for case, ratio in ratios.items())

    cp, atoll, default = latency(CP, MEMP), latency(ATOLL, CP), latency(DEFAULT, CP)
    ended = paper[CP].ended_per_s / paper[MEMP].ended_per_s
    heavy = results.get(("heavy", 1.0))
    carried = None if heavy is None else heavy[CP].tokens_per_s / heavy[MEMP].tokens_per_s
    finish(
        [
            Figure(
                "cp_vs_memp_throughput",
                paper[CP].tokens_per_s / paper[MEMP].tokens_per_s,
                1.0,
                "light lengths at the paper's rates, until the last request has ended",
                at_least=True,
            ),
            Figure(
                "cp_vs_memp_throughput_heavy", carried, note="least latency is not the least end"
            ),
            Figure("cp_vs_memp_ended", ended, note="requests that ended while more arrived"),
            Figure("cp_vs_memp_latency", max(cp.values()), 1.0, f"the worst of: {told(cp)}"),
            Figure("atoll_vs_cp_latency", max(atoll.values()), 1.0, f"the worst of: {told(atoll)}"),
            Figure(
                "default_vs_cp_latency", max(default.values()), note=f"worst of: {told(default)}"
            ),
        ],
        **{
            f"{name.replace(' ', '_')}_{key}": getattr(paper[name], key)
            for name in paper
            for key in ("mean_s", "p50_s", "p95_s", "tokens_per_s", "ended_per_s")
        },
    )


def _cpu_s() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


if __name__ == "__main__":
    main()
