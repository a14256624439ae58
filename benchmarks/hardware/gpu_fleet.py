"""A planned fleet on this machine, for measuring: `atoll up`, loads in an open loop, counters, `atoll down`.

Needs neither a planner nor a simulator. Its state is kept below a folder of its own, so that nothing of this
user's other fleets is touched.
"""

from __future__ import annotations

import asyncio
import contextlib
import csv
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from atoll.core.ids import Phase
from atoll.core.paths import runtime_dir
from atoll.plan.plan import Flow, Route
from benchmarks.simulation.streaming import stream_answer

if TYPE_CHECKING:
    from atoll import Fleet
    from atoll.api.fleet_plan import FleetPlan

UNFINISHED = "unfinished"
"""Said in place of an error where a run ended before the answer did."""
_SERVERS = r"(vllm.* serve|stage_node) .*--port"
_METRIC = re.compile(
    r"^(?P<name>[a-zA-Z_:]\w*(?::\w+)*)(?:\{[^}]*\})? (?P<value>[-+.e0-9]+)$", re.MULTILINE
)
_LOADING = re.compile(r"^(\S+ \S+) \w+ \S+: loading weights: (\d+) of (\d+) ", re.MULTILINE)
_STAMP = "%Y-%m-%d %H:%M:%S,%f"


class Arrival(NamedTuple):
    """A request of a run: when it comes, and the tokens of its prompt and of its answer."""

    arrival_s: float
    input: int
    output: int


class Served(NamedTuple):
    """A request as its client saw it; times are blank where no answer came."""

    arrival_s: float
    input: int
    output: int
    ttft_ms: str
    tpot_ms: str
    error: str


