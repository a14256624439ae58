"""Voices that begin with the first sentence of a text."""

from __future__ import annotations

import numpy as np

from atoll.api.fleet import Fleet
from atoll.plan.plan import Plan
from atoll.sim.tasks.from_plan import SENTENCE_TOKENS, simulate_services, task_fleet
from atoll.sim.tasks.task_result import TaskResult

FLEET = """
services:
  assistant:
    model: smollm2-assistant
    rate: 0.02/s
    ttft: 10s
    tpot: 1s
    paths: [[audio+llm, speech]]
    classes:
      audio -> audio: {{share: 100%, input: 50, output: 120, audio: 4s, speech: 30s, ahead: 1s{more}}}
    rates:
      speech: {{L4: {{speech_s: 10/s}}}}
      audio: {{L4: {{audio_s: 20/s}}}}
pool: {{owned: {{here: {{"L4:1": 2}}}}}}
"""


def _planned(more: str = "") -> tuple[Plan, Fleet]:
    fleet = Fleet.read(FLEET.format(more=more))
    return fleet.plan(capacity_only=True), fleet


def _simulated(more: str) -> TaskResult:
    plan, fleet = _planned(more)
    problem = fleet.problem
    return simulate_services(plan, problem, problem.catalog(), ("assistant",), requests=200, seed=3)


def test_sound_begins_with_the_first_sentence_and_is_as_long() -> None:
    by_sentence, whole = _simulated(", sentence: 12"), _simulated(", sentence: 120")
    # Ten sentences instead of one: the voice has a tenth of its 3 s before the first sound.
    first, late = (float(np.median(each.columns.first_audio_s)) for each in (by_sentence, whole))
    assert first < late - 2.0
    # Most of the text is written and spoken at the same time, and all of it is spoken.
    ended, later = (float(np.median(each.columns.e2e_s)) for each in (by_sentence, whole))
    assert first + 1.0 < ended < later


def test_a_class_that_says_nothing_has_usual_sentences() -> None:
    plan, fleet = _planned()
    (klass,) = task_fleet(plan, fleet.problem, fleet.problem.catalog()).classes
    chunks = {edge.src: edge.chunk_tokens for edge in klass.edges if edge.dst == "speech"}
    assert chunks == {"llm": SENTENCE_TOKENS, "llm.prefill": 0, "llm.decode": SENTENCE_TOKENS}
