"""Spoken questions, answered aloud by small real parts: `python -m benchmarks.speech`.

Forty questions, spoken once by Hibari, go over the gateway through the whole graph: sound is heard (Silero,
Moonshine), thought about (SmolLM2, temperature 0, 24 tokens) and answered in text and speech (Hibari), all
streamed. Deployments at equal cores, all of this machine's:

- monolith: one process with all components, each of which may keep all cores busy.
- planned: parts are measured with all cores busy, and `Fleet.plan` decides over cores as machines.
- split: ears and mouth on one core, the mind on the other. Where the plan puts all parts on every core, which
  is a monolith per core, this is what a plan that takes parts apart would give.

All stand at the same time and take turns, so that what else the machine does meets them alike. Closed loops
with one client (a fifth of the questions) and with four (each asks again when it is answered).

wer counts the words of the questions that the assistant's ears got wrong. p99 is of as many requests as
there are: the slowest, nearly. CPU seconds are those of executors and
graph server, without gateway and clients.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

from atoll.components.base import BadInputError, Setup
from atoll.components.hibari import Hibari
from atoll.runtime.local.cores import usable_cores
from atoll.runtime.media.sounds import encode_wav
from benchmarks.any_to_any.speech_client import (
    SpokenQuestion,
    closed_loop,
    questions_of,
    transcribe,
)
from benchmarks.any_to_any.speech_fleet import (
    CORE,
    MODEL,
    MeanRequest,
    RunningFleet,
    fleet_of,
    fleet_on,
    is_monolithic,
    make_plan,
    measure_core,
    monolith,
    planned,
)
from benchmarks.any_to_any.speech_questions import QUESTIONS
from benchmarks.report import Figure, finish
from research.speech.word_errors import word_errors

TOKENS = 24
CLIENTS = 4
TURNS = 2
SPLIT = "[[audio+speech, llm]]"
_BUSY = 0.6
"""Share of all cores that the planned demand takes, by the rates."""
_WARM_UP = 2
_RUNS = 5
_CLASS = "audio -> audio"
_BAR_WER = 0.1
Numbered = tuple[int, SpokenQuestion]


def speak_questions(texts: Sequence[str]) -> list[SpokenQuestion]:
    """Return the questions, spoken."""
    voice = Hibari.load(Setup())
    found = []
    for text in texts:
        (sound,) = voice.run([{"text": text}])
        if isinstance(sound, BadInputError):
            raise RuntimeError(f"{text!r} cannot be spoken: {sound.message}")
        samples, rate_hz = sound["samples"], sound["rate_hz"]
        seconds = len(samples) / rate_hz
        found.append(SpokenQuestion(text, encode_wav(samples, rate_hz), seconds))
    return found


def _say(text: str) -> None:
    print(text, flush=True)


async def _closed(fleets: Sequence[RunningFleet], asked: Sequence[Numbered], clients: int) -> None:
    """Closed loops in turns, each with a share of the questions for every deployment."""
    load = f"{clients} client{'s' if clients > 1 else ''}"
    for turn in range(TURNS):
        share = asked[turn::TURNS]
        ordered = fleets if turn % 2 == 0 else fleets[::-1]
        for running in ordered:
            asking = closed_loop(questions_of(running.fleet.url, MODEL, share, TOKENS), clients)
            await running.turn(load, asking)


async def _hear(running: RunningFleet, questions: Sequence[SpokenQuestion]) -> float:
    """Return the word error rate of what is heard."""
    wrong = words = 0
    for question in questions:
        heard = await transcribe(running.fleet.url, MODEL, question)
        errors, said = word_errors(question.text, heard)
        wrong, words = wrong + errors, words + said
        if errors:
            _say(f"  {errors} of {said} words wrong: {question.text!r} was heard as {heard!r}")
    return wrong / words


def _equal_answers(fleets: Sequence[RunningFleet]) -> float:
    """Return the share of questions that every deployment answered alike, every time."""
    texts: dict[int, set[str]] = {}
    for running in fleets:
        for answers in running.answers.values():
            for answer in answers:
                texts.setdefault(answer.question, set()).add(answer.text)
    return sum(len(each) == 1 for each in texts.values()) / len(texts)


def _print_figures(found: dict[str, dict[str, dict[str, float]]]) -> None:
    print(
        f"\n{'deployment':<12}{'load':<12}{'requests/s':>11}{'first text s':>20}{'first audio s':>20}"
        f"{'whole s':>18}{'CPU s':>8}"
    )
    for name, loads in found.items():
        for load, row in loads.items():
            spans = [
                f"{row[f'{key}_p50']:.2f}, p99 {row[f'{key}_p99']:.2f}"
                for key in ("first_text_s", "first_audio_s", "took_s")
            ]
            print(
                f"{name:<12}{load:<12}{row['per_s']:>11.3f}{spans[0]:>20}{spans[1]:>20}{spans[2]:>18}"
                f"{row['cpu_s_per_request']:>8.2f}"
            )


async def _measure(count: int) -> tuple[list[Figure], dict[str, Any]]:
    cores = usable_cores()
    spoken = speak_questions(QUESTIONS[:count])
    asked = list(enumerate(spoken))
    audio_s = float(np.mean([question.seconds for question in spoken]))
    _say(
        f"{len(asked)} questions of {audio_s:.1f} s; measuring parts on {len(cores)} cores at once"
    )
    core = await asyncio.to_thread(measure_core, cores, _RUNS)
    with ExitStack() as stack:
        fleets: list[RunningFleet] = []

        async def start(running: RunningFleet) -> RunningFleet:
            await running.fleet.start()
            fleets.append(running)
            await closed_loop(questions_of(running.fleet.url, MODEL, asked[:_WARM_UP], TOKENS), 1)
            return running

        try:
            whole = await start(stack.enter_context(fleet_on("monolith", monolith(len(cores)))))
            known = await closed_loop(questions_of(whole.fleet.url, MODEL, asked[:4], TOKENS), 1)
            mean = MeanRequest.of(known, audio_s)
            mixed = {_CLASS: (1.0, mean)}
            request_s = core.request_s(mean)
            rate_per_s = _BUSY * len(cores) / sum(request_s.values())
            shown = ", ".join(f"{part} {seconds:.2f}" for part, seconds in request_s.items())
            _say(f"seconds of a core for a request: {shown}; planning for {rate_per_s:.2f}/s")
            fleet = fleet_of({CORE: (core, len(cores))}, mixed, rate_per_s)
            plan = await asyncio.to_thread(make_plan, fleet)
            made = ", ".join(instance.describe() for instance in plan.instances)
            alike = is_monolithic(plan)
            _say(f"the plan: {made}{': a monolith on every core' if alike else ''}")
            await start(stack.enter_context(fleet_on("planned", planned(plan), plan)))
            if alike and len(cores) > 1:
                # By rates without batches the mind alone may be more than one core has.
                least = min(rate_per_s, _BUSY / max(request_s.values()))
                fleet = fleet_of({CORE: (core, len(cores))}, mixed, least, SPLIT)
                plan = await asyncio.to_thread(make_plan, fleet)
                await start(stack.enter_context(fleet_on("split", planned(plan), plan)))
            await _closed(fleets, asked[: max(4, len(asked) // 5)], 1)
            await _closed(fleets, asked, CLIENTS)
            wer = await _hear(fleets[1], spoken)
        finally:
            for running in fleets:
                await running.fleet.stop(5.0)
    found = {f.name: {load: f.figures(load) for load in f.answers} for f in fleets}
    _print_figures(found)
    figures = [Figure("wer", round(wer, 4), _BAR_WER, f"of {len(spoken)} questions")]
    full = f"{CLIENTS} clients"
    base = found["monolith"][full]
    for name in found:
        if name == "monolith":
            continue
        row, start_of = found[name][full], "" if name == "planned" else f"{name}_"
        figures += [
            Figure(
                f"{start_of}throughput_vs_monolith",
                round(row["per_s"] / base["per_s"], 3),
                note=full,
            ),
            Figure(
                f"{start_of}p99_vs_monolith",
                round(row["first_audio_s_p99"] / base["first_audio_s_p99"], 3),
                note=f"first audio, {full}",
            ),
            Figure(
                f"{start_of}cpu_vs_monolith",
                round(row["cpu_s_per_request"] / base["cpu_s_per_request"], 3),
                note=f"CPU seconds of a request, {full}",
            ),
        ]
    figures.append(Figure("equal_answers", round(_equal_answers(fleets), 4), note="share"))
    return figures, {
        "plan": made,
        "plan_is_monolithic": alike,
        "deployments": found,
        "core": {
            "per_cpu_s": {part: round(rate, 2) for part, (_, rate) in core.rates.items()},
            "by_the_clock": {part: round(rate, 2) for part, rate in core.clock_rates.items()},
            "bandwidth_gbs": round(core.bandwidth_gbs, 2),
            "fp16_tflops": round(core.fp16_tflops, 3),
        },
        "load_average": round(os.getloadavg()[0], 1),
    }


def main() -> None:
    """Print what was measured, then one line of JSON."""
    parser = argparse.ArgumentParser(description="Spoken questions, answered aloud.")
    parser.add_argument("--quick", action="store_true", help="8 questions")
    parser.add_argument("--questions", type=int, default=len(QUESTIONS), help="how many (40)")
    given = parser.parse_args()
    count = 8 if given.quick else min(max(4, given.questions), len(QUESTIONS))
    figures, more = asyncio.run(_measure(count))
    finish(figures, **more)


if __name__ == "__main__":
    main()
