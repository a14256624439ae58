"""The simulator against real engines on this machine, under traces with several requests at a time.

The machine is measured before, between and after stretches of the trace; each stretch is served, and then
simulated with what was measured around it: cores of a virtual machine are not equally fast from one minute to
the next. Nothing is fitted on what is compared. Stage engine: `benchmarks.real_stage`. vLLM, where a Python
that has it is given (`--vllm PYTHON`) or this one has: `benchmarks.real_vllm`.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.report import Figure, finish
from benchmarks.simulation import real_stage, real_vllm
from benchmarks.simulation.streaming import Latency

if TYPE_CHECKING:
    from atoll.workload.requests import Requests

Times = tuple[list[float], list[float]]
"""TTFT and TPOT of requests."""
BARS = {"ttft_mean": 8.0, "ttft_p95": 12.0, "tpot_mean": 8.0, "tpot_p95": 12.0}


@dataclass(frozen=True, slots=True)
class Compared:
    """An engine as it served all requests, and as it was simulated: seconds by figure."""

    engine: str
    requests: int
    served: dict[str, float]
    simulated: dict[str, float]

    def error(self, figure: str) -> float:
        """Per cent that the simulator is off, below 0 if it is too fast."""
        return 100.0 * (self.simulated[figure] / self.served[figure] - 1.0)


def summarise(ttft_s: Sequence[float], tpot_s: Sequence[float]) -> dict[str, float]:
    """Return means and 95th percentiles."""
    found = {}
    for name, values in (("ttft", ttft_s), ("tpot", tpot_s)):
        found[f"{name}_mean"] = float(np.mean(values))
        found[f"{name}_p95"] = float(np.percentile(values, 95))
    return found


def compare(
    engine: str, rounds: Sequence[Sequence[Latency]], simulated: Sequence[Times]
) -> Compared:
    """Hold what was simulated against what was served, over all stretches, and print both."""
    served = [one for some in rounds for one in some]
    ttft_s = [each_s for first_s, _ in simulated for each_s in first_s]
    tpot_s = [each_s for _, next_s in simulated for each_s in next_s]
    real = summarise([one.ttft_s for one in served], [one.tpot_s for one in served])
    found = Compared(engine, len(served), real, summarise(ttft_s, tpot_s))
    print(f"\n  {engine:12s} {'served':>10s} {'simulated':>10s} {'error':>8s} {'bar':>5s}")
    for name, bar in BARS.items():
        print(
            f"  {name:12s} {real[name]:9.4f}s {found.simulated[name]:9.4f}s"
            f" {found.error(name):+7.1f}% {bar:4.0f}%"
        )
    return found


def draw_traces(rate_per_s: float, lengths: str, seconds: float, count: int) -> list[Requests]:
    """Return as many stretches of a trace, each with a seed of its own."""
    from atoll.workload.requests import collect
    from atoll.workload.spec import workload_of

    spec = workload_of(f"poisson:{rate_per_s}/s lengths={lengths} for={seconds:g}s")
    return [collect(spec, seed).with_model(real_stage.SERVICE) for seed in range(count)]


def compare_stage(folder: Path, seconds: float, count: int) -> Compared:
    """Serve and simulate on the stage engine."""
    _, plan = real_stage.build_problem()
    traces = draw_traces(real_stage.RATE_PER_S, real_stage.LENGTHS, seconds, count)
    run = asyncio.run(real_stage.run_trace(plan, folder, traces))
    print(f"  {count} stretches of {seconds:g} s")
    print_looks(run)
    found = [real_stage.simulate_stretch(run, number) for number in range(count)]
    return compare("stage engine", [served for _, served in run.stretches], found)


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


def compare_vllm(python: str, folder: Path, seconds: float, count: int) -> Compared:
    """Serve and simulate on vLLM."""
    traces = draw_traces(real_vllm.RATE_PER_S, real_vllm.LENGTHS, seconds, count)
    run = real_vllm.measure_trace(python, folder, traces)
    levels = " ".join(f"{level:.2f}" for level in run.levels)
    print(
        f"\n  {count} stretches of {seconds:g} s; a request takes {run.beside_s * 1e3:.1f} ms beside its"
        f" steps; machine before, between and after (1: usual): {levels}"
    )
    found = [real_vllm.simulate_stretch(run, number) for number in range(count)]
    return compare("vLLM", [served for _, served in run.stretches], found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer stretches, under three minutes")
    parser.add_argument("--stretches", type=int, help="how many stretches of the trace")
    parser.add_argument("--vllm", type=Path, help="a Python that has vllm")
    parser.add_argument("--only", choices=("stage", "vllm"), help="leave the other engine out")
    chosen = parser.parse_args()
    from atoll.engine.weights.sources import DEFAULT_MODEL, resolve

    folder = resolve(DEFAULT_MODEL)
    count, seconds = (3, 10.0) if chosen.quick else (5, 14.0)
    count = chosen.stretches or count
    compared = {}
    if chosen.only != "vllm":
        compared["stage"] = compare_stage(folder, seconds, count)
    python, why = real_vllm.find_python(chosen.vllm)
    if python is not None and chosen.only != "stage":
        compared["vllm"] = compare_vllm(python, folder, seconds, count)
    elif chosen.only != "stage":
        print(f"\n  vLLM was skipped: {why}")
    report(compared)


def report(compared: dict[str, Compared]) -> None:
    """Print the worst engine's errors against their bars, and all of them."""
    figures = []
    more: dict[str, object] = {"engines": sorted(compared)}
    for name, bar in BARS.items():
        errors = {short: abs(each.error(name)) for short, each in compared.items()}
        worst = max(errors, key=lambda short: errors[short], default=None)
        value = None if worst is None else errors[worst]
        note = "" if worst is None else compared[worst].engine
        figures.append(Figure(f"{name}_err", value, bar, note))
        more |= {f"{short}_{name}_err": errors.get(short) for short in ("stage", "vllm")}
    for short, each in compared.items():
        more[f"{short}_requests"] = each.requests
    finish(figures, **more)


if __name__ == "__main__":
    main()
