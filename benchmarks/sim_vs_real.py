"""The simulator against reality: the demo plan under one trace, simulated and served.

The stage engine is profiled on this machine (`atoll profile`), each layer range of the plan on its own core.
What a hop costs beside its step is measured on a single stream, before anything is compared. Then a trace is
simulated, and replayed against the real processes behind the gateway.
"""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from atoll.core.rng import stream
from benchmarks.report import ROOT, Figure, finish, options

if TYPE_CHECKING:
    from atoll.plan.cluster import NodeProfile
    from atoll.plan.plan import Plan
    from atoll.plan.problem import Problem
    from atoll.runtime.local.build import LocalModel
    from atoll.workload.requests import Requests

SERVICE = "smollm2"
LENGTHS = "96x48"
RATE_PER_S = 0.2
KV_BYTES = 128 * 2**20
BAR = 10.0
_TOKENS = 49_000
Times = tuple[list[float], list[float]]
"""Seconds to the first token, and per further token, of each request."""


def profiles(plan: Plan, model: LocalModel) -> dict[str, NodeProfile]:
    """Measure the range of every node type of the plan."""
    from atoll.runtime.local.profile import profile_range

    found: dict[str, NodeProfile] = {}
    for node in plan.instances[0].nodes:
        if node.node_type not in found:
            found[node.node_type] = profile_range(model.folder, node.start, node.end, KV_BYTES)
    return found


async def answer(url: str, number: int, prompt: int, output: int) -> tuple[float, float]:
    """Stream one answer; returns seconds to the first token and per further token."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    tokens = stream(number, "prompt").integers(20, _TOKENS, size=prompt).tolist()
    asked = {
        "model": SERVICE,
        "prompt": tokens,
        "max_tokens": output,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
    }
    body = json.dumps(asked).encode()
    begun_s = time.monotonic()
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(
        f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        + body
    )
    first_s = last_s = 0.0
    count = 0
    while line := await reader.readline():
        if line.startswith(b"data: [DONE]"):
            break
        if line.startswith(b"data: "):
            event: dict[str, Any] = json.loads(line[6:])
            new = sum(len(choice["token_ids"]) for choice in event["choices"])
            if new:
                last_s = time.monotonic()
                first_s = first_s or last_s
                count += new
    writer.close()
    if count != output:
        raise RuntimeError(f"{count} of {output} tokens came")
    return first_s - begun_s, (last_s - first_s) / max(1, count - 1)


async def served(plan: Plan, model: LocalModel, requests: Requests) -> tuple[float, Times]:
    """Serve the plan; returns seconds per token of a single stream, and the times under the trace."""
    from atoll.cli.serving import local_fleet
    from atoll.runtime.local.build import LocalOptions

    with local_fleet(
        plan,
        {SERVICE: model},
        LocalOptions(kv_bytes=KV_BYTES),
        host="127.0.0.1",
        port=0,
        log=None,
        on_progress=lambda _name, _state, _reason: None,
    ) as fleet:
        await fleet.start()
        try:
            alone = [await answer(fleet.url, 10**6 + i, 64, 32) for i in range(4)]
            begun_s = time.monotonic()

            async def later(i: int) -> tuple[float, float]:
                await asyncio.sleep(
                    max(0.0, begun_s + float(requests.arrival_s[i]) - time.monotonic())
                )
                return await answer(fleet.url, i, int(requests.input[i]), int(requests.output[i]))

            times = await asyncio.gather(*(later(i) for i in range(len(requests))))
        finally:
            await fleet.stop(5.0)
    # The first stream also warms up.
    idle_s = float(np.median([tpot_s for _, tpot_s in alone[1:]]))
    return idle_s, ([t for t, _ in times], [p for _, p in times])


def hop_seconds(plan: Plan, measured: dict[str, NodeProfile], idle_s: float) -> float:
    """Return what a hop costs beside its step, from the seconds per token of a single stream."""
    stages = plan.instances[0].layout()
    steps_s = 0.0
    for stage in stages:
        profile = measured[stage.nodes[0].node_type]
        steps_s += profile.step_s + (stage.end - stage.start) * profile.decode_s_per_layer[0][1]
    return max(0.0, idle_s - steps_s) / (len(stages) + 1)


def simulated(
    plan: Plan, problem: Problem, measured: dict[str, NodeProfile], hop_s: float, requests: Requests
) -> Times:
    """Simulate the plan with what was measured."""
    from atoll.plan.cluster import ClusterLink
    from atoll.sim.api import simulate
    from atoll.sim.options import SimOptions

    assert problem.cluster is not None
    link = ClusterLink(src="*", dst="*", bytes_per_s=1.25e9, latency_s=hop_s)
    cluster = problem.cluster.model_copy(update={"profiles": {SERVICE: measured}, "links": (link,)})
    asked = problem.replace(cluster=cluster)
    result = simulate(
        plan, asked, asked.catalog(), requests, SimOptions(token_budget=512, high_water=0.9)
    )
    return result.requests.ttft_s.tolist(), result.requests.tpot_s.tolist()


def main() -> None:
    chosen = options(__doc__ or "")
    from atoll.engine.weights.sources import DEFAULT_MODEL, resolve
    from atoll.plan.files.fleet import load_fleet
    from atoll.plan.plan import Plan
    from atoll.runtime.local.build import LocalModel
    from atoll.workload.requests import collect
    from atoll.workload.spec import workload_of

    examples = ROOT / "examples"
    plan = Plan.from_json((examples / "demo-plan.json").read_text())
    problem = load_fleet(Path(examples / "demo-local.yaml"))
    model = LocalModel(DEFAULT_MODEL, resolve(DEFAULT_MODEL))
    seconds = 60 if chosen.quick else 300
    requests = collect(
        workload_of(f"poisson:{RATE_PER_S}/s lengths={LENGTHS} for={seconds}s"), 0
    ).with_model(SERVICE)
    measured = profiles(plan, model)
    idle_s, real = asyncio.run(served(plan, model, requests))
    hop_s = hop_seconds(plan, measured, idle_s)
    guess = simulated(plan, problem, measured, hop_s, requests)
    print(
        f"{len(requests)} requests in {seconds} s; a hop costs {hop_s * 1e3:.2f} ms beside its step"
    )
    print(f"\n  {'':12s} {'served':>10s} {'simulated':>10s} {'error':>8s}")
    figures = []
    values: dict[str, float] = {}
    for name, ours, theirs in zip(("ttft", "tpot"), real, guess, strict=True):
        for what, pick in (("mean", np.mean), ("p95", lambda x: np.percentile(x, 95))):
            served_s, simulated_s = float(pick(ours)), float(pick(theirs))
            error = 100 * (simulated_s / served_s - 1)
            label = f"{name}_{what}"
            print(f"  {label:12s} {served_s:9.4f}s {simulated_s:9.4f}s {error:+7.1f}%")
            values |= {f"{label}_served_s": served_s, f"{label}_simulated_s": simulated_s}
            figures.append(Figure(f"{label}_error", abs(error), BAR))
    finish(figures, requests=len(requests), idle_tpot_s=idle_s, hop_s=hop_s, **values)


if __name__ == "__main__":
    main()
