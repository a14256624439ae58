"""Fleets of small parts as `benchmarks.speech` and `plan_monolith` compare them, and what is simulated."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from atoll.api.fleet import Fleet
from atoll.plan.plan import Plan
from atoll.runtime.graph_server.graph_config import GraphService
from atoll.runtime.local.local_endpoints import LocalOptions
from atoll.runtime.local.local_fleet import LocalFleet
from atoll.runtime.local.serving import local_fleet
from atoll.runtime.task_fleet.deployment import PlacedExecutor, TaskDeployment, deployment_of
from atoll.runtime.task_fleet.parts import ServedParts, own_parts
from atoll.sim.tasks.from_plan import task_fleet
from atoll.sim.tasks.simulate_tasks import simulate_tasks
from atoll.sim.tasks.task_demand import Demand
from atoll.solve.effort import LEVELS, Effort
from benchmarks.any_to_any.speech_client import TimedAnswer
from benchmarks.process_cpu import read_cpu_s

MODEL = "assistant"
CORE = "CORE"
"""The kind of device that a core of this machine is."""
PARTS = ("audio", "llm", "speech")
_PLAN_S = 300.0
_PERCENTS = (50, 95, 99)
_MEDIA_TOKENS_PER_S = 4.0
"""Tokens that the catalog's audio encoder gives for a second: the simulator adds them to the prompt."""


@dataclass(frozen=True, slots=True)
class MeanRequest:
    """What requests bring and want in the mean: seconds, tokens of the whole prompt and of the answer.

    image: what is said of their picture in a fleet file, "" where they bring none; it is `image_tokens` long.
    A sentence of the answer has `sentence_tokens`, usual ones where that is 0.
    """

    audio_s: float
    prompt_tokens: float
    answer_tokens: float
    speech_s: float
    image: str = ""
    image_tokens: float = 0.0
    sentence_tokens: float = 0.0

    @classmethod
    def of(
        cls,
        answers: Sequence[TimedAnswer],
        audio_s: float,
        image: str = "",
        image_tokens: float = 0.0,
    ) -> MeanRequest:
        """Return the mean of answers to questions of so many seconds."""
        return cls(
            audio_s,
            statistics.fmean(answer.prompt_tokens for answer in answers),
            statistics.fmean(answer.completion_tokens for answer in answers),
            statistics.fmean(answer.speech_s for answer in answers),
            image,
            image_tokens,
        )

    @property
    def media_tokens(self) -> float:
        """Tokens that the simulator adds to the prompt for sound and picture."""
        return _MEDIA_TOKENS_PER_S * self.audio_s + self.image_tokens

    @property
    def text_tokens(self) -> float:
        """Tokens of the prompt that the simulator does not make of sound and picture."""
        return max(1.0, self.prompt_tokens - self.media_tokens)

    def write(self, share: float) -> str:
        """Return it as a class of a fleet file, with its share of the requests."""
        media = [f"audio: {self.audio_s:.2f}s"] if self.audio_s else []
        media += [f"images: {self.image}"] if self.image else []
        media += [f"speech: {self.speech_s:.2f}s"] if self.speech_s else []
        if self.speech_s and self.sentence_tokens:
            media.append(f"sentence: {self.sentence_tokens:.0f}")
        sizes = f"input: {self.text_tokens:.0f}, output: {self.answer_tokens:.0f}"
        return ", ".join((f"share: {100 * share:.6g}%", sizes, *media))


@dataclass(frozen=True, slots=True)
class MeasuredCore:
    """What one core does while all are busy: units per CPU second by part, and its speeds for an llm."""

    rates: Mapping[str, tuple[str, float]]
    clock_rates: Mapping[str, float]
    bandwidth_gbs: float
    fp16_tflops: float

    def request_s(self, mean: MeanRequest) -> dict[str, float]:
        """Return the seconds of a core that a request takes of each part, by the rates."""
        amounts = {
            "audio_s": mean.audio_s,
            "token": mean.text_tokens + mean.answer_tokens,
            "speech_s": mean.speech_s,
        }
        return {part: amounts[unit] / per_s for part, (unit, per_s) in self.rates.items()}


Devices = Mapping[str, tuple[MeasuredCore, int]]
"""By kind of device, how fast one is and how many there are."""


