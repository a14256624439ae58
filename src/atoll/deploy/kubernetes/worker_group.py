"""An instance of several nodes as one LeaderWorkerSet: its pods come, restart and go together.

Where a cluster has the API `leaderworkerset.x-k8s.io/v1`. All workers share one template, so they must want
the same machines; what differs in their commands is chosen by the index that each of them is given.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from atoll.deploy.target import StartOrder

Manifest = dict[str, Any]

API = "leaderworkerset.x-k8s.io/v1"
KIND = "LeaderWorkerSet"
LAYOUT, GROUP = "layout", "group"
"""What an instance's ConfigMap says of it where it is a group."""
INDEX = "LWS_WORKER_INDEX"
"""Variable in which the cluster gives a pod its place; the leader is 0."""


def why_no_group(order: StartOrder) -> str | None:
    """Return why an instance cannot be a group, None where it can."""
    planned = {node.id: node for node in order.instance.nodes}
    wants = set()
    for command in order.commands[1:]:
        node = planned.get(command.node)
        if node is not None and node.host is not None:
            return f"{command.node} is planned on {node.host}, and workers of a group are alike"
        place = None if node is None else (order.instance.region_of(node), node.market)
        variables = (*(name for name, _ in command.env), *(name for name, _ in command.secrets))
        listens = any("{port}" in word for word in command.argv)
        wants.add((command.node_type, command.gpus, place, tuple(sorted(variables)), listens))
    if len(wants) > 1:
        return "its nodes after the first want different machines, and workers of a group are alike"
    return None


def render_group(head: Manifest, templates: tuple[Manifest, Manifest], size: int) -> Manifest:
    """Return the set of an instance from what every object of it has and the pods of leader and workers."""
    leader, worker = templates
    return {
        **head,
        "spec": {
            "replicas": 1,
            # All at once: none of them is ready before the others are there.
            "startupPolicy": "LeaderCreated",
            "leaderWorkerTemplate": {
                "size": size,
                "restartPolicy": "RecreateGroupOnPodRestart",
                "leaderTemplate": leader,
                "workerTemplate": worker,
            },
        },
    }


def choose_by_index(order: StartOrder) -> list[str] | None:
    """Return the command that runs each worker's own, None where all workers run the same."""
    first, *others = order.commands[1:]
    if all((each.argv, each.env) == (first.argv, first.env) for each in others):
        return None
    cases = []
    for index, command in enumerate(order.commands[1:], start=1):
        exports = "".join(f"export {name}={shlex.quote(value)}; " for name, value in command.env)
        words = " ".join(shlex.quote(word) for word in command.argv)
        # The port is left to a variable, out of the quotes; `$(` would be a variable of Kubernetes.
        words = words.replace("{port}", "'\"$ATOLL_PORT\"'")
        cases.append(f"{index}) {exports}exec {words} ;;".replace("$(", "$$("))
    script = "\n".join([f'case "${INDEX}" in', *cases, "esac", "exit 64"])
    return ["/bin/sh", "-c", script]


def is_group(anchor: Mapping[str, Any]) -> bool:
    """Return whether the instance of a ConfigMap is a group."""
    return bool((anchor.get("data") or {}).get(LAYOUT) == GROUP)


def name_pod(name: str, index: int, *, group: bool) -> str:
    """Return what the pod of an instance's node is called."""
    if not group:
        return f"{name}-{index}-0"
    return f"{name}-0-{index}" if index else f"{name}-0"
