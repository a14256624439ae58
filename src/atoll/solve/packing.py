"""Which GPUs of which machine each slice gets.

The sizes a machine may be cut into divide each other, so slices laid down by falling size at multiples of
their size leave no hole that a later one could have used: they fit whenever their GPUs add up to no more
than the machines have. Slices of running instances stay where they are. The holes they leave may make a
machine more necessary than the sum says. Where that one is not there, is not within the limits, or costs more
than to start anew what stands in the way, running slices of the offer move together until the sum is enough.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from atoll.core.errors import InternalError
from atoll.plan.plan import Instance, Node, OfferKey, count_machines
from atoll.plan.problem import Offer, Problem
from atoll.plan.validate.violation import exceeds


class _Place(NamedTuple):
    """Which machine, counted from 0, and which of its GPUs."""

    slot: int
    gpu_ids: tuple[int, ...]


@dataclass(frozen=True)
class _Slice:
    """A node that is part of a machine, where it runs now if it does, and which machine it should be of."""

    owner: tuple[str, str]
    size: int
    held: _Place | None
    wanted: int | None = None


_Places = dict[tuple[str, str], _Place]
"""By instance and node."""


def pack(problem: Problem, instances: Iterable[Instance]) -> tuple[Instance, ...]:
    """Return the instances with a slot and GPUs for every slice, in the order given.

    Nodes that are whole machines, or machines of a fixed cluster, are left as they are.
    """
    standing = tuple(instances)
    best = _lay_out(problem, standing, frozenset())
    if best is None and problem.limits.survival.machines:
        # Slices that are spread may leave no gap for a larger one: then they are packed like any others.
        standing = tuple(_anywhere(instance) for instance in standing)
        best = _lay_out(problem, standing, frozenset())
    # Where nothing runs there is nothing to move.
    running = {
        (instance.region_of(node), node.node_type, node.market)
        for instance in standing
        for node in instance.nodes
        if instance.kept and node.host is None and node.gpu_ids is not None
    }
    moving: frozenset[OfferKey] = frozenset()
    # One offer after the other, then all of them: several may be short, or over the limits only together.
    for more in [*(frozenset({key}) for key in sorted(running)), frozenset(running)]:
        packed = _lay_out(problem, standing, moving | more)
        if _rank(problem, packed) < _rank(problem, best):
            best, moving = packed, moving | more
    if best is None:
        raise InternalError(f"{problem.name}: slices need more machines than are on offer")
    return best


def _anywhere(instance: Instance) -> Instance:
    """The instance with slices of any machine, unless it runs."""
    if instance.kept:
        return instance
    nodes = tuple(node.model_copy(update={"slot": None}) for node in instance.nodes)
    return instance.model_copy(update={"nodes": nodes})


def _rank(problem: Problem, packed: Sequence[Instance] | None) -> tuple[bool, bool, float]:
    """Less is better: laid out at all, within the limits, and what rent and new starts cost together.

    Costs are rounded, so that among equals the one found first is taken.
    """
    if packed is None:
        return (True, True, 0.0)
    fresh = sum(instance.usd_per_hour for instance in packed if not instance.kept)
    usd = rent(problem, packed) + problem.settings.init_penalty * fresh
    return (False, not _within_limits(problem, packed), round(usd, 9))


def rent(problem: Problem, instances: Iterable[Instance]) -> float:
    """Return what the machines of the instances cost per hour; a cut one is paid whole, and once."""
    total = 0.0
    for key, count in sorted(count_machines(instances).items()):
        total += count * find_offer(problem, key).usd_per_hour
    return total


def find_offer(problem: Problem, key: OfferKey) -> Offer:
    """Return the offer of these machines; that there is none is a fault of the solver."""
    offer = problem.offer(*key)
    if offer is None:
        region, node_type, market = key
        raise InternalError(f"{node_type} ({market}) is not on offer in {region}")
    return offer


def _within_limits(problem: Problem, instances: Sequence[Instance]) -> bool:
    budget, max_nodes = problem.limits.budget_usd_per_hour, problem.limits.max_nodes
    if budget is not None and exceeds(rent(problem, instances), budget):
        return False
    return max_nodes is None or count_machines(instances).total() <= max_nodes


def _lay_out(
    problem: Problem, instances: Sequence[Instance], moving: frozenset[OfferKey]
) -> tuple[Instance, ...] | None:
    """Give every slice its place, None where there are too few machines.

    Slices of running instances may be moved on the machines of the offers `moving`.
    """
    slices: dict[OfferKey, list[_Slice]] = {}
    whole: Counter[OfferKey] = Counter()
    for instance in instances:
        for node in instance.nodes:
            key = (instance.region_of(node), node.node_type, node.market)
            if node.host is None and node.gpu_ids is None:
                whole[key] += 1
            elif node.host is None and node.gpu_ids is not None:
                held = instance.kept and node.slot is not None
                place = _Place(node.slot or 0, node.gpu_ids) if held else None
                # Slices that share a machine are lost together: where that counts they stay apart.
                apart = problem.limits.survival.machines > 0 and not instance.kept
                own = _Slice((instance.id, node.id), node.gpus, place, node.slot if apart else None)
                slices.setdefault(key, []).append(own)
    places: _Places = {}
    moved: set[str] = set()
    for key, group in sorted(slices.items()):
        offer = find_offer(problem, key)
        renamed = _rename(group, offer)
        lay = _move_together if key in moving else _stay
        found = lay(renamed, offer, offer.available - whole[key])
        if found is None:
            return None
        places |= found
        moved |= {s.owner[0] for s in renamed if s.held and s.held != found[s.owner]}
    return tuple(_in_place(instance, places, instance.id in moved) for instance in instances)


def _in_place(instance: Instance, places: _Places, moved: bool) -> Instance:
    """Return the instance on its GPUs; one that moved is not kept."""
    nodes: list[Node] = []
    for node in instance.nodes:
        place = places.get((instance.id, node.id))
        nodes.append(node if place is None else node.model_copy(update=place._asdict()))
    return instance.model_copy(update={"nodes": tuple(nodes), "kept": instance.kept and not moved})


def _rename(slices: Sequence[_Slice], offer: Offer) -> list[_Slice]:
    """Give machines whose number is not below what is available another one; they stay the same machines."""
    used = sorted({s.held.slot for s in slices if s.held is not None})
    names = {slot: slot for slot in used if slot < offer.available}
    for slot in used[len(names) :]:
        names[slot] = next(n for n in range(len(used)) if n not in names.values())
    return [
        _Slice(s.owner, s.size, s.held and _Place(names[s.held.slot], s.held.gpu_ids), s.wanted)
        for s in slices
    ]


def _stay(slices: Sequence[_Slice], offer: Offer, room: int) -> _Places | None:
    """Leave running slices where they are, and lay the others into the first gaps."""
    machines = _Machines(offer, room)
    places: _Places = {}
    # Running slices first: what is new must not take the GPUs that they stand on.
    for own in sorted(slices, key=lambda s: (-s.size, s.owner)):
        if own.held is not None and machines.take(own.held):
            places[own.owner] = own.held
    for own in sorted(slices, key=lambda s: (-s.size, s.owner)):
        if own.owner not in places:
            place = machines.find(own.size, own.wanted)
            if place is None or not machines.take(place):
                return None
            places[own.owner] = place
    # Running slices may stand on more machines than there are now.
    return None if len(machines.free) > room else places


def _move_together(slices: Sequence[_Slice], offer: Offer, room: int) -> _Places | None:
    """Use as few machines as the sum allows: those that run most, where what can stay stays."""
    needed = -(-sum(s.size for s in slices) // offer.gpus)
    if needed > room:
        return None
    running: Counter[int] = Counter()
    for own in slices:
        if own.held is not None:
            running[own.held.slot] += own.size
    # Machines on which most runs are kept, so that least moves.
    order = sorted(range(offer.available), key=lambda slot: (-running[slot], slot))
    machines = _Machines(offer, needed)
    for slot in order[:needed]:
        machines.free[slot] = set(range(offer.gpus))
    places: _Places = {}
    # Of equal size, running ones choose first: they may stay.
    for own in sorted(slices, key=lambda s: (-s.size, s.held is None, s.owner)):
        held = own.held
        # Where it is not aligned it leaves gaps that no block fits into, and moves.
        aligned = held is not None and held.gpu_ids == _block(held.gpu_ids[0], own.size)
        if held is not None and aligned and held.slot in machines.free and machines.take(held):
            places[own.owner] = held
            continue
        place = machines.find(own.size)
        if place is None or not machines.take(place):
            return None
        places[own.owner] = place
    return places


def _block(first: int, size: int) -> tuple[int, ...]:
    """Return the GPUs of the aligned block that the GPU `first` is in."""
    start = first - first % size
    return tuple(range(start, start + size))


class _Machines:
    """The machines of an offer that are cut, and which of their GPUs are free."""

    def __init__(self, offer: Offer, room: int) -> None:
        self.offer = offer
        self.room = room
        """How many may be cut."""
        self.free: dict[int, set[int]] = {}

    def take(self, place: _Place) -> bool:
        """Take these GPUs, opening the machine if need be; False where they are not free."""
        whole = set(range(self.offer.gpus))
        free = self.free.get(place.slot, whole)
        if not free.issuperset(place.gpu_ids) or not 0 <= place.slot < self.offer.available:
            return False
        self.free[place.slot] = free - set(place.gpu_ids)
        return True

    def find(self, size: int, wanted: int | None = None) -> _Place | None:
        """Return the first aligned gap of the open machines, or of one more, None if there is none.

        Of the machine that is `wanted`, where it has one.
        """
        if wanted is not None and wanted not in self.free and len(self.free) < self.room:
            return _Place(wanted, _block(0, size))
        for slot in sorted(self.free, key=lambda slot: (slot != wanted, slot)):
            for start in range(0, self.offer.gpus - size + 1, size):
                block = _block(start, size)
                if self.free[slot].issuperset(block):
                    return _Place(slot, block)
        if len(self.free) >= self.room:
            return None
        unused = [n for n in range(self.offer.available) if n not in self.free]
        return _Place(unused[0], _block(0, size)) if unused else None
