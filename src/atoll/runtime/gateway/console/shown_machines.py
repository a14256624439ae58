"""Nodes and backends as people see them: what they are, what they run, how they fare."""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from atoll.fabric.registry.measured import unpack_measured
from atoll.runtime.gateway.console.view import GatewayView
from atoll.runtime.pool.backend_metadata import STAGES, BackendStage, read_stages
from atoll.runtime.pool.member import FLEET, INSTANCE, Member

_GPUS = re.compile(r"(?:(\d{1,4})x)?(.+)")
_PRICES = ("usd_per_hour", "price")
_INSTANCE_LABEL = "atoll.instance"
_FLEET_LABEL = "atoll.fleet"
_PEER_STATES = {"join": "starting", "serving": "up", "down": "down", "left": "left"}


class ShownGpus(msgspec.Struct, frozen=True):
    """Equal GPUs of a machine; memory in bytes of one of them, null where nobody says."""

    type: str
    count: int
    memory_bytes: int | None = None


class ShownService(msgspec.Struct, frozen=True):
    """A model that a machine serves, or the layers [start, end) of it that it holds."""

    model: str
    layers: tuple[int, int] | None = None
    precision: str | None = None
    context: int | None = None


class ShownLoad(msgspec.Struct, frozen=True):
    """How busy a machine is: requests, and the share of its cache in use."""

    running: int = 0
    waiting: int = 0
    capacity: int | None = None
    kv_share: float | None = None
    gpu_share: float | None = None
    """Of the time that its GPUs compute."""
    memory_share: float | None = None
    """Of the memory of its GPUs in use."""


class ShownMachine(msgspec.Struct, frozen=True, kw_only=True):
    """A machine as `docs/reference/http.md` has it."""

    id: str
    name: str
    role: str
    provider: str | None = None
    verified: bool = False
    region: str | None = None
    site: str | None = None
    gpus: tuple[ShownGpus, ...] = ()
    cpus: int | None = None
    memory_bytes: int | None = None
    services: tuple[ShownService, ...] = ()
    load: ShownLoad = ShownLoad()
    state: str
    reason: str = ""
    since_s: float | None = None
    ends_s: float | None = None
    usd_per_hour: float | None = None
    engine: str | None = None
    stability: str | None = None
    requests: int | None = None
    failures: int | None = None
    instance: str | None = None
    fleet: str | None = None
    drained: bool = False
    can_drain: bool = False
    holds: str | None = None
    """Parts of models that are no layers."""
    planned: str | None = None
    """The type of node that a plan has for it, where this machine stands in for one."""
    measured: dict[str, Any] | None = None
    """What `atoll join --measure` found."""


def list_machines(view: GatewayView) -> tuple[ShownMachine, ...]:
    """Return every machine: backends of the pool, stages behind them, nodes and hubs of the fabric."""
    now_s = time.time()
    fabric: Mapping[str, Any] = {} if view.federation is None else view.federation.snapshot()
    nodes = {node["sid"]: node for node in fabric.get("nodes", ())}
    machines: list[ShownMachine] = []
    for member in view.pool.members.values():
        node = nodes.pop(member.name, None)
        if node is not None:
            machines.append(_show_node(node, member, now_s))
            continue
        machines.append(_show_backend(member))
        stages = read_stages(member.backend.metadata.get(STAGES, ""))
        machines += [_show_stage(stage, member) for stage in stages]
    # Gateways and operators of the fabric serve nothing.
    served = [node for node in nodes.values() if node["role"] == "worker"]
    machines += [_show_node(node, None, now_s) for node in (*served, *fabric.get("hubs", ()))]
    return tuple(machines)


def count_machines(machines: Iterable[ShownMachine]) -> tuple[int, int]:
    """Return how many machines are up, and how many there are.

    Hubs serve nothing, who has left is no machine here any more, and a backend whose stages are listed is the
    instance that those make up together.
    """
    shown = tuple(machine for machine in machines if machine.state != "left")
    staged = {(m.fleet, m.instance) for m in shown if m.role == "node" and not m.can_drain}
    counted = [
        m
        for m in shown
        if m.role == "node"
        or (m.role == "backend" and (m.instance is None or (m.fleet, m.instance) not in staged))
    ]
    return sum(m.state == "up" for m in counted), len(counted)


def _show_backend(member: Member) -> ShownMachine:
    """Return a backend that a person or a fleet of this machine named."""
    backend = member.backend
    metadata = backend.metadata
    return ShownMachine(
        id=member.name,
        name=member.name,
        role="backend",
        region=metadata.get("region"),
        site=metadata.get("site"),
        gpus=_gpus_of(metadata.get("gpus", "")),
        cpus=_whole(metadata.get("cores")),
        services=tuple(_service_of(member, model) for model in backend.models),
        load=ShownLoad(member.inflight + member.elsewhere, 0, member.max_inflight),
        state=state_of(member),
        reason=reason_of(member),
        since_s=member.since_s or None,
        ends_s=member.ends_s,
        usd_per_hour=price_of(member),
        engine=metadata.get("engine") or backend.kind,
        stability=metadata.get("stability"),
        requests=member.requests,
        failures=member.failures,
        instance=metadata.get(INSTANCE),
        fleet=metadata.get(FLEET),
        drained=member.drained,
        can_drain=True,
    )


