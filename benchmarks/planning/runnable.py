"""Whether what is planned runs: every instance has an engine, a command, and room for what it starts with.

Fleets are the examples, that of `atoll init`, and those that different users would write. For each the
plan for capacity is made with the engines that it allows, and again with any layout, which says what running
costs. The memory of every GPU is added up here by other arithmetic than the planner's: weights by layers, and
the KV cache of the longest request that its engine is started for. Commands of servers are read back and must
say what the plan does; Atoll's own engine gets its launch as it is. Lines of `atoll plan --commands` are
read by the engines' own parsers, where those are installed, and must say the same there.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files

import numpy as np

from atoll.api.fleet import Fleet
from atoll.api.fleet_plan import FleetPlan
from atoll.catalog import Catalog
from atoll.cli.plan_commands import write_commands
from atoll.core.errors import AtollError
from atoll.deploy.commands.instance_member import fill_in
from atoll.deploy.commands.meeting import MemberAddress
from atoll.deploy.commands.stage_node import StageOrder
from atoll.engines.engine import ServedModel, ServerHost
from atoll.engines.table import find_engine
from atoll.plan.engine_layout import describe_engine, engine_layout, launch_of
from atoll.plan.files.fleet_file import parse_fleet
from atoll.plan.plan import Instance
from atoll.plan.problem import Problem
from atoll.solve.effort import Effort
from benchmarks.planning.runnable_fleets import FLEETS
from benchmarks.report import ROOT, Figure, finish, options
from tools import own_parsers
from tools.own_parsers import ReadCommand
from tools.real_engines import UnavailableError

EXAMPLES = ("quickstart", "choice", "owned-cluster", "coral-core", "coral-extended")
QUICK = 6


@dataclass(frozen=True, slots=True)
class PlannedCommand:
    """A command of an instance, and what its engine's parser must read in it."""

    instance: str
    engine: str
    words: tuple[str, ...]
    expected: ReadCommand


@dataclass
class Found:
    """A fleet's plan: instances by what runs them, those without a command or room, and its price."""

    instances: int = 0
    without_command: list[str] = field(default_factory=list)
    over_memory: list[str] = field(default_factory=list)
    differs: list[str] = field(default_factory=list)
    commands: list[PlannedCommand] = field(default_factory=list)
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
    written = {one.instance: one for one in write_commands(plan, catalog)}
    found.without_command = [
        f"{one.instance}: {one.refusal}" for one in written.values() if one.refusal
    ]
    for instance in plan.instances:
        found.commands += commands_of(plan, instance, written[instance.id].lines)
        found.run_by[describe_engine(instance, catalog) or "-"] += 1
        over = over_memory(plan, instance, catalog)
        if over is not None:
            found.over_memory.append(over)
        if reads_back_otherwise(plan, instance):
            found.differs.append(f"{instance.id}: its command says something else than the plan")
    return found


def commands_of(plan: FleetPlan, instance: Instance, lines: Sequence[str]) -> list[PlannedCommand]:
    """Return what the lines of an instance start, as its engine is called once its nodes have met."""
    engine = find_engine(instance.engine or "")
    launch = launch_of(plan, instance)
    expected = ReadCommand(engine_layout(instance).tp)
    if not engine.staged:
        kept = engine.settle(launch)
        way = kept.handover
        expected = replace(
            expected,
            max_model_len=kept.max_model_len,
            max_tokens=kept.max_num_batched_tokens,
            handover="" if way is None else own_parsers.HANDOVERS[engine.name][way],
            stages=len(engine_layout(instance).layers),
        )
    members = {
        node.id: MemberAddress(host="10.0.0.1", ports=(29500, 29501)) for node in instance.nodes
    }
    found = []
    for rank, line in enumerate(lines):
        if not engine.staged and len(lines) > 1:
            expected = replace(expected, place=f"{rank} of {len(lines)} at 10.0.0.1:29500")
        words = [word for word in shlex.split(line) if not _is_assignment(word)]
        # Whatever prepares the engine's command has it behind the last mark.
        last = max((at for at, word in enumerate(words) if word == "--"), default=-1)
        own = tuple(fill_in([w for w in words[last + 1 :] if w != "env"], members))
        found.append(PlannedCommand(instance.id, engine.name, own, expected))
    return found


