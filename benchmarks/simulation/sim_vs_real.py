"""The simulator against the stage engine on this machine, under traces with several requests at a time.

The machine is measured before, between and after stretches of the trace; each stretch is served, and then
simulated with what was measured around it: cores of a virtual machine are not equally fast from one minute to
the next (`benchmarks.real_stage`). Nothing is fitted on what is compared. vLLM was compared so once
(docs/measurements.md); `benchmarks.gpu_promise` has what it served on a GPU.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.report import Figure, finish
from benchmarks.simulation import real_stage
from benchmarks.simulation.streaming import Latency

if TYPE_CHECKING:
    from atoll.workload.requests import Requests

Times = tuple[list[float], list[float]]
"""TTFT and TPOT of requests."""
BARS = {"ttft_mean": 8.0, "ttft_p95": 12.0, "tpot_mean": 8.0, "tpot_p95": 12.0}


def summarise(ttft_s: Sequence[float], tpot_s: Sequence[float]) -> dict[str, float]:
    """Return means and 95th percentiles."""
    found = {}
    for name, values in (("ttft", ttft_s), ("tpot", tpot_s)):
        found[f"{name}_mean"] = float(np.mean(values))
        found[f"{name}_p95"] = float(np.percentile(values, 95))
    return found


def compare(rounds: Sequence[Sequence[Latency]], simulated: Sequence[Times]) -> list[Figure]:
    """Hold what was simulated against what was served, over all stretches, and print both."""
    served = [one for some in rounds for one in some]
    ttft_s = [each_s for first_s, _ in simulated for each_s in first_s]
    tpot_s = [each_s for _, next_s in simulated for each_s in next_s]
    real = summarise([one.ttft_s for one in served], [one.tpot_s for one in served])
    said = summarise(ttft_s, tpot_s)
    figures = []
    print(
        f"\n  {len(served)} requests {'served':>10s} {'simulated':>10s} {'error':>8s} {'bar':>5s}"
    )
    for name, bar in BARS.items():
        # Below 0 the simulator is too fast.
        error = 100.0 * (said[name] / real[name] - 1.0)
        print(f"  {name:12s} {real[name]:9.4f}s {said[name]:9.4f}s {error:+7.1f}% {bar:4.0f}%")
        figures.append(Figure(f"{name}_err", abs(error), bar, f"{error:+.1f} %"))
    return figures


def draw_traces(rate_per_s: float, lengths: str, seconds: float, count: int) -> list[Requests]:
    """Return as many stretches of a trace, each with a seed of its own."""
    from atoll.workload.requests import collect
    from atoll.workload.spec import workload_of

    spec = workload_of(f"poisson:{rate_per_s}/s lengths={lengths} for={seconds:g}s")
    return [collect(spec, seed).with_model(real_stage.SERVICE) for seed in range(count)]


def print_looks(run: real_stage.StageRun) -> None:
    """Print what probes have shown, and how slow the machine was at each of them."""
    look = real_stage.usual_look(run.looks)
    levels = " ".join(f"{level:.2f}" for level in real_stage.find_levels(run.looks))
    print(f"  machine before, between and after (1: usual): {levels}")
    for prompts_s, rows, steps_s, share in zip(
        look.prompts_s, look.rows, look.steps_s, run.shares, strict=True
    ):
        decode = ", ".join(f"{n:.1f}: {s * 1e3:.1f}" for n, s in zip(rows, steps_s, strict=True))
        prompts = " ".join(f"{each_s * 1e3:.0f}" for each_s in prompts_s)
        print(f"  a node: prompts {prompts} ms, tokens {decode} ms, shared {share:.2f}")
    tokens = " ".join(f"{each_s * 1e3:.0f}" for each_s in look.tokens_s)
    streams = "/".join(map(str, real_stage.STREAMS))
    print(
        f"  streams {streams}: {tokens} ms per token; hop {look.hop_s * 1e3:.2f},"
        f" steps late {look.late_s.mean() * 1e3:.2f}, beside prompts {look.beside_s * 1e3:.1f} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer stretches, under three minutes")
    parser.add_argument("--stretches", type=int, help="how many stretches of the trace")
    chosen = parser.parse_args()
    from atoll.engine.weights.sources import DEFAULT_MODEL, resolve

    folder = resolve(DEFAULT_MODEL)
    count, seconds = (3, 10.0) if chosen.quick else (5, 14.0)
    count = chosen.stretches or count
    _, plan = real_stage.build_problem()
    traces = draw_traces(real_stage.RATE_PER_S, real_stage.LENGTHS, seconds, count)
    run = asyncio.run(real_stage.run_trace(plan, folder, traces))
    print(f"  {count} stretches of {seconds:g} s")
    print_looks(run)
    found = [real_stage.simulate_stretch(run, number) for number in range(count)]
    served = [seen for _, seen in run.stretches]
    finish(compare(served, found), requests=sum(map(len, served)))


if __name__ == "__main__":
    main()
