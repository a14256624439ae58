"""Machines that joined a fabric as a target: what stands on each of them, put together.

    deployer = JoinedDeployer(MachineFabric.of(token, "joined"))
    status = deployer.start(order)

Each machine keeps account of its own GPUs and instances (`machine_host`), refuses older controllers, and ends
its instances when it leaves. Nothing is kept here: whoever asks later, elsewhere, finds all of it there. A
machine that is not in the fabric now is not asked, and what stands on it is not listed: the controller holds
it for as it was seen last, until long enough. One that is there and does not answer is an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol
from urllib.parse import unquote

from atoll.deploy.joined.machine_request import (
    JoinedMachine,
    MachineAnswer,
    MachineRequest,
    PartOrder,
    StandingPart,
)
from atoll.deploy.local.gpu_slots import SlotRequest, allocate_slots, list_offers
from atoll.deploy.target import DeployError, InstanceState, InstanceStatus, StartOrder
from atoll.deploy.terms import refuse_old_term
from atoll.plan.problem import Offer

_WORST: tuple[InstanceState, ...] = ("failed", "draining", "starting", "ready")
"""Which state of a part is that of the whole, the first before the others."""


class JoinedMachines(Protocol):
    """How machines are found and asked; DeployError where the fabric cannot be reached."""

    def list(self) -> Sequence[JoinedMachine]:
        """Return the machines that are there now, in the order of their names."""
        ...

    def ask(
        self, requests: Mapping[str, MachineRequest]
    ) -> Mapping[str, MachineAnswer | DeployError]:
        """Ask each session its own, all at once; of one that does not answer, or refuses, the error."""
        ...


@dataclass(frozen=True, slots=True)
class _Look:
    """What machines said: their answers by session, and which machine has which session."""

    machines: tuple[JoinedMachine, ...]
    answers: Mapping[str, MachineAnswer]

    def sids(self, handle: str) -> dict[str, StandingPart]:
        """Return the sessions on which parts of an instance stand."""
        return {
            sid: part
            for sid, answer in self.answers.items()
            for part in answer.parts
            if part.handle == handle
        }


class JoinedDeployer:
    """See the module. `drain_s` is how long a draining instance may take to finish its streams."""

    name = "joined"

    def __init__(self, machines: JoinedMachines, *, drain_s: float = 600.0) -> None:
        self._machines, self._drain_s = machines, drain_s

    def offers(self) -> Sequence[Offer]:
        """Return the GPUs of the machines that are there, those in use included."""
        return list_offers([one for machine in self._machines.list() for one in machine.pool])

    def list(self, fleet: str) -> Sequence[InstanceStatus]:
        """Return every instance of a fleet whose machines are all there, in the order of their names."""
        look = self._look(fleet)
        handles = sorted({part.handle for one in look.answers.values() for part in one.parts})
        found = (self._merge(look, handle) for handle in handles)
        return tuple(each for each in found if each is not None)

    def start(self, order: StartOrder) -> InstanceStatus:
        """Start the nodes of an instance on the machines that have room; DeployError says why not."""
        labels = order.labels
        look = self._look(labels.fleet, labels.term)
        known = self._find(look, order)
        if known is not None:
            return known
        parts = self._place(look, order)
        answers = self._machines.ask(
            {
                sid: MachineRequest(verb="start", fleet=labels.fleet, term=labels.term, part=part)
                for sid, part in parts.items()
            }
        )
        failed = [each for each in answers.values() if isinstance(each, DeployError)]
        standing = [
            part
            for each in answers.values()
            if isinstance(each, MachineAnswer)
            for part in each.parts
        ]
        if failed:
            # All of it or nothing: what was started is of no use alone.
            for part in standing:
                self._tell("stop", part.handle, labels.term)
            raise failed[0]
        return _status(standing)

    def drain(self, handle: str, term: int) -> None:
        """Have every node of an instance end when its streams have."""
        self._tell("drain", handle, term)

    def stop(self, handle: str, term: int) -> None:
        """End an instance on all machines that are there, and wait until nothing of it is left there."""
        self._tell("stop", handle, term)

    def logs(self, handle: str, lines: int = 100) -> str:
        """Return the last lines of each node, with its machine's name before them where there are several."""
        look = self._look(_fleet_of(handle))
        parts = look.sids(handle)
        if not parts:
            raise DeployError(
                f"there is no instance {handle} on machines that joined", kind="ended"
            )
        request = MachineRequest(verb="logs", handle=handle, lines=max(1, min(lines, 1000)))
        answers = self._answers(dict.fromkeys(parts, request))
        if len(answers) == 1:
            return next(iter(answers.values())).text
        names = {machine.sid: machine.name for machine in look.machines}
        return "\n".join(f"== {names[sid]}\n{one.text}" for sid, one in sorted(answers.items()))

    def measure(self, name: str) -> None:
        """Have a machine measure itself; DeployError where it is not there or has something to run."""
        found = {machine.name: machine.sid for machine in self._machines.list()}
        if name not in found:
            there = ", ".join(found) or "none"
            raise DeployError(
                f"{name} is not there, or has something to run (free: {there})", kind="unreachable"
            )
        self._answers({found[name]: MachineRequest(verb="measure")})

    # Asking

    def _look(self, fleet: str, term: int | None = None) -> _Look:
        """Ask all machines what stands of a fleet; of a later term than `term` is refused."""
        machines = tuple(self._machines.list())
        request = MachineRequest(verb="look", fleet=fleet)
        answers = self._answers({machine.sid: request for machine in machines})
        if term is not None:
            newest = max((answer.term for answer in answers.values()), default=0)
            refuse_old_term(fleet, term, newest)
        return _Look(machines, answers)

    def _answers(self, requests: Mapping[str, MachineRequest]) -> dict[str, MachineAnswer]:
        found = {}
        for sid, answer in self._machines.ask(requests).items() if requests else ():
            if isinstance(answer, DeployError):
                raise answer
            found[sid] = answer
        return found

    def _tell(self, verb: str, handle: str, term: int) -> None:
        look = self._look(_fleet_of(handle), term)
        request = MachineRequest.parse({"verb": verb, "handle": handle, "term": term})
        self._answers(dict.fromkeys(look.sids(handle), request))

    def _find(self, look: _Look, order: StartOrder) -> InstanceStatus | None:
        """Return an instance that stands already."""
        for answer in look.answers.values():
            for part in answer.parts:
                labels = part.order.labels
                if labels.instance != order.labels.instance:
                    continue
                if labels.placement != order.labels.placement:
                    raise DeployError(
                        f"{labels.instance} stands here with another layout",
                        kind="settings",
                        hint="give every instance a name of its own",
                    )
                merged = self._merge(look, part.handle)
                if merged is not None:
                    return merged
        return None

    def _merge(self, look: _Look, handle: str) -> InstanceStatus | None:
        """Return an instance as its machines see it; None while one of them is not there."""
        parts = look.sids(handle)
        missing = set(next(iter(parts.values())).order.machines) - {
            machine.name for machine in look.machines if machine.sid in parts
        }
        if missing & {machine.name for machine in look.machines}:
            # It is there and has nothing of it: whoever started the others ended halfway.
            status = _status(list(parts.values()))
            if status.state in ("starting", "ready"):
                lacks = f"{min(missing)} has no part of it"
                return replace(status, state="failed", reason=lacks, kind="ended")
            return status
        return None if missing else _status(list(parts.values()))

    # Placing

    def _place(self, look: _Look, order: StartOrder) -> dict[str, PartOrder]:
        """Return which nodes go to which session; DeployError where there is no room."""
        if order.recipe is None:
            raise DeployError(
                f"{order.labels.instance} runs components, which machines that joined do not",
                kind="settings",
                hint="plan it for another target",
            )
        owner = {one.name: machine for machine in look.machines for one in machine.pool}
        usable = [
            one
            for machine in look.machines
            for one in machine.pool
            if not {machine.name, one.name} & set(order.avoid_hosts)
        ]
        hosts = {node.id: node.host for node in order.instance.nodes}
        requests = [
            SlotRequest(each.node, each.node_type, each.gpus, hosts.get(each.node))
            for each in order.commands
        ]
        held = [each for answer in look.answers.values() for each in answer.held]
        given = allocate_slots(usable, held, requests)
        if isinstance(given, SlotRequest):
            there = ", ".join(sorted(machine.name for machine in look.machines)) or "none"
            raise DeployError(
                f"no room for {given.gpus} of {given.node_type} of {order.labels.instance} on machines "
                f"that joined ({there})",
                kind="capacity",
                hint="let one join, or plan with fewer",
            )
        names = tuple(sorted({owner[slots.machine].name for slots in given}))
        nodes: dict[str, list[str]] = {}
        for slots in given:
            nodes.setdefault(owner[slots.machine].sid, []).append(slots.node)
        return {sid: _part(order, ids, names, self._drain_s) for sid, ids in nodes.items()}


