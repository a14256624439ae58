"""Whether what is planned runs: every instance has an engine, a command, and room for what it starts with.

Fleets are the examples, that of `atoll init`, and twenty as different users would write them. For each the
plan for capacity is made with the engines that it allows, and again with any layout, which says what running
costs. The memory of every GPU is added up here by other arithmetic than the planner's: weights by layers, and
the KV cache of the longest request that its engine is started for. Commands of servers are read back and must
say what the plan does; Atoll's own engine gets its launch as it is.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from importlib.resources import files

import numpy as np

from atoll.api.fleet import Fleet
from atoll.api.fleet_plan import FleetPlan
from atoll.catalog import Catalog
from atoll.cli.plan_commands import write_commands
from atoll.core.errors import AtollError
from atoll.engines.engine import ServedModel, ServerHost
from atoll.engines.table import find_engine
from atoll.plan.engine_layout import describe_engine, engine_layout
from atoll.plan.files.fleet_file import parse_fleet
from atoll.plan.plan import Instance
from atoll.plan.problem import Problem
from atoll.solve.effort import Effort
from benchmarks.planning.runnable_fleets import FLEETS
from benchmarks.report import ROOT, Figure, finish, options

EXAMPLES = ("quickstart", "choice", "owned-cluster", "coral-core", "coral-extended")
QUICK = 6


@dataclass
class Found:
    """A fleet's plan: instances by what runs them, those without a command or room, and its price."""

    instances: int = 0
    without_command: list[str] = field(default_factory=list)
    over_memory: list[str] = field(default_factory=list)
    differs: list[str] = field(default_factory=list)
    run_by: Counter[str] = field(default_factory=Counter)
    usd: float = 0.0
    free_usd: float = 0.0
    served: float = 1.0

    @property
    def ratio(self) -> float | None:
        """Price of running; None where nothing is paid, or not all is served."""
        return self.usd / self.free_usd if self.free_usd > 0.0 and self.served >= 1.0 else None


def look_at(problem: Problem, catalog: Catalog) -> Found:
    """Return what becomes of a fleet."""
    fleet, effort = Fleet(problem), Effort(cached=False)
    plan = fleet.plan(capacity_only=True, effort=effort)
    free = fleet.plan(capacity_only=True, effort=effort, engines=["free"])
    if plan.status == "infeasible":
        raise AtollError(f"no plan: {'; '.join(plan.reasons)}")
    found = Found(len(plan.instances), usd=plan.usd_per_hour, free_usd=free.usd_per_hour)
    found.served = min(plan.served_fraction.values())
    found.without_command = [
        f"{one.instance}: {one.refusal}" for one in write_commands(plan, catalog) if one.refusal
    ]
    for instance in plan.instances:
        found.run_by[describe_engine(instance, catalog) or "-"] += 1
        over = over_memory(plan, instance, catalog)
        if over is not None:
            found.over_memory.append(over)
        if reads_back_otherwise(plan, instance):
            found.differs.append(f"{instance.id}: its command says something else than the plan")
    return found


def reads_back_otherwise(plan: FleetPlan, instance: Instance) -> bool:
    """Whether the command of an instance, read back, is not what the plan says."""
    engine = find_engine(instance.engine or "")
    if engine.staged:
        return False
    launch, layout = plan.engines[instance.service], engine_layout(instance)
    served = ServedModel("org/name", (instance.service,), launch)
    read = engine.parse(engine.command(layout, served, ServerHost("8000", "python3")))
    rows = layout.layers if len(layout.layers) > 1 else ()
    wanted = (layout.tp, layout.copies, rows, engine.settle(launch))
    return (read.tp, read.copies, read.layers, read.served.launch) != wanted


def over_memory(plan: FleetPlan, instance: Instance, catalog: Catalog) -> str | None:
    """Say which node of an instance has too little memory to start; None: all have enough."""
    service = plan.problem.service(instance.service)
    spec = catalog.model(service.model).llm
    context = plan.engines[service.name].max_model_len or 0
    engine = plan.problem.run_by(instance.engine).engine_of(service)
    for node in instance.nodes:
        gpu = catalog.node(node.kind).gpu
        held = sum(spec.layer_weight_bytes(layer) for layer in range(node.start, node.end))
        held += spec.embedding_bytes if node.start == 0 else 0.0
        held += spec.head_bytes if node.end == spec.layers and not spec.tied_embeddings else 0.0
        kept = sum(spec.kv_tokens(i, context) for i in range(node.start, node.end))
        # One that has fewer KV heads than GPUs keeps them on each.
        split = min(node.tp, spec.kv_heads)
        needed = held / node.tp + kept * spec.kv_bytes_per_token_layer / split
        room = gpu.memory_bytes * engine.on(gpu).memory_share
        if needed > room:
            return f"{instance.id}/{node.id}: {needed / 1e9:.1f} GB of {room / 1e9:.1f}"
    return None


def main() -> None:
    """Plan all fleets and count what does not run."""
    arguments = options(__doc__ or "")
    catalog = Catalog.default()
    start = files("atoll.plan.files").joinpath("data", "fleet.yaml")
    texts = {"atoll init": start.read_text("utf-8")} | FLEETS
    if arguments.quick:
        texts = dict(list(texts.items())[: QUICK + 1])
    else:
        texts |= {n: (ROOT / "examples" / f"{n}.yaml").read_text("utf-8") for n in EXAMPLES}
    total, ratios = Found(), []
    print(f"  {'fleet':62s} instances   $/h   free  run by")
    for name, text in texts.items():
        found = look_at(parse_fleet(text), catalog)
        total.instances += found.instances
        total.without_command += found.without_command
        total.over_memory += found.over_memory
        total.differs += found.differs
        total.run_by += found.run_by
        if found.ratio is not None:
            ratios.append(found.ratio)
        told = ", ".join(f"{count} {what}" for what, count in sorted(found.run_by.items()))
        told += "" if found.served >= 1.0 else f"; serves {found.served:.0%} at least"
        print(f"  {name:62s} {found.instances:9d} {found.usd:6.2f} {found.free_usd:6.2f}  {told}")
        for problem in (*found.without_command, *found.over_memory, *found.differs):
            print(f"    {problem}")
    finish(
        [
            Figure("instances", total.instances),
            Figure("without_command", len(total.without_command), 0.0),
            Figure("not_parsed", None, 0.0, note="engines' own parsers are not asked yet"),
            Figure("over_memory", len(total.over_memory), 0.0),
            Figure("roundtrip_differs", len(total.differs), 0.0),
            Figure("price_of_running_max", max(ratios, default=1.0)),
            Figure("price_of_running_median", float(np.median(ratios)) if ratios else 1.0),
        ],
        run_by=dict(total.run_by),
    )


if __name__ == "__main__":
    main()
