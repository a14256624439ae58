"""Status of an instance from a cluster's objects: its state, since when, and why in one line."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from atoll.core.errors import InputError, shorten
from atoll.deploy.kubernetes.kube_lease import read_time_s
from atoll.deploy.kubernetes.kube_settings import KubernetesSettings
from atoll.deploy.kubernetes.manifests import INSTANCE, READY_S
from atoll.deploy.kubernetes.worker_group import is_group
from atoll.deploy.labels import Labels
from atoll.deploy.target import FailureKind, InstanceState, InstanceStatus
from atoll.plan.plan import Instance

Json = Mapping[str, Any]

IMAGE_FAULTS = ("ImagePullBackOff", "ErrImageNeverPull", "InvalidImageName", "ImageInspectError")
SETTINGS_FAULTS = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError")
MAX_CRASHES = 2
FROM_BEST_TO_WORST: tuple[InstanceState, ...] = ("ready", "starting", "draining", "failed")
MAX_REASON_CHARACTERS = 200


@dataclass(frozen=True, slots=True)
class PodSight:
    """A pod's part in the state of its instance."""

    state: InstanceState
    since_s: float
    reason: str = ""
    kind: FailureKind | None = None
    ends_s: float | None = None


@dataclass(frozen=True, slots=True)
class WorkloadParts:
    """The objects of one instance: the ConfigMap that owns the others, sets, pods, and warnings by set."""

    anchor: Json
    labels: Labels
    sets: Sequence[Json]
    pods: Sequence[Json]
    warnings: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class SeenMachines:
    """Machines that are well (None: nobody may look), and since when others want some of them empty.

    `grows`: the cluster makes more of them when they are asked for.
    """

    well: frozenset[str] | None = None
    cordoned: Mapping[str, float] = field(default_factory=dict)
    grows: bool = False


def judge_instance(
    parts: WorkloadParts,
    settings: KubernetesSettings,
    now_s: float,
    machines: SeenMachines | None = None,
    starting_s: float | None = None,
) -> InstanceStatus:
    """Return how an instance stands: as well as the worst of its nodes.

    On a machine that somebody wants empty it ends once another could be ready, and its streams done: until
    then evictions wait, unless the settings let them pass. `starting_s` is since when it is known to start.
    """
    machines = machines or SeenMachines()
    meta = parts.anchor["metadata"]
    hosts = tuple(sorted({p["spec"]["nodeName"] for p in parts.pods if p["spec"].get("nodeName")}))
    seen = [
        *_missing(parts),
        *(judge_pod(pod, settings, now_s, machines) for pod in parts.pods),
    ]
    deleted = meta.get("deletionTimestamp")
    if deleted is not None:
        since_s = read_time_s(deleted)
        worst = PodSight("draining", since_s, "its streams end", ends_s=since_s + settings.drain_s)
    else:
        worst = max(seen, key=lambda s: (FROM_BEST_TO_WORST.index(s.state), s.since_s, s.reason))
        worst = _limit_start(worst, parts, now_s, starting_s)
    ends = [sight.ends_s for sight in (worst, *seen) if sight.ends_s is not None]
    reason = worst.reason
    leaving = sorted(set(hosts) & set(machines.cordoned))
    if leaving and deleted is None:
        given_s = max(settings.drain_s, 0 if settings.evictable else _allowed_s(parts, 0.0))
        ends += [machines.cordoned[host] + given_s for host in leaving]
        reason = reason or f"machine {leaving[0]} is cordoned"
    return InstanceStatus(
        handle=meta["name"],
        labels=parts.labels,
        state=worst.state,
        since_s=worst.since_s,
        ends_s=min(ends) if ends else None,
        reason=shorten(" ".join(reason.split()), MAX_REASON_CHARACTERS),
        kind=worst.kind,
        hosts=hosts,
        instance=_read_instance(parts.anchor),
        unfinished=deleted is None and len(parts.sets) < count_sets(parts.anchor),
        leave=bool(leaving) and deleted is None,
    )


def _read_instance(anchor: Json) -> Instance | None:
    try:
        return Instance.from_json((anchor.get("data") or {})[INSTANCE])
    except (KeyError, TypeError, InputError):
        return None


def judge_pod(
    pod: Json, settings: KubernetesSettings, now_s: float, machines: SeenMachines
) -> PodSight:
    """Return what a pod's conditions and its container's state come to."""
    meta, status = pod["metadata"], pod.get("status") or {}
    began_s = read_time_s(meta.get("creationTimestamp"))
    if meta.get("deletionTimestamp") is not None:
        # For a pod this is when its grace ends, not when it was asked to go.
        ends_s = read_time_s(meta["deletionTimestamp"])
        since_s = ends_s - float(meta.get("deletionGracePeriodSeconds") or 0)
        why = _condition(status, "DisruptionTarget").get("message") or "its pod is being taken away"
        return PodSight("draining", since_s, str(why), ends_s=ends_s)
    if status.get("phase") in ("Failed", "Succeeded"):
        why = (
            f"{status.get('reason') or status['phase']}: {status.get('message') or 'its pod ended'}"
        )
        return PodSight("failed", began_s, why, "ended")
    for container in status.get("containerStatuses") or ():
        fault = _judge_container(container, began_s)
        if fault is not None:
            return fault
    scheduled = _condition(status, "PodScheduled")
    if scheduled.get("status") == "False":
        max_s = max(settings.schedule_s, settings.scale_up_s if machines.grows else 0.0)
        return _judge_waiting(scheduled, began_s, max_s, now_s)
    ready = _condition(status, "Ready")
    since_s = max(began_s, read_time_s(ready.get("lastTransitionTime")))
    if ready.get("status") == "True":
        return PodSight("ready", since_s)
    host = pod["spec"].get("nodeName", "?")
    silent = ready.get("status") == "Unknown" or ready.get("reason") in ("NodeLost", "NodeNotReady")
    # Of a machine that died, its pod's condition is often False and gives no reason.
    gone = machines.well is not None and host != "?" and host not in machines.well
    if silent or gone:
        # No second pod starts while the machine may still run this one.
        return PodSight("failed", since_s, f"machine {host} does not answer", "ended")
    return PodSight("starting", since_s, str(ready.get("message") or "its engine is starting"))


