"""The same answer every time: plan files must be equal byte for byte, whatever else goes on.

Each fleet is planned in a process of its own: idle, with two busy loops beside it, with everything in its
file in another order, and with other hash seeds. The first run finds empty template caches and the others
full ones. Deadlines are far away: they are safety nets, and may cut a search short on a slow machine.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml

from benchmarks import process_cpu
from benchmarks.report import ROOT, Figure
from tests.slow.verdict import conclude

Tree = dict[str, object]

PARTIAL = 5
LIMIT_S = 900.0
HASH_SEEDS = (1, 2, 12_345)
_UNORDERED = {"offers", "regions", "gpus", "node_types", "only", "avoid"}
"""Lists whose order says nothing."""

TWO_REGIONS = """
services:
  chat: {model: qwen3-32b, ttft: 3s, tpot: 100ms, rate: 5/s, lengths: azure-conv}
  code: {model: gpt-oss-20b, ttft: 1500ms, tpot: 60ms, rate: 10/s, lengths: azure-code}
  small: {model: llama-3.1-8b, ttft: 1s, tpot: 50ms, rate: 15/s, lengths: azure-conv, phases: apart}
pool:
  cloud: {regions: [aws/us-east-1, aws/us-west-2], gpus: [L4, L40S], spot: true, available: 8}
limits: {spot_share: 60%}
settings: {max_nodes_per_instance: 3}
catalog:
  links:
    regions:
      - {between: [aws/us-east-1, aws/us-west-2], bandwidth: 10Gbit/s, latency: 5ms}
"""
SCARCE = """
services:
  chat: {model: qwen3-32b, ttft: 3s, tpot: 100ms, rate: 8/s, lengths: azure-conv}
  small: {model: llama-3.1-8b, ttft: 1s, tpot: 50ms, rate: 40/s, lengths: azure-conv, priority: 2}
pool:
  offers:
    - {region: r/a, node_type: L40S:2, market: on-demand, available: 3, usd_per_hour: 3.8}
    - {region: r/a, node_type: L4:1, market: spot, available: 4, usd_per_hour: 0.3}
    - {region: r/b, node_type: A10G:4, market: on-demand, available: 1, usd_per_hour: 5.7}
    - {region: r/b, node_type: L4:2, market: on-demand, available: 1, usd_per_hour: 1.7}
settings: {max_nodes_per_instance: 2}
"""
CLUSTER = """
services:
  chat: {model: qwen3-32b, ttft: 10s, tpot: 500ms, rate: 1/s, lengths: azure-conv}
cluster:
  nodes:
    zurich: {"A100-40:1": [big-1, big-2], "L4:1": 3}
    lugano: {"L4:1": 1, "T4:1": 4}
  links:
    - {between: ["*", "*"], bandwidth: 1Gbit/s, latency: 5ms}
    - {between: [zurich, zurich], bandwidth: 10Gbit/s, latency: 200us}
    - {between: [lugano, lugano], bandwidth: 10Gbit/s, latency: 500us}
"""
SLICES = """
services:
  big: {model: qwen3-32b, ttft: 2s, tpot: 80ms, rate: 8/s, lengths: azure-conv}
  small: {model: llama-3.1-8b, ttft: 1s, tpot: 50ms, rate: 40/s, lengths: azure-conv}
pool:
  owned:
    onprem: {"A100-40:8": 1, "L4:1": 4}
  offers:
    - {region: r/a, node_type: L40S:8, market: on-demand, available: 2, usd_per_hour: 15}
    - {region: r/a, node_type: L40S:1, market: spot, available: 4, usd_per_hour: 0.8}