def measure_core(cores: Sequence[int], runs: int) -> MeasuredCore:
    """Measure parts on all cores at once, one `atoll tasks measure` each, and return the mean."""
    command = [sys.executable, "-m", "atoll", "tasks", "measure", "--json", "--runs", str(runs)]
    for part in PARTS:
        command += ["--part", part]
    running = []
    before = os.sched_getaffinity(0)
    try:
        for core in cores:
            # Children have the affinity of who starts them.
            os.sched_setaffinity(0, {core})
            running.append(subprocess.Popen(command, stdout=subprocess.PIPE))
    finally:
        os.sched_setaffinity(0, before)
    found = []
    for process in running:
        printed, _ = process.communicate()
        if process.returncode != 0:
            raise RuntimeError("the components could not be measured")
        found.append(json.loads(printed))
    rows = [{row["part"]: row for row in each["parts"]} for each in found]
    return MeasuredCore(
        {
            part: (rows[0][part]["unit"], statistics.fmean(r[part]["cpu_per_s"] for r in rows))
            for part in PARTS
        },
        {part: statistics.fmean(r[part]["per_s"] for r in rows) for part in PARTS},
        statistics.fmean(each["core"]["bandwidth_gbs"] for each in found),
        statistics.fmean(each["core"]["fp16_tflops"] for each in found),
    )


def fleet_of(
    devices: Devices,
    classes: Mapping[str, tuple[float, MeanRequest]],
    rate_per_s: float,
    paths: str = "",
) -> Fleet:
    """Return the fleet: its devices, each a machine of its own, and the demand, by class with its share."""
    first, _ = next(iter(devices.values()))
    each = {
        part: ", ".join(
            f"{kind}: {{{unit}: {core.rates[part][1]:.4g}/s}}"
            for kind, (core, _) in devices.items()
        )
        for part, (unit, _) in first.rates.items()
    }
    rates = "\n".join(f"      {part}: {{{text}}}" for part, text in each.items())
    mixed = "\n".join(
        f"      {name}: {{{mean.write(share)}}}" for name, (share, mean) in classes.items()
    )
    pool = ", ".join(
        f'"{kind}:1": {{count: {count}, usd_per_hour: $0.05/h}}'
        for kind, (_, count) in devices.items()
    )
    gpus = "\n".join(
        f"    {kind}: {{like: T4, bandwidth: {core.bandwidth_gbs:.4g}GB/s, "
        f'fp16_tflops: {core.fp16_tflops:.4g}, source: "measured"}}'
        for kind, (core, _) in devices.items()
    )
    return Fleet.read(
        f"""\
name: speech
services:
  {MODEL}:
    model: smollm2-assistant
    rate: {rate_per_s:.4g}/s
    ttft: 20s
    tpot: 1s
    phases: together
{f"    paths: {paths}" if paths else ""}
    classes:
{mixed}
    rates:
{rates}
pool:
  owned:
    here: {{{pool}}}
catalog:
  gpus:
{gpus}
"""
    )


def make_plan(fleet: Fleet, solver: str | None = None, *, capacity_only: bool = False) -> Plan:
    """Plan with little effort; RuntimeError where nothing can be served."""
    effort = Effort(work=LEVELS["low"])
    plan = fleet.plan(
        solver=solver, effort=effort, deadline_s=_PLAN_S, rank=False, capacity_only=capacity_only
    )
    if plan.status == "infeasible" or not plan.instances:
        raise RuntimeError("there is no plan for the demand")
    return plan


def is_monolithic(plan: Plan) -> bool:
    """Return whether every executor of a plan has all parts."""
    return all(set(instance.parts) >= set(PARTS) for instance in plan.instances)


def planned(plan: Plan, parts: ServedParts | None = None) -> TaskDeployment:
    """Return the deployment of a plan, with small real parts unless others are given."""
    return deployment_of(plan, [MODEL], {MODEL: parts or own_parts()})


def monolith(cores: int) -> TaskDeployment:
    """Return one process with all components, each of which may keep all cores busy."""
    served = own_parts()
    names = [name for part in PARTS for name in served.parts[part]]
    return TaskDeployment(
        (GraphService(name=MODEL, tasks=served.tasks, options=served.options),),
        (PlacedExecutor("whole-0", {name: {} for name in names}, threads=cores),),
    )