@dataclass(frozen=True, slots=True)
class GpuFleet:
    """A fleet whose plan and fleet file lie in a folder as NAME.json and NAME.yaml; `server` names its state.

    On `device` "cpu" processes on cores stand for its GPUs.
    """

    folder: Path
    name: str
    server: str
    service: str
    port: int = 18080
    device: Literal["cpu", "cuda"] = "cuda"

    @property
    def url(self) -> str:
        """Address of its gateway."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def _environment(self) -> dict[str, str]:
        return {**os.environ, "ATOLL_STATE": str(self.folder / "atoll")}

    @property
    def _state(self) -> tuple[str, str]:
        return "--state", str(self.folder / f"state-{self.server}")

    def up(self, model: Path, environment: Mapping[str, str] | None = None) -> dict[str, Any]:
        """Bring it up as a user would; returns when and how long that took, commands and versions."""
        begun_s = time.monotonic()
        command = [
            *(sys.executable, "-m", "atoll", "up", str(self.folder / f"{self.name}.json")),
            *("--fleet", str(self.folder / f"{self.name}.yaml"), *self._state),
            *("--model", f"{self.service}={model}"),
            *("--yes", "--port", str(self.port), "--wait", "8min", "--on", "local"),
            *(("--pretend", "--device", "cpu") if self.device == "cpu" else ()),
        ]
        date = datetime.now(UTC)
        subprocess.run(command, env={**self._environment, **(environment or {})}, check=True)
        ready_s = round(time.monotonic() - begun_s, 1)
        names = ("torch", "triton", "transformers")
        # Results are kept: whose folders these were is nobody's business.
        own = re.compile(rf"{re.escape(str(self.folder))}/|\S*/(?=python\S*|vllm )")
        servers = [own.sub("", command) for command in self.servers().values()]
        return {
            "date_utc": date.isoformat(timespec="seconds"),
            "ready_s": ready_s,
            "weights_s": _read_loading(runtime_dir(), date),
            "server": servers[0],
            "servers": servers,
            "versions": {name: _version(name) for name in names} | self._engine_version(),
            "python": sys.version.split()[0],
            "gpu": _said("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"),
        }

    def down(self) -> None:
        """End what `up` began."""
        command = [sys.executable, "-m", "atoll", "down", *self._state, "--yes"]
        subprocess.run(command, env=self._environment, check=True)

    def _homes(self) -> list[Path]:
        """Return the folders of its instances, of which some may have ended."""
        below = (self.folder / "atoll", Path(self._state[1]))
        return sorted({path.parent for top in below for path in top.rglob("i-*/order.json")})

    def instances(self) -> set[str]:
        """Return the names of its instances, of which some may have ended."""
        return {home.name.removeprefix("i-") for home in self._homes()}

    def servers(self) -> dict[str, str]:
        """Return the commands of all servers by their ports; programs before them have longer ones."""
        orders = [json.loads((home / "order.json").read_text()) for home in self._homes()]
        own = {str(node["port"]) for order in orders for node in order["nodes"] if node.get("port")}
        found: dict[str, str] = {}
        for line in _said("pgrep", "-af", _SERVERS).splitlines():
            command = line.partition(" ")[2]
            for port in re.findall(r"--port (\d+)", command)[:1]:
                if port in own:
                    found[port] = min(command, found.get(port, command), key=len)
        return dict(sorted(found.items()))

    def engines(self) -> list[str]:
        """Return the addresses of all servers, past the gateway."""
        return [f"http://127.0.0.1:{port}" for port in self.servers()]

    def _engine_version(self) -> dict[str, str | None]:
        with (
            contextlib.suppress(OSError, ValueError, KeyError, IndexError),
            urllib.request.urlopen(f"{self.engines()[0]}/version", timeout=10.0) as answer,
        ):
            return {"vllm": json.load(answer)["version"]}
        return {"atoll": _version("atoll")}

    def metrics(self) -> dict[str, float]:
        """Return what all servers have counted, added up over servers and labels."""
        total: dict[str, float] = {}
        for engine in self.engines():
            with (
                contextlib.suppress(OSError),
                urllib.request.urlopen(f"{engine}/metrics", timeout=10.0) as answer,
            ):
                for found in _METRIC.finditer(answer.read().decode()):
                    name = found["name"]
                    total[name] = total.get(name, 0.0) + float(found["value"])
        return total

    async def send(
        self,
        arrivals: Sequence[Arrival],
        seed: int,
        *,
        begin: Callable[[int], Sequence[int]] | None = None,
        end_s: float | None = None,
    ) -> list[Served]:
        """Send every request when it is due, whatever became of others; until `end_s` where it is given.

        No two seeds have prompts in common, but for what these begin with (`begin`, of the so-many-th).
        """
        begun_s = time.monotonic() + 0.5

        async def later(at: int) -> Served:
            arrival = arrivals[at]
            first = () if begin is None else begin(at)
            await asyncio.sleep(max(0.0, begun_s + arrival.arrival_s - time.monotonic()))
            left_s = 120.0 if end_s is None else min(120.0, begun_s + end_s - time.monotonic())
            try:
                # Not `wait_for`, whose task an error of the kind that ends programs would leave.
                async with asyncio.timeout(left_s):
                    found = await stream_answer(
                        *(self.url, self.service, seed * 100_000 + at),
                        *(arrival.input, arrival.output),
                        begin=first,
                    )
            except TimeoutError:
                return Served(*arrival, "", "", "TimeoutError" if left_s == 120.0 else UNFINISHED)
            except (SystemExit, OSError, ValueError) as error:
                return Served(*arrival, "", "", str(error) or type(error).__name__)
            ttft_s, tpot_s = found.latency
            return Served(*arrival, f"{1e3 * ttft_s:.2f}", f"{1e3 * tpot_s:.3f}", "")

        return list(await asyncio.gather(*(later(at) for at in range(len(arrivals)))))


def _read_loading(folder: Path, since: datetime) -> float | None:
    """Return the seconds that the slowest node of the stage engine took to load weights, as logs there say.

    None where no log says so.
    """
    taken = []
    for log in folder.glob("run-*/*.log"):
        said = _LOADING.findall(log.read_text(errors="replace"))
        lines = [(datetime.strptime(at, _STAMP).astimezone(UTC), *rest) for at, *rest in said]
        lines = [line for line in lines if line[0] >= since]
        if lines:
            (first, begun, _), (last, done, total) = lines[0], lines[-1]
            share = (int(done) - int(begun)) / int(total)
            taken.append((last - first).total_seconds() / share if share else 0.0)
    return round(max(taken), 2) if taken else None


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _said(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except FileNotFoundError:
        return ""


class Stages(NamedTuple):
    """An instance to be: its id, its phase, and the first and last layer of each of its stages."""

    id: str
    phase: Phase
    layers: Sequence[tuple[int, int]]


def lay_out(plan: FleetPlan, fleet: Fleet, wanted: Sequence[Stages]) -> FleetPlan:
    """Return a plan of one service on shares of a GPU with other instances, a share for each of their stages.

    Each node is told the KV cache that its share has room for.
    """
    from atoll.plan.capacities import share_kv_bytes

    model = plan.instances[0]
    shares = iter(range(model.nodes[0].machine_gpus))
    instances = []
    for one in wanted:
        nodes = tuple(
            model.nodes[0].model_copy(
                update={"id": f"n{at}", "start": start, "end": end, "gpu_ids": (next(shares),)}
            )
            for at, (start, end) in enumerate(one.layers)
        )
        ends = ["source", *(node.id for node in nodes), "sink"]
        flows = tuple(
            Flow(src=a, dst=b, per_s=model.throughput_per_s) for a, b in itertools.pairwise(ends)
        )
        role = str(model.role_id._replace(phase=one.phase))
        named = {"id": one.id, "role": role, "stages": len(nodes), "nodes": nodes, "flows": flows}
        made = model.model_copy(update=named)
        nodes = tuple(
            node.model_copy(
                update={"kv_bytes": share_kv_bytes(fleet.problem, fleet.catalog, made, node)}
            )
            for node in nodes
        )
        instances.append(made.model_copy(update={"nodes": nodes}))
    ways = itertools.product(
        *(
            [one.id for one in wanted if one.phase is phase]
            for phase in (Phase.BOTH, Phase.PREFILL, Phase.DECODE)
            if any(one.phase is phase for one in wanted)
        )
    )
    routes = [Route(service=model.service, instances=way, share=1.0) for way in ways]
    even = tuple(route.model_copy(update={"share": 1.0 / len(routes)}) for route in routes)
    return plan.model_copy(update={"instances": tuple(instances), "routes": even})


def write_arrivals(path: Path, arrivals: Sequence[Arrival]) -> None:
    """Write the arrivals of a run."""
    with path.open("w", newline="") as stream:
        rows = csv.writer(stream)
        rows.writerow(Arrival._fields)
        rows.writerows((f"{each.arrival_s:.4f}", *each[1:]) for each in arrivals)


def read_arrivals(path: Path) -> list[Arrival]:
    """Read what `write_arrivals` wrote."""
    with path.open() as stream:
        return [
            Arrival(float(row["arrival_s"]), int(row["input"]), int(row["output"]))
            for row in csv.DictReader(stream)
        ]


def draw_arrivals(
    rate_per_s: float, lengths: str, seconds: float, seed: int, *, more: int = 0, limit: int
) -> list[Arrival]:
    """Draw Poisson arrivals, with prompts of so many tokens more; those over the limit are left out."""
    from atoll.workload.requests import collect
    from atoll.workload.spec import workload_of

    spec = f"poisson:{rate_per_s:g}/s lengths={lengths} for={seconds:g}s"
    drawn = collect(workload_of(spec), seed=seed)
    columns = zip(drawn.arrival_s, drawn.input, drawn.output, strict=True)
    found = (Arrival(float(at), int(own) + more, int(answer)) for at, own, answer in columns)
    return [each for each in found if each.input + each.output <= limit]


def write_served(path: Path, first: str, rows: Sequence[tuple[Any, ...]]) -> None:
    """Write what clients saw: rows of the name of a run, under the heading `first`, and a `Served`."""
    with path.open("w", newline="") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow((first, *Served._fields))
        writer.writerows(rows)


def summarise(rows: Sequence[Served]) -> str:
    """Say in a line what clients saw."""
    answered = [row for row in rows if not row.error]
    if not answered:
        return "nothing came back"
    ttft = sorted(float(row.ttft_ms) for row in answered)
    tpot = sorted(float(row.tpot_ms) for row in answered)
    unfinished = sum(row.error == UNFINISHED for row in rows)
    return (
        f"{len(rows)} requests, {len(rows) - len(ttft) - unfinished} errors, "
        f"{unfinished} unfinished, "
        f"TTFT mean {statistics.fmean(ttft):.1f} p95 {ttft[int(0.95 * len(ttft))]:.1f} ms, "
        f"TPOT mean {statistics.fmean(tpot):.2f} p95 {tpot[int(0.95 * len(tpot))]:.2f} ms"
    )
