"""The GPUs of this machine, cut into machines as plans see them, and who holds which.

Deciding only: what is held comes in, what a new instance gets goes out. No GPU is given twice, but in equal
shares to those that ask for a share, and an instance gets all that it asks for or nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from atoll.core.frozen import Frozen
from atoll.core.ids import format_node_type, parse_node_type
from atoll.runtime.endpoints.devices import show_gpus

if TYPE_CHECKING:
    from atoll.plan.problem import Offer


class PoolMachine(Frozen):
    """A machine of a plan that stands here: all GPUs of one kind, or a share of the cores.

    `gpu_ids` are its GPUs as the driver counts them; None is a machine without GPUs of its own, whose slots
    are only counted.
    """

    name: str
    node_type: str
    region: str = "local"
    gpu_ids: tuple[int, ...] | None = None
    usd_per_hour: float = 0.0

    @property
    def slots(self) -> int:
        """How many GPUs it has."""
        return parse_node_type(self.node_type).gpu_count


class HeldSlots(Frozen):
    """Slots of a machine that a node of an instance holds, counted from 0; of each one of `shares` shares."""

    node: str
    machine: str
    slots: tuple[int, ...]
    shares: int = 1


@dataclass(frozen=True, slots=True)
class SlotRequest:
    """GPUs of a type that a node of an instance asks for, on the machine `host` where a plan names one."""

    node: str
    node_type: str
    gpus: int
    host: str | None = None


def allocate_slots(
    machines: Sequence[PoolMachine], held: Iterable[HeldSlots], requests: Sequence[SlotRequest]
) -> tuple[HeldSlots, ...] | SlotRequest:
    """Return what each node gets, in the order of requests, or the first request that found no room.

    Named machines first, then the largest requests; each goes to the machine of its own type with the least
    room that is enough, else to a larger one of the same GPUs.
    """
    room = {machine.name: dict.fromkeys(range(machine.slots), Fraction(1)) for machine in machines}
    for each in held:
        slots_room = room.get(each.machine, {})
        for slot in slots_room.keys() & set(each.slots):
            slots_room[slot] -= Fraction(1, each.shares)
    order = sorted(
        range(len(requests)),
        key=lambda at: (requests[at].host is None, -requests[at].gpus, at),
    )
    given: dict[int, HeldSlots] = {}
    for at in order:
        request = requests[at]
        machine = _choose(machines, room, request)
        if machine is None:
            return request
        shares = _shares_of(machine, request) or 1
        slots = _pick(_with_room(room[machine.name], shares), request.gpus)
        for slot in slots:
            room[machine.name][slot] -= Fraction(1, shares)
        given[at] = HeldSlots(node=request.node, machine=machine.name, slots=slots, shares=shares)
    return tuple(given[at] for at in range(len(requests)))


def _shares_of(machine: PoolMachine, request: SlotRequest) -> int | None:
    """Return in how many shares a machine's GPUs are for a request: 1 where it asks for such GPUs.

    None: it asks for others.
    """
    asked, has = parse_node_type(request.node_type), parse_node_type(machine.node_type).gpu
    if asked.gpu == has:
        return 1
    return asked.shares if asked.whole_gpu == has else None


def _with_room(room: Mapping[int, Fraction], shares: int) -> list[int]:
    """Return the slots that have room for a share, those with least of it first."""
    fitting = [slot for slot, left in room.items() if left >= Fraction(1, shares)]
    return sorted(fitting, key=lambda slot: (room[slot], slot))


def _choose(
    machines: Sequence[PoolMachine],
    room: Mapping[str, Mapping[int, Fraction]],
    request: SlotRequest,
) -> PoolMachine | None:
    names = {machine.name for machine in machines}
    fitting = [
        (sum(room[machine.name].values()), machine)
        for machine in machines
        if (shares := _shares_of(machine, request)) is not None
        and len(_with_room(room[machine.name], shares)) >= request.gpus
        # A host that does not stand here is a name of somebody else's machine.
        and (request.host not in names or machine.name == request.host)
    ]
    return min(
        fitting,
        key=lambda found: (found[1].node_type != request.node_type, found[0], found[1].name),
        default=(0, None),
    )[1]


def _pick(free: Sequence[int], count: int) -> tuple[int, ...]:
    """The first aligned run of free slots, whose GPUs are the likeliest to share links; else any.

    One slot is the first of those given.
    """
    for start in range(0, max(free, default=-1) + 1, count) if count > 1 else ():
        run = range(start, start + count)
        if set(free).issuperset(run):
            return tuple(run)
    return tuple(sorted(free[:count]))


def visible_devices(machine: PoolMachine, slots: Sequence[int]) -> dict[str, str]:
    """Return what to set in the environment of a process that holds these slots."""
    if machine.gpu_ids is None:
        return {}
    return show_gpus([machine.gpu_ids[slot] for slot in slots])


def list_offers(machines: Iterable[PoolMachine]) -> tuple[Offer, ...]:
    """Return the machines as offers of one's own, dearest price of a kind where they differ."""
    from atoll.plan.problem import Offer

    counts = Counter((machine.region, machine.node_type) for machine in machines)
    prices: dict[tuple[str, str], float] = {}
    for machine in machines:
        key = machine.region, machine.node_type
        prices[key] = max(prices.get(key, 0.0), machine.usd_per_hour)
    return tuple(
        Offer(
            region=region,
            node_type=node_type,
            market="owned",
            available=count,
            usd_per_hour=prices[region, node_type],
        )
        for (region, node_type), count in sorted(counts.items())
    )


def find_machines(region: str = "local") -> tuple[PoolMachine, ...]:
    """Return this machine's GPUs, each kind as a machine of its own; none where there is no driver."""
    from atoll.runtime.join.hardware import list_gpus

    # A controller that sees some GPUs only gives those.
    numbers: dict[str, list[int]] = {}
    for gpu in list_gpus():
        numbers.setdefault(gpu.type, []).append(gpu.id)
    return tuple(
        PoolMachine(
            name=f"local-{kind}",
            node_type=format_node_type(kind, len(ids)),
            region=region,
            gpu_ids=tuple(ids),
        )
        for kind, ids in sorted(numbers.items())
    )


def pretend_machines(offers: Iterable[Offer]) -> tuple[PoolMachine, ...]:
    """Return processes of this machine that stand for the machines of offers: to try a plan, or on cores."""
    return tuple(
        PoolMachine(
            name=f"{offer.region}.{offer.node_type}.{offer.market}.{number}",
            node_type=offer.node_type,
            region=offer.region,
            usd_per_hour=offer.usd_per_hour,
        )
        for offer in sorted(offers, key=lambda offer: offer.key)
        for number in range(offer.available)
    )
