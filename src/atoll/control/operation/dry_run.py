"""Bringing up without doing it: targets that need not answer, and what would be started as files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from atoll.control.decision.names import hash_place
from atoll.control.operation.home import FleetHome, FleetRecord
from atoll.control.operation.loop import LoopTurn
from atoll.control.operation.operated import HomeLease, OperatedFleet
from atoll.control.operation.orders import OrderMaker, command_settings
from atoll.control.operation.targets import (
    PoolTarget,
    TargetMap,
    TargetName,
    TargetSettings,
    open_targets,
    own_regions,
)
from atoll.core.errors import AtollError, InputError
from atoll.core.files import atomic_write
from atoll.deploy.commands.paste import format_line
from atoll.deploy.door import Deployer, DeployError, Labels, Standing, StartOrder
from atoll.plan.plan import Plan
from atoll.plan.problem import Offer, Problem


class SilentTarget:
    """A target that was not reached: what the pool says is there, and nothing stands."""

    def __init__(self, name: str, pool: Sequence[Offer]) -> None:
        self.name = name
        self._pool = tuple(pool)

    def offers(self) -> Sequence[Offer]:
        """Return the pool as it is written."""
        return self._pool

    def list(self, fleet: str) -> Sequence[Standing]:
        """Return nothing."""
        del fleet
        return ()

    def start(self, order: StartOrder) -> Standing:
        """Refuse."""
        raise self._refuse(order.labels.instance)

    def drain(self, handle: str, term: int) -> None:
        """Refuse."""
        raise self._refuse(f"{handle} in term {term}")

    def stop(self, handle: str, term: int) -> None:
        """Refuse."""
        raise self._refuse(f"{handle} in term {term}")

    def logs(self, handle: str, lines: int = 100) -> str:
        """Refuse."""
        raise self._refuse(f"{lines} lines of {handle}")

    def _refuse(self, what: str) -> DeployError:
        return DeployError(f"{self.name} was not reached, for {what}", kind="unreachable")


class _QuietTarget(PoolTarget):
    """A target that is asked once; where it does not answer, the pool is taken as it is written."""

    def __init__(self, target: Deployer, pool: Sequence[Offer], notes: list[str]) -> None:
        super().__init__(target, pool)
        self._written, self._notes = tuple(pool), notes

    def offers(self) -> Sequence[Offer]:
        """Return how much of the pool there is, all of it where nobody says."""
        try:
            return super().offers()
        except AtollError as error:
            self._notes.append(
                f"{self.name} does not answer, planned with the pool as written: {error}"
            )
            return self._written

    def list(self, fleet: str) -> Sequence[Standing]:
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
        targets: dict[str, PoolTarget] = {}
        for name in self._settings.names:
            regions = own_regions(name, self._settings, self._pool)
            pool = [offer for offer in self._pool if offer.region in regions]
            targets[name] = _QuietTarget(self._reach(name, pool), pool, self.notes)
        found = TargetMap(self._settings, self._pool)
        weights = {name: each.as_weights() for name, each in record.weights.items()}
        orders = OrderMaker(
            found,
            weights,
            command_settings(
                self._settings, token, hub_token=record.hub_token, device=record.device
            ),
        )
        return OperatedFleet(home, record, problem, targets, found, orders, HomeLease(home))

    def _reach(self, name: TargetName, pool: Sequence[Offer]) -> Deployer:
        alone = self._settings.model_copy(update={"names": (name,)})
        if name == "local" and self._settings.pretends and not (self._folder / name).exists():
            return SilentTarget(
                name, pool
            )  # nothing was ever started; opening would make its folder
        try:
            return open_targets(alone, pool, self._folder)[name].target
        except AtollError as error:
            self.notes.append(f"{name} is planned with the pool as written: {error}")
            return SilentTarget(name, pool)


def write_orders(fleet: OperatedFleet, turn: LoopTurn, folder: Path) -> tuple[Path, ...]:
    """Write what would be started into a folder, in the language of each target; returns the files."""
    plan = turn.decision.plan
    if plan is None:
        return ()
    standing = {seen.id for seen in turn.view.instances if seen.standing.state != "gone"}
    orders: dict[TargetName, list[StartOrder]] = {}
    for one in plan.instances:
        if one.id not in standing:
            labels = _label(turn, plan, one.id)
            target = fleet.map.of_instance(one)
            orders.setdefault(target, []).append(fleet.orders.make(one, labels, plan))
    texts: dict[str, str] = {}
    for name, found in orders.items():
        texts |= _format(name, fleet, found)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"cannot make this folder: {(error.strerror or str(error)).lower()}", path=folder
        ) from error
    for file, text in sorted(texts.items()):
        atomic_write(folder / file, text)
    return tuple(folder / file for file in sorted(texts))


def _label(turn: LoopTurn, plan: Plan, name: str) -> Labels:
    (instance,) = (one for one in plan.instances if one.id == name)
    return Labels(
        fleet=turn.view.problem.name,
        instance=name,
        plan=plan.content_hash()[:16],
        placement=hash_place(instance),
        service=instance.service,
        role=instance.role,
    )


def _format(name: TargetName, fleet: OperatedFleet, orders: Sequence[StartOrder]) -> dict[str, str]:
    target = fleet.targets[name].target
    if name == "kubernetes":
        from atoll.deploy.kubernetes.labels import workload_name
        from atoll.deploy.kubernetes.manifests import write_manifests

        settings, catalog = fleet.record.targets.kubernetes, fleet.problem.catalog()
        return {
            f"{workload_name(order.labels.fleet, order.labels.instance)}.yaml": write_manifests(
                order, settings, catalog
            )
            for order in orders
        }
    if name == "slurm":
        from atoll.deploy.slurm.target import SlurmDeployer

        if not isinstance(target, SlurmDeployer):
            raise DeployError("Slurm's scripts need its partitions", kind="unreachable")
        return {f"{_file_name(order)}.sh": target.dry_run(order) for order in orders}
    if name == "skypilot":
        from atoll.deploy.skypilot_tasks import format_tasks, write_task

        sky = fleet.record.targets.skypilot.as_sky()
        return {
            f"{_file_name(order)}.sky.yaml": format_tasks([write_task(order, sky)])
            for order in orders
        }
    lines = [
        format_line(command, order.instance, 8000 + number)
        for number, order in enumerate(orders)
        for command in order.commands
    ]
    return {"local.sh": "\n".join(["#!/bin/sh", *lines, ""])}


def _file_name(order: StartOrder) -> str:
    return order.labels.instance.replace("/", "-")
