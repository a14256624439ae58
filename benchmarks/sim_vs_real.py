"""The simulator against real engines on this machine, under traces with several requests at a time.

The machine is measured before, between and after stretches of the trace, each stretch is served and then
simulated with what was measured around it: a virtual machine's cores are not equally fast from one minute to the
next. No constant is fitted on what is compared. Stage engine: `benchmarks.real_stage`. vLLM, where a Python
with vllm is given (`--vllm PYTHON`) or this one has it: `benchmarks.real_vllm`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks import real_stage
from benchmarks.report import Figure, finish, options
from benchmarks.streaming import Latency

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
    engine: str, served: Sequence[Latency], ttft_s: Sequence[float], tpot_s: Sequence[float]
) -> Compared:
    """Hold what was simulated against what was served, and print both."""
    real = summarise([one.ttft_s for one in served], [one.tpot_s for one in served])
    found = Compared(engine, len(served), real, summarise(ttft_s, tpot_s))
    print(f"\n  {engine:12s} {'served':>10s} {'simulated':>10s} {'error':>8s} {'bar':>5s}")
    for name, bar in BARS.items():
        print(
            f"  {name:12s} {real[name]:9.4f}s {found.simulated[name]:9.4f}s"
            f" {found.error(name):+7.1f}% {bar:4.0f}%"
        )
    return found


def compare_stage(seconds: float, rounds: int) -> Compared:
    """Serve and simulate on the stage engine."""
    from atoll.engine.weights.sources import DEFAULT_MODEL, resolve
    from atoll.workload.requests import collect
    from atoll.workload.spec import workload_of

    problem, plan = real_stage.build_problem()
    spec = f"poisson:{real_stage.RATE_PER_S}/s lengths={real_stage.LENGTHS} for={seconds:g}s"
    traces = [
        collect(workload_of(spec), seed).with_model(real_stage.SERVICE) for seed in range(rounds)
    ]
    found = asyncio.run(real_stage.run_rounds(plan, resolve(DEFAULT_MODEL), traces))
    beside = real_stage.beside_steps(found)
    print(
        f"  {rounds} stretches of {seconds:g} s; beside steps a hop takes {beside.hop_s * 1e3:.2f} ms"
        f" and a request {beside.request_s * 1e3:.1f} ms"
    )
    served: list[Latency] = []
    ttft_s: list[float] = []
    tpot_s: list[float] = []
    for one in found:
        first_s, each_s = real_stage.simulate_round(plan, problem, one, beside)
        served += one.served
        ttft_s += first_s
        tpot_s += each_s
    return compare("stage engine", served, ttft_s, tpot_s)


def main() -> None:
    chosen = options(__doc__ or "")
    rounds, seconds = (3, 16.0) if chosen.quick else (9, 20.0)
    compared = {"stage": compare_stage(seconds, rounds)}
    figures = []
    more: dict[str, float] = {}
    for name, bar in BARS.items():
        errors = {short: abs(each.error(name)) for short, each in compared.items()}
        worst = max(errors, key=lambda short: errors[short])
        figures.append(Figure(f"{name}_err", errors[worst], bar, compared[worst].engine))
        more |= {f"{short}_{name}_err": error for short, error in errors.items()}
    finish(figures, **more)


if __name__ == "__main__":
    main()
