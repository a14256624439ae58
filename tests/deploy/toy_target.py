"""A toy target, made by the recipe for new ones: a deployer, its settings, and a field in a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from atoll.deploy.target import (
    Claim,
    Deployer,
    DeployError,
    DeployerSettings,
    InstanceStatus,
    StartOrder,
    TargetSite,
)
from atoll.deploy.target_table import TargetSettings
from atoll.deploy.terms import refuse_old_term
from atoll.plan.name_types import Name
from atoll.plan.problem import Offer


class ToyDeployer:
    """Instances in a dictionary, ready at once."""

    name = "toy"

    def __init__(self, offers: Sequence[Offer]) -> None:
        self._offers = offers
        self._instances: dict[str, InstanceStatus] = {}

    def offers(self) -> Sequence[Offer]:
        return self._offers

    def list(self, fleet: str) -> Sequence[InstanceStatus]:
        return [each for each in self._instances.values() if each.labels.fleet == fleet]

    def start(self, order: StartOrder) -> InstanceStatus:
        labels = order.labels
        self._fence(labels.fleet, labels.term)
        made = InstanceStatus(labels.instance, labels, "ready", 0.0, instance=order.instance)
        return self._instances.setdefault(labels.instance, made)

    def drain(self, handle: str, term: int) -> None:
        self.stop(handle, term)

    def stop(self, handle: str, term: int) -> None:
        known = self._instances.get(handle)
        if known is not None:
            self._fence(known.labels.fleet, term)
            self._instances[handle] = replace(known, state="gone")

    def logs(self, handle: str, lines: int = 100) -> str:
        if handle not in self._instances:
            raise DeployError(f"there is no instance {handle} here", kind="ended")
        return ""

    def _fence(self, fleet: str, term: int) -> None:
        newest = max((each.labels.term for each in self.list(fleet)), default=0)
        refuse_old_term(fleet, term, newest)


class ToySettings(DeployerSettings):
    """The toy as a target."""

    region: Name = "toy"

    def open(self, site: TargetSite) -> Deployer:
        return ToyDeployer(site.pool)

    def claim(self, region: str) -> Claim:
        return Claim.NAMED if region == self.region else Claim.NONE


class ToyTargets(TargetSettings):
    """The table of targets with one more row."""

    toy: ToySettings = ToySettings()
