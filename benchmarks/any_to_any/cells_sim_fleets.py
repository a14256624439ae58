"""Deployments of any-to-any models on sixteen A100-80, as Cornserve's sections 7.2 and 7.4 have them.

Requests are those of `cells_paper`, but texts vary as much as their mean (lognormal, a CV of 1): what
ServeGen shows is long-tailed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from atoll.catalog import Catalog
from atoll.plan.plan import Instance, Node, Plan, RequestPath, RequestStep
from atoll.plan.problem import Problem
from atoll.sim.tasks.from_plan import task_fleet
from atoll.sim.tasks.task_fleet import BatchPart, PartModel, TaskFleet
from atoll.solve.assembly import assemble
from atoll.solve.effort import Effort
from atoll.solve.graph.executor_program import solve_program
from atoll.solve.graph.graph_build import build_program
from atoll.solve.graph.graph_to_plan import plan_of
from atoll.solve.packing import pack
from atoll.workload.classes import RequestClass
from benchmarks.any_to_any.cells_paper import IMAGE, INTERNVL, OMNI, TEXT, equal_gpus, servegen

SERVICE, BOX, BOXES = "model", "A100-80:8", 2
"""As `equal_gpus` calls them."""
GAP = 1e-3
"""Proven gap at which a search for the most throughput may stop."""
_SPREAD = {"input_cv": 1.0, "output_cv": 1.0}

Steps = Sequence[tuple[tuple[str, ...], str]]
"""Parts, and the group of executors that run them, step by step."""
Ways = Callable[[RequestClass], Sequence[tuple[float, Steps]]]
"""The ways of a class, each with its share."""


@dataclass(frozen=True)
class Group:
    """Executors that are alike: so many, with these parts, on so many GPUs each."""

    name: str
    parts: tuple[str, ...]
    gpus: int
    count: int


def omni_problem() -> Problem:
    """Return one request/s of footnote 6 for Qwen2.5-Omni on sixteen GPUs, without promises."""
    classes = {name: {**entry, **_SPREAD} for name, entry in servegen().items()}
    return equal_gpus(OMNI, classes, BOXES)


def images_problem() -> Problem:
    """Return one request/s with an image each for InternVL3 on sixteen GPUs, without promises."""
    entry = {"share": 1.0, "images": IMAGE, **TEXT, **_SPREAD}
    return equal_gpus(INTERNVL, {"image -> text": entry}, BOXES)


def plan_most(problem: Problem, catalog: Catalog) -> tuple[Plan, float]:
    """Return the plan that carries most on the machines there are, and how many requests/s it should."""
    effort = Effort()
    built = build_program(problem, catalog, effort, None)
    program = replace(built.program, goal="most")
    answer = solve_program(program, gap=GAP)
    made = replace(built, program=program)
    plan = plan_of(problem, catalog, made, answer, None, effort, solver="exact")
    return plan, answer.objective


def plan_by_hand(problem: Problem, catalog: Catalog, groups: Sequence[Group], ways: Ways) -> Plan:
    """Return the plan of executors that somebody else chose; those of a group share evenly."""
    instances = [
        Instance(
            id=f"{group.name}-{number}",
            service=SERVICE,
            role=f"{SERVICE}/{'+'.join(group.parts)}/serve",
            region="lab",
            stages=1,
            nodes=(
                Node(
                    id="n0",
                    node_type=BOX,
                    market="owned",
                    start=0,
                    end=1,
                    tp=group.gpus,
                    gpu_ids=tuple(range(group.gpus)),
                ),
            ),
            flows=(),
            throughput_per_s=0.0,
            usd_per_hour=0.0,
        )
        for group in groups
        for number in range(group.count)
    ]
    counts = {group.name: group.count for group in groups}
    (service,) = problem.services
    paths = [
        RequestPath(
            service=SERVICE,
            klass=klass.name,
            share=share,
            steps=tuple(
                RequestStep(
                    parts=parts,
                    instances={f"{name}-{i}": 1.0 / counts[name] for i in range(counts[name])},
                )
                for parts, name in steps
            ),
        )
        for klass in service.classes
        for share, steps in ways(klass)
    ]
    return assemble(
        problem,
        pack(problem, instances),
        catalog=catalog,
        status="feasible",
        solver="by hand",
        paths=paths,
        served_by_paths={SERVICE: 1.0},
    )


def parts_of(klass: RequestClass, talker: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the parts that a class needs: encoders, the llm, and what speaks."""
    encoders = ["vision"] if klass.images or klass.video else []
    encoders += ["audio"] if klass.audio_s else []
    return (*encoders, "llm", *(talker if klass.speech_s else ()))


