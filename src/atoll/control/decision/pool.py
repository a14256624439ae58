"""Which machines are taken and which are free: by offer, by host, and GPU by GPU where machines are cut."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from atoll.plan.plan import Instance, OfferKey, count_machines
from atoll.plan.problem import Offer

Machine = tuple[OfferKey, str | int]
"""A machine that can be told from others: by its host's name, or by its slot among those that are cut."""


class MachinePool:
    """What is on offer, less what instances hold."""

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
