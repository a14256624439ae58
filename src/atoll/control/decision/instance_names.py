"""Names of instances in a fleet, which are never used again.

A planner numbers instances anew in every plan. In the fleet a name ends in when it was first wanted, so that
a late message about an earlier instance, or a target that still lists one, never means another.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Iterable, Mapping

from atoll.plan.plan import Instance, Plan, RequestPath, Route

_STAMP = re.compile(r"-t[0-9a-z]{4,}$")
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


def stamp_name(name: str, time_s: float, taken: Collection[str]) -> str:
    """Return a name that nothing has: its own, without an earlier stamp, and the time in milliseconds."""
    base, stamp = _STAMP.sub("", name), _base36(max(0, round(time_s * 1000.0)))
    stamped, number = f"{base}-t{stamp}", 1
    while stamped in taken:
        stamped = f"{base}-{number}-t{stamp}"
        number += 1
    return stamped


def _base36(number: int) -> str:
    digits = ""
    while number:
        number, digit = divmod(number, 36)
        digits = _DIGITS[digit] + digits
    return digits.rjust(4, "0")


def name_instances(
    plan: Plan,
    running: Mapping[str, Instance],
    time_s: float,
    taken: Iterable[str],
    awaited: Mapping[str, Instance] | None = None,
) -> Plan:
    """Return a plan in the names of the fleet: what runs keeps its name, what is new gets one.

    What runs is known by its name and place, then by its place alone: region, machines, layers and GPUs.
    What is `awaited`, and was never started, keeps its name where nothing that runs is there.
    """
    awaited = awaited or {}
    left = {**awaited, **running}
    names: dict[str, str] = {}
    for one in plan.instances:
        if one.id in left and _place(left[one.id]) == _place(one):
            names[one.id] = one.id
            del left[one.id]
    by_place: dict[object, list[str]] = {}
    if len(names) < len(plan.instances):
        for name in sorted(left, key=lambda each: (each not in running, each), reverse=True):
            by_place.setdefault(_place(left[name]), []).append(name)
    used = {*taken, *names.values()}
    for one in plan.instances:
        if one.id not in names:
            same = by_place.get(_place(one))
            names[one.id] = same.pop() if same else stamp_name(one.id, time_s, used)
            used.add(names[one.id])
    return rename(plan, lambda one: names[one.id])


def rename(plan: Plan, name_of: Callable[[Instance], str]) -> Plan:
    """Return a plan with other names of its instances, in its routes too."""
    names = {one.id: name_of(one) for one in plan.instances}
    if all(old == new for old, new in names.items()):
        return plan
    instances = [
        one if names[one.id] == one.id else one.model_copy(update={"id": names[one.id]})
        for one in plan.instances
    ]
    return plan.model_copy(
        update={
            "instances": tuple(sorted(instances, key=lambda one: one.id)),
            "routes": _rename_routes(plan.routes, names),
            "paths": tuple(_rename_path(path, names) for path in plan.paths),
            "after_loss": tuple(
                loss.model_copy(
                    update={
                        "instances": tuple(sorted(names.get(n, n) for n in loss.instances)),
                        "routes": _rename_routes(loss.routes, names),
                    }
                )
                for loss in plan.after_loss
            ),
        }
    )


def _rename_path(path: RequestPath, names: Mapping[str, str]) -> RequestPath:
    steps = tuple(
        step.model_copy(
            update={"instances": {names.get(n, n): w for n, w in step.instances.items()}}
        )
        for step in path.steps
    )
    return path.model_copy(update={"steps": steps})


def _rename_routes(routes: Iterable[Route], names: Mapping[str, str]) -> tuple[Route, ...]:
    renamed = [
        route.model_copy(update={"instances": tuple(names.get(n, n) for n in route.instances)})
        for route in routes
    ]
    return tuple(sorted(renamed, key=lambda one: (one.service, one.instances)))


def hash_place(instance: Instance) -> str:
    """Return the hash of where and how an instance stands, for its labels."""
    return hashlib.sha256(repr(_place(instance)).encode()).hexdigest()[:16]


def _place(instance: Instance) -> object:
    """Return the placement of an instance, with the GPUs it has of cut machines."""
    cut = sorted(
        (node.node_type, node.host or "", node.slot or 0, node.gpu_ids)
        for node in instance.nodes
        if node.gpu_ids is not None
    )
    return (instance.placement_key, tuple(cut))
