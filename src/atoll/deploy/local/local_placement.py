"""A plan as it stands on this machine: instances on its GPUs, under the engines they were planned for.

What was planned comes first, on GPUs of the planned kinds. What is left over takes GPUs of other kinds that
hold it, in its own layout or on as few GPUs of one node as do. A service that gets no GPU runs on cores; of
one that gets some, instances without are left out: answers from cores would keep none of its promises.
"""

from __future__ import annotations

import shutil
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING

from atoll.catalog.catalog import Catalog
from atoll.core.errors import AtollError, UsageError
from atoll.core.ids import Phase, format_node_type, parse_node_type
from atoll.deploy.commands.node_commands import ServiceWeights, choose_engine
from atoll.deploy.local.gpu_slots import HeldSlots, PoolMachine, SlotRequest, allocate_slots
from atoll.engines.engine import ServedModel, ServerHost
from atoll.engines.stage import ENGINE as STAGE
from atoll.engines.table import AUTO, profile_engine
from atoll.perf.memory_model import MemoryModel
from atoll.plan.engine_layout import engine_layout, launch_of
from atoll.plan.plan import Flow, Instance, Node, Plan
from atoll.runtime.local.instance_runner import InstanceRunner
from atoll.runtime.local.placing import PlannedEndpoint, plan_endpoints

if TYPE_CHECKING:
    from atoll.engines.engine import Engine


@dataclass(frozen=True, slots=True)
class LocalGpus:
    """GPUs of this machine by kind, and those of them that others hold."""

    machines: tuple[PoolMachine, ...] = ()
    held: tuple[HeldSlots, ...] = ()

    @classmethod
    def find(cls) -> LocalGpus:
        """Return the GPUs that are here, and what fleets that `atoll up` started hold of them."""
        from atoll.core.paths import state_dir
        from atoll.deploy.local.gpu_slots import find_machines
        from atoll.deploy.local.local_deployer import LocalDeployer

        machines, folder = find_machines(), state_dir() / "local"
        held = LocalDeployer(machines, folder).list_held() if machines and folder.exists() else ()
        return cls(machines, tuple(held))


@dataclass(frozen=True, slots=True)
class LocalPlacement:
    """A plan with the nodes that instances have here, without those left out, and what runs each."""

    plan: Plan
    runners: tuple[InstanceRunner, ...]

    def on_gpus(self, service: str) -> bool:
        """Return whether a service runs on GPUs here."""
        return any(runner.gpus for runner in self.runners if runner.service == service)

    def refuse_cores(self) -> None:
        """Raise UsageError where an instance runs on cores."""
        for each in self.runners:
            if each.engine and not each.gpus:
                why = each.reason or f"it was planned for {each.planned}"
                raise UsageError(
                    f"{each.instance} has no GPU here: {why}",
                    field="device",
                    hint="leave `device` out to use cores, or plan for the GPUs that are here",
                )


def place_here(
    plan: Plan,
    weights: Mapping[str, ServiceWeights],
    models: Mapping[str, str],
    gpus: LocalGpus,
    catalog: Catalog,
) -> LocalPlacement:
    """Return where the services in `weights` stand; `models` are the names of theirs, for the catalog."""
    placer = _Placer(plan, weights, models, gpus, catalog, list(gpus.held))
    endpoints = plan_endpoints(plan, dict.fromkeys(weights))
    for each in endpoints:
        placer.refusals[each.name] = placer.refuse(each)
    for place in (placer.place_as_planned, placer.place_elsewhere):
        for each in endpoints:
            if placer.refusals[each.name] is None and each.instances[0].id not in placer.placed:
                place(each)
    return placer.placement(endpoints)


