"""A fleet as it is operated: home, file, targets and lease put together for the controller."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from atoll.control.decision.control_view import ControlPolicy
from atoll.control.operation.control_loop import (
    FleetController,
    FleetPlace,
    Gateways,
    NoGateways,
)
from atoll.control.operation.controller_lease import (
    ClusterLease,
    Lease,
    LeaseTaker,
    find_cluster,
)
from atoll.control.operation.fleet_home import FleetHome, FleetRecord
from atoll.control.operation.graph_entrance import executors_token_of, write_graph_config
from atoll.control.operation.operated_plans import MixSettler, put_phases_together
from atoll.control.operation.orders import OrderMaker, command_settings
from atoll.control.operation.targets import PoolTarget, TargetMap, open_targets
from atoll.core.errors import AtollError, InputError
from atoll.deploy.target import Deployer, DeployError, InstanceStatus
from atoll.plan.files.read import read_problem
from atoll.plan.plan import RequestPath
from atoll.plan.problem import Problem

if TYPE_CHECKING:
    from atoll.control.decision.decide import MakePlan
    from atoll.control.operation.gateways import GatewayAddress
    from atoll.plan.choice import ModelMix

VALID_S = 90.0
"""For how long a controller that says nothing keeps others from acting."""


class FleetLease(LeaseTaker, Protocol):
    """A lease that can be given back."""

    def give_back(self, now_s: float) -> None:
        """Let the next one act at once; nothing where it was not held."""
        ...


class HomeLease:
    """The lease in a fleet's home. One whose holder, a process of this machine, is dead is free at once."""

    def __init__(self, home: FleetHome) -> None:
        self._home = home
        self._held: Lease | None = None

    def take(self, holder: str, now_s: float, valid_s: float) -> Lease:
        """Take or renew the lease, or raise."""
        self._home.free_lease(now_s)
        self._held = self._home.lease.take(holder, now_s, valid_s)
        return self._held

    def give_back(self, now_s: float) -> None:
        """Let the next one act at once."""
        if self._held is not None:
            self._home.lease.release(self._held, now_s)


def open_lease(home: FleetHome, fleet: str, targets: Mapping[str, PoolTarget]) -> FleetLease:
    """Return the lease of a fleet: the cluster's where one of its targets is a cluster, else its home's."""
    cluster = find_cluster(targets.values())
    return HomeLease(home) if cluster is None else ClusterLease(cluster, fleet)


