"""Machines of the API in this process: which one a pod gets, and whether budgets let it be evicted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Json = dict[str, Any]

_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"
_HOST = "kubernetes.io/hostname"


def choose_machine(pod: Json, nodes: Sequence[Json], pods: Sequence[Json]) -> str | None:
    """Return the machine that the scheduler gives a pod, None where none takes it.

    As it weighs by default: what pods and machines prefer counts twice as much as that the least is held.
    """
    scores = {}
    for node in nodes:
        name = node["metadata"]["name"]
        there = [other for other in pods if other["spec"].get("nodeName") == name]
        has = int(node["status"]["allocatable"].get("nvidia.com/gpu", 0))
        free = has - sum(map(count_gpus, there))
        if free >= count_gpus(pod) and _may_stand(pod, node):
            least = free / has if has else 1.0
            scores[name] = 2 * _like_machine(pod, node) + 2 * _like_pods(pod, there) + 100 * least
    return max(scores, key=lambda name: scores[name]) if scores else None


def may_evict(pod: Json, budgets: Sequence[Json], pods: Sequence[Json]) -> bool:
    """Return whether all budgets that select a pod let it go; one that is not ready may."""
    for budget in budgets:
        spec = budget["spec"]
        labels = spec["selector"]["matchLabels"]
        chosen = [each for each in pods if _has(each, labels)]
        if pod not in chosen:
            continue
        if not is_ready(pod) and spec.get("unhealthyPodEvictionPolicy") == "AlwaysAllow":
            continue
        unready = sum(not is_ready(each) for each in chosen)
        if unready >= spec["maxUnavailable"]:
            return False
    return True


def is_ready(pod: Json) -> bool:
    """Return whether a pod's engine answers, as its machine says."""
    conditions = pod.get("status", {}).get("conditions", ())
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


def count_gpus(pod: Json) -> int:
    """Return how many GPUs a pod holds."""
    limits = pod["spec"]["containers"][0].get("resources", {}).get("limits", {})
    return int(limits.get("nvidia.com/gpu", 0))


def _has(made: Json, labels: Mapping[str, str]) -> bool:
    has = made["metadata"].get("labels") or {}
    return all(has.get(key) == value for key, value in labels.items())


def _like_machine(pod: Json, node: Json) -> int:
    liked = pod["spec"].get("affinity", {}).get("nodeAffinity", {}).get(_PREFERRED, ())
    labels = node["metadata"]["labels"]
    return sum(
        each["weight"]
        for each in liked
        if all(_matches(rule, labels) for rule in each["preference"]["matchExpressions"])
    )


def _like_pods(pod: Json, there: Sequence[Json]) -> int:
    liked = pod["spec"].get("affinity", {}).get("podAffinity", {}).get(_PREFERRED, ())
    terms = ((each["weight"], each["podAffinityTerm"]) for each in liked)
    return sum(
        weight
        for weight, term in terms
        if term["topologyKey"] == _HOST
        and any(_has(other, term["labelSelector"]["matchLabels"]) for other in there)
    )


def _may_stand(pod: Json, node: Json) -> bool:
    if node["spec"].get("unschedulable"):
        return False
    if any(each["status"] != "True" for each in node["status"].get("conditions", ())):
        return False
    tolerated = {t["key"] for t in pod["spec"].get("tolerations", ())}
    if any(taint["key"] not in tolerated for taint in node["spec"].get("taints", ())):
        return False
    affinity = pod["spec"].get("affinity", {}).get("nodeAffinity", {})
    required = affinity.get(_REQUIRED)
    if required is None:
        return True
    labels = node["metadata"]["labels"]
    return any(
        all(_matches(rule, labels) for rule in term["matchExpressions"])
        for term in required["nodeSelectorTerms"]
    )


def _matches(rule: Json, labels: Mapping[str, str]) -> bool:
    there = labels.get(rule["key"])
    if rule["operator"] == "In":
        return there in rule["values"]
    if rule["operator"] == "NotIn":
        return there not in rule["values"]
    assert rule["operator"] == "DoesNotExist"
    return there is None
