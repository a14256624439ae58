"""The commands of a plan for a person to paste: `atoll plan --commands`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from atoll.core.errors import AtollError, NoCommandError

if TYPE_CHECKING:
    from atoll.catalog.catalog import Catalog
    from atoll.deploy.commands.node_commands import ServiceWeights
    from atoll.plan.plan import Plan

_FIRST_PORT = 8000


@dataclass(frozen=True, slots=True)
class InstanceCommands:
    """Lines to paste for an instance, one for each of its machines; `refusal` where there are none."""

    instance: str
    machines: tuple[str, ...]
    lines: tuple[str, ...]
    refusal: str | None = None

    def shown(self) -> tuple[str, ...]:
        """Return the lines; where there are several, each says for which machine it is."""
        if len(self.lines) <= 1:
            return self.lines
        named = zip(self.lines, self.machines, strict=True)
        return tuple(f"{line}  # {self.instance} on {machine}" for line, machine in named)


def write_commands(
    plan: Plan, catalog: Catalog, executors: str | None = None
) -> tuple[InstanceCommands, ...]:
    """Return the commands of a plan's instances, with the weights that it names, or else the catalog.

    `executors` is an engine that is all executors of an any-to-any service, by name.
    """
    from atoll.deploy.commands.paste import paste_lines

    weights, found = _weights(plan, catalog), list[InstanceCommands]()
    if executors is not None:
        found += _whole_services(plan, catalog, weights, executors)
    for number, one in enumerate(plan.instances):
        if one.is_executor and executors is not None:
            continue
        if one.service not in weights:
            model = plan.models.get(one.service)
            reason = f"the plan does not say which model {one.service} is"
            if model is not None:
                own = f"`atoll up --model {one.service}=SOURCE` takes yours"
                reason = f"no weights of {model} are known; {own}"
            found.append(InstanceCommands(one.id, (), (), reason))
            continue
        try:
            lines = paste_lines(plan, weights, first_port=_FIRST_PORT + number, only=one.id)
        except AtollError as error:
            found.append(InstanceCommands(one.id, (), (), str(error)))
            continue
        machines = tuple(line.machine for line in lines)
        found.append(InstanceCommands(one.id, machines, tuple(line.line for line in lines)))
    return tuple(found)


def _whole_services(
    plan: Plan, catalog: Catalog, weights: Mapping[str, ServiceWeights], engine: str
) -> list[InstanceCommands]:
    """Return the command of each any-to-any service, all executors of which are one server."""
    from atoll.deploy.commands.omni_line import omni_line
    from atoll.engines.table import find_executor_engine

    find_executor_engine(engine, field="executors")
    found = []
    for service in dict.fromkeys(one.service for one in plan.executor_instances):
        # Behind the ports of instances, which are counted from the first.
        port = _FIRST_PORT + len(plan.instances) + len(found)
        source = weights[service].source if service in weights else f"./{service}"
        try:
            machine, line = omni_line(plan, service, source, catalog, port)
            found.append(InstanceCommands(service, (machine,), (line,)))
        except AtollError as error:
            found.append(InstanceCommands(service, (), (), str(error)))
    return found


def refuse_missing(commands: Sequence[InstanceCommands]) -> NoCommandError | None:
    """Return an error that names the instances without a command; None where all have one."""
    missing = [each for each in commands if each.refusal is not None]
    if not missing:
        return None
    names = ", ".join(each.instance for each in missing)
    return NoCommandError(
        f"no command for {names}, as told above",
        hint="plan with engines that run it, as --engines vllm",
    )


def show_commands(commands: Sequence[InstanceCommands]) -> list[str]:
    """Return all lines in order; what cannot be pasted is told on stderr."""
    from atoll.deploy.commands.paste import FABRIC_FILE
    from atoll.report.terminal import note

    for each in commands:
        if each.refusal is not None:
            note(f"no command for {each.instance}: {each.refusal}")
    if any(f"@{FABRIC_FILE}" in line for each in commands for line in each.lines):
        note(
            f"note: several machines of an instance meet in a fabric; its token is read from {FABRIC_FILE}"
        )
    return [line for each in commands for line in each.shown()]


def _weights(plan: Plan, catalog: Catalog) -> dict[str, ServiceWeights]:
    """Return the weights of services: the plan's, else those that the catalog knows, else a folder to put in.

    A service is left out if no weights of its model are known in its precision.
    """
    from atoll.deploy.commands.node_commands import ServiceWeights
    from atoll.runtime.local.weights import list_needed

    found = {}
    for each in list_needed(plan.models, plan.models, catalog, plan):
        known, spec = each.checkpoint, each.spec
        if known is not None:
            found[each.service] = ServiceWeights(
                known.source,
                (each.service,),
                quantization=known.quantization,
                gguf=each.gguf,
            )
        elif spec is None or spec.precision is None:
            found[each.service] = ServiceWeights(f"./{each.service}", (each.service,))
    return found
