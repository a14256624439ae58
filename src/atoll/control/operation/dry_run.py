"""Dry run of bringing a fleet up: targets that need not answer, and what would be started as files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from atoll.control.decision.instance_names import hash_place
from atoll.control.operation.control_loop import LoopTurn
from atoll.control.operation.fleet_home import FleetHome, FleetRecord
from atoll.control.operation.graph_entrance import executors_token_of
from atoll.control.operation.operated import HomeLease, OperatedFleet
from atoll.control.operation.orders import OrderMaker, command_settings
from atoll.control.operation.targets import PoolTarget, TargetMap, open_targets, own_offers
from atoll.core.errors import AtollError, InputError, NoCommandError
from atoll.core.files import atomic_write
from atoll.deploy.labels import Labels
from atoll.deploy.target import Deployer, DeployError, InstanceStatus, StartOrder
from atoll.deploy.target_table import TargetSettings
from atoll.plan.plan import Instance, Plan
from atoll.plan.problem import Offer, Problem


class UnreachedTarget:
    """A target that was not reached: what the pool says is there, and nothing stands."""

    def __init__(self, name: str, pool: Sequence[Offer]) -> None:
        self.name = name
        self._pool = tuple(pool)

    def offers(self) -> Sequence[Offer]:
        """Return the pool as it is written."""
        return self._pool

    def list(self, _fleet: str) -> Sequence[InstanceStatus]:
        """Return nothing."""
        return ()

    def _refuse(self, *_order: object, **_options: object) -> NoReturn:
        raise DeployError(f"{self.name} was not reached", kind="unreachable")

    start = drain = stop = logs = _refuse


class _QuietTarget(PoolTarget):
    """A target that is asked once; where it does not answer, the pool is taken as it is written."""

    def __init__(self, target: Deployer, pool: Sequence[Offer], notes: list[str]) -> None:
        super().__init__(target, pool)
        self._notes = notes

    def offers(self) -> Sequence[Offer]:
        """Return how much of the pool there is, all of it where nobody says."""
        try:
            return super().offers()
        except AtollError as error:
            self._notes.append(
                f"{self.name} does not answer, planned with the pool as written: {error}"
            )
            return self.pool

    def list(self, fleet: str) -> Sequence[InstanceStatus]:
        """Return what stands there, nothing where nobody says."""
        try:
            return super().list(fleet)
        except AtollError:
            return ()


class OfflineTargets:
    """Opens the targets of a fleet to look only; `notes` say which of them could not be asked."""

    def __init__(self, settings: TargetSettings, pool: Sequence[Offer], folder: Path) -> None:
        self._settings, self._pool, self._folder = settings, tuple(pool), folder
        self.notes: list[str] = []

    def open(
        self, home: FleetHome, record: FleetRecord, problem: Problem, token: str
    ) -> OperatedFleet:
        """Return the fleet; nothing of it is written."""
        settings = self._settings
        pools = {name: own_offers(name, settings, self._pool) for name in settings.names}
        targets: dict[str, PoolTarget] = {
            name: _QuietTarget(self._reach(name, pool, record.name), pool, self.notes)
            for name, pool in pools.items()
        }
        found = TargetMap(settings, self._pool)
        weights = {name: each.as_weights() for name, each in record.weights.items()}
        commands = command_settings(
            settings,
            token,
            hub_token=record.hub_token,
            device=record.device,
            executors=str(executors_token_of(home)) if record.parts else None,
        )
        orders = OrderMaker(found, weights, commands, record.parts)
        return OperatedFleet(home, record, problem, targets, found, orders, HomeLease(home))

    def _reach(self, name: str, pool: Sequence[Offer], fleet: str) -> Deployer:
        if self._settings.section(name).is_untouched(self._folder):
            return UnreachedTarget(name, pool)
        alone = self._settings.model_copy(update={"names": (name,)})
        try:
            return open_targets(alone, pool, self._folder, fleet=fleet)[name].target
        except AtollError as error:
            self.notes.append(f"{name} is planned with the pool as written: {error}")
            return UnreachedTarget(name, pool)


def list_orders(fleet: OperatedFleet, turn: LoopTurn) -> dict[str, list[StartOrder]]:
    """Return what would be started, by target; NoCommandError names instances that nothing can start."""
    plan = turn.decision.plan
    if plan is None:
        return {}
    present = {seen.id for seen in turn.view.instances if seen.status.state != "gone"}
    orders: dict[str, list[StartOrder]] = {}
    missing: dict[str, AtollError] = {}
    for one in plan.instances:
        if one.id in present:
            continue
        try:
            order = fleet.orders.make(one, _label(turn, plan, one), plan)
        except AtollError as error:
            missing[one.id] = error
            continue
        orders.setdefault(fleet.map.of_instance(one), []).append(order)
    if missing:
        first = next(iter(missing.values()))
        raise NoCommandError(
            f"no command for {', '.join(missing)}: {first.message}", hint=first.hint
        )
    return orders


def write_orders(
    fleet: OperatedFleet, orders: Mapping[str, Sequence[StartOrder]], folder: Path
) -> tuple[Path, ...]:
    """Write what would be started into a folder, in the language of each target; returns the files."""
    texts: dict[str, str] = {}
    for name, found in orders.items():
        section, deployer = fleet.record.targets.section(name), fleet.targets[name].target
        texts |= section.render_orders(found, deployer, fleet.problem.catalog())
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"cannot make this folder: {(error.strerror or str(error)).lower()}", path=folder
        ) from error
    for file, text in sorted(texts.items()):
        atomic_write(folder / file, text)
    return tuple(folder / file for file in sorted(texts))


def _label(turn: LoopTurn, plan: Plan, instance: Instance) -> Labels:
    return Labels(
        fleet=turn.view.problem.name,
        instance=instance.id,
        plan=plan.content_hash()[:16],
        placement=hash_place(instance),
        service=instance.service,
        role=instance.role,
    )
