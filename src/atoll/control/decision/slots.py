"""Which of the machines that are cut an instance gets: a replacement does not wait for what it replaces.

Every plan numbers the machines that it cuts from 0, and what still stands may hold the same numbers. Numbers
are only names for "the same machine": a target gives what is free. So what does not stand yet moves to other
numbers where its own are held and there is room elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from atoll.control.decision.pool import MachinePool
from atoll.plan.plan import Instance, Node, Plan
from atoll.plan.problem import Offer


def move_slots(plan: Plan, holding: Mapping[str, Instance], offers: Iterable[Offer]) -> Plan:
    """Return a plan whose instances that do not stand yet are where there is room, as far as there is any.

    `holding` are those that hold machines, by name, wanted or not.
    """
    missing = [
        one for one in plan.instances if one.id not in holding and any(map(_is_cut, one.nodes))
    ]
    if not missing:
        return plan
    pool = MachinePool(offers, holding.values())
    used = {node.slot for one in holding.values() for node in one.nodes if _is_cut(node)}
    used |= {node.slot for one in missing for node in one.nodes if _is_cut(node)}
    slots = sorted(slot for slot in used if slot is not None)
    moved: dict[str, Instance] = {}
    for one in sorted(missing, key=lambda one: one.id):
        found = next((each for each in _list_places(one, slots) if pool.has_room(each)), None)
        if found is None:
            continue
        pool.take(found)
        slots = sorted({*slots, *(n.slot for n in found.nodes if n.slot is not None)})
        if found is not one:
            moved[one.id] = found
    if not moved:
        return plan
    instances = tuple(moved.get(one.id, one) for one in plan.instances)
    return plan.model_copy(update={"instances": instances})


def _is_cut(node: Node) -> bool:
    """Whether a node is a part of a machine that has only a number."""
    return node.slot is not None and node.gpu_ids is not None and node.host is None


def _list_places(one: Instance, slots: list[int]) -> Iterator[Instance]:
    """Yield an instance as it is, then beside what stands on cut machines, then on machines of its own."""
    yield one
    own = sorted({node.slot for node in one.nodes if _is_cut(node) and node.slot is not None})
    if len(own) == 1:
        for slot in slots:
            if slot != own[0]:
                yield _put(one, {own[0]: slot})
    fresh = (slots[-1] if slots else -1) + 1
    yield _put(one, {slot: fresh + at for at, slot in enumerate(own)})


def _put(one: Instance, slots: Mapping[int, int]) -> Instance:
    nodes = tuple(
        node.model_copy(update={"slot": slots[node.slot]})
        if _is_cut(node) and node.slot is not None
        else node
        for node in one.nodes
    )
    return one.model_copy(update={"nodes": nodes})