def write_part(order: StartOrder) -> str:
    """Return what machines would be told of an instance, as JSON: how long it drains is the controller's."""
    nodes = [each.node for each in order.commands]
    return _part(order, nodes, (), PartOrder.model_fields["drain_s"].default).to_json(indent=2)


def _part(
    order: StartOrder, nodes: Sequence[str], machines: tuple[str, ...], drain_s: float
) -> PartOrder:
    recipe = order.recipe
    if recipe is None:
        raise DeployError(
            f"{order.labels.instance}: machines that joined run no executors, which need a token",
            kind="settings",
            hint="use another target for any-to-any services",
        )
    return PartOrder(
        instance=recipe.instance,
        labels=order.labels,
        weights=recipe.weights,
        launch=recipe.launch,
        weight=recipe.weight,
        nodes=tuple(nodes),
        machines=machines,
        ready_s=order.ready_s,
        drain_s=drain_s,
    )


def _status(parts: Sequence[StandingPart]) -> InstanceStatus:
    """Return the state of an instance from those of its parts."""
    first = parts[0]
    state: InstanceState = next(
        (each for each in _WORST if any(part.state == each for part in parts)), "gone"
    )
    if state in ("starting", "ready") and any(part.state == "gone" for part in parts):
        # One has drained and left: so do the others.
        state = "draining"
    told = next((part for part in parts if part.state == state), first)
    return InstanceStatus(
        first.handle,
        first.order.labels,
        state,
        max(part.since_s for part in parts),
        reason=told.reason,
        kind=told.kind,
        hosts=first.order.machines,
        instance=first.order.instance,
    )


def _fleet_of(handle: str) -> str:
    return unquote(handle.partition("/")[0])