settings: {max_nodes_per_instance: 2, init_penalty: 0.1}
"""


@dataclass(frozen=True)
class FleetCase:
    """A fleet file, and how many times busier it was when what runs now was planned (None: nothing runs)."""

    name: str
    text: str
    earlier: float | None = None


def fleets() -> list[FleetCase]:
    """Return the fleets that are planned."""
    quickstart = (ROOT / "examples" / "quickstart.yaml").read_text(encoding="utf-8")
    return [
        FleetCase("quickstart", quickstart),
        FleetCase("two-regions", TWO_REGIONS),
        FleetCase("scarce", SCARCE),
        FleetCase("cluster", CLUSTER),
        FleetCase("slices-running", SLICES, earlier=1.5),
    ]


def permute(tree: object, name: str = "") -> object:
    """Return the same fleet with names, and lists whose order says nothing, the other way round."""
    if isinstance(tree, dict):
        return {key: permute(value, str(key)) for key, value in reversed(tree.items())}
    if isinstance(tree, list):
        inner = [permute(value, name) for value in tree]
        return inner[::-1] if name in _UNORDERED else inner
    return tree


@contextmanager
def load(number: int) -> Iterator[None]:
    """Run so many busy loops beside what is timed."""
    with ExitStack() as loops:
        for _ in range(number):
            loops.enter_context(process_cpu.running([sys.executable, "-c", "while True: pass"]))
        yield


class Planner:
    """Plans fleets in fresh processes, on caches of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runs = 0

    def plan(
        self, tree: object, name: str, run: str, *, seed: int = 0, running: Path | None = None
    ) -> bytes:
        """Return the plan file of a fleet."""
        place = self.folder / f"{name}-{run}"
        place.mkdir(parents=True)
        # The file's name is the fleet's.
        fleet, out = place / f"{name}.yaml", place / "plan.json"
        fleet.write_text(yaml.safe_dump(tree, sort_keys=False), encoding="utf-8")
        command = [sys.executable, "-m", "atoll", "plan", str(fleet), "-o", str(out)]
        command += ["--deadline", f"{LIMIT_S:g}s"]
        if running is not None:
            command += ["--running", str(running)]
        done = subprocess.run(
            command,
            env=dict(os.environ)
            | {"PYTHONHASHSEED": str(seed), "ATOLL_CACHE": str(self.folder / "cache")},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=LIMIT_S + 60.0,
            check=False,
        )
        # A plan that keeps too few promises is a plan, too, and says so by its exit code.
        if done.returncode not in (0, PARTIAL):
            raise RuntimeError(f"{name} ({run}): {done.stderr.strip()[-400:]}")
        self.runs += 1
        return out.read_bytes()


def run_fleet(case: FleetCase, planner: Planner, *, quick: bool) -> list[str]:
    """Plan one fleet in every way; returns the ways that gave another plan file."""
    tree = yaml.safe_load(case.text)
    running = None
    if case.earlier is not None:
        earlier = json.loads(json.dumps(tree))
        for model in earlier["services"].values():
            model["rate"] = f"{float(model['rate'].removesuffix('/s')) * case.earlier:g}/s"
        running = planner.folder / f"{case.name}-running.json"
        running.write_bytes(planner.plan(earlier, case.name, "earlier"))
    first = planner.plan(tree, case.name, "idle", running=running)
    others: dict[str, bytes] = {}
    with load(2):
        others["load"] = planner.plan(tree, case.name, "load", running=running)
    others["permuted"] = planner.plan(permute(tree), case.name, "permuted", running=running)
    for seed in HASH_SEEDS[: 1 if quick else None]:
        others[f"hash-{seed}"] = planner.plan(
            tree, case.name, f"hash-{seed}", seed=seed, running=running
        )
    different = [way for way, plan in others.items() if plan != first]
    for way in different:
        _show(first, others[way], f"{case.name} {way}")
    return different


def _show(first: bytes, other: bytes, what: str) -> None:
    """Print the first lines that differ."""
    lines = difflib.unified_diff(
        first.decode().splitlines(), other.decode().splitlines(), "idle", what, n=0, lineterm=""
    )
    for _, line in zip(range(12), lines, strict=False):
        print(f"    {line[:150]}")


def main() -> None:
    """Plan every fleet in every way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer runs, under three minutes")
    parser.add_argument("--fleet", nargs="+", help="only the fleets of these names")
    arguments = parser.parse_args()
    different: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        planner = Planner(Path(name))
        for case in fleets():
            if arguments.fleet and case.name not in arguments.fleet:
                continue
            start = time.perf_counter()
            found = run_fleet(case, planner, quick=arguments.quick)
            different += [f"{case.name} {way}" for way in found]
            verdict = f"differs: {', '.join(found)}" if found else "the same every time"
            print(f"  {case.name:16s} {verdict}, {time.perf_counter() - start:.0f} s", flush=True)
    conclude(
        [Figure("runs", planner.runs), Figure("different", len(different), 0)],
        ways=different,
    )


if __name__ == "__main__":
    main()
