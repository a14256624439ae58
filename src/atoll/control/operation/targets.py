"""Targets of a fleet: which machines of its pool belong to which target, and how much of them there is now.

A pool's machines stand in regions. A target has a region of its own name ("local", "slurm", "ray", "joined",
"cluster" for Kubernetes) unless its settings give another; a pool with a single region belongs to the only
target whatever it is called. SkyPilot has every place of a cloud ("aws/us-east-2"). The fleet file bounds
what is used, the target says how much of that there is now. Which targets there are says
`atoll.deploy.target_table`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.core.ids import parse_node_type
from atoll.deploy.target import Claim, Deployer, DeployError, InstanceStatus, StartOrder, TargetSite
from atoll.deploy.target_table import TargetSettings
from atoll.plan.plan import Instance
from atoll.plan.problem import Offer

if TYPE_CHECKING:
    from atoll.catalog.catalog import Catalog


def own_regions(name: str, settings: TargetSettings, pool: Iterable[Offer]) -> frozenset[str]:
    """Return the regions of a pool that are a target's: no other target claims them more strongly."""
    regions = frozenset(offer.region for offer in pool)
    if len(settings.names) == 1:
        return regions
    own = settings.section(name)
    others = [settings.section(other) for other in settings.names if other != name]
    return frozenset(
        region
        for region in regions
        if own.claim(region) > Claim.NONE
        and all(own.claim(region) >= other.claim(region) for other in others)
    )


class TargetMap:
    """Where an instance stands: on the target that has the regions of its nodes."""

    def __init__(self, settings: TargetSettings, pool: Sequence[Offer]) -> None:
        self._names = settings.names
        self._owner = {
            region: name for name in settings.names for region in own_regions(name, settings, pool)
        }

    def of_region(self, region: str) -> str | None:
        """Return the target of a region, None if it is nobody's."""
        return self._names[0] if len(self._names) == 1 else self._owner.get(region)

    def of_instance(self, instance: Instance) -> str:
        """Return the target of an instance; DeployError where no single target has its regions."""
        if len(self._names) == 1:
            return self._names[0]
        regions = sorted({instance.region_of(node) for node in instance.nodes})
        found = {self._owner.get(region) for region in regions}
        (name,) = found if len(found) == 1 else (None,)
        if name is None:
            raise DeployError(
                f"{instance.id} stands in {', '.join(regions)}, which is no single target's",
                kind="settings",
                hint="set the region of a target in --target-file",
            )
        return name

    def list_unclaimed(self, pool: Iterable[Offer]) -> tuple[str, ...]:
        """Return the regions of a pool that belong to no target."""
        return tuple(sorted({o.region for o in pool if self.of_region(o.region) is None}))


def bound_offers(pool: Iterable[Offer], there: Iterable[Offer]) -> tuple[Offer, ...]:
    """Return what a pool allows of what is there: the pool's names and prices, no more than there is.

    Machines of one's own may play any market, and a cluster's may be called owned. A large machine is as many
    small ones as it holds; where a pool names both sizes, the target has the last word. A price of 0 in the
    pool is the target's.
    """
    found = tuple(there)
    bounded = []
    for offer in pool:
        count, prices = 0, []
        # A GPU in shares is one GPU there.
        gpu, gpus = parse_node_type(offer.node_type).whole
        for machine in found:
            has, size = parse_node_type(machine.node_type).whole
            if (
                machine.region == offer.region
                and has == gpu
                and size >= gpus
                and _fits(offer, machine)
            ):
                count += machine.available * (size // gpus)
                prices.append(machine.usd_per_hour * gpus / size)
        usd = offer.usd_per_hour or max(prices, default=0.0)
        bounded.append(
            offer.model_copy(update={"available": min(offer.available, count), "usd_per_hour": usd})
        )
    return tuple(bounded)


def _fits(offer: Offer, machine: Offer) -> bool:
    if machine.market in ("owned", offer.market):
        return True
    return offer.market == "owned" and machine.market == "on-demand"


class PoolTarget:
    """A target of which only what a fleet's pool names is on offer."""

    def __init__(self, target: Deployer, pool: Sequence[Offer]) -> None:
        self.name = target.name
        self.target = target
        self.pool = tuple(pool)

    def offers(self) -> Sequence[Offer]:
        """Return how much of the pool there is now."""
        return bound_offers(self.pool, self.target.offers())

    def list(self, fleet: str) -> Sequence[InstanceStatus]:
        """Return what stands there of a fleet."""
        return self.target.list(fleet)

    def start(self, order: StartOrder) -> InstanceStatus:
        """Bring an instance up."""
        return self.target.start(order)

    def drain(self, handle: str, term: int) -> None:
        """Have an instance end when its streams have."""
        self.target.drain(handle, term)

    def stop(self, handle: str, term: int) -> None:
        """End an instance now."""
        self.target.stop(handle, term)

    def logs(self, handle: str, lines: int = 100) -> str:
        """Return the last lines of an instance."""
        return self.target.logs(handle, lines)


def own_offers(name: str, settings: TargetSettings, pool: Sequence[Offer]) -> tuple[Offer, ...]:
    """Return a target's part of a pool; DeployError where it has GPUs in shares, and gives them whole."""
    regions = own_regions(name, settings, pool)
    own = tuple(offer for offer in pool if offer.region in regions)
    for offer in () if settings.section(name).shares_gpus else own:
        node = parse_node_type(offer.node_type)
        if node.shares > 1:
            raise DeployError(
                f"{name} gives a GPU to one instance, and {node.whole} in {offer.region} is offered in"
                f" {node.shares} shares",
                kind="settings",
                hint="leave out 'shares', or bring it up with --on local",
            )
    return own


def open_targets(
    settings: TargetSettings,
    pool: Sequence[Offer],
    folder: Path,
    *,
    catalog: Catalog | None = None,
    drain_s: float = 600.0,
    fleet: str = "",
) -> dict[str, PoolTarget]:
    """Return a fleet's targets by name; DeployError says which cannot be reached, and why.

    `folder` is the fleet's own here, for targets that keep something in it.
    """
    opened: dict[str, PoolTarget] = {}
    for name in settings.names:
        own = own_offers(name, settings, pool)
        site = TargetSite(folder, own, catalog, drain_s, fleet)
        opened[name] = PoolTarget(settings.section(name).open(site), own)
    return opened
