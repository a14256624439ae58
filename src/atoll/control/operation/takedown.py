"""Taking a fleet down: drain its instances, end them, then its gateway and hub."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from atoll.control.operation.entrance import close_entrance
from atoll.control.operation.fleet_home import FleetHome, FleetRecord, write_holder
from atoll.control.operation.operated import VALID_S, TargetLook, look_at_targets, open_lease
from atoll.control.operation.targets import PoolTarget
from atoll.core.errors import AtollError
from atoll.core.units import pluralize
from atoll.deploy.target import DeployError

if TYPE_CHECKING:
    from atoll.control.operation.operated import FleetLease
    from atoll.control.operation.options import OperationListener
    from atoll.deploy.target import Deployer, InstanceStatus

_LOOK_S = 1.0
_END_S = 60.0
"""How long instances that were told to stop may take."""


class TakeDown:
    """Everything that ending a fleet would end; `run` does so.

    Streams may take `wait_s` seconds; what still runs then is ended, with 0 at once.
    """

    def __init__(self, home: FleetHome, record: FleetRecord, wait_s: float) -> None:
        self.home, self.record, self.wait_s = home, record, wait_s
        self._looks: tuple[TargetLook, ...] = look_at_targets(home, record)
        for look in self._looks:
            if look.error is not None:
                raise DeployError(f"{look.target}: {look.error}", kind="unreachable")

    def list_instances(self) -> list[tuple[str, InstanceStatus]]:
        """Return the instances that stand, each with the name of its target."""
        return [(look.target, one) for look in self._looks for one in look.statuses if _stands(one)]

    def run(self, listener: OperationListener) -> bool:
        """End instances, then gateway and hub; history and settings stay. False where that is refused."""
        if not listener.approve_end(self.record, self.list_instances(), self.wait_s):
            return False
        targets = {
            look.target: look.deployer
            for look in self._looks
            if isinstance(look.deployer, PoolTarget)
        }
        lease = open_lease(self.home, self.record.name, targets)
        try:
            self._end_instances(targets, lease, listener)
        finally:
            with contextlib.suppress(AtollError):
                lease.give_back(time.time())
        if self.record.entrance is not None:
            with listener.working("ending gateway and hub"):
                close_entrance(self.record.entrance)
        self.home.write(self.record.model_copy(update={"up": False}))
        self.home.write_down("note", "taken down")
        return True

    def _end_instances(
        self, targets: Mapping[str, Deployer], lease: FleetLease, listener: OperationListener
    ) -> None:
        holder = write_holder("down")
        until_s = time.monotonic() + self.wait_s
        told: dict[str, str] = {}
        with listener.working("draining", self.wait_s or None) as say:
            while True:
                term = lease.take(holder, time.time(), VALID_S).term
                # What failed stays listed for a while; stopped, it holds nothing.
                left = [
                    (deployer, each)
                    for deployer in targets.values()
                    for each in deployer.list(self.record.name)
                    if _stands(each)
                    and not (each.state == "failed" and told.get(each.labels.instance) == "stop")
                ]
                if not left:
                    break
                hurry = time.monotonic() >= until_s
                for deployer, each in left:
                    drains = each.state in ("ready", "draining") and not hurry
                    action, name = "drain" if drains else "stop", each.labels.instance
                    if told.get(name) == action:
                        continue
                    told[name] = action
                    self.home.write_down(
                        action, "the fleet is taken down", instance=name, term=term
                    )
                    (deployer.drain if drains else deployer.stop)(each.handle, term)
                if hurry and time.monotonic() > until_s + _END_S:
                    raise DeployError(
                        f"{left[0][1].labels.instance} does not end",
                        kind="unreachable",
                        hint="try again, or end it where it stands",
                    )
                say(f"{pluralize(len(left), 'instance')} left")
                time.sleep(_LOOK_S)
        self.home.store.forget([path.stem for path in self.home.store.folder.glob("*.json")])


def _stands(status: InstanceStatus) -> bool:
    return status.state != "gone"