def _show_stage(stage: BackendStage, member: Member) -> ShownMachine:
    """Return a process behind a backend, which fares as that does as far as is known here."""
    metadata = member.backend.metadata
    model, precision = next(iter(member.backend.models), ""), metadata.get("precision")
    part = ShownService(model, stage.layers, precision, _whole(metadata.get("context")))
    return ShownMachine(
        id=stage.name,
        name=stage.name,
        role="node",
        services=() if stage.layers is None else (part,),
        cpus=stage.cores or None,
        state=state_of(member),
        reason=reason_of(member),
        since_s=member.since_s or None,
        engine=member.backend.kind,
        instance=stage.instance,
        fleet=metadata.get(FLEET),
        drained=member.drained,
        holds=stage.holds or None,
        planned=stage.planned or None,
    )


def _show_node(node: dict[str, Any], member: Member | None, now_s: float) -> ShownMachine:
    """Return a node of the fabric; one that no requests are sent to has no member."""
    hardware, load, labels = node["hardware"], node["load"], node["labels"]
    running = 0 if member is None else member.inflight
    state, reason = _state_of_node(node)
    if member is not None:
        state, reason = state_of(member), reason_of(member)
    shown = ShownLoad(running, 0, node["max_inflight"])
    if load is not None:
        shown = ShownLoad(
            max(running, load["running"]),
            load["waiting"],
            load["capacity"],
            load["kv_used"],
            load.get("gpu_used"),
            load.get("memory_used"),
        )
    return ShownMachine(
        id=node["sid"],
        name=node["name"],
        role="hub" if node["role"] == "hub" else "node",
        provider=node["provider"] or None,
        verified=node["verified"],
        region=node["region"] or None,
        site=node["site"] or None,
        gpus=tuple(ShownGpus(g["type"], g["count"], g["memory_bytes"]) for g in hardware["gpus"]),
        cpus=hardware["cpus"] or None,
        memory_bytes=hardware["memory_bytes"] or None,
        services=tuple(
            ShownService(
                s["model"],
                None if s["layers"] is None else (s["layers"][0], s["layers"][1]),
                _known(s["precision"]),
                s["context"],
            )
            for s in node["services"]
        ),
        load=shown,
        state=state,
        reason=reason,
        since_s=round(now_s - node["for_s"], 3),
        ends_s=node["ends_s"],
        usd_per_hour=node["price_usd_per_hour"],
        engine=f"{node['engine']} {node['engine_version']}".strip() or None,
        stability=node["stability"],
        requests=None if member is None else member.requests,
        failures=None if member is None else member.failures,
        instance=labels.get(_INSTANCE_LABEL) or None,
        fleet=labels.get(_FLEET_LABEL) or None,
        drained=member is not None and member.drained,
        can_drain=member is not None,
        measured=unpack_measured(labels),
    )


def _state_of_node(node: dict[str, Any]) -> tuple[str, str]:
    """Return how a node stands that no requests are sent to, and why."""
    state = _PEER_STATES.get(node["state"], node["state"])
    if state == "up" and not node["alive"]:
        return "down", "its token is gone"
    return state, node["unused_because"] or ""


def state_of(member: Member) -> str:
    """Return how a member of the pool stands: `draining` while something still runs there."""
    state = member.state
    return "draining" if state == "drained" and member.inflight else state


def reason_of(member: Member) -> str:
    """Return why a member of the pool does not serve; nothing where it does."""
    return "" if member.state == "up" else member.reason


def price_of(member: Member) -> float | None:
    """Return what a backend costs an hour (USD), if its metadata say so."""
    for name in _PRICES:
        try:
            price = float(member.backend.metadata.get(name, ""))
        except ValueError:
            continue
        if math.isfinite(price) and price >= 0.0:
            return price
    return None


def _service_of(member: Member, model: str) -> ShownService:
    offer = member.offer(model)
    return ShownService(model, None, _known(offer.precision), offer.context)


def _gpus_of(text: str) -> tuple[ShownGpus, ...]:
    """Return GPUs that are written as "2xA100,L4" or as "L4,L4"."""
    counts: Counter[str] = Counter()
    for part in text.split(","):
        match = _GPUS.fullmatch(part.strip())
        if match is not None:
            counts[match[2].strip()] += int(match[1] or 1)
    return tuple(ShownGpus(kind, count) for kind, count in counts.items() if count)


def _whole(text: str | None) -> int | None:
    return int(text) if text and text.isascii() and text.isdigit() and len(text) < 13 else None


def _known(precision: str) -> str | None:
    return None if precision == "unknown" else precision


class ShownStage(msgspec.Struct, frozen=True):
    """A machine of a pipeline with its layers [start, end)."""

    machine: str
    layers: tuple[int, int]


class ShownPipeline(msgspec.Struct, frozen=True):
    """The machines that hold one instance of a model, and how many layers they have together."""

    model: str
    instance: str
    layers: int
    stages: tuple[ShownStage, ...]


def find_pipelines(machines: Iterable[ShownMachine]) -> tuple[ShownPipeline, ...]:
    """Return the pipelines over machines that say which layers they hold; an instance is one of its fleet."""
    found: dict[tuple[str, str, str], list[ShownStage]] = {}
    for machine in machines:
        for service in machine.services:
            if service.layers is not None and machine.instance is not None:
                key = (machine.fleet or "", machine.instance, service.model)
                found.setdefault(key, []).append(ShownStage(machine.id, service.layers))
    return tuple(
        ShownPipeline(
            model,
            instance,
            max(stage.layers[1] for stage in stages),
            tuple(sorted(stages, key=lambda stage: (stage.layers, stage.machine))),
        )
        for (_, instance, model), stages in found.items()
    )