def _judge_container(container: Json, began_s: float) -> PodSight | None:
    waiting = (container.get("state") or {}).get("waiting") or {}
    ended = (container.get("lastState") or {}).get("terminated") or {}
    ended = (container.get("state") or {}).get("terminated") or ended
    why, said = str(waiting.get("reason", "")), str(waiting.get("message") or "")
    since_s = max(began_s, read_time_s(ended.get("finishedAt")))
    if why in IMAGE_FAULTS:
        return PodSight("failed", began_s, f"{why}: {said or container.get('image', '')}", "image")
    if why in SETTINGS_FAULTS:
        return PodSight("failed", began_s, f"{why}: {said}", "settings")
    if ended.get("reason") == "OOMKilled" and not container.get("ready"):
        return PodSight("failed", since_s, "OOMKilled: its engine ran out of host memory", "memory")
    if why == "CrashLoopBackOff":
        words = str(ended.get("message") or "").strip().rpartition("\n")[2]
        reason = f"its engine ended with code {ended.get('exitCode', '?')}"
        reason += f": {words}" if words else ""
        crashes = int(container.get("restartCount") or 0)
        if crashes >= MAX_CRASHES:
            return PodSight("failed", since_s, f"CrashLoopBackOff: {reason}", "settings")
        return PodSight("starting", since_s, reason)
    return None


def _judge_waiting(scheduled: Json, began_s: float, max_s: float, now_s: float) -> PodSight:
    """A pod without a machine: one may be on its way, so it is given some time."""
    since_s = max(began_s, read_time_s(scheduled.get("lastTransitionTime")))
    reason = f"{scheduled.get('reason', 'Unschedulable')}: {scheduled.get('message', 'no machine')}"
    if now_s - since_s > max_s:
        return PodSight("failed", since_s, reason, "capacity")
    return PodSight("starting", since_s, reason)


def _missing(parts: WorkloadParts) -> list[PodSight]:
    """Return what can be said of nodes that have no pod, or not even a set."""
    began_s = read_time_s(parts.anchor["metadata"].get("creationTimestamp"))
    nodes = read_count(parts.anchor)
    seen = []
    if is_group(parts.anchor):
        name = parts.anchor["metadata"]["name"]
        refused = next(
            (parts.warnings[n] for n in (name, f"{name}-0") if n in parts.warnings), None
        )
        if len(parts.pods) < nodes and refused is None:
            seen.append(PodSight("starting", began_s, f"{len(parts.pods)} of {nodes} pods"))
        elif len(parts.pods) < nodes:
            seen.append(_judge_refusal(str(refused), began_s))
        return seen
    if len(parts.sets) < nodes:
        seen.append(PodSight("starting", began_s, f"{len(parts.sets)} of {nodes} nodes applied"))
    owned = {
        reference["name"]
        for pod in parts.pods
        for reference in pod["metadata"].get("ownerReferences") or ()
    }
    for name in sorted({s["metadata"]["name"] for s in parts.sets} - owned):
        warning = parts.warnings.get(name)
        if warning is None:
            seen.append(PodSight("starting", began_s, "no pod yet"))
        else:
            seen.append(_judge_refusal(warning, began_s))
    return seen


def _judge_refusal(warning: str, began_s: float) -> PodSight:
    # The code is the same for everything that forbids a pod; the text alone tells.
    return PodSight("failed", began_s, warning, "quota" if "quota" in warning else "settings")


def _limit_start(
    worst: PodSight, parts: WorkloadParts, now_s: float, starting_s: float | None
) -> PodSight:
    if worst.state != "starting":
        return worst
    since_s = worst.since_s if starting_s is None else min(worst.since_s, starting_s)
    allowed_s = _allowed_s(parts, math.inf)
    if now_s - since_s <= allowed_s:
        return worst
    reason = f"not ready after {allowed_s:g} s: {worst.reason}"
    return PodSight("failed", since_s, reason, "settings")


def _allowed_s(parts: WorkloadParts, otherwise: float) -> float:
    """Return how long an instance may take to start; somebody may have taken that away, or changed it."""
    try:
        return float((parts.anchor["metadata"].get("annotations") or {})[READY_S])
    except (KeyError, ValueError):
        return otherwise


def read_count(anchor: Json) -> int:
    """Return how many nodes an instance has: 1 where that is damaged."""
    try:
        return int((anchor.get("data") or {}).get("nodes", 1))
    except ValueError:
        return 1


def count_sets(anchor: Json) -> int:
    """Return how many sets an instance has: one for each node, or one in all."""
    return 1 if is_group(anchor) else read_count(anchor)


def _condition(status: Json, name: str) -> Json:
    found = (c for c in status.get("conditions") or () if c.get("type") == name)
    return next(found, {})
