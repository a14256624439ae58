"""A plan of a mixed fleet against the best monolith, served and simulated (part of `any_fleet_live`).

Chats, pictures with a question, spoken questions answered aloud. The parts wait as long as devices would
compute (`timed_parts`), each executor a device: so figures do not depend on who else uses the machine. Some
of these devices are weak, and weaker at reading weights than at computing, as small GPUs are: a monolith
writes slowly there, while a plan may have encoders and voices on them.

The parts are measured first, the language model by how fast a device reads and computes, since its rate
depends on how many answers it writes at once. `Fleet.plan` decides with that, and so does its solver
`monolith`, which puts all parts on every executor it rents, both for more than all devices carry. Both
deployments stand at the same time and take turns. What each carries is found by clients that ask again at
once; then both get the same requests at the same times, at 70 % of what the weaker carries, and the simulator
gets those very requests.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from atoll.api.demo.asking import draw_circle
from atoll.catalog.catalog import Catalog
from atoll.core.rng import stream
from atoll.perf.components.class_loads import media_tokens
from atoll.plan.plan import Plan
from atoll.runtime.task_fleet.core_fit import fit_core
from atoll.runtime.task_fleet.deployment import TaskDeployment
from atoll.runtime.task_fleet.measure import TokenPace
from atoll.runtime.task_fleet.parts import TASKS, ServedParts
from atoll.workload.classes import Images, RequestClass
from benchmarks.any_to_any.speech import speak_questions
from benchmarks.any_to_any.speech_client import (
    Ask,
    ask_chat,
    chat_body,
    closed_loop,
    open_loop,
    spoken_body,
)
from benchmarks.any_to_any.speech_fleet import (
    CORE,
    MODEL,
    Devices,
    MeanRequest,
    MeasuredCore,
    RunningFleet,
    fleet_of,
    fleet_on,
    make_plan,
    planned,
    simulate_answers,
)
from benchmarks.any_to_any.timed_parts import (
    HERE,
    PROMPT_TOKENS,
    RATE_HZ,
    WORD_SPOKEN_S,
    WORDS_PER_SENTENCE,
    TimedEar,
    TimedEye,
    TimedMind,
    TimedPart,
    TimedVoice,
)
from tests.slow.tasks.task_clients import picture_part

CLASSES = {"text": 0.4, "image+text": 0.3, "audio -> audio": 0.3}
"""Share of the requests by class."""
TOKENS = 24
CLIENTS = 12
SLOWER = {"WEAK": {"compute": 1.25, "memory": 3.4}}
"""By kind of device, how many times as long as others it takes to compute and to read weights."""
DEVICES = {CORE: 2, "WEAK": 2}
_RUNS = 5
LOAD = 0.7
COUNT, QUICK_COUNT = 120, 40
_IMAGE = "{count: 1, size: 256x256}"
_PIXELS = 256
_SEED = 23
_TURNS = 2
_MUCH_PER_S = 50.0
"""More than these devices carry."""
_PROMPT_TOKENS = 60.0
"""Guessed, until requests were answered."""
_QUESTIONS = ("What is the capital of France?", "Who wrote this song?", "Where is the sea?")
_CHATS = (
    "Tell me three things about the sea.",
    "What is a lighthouse for?",
    "Why is the sky blue?",
)


@dataclass(frozen=True, slots=True)
class MixedRequests:
    """Requests in their order: the body of each, and the number of its class."""

    bodies: tuple[dict[str, Any], ...]
    classes: tuple[int, ...]
    audio_s: float

    def asks(self, url: str) -> list[Ask]:
        """Return them as what loops ask."""
        return [partial(ask_chat, url, body, n) for n, body in enumerate(self.bodies)]


def make_requests(count: int) -> MixedRequests:
    """Return so many requests of all classes, by their shares."""
    spoken = speak_questions(_QUESTIONS)
    pictures = [draw_circle(colour) for colour in ((220, 30, 30), (30, 30, 220), (30, 160, 30))]
    look = {"type": "text", "text": "What do you see?"}
    kinds = (
        [chat_body(MODEL, text, TOKENS) for text in _CHATS],
        [chat_body(MODEL, [picture_part(image), look], TOKENS) for image in pictures],
        [spoken_body(MODEL, asked, TOKENS) for asked in spoken],
    )
    drawn = stream(_SEED, "plan_monolith").choice(len(CLASSES), size=count, p=[*CLASSES.values()])
    classes = tuple(map(int, drawn))
    bodies = tuple(kinds[kind][n % len(kinds[kind])] for n, kind in enumerate(classes))
    audio_s = float(np.mean([asked.seconds for asked in spoken]))
    return MixedRequests(bodies, classes, audio_s)


def _means(asked: MixedRequests, running: Sequence[RunningFleet] = ()) -> list[MeanRequest]:
    """Return the mean request of each class: as it was answered, or as it is guessed."""
    model = Catalog.default().model("smollm2-assistant")
    images = Images(count=1, width_px=_PIXELS, height_px=_PIXELS)
    pictured = RequestClass(name="image+text", share=1.0, images=images)
    image_tokens = sum(media_tokens(model, pictured).values())
    answers = [a for each in running for found in each.answers.values() for a in found]
    means = []
    for number, name in enumerate(CLASSES):
        audio_s = asked.audio_s if "audio" in name else 0.0
        image = (_IMAGE, image_tokens) if "image" in name else ("", 0.0)
        own = [a for a in answers if asked.classes[a.question] == number]
        if own:
            means.append(MeanRequest.of(own, audio_s, *image))
        else:
            speech_s = 6.0 if "-> audio" in name else 0.0
            sizes = (audio_s, _PROMPT_TOKENS, float(TOKENS), speech_s)
            means.append(MeanRequest(*sizes, *image))
    return [dataclasses.replace(mean, sentence_tokens=WORDS_PER_SENTENCE) for mean in means]


def _mixed(means: Sequence[MeanRequest]) -> dict[str, tuple[float, MeanRequest]]:
    return {name: (share, mean) for (name, share), mean in zip(CLASSES.items(), means, strict=True)}


async def _take_turns(
    fleets: Sequence[RunningFleet], asked: MixedRequests, rate_per_s: float
) -> None:
    """Give all deployments the same requests at the same times, in turns."""
    gaps = stream(_SEED, "plan_monolith", "arrivals").exponential(
        1.0 / rate_per_s, len(asked.bodies)
    )
    for turn in range(_TURNS):
        mine = range(turn, len(asked.bodies), _TURNS)
        # Turns are as dense as the whole would be.
        arrivals_s = [float(at_s) for at_s in np.cumsum(gaps[: len(mine)]) - gaps[0]]
        for running in fleets if turn % 2 == 0 else fleets[::-1]:
            asks = running_asks(running, asked, mine)
            await running.turn(f"{LOAD:.0%}, turn {turn + 1}", open_loop(asks, arrivals_s))


def running_asks(running: RunningFleet, asked: MixedRequests, numbers: Sequence[int]) -> list[Ask]:
    """Return some of the requests for a deployment."""
    asks = asked.asks(running.fleet.url)
    return [asks[number] for number in numbers]


def _describe(plan: Plan) -> str:
    return ", ".join(instance.describe() for instance in plan.instances)


def timed_served() -> ServedParts:
    """Return the parts that wait, and the tasks over them."""
    eye, ear, scribe, mind, voice = (
        f"{HERE}:Timed{name}" for name in ("Eye", "Ear", "Scribe", "Mind", "Voice")
    )
    return ServedParts(
        parts={"vision": (eye,), "audio": (ear, scribe), "llm": (mind,), "speech": (voice,)},
        tasks={name: TASKS[name] for name in ("chat", "transcriptions", "speech")},
        options={
            "see": eye,
            "hear_encoder": ear,
            "hear_decoder": scribe,
            "think": mind,
            "speak": voice,
        },
    )


async def measure_timed(compute: float = 1.0, memory: float = 1.0) -> MeasuredCore:
    """Measure the parts that wait: units a second, and the mind as a device that reads and computes.

    Medians, since a busy machine wakes somebody late now and then.
    """
    sound = {"audio": {"samples": np.zeros(2 * RATE_HZ, np.float32), "rate_hz": RATE_HZ}}
    text = {"text": "word " * 8}
    eye, ear, voice = (part(compute=compute) for part in (TimedEye, TimedEar, TimedVoice))
    jobs: dict[str, tuple[str, float, TimedPart, dict[str, Any]]] = {
        "vision": ("image", 1.0, eye, dict(eye.example())),
        "audio": ("audio_s", 2.0, ear, sound),
        "speech": ("speech_s", 8 * WORD_SPOKEN_S, voice, text),
    }
    rates = {}
    for part, (unit, amount, component, inputs) in jobs.items():
        took_s = []
        for _ in range(_RUNS):
            began_s = time.perf_counter()
            await asyncio.to_thread(component.run, [inputs])
            took_s.append(time.perf_counter() - began_s)
        rates[part] = (unit, amount / float(np.median(took_s)))
    question = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": TOKENS}
    times_s = [time.perf_counter()]
    answer = TimedMind(compute=compute, memory=memory).stream(question)
    times_s += [time.perf_counter() async for _ in answer]
    # The last is the end.
    first_s, *tokens_s = np.diff(times_s[:-1]).tolist()
    token_s = float(np.median(tokens_s))
    catalog = Catalog.default()
    llm = catalog.model("smollm2-assistant").llm
    speed = fit_core(llm, catalog.node("T4:1"), TokenPace(PROMPT_TOKENS, first_s, token_s))
    return MeasuredCore(rates, {}, speed.bandwidth_gbs, speed.fp16_tflops)


def _most(
    devices: Devices, mixed: Mapping[str, tuple[float, MeanRequest]], solver: str | None
) -> Plan:
    """Return the plan of a solver for as much as it carries on all devices, as far as capacities tell."""
    return make_plan(fleet_of(devices, mixed, _MUCH_PER_S), solver, capacity_only=True)


def _place(plan: Plan, parts: ServedParts) -> TaskDeployment:
    """Return the deployment of a plan, its parts as slow as their devices."""
    placed = planned(plan, parts)
    executors = []
    for one in placed.executors:
        slower = SLOWER.get(one.node_type.partition(":")[0], {})
        components = {name: {**options, **slower} for name, options in one.components.items()}
        executors.append(dataclasses.replace(one, components=components))
    return dataclasses.replace(placed, executors=tuple(executors))


async def compare(count: int) -> dict[str, Any]:
    """Measure, plan, serve and simulate; return the figures."""
    asked, parts = make_requests(count), timed_served()
    devices = {
        kind: (await measure_timed(**SLOWER.get(kind, {})), number)
        for kind, number in DEVICES.items()
    }
    mixed = _mixed(_means(asked))
    plans = {
        "plan": await asyncio.to_thread(_most, devices, mixed, None),
        "monolith": await asyncio.to_thread(_most, devices, mixed, "monolith"),
    }
    for name, plan in plans.items():
        print(f"{name}: {_describe(plan)}", flush=True)
    with ExitStack() as stack:
        fleets: list[RunningFleet] = []
        try:
            for name, plan in plans.items():
                running = stack.enter_context(fleet_on(name, _place(plan, parts), plan))
                await running.fleet.start()
                fleets.append(running)
                await closed_loop(running_asks(running, asked, range(min(4, count))), 1)
            full = f"{CLIENTS} clients"
            for running in fleets:
                await running.turn(full, closed_loop(asked.asks(running.fleet.url), CLIENTS))
            # Beyond what one carries its times would say how long was measured, and nothing else.
            rate_per_s = LOAD * min(running.figures(full)["per_s"] for running in fleets)
            await _take_turns(fleets, asked, rate_per_s)
        finally:
            for running in fleets:
                await running.fleet.stop(5.0)
    return _figures(devices, asked, plans, fleets, rate_per_s)


def _figures(
    devices: Devices,
    asked: MixedRequests,
    plans: dict[str, Plan],
    fleets: Sequence[RunningFleet],
    rate_per_s: float,
) -> dict[str, Any]:
    means, names = _means(asked, fleets), list(CLASSES)
    of_each = [names[number] for number in asked.classes]
    served: dict[str, dict[str, float]] = {}
    simulated: dict[str, dict[str, float]] = {}
    errors: list[float] = []
    heads = ("served/s", "simulated/s", "served p95 s", "simulated p95 s")
    fleet = fleet_of(devices, _mixed(means), rate_per_s)
    print("\n" + " " * 22 + "".join(f"{head:>17}" for head in heads))
    for running in fleets:
        for load in running.answers:
            row = running.figures(load)
            said = simulate_answers(
                fleet,
                plans[running.name],
                running.answers[load],
                dict(zip(names, means, strict=True)),
                of_each,
            )
            title = f"{running.name}, {load}"
            # As the simulator counts: from the first arrival to the last answer.
            row["per_s"] = round(_by_makespan(running, load), 4)
            served[title], simulated[title] = row, said
            # Clients that ask again at once ask when they were served: the simulator is told when.
            keys = ("per_s", "took_s_p95") if load.startswith(f"{LOAD:.0%}") else ("per_s",)
            errors += [abs(said[key] / row[key] - 1.0) for key in keys]
            cells = (row["per_s"], said["per_s"], row["took_s_p95"], said["took_s_p95"])
            print(f"{title:<22}" + "".join(f"{cell:>17.3f}" for cell in cells))
    full = f"{CLIENTS} clients"
    most = {running.name: running.figures(full)["per_s"] for running in fleets}
    p95 = {
        name: float(
            np.mean(
                [
                    row["took_s_p95"]
                    for title, row in served.items()
                    if title.startswith(f"{name}, {LOAD:.0%}")
                ]
            )
        )
        for name in plans
    }
    return {
        "plan_over_monolith_throughput": round(most["plan"] / most["monolith"], 3),
        "plan_over_monolith_p95": round(p95["plan"] / p95["monolith"], 3),
        "sim_vs_served_err": round(max(errors), 4),
        "sim_vs_served_err_mean": round(float(np.mean(errors)), 4),
        "carried_per_s": most,
        "plans": {name: _describe(plan) for name, plan in plans.items()},
        "served": served,
        "simulated": simulated,
        "means": [dataclasses.asdict(mean) for mean in means],
        "devices": {
            kind: {"count": count, **dataclasses.asdict(core)}
            for kind, (core, count) in devices.items()
        },
    }


def _by_makespan(running: RunningFleet, load: str) -> float:
    answers = running.answers[load]
    ends_s = max(answer.began_s + answer.took_s for answer in answers)
    return len(answers) / (ends_s - min(answer.began_s for answer in answers))
