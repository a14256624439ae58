"""Machines on offer: taken and free ones, by offer, by host, and GPU by GPU where they are cut.

Every plan numbers the machines that it cuts from 0, and what still stands may hold the same numbers. Numbers
only say "the same machine": a target gives what is free. So `move_slots` gives what does not stand yet other
numbers where its own are held, and a replacement does not wait for what it replaces.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from atoll.plan.plan import Instance, Node, OfferKey, Plan, count_machines
from atoll.plan.problem import Offer

Machine = tuple[OfferKey, str | int]
"""A machine that can be told from others: by its host's name, or by its slot among those that are cut."""


class MachinePool:
    """Machines on offer, less those that instances hold."""

    def __init__(self, offers: Iterable[Offer], holding: Iterable[Instance] = ()) -> None:
        self._free: Counter[OfferKey] = Counter({offer.key: offer.available for offer in offers})
        self._cut: dict[Machine, Counter[int]] = {}
        self._whole: Counter[Machine] = Counter()
        for instance in holding:
            self.take(instance)

    def take(self, instance: Instance) -> None:
        """Hold the machines of an instance."""
        for node in instance.nodes:
            key: OfferKey = (instance.region_of(node), node.node_type, node.market)
            name = node.slot if node.host is None else node.host
            if name is None or node.gpu_ids is None:
                self._free[key] -= 1
                if node.host is not None:
                    self._whole[key, node.host] += 1
                continue
            cut = self._cut.get((key, name))
            if cut is None:
                # The first part takes the whole machine from what is free.
                cut = self._cut[key, name] = Counter()
                self._free[key] -= 1
            cut.update(node.gpu_ids)

    def give_back(self, instance: Instance) -> None:
        """Free the machines of an instance; a cut one once nobody has any of it."""
        for node in instance.nodes:
            key: OfferKey = (instance.region_of(node), node.node_type, node.market)
            name = node.slot if node.host is None else node.host
            if name is None or node.gpu_ids is None:
                self._free[key] += 1
                if node.host is not None:
                    self._whole[key, node.host] -= 1
                continue
            cut = self._cut[key, name]
            cut.subtract(node.gpu_ids)
            # A plus drops what is 0: nobody has any of it.
            if not +cut:
                del self._cut[key, name]
                self._free[key] += 1

    def has_room(self, instance: Instance) -> bool:
        """Return whether the machines of an instance are free."""
        needs: Counter[OfferKey] = Counter()
        opened: set[Machine] = set()
        for node in instance.nodes:
            key: OfferKey = (instance.region_of(node), node.node_type, node.market)
            name = node.slot if node.host is None else node.host
            if name is None or node.gpu_ids is None:
                needs[key] += 1
                if node.host is not None and (
                    self._whole[key, node.host] > 0 or (key, node.host) in self._cut
                ):
                    return False
                continue
            machine = (key, name)
            cut = self._cut.get(machine)
            if cut is None:
                if self._whole[machine] > 0:
                    return False
                # Several parts of this instance may stand on one machine, which is needed once.
                if machine not in opened:
                    opened.add(machine)
                    needs[key] += 1
            elif any(cut[gpu] > 0 for gpu in node.gpu_ids):
                return False
        return all(count <= self._free[key] for key, count in needs.items())


def rent_of(offers: Iterable[Offer], instances: Iterable[Instance]) -> float:
    """Return dollars per hour of the machines of instances at these prices; cut ones are paid whole, once.

    What is on offer no more costs what its instance did when it was planned, whole machines of it.
    """
    prices = {offer.key: offer.usd_per_hour for offer in offers}
    found = list(instances)
    total = 0.0
    unknown: set[OfferKey] = set()
    for key, count in sorted(count_machines(found).items()):
        if key in prices:
            total += count * prices[key]
        else:
            unknown.add(key)
    if unknown:
        for instance in found:
            nodes = instance.nodes
            lost = sum((instance.region_of(n), n.node_type, n.market) in unknown for n in nodes)
            total += instance.usd_per_hour * lost / len(nodes)
    return total


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
        # Those that come next may stand beside it.
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
