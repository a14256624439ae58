"""From a fleet and its requests to the arrays of the event loop."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from atoll.core.rng import stream
from atoll.perf.batch import Batch
from atoll.perf.step import AnalyticStepModel, step_seconds
from atoll.plan.cluster import NodeProfile
from atoll.sim.sim_arrays import EVENT, Floats, Longs, Records
from atoll.sim.tasks import task_arrays as a
from atoll.sim.tasks.task_demand import Demand, amount, draw_wants
from atoll.sim.tasks.task_fleet import (
    BatchPart,
    ClassSpec,
    DiffusionPart,
    ExecutorSpec,
    PartEdge,
    PartModel,
    StepTable,
    TaskFleet,
    TokenPart,
)
from atoll.sim.times import TimesBuilder
from atoll.sim.unit_rows import PROMPTS_IN_STEP

_TYPES: Mapping[type[PartModel], int] = {
    BatchPart: a.BATCHES,
    DiffusionPart: a.DENOISES,
    TokenPart: a.TOKENS,
}
_PHASES = {"both": a.BOTH, "prefill": a.PREFILL, "decode": a.DECODE}
_EMITS = {"": a.NOTHING, "text": a.TEXT, "audio": a.AUDIO, "image": a.IMAGE}
ROUTINGS = {"static": a.DRAWN, "dealt": a.DEALT, "dynamic": a.DYNAMIC}


@dataclass(frozen=True)
class BuiltTasks:
    """A run that is ready to start, and what its numbers mean: part names by unit, and speech by request."""

    sim: a.TaskSim
    fleet: TaskFleet
    unit_names: tuple[str, ...]
    speech_s: Floats
    clipped: int


def build(
    fleet: TaskFleet, demand: Demand, *, routing: int, query_s: float, seed: int
) -> BuiltTasks:
    """Return a run of a fleet under demand."""
    names = {part: at for at, part in enumerate(_part_names(fleet))}
    times = TimesBuilder()
    executor, unit, unit_of, unit_names = _units(fleet, names, times)
    steps = times.build()
    tokens = unit["type"] == a.TOKENS
    for name in ("kinds", "step_s", "token_s", "shared_s"):
        unit[name][tokens] = steps.fixed[name][unit["kind"], unit["row"]][tokens]
    klass, part, link, option = _classes(fleet, names, unit_of)
    path, member, choice, first = _paths(fleet, klass)
    request, job, size, speech_s, clipped = _requests(fleet, demand, klass, seed)
    run = np.zeros(1, a.RUN)
    run["requests"], run["routing"] = len(request), routing
    run["query_s"], run["until_s"] = query_s, math.inf
    targets = int(choice["target"].max()) + 1
    most = int(unit["most"][unit["type"] != a.BATCHES].max(initial=1)) + 1
    events = len(executor) + len(job) + len(size) + int(job["items"].sum()) + 16
    sim = a.TaskSim(
        run=run,
        executor=executor,
        unit=unit,
        job=job,
        request=request,
        klass=klass,
        part=part,
        link=link,
        path=path,
        member=member,
        choice=choice,
        vertex=np.zeros(targets, a.VERTEX),
        first=first,
        unit_of=unit_of,
        option=option,
        item_s=_item_seconds(fleet),
        size=size,
        box=_boxes(fleet),
        pair=_pairs(fleet),
        heap=np.zeros(events, EVENT),
        ending=np.zeros((len(unit), most), a.ENDING),
        todo=np.zeros(len(executor), np.int64),
        random=stream(seed, "tasks").integers(1, 2147483398, size=2, dtype=np.int64),
        step=np.zeros((2, PROMPTS_IN_STEP)),
        coefficient=steps.coefficient,
        prefix=steps.prefix,
        curve=steps.curve,
    )
    return BuiltTasks(sim, fleet, unit_names, speech_s, clipped)


def _part_names(fleet: TaskFleet) -> list[str]:
    return list(dict.fromkeys(part for e in fleet.executors for part in e.parts))


def _units(
    fleet: TaskFleet, names: Mapping[str, int], times: TimesBuilder
) -> tuple[Records, Records, Longs, tuple[str, ...]]:
    boxes = [box.name for box in fleet.boxes]
    executor = np.zeros(len(fleet.executors), a.EXECUTOR)
    unit = np.zeros(sum(len(e.parts) for e in fleet.executors), a.UNIT)
    unit_of = np.full((len(executor), len(names)), -1, np.int64)
    unit_names: list[str] = []
    for e, spec in enumerate(fleet.executors):
        executor[e]["box"] = boxes.index(spec.box)
        executor[e]["group"] = -1 - e if spec.group is None else spec.group
        executor[e]["slowed"] = spec.slowed
        executor[e]["first"], executor[e]["count"] = len(unit_names), len(spec.parts)
        # So that the first part has the first turn.
        executor[e]["turn"] = len(spec.parts) - 1
        for name, model in spec.parts.items():
            row = unit[len(unit_names)]
            unit_of[e, names[name]] = len(unit_names)
            unit_names.append(name)
            row["executor"] = e
            row["type"] = _TYPES[type(model)]
            row["emits"] = _EMITS[model.emits]
            if isinstance(model, TokenPart):
                _fill_tokens(row, model, times, _mean_tokens(fleet, spec, name))
            else:
                row["fixed_s"], row["most"] = model.fixed_s, model.max_batch
                row["work_item_s"] = model.fixed_s / model.max_batch
    for name in ("cached_rows", "head", "tail", "prompt_head", "prompt_tail", "batch"):
        unit[name] = -1
    return executor, unit, unit_of, tuple(unit_names)


def _fill_tokens(
    row: Records, model: TokenPart, times: TimesBuilder, mean: tuple[float, float]
) -> None:
    row["phase"] = _PHASES[model.phase]
    row["room"], row["most"] = model.kv_tokens, model.max_sequences
    row["budget"] = model.max_tokens
    row["eager"] = model.admission == "prompts"
    if isinstance(model.step, StepTable):
        table = model.step
        profile = NodeProfile(
            max_layers=1,
            kv_tokens=(float(model.kv_tokens),),
            prefill_s_per_layer=table.prefill,
            decode_s_per_layer=table.decode,
            step_s=table.step_s,
            shared_s_per_layer=table.shared_s,
        )
        row["kind"], row["row"] = times.curves(profile, 0.0)
        row["end"] = 1
    else:
        row["kind"], row["row"] = times.operators(model.step)
        row["end"] = model.step.spec.layers
    row["work_prompt_s"], row["work_answer_s"] = work_seconds(model, *mean)


def work_seconds(model: TokenPart, prompt: float, answer: float) -> tuple[float, float]:
    """Return the seconds of a prompt token and of a token that a busy token part makes, for routing.

    Prompts fill steps of their own, and as many sequences run as the KV cache has room for.
    """
    length = min(prompt, float(model.max_tokens))
    batch = max(1.0, min(float(model.max_sequences), model.kv_tokens / (prompt + answer)))
    if isinstance(model.step, AnalyticStepModel):
        last = model.step.spec.layers
        one = step_seconds(model.step, Batch.prefill(length), 0, last)
        many = step_seconds(model.step, Batch.decode(batch, prompt + 0.5 * answer), 0, last)
        return float(one) / length, float(many) / batch
    table = model.step
    one = float(np.interp(length, *np.array(table.prefill).T)) + table.step_s
    many = float(np.interp(batch, *np.array(table.decode).T)) + table.step_s
    return one / length, many / batch


def _mean_tokens(fleet: TaskFleet, executor: ExecutorSpec, part: str) -> tuple[float, float]:
    """Mean prompt and answer of the requests that may come to a part."""
    prompt = answer = total = 0.0
    for klass in fleet.classes:
        if executor.part(klass.service, part) is not None and part in klass.needs:
            need = klass.needs[part]
            lengths = (klass.input_tokens, klass.output_tokens)
            prompt += klass.rate_per_s * max(1.0, need.prompt.mean(*lengths))
            answer += klass.rate_per_s * max(1.0, need.answer.mean(*lengths))
            total += klass.rate_per_s
    return (prompt / total, answer / total) if total > 0.0 else (1.0, 1.0)


def _item_seconds(fleet: TaskFleet) -> Floats:
    rows: list[list[float]] = []
    for executor in fleet.executors:
        for name in executor.parts:
            own = [(k.name, executor.part(k.service, name)) for k in fleet.classes]
            rows.append(
                [
                    0.0
                    if model is None or isinstance(model, TokenPart)
                    else model.item_s.get(k, 0.0)
                    for k, model in own
                ]
            )
    return np.array(rows)


def _classes(
    fleet: TaskFleet, names: Mapping[str, int], unit_of: Longs
) -> tuple[Records, Records, Records, Longs]:
    klass = np.zeros(len(fleet.classes), a.KLASS)
    parts: list[tuple[int, ...]] = []
    links: list[tuple[int, int, int, bool]] = []
    options: list[int] = []
    at_executor = {executor.name: e for e, executor in enumerate(fleet.executors)}
    for at, spec in enumerate(fleet.classes):
        own = class_parts(fleet, spec)
        edges = class_edges(fleet, spec)
        klass[at]["part"], klass[at]["parts"] = len(parts), len(own)
        klass[at]["edge"], klass[at]["edges"] = len(links), len(edges)
        klass[at]["vertex"] = at
        for name in own:
            out = [i for i, edge in enumerate(edges) if edge.src == name]
            able = fleet.candidates(spec, name)
            kind = _TYPES[fleet.part_type(spec.service, name)]
            parts.append(
                (names[name], kind, out[0] if out else 0, len(out), len(options), len(able))
            )
            options += [int(unit_of[at_executor[e.name], names[name]]) for e in able]
        links += [(own.index(e.src), own.index(e.dst), e.chunk_tokens, e.streamed) for e in edges]
    return (
        klass,
        np.array(parts, a.PART),
        np.array(links or [(0, 0, 0, False)], a.LINK),
        np.array(options, np.int64),
    )


def class_parts(fleet: TaskFleet, klass: ClassSpec) -> list[str]:
    """Return the parts that a class may use, in the order in which they are needed."""
    used = {part for path in fleet.paths_of(klass) for part in path.parts}
    return [part for part in klass.needs if part in used]


def class_edges(fleet: TaskFleet, klass: ClassSpec) -> list[PartEdge]:
    """Return the edges between parts that a class may use, by their source."""
    own = class_parts(fleet, klass)
    used = [edge for edge in klass.edges if edge.src in own and edge.dst in own]
    return sorted(used, key=lambda edge: own.index(edge.src))


def _paths(fleet: TaskFleet, klass: Records) -> tuple[Records, Records, Records, Longs]:
    """Paths, their parts, and the graph of choices: classes to paths, then steps to executors."""
    at_executor = {executor.name: e for e, executor in enumerate(fleet.executors)}
    paths: list[tuple[int, int]] = []
    members: list[tuple[int, int]] = []
    class_choices: list[list[tuple[int, float]]] = []
    step_choices: list[list[tuple[int, float]]] = []
    for spec in fleet.classes:
        own = class_parts(fleet, spec)
        class_choices.append([])
        for path in fleet.paths_of(spec):
            class_choices[-1].append((len(paths), path.share))
            paths.append((len(members), len(path.parts)))
            for step in path.steps:
                vertex = len(klass) + len(step_choices)
                members += [(vertex, own.index(part)) for part in step.parts]
                step_choices.append(
                    [(at_executor[name], weight) for name, weight in step.executors]
                )
    by_vertex = class_choices + step_choices
    first = np.cumsum([0, *(len(choices) for choices in by_vertex)]).astype(np.int64)
    # Vertices that lead to the same executors begin with different ones.
    edges = [
        (target, (i - v) % len(choices), weight, 0.0)
        for v, choices in enumerate(by_vertex)
        for i, (target, weight) in enumerate(choices)
    ]
    return (
        np.array(paths, a.PATH),
        np.array(members, a.MEMBER),
        np.array(edges, a.CHOICE),
        first,
    )


def _requests(
    fleet: TaskFleet, demand: Demand, klass: Records, seed: int
) -> tuple[Records, Records, Floats, Floats, int]:
    """Requests, their jobs, the bytes of their edges, their speech, and how many were cut."""
    count = len(demand.klass)
    request = np.zeros(count, a.REQUEST)
    request["klass"], request["arrival_s"] = demand.klass, demand.arrival_s
    jobs, edges = klass["parts"][demand.klass], klass["edges"][demand.klass]
    request["job"], request["edge"] = np.cumsum(jobs) - jobs, np.cumsum(edges) - edges
    request["path"] = -1
    for name in (
        "end_s",
        "first_text_s",
        "last_text_s",
        "first_audio_s",
        "last_audio_s",
        "image_s",
    ):
        request[name] = np.nan
    job = np.zeros(int(jobs.sum()), a.JOB)
    job["unit"] = job["after"] = job["beside"] = -1
    size = np.zeros(int(edges.sum()) + 1)
    speech_s = np.zeros(count)
    clipped = np.zeros(count, bool)
    for at, spec in enumerate(fleet.classes):
        mine = np.flatnonzero(demand.klass == at)
        own = demand.take(mine)
        speech_s[mine] = amount(spec.speech, own)
        for k, edge in enumerate(class_edges(fleet, spec)):
            size[request["edge"][mine] + k] = amount(edge.bytes, own)
        for k, part in enumerate(class_parts(fleet, spec)):
            rows = request["job"][mine] + k
            need = spec.needs[part]
            wants = draw_wants(fleet, spec, part, need, own, seed)
            job["request"][rows], job["part"][rows] = mine, k
            job["items"][rows], job["steps"][rows] = wants.items, need.steps
            job["prompt"][rows], job["answer"][rows] = wants.prompt, wants.answer
            clipped[mine] |= wants.clipped.astype(bool)
        for edge in class_edges(fleet, spec):
            if edge.chunk_tokens:
                own_parts = class_parts(fleet, spec)
                made = job["answer"][request["job"][mine] + own_parts.index(edge.src)]
                fed = request["job"][mine] + own_parts.index(edge.dst)
                job["items"][fed] = -(-made // edge.chunk_tokens)
    return request, job, size, speech_s, int(clipped.sum())


def _pairs(fleet: TaskFleet) -> Records:
    names = {box.name: at for at, box in enumerate(fleet.boxes)}
    number = len(names) if fleet.links else 0
    pair = np.zeros((number, number), a.PAIR)
    for (sender, receiver), link in fleet.links.items():
        row = pair[names[sender], names[receiver]]
        row["bytes_per_s"], row["latency_s"] = link.bytes_per_s, link.latency_s
    return pair


def _boxes(fleet: TaskFleet) -> Records:
    box = np.zeros(len(fleet.boxes), a.BOX)
    for at, spec in enumerate(fleet.boxes):
        box[at]["bytes_per_s"], box[at]["latency_s"] = spec.nic_bytes_per_s, spec.latency_s
        box[at]["inner_bytes_per_s"] = spec.inner_bytes_per_s
        box[at]["inner_latency_s"] = spec.inner_latency_s
    return box
