"""The commands of a plan as lines that a person can paste into a terminal, one for each instance.

An instance over several machines has a line for each of them.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace

from atoll.deploy.commands.node_commands import CommandSettings, ServiceWeights, plan_commands
from atoll.deploy.node_command import NodeCommand
from atoll.plan.plan import Instance, Plan
from atoll.runtime.endpoints.devices import VISIBLE, assign_devices, visible_gpus

_PORT = "{port}"
_FIRST_PORT = 8000
FABRIC_FILE = "fabric.token"
"""Where lines of an instance over several machines look for the token of the fabric they meet in."""


@dataclass(frozen=True, slots=True)
class PasteLine:
    """A line, the machine it is for, and what it brings up there."""

    instance: str
    node: str
    machine: str
    line: str


def paste_lines(
    plan: Plan,
    weights: Mapping[str, ServiceWeights],
    settings: CommandSettings | None = None,
    *,
    first_port: int = _FIRST_PORT,
    only: str | None = None,
) -> tuple[PasteLine, ...]:
    """Return the lines of a plan, instances in order, or of one of them only.

    Without a fabric an engine listens on a port of its own, counted from `first_port`; with one it joins, and
    the port is chosen where it starts. A slice of a machine sees its GPUs only.
    """
    chosen = settings or CommandSettings()
    by_id = {instance.id: instance for instance in plan.instances}
    lines = []
    for number, (name, commands) in enumerate(plan_commands(plan, weights, chosen, only).items()):
        port = None if chosen.fabric is not None else first_port + number
        for command in commands:
            instance = by_id[name]
            node = next(node for node in instance.nodes if node.id == command.node)
            machine = assign_devices(instance, node).machine
            lines.append(
                PasteLine(name, command.node, machine, format_line(command, instance, port))
            )
    return tuple(lines)


def format_line(command: NodeCommand, instance: Instance, port: int | None) -> str:
    """Return a command as one line of a shell: what is set, then the words, each quoted if it must be.

    Secrets are named by their files, never shown.
    """
    own = [node for node in instance.nodes if node.id == command.node]
    nodes = instance.nodes if command.gpus > own[0].gpus else own
    fabric = dict(command.secrets).get("ATOLL_FABRIC")
    shown = replace(command, secrets=tuple(s for s in command.secrets if s[0] != "ATOLL_FABRIC"))
    environment = visible_gpus(nodes) | dict(shown.env) | dict(shown.secrets)
    words = list(command.argv)
    if fabric is None and "--meeting" in words:
        fabric = FABRIC_FILE
    if fabric is not None:
        words = _name_fabric(words, fabric, environment)
    if port is not None:
        words = [word.replace(_PORT, str(port)) for word in words]
    first = sorted(environment, key=lambda name: (name != VISIBLE, name))
    assignments = [f"{name}={shlex.quote(environment[name])}" for name in first]
    return " ".join([*assignments, shlex.join(words)])


def _name_fabric(words: list[str], fabric: str, environment: dict[str, str]) -> list[str]:
    """Name the token's file where a reader looks for it; a node that only meets others reads the variable."""
    if "join" not in words or "--meeting" in words:
        environment["ATOLL_FABRIC"] = f"@{fabric}"
        return words
    at = words.index("join") + 1
    return [*words[:at], "--fabric", f"@{fabric}", *words[at:]]