class FleetSource:
    """A fleet's file, read again whenever it has changed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._settler: MixSettler | None = None
        self.problem = self._read()
        """Settled, once it is known which models answer its choices."""
        self._seen = self._look()

    @property
    def mixes(self) -> tuple[ModelMix, ...]:
        """Which models answer its choices."""
        return () if self._settler is None else self._settler.mixes

    def settle(self, settler: MixSettler) -> None:
        """Have `settler` say which models answer its choices, now and whenever the file has changed."""
        self._settler = settler
        self.problem = settler.settle(self.problem)

    def read_again(self) -> bool:
        """Read the file if it has changed, and return whether it says something else now.

        A file that cannot be read raises, once; what was read last goes on until it has changed again.
        """
        seen = self._look()
        if seen == self._seen:
            return False
        self._seen = seen
        found = self._read()
        if found.name != self.problem.name:
            raise InputError(
                f"the fleet is called {found.name!r} now, and {self.problem.name!r} is operated",
                path=self.path,
                hint="give it its name back, or take it down and bring the other up",
            )
        changed, self.problem = found != self.problem, found
        return changed

    def _read(self) -> Problem:
        problem = read_problem(self.path)
        together = put_phases_together(problem)
        return together if self._settler is None else self._settler.settle(together)

    def _look(self) -> tuple[int, int, int]:
        try:
            found = self.path.stat()
        except OSError as error:
            raise InputError(
                f"cannot be read: {(error.strerror or str(error)).lower()}", path=self.path
            ) from error
        return found.st_mtime_ns, found.st_size, found.st_ino


@dataclass(slots=True)
class OperatedFleet:
    """A fleet whose targets are open; see `open_fleet`."""

    home: FleetHome
    record: FleetRecord
    problem: Problem
    targets: dict[str, PoolTarget]
    map: TargetMap
    orders: OrderMaker
    lease: FleetLease

    def place(self, gateways: Gateways) -> FleetPlace:
        """Return where the fleet is operated from, for the controller."""
        return FleetPlace(
            fleet=self.problem.name,
            problem=self.problem,
            targets=self.targets,
            gateways=gateways,
            target_of=self.map.of_instance,
            order=self.orders,
            send_over=self._send_over,
        )

    def controller(
        self,
        gateways: Gateways,
        plan: MakePlan,
        holder: str,
        *,
        policy: ControlPolicy | None = None,
        busy_s: float = 0.0,
        clock: Callable[[], float] = time.time,
    ) -> FleetController:
        """Return a controller that has just started: it adopts what stands.

        `busy_s` is for how long it may say nothing, while it plans or waits: its lease holds for longer.
        """
        return FleetController(
            self.place(gateways),
            self.home.store,
            self.home.history,
            self.lease,
            plan,
            holder=holder,
            clock=clock,
            policy=policy,
            valid_s=max(VALID_S, 1.5 * busy_s),
            keep_plan=self.home.keep_plan,
        )

    def _send_over(self, paths: Sequence[RequestPath]) -> None:
        """Have the graph server send requests over these paths."""
        write_graph_config(self.home, self.record.parts, paths)


def open_fleet(
    home: FleetHome,
    record: FleetRecord,
    problem: Problem,
    token: str,
    policy: ControlPolicy,
) -> OperatedFleet:
    """Return a fleet with its targets open; DeployError says which cannot be reached, and why.

    `token` is the file that instances join the fabric with; it need not be there yet.
    """
    targets = open_targets(
        record.targets,
        problem.offers,
        home.folder,
        catalog=problem.catalog(),
        drain_s=policy.drain_s,
        fleet=record.name,
    )
    found = TargetMap(record.targets, problem.offers)
    settings = command_settings(
        record.targets,
        token,
        hub_token=record.hub_token,
        device=record.device,
        drain_s=policy.drain_s,
        ready_s=policy.ready_within_s,
        executors=str(executors_token_of(home)) if record.parts else None,
    )
    weights = {name: each.as_weights() for name, each in record.weights.items()}
    return OperatedFleet(
        home=home,
        record=record,
        problem=problem,
        targets=targets,
        map=found,
        orders=OrderMaker(found, weights, settings, record.parts),
        lease=open_lease(home, problem.name, targets),
    )


def reopen(
    fleet: OperatedFleet,
    controller: FleetController,
    problem: Problem,
    say: Callable[[str], None] | None = None,
) -> OperatedFleet:
    """Have a controller go on with another problem of the same fleet; targets are opened for its pool."""
    token = "" if fleet.record.entrance is None else fleet.record.entrance.token
    opened = open_fleet(fleet.home, fleet.record, problem, token, controller.policy)
    opened = replace(opened, lease=fleet.lease)
    controller.place = opened.place(
        renew_gateways(controller.place.gateways, fleet.home, fleet.record, problem, say)
    )
    return opened


def renew_gateways(
    before: Gateways,
    home: FleetHome,
    record: FleetRecord,
    problem: Problem,
    say: Callable[[str], None] | None = None,
) -> Gateways:
    """Return the gateways of a fleet after something has changed: the same ones if they are where they were.

    They know what was told, and tell it again to one that was started anew.
    """
    from atoll.control.operation.gateways import GatewayGroup

    addresses = list_gateways(record)
    if isinstance(before, GatewayGroup) and before.addresses == addresses:
        before.problem = problem
        before.mixes = record.mixes
        return before
    return open_gateways(home, record, problem, say=say)


def open_gateways(
    home: FleetHome,
    record: FleetRecord,
    problem: Problem,
    *,
    keep: bool = True,
    say: Callable[[str], None] | None = None,
) -> Gateways:
    """Return who serves a fleet's requests: nobody yet where none can be asked.

    What they see is kept in the fleet's home, for the rhythm of day and week, unless `keep` is off.
    """
    from atoll.control.operation.gateways import GatewayGroup
    from atoll.control.operation.rhythm import RateHistory

    addresses = list_gateways(record)
    if not addresses:
        return NoGateways()
    return GatewayGroup(
        problem,
        addresses,
        names={name: each.names for name, each in record.weights.items()},
        rhythm=RateHistory(home.folder / "rates.json", keep=keep),
        say=say,
        mixes=record.mixes,
    )


def list_gateways(record: FleetRecord) -> tuple[GatewayAddress, ...]:
    """Return where a fleet's gateways are asked; nowhere if they cannot be."""
    from atoll.control.operation.gateways import GatewayAddress

    at = record.entrance
    if at is None or at.url is None or not (at.admin_socket or at.admin_token):
        return ()
    socket = None if at.admin_socket is None else Path(at.admin_socket)
    token = None if at.admin_token is None else Path(at.admin_token)
    return tuple(GatewayAddress(url, socket, token) for url in (at.url, *at.others))


@dataclass(frozen=True, slots=True)
class TargetLook:
    """State of a fleet on a target; `error` in one line where the target does not answer."""

    target: str
    deployer: Deployer | None
    statuses: tuple[InstanceStatus, ...] = ()
    error: str | None = None


def look_at_targets(home: FleetHome, record: FleetRecord) -> tuple[TargetLook, ...]:
    """Ask every target of a fleet what stands there; none of them keeps others from answering."""
    looks = []
    for name in record.targets.names:
        deployer: Deployer | None = None
        try:
            alone = record.targets.model_copy(update={"names": (name,)})
            deployer = open_targets(alone, (), home.folder, fleet=record.name)[name]
            looks.append(TargetLook(name, deployer, tuple(deployer.list(record.name))))
        except DeployError as error:
            looks.append(TargetLook(name, deployer, error=str(error)))
        except AtollError as error:
            looks.append(TargetLook(name, None, error=str(error)))
    return tuple(looks)