OMNI_PARTS = ("vision", "audio", "llm", "talker", "vocoder")
TALKER = "talker"
SPEAKS = (TALKER, "vocoder")


def omni_monoliths(problem: Problem, catalog: Catalog) -> Plan:
    """Return sixteen copies of the whole model; a request stays where it is."""
    whole = Group("whole", OMNI_PARTS, 1, 16)
    return plan_by_hand(
        problem, catalog, [whole], lambda klass: [(1.0, [(parts_of(klass, SPEAKS), "whole")])]
    )


def omni_published(problem: Problem, catalog: Catalog) -> Plan:
    """Return the paper's plan on sixteen GPUs: one llm with the encoders, 15 audio generators."""

    def ways(klass: RequestClass) -> list[tuple[float, Steps]]:
        steps: list[tuple[tuple[str, ...], str]] = [(parts_of(klass), "thinker")]
        return [(1.0, [*steps, (SPEAKS, "speaker")] if klass.speech_s else steps)]

    thinker = Group("thinker", OMNI_PARTS[:3], 1, 1)
    return plan_by_hand(problem, catalog, [thinker, Group("speaker", SPEAKS, 1, 15)], ways)


def internvl_routed(problem: Problem, catalog: Catalog, dedicated: float) -> Plan:
    """Return section 7.4's plan: four encoders, six monoliths; `dedicated` of requests take the encoders."""
    groups = [Group("encoder", ("vision",), 1, 4), Group("whole", ("vision", "llm"), 2, 6)]
    return plan_by_hand(
        problem,
        catalog,
        groups,
        lambda _: [
            (dedicated, [(("vision",), "encoder"), (("llm",), "whole")]),
            (1.0 - dedicated, [(("vision", "llm"), "whole")]),
        ],
    )


def fleet_at(plan: Plan, problem: Problem, catalog: Catalog, per_s: float) -> TaskFleet:
    """Return what is simulated at so many requests/s."""
    return task_fleet(plan, problem, catalog, scale=per_s)


def run_to_the_end(fleet: TaskFleet, alone_s: Mapping[str, float]) -> TaskFleet:
    """Return a fleet whose talkers hold their GPU from a request's first code to its last, one by one.

    That is how the paper describes its baseline. `alone_s` are a talker's seconds with a request, by class.
    """
    return replace(
        fleet,
        executors=tuple(
            replace(
                executor,
                parts={
                    name: _held(fleet, name, model, alone_s)
                    for name, model in executor.parts.items()
                },
            )
            for executor in fleet.executors
        ),
        classes=tuple(
            replace(
                klass,
                edges=tuple(replace(e, chunk_tokens=0, streamed=False) for e in klass.edges),
            )
            for klass in fleet.classes
        ),
    )


def _held(fleet: TaskFleet, name: str, model: PartModel, alone_s: Mapping[str, float]) -> PartModel:
    """The talker as one long item, and the vocoder with all pieces of a request in one."""
    if name == TALKER:
        return BatchPart(dict(alone_s))
    pieces = {
        klass.name: klass.needs[TALKER].answer.mean(klass.input_tokens, klass.output_tokens)
        / edge.chunk_tokens
        for klass in fleet.classes
        for edge in klass.edges
        if edge.dst == name and edge.chunk_tokens
    }
    if not pieces or not isinstance(model, BatchPart):
        return model
    seconds = {klass: s * pieces.get(klass, 1.0) for klass, s in model.item_s.items()}
    return replace(model, item_s=seconds)


def talker_alone_s(problem: Problem, catalog: Catalog) -> dict[str, float]:
    """Return the seconds of a talker with a request of its own, by class, beside the whole model."""
    built = build_program(problem, catalog, Effort(), None)
    for executor, origin in zip(built.program.executors, built.origins, strict=True):
        if origin.parts == OMNI_PARTS and origin.kind == "A100-80:1":
            return {k: s for (_, k, part), s in executor.latency_s.items() if part == TALKER}
    raise RuntimeError("the whole model does not fit a GPU")
