"""A vision-language model as an H200 served it, in Atoll's executors and in vLLM, and as it is simulated.

Simulations are told what each part takes alone; docs/measurements.md says how both were measured.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from atoll.sim.tasks.simulate_tasks import simulate_tasks
from atoll.sim.tasks.task_demand import Arrivals, Demand
from atoll.sim.tasks.task_fleet import (
    Amount,
    BatchPart,
    ClassSpec,
    ExecutorSpec,
    PartEdge,
    PartModel,
    PartNeed,
    PathSpec,
    StepSpec,
    StepTable,
    TaskFleet,
    TokenPart,
)
from benchmarks.report import RESULTS

SERVICE, TEXT, PICTURE = "look", "text", "image+text"
PICTURE_SHARE = 0.6
ANSWER = 48.0
TEXT_TOKENS, PICTURE_TOKENS = 200.0, 20.0 + round(1280 / 28) * round(720 / 28)
CLIENTS, SEQUENCES = 24, 64
"""Clients that ask again at once, and what the server works on at a time under the open load."""
TOKENS_A_STEP, KV_TOKENS = 8192, 374_000
BATCHES = {"vision": 8, "llm": 16}
Row = Mapping[str, str]


def read(name: str) -> tuple[dict[str, Any], list[Row]]:
    """The notes of a run, and a row for each request that was answered; none failed."""
    with (RESULTS / f"{name}.csv").open() as stream:
        rows: list[Row] = list(csv.DictReader(stream))
    assert not any(row["error"] for row in rows)
    return json.loads((RESULTS / f"{name}.json").read_text()), rows


def load_of(rows: Sequence[Row], way: str) -> list[Row]:
    """What came in the open load, in order."""
    chosen = [row for row in rows if (row["way"], row["run"]) == (way, "load")]
    return sorted(chosen, key=lambda row: float(row["arrival_s"]))


def fleet_of(
    executors: Sequence[ExecutorSpec], needs: Mapping[str, Mapping[str, PartNeed]]
) -> TaskFleet:
    """Requests with and without a picture, whose parts follow one another over executors."""
    shares = {TEXT: 1.0 - PICTURE_SHARE, PICTURE: PICTURE_SHARE}
    classes, paths = [], []
    for klass, wanted in needs.items():
        parts = list(wanted)
        edges = tuple(PartEdge(a, b) for a, b in pairwise(parts))
        classes.append(ClassSpec(SERVICE, klass, shares[klass], dict(wanted), edges))
        steps = (
            StepSpec(used, ((executor.name, 1.0),))
            for executor in executors
            if (used := tuple(part for part in executor.parts if part in wanted))
        )
        paths.append(PathSpec(SERVICE, klass, 1.0, tuple(steps)))
    return TaskFleet(tuple(executors), tuple(classes), tuple(paths))


def written(prompt_tokens: float) -> PartNeed:
    """An answer to a prompt."""
    return PartNeed(prompt=Amount(prompt_tokens), answer=Amount(ANSWER))


def carried_per_s(fleet: TaskFleet) -> float:
    """Requests/s where another is always there."""
    arrivals = Arrivals(at_once=True)
    return simulate_tasks(fleet, requests=600, arrivals=arrivals, seed=37).by_makespan_per_s


def under(fleet: TaskFleet, load: Sequence[Row]) -> Any:
    """Simulated times of the requests of a load."""
    names = [klass.name for klass in fleet.classes]
    ones = np.ones(len(load))
    demand = Demand(
        np.array([float(row["arrival_s"]) for row in load]),
        np.array([names.index(row["klass"]) for row in load]),
        ones,
        ones,
    )
    return simulate_tasks(fleet, demand=demand, warmup=0.0).columns


def p95_ratio(simulated_s: Any, load: Sequence[Row], column: str) -> float:
    """The 95th percentile simulated, over the one served."""
    served_ms = [float(row[column]) for row in load]
    return float(np.percentile(1e3 * simulated_s, 95) / np.percentile(served_ms, 95))


def batch_part(times: Sequence[Mapping[str, Any]], part: str) -> BatchPart:
    """One fixed time for a batch and one more for each item, by least squares of relative errors."""
    mine = [each for each in times if each["part"] == part]
    classes = list(dict.fromkeys(each["klass"] for each in mine))
    rows = [[1.0, *(each["batch"] * (each["klass"] == k) for k in classes)] for each in mine]
    weights = np.array([1.0 / each["whole_s"] for each in mine])
    found = np.linalg.lstsq(np.array(rows) * weights[:, None], np.ones(len(mine)), rcond=None)[0]
    fixed_s, *item_s = (max(float(each), 1e-6) for each in found)
    items = dict(zip(classes, item_s, strict=True))
    return BatchPart(items, fixed_s=fixed_s, max_batch=BATCHES[part])


def test_parts_that_share_a_gpu_carry_what_they_carried() -> None:
    note, rows = read("gpu_any")
    models: dict[str, PartModel] = {part: batch_part(note["parts"], part) for part in BATCHES}
    # transformers answers a batch as a whole; on one GPU parts take turns, whatever processes there are.
    fleet = fleet_of(
        [ExecutorSpec("gpu", "box", SERVICE, models)],
        {TEXT: {"llm": PartNeed()}, PICTURE: {"vision": PartNeed(), "llm": PartNeed()}},
    )
    answers = [each for each in note["parts"] if each["part"] == "llm" and each["batch"] > 1]
    decode_s = float(np.mean([each["whole_s"] - each["first_s"] for each in answers]))
    for way, about in note["ways"].items():
        load = load_of(rows, way)
        assert carried_per_s(fleet) / about["carried_per_s"] == pytest.approx(1.0, abs=0.15)
        first_s = under(fleet, load).e2e_s - decode_s
        assert p95_ratio(first_s, load, "ttft_ms") == pytest.approx(1.0, abs=0.15)


def test_a_server_that_encodes_within_its_steps_is_as_fast_as_it_was() -> None:
    note, rows = read("gpu_any_vllm")
    about = note["ways"]["monolith"]

    def mean_s(stage: str, key: str) -> float:
        return 1e-3 * float(about["times"][stage][key]["mean"])

    prepare_s, encoder_s = (mean_s("alone", key) for key in ("prepare", "encoder of 1"))
    text_s = mean_s("alone", "step of prompts")
    picture_s = mean_s("alone", "step of 1 pictures") - encoder_s
    two_s = mean_s("warm-up", "step of 2 pictures") - mean_s("warm-up", "encoder of 2")
    one_s, eight_s = (
        mean_s(stage, f"step of tokens, up to {size}")
        for stage, size in (("alone", 1), ("calm", 8))
    )
    both_s = mean_s("held", "step of 1 pictures") - mean_s("held", "encoder of 1")
    steps = StepTable(
        ((TEXT_TOKENS, text_s), (PICTURE_TOKENS, picture_s), (2 * PICTURE_TOKENS, two_s)),
        ((1.0, one_s), (8.0, eight_s)),
        shared_s=min(max(picture_s + eight_s - both_s, 0.0), one_s),
    )
    # What a first token takes beside: HTTP, reading a picture, scheduling.
    alone = {TEXT: text_s, PICTURE: prepare_s + encoder_s + picture_s}
    mine = [row for row in rows if (row["way"], row["run"]) == ("monolith", "alone")]
    around_s = {
        klass: 1e-3 * np.mean([float(r["ttft_ms"]) for r in mine if r["klass"] == klass]) - each
        for klass, each in alone.items()
    }

    def server(sequences: int) -> TaskFleet:
        in_a_step = int(TOKENS_A_STEP / PICTURE_TOKENS)
        gpu: dict[str, PartModel] = {
            "vision": BatchPart({PICTURE: encoder_s}, max_batch=in_a_step),
            "llm": TokenPart(steps, KV_TOKENS, sequences, TOKENS_A_STEP),
        }
        # Pictures are prepared beside the GPU, one after the other.
        prepare = ExecutorSpec("api", "box", SERVICE, {"prepare": BatchPart({PICTURE: prepare_s})})
        pictured = {"prepare": PartNeed(), "vision": PartNeed(), "llm": written(PICTURE_TOKENS)}
        executors = [prepare, ExecutorSpec("gpu", "box", SERVICE, gpu)]
        return fleet_of(executors, {TEXT: {"llm": written(TEXT_TOKENS)}, PICTURE: pictured})

    served_per_s = about["carried_per_s"]
    assert carried_per_s(server(CLIENTS)) / served_per_s == pytest.approx(1.0, abs=0.15)
    load = load_of(rows, "monolith")
    columns = under(server(SEQUENCES), load)
    later_s = np.array([around_s[row["klass"]] for row in load])
    for name, simulated_s in (("ttft_ms", columns.ttft_s), ("e2e_ms", columns.e2e_s)):
        assert p95_ratio(simulated_s + later_s, load, name) == pytest.approx(1.0, abs=0.15)