@dataclass
class _Placer:
    """Instances as they are placed one after another; `refusals` say why endpoints get no GPU at all."""

    plan: Plan
    weights: Mapping[str, ServiceWeights]
    models: Mapping[str, str]
    gpus: LocalGpus
    catalog: Catalog
    held: list[HeldSlots]
    placed: dict[str, Instance] = field(default_factory=dict)
    refusals: dict[str, str | None] = field(default_factory=dict)
    unfit: dict[str, dict[str, str]] = field(default_factory=dict)
    """By endpoint and kind of GPU, why that kind cannot run it."""

    def refuse(self, each: PlannedEndpoint) -> str | None:
        """Say why an endpoint gets no GPU, whatever is free; "" where it was planned for none."""
        weights = self.weights[each.service]
        whole = {kind.partition("/")[0] for kind in _kinds(each.instances)}
        if not whole & Catalog.default().gpus.keys():
            return ""
        if not self.gpus.machines:
            return "no GPU is here"
        if weights.stand_in:
            return "a stand-in needs no GPU"
        for instance in each.instances:
            engine = choose_engine(instance, weights)
            if instance.phase is not Phase.BOTH and not engine.staged:
                return f"prompts and answers apart on {engine.title} are started by `atoll up`"
            missing = _find_missing(engine, instance)
            if missing is not None:
                return missing
            copies, most = max(n.gpus // n.tp for n in instance.nodes), engine.max_node_copies
            if most is not None and copies > most:
                return (
                    f"{engine.title} runs {most} copy of its layers on a node, and {instance.id} has"
                    f" {copies}"
                )
        return None

    def place_as_planned(self, each: PlannedEndpoint) -> None:
        """Give an endpoint GPUs of the kinds that it was planned for."""
        self._take(each.instances)

    def place_elsewhere(self, each: PlannedEndpoint) -> None:
        """Give an endpoint GPUs of another kind that holds it, or fewer of its own."""
        own = _kinds(each.instances)
        sizes = {parse_node_type(m.node_type).gpu: m.slots for m in self.gpus.machines}
        for kind in sorted(sizes, key=lambda name: (name not in own, name)):
            for moved in self._layouts(each, kind):
                if sum(instance.gpus for instance in moved) > sizes[kind]:
                    continue
                why = self._misfit(moved, kind)
                if why is None and self._take(moved):
                    return
                self.unfit.setdefault(each.name, {})[kind] = why or "taken"

    def _layouts(self, each: PlannedEndpoint, kind: str) -> Iterable[Sequence[Instance]]:
        """An endpoint on GPUs of a kind: as planned, then whole on a node with as few as may be."""
        yield [_move(instance, kind, instance.nodes) for instance in each.instances]
        (first, *others) = each.instances
        if others or first.phase is not Phase.BOTH:
            return
        layers = max(node.end for node in first.nodes)
        for size in (1, 2, 4, 8):
            whole = first.nodes[0].model_copy(
                update={
                    "start": 0,
                    "end": layers,
                    "tp": size,
                    "gpu_ids": tuple(range(size)),
                }
            )
            yield [_move(first, kind, (whole,))]

    def _misfit(self, instances: Sequence[Instance], kind: str) -> str | None:
        """Say why GPUs of a kind do not hold instances; None: they do."""
        for instance in instances:
            name = self.models.get(instance.service, "")
            engine = choose_engine(instance, self.weights[instance.service])
            launch = launch_of(self.plan, instance)
            try:
                spec, gpu = self.catalog.model(name).llm, self.catalog.gpu(kind)
                refusal = engine.refuses(spec, gpu)
                if refusal is not None:
                    return refusal
                profile = profile_engine(engine.name, gpu, launch)
                for node in instance.nodes:
                    memory = MemoryModel.of(
                        spec,
                        self.catalog.node(node.kind),
                        tp=node.tp,
                        engine=profile,
                        phase=instance.phase,
                    )
                    longest = float(launch.max_model_len or 0)
                    held = memory.fits(node.start, node.end, longest)
                    if held and instance.slots is not None:
                        held = memory.slots(node.start, node.end, longest) >= instance.slots
                    if not held:
                        return f"too small for {name}"
            except (
                AtollError
            ) as error:  # a kind that nobody knows, or a split that the model has not
                return error.message
        return None

    def _take(self, instances: Sequence[Instance]) -> bool:
        """Hold GPUs for all nodes of instances, if they are free."""
        nodes = [(instance, node) for instance in instances for node in instance.nodes]
        wanted = [SlotRequest(f"{one.id}/{node.id}", node.kind, node.gpus) for one, node in nodes]
        given = allocate_slots(self.gpus.machines, self.held, wanted)
        if isinstance(given, SlotRequest):
            return False
        self.held += given
        machines = {machine.name: machine.gpu_ids or () for machine in self.gpus.machines}
        # Plans count shares where a GPU is offered in some: the first of it stands for the GPU.
        slots = {
            each.node: [machines[each.machine][at] * each.shares for at in each.slots]
            for each in given
        }
        for instance in instances:
            shown = tuple(
                node.model_copy(
                    update={
                        "node_type": node.kind,
                        "gpu_ids": tuple(slots[f"{instance.id}/{node.id}"]),
                    }
                )
                for node in instance.nodes
            )
            self.placed[instance.id] = instance.model_copy(update={"nodes": shown})
        return True

    def placement(self, endpoints: Sequence[PlannedEndpoint]) -> LocalPlacement:
        """Return the plan as it stands here."""
        served = {instance.service for instance in self.placed.values()}
        runners, left_out = [], set[str]()
        for each in endpoints:
            for planned in each.instances:
                runner = self._runner(each, planned, partly=each.service in served)
                runners.append(runner)
                if not runner.engine:
                    left_out.add(planned.id)
        kept = [i for i in self.plan.instances if i.id not in left_out]
        update = {
            "instances": tuple(self.placed.get(i.id, i) for i in kept),
            "routes": tuple(r for r in self.plan.routes if not left_out & set(r.instances)),
        }
        return LocalPlacement(self.plan.model_copy(update=update), tuple(runners))

    def _runner(self, each: PlannedEndpoint, planned: Instance, *, partly: bool) -> InstanceRunner:
        weights, placed = self.weights[each.service], self.placed.get(planned.id)
        known = {
            "instance": planned.id,
            "service": each.service,
            "planned": " + ".join(node.kind for node in planned.nodes),
            "model": self.models.get(each.service) or weights.source,
        }
        if placed is None:
            refusal = self.refusals[each.name]
            reason = self._why_not_here(each) if refusal is None else refusal
            cores = STAGE.name if weights.engine == AUTO else weights.engine
            return InstanceRunner(**known, engine="" if partly else cores, reason=reason)
        same = _shape(placed) == _shape(planned)
        return InstanceRunner(
            **known,
            engine=choose_engine(placed, weights).name,
            gpu=", ".join(sorted(_kinds([placed]))),
            gpus=tuple(
                gpu // node.gpu_shares for node in placed.nodes for gpu in node.gpu_ids or ()
            ),
            tp=max(node.tp for node in placed.nodes),
            reason="" if same else self._why_not_here(each),
        )

    def _why_not_here(self, each: PlannedEndpoint) -> str:
        """Say what of the planned GPUs is not here, and what is: "no L40S is here (found: 1x H200)"."""
        wanted = Counter[str]()
        for instance in each.instances:
            for node in instance.nodes:
                wanted[parse_node_type(node.kind).gpu] += node.gpus
        here = {parse_node_type(m.node_type).gpu: m for m in self.gpus.machines}
        lacking = [kind for kind in wanted if kind.partition("/")[0] not in here]
        if lacking:
            missing = f"no {' or '.join(lacking)} is here"
        else:
            needed = " + ".join(f"{count}x {kind}" for kind, count in wanted.items())
            missing = (
                f"{needed} are needed and not free"
                if sum(wanted.values()) > 1
                else (f"no {needed.partition(' ')[2]} is free")
            )
        unfit = self.unfit.get(each.name, {}) if each.instances[0].id not in self.placed else {}
        found = [
            f"{machine.slots}x {kind}" + (f": {unfit[kind]}" if kind in unfit else "")
            for kind, machine in here.items()
        ]
        return f"{missing} (found: {', '.join(found)})"


def _kinds(instances: Iterable[Instance]) -> set[str]:
    """Kinds of GPUs of instances."""
    return {parse_node_type(node.node_type).gpu for i in instances for node in i.nodes}


def _shape(instance: Instance) -> list[tuple[str, int, int]]:
    return [(node.kind, node.start, node.end) for node in instance.nodes]


def _move(instance: Instance, kind: str, nodes: Sequence[Node]) -> Instance:
    """An instance with these nodes on GPUs of a kind; one node alone takes all of its requests."""
    moved = tuple(
        node.model_copy(
            update={
                "node_type": format_node_type(kind, node.gpus),
                "gpu_ids": tuple(range(node.gpus)),
            }
        )
        for node in nodes
    )
    flows = instance.flows
    if len(moved) < len(instance.nodes):
        ends = (("source", moved[0].id), (moved[0].id, "sink"))
        flows = tuple(Flow(src=a, dst=b, per_s=instance.throughput_per_s) for a, b in ends)
    return instance.model_copy(update={"nodes": moved, "flows": flows})


def _find_missing(engine: Engine, instance: Instance) -> str | None:
    """Say what an engine lacks to be started here on GPUs; None: nothing."""
    if engine.staged:
        if find_spec("torch") is None:
            return f"{engine.title} needs PyTorch, which is not installed here"
        import torch

        if torch.version.cuda is None:
            return "the PyTorch that is installed here computes on cores"
        return None
    served = ServedModel("org/name", (instance.service,))
    host = ServerHost("8000", sys.executable)
    words = engine.command(engine_layout(instance), served, host).arguments
    program = words[2].partition(".")[0] if words[1] == "-m" else words[0]
    found = find_spec(program) if words[1] == "-m" else shutil.which(program)
    return f"{program} is not installed here" if found is None else None
