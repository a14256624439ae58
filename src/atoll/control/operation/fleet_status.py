"""How an operated fleet stands: what targets, history, lease and gateway say of it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from atoll.control.operation.controller_lease import find_cluster
from atoll.control.operation.fleet_history import HistoryEvent
from atoll.control.operation.fleet_home import FleetHome, FleetRecord
from atoll.control.operation.gateways import TRAFFIC, GatewayAddress, ask_gateway
from atoll.control.operation.operated import TargetLook, list_gateways, look_at_targets
from atoll.control.operation.sightings import read_sightings
from atoll.control.operation.targets import PoolTarget
from atoll.core.errors import AtollError, InputError
from atoll.core.units import format_rate, format_share
from atoll.deploy.kubernetes.kube_deployer import KubernetesDeployer
from atoll.deploy.target import DeployError, InstanceStatus
from atoll.telemetry.traffic_page import TrafficPage

SHOW_GONE_S = 600.0
"""For how long what has ended is still shown."""
MAX_EVENTS_READ = 200
"""Events of the history that are looked at for what an instance is there for."""


@dataclass(frozen=True, slots=True)
class InstanceRow:
    """An instance as people are shown it; `since_s` is Unix time, `usd_per_hour` None if nobody knows."""

    instance: str
    service: str
    target: str
    state: str
    since_s: float
    ends_s: float | None
    usd_per_hour: float | None
    hosts: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class ServiceRow:
    """Requests of a service in the last five minutes, by a gateway; `kept` is of the `judged` ones."""

    service: str
    requests_per_s: float
    judged: int
    kept: int

    def text(self) -> str:
        """Return it in words."""
        rate = f"{self.service}: {format_rate(self.requests_per_s)}"
        if not self.judged:
            return rate
        share = format_share(self.kept / self.judged)
        return f"{rate}, {share} of {self.judged} kept their promises"


@dataclass(frozen=True, slots=True)
class FleetStatus:
    """An operated fleet.

    `controller` is who acts for it now, None if nobody does, or if nobody can tell: then `operated` is None,
    too. What stands on a target that does not answer is
    `unknown`. `errors` say in one line each what is wrong:
    targets that do not answer, a hub or gateway that has died, the last thing that failed.
    """

    fleet: str
    up: bool
    source: str
    home: str
    targets: tuple[str, ...]
    url: str | None
    since_s: float
    controller: str | None
    usd_per_hour: float
    instances: tuple[InstanceRow, ...]
    errors: tuple[str, ...]
    stand_ins: tuple[str, ...]
    traffic: tuple[ServiceRow, ...]
    gateway: dict[str, Any] | None
    silent: tuple[str, ...] = ()
    """Targets that do not answer."""
    operated: bool | None = False
    """Whether somebody acts for it; None where the target that knows does not answer."""


def look_at_fleet(home: FleetHome, record: FleetRecord, now_s: float) -> FleetStatus:
    """Ask targets and gateway of a fleet how it stands; who does not answer is named in `errors`."""
    looks = look_at_targets(home, record) if record.up else ()
    events = home.history.read(last=MAX_EVENTS_READ)
    rows = tuple(
        _row(home, look, status, events)
        for look in looks
        for status in look.statuses
        if status.state != "gone" or now_s - status.since_s < SHOW_GONE_S
    )
    silent = tuple(look.target for look in looks if look.error is not None)
    gateway, traffic = asyncio.run(_ask_gateways(record)) if record.up else (None, ())
    operated: bool | None
    try:
        controller = _find_controller(home, record.name, looks, now_s)
        operated = controller is not None
    except DeployError:
        controller = operated = None
    return FleetStatus(
        fleet=record.name,
        up=record.up,
        source=record.source,
        home=str(home.folder),
        targets=tuple(record.targets.names),
        url=None if record.entrance is None else record.entrance.url,
        since_s=record.since_s,
        controller=controller,
        usd_per_hour=sum(row.usd_per_hour or 0.0 for row in rows if row.state != "gone"),
        instances=rows + _recall(home, silent),
        errors=_find_errors(record, looks, events),
        stand_ins=tuple(
            f"{name} is {each.source}" for name, each in record.weights.items() if each.stand_in
        ),
        traffic=traffic,
        gateway=gateway,
        silent=silent,
        operated=operated,
    )


def _row(
    home: FleetHome, look: TargetLook, status: InstanceStatus, events: list[HistoryEvent]
) -> InstanceRow:
    name = status.labels.instance
    try:
        instance = home.store.find(name) or status.instance
    except InputError:
        instance = status.instance
    why = next((event.text for event in reversed(events) if event.instance == name), "")
    return InstanceRow(
        instance=name,
        service=status.labels.service,
        target=look.target,
        state=status.state,
        since_s=status.since_s,
        ends_s=status.ends_s,
        usd_per_hour=None if instance is None else instance.usd_per_hour,
        hosts=status.hosts,
        reason=" ".join((status.reason or why).split()),
    )


def _recall(home: FleetHome, silent: Sequence[str]) -> tuple[InstanceRow, ...]:
    """Return what was seen last on targets that do not answer: how it stands now, nobody knows."""
    rows = []
    for one in read_sightings(home.store.sightings_path).seen:
        instance = home.store.find(one.labels.instance)
        if one.target in silent and instance is not None:
            rows.append(
                InstanceRow(
                    instance=one.labels.instance,
                    service=one.labels.service,
                    target=one.target,
                    state="unknown",
                    since_s=one.since_s,
                    ends_s=None,
                    usd_per_hour=instance.usd_per_hour,
                    hosts=(),
                    reason=f"was {one.state} when {one.target} last answered",
                )
            )
    return tuple(rows)


def _find_controller(
    home: FleetHome, fleet: str, looks: Sequence[TargetLook], now_s: float
) -> str | None:
    """Return who holds the lease: the cluster's where one of the targets is a cluster, else the home's.

    Raises DeployError where the cluster does not say.
    """
    cluster = find_cluster(one.deployer for one in looks if isinstance(one.deployer, PoolTarget))
    if cluster is not None:
        return cluster.lease(fleet, "").find_holder(now_s)
    for look in looks:
        if look.deployer is None and look.target == KubernetesDeployer.name:
            raise DeployError(look.error or "it cannot be reached", kind="unreachable")
    try:
        lease = home.lease.read()
    except InputError:
        return None
    if lease is None or now_s >= lease.ends_s or home.has_dead_holder(lease):
        return None
    return lease.holder


def _find_errors(
    record: FleetRecord, looks: tuple[TargetLook, ...], events: list[HistoryEvent]
) -> tuple[str, ...]:
    found = [f"{look.target}: {look.error}" for look in looks if look.error is not None]
    entrance = record.entrance
    if record.up and entrance is not None:
        for name, daemon in (("hub", entrance.hub), ("gateway", entrance.gateway)):
            if daemon is not None and not daemon.is_alive:
                found.append(f"the {name} has died; `atoll up` or `atoll operate` starts it anew")
    last = next((event for event in reversed(events) if event.kind == "failure"), None)
    after = [] if last is None else events[events.index(last) + 1 :]
    # What was started since shows that somebody has got past it.
    if last is not None and not any(event.kind == "start" for event in after):
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(last.at_s))
        about = f"{last.instance}: " if last.instance and last.instance not in last.text else ""
        found.append(f"{when} {about}{' '.join(last.text.split())}")
    return tuple(dict.fromkeys(found))


async def _ask_gateways(
    record: FleetRecord,
) -> tuple[dict[str, Any] | None, tuple[ServiceRow, ...]]:
    """Return what a gateway says of itself and all of traffic; None and nothing where none answers."""
    answers = await asyncio.gather(*map(_ask_gateway, list_gateways(record)))
    found = [answer for answer in answers if answer is not None]
    if not found:
        return None, ()
    pages = [page for _, page in found if page is not None]
    rows = []
    names = {name: each.names for name, each in record.weights.items()}
    names |= {name: (name,) for name in record.parts}
    for service, asked in names.items() if pages else ():
        windows = [
            page.models[name].five_minutes
            for page in pages
            for name in asked
            if name in page.models
        ]
        rows.append(
            ServiceRow(
                service,
                sum(window.arrivals / window.seconds for window in windows),
                sum(window.judged for window in windows),
                sum(window.kept for window in windows),
            )
        )
    return found[0][0], tuple(rows)


async def _ask_gateway(address: GatewayAddress) -> tuple[Any, TrafficPage | None] | None:
    try:
        status, traffic = [
            await ask_gateway(address, "GET", page, None) for page in ("/atoll/v1/status", TRAFFIC)
        ]
        if status.status != 200:
            return None
        said = None if traffic.status != 200 else TrafficPage.from_json(traffic.body)
        return json.loads(status.body), said
    except (AtollError, ValueError):
        return None