def _is_assignment(word: str) -> bool:
    name, sign, _ = word.partition("=")
    return bool(sign) and name.isidentifier() and name.isupper()


def ask_parsers(commands: Sequence[PlannedCommand]) -> tuple[list[str], dict[str, str]]:
    """Return what engines' own parsers do not take, and by engine whose parser could not be asked, why."""
    refused, skipped = [], dict[str, str]()
    for name in sorted({each.engine for each in commands}):
        own = [each for each in commands if each.engine == name]
        try:
            read = _read(name, own)
        except UnavailableError as error:
            skipped[name] = f"{len(own)} commands: {error}"
            continue
        for each, answer in zip(own, read, strict=True):
            if answer != each.expected:
                told = answer.refusal or f"it reads {answer} where {each.expected} was planned"
                refused.append(f"{each.instance}: {name}'s parser: {told}")
    return refused, skipped


def _read(name: str, commands: Sequence[PlannedCommand]) -> list[ReadCommand]:
    if name in own_parsers.NAMES:
        return own_parsers.read_commands(name, [each.words for each in commands])
    if not find_engine(name).staged:
        raise UnavailableError("nobody asks its parser yet")
    read = []
    for each in commands:
        try:
            order = StageOrder.from_json(each.words[each.words.index("--order") + 1])
            read.append(ReadCommand(engine_layout(order.instance).tp))
        except (AtollError, ValueError) as error:
            read.append(ReadCommand(refusal=str(error)))
    return read


def reads_back_otherwise(plan: FleetPlan, instance: Instance) -> bool:
    """Whether the command of an instance, read back, is not what the plan says."""
    engine = find_engine(instance.engine or "")
    if engine.staged:
        return False
    launch, layout = launch_of(plan, instance), engine_layout(instance)
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
        kept *= instance.slots or 1  # each has room for the longest request
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
    total, ratios = Found(), list[float]()
    print(f"  {'fleet':62s} instances   $/h   free  run by")
    for name, text in texts.items():
        found = look_at(parse_fleet(text), catalog)
        total.instances += found.instances
        total.without_command += found.without_command
        total.over_memory += found.over_memory
        total.differs += found.differs
        total.run_by += found.run_by
        total.commands += found.commands
        if found.ratio is not None:
            ratios.append(found.ratio)
        told = ", ".join(f"{count} {what}" for what, count in sorted(found.run_by.items()))
        told += "" if found.served >= 1.0 else f"; serves {found.served:.0%} at least"
        print(f"  {name:62s} {found.instances:9d} {found.usd:6.2f} {found.free_usd:6.2f}  {told}")
        for problem in (*found.without_command, *found.over_memory, *found.differs):
            print(f"    {problem}")
    refused, skipped = ask_parsers(total.commands)
    for told in refused:
        print(f"    {told}")
    asked = Counter(each.engine for each in total.commands if each.engine not in skipped)
    told_asked = ", ".join(f"{count} commands of {name}" for name, count in sorted(asked.items()))
    note = f"{told_asked} were read" + "".join(
        f"; skipped {name}, {why}" for name, why in skipped.items()
    )
    finish(
        [
            Figure("instances", total.instances),
            Figure("without_command", len(total.without_command), 0.0),
            Figure("not_parsed", len(refused) if asked else None, 0.0, note=note),
            Figure("over_memory", len(total.over_memory), 0.0),
            Figure("roundtrip_differs", len(total.differs), 0.0),
            Figure("price_of_running_max", max(ratios, default=1.0)),
            Figure("price_of_running_median", float(np.median(ratios)) if ratios else 1.0),
        ],
        run_by=dict(total.run_by),
        parsed_by=dict(asked),
        parsers_skipped=skipped,
    )


if __name__ == "__main__":
    main()
