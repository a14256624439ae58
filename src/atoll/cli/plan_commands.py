"""The commands of a plan for a person to paste: `atoll plan --commands`.

Executors of any-to-any services, and the graph server that sends requests over them, meet in a fabric and
know each other by a token. What the graph server answers for is part of its line.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from atoll.core.errors import AtollError, NoCommandError, UsageError

if TYPE_CHECKING:
    from atoll.catalog.catalog import Catalog
    from atoll.deploy.commands.node_commands import ServiceWeights
    from atoll.plan.plan import Instance, Plan
    from atoll.runtime.task_fleet.parts import ServedParts

_FIRST_PORT = 8000
EXECUTORS_FILE = "executors.token"
"""Where executors and their graph server look for the token that they know each other by."""
_GRAPH_FILE = "graph.json"


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
    plan: Plan,
    catalog: Catalog,
    given: Mapping[str, ServedParts] = MappingProxyType({}),
    *,
    stand_in: bool = False,
    executors: str | None = None,
) -> tuple[InstanceCommands, ...]:
    """Return the commands of a plan's instances, with the weights that it names, or else the catalog.

    `given` are components for the parts of any-to-any services, by service; small ones stand for others
    where `stand_in` is on. Their graph server comes last. `executors` is an engine, by name, whose server is
    all executors of such a service.
    """
    from atoll.deploy.commands.paste import paste_lines

    weights, found = _weights(plan, catalog), list[InstanceCommands]()
    parts: dict[str, ServedParts] = {}
    if executors is not None:
        found += _whole_services(plan, catalog, weights, executors)
    for number, one in enumerate(plan.instances):
        if one.is_executor:
            if executors is not None:
                continue
            try:
                for name in one.services:
                    parts[name] = _parts_of(plan, name, catalog, given, stand_in=stand_in)
                found.append(_executor(plan, one, parts, _FIRST_PORT + number))
            except AtollError as error:
                found.append(InstanceCommands(one.id, (), (), str(error)))
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
    if parts:
        found.append(_graph_server(plan, parts, _FIRST_PORT + len(plan.instances)))
    return tuple(found)


def _whole_services(
    plan: Plan, catalog: Catalog, weights: Mapping[str, ServiceWeights], engine: str
) -> list[InstanceCommands]:
    """Return the command of each any-to-any service, all executors of which are one server."""
    from atoll.deploy.commands.omni_line import omni_line
    from atoll.engines.table import find_executor_engine

    find_executor_engine(engine, field="executors")
    found: list[InstanceCommands] = []
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


def _parts_of(
    plan: Plan,
    service: str,
    catalog: Catalog,
    given: Mapping[str, ServedParts],
    *,
    stand_in: bool,
) -> ServedParts:
    """Return what runs the parts of an any-to-any service."""
    from atoll.runtime.task_fleet.parts import choose_parts

    model = plan.models.get(service)
    if model is None:
        raise UsageError(f"the plan does not say which model {service} is")
    return choose_parts(service, catalog.model(model), given, stand_in=stand_in)


def _executor(
    plan: Plan, one: Instance, parts: Mapping[str, ServedParts], port: int
) -> InstanceCommands:
    from atoll.deploy.commands.node_commands import CommandSettings, executor_command
    from atoll.deploy.commands.paste import format_line
    from atoll.runtime.endpoints.devices import assign_devices

    settings = CommandSettings(executors=EXECUTORS_FILE)
    command = executor_command(one, parts, settings, fleet=plan.problem_name)
    machine = assign_devices(one, one.nodes[0]).machine
    return InstanceCommands(one.id, (machine,), (format_line(command, one, port),))


def _graph_server(plan: Plan, parts: Mapping[str, ServedParts], port: int) -> InstanceCommands:
    """Return the line that writes what a plan's graph server answers for, and starts it."""
    from atoll.control.operation.graph_entrance import NAMES, make_graph_config
    from atoll.deploy.commands.paste import FABRIC_FILE
    from atoll.runtime.task_fleet.deployment import services_over

    config = make_graph_config(services_over(parts, plan.paths), EXECUTORS_FILE)
    words = [
        *("python3", "-m", "atoll.deploy.commands.graph_node", "--fleet", plan.problem_name),
        *("--name", NAMES[0]),
        *("--config", _GRAPH_FILE, "--port", str(port)),
    ]
    line = (
        f"printf %s {shlex.quote(config.to_json())} > {_GRAPH_FILE} && "
        f"ATOLL_FABRIC=@{FABRIC_FILE} {shlex.join(words)}"
    )
    return InstanceCommands(NAMES[0], ("any",), (line,))


def refuse_missing(commands: Sequence[InstanceCommands]) -> NoCommandError | None:
    """Return an error that names the instances without a command; None where all have one."""
    missing = [each for each in commands if each.refusal is not None]
    if not missing:
        return None
    names = ", ".join(each.instance for each in missing)
    return NoCommandError(
        f"no command for {names}, as told above",
        hint="plan with engines that run it, as --engines vllm; components for parts are named by --parts",
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
    if any(EXECUTORS_FILE in line for each in commands for line in each.lines):
        note(
            f"note: executors and graph server meet there, too, and each has the same token of 16 characters "
            f"or more in {EXECUTORS_FILE}"
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