def no_plan() -> Plan:
    """Return a plan of nothing, for deployments by hand."""
    return Plan(
        problem_hash="0" * 8,
        problem_name="by hand",
        instances=(),
        paths=(),
        usd_per_hour=0.0,
        status="feasible",
        solver="none",
    )


@dataclass(slots=True)
class RunningFleet:
    """A deployment that runs."""

    name: str
    fleet: LocalFleet
    answers: dict[str, list[TimedAnswer]] = field(default_factory=dict)
    """By load, of all its turns."""
    seconds: dict[str, float] = field(default_factory=dict)
    cpu_s: dict[str, float] = field(default_factory=dict)

    def pids(self) -> list[int]:
        """Return its processes: executors and graph server."""
        return [p.pid for p in self.fleet.agent.processes.values() if p.pid is not None]

    async def turn(self, load: str, asking: Awaitable[list[TimedAnswer]]) -> None:
        """Answer while other deployments have nothing to do, and take note of that."""
        began_s, cpu_s = time.perf_counter(), read_cpu_s(self.pids())
        answers = await asking
        took_s = time.perf_counter() - began_s
        self.add(load, answers, took_s, read_cpu_s(self.pids()) - cpu_s)
        print(f"  {self.name}, {load}: {len(answers)} answers in {took_s:.1f} s", flush=True)

    def add(self, load: str, answers: list[TimedAnswer], seconds: float, cpu_s: float) -> None:
        """Take note of a turn."""
        self.answers.setdefault(load, []).extend(answers)
        self.seconds[load] = self.seconds.get(load, 0.0) + seconds
        self.cpu_s[load] = self.cpu_s.get(load, 0.0) + cpu_s

    def figures(self, load: str) -> dict[str, float]:
        """Return requests/s, percentiles in seconds, and CPU seconds per request of a load."""
        answers = self.answers[load]
        found = {
            "requests": float(len(answers)),
            "per_s": len(answers) / self.seconds[load],
            "cpu_s_per_request": self.cpu_s[load] / len(answers),
        }
        for name in ("first_text_s", "first_audio_s", "took_s"):
            # Not all are spoken.
            values = [value for answer in answers if (value := getattr(answer, name))]
            for share in _PERCENTS:
                found[f"{name}_p{share}"] = float(np.percentile(values, share))
        return {name: round(value, 4) for name, value in found.items()}


@contextlib.contextmanager
def fleet_on(
    name: str, deployment: TaskDeployment, plan: Plan | None = None
) -> Iterator[RunningFleet]:
    """Return a deployment that is not started yet."""
    with local_fleet(
        plan or no_plan(),
        {},
        LocalOptions(),
        host="127.0.0.1",
        port=0,
        log=None,
        on_progress=lambda _name, _state, _reason: None,
        tasks=deployment,
    ) as fleet:
        yield RunningFleet(name, fleet)


def simulate_answers(
    fleet: Fleet,
    plan: Plan,
    answers: Sequence[TimedAnswer],
    means: Mapping[str, MeanRequest],
    classes: Sequence[str],
) -> dict[str, float]:
    """Return what the simulator says of the very requests that were answered: same times, same lengths.

    means: by class of the fleet. classes: the class of each question.
    """
    ordered = sorted(answers, key=lambda answer: answer.began_s)
    tasks = task_fleet(plan, fleet.problem, fleet.catalog)
    # A fleet has classes in an order of its own.
    number = {klass.name: at for at, klass in enumerate(tasks.classes)}
    own = [classes[answer.question % len(classes)] for answer in ordered]
    demand = Demand(
        np.array([answer.began_s for answer in ordered]),
        np.array([number[name] for name in own], np.int64),
        np.array(
            [
                max(1.0, answer.prompt_tokens - means[name].media_tokens)
                for name, answer in zip(own, ordered, strict=True)
            ]
        ),
        np.array([float(answer.completion_tokens) for answer in ordered]),
    )
    result = simulate_tasks(tasks, demand=demand, warmup=0.0)
    columns: Any = result.columns
    found = {"per_s": result.by_makespan_per_s}
    for name, column in (
        ("first_text_s", columns.ttft_s),
        ("first_audio_s", columns.first_audio_s),
        ("took_s", columns.e2e_s),
    ):
        for share in _PERCENTS:
            found[f"{name}_p{share}"] = float(np.nanpercentile(column, share))
    return {name: round(value, 4) for name, value in found.items()}
