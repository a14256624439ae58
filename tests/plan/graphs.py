"""Any-to-any services on a few machines, and a plan for them made by hand."""

from __future__ import annotations

from functools import cache

from atoll.core.ids import parse_node_type
from atoll.plan.executor_use import executor_use
from atoll.plan.files.fleet_file import parse_fleet
from atoll.plan.plan import SINK, SOURCE, Flow, Instance, Node, Plan, RequestPath, RequestStep
from atoll.plan.problem import Problem

SCANS, SPOKEN, DRAWN = "image+text (scans)", "audio -> audio", "text -> image"
FLEET = """\
name: mixed
services:
  omni:
    model: qwen2.5-omni-7b
    rate: 2/s
    ttft: 3s
    tpot: 100ms
    classes:
      text: {share: 50%, input: 400, output: 150}
      image+text (scans): {share: 30%, input: 200, output: 150, images: {size: 1280x720}}
      audio -> audio: {share: 20%, input: 50, output: 60, audio: 8s, speech: 12s, ahead: 1s}
  draw:
    model: qwen-image
    rate: 0.01/s
    classes:
      text -> image: {share: 100%, input: 60, image: {size: 1024x1024, steps: 20}, image_within: 60s}
pool:
  offers:
    - {region: lab, node_type: T4:1, available: 4, usd_per_hour: 0.5}
    - {region: lab, node_type: L40S:4, available: 2, usd_per_hour: 10}
    - {region: lab, node_type: A100-80:1, available: 2, usd_per_hour: 4}
"""


def executor(
    name: str,
    service: str,
    parts: str,
    node_type: str,
    usd: float,
    *,
    gpus: tuple[int, ...] | None = None,
    slot: int | None = None,
) -> Instance:
    """Return an executor that carries nothing yet: on a whole machine, or on GPUs of one."""
    size = parse_node_type(node_type).gpu_count if gpus is None else len(gpus)
    node = Node(
        id="n0",
        node_type=node_type,
        market="on-demand",
        start=0,
        end=1,
        tp=size,
        gpu_ids=gpus,
        slot=slot,
    )
    return Instance(
        id=name,
        service=service,
        role=f"{service}/{parts}/serve",
        region="lab",
        stages=1,
        nodes=(node,),
        flows=(),
        throughput_per_s=0.0,
        usd_per_hour=usd,
    )


def path(service: str, klass: str, share: float, *steps: tuple[str, str]) -> RequestPath:
    """Return a path; a step is parts ("vision+llm") and executors ("see-0 see-1") that share it evenly."""
    return RequestPath(
        service=service,
        klass=klass,
        share=share,
        steps=tuple(
            RequestStep(
                parts=tuple(parts.split("+")),
                instances={name: 1.0 / len(names.split()) for name in names.split()},
            )
            for parts, names in steps
        ),
    )


@cache
def problem() -> Problem:
    """Return the problem of `FLEET`."""
    return parse_fleet(FLEET, path="mixed.yaml")


EXECUTORS = (
    executor("see-0", "omni", "vision", "T4:1", 0.5),
    executor("see-1", "omni", "vision", "T4:1", 0.5),
    executor("think-0", "omni", "audio+llm", "L40S:4", 2.5, gpus=(0,), slot=0),
    executor("speak-0", "omni", "talker+vocoder", "L40S:4", 2.5, gpus=(1,), slot=0),
    executor("draw-0", "draw", "text+dit+vae", "A100-80:1", 4.0),
)
PATHS = (
    path("omni", "text", 1.0, ("llm", "think-0")),
    path("omni", SCANS, 1.0, ("vision", "see-0 see-1"), ("llm", "think-0")),
    path("omni", SPOKEN, 1.0, ("audio+llm", "think-0"), ("talker+vocoder", "speak-0")),
    path("draw", DRAWN, 1.0, ("text+dit+vae", "draw-0")),
)


def plan_of(executors: tuple[Instance, ...], paths: tuple[RequestPath, ...], usd: float) -> Plan:
    """Return a plan whose executors carry what its paths lead over them."""
    asked = problem()
    plan = Plan(
        problem_hash=asked.content_hash(),
        problem_name=asked.name,
        instances=executors,
        paths=paths,
        served_fraction={service.name: 1.0 for service in asked.services},
        usd_per_hour=usd,
        objective=usd,
        status="feasible",
        solver="by hand",
    )
    passing = {
        use.id: use.requests_per_s for use in executor_use(plan, asked, asked.catalog()).executors
    }
    return plan.model_copy(
        update={
            "instances": tuple(
                one.model_copy(
                    update={
                        "throughput_per_s": passing[one.id],
                        "flows": (
                            Flow(src=SOURCE, dst="n0", per_s=passing[one.id]),
                            Flow(src="n0", dst=SINK, per_s=passing[one.id]),
                        ),
                    }
                )
                for one in plan.instances
            )
        }
    )


@cache
def plan() -> Plan:
    """Return the plan made by hand: two GPUs of a machine of four stay idle."""
    return plan_of(EXECUTORS, PATHS, 15.0)
